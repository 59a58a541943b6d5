"""Desktop tasks as tasks: where they come from, and that evaluation asks for what training never showed."""

import pytest

pytest.importorskip("Xlib", reason="`make setup` installs what desktops need")

from cua_rl.environments.desktop.device import DESKTOP_ABILITIES
from cua_rl.environments.desktop.templates import DESKTOP_TASKS
from cua_rl.environments.phone.demo.phone import SIMULATOR, make_simulated_phone
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.task_loader import load_tasks, require_disjoint
from cua_rl.types.errors import ConfigError, TaskError

SOURCE = {"source_type": "desktop"}


def test_desktop_tasks_run_on_desktops_alone() -> None:
    train = load_tasks(SOURCE, seed=0, split="train", device=DESKTOP_ABILITIES)
    held_out = load_tasks(SOURCE, seed=0, split="eval", device=DESKTOP_ABILITIES)
    require_disjoint(train, held_out)
    assert train.task_ids == tuple(template.task_id for template in DESKTOP_TASKS)
    with pytest.raises(ConfigError, match="expected tasks that run on the embedded simulator"):
        load_tasks(SOURCE, seed=0, split="train", device=SIMULATOR)


async def test_a_phone_is_refused() -> None:
    prepare = DESKTOP_TASKS[0].make_task(0).prepare
    assert prepare is not None
    with pytest.raises(TaskError, match="expected a Linux desktop"):
        await prepare(make_simulated_phone(TEMPLATES["train_02_enable_wifi"].make_task(0)))


def test_evaluation_draws_from_words_that_training_never_uses() -> None:
    for template in DESKTOP_TASKS:
        training = {word for seed in range(20) for word in template.instance(seed).instruction.split("'")[1::2]}
        evaluation = {
            word
            for seed in range(1_000_000, 1_000_020)
            for word in template.instance(seed).instruction.split("'")[1::2]
        }
        assert not training & evaluation
