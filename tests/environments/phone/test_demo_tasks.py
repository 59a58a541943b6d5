"""Demo tasks on the embedded phone: never done at the start, always doable, and only by doing the right thing."""

import re
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import get_args

import pytest

from cua_rl.environments.adb.device import ANDROID_ABILITIES
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.gbox.boxes import ABILITIES
from cua_rl.environments.phone.demo.expert import ImperfectExpert, decide, scannable_elements
from cua_rl.environments.phone.demo.phone import SIMULATOR, make_simulated_phone
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import (
    DEMO_EVAL,
    DEMO_TRAINING,
    EMBEDDED_EVAL,
    EMBEDDED_TRAINING,
    TEMPLATES,
)
from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.reducer import launch
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.task_loader import SEED_RANGES, Split, TaskSet, TaskSources, load_tasks, require_disjoint
from cua_rl.tasks.goal import Goal
from cua_rl.tasks.task import Category, Difficulty
from cua_rl.types.actions import Button, Click, Finish, PressButton
from cua_rl.types.errors import ConfigError, TaskError
from scripts.needed_turns import count_turns, needed_turns

ROOT = Path(__file__).parents[3]
LASTING = (
    ANDROID_ABILITIES,
    ABILITIES["android"],
    DeviceAbilities(name="a phone that answers everything", has_shell=True, is_seeded=False),
)
SEEDS = (0, 1, 2, 17, 4711, 999_999, 1_000_000, 1_234_567)
TOGGLES = [template for template in EMBEDDED_TRAINING if "toggle_setting" in template.tags]


async def play(
    template: TaskTemplate, seed: int, expert: ImperfectExpert | None = None, scale: int = 1
) -> tuple[bool, int]:
    """Whether the task was done in the end, and in how many turns."""
    task = template.make_task(seed)
    phone = make_simulated_phone(task, scale=scale)
    for turn in range(1, task.max_turns + 1):
        decision = decide(task, phone) if expert is None else expert.decide(phone)
        if isinstance(decision.action, Finish):
            return (await task.validate(phone, decision.action.answer)).success, turn
        await phone.execute(decision.action)
    return (await task.validate(phone, None)).success, task.max_turns


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
async def test_untouched_fails_and_the_expert_succeeds_within_the_turns(template: TaskTemplate) -> None:
    for seed in SEEDS:
        task = template.make_task(seed)

        assert not (await task.validate(make_simulated_phone(task), None)).success
        assert (await play(template, seed))[0], seed


async def test_experts_act_at_every_scale() -> None:
    for template in (EMBEDDED_TRAINING[3], TOGGLES[0]):
        assert await play(template, 5, scale=3) == await play(template, 5, scale=1)


@pytest.mark.parametrize("template", TOGGLES, ids=[template.task_id for template in TOGGLES])
async def test_another_toggle_does_not_count(template: TaskTemplate) -> None:
    task = template.make_task(3)
    phone = make_simulated_phone(task)
    await phone.execute(decide_click(task.task_id, phone))
    target = decide(task, phone).scanned[-1]
    others = [item for item in build_screen(phone.state).visible_content() if item.label not in (target, "Airplane")]
    wrong = next(item for item in others if item.kind == "switch_row")

    await phone.execute(Click(x=wrong.rect.centre[0], y=wrong.rect.centre[1]))

    assert not (await task.validate(phone, "done")).success


def decide_click(task_id: str, phone: SimulatedPhone) -> Click:
    action = decide(TEMPLATES[task_id], phone).action
    assert isinstance(action, Click)
    return action


async def test_another_app_does_not_count() -> None:
    template = TEMPLATES["train_81_open_mail"]
    task = template.make_task(3)
    phone = make_simulated_phone(task)
    wrong = next(item for item in scannable_elements(build_screen(phone.state)) if item.label != "Mail")

    await phone.execute(Click(x=wrong.rect.centre[0], y=wrong.rect.centre[1]))

    assert not (await task.validate(phone, "Mail is open.")).success


def test_scans_name_what_is_seen_in_reading_order_up_to_the_target() -> None:
    template = TEMPLATES["train_02_enable_wifi"]
    phone = make_simulated_phone(template.make_task(11))
    labels = [item.label for item in build_screen(phone.state).content]

    decision = decide(template, phone)

    assert list(decision.scanned) == labels[: labels.index("Settings") + 1]
    assert isinstance(decision.action, Click)
    assert 0 <= decision.action.x < WIDTH
    assert 0 <= decision.action.y < HEIGHT


