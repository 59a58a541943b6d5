"""Demo and custom tasks on real devices, whose state does not depend on a seed and persists between rollouts.

A goal that already holds is undone before the rollout; if it cannot be undone, the rollout ends with a task error.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Self

from cua_rl.environments.android.preparation import make_goal_false
from cua_rl.environments.android.shell import DeviceShell
from cua_rl.environments.device import Device, DeviceAbilities, ShellDevice
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import DEMO_EVAL, DEMO_TRAINING
from cua_rl.errors import TaskError
from cua_rl.tasks.goal import Goal
from cua_rl.tasks.task import Task, Template

_NUM_INSTANCES = 64
"""Number of instances to examine, enough to include every parameter that a template draws."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LastingDeviceTask(Template):
    """A demo template whose tasks first undo their goal."""

    template: TaskTemplate

    @classmethod
    def of(cls, template: TaskTemplate) -> Self:
        """The demo template for a real device."""
        return cls(
            task_id=template.task_id,
            category=template.category,
            difficulty=template.difficulty,
            max_turns=template.max_turns,
            tags=template.tags,
            template=template,
        )

    def make_task(self, seed: int) -> Task:
        """The task; the seed determines its parameters."""
        goal = self.template.instance(seed).goal
        return replace(self.template.make_task(seed), prepare=partial(make_undone, goal))

    def fixed_names(self, *, is_seeded: bool) -> frozenset[str]:
        """Its id and every instruction."""
        instructions = {self.template.instance(seed).instruction.lower() for seed in range(_NUM_INSTANCES)}
        return frozenset() if is_seeded else frozenset({self.task_id, *instructions})

    def is_readable(self, device: DeviceAbilities) -> bool:
        """Whether a device with these abilities can answer the query of the goal."""
        query = self.template.instance(0).goal.query
        return device.queries is None or query.partition(":")[0] in device.queries


@cache
def held_out_templates() -> tuple[TaskTemplate, ...]:
    """The evaluation templates that share no instruction and no goal with a training template.

    Without a seed that makes another device, nothing else separates held-out tasks from trained ones.
    """
    trained = _asked(DEMO_TRAINING)
    return tuple(template for template in DEMO_EVAL if trained.isdisjoint(_asked((template,))))


def _asked(templates: Iterable[TaskTemplate]) -> set[str | Goal]:
    instances = (template.instance(seed) for template in templates for seed in range(_NUM_INSTANCES))
    return {asked for instance in instances for asked in (instance.instruction, instance.goal)}


async def make_undone(goal: Goal, device: Device) -> None:
    """Undo the goal if it holds; raises `TaskError` if it cannot be undone."""
    if device.kind == "android" and isinstance(device, ShellDevice):
        await make_goal_false(DeviceShell(device), goal.query, goal.expected, goal.how)
    elif goal.how != "told" and goal.is_met(await device.query(goal.query), None):
        raise TaskError(
            f"expected {goal.query!r} to be anything but {goal.expected!r} when the task begins, got that on "
            f"{device.device_id!r}; undo it, or use a device with a shell"
        )
