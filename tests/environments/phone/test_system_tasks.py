"""Tasks on system pages and in the shade: never done at the start, always doable, and only by doing the right thing."""

from dataclasses import replace
from random import Random

import pytest

from cua_rl.environments.phone.demo.expert import decide, scannable_elements
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import (
    EMBEDDED_EVAL,
    EMBEDDED_TRAINING,
    SYSTEM_EVAL,
    SYSTEM_TRAINING,
    TEMPLATES,
)
from cua_rl.environments.phone.simulator.catalog import ALL_EXTRA_ROWS, Toggle
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.reducer import launch
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.task_loader import SEED_RANGES
from cua_rl.types.actions import Click, Finish

ALL = (*SYSTEM_TRAINING, *SYSTEM_EVAL)
NUM_SEEDS = 6


def some_seeds(template: TaskTemplate) -> range:
    first = SEED_RANGES["train" if template.task_id.startswith("train_") else "eval"].start
    return range(first, first + NUM_SEEDS)


async def play(template: TaskTemplate, seed: int) -> tuple[bool, SimulatedPhone]:
    """Whether the expert did the task within its turns, and the phone afterwards."""
    task = template.make_task(seed)
    phone = make_simulated_phone(task)
    for _ in range(task.max_turns):
        decision = decide(task, phone)
        if isinstance(decision.action, Finish):
            return (await task.validate(phone, decision.action.answer)).success, phone
        await phone.execute(decision.action)
    return (await task.validate(phone, None)).success, phone


@pytest.mark.parametrize("template", ALL, ids=[template.task_id for template in ALL])
async def test_tapping_at_random_hardly_ever_does_it(template: TaskTemplate) -> None:
    done = 0
    for seed in some_seeds(template):
        task, random = template.make_task(seed), Random(seed)
        phone = make_simulated_phone(task)
        for _ in range(task.max_turns):
            elements = scannable_elements(build_screen(phone.state))
            x, y = random.choice(elements).rect.centre if elements else (96, 160)
            await phone.execute(Click(x=x, y=y))
        done += (await task.validate(phone, "done")).success

    assert done <= 1


def test_all_templates_are_in_the_table_and_none_is_in_the_default_sets() -> None:
    assert {template.task_id for template in ALL} <= set(TEMPLATES)
    assert not {template.task_id for template in ALL} & {t.task_id for t in (*EMBEDDED_TRAINING, *EMBEDDED_EVAL)}
    assert not [template for template in ALL if "demo" in template.tags]


def test_evaluation_asks_for_nothing_that_training_asked_for_on_the_same_phone() -> None:
    def asked(templates: tuple[TaskTemplate, ...]) -> set[tuple[str, PhoneState]]:
        return {
            (template.instance(seed).instruction, make_simulated_phone(template.make_task(seed)).state)
            for template in templates
            for seed in some_seeds(template)
        }

    assert not asked(SYSTEM_TRAINING) & asked(SYSTEM_EVAL)


def test_names_and_levels_of_evaluation_never_occur_in_training() -> None:
    drawn = {
        is_eval: {t.instance(seed).instruction for t in templates for seed in range(200)}
        for is_eval, templates in ((False, SYSTEM_TRAINING), (True, SYSTEM_EVAL))
    }

    # Opening developer options and switching USB debugging have no parameter: they differ in the phone only.
    assert drawn[False] & drawn[True] == {
        "Open the developer options.",
        "Turn on USB debugging.",
        "Turn off USB debugging.",
    }


def test_parameters_come_from_the_seed() -> None:
    template = TEMPLATES["train_58_connect_known_wifi"]

    assert len({template.instance(seed).instruction for seed in range(100)}) == 9
    assert template.instance(4).instruction == template.instance(4).instruction


async def test_switching_in_settings_is_no_use_of_the_tile() -> None:
    template = TEMPLATES["train_31_enable_dnd_quick_settings"]
    task = template.make_task(1)
    phone = make_simulated_phone(task)
    phone.state = phone.state.with_toggle(Toggle.DO_NOT_DISTURB, True)

    assert await phone.query("dnd_enabled") == "true"
    assert not (await task.validate(phone, None)).success


async def test_a_question_about_storage_takes_the_number_and_no_other() -> None:
    task = TEMPLATES["train_122_check_app_storage"].make_task(2)
    phone = make_simulated_phone(task)
    package = {"calendar", "chrome", "mail", "maps", "messaging", "music"}
    sizes = {name: await phone.query(f"app_storage_mb:com.android.{name}") for name in package}
    right = (await task.validate(phone, " ".join(sizes.values()))).expected

    assert (await task.validate(phone, f"It uses {right} MB.")).success
    assert not (await task.validate(phone, f"It uses 1{right} MB.")).success
    assert not (await task.validate(phone, "success")).success


async def test_the_wrong_network_does_not_count() -> None:
    template = TEMPLATES["train_58_connect_known_wifi"]
    task = template.make_task(3)
    phone = make_simulated_phone(task)
    wanted = template.instance(3).goal.expected
    other = next(n.name for n in phone.state.system.networks if n.is_saved and n.name != wanted)
    phone.state = replace(phone.state, system=replace(phone.state.system, connected_network=other))

    assert not (await task.validate(phone, None)).success


def test_the_extra_rows_are_there_only_where_a_task_asks_for_them() -> None:
    plain = make_simulated_phone(EMBEDDED_TRAINING[-1].make_task(5)).state
    full = make_simulated_phone(TEMPLATES["train_74_open_developer_options"].make_task(5)).state

    assert not set(plain.setting_rows) & set(ALL_EXTRA_ROWS)
    assert set(ALL_EXTRA_ROWS) < set(full.setting_rows)
    assert {item.label for item in build_screen(launch(full, "settings")).content} >= {"Apps", "Storage", "Developer"}
