"""Demo and custom tasks on real devices, whose state does not depend on a seed and persists between rollouts.

A goal that already holds is undone before the rollout; if it cannot be undone, the rollout ends with a task error.
"""

from collections.abc import Iterable
from functools import cache

from cua_rl.environments.android.preparation import make_goal_false
from cua_rl.environments.android.shell import DeviceShell
from cua_rl.environments.device import Device, ShellDevice
from cua_rl.environments.phone.demo.template import NUM_INSTANCES, TaskTemplate
from cua_rl.environments.phone.demo.templates import DEMO_EVAL, DEMO_TRAINING
from cua_rl.errors import TaskError
from cua_rl.tasks.goal import Goal


@cache
def held_out_templates() -> tuple[TaskTemplate, ...]:
    """The evaluation templates that share no instruction and no goal with a training template.

    Without a seed that makes another device, nothing else separates held-out tasks from trained ones.
    """
    trained = _asked(DEMO_TRAINING)
    return tuple(template for template in DEMO_EVAL if trained.isdisjoint(_asked((template,))))


def _asked(templates: Iterable[TaskTemplate]) -> set[str | Goal]:
    instances = (template.instance(seed) for template in templates for seed in range(NUM_INSTANCES))
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
