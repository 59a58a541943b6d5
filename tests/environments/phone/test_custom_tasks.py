"""Tasks that users describe: checks, starts, files of descriptions, and what is refused before anything runs."""

import json
from pathlib import Path
from typing import Any

import pytest

from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.query_values import PHONE_QUERIES
from cua_rl.task_loader import TaskSet, load_tasks, require_disjoint
from cua_rl.tasks.readiness import prepare
from cua_rl.types.actions import Click
from cua_rl.types.errors import ConfigError, TaskError
from tests.fakes import FakeDevice

WIFI = {"query": "wifi_enabled", "expected": "true"}
REAL_PHONE = DeviceAbilities(
    name="a real phone",
    has_shell=True,
    is_seeded=False,
    queries={name: PHONE_QUERIES[name] for name in ("wifi_enabled", "file_exists")},
)


def task(check: Any = WIFI, **more: Any) -> dict[str, Any]:
    return {"instruction": "Do it.", "max_turns": 6, "check": check, **more}


def load(*tasks: Any, device: DeviceAbilities | None = None) -> TaskSet:
    sources = {"source_type": "custom", "custom_tasks": list(tasks)}
    if device is None:
        return load_tasks(sources, seed=0, split="train")
    return load_tasks(sources, seed=0, split="train", device=device)


async def tap(phone: SimulatedPhone, label: str) -> None:
    screen = build_screen(phone.state)
    element = next(item for item in (*screen.fixed, *screen.content) if item.label == label and item.is_tappable)
    x, y = element.rect.centre
    await phone.execute(Click(x=x, y=y))


async def test_a_described_task_runs_on_a_phone_and_is_judged_by_its_state() -> None:
    tasks = load(task(instruction="Turn on Wi-Fi.", start={"off": ["wifi"], "first_rows": ["wifi"]}))
    for instance in tasks.batch(0, 4):
        phone = make_simulated_phone(instance)

        assert (instance.task_id, instance.instruction) == ("custom_turn_on_wi_fi", "Turn on Wi-Fi.")
        assert (instance.max_turns, instance.category, instance.difficulty) == (6, "app", "medium")
        assert not (await instance.validate(phone, "I turned it on.")).success
        await tap(phone, "Settings")
        await tap(phone, "Wi-Fi")
        assert (await instance.validate(phone, None)).success


@pytest.mark.parametrize(
    ("check", "untouched"),
    [
        (WIFI, "false"),
        ({"query": "airplane_mode", "expected": False}, "true"),
        ({"query": "brightness_level", "expected": 255}, None),
        ({"query": "screen_timeout", "expected": 300000}, None),
        ({"query": "media_volume", "expected": 7}, None),
        ({"query": "current_app", "expected": "com.android.launcher3"}, None),
        ({"query": "note_texts", "expected": "Buy a submarine", "how": "includes"}, None),
        ({"query": "battery_level", "how": "told"}, None),
    ],
)
async def test_without_a_start_the_phone_begins_so_that_something_is_left_to_do(
    check: Any, untouched: str | None
) -> None:
    for instance in load(task(check)).batch(0, 12):
        validation = await instance.validate(make_simulated_phone(instance), None)

        assert not validation.success
        assert untouched in (None, validation.actual)


async def test_a_question_is_answered_in_the_final_message() -> None:
    (instance,) = load(task({"query": "battery_level", "how": "told"})).batch(0, 1)
    phone = make_simulated_phone(instance)
    level = await phone.query("battery_level")

    assert (await instance.validate(phone, f"The battery is at {level}%")).success
    assert not (await instance.validate(phone, "The battery is at 1000%")).success


def test_described_tasks_are_filtered_like_others() -> None:
    tasks = [
        task(task_id="a", category="settings", tags=["x"]),
        task(task_id="b", difficulty="hard"),
        task(task_id="c"),
    ]

    def ids(**filters: Any) -> tuple[str, ...]:
        return load_tasks({"source_type": "custom", "custom_tasks": tasks, **filters}, seed=0, split="train").task_ids

    assert ids() == ("a", "b", "c")
    assert ids(category="settings") == ids(tags="x") == ids(task_names="a") == ("a",)
    assert ids(difficulty="hard") == ("b",)
    assert len(ids(limit=2)) == 2


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_file_may_mix_ids_and_descriptions(tmp_path: Path, suffix: str) -> None:
    entries: list[Any] = ["train_01_open_settings", task(task_id="mine")]
    listing = tmp_path / f"tasks{suffix}"
    listing.write_text(json.dumps(entries) if suffix == ".json" else "\n".join(map(json.dumps, entries)))

    loaded = load_tasks({"source_type": "file", "file_path": str(listing)}, seed=0, split="train")

    assert loaded.task_ids == ("train_01_open_settings", "mine")