def test_labels_on_the_demo_screens_are_single_words() -> None:
    for template in EMBEDDED_TRAINING:
        phone = make_simulated_phone(template.make_task(1))
        for state in (phone.state, launch(phone.state, "settings")):
            assert not [item.label for item in scannable_elements(build_screen(state)) if " " in item.label]


async def test_an_expert_that_errs_half_of_the_time_succeeds_sometimes_and_always_ends() -> None:
    random = Random(0)
    done: Counter[str] = Counter()
    for template in EMBEDDED_TRAINING:
        for seed in range(8):
            expert = ImperfectExpert(template, error_rate=0.5, random=random)
            done[template.tags[1]] += (await play(template, seed, expert))[0]

    # One decision: 1/2 + 1/2 * 1/8 = 0.56 right. Two: 0.56 * (1/2 + 1/2 * 1/7) = 0.32 right. 128 plays of each.
    assert 0.4 < done["open_app"] / 128 < 0.75
    assert 0.15 < done["toggle_setting"] / 128 < 0.5


async def test_an_expert_that_never_errs_is_the_expert() -> None:
    template = TOGGLES[0]
    expert = ImperfectExpert(template, error_rate=0.0, random=Random(0))

    assert await play(template, 5, expert) == (True, 2)


def test_half_of_the_demo_sets_takes_several_turns() -> None:
    for templates in (EMBEDDED_TRAINING, EMBEDDED_EVAL):
        families = Counter(template.tags[1] for template in templates)

        assert families == {"open_app": 16, "toggle_setting": 16}
        assert not {template.task_id for template in templates if "page_two" in template.tags}


def test_training_and_evaluation_differ_in_ids_and_seeds_but_not_in_families() -> None:
    assert not {t.task_id for t in EMBEDDED_TRAINING} & {t.task_id for t in EMBEDDED_EVAL}
    assert {t.instance(0).instruction for t in EMBEDDED_TRAINING} == {t.instance(0).instruction for t in EMBEDDED_EVAL}
    assert not set(SEED_RANGES["train"]) & set(SEED_RANGES["eval"])


def test_every_category_has_five_training_tasks_of_every_difficulty_and_some_to_evaluate_on() -> None:
    pairs = list(product(get_args(Category), get_args(Difficulty)))
    trained, evaluated = (Counter((t.category, t.difficulty) for t in s) for s in (DEMO_TRAINING, DEMO_EVAL))

    assert {pair: trained[pair] for pair in pairs if trained[pair] < 5} == {}
    assert {pair: evaluated[pair] for pair in pairs if evaluated[pair] < 3} == {}


def test_the_example_of_easy_settings_finds_tasks() -> None:
    sources = '{"source_type": "demo_training", "category": "settings", "difficulty": "easy"}'

    assert {"train_02_enable_wifi", "train_10_disable_bluetooth"} <= set(load(sources).task_ids)


def test_on_devices_that_last_evaluation_shares_no_instruction_and_no_check_with_training() -> None:
    found = {task_id: asked(template) for task_id, template in TEMPLATES.items()}

    for device in LASTING:
        trained = load({"source_type": "demo_training"}, device=device).task_ids
        held_out = load({"source_type": "demo_eval"}, split="eval", device=device).task_ids
        asked_for = set[str | Goal]().union(*(found[task_id] for task_id in trained))
        assert [task_id for task_id in held_out if found[task_id] & asked_for] == [], device.name
        assert held_out


def asked(template: TaskTemplate) -> set[str | Goal]:
    """The words and the checks, with their parameters, of 400 instances of a task."""
    instances = [template.instance(seed) for seed in range(400)]
    return {normal(instance.instruction) for instance in instances} | {instance.goal for instance in instances}


def normal(text: str) -> str:
    return " ".join(text.lower().split())


def test_on_the_simulated_phone_what_evaluation_shares_with_training_begins_on_another_phone() -> None:
    def begun(tasks: TaskSet) -> set[tuple[str, PhoneState]]:
        drawn = (task for step in range(4) for task in tasks.batch(step, len(tasks.task_ids)))
        return {(normal(task.instruction), make_simulated_phone(task).state) for task in drawn}

    trained, held_out = load({"source_type": "demo_training"}), load({"source_type": "demo_eval"}, split="eval")
    shared = {normal(t.instance(i).instruction) for t in DEMO_TRAINING for i in range(200)} & {
        normal(t.instance(i).instruction) for t in DEMO_EVAL if "demo" not in t.tags for i in range(200)
    }

    assert not begun(trained) & begun(held_out)
    assert shared == {"open the developer options.", "turn on usb debugging.", "turn off usb debugging."}


