"""Loading tasks: sources, filters, messages for mistakes, and batches that are pure functions of the step."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from cua_rl.environments.browser.page_tasks import PAGE_BROWSER
from cua_rl.environments.contract import Loading, Source
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.environments.phone.demo.phone import SIMULATOR
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.environment import SIMULATOR as SIMULATED_PHONES
from cua_rl.environments.table import SOURCES, parse_sources
from cua_rl.task_loader import TaskSources, load_tasks, require_disjoint
from cua_rl.tasks.task import Template
from cua_rl.types.errors import ConfigError

ALARMS = {"instruction": "Set it.", "check": {"query": "alarms_on", "expected": "[" * 10_000}}

DEMO = {"source_type": "demo_training", "tags": ["demo"]}  # 16 apps to open, 16 settings to switch
FIRST_TASKS = [
    ("train_85_open_maps", 908195),
    ("train_09_disable_wifi", 942538),
    ("train_56_enable_location", 733894),
    ("train_61_enable_dark_theme", 554719),
]


def test_a_dict_a_list_and_json_text_mean_the_same() -> None:
    as_dict = load_tasks(DEMO, seed=0, split="train")

    assert load_tasks([DEMO], seed=0, split="train") == as_dict
    assert load_tasks('{"source_type": "demo_training", "tags": ["demo"]}', seed=0, split="train") == as_dict
    assert load_tasks('[{"source_type": "demo_training", "tags": "demo"}]', seed=0, split="train") == as_dict


def test_filters_narrow_and_several_sources_add_up_without_repeats() -> None:
    tasks = load_tasks(
        [{**DEMO, "category": "settings"}, {**DEMO, "difficulty": "easy", "category": "app"}, DEMO],
        seed=0,
        split="train",
    )

    assert len(load_tasks({**DEMO, "category": "settings"}, seed=0, split="train").templates) == 16
    assert len(tasks.task_ids) == len(set(tasks.task_ids)) == 32


@pytest.mark.parametrize("name", ["train_02_enable_wifi", "02_enable_wifi"])
def test_a_name_picks_a_task(name: str) -> None:
    assert load_tasks({**DEMO, "task_names": name}, seed=0, split="train").task_ids == ("train_02_enable_wifi",)


def test_names_may_leave_out_set_and_number_or_be_numbers() -> None:
    picked = load_tasks({**DEMO, "task_names": [2, "open_mail"]}, seed=0, split="train")

    assert picked.task_ids == ("train_81_open_mail", "train_02_enable_wifi")


def test_lists_may_be_text_with_commas() -> None:
    ids = {"source_type": "ids", "task_ids": "train_81_open_mail, train_02_enable_wifi"}

    assert load_tasks(ids, seed=0, split="train").task_ids == ("train_81_open_mail", "train_02_enable_wifi")
    assert load_tasks({**DEMO, "tags": "demo,open_app"}, seed=0, split="train").task_ids[0] == "train_01_open_settings"


def test_seeds_and_tasks_of_a_run_stay_as_they_are() -> None:
    drawn = load_tasks(DEMO, seed=0, split="train").batch(0, 4)

    assert [(task.task_id, task.seed) for task in drawn] == FIRST_TASKS


def test_tags_reach_the_tasks_outside_the_default_sets() -> None:
    tasks = load_tasks({"source_type": "demo_all", "tags": ["page_two"]}, seed=0, split="train")

    assert set(tasks.task_ids) == {task_id for task_id, template in TEMPLATES.items() if "page_two" in template.tags}
    assert tasks.task_ids


def test_a_limit_is_a_seeded_choice() -> None:
    chosen = [load_tasks({**DEMO, "limit": 5, "seed": seed}, seed=0, split="train").task_ids for seed in (1, 1, 2)]

    assert len(chosen[0]) == 5
    assert chosen[0] == chosen[1] != chosen[2]
    assert load_tasks({**DEMO, "limit": 5}, seed=1, split="train").task_ids == chosen[0]


def test_ids_come_from_a_list_or_a_file_with_comments(tmp_path: Path) -> None:
    ids = ["train_02_enable_wifi", "train_01_open_settings"]
    listing = tmp_path / "ids.txt"
    listing.write_text(f"# my tasks\n{ids[0]}  # first\n\n{ids[1]}\n")

    assert load_tasks({"source_type": "ids", "task_ids": ids}, seed=0, split="train").task_ids == tuple(ids)
    assert load_tasks({"source_type": "file", "file_path": str(listing)}, seed=0, split="train").task_ids == tuple(ids)


@pytest.mark.parametrize(
    ("sources", "says"),
    [
        ({"source_type": "demo_traning"}, "did you mean 'demo_training'"),
        ({"source_type": "custom", "custom_tasks": ["Enable WiFi"]}, "cannot be validated"),
        (
            {"source_type": "gym", "gym_base_url": "http://localhost:5010"},
            "expected tasks that run on the embedded simulator",
        ),
        ({"source_type": "gym", "gym_base_url": "localhost"}, "expected gym_base_url as an address"),
        ({"source_type": "gym", "eval_number_range": "1..32"}, "two numbers such as '001-032'"),
        ({"source_type": "arcade"}, "choose one of 'demo_training'"),
        ({"source_type": "task_adapter"}, "add tasks_dir"),
        ({"source_type": "task_adapter", "tasks_dir": "tasks"}, "a device with a shell"),
        ({**DEMO, "train_ratio": 0.5}, "only with source_type 'task_adapter' or 'gym'"),
        ({**DEMO, "task_names": "open_setings"}, "did you mean '01_open_settings'"),
        ({"category": "settings"}, "expected source_type"),
        ({**DEMO, "categry": "settings"}, "did you mean 'category'"),
        ({"source_type": "ids", "zzzzz": 1}, "choose one of 'task_ids', "),
        ({**DEMO, "category": "setings"}, "did you mean 'settings'"),
        ({**DEMO, "difficulty": 3}, "expected difficulty as one of"),
        ({**DEMO, "limit": 0}, "at least 1, got 0"),
        ({**DEMO, "limit": True}, "got True"),
        ({**DEMO, "category": "input"}, "expected at least one task, got none"),
        ({**DEMO, "task_ids": ["train_01_open_settings"]}, "only with source_type 'ids'"),
        ({"source_type": "ids"}, "add task_ids"),
        ({"source_type": "ids", "task_ids": [1]}, "list of texts"),
        ({"source_type": "ids", "task_ids": ["train_02_enable_wify"]}, "did you mean 'train_02_enable_wifi'"),
        ({"source_type": "file", "file_path": "/nowhere/ids.txt"}, "/nowhere/ids.txt"),
        ([], "got none"),
        ([3], "got 3"),
        ("{", "as JSON"),
        ("3", "JSON object or a list"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_advice(sources: TaskSources, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tasks(sources, seed=0, split="train")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardSource(Source):
    """A source of somebody else; `colour` is not a key, because nothing reads it."""

    source_types = ("demo_all",)
    source_type: str = "demo_all"
    colour: str = "red"
    rows: str = ""

    def load(self, loading: Loading) -> Sequence[Template]:
        return [TEMPLATES[int(row)] for row in self.rows]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("x", r"load the tasks of BoardSource\(.*ValueError: invalid literal"),
        ("", r"got none of 0 from BoardSource\(.*; add tasks there"),
    ],
)
def test_a_source_whose_tasks_do_not_load_or_that_has_none_is_named(rows: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_tasks([BoardSource(rows=rows)], seed=0, split="train")


def test_a_field_that_no_reader_fills_in_is_no_key_of_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cast("dict[str, object]", SOURCES), "board", (SIMULATED_PHONES, BoardSource))

    with pytest.raises(ConfigError, match=r"expected a known .*, got 'colour'"):
        parse_sources({"source_type": "board", "colour": "blue"})


def test_an_unknown_id_in_a_file_is_refused_with_its_line(tmp_path: Path) -> None:
    listing = tmp_path / "ids.txt"
    listing.write_text("train_01_open_settings\ntrain_1_open\n")

    with pytest.raises(ConfigError, match="line 2"):
        load_tasks({"source_type": "file", "file_path": str(listing)}, seed=0, split="train")


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    tasks, again, other = (load_tasks(DEMO, seed=seed, split="train") for seed in (3, 3, 4))
    identity = [(task.task_id, task.seed) for task in tasks.batch(5, 16)]

    assert [(task.task_id, task.seed) for task in again.batch(5, 16)] == identity
    assert [(task.task_id, task.seed) for task in tasks.batch(6, 16)] != identity
    assert [(task.task_id, task.seed) for task in other.batch(5, 16)] != identity


def test_templates_come_round_equally_often_each_time_on_a_new_phone() -> None:
    tasks = load_tasks(DEMO, seed=0, split="train")
    drawn = [task for step in range(20) for task in tasks.batch(step, 16)]

    # 20 * 16 = 320 tasks of 32 templates: ten each.
    assert set(Counter(task.task_id for task in drawn).values()) == {10}
    assert len({(task.task_id, task.seed) for task in drawn}) == 320


def test_held_out_tasks_are_the_same_at_every_call_and_a_prefix_of_more() -> None:
    tasks = load_tasks({"source_type": "demo_eval", "tags": ["demo"]}, seed=0, split="eval")
    few, many = ([(task.task_id, task.seed) for task in tasks.held_out(n)] for n in (8, 64))

    assert many[:8] == few
    assert set(Counter(task_id for task_id, _ in many).values()) == {2}


def test_splits_never_share_a_seed() -> None:
    train, held_out = (load_tasks(DEMO, seed=0, split=split) for split in ("train", "eval"))

    last_trained = max(task.seed for task in train.batch(0, 500))
    assert last_trained < 1_000_000 <= min(task.seed for task in held_out.held_out(500))
    require_disjoint(train, held_out)
    with pytest.raises(ConfigError, match="different seeds"):
        require_disjoint(train, train)
    with pytest.raises(ConfigError, match="split='eval'"):
        load_tasks(DEMO, seed=0, split="train").held_out(1)


def test_task_ids_are_unique_and_prefixed_by_their_set() -> None:
    assert all(task_id.startswith(("train_", "eval_")) for task_id in TEMPLATES)
    numbers = [task_id.split("_")[1] for task_id in TEMPLATES if task_id.startswith("train_")]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize(
    ("source", "device"),
    [
        ({"source_type": "file", "file_path": "deep.jsonl"}, SIMULATOR),
        ({"source_type": "file", "file_path": "deep.json"}, SIMULATOR),
        ({"source_type": "page", "file_path": "deep.json"}, PAGE_BROWSER),
        ({"source_type": "page", "file_path": "deep.jsonl"}, PAGE_BROWSER),
        ({"source_type": "harness", "file_path": "deep.jsonl"}, HarnessWorlds.abilities),
        ("[" * 10_000, SIMULATOR),
        ({"source_type": "custom", "custom_tasks": [ALARMS]}, SIMULATOR),
    ],
)
def test_json_that_is_nested_too_deeply_is_a_mistake_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: TaskSources, device: DeviceAbilities
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("deep.json", "deep.jsonl"):
        (tmp_path / name).write_text("[" * 10_000)

    with pytest.raises(ConfigError, match="expected"):
        load_tasks(source, seed=0, split="train", device=device)