def test_the_same_description_twice_is_one_task_and_loads_equal() -> None:
    assert load(task(), task()).task_ids == ("custom_do_it",)
    assert load(task()) == load(task())


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ("Enable WiFi", "description alone cannot be validated"),
        ("Enable WiFi", "let a judge decide .judge.base_url=... judge.model=..."),
        ({"instruction": "Enable WiFi"}, "expected a check in custom task 1"),
        ({"check": WIFI}, "expected an instruction in custom task 1"),
        (3, "as a dictionary such as"),
        (task(max_turns=0), "max_turns as a whole number of at least 1"),
        (task(chek=WIFI), "did you mean 'check'"),
        (task(category="setings"), "did you mean 'settings'"),
        (task(task_id="train_01_open_settings"), "a demo task; rename it"),
        (task({"query": "wify_enabled", "expected": "true"}), "did you mean 'wifi_enabled'"),
        (task({"query": "wifi_enabled"}), "add expected"),
        (task({"query": "wifi_enabled", "expected": "yes"}), "expected 'true' or 'false' from wifi_enabled"),
        (task({"expected": "true"}), "expected a query"),
        (task({**WIFI, "how": "contains"}), "known how"),
        (task({**WIFI, "how": "includes"}), "answers with a list"),
        (task({**WIFI, "how": "told"}), "leave out expected"),
        (task(start={}), r"wifi_enabled == true on \d+ of 24 phones"),
        (task(start={"on": ["wifi"]}), "on 24 of 24 phones"),
        (task(start={"off": ["wify"]}), "did you mean 'wifi'"),
        (task(start={"off": ["wifi"], "on": ["wifi"]}), "either on or off"),
        (task(start={"of": ["wifi"]}), "did you mean 'off'"),
        (task(start={"app": "tetris"}), "known app"),
        (task(start={"home_page": "1"}), "home_page as a whole number"),
        (task(start={"second_page": ["settings"]}), "each app once"),
        (
            task(start={"first_rows": ["cellar"], "off": ["wifi"]}),
            "known row of Settings in the start of custom task 1",
        ),
        (task(start={"first_rows": ["wifi"], "hidden_rows": ["wifi"]}), "others as hidden_rows"),
        (task(start={"brightness_level": 999}), "brightness_level from 1 to 255"),
        (task(start={"media_volume": 99}), "media_volume from 0 to 15"),
        (task(start={"home_page": 7}), "home_page from 0 to 1"),
        (task(start={"not_screen_timeout_ms": 5}), "not_screen_timeout_ms from 15000 to 600000"),
        (task(start={"system": {"extra_rows": ["langage"]}}), "did you mean 'language'"),
        (task(start={"system": {"store_app": "instgram"}}), "did you mean 'instagram'"),
        (task(start={"system": {"store_app": "clock"}}), "known app of the store"),
        (task(start={"system": {"running_app": "crome"}}), "did you mean 'chrome'"),
        (task(start={"system": {"on": ["usb_debuging"]}}), "did you mean 'usb_debugging'"),
        (task(start={"system": {"on": ["usb_debugging"], "off": ["usb_debugging"]}}), "either on or off"),
        (task(start={"system": {"not_wallpaper": 17}}), "not_wallpaper from 0 to 5"),
        (task(start={"apps": {"alarm": "7:00"}}), "alarm as a time"),
        (task(start={"apps": {"off_home": ["maap"]}}), "did you mean 'maps'"),
        (task(start={"apps": {"home_folder": ["Fun", "maps", "weathr"]}}), "did you mean 'weather'"),
        (task(start={"apps": {"num_photos": -3}}), "num_photos from 0"),
        (task(start={"apps": {"contacts": [{"name": "Zoe"}]}}), "expected number in contacts"),
    ],
)
def test_a_description_that_is_no_task_is_refused_with_advice(described: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(described)


def test_two_tasks_with_one_id_are_refused() -> None:
    with pytest.raises(ConfigError, match="'custom_do_it'; rename one"):
        load(task(), task({"query": "bluetooth_enabled", "expected": "true"}))


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tasks.jsonl", '"train_01_open_settings"\n{"instruction": ', "JSON in line 2"),
        ("tasks.json", '{"instruction": "x"}', "expected a list of tasks"),
        ("tasks.json", '["train_01_open_setings"]', "did you mean 'train_01_open_settings'"),
        ("tasks.txt", "Open the Settings app\n", "let a judge decide"),
        ("tasks.json", '["Open the Settings app"]', "let a judge decide"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_place(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(ConfigError, match=says):
        load_tasks({"source_type": "file", "file_path": str(tmp_path / name)}, seed=0, split="train")


def test_on_a_real_phone_queries_are_checked_by_name_and_starts_are_refused() -> None:
    there = load(task({"query": "file_exists:/sdcard/a", "expected": True}), device=REAL_PHONE)

    assert there.batch(0, 1)[0].world is None
    with pytest.raises(ConfigError, match="did you mean 'wifi_enabled'"):
        load(task({"query": "wify_enabled", "expected": "true"}), device=REAL_PHONE)
    with pytest.raises(ConfigError, match="expected start only on devices made from a seed"):
        load(task(start={"off": ["wifi"]}), device=REAL_PHONE)


def test_what_is_the_same_for_every_seed_is_never_trained_and_evaluated() -> None:
    def both(device: DeviceAbilities | None) -> list[TaskSet]:
        more = {} if device is None else {"device": device}
        sources = {"source_type": "custom", "custom_tasks": [task()]}
        return [load_tasks(sources, seed=0, split=split, **more) for split in ("train", "eval")]

    require_disjoint(*both(None))
    with pytest.raises(ConfigError, match="custom_do_it"):
        require_disjoint(*both(REAL_PHONE))


async def test_on_a_device_that_lasts_the_goal_is_undone_before_the_agent_begins() -> None:
    sources = [
        {"source_type": "ids", "task_ids": "train_02_enable_wifi"},
        {"source_type": "custom", "custom_tasks": [task()]},
    ]
    for instance in load_tasks(sources, seed=0, split="train", device=REAL_PHONE).batch(0, 2):
        await prepare(instance, FakeDevice(state="false"))
        with pytest.raises(TaskError, match="'wifi_enabled' to be anything but 'true'"):
            await prepare(instance, FakeDevice(state="true"))


def test_demo_sets_lose_what_a_device_cannot_read_and_single_tasks_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    readable = load_tasks({"source_type": "demo_training", "tags": "demo"}, seed=0, split="train", device=REAL_PHONE)

    assert set(readable.task_ids) == {"train_02_enable_wifi", "train_09_disable_wifi"}
    assert "train_01_open_settings" in caplog.text
    with pytest.raises(ConfigError, match="a real phone can read, got train_01_open_settings"):
        load_tasks(
            {"source_type": "ids", "task_ids": "train_01_open_settings"}, seed=0, split="train", device=REAL_PHONE
        )


def test_with_a_judge_descriptions_alone_are_tasks(tmp_path: Path) -> None:
    described = [
        "Turn on Wi-Fi, then go back.",
        {"instruction": "Open Mail.", "max_turns": 4, "start": {"app": "clock"}},
    ]

    loaded = load_tasks(
        {"source_type": "custom", "custom_tasks": [*described, task(task_id="checked")]},
        seed=0,
        split="train",
        has_judge=True,
    )

    assert loaded.is_judged
    assert loaded.task_ids == ("custom_turn_on_wi_fi_then_go_back", "custom_open_mail", "checked")
    by_id = {instance.task_id: instance for instance in loaded.batch(0, 3)}
    wifi, mail, checked = (by_id[task_id] for task_id in loaded.task_ids)
    assert (wifi.validate, wifi.instruction, wifi.max_turns) == (None, "Turn on Wi-Fi, then go back.", 10)
    assert (mail.validate, mail.max_turns, make_simulated_phone(mail).state.app) == (None, 4, "clock")
    assert checked.validate is not None
    assert not load(task()).is_judged


def test_with_a_judge_a_text_file_may_hold_descriptions_and_ids(tmp_path: Path) -> None:
    listing = tmp_path / "tasks.txt"
    listing.write_text("# mine\ntrain_01_open_settings  # an id\n\n  Then dial #31# and hang up.\nOpen Mail.\n")

    loaded = load_tasks({"source_type": "file", "file_path": str(listing)}, seed=0, split="train", has_judge=True)

    assert loaded.task_ids == ("train_01_open_settings", "custom_then_dial_31_and_hang_up", "custom_open_mail")
    assert "Then dial #31# and hang up." in {instance.instruction for instance in loaded.batch(0, 3)}


def test_a_single_description_may_stand_alone_with_its_commas() -> None:
    sources = {"source_type": "custom", "custom_tasks": "Open Mail, then Clock."}

    assert load_tasks(sources, seed=0, split="train", has_judge=True).task_ids == ("custom_open_mail_then_clock",)


def test_descriptions_in_any_script_and_of_any_length_have_ids_of_their_own() -> None:
    described = [
        "打开设置",
        "打开邮件",
        "Open 微信",
        "Open 支付宝",
        *("Open " + "very " * 20 + end for end in ("a", "b")),
    ]

    loaded = load_tasks({"source_type": "custom", "custom_tasks": described}, seed=0, split="train", has_judge=True)

    assert len(set(loaded.task_ids)) == 6
    assert all(len(task_id) <= 67 for task_id in loaded.task_ids)


def test_a_judged_task_is_checked_like_others() -> None:
    def refused(described: Any, says: str, **more: Any) -> None:
        with pytest.raises(ConfigError, match=says):
            load_tasks(
                {"source_type": "custom", "custom_tasks": [described]}, seed=0, split="train", has_judge=True, **more
            )

    refused("", "expected an instruction")
    refused({"instruction": "x y", "max_turns": 0}, "at least 1")
    refused({"instruction": "x y", "start": {"app": "tetris"}}, "known app")
    refused({"instruction": "x y", "start": {"app": "clock"}}, "expected start only on devices", device=REAL_PHONE)