def load(sources: TaskSources, split: Split = "train", device: DeviceAbilities = SIMULATOR) -> TaskSet:
    return load_tasks(sources, seed=0, split=split, device=device)


def test_on_devices_that_last_two_tasks_of_the_same_words_are_refused_as_held_out() -> None:
    trained = load({"source_type": "ids", "task_ids": "train_02_enable_wifi"}, device=ANDROID_ABILITIES)
    same = load({"source_type": "ids", "task_ids": "eval_37_enable_wifi"}, split="eval", device=ANDROID_ABILITIES)
    other = load({"source_type": "ids", "task_ids": "eval_38_disable_wifi"}, split="eval", device=ANDROID_ABILITIES)

    require_disjoint(trained, other)
    with pytest.raises(ConfigError, match="'turn on wi-fi\\.'"):
        require_disjoint(trained, same)


def test_the_page_counts_the_demo_tasks() -> None:
    counted = re.findall(r"(\d+) demo tasks", (ROOT / "README.md").read_text())
    rows = re.findall(r"^\| `(\w+)` \|([\d /|]+)\|$", (ROOT / "TASK_CONFIG_QUICKSTART.md").read_text(), re.MULTILINE)

    assert counted == [str(len(TEMPLATES))]
    assert {(name, *map(str.strip, cells.split("|"))) for name, cells in rows} == {
        (
            category,
            *(
                " / ".join(
                    str(sum((t.category, t.difficulty) == (category, difficulty) for t in templates))
                    for templates in (DEMO_TRAINING, DEMO_EVAL)
                )
                for difficulty in get_args(Difficulty)
            ),
        )
        for category in get_args(Category)
    }


async def test_a_question_is_answered_by_the_state_not_by_a_claim() -> None:
    task = TEMPLATES["train_06_check_battery"].make_task(3)
    phone = make_simulated_phone(task)
    level = await phone.query("battery_level")

    assert (await task.validate(phone, f"It is {level}%")).success
    assert not (await task.validate(phone, f"It is 1{level}%")).success
    assert not (await task.validate(phone, "success")).success


async def test_a_phone_that_left_the_app_again_has_not_opened_it() -> None:
    template = TEMPLATES["train_01_open_settings"]
    task = template.make_task(3)
    phone = make_simulated_phone(task)
    await phone.execute(decide_click(task.task_id, phone))
    await phone.execute(PressButton(button=Button.HOME))

    assert not (await task.validate(phone, None)).success


def test_a_task_of_another_kind_gets_no_phone() -> None:
    foreign = replace(TEMPLATES["train_01_open_settings"], task_id="gym_1")

    with pytest.raises(TaskError, match="gym_1"):
        make_simulated_phone(foreign.make_task(0))


@pytest.mark.parametrize("template", list(TEMPLATES.values())[::12], ids=lambda template: template.task_id)
def test_the_level_of_a_task_is_that_of_the_turns_which_its_expert_takes(template: TaskTemplate) -> None:
    assert needed_turns(template) == template.needed_turns
    assert f"level_{template.level}" in template.tags
    # on phones that were not counted it may have to scroll once more
    assert count_turns(template, 1000) <= template.needed_turns + 1 <= template.max_turns + 1


def test_the_page_counts_the_tasks_of_every_level_for_training_and_evaluation() -> None:
    rows = re.findall(r"^\| (\d) \| (\d+) to (\d+) \| (\d+) / (\d+) \|$", _quickstart(), re.MULTILINE)
    found = [
        [str(level), *(str(sum(t.level == level for t in templates)) for templates in (DEMO_TRAINING, DEMO_EVAL))]
        for level in (1, 2, 3, 4)
    ]

    assert [[level, *counts] for level, _, _, *counts in rows] == found
    for level, low, high, *_ in rows:
        assert {t.level for t in TEMPLATES.values() if int(low) <= t.needed_turns <= int(high)} == {int(level)}
    assert all(1 <= template.needed_turns <= 15 for template in TEMPLATES.values())


def test_a_source_selects_levels_by_their_tags() -> None:
    tasks = load([{"source_type": "demo_training", "tags": [f"level_{level}"]} for level in (2, 3)])

    assert {TEMPLATES[task_id].level for task_id in tasks.task_ids} == {2, 3}


def _quickstart() -> str:
    return (ROOT / "TASK_CONFIG_QUICKSTART.md").read_text()
