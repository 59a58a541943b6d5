"""Scripted experts: they read the device's state, list the elements they scan, and act in place of the agent."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol

from cua_rl.environments.device import Device
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One turn of an expert: the labels it scans, up to and including its target, and what it does."""

    scanned: tuple[str, ...]
    action: Action | Finish


Expert = Callable[[], Awaitable[Decision]]
"""Decides the next turn on the device it was made for; called once per turn."""


class Experts(Protocol):
    """Experts for some of the tasks that run on one kind of device."""

    def knows(self, task_id: str) -> bool:
        """Whether there is an expert for this task."""
        ...

    def make(self, task: Task, device: Device, *, error_rate: float, random: Random) -> Expert:
        """An expert for the task, which errs in a share of its turns; raises `TaskError` if there is none."""
        ...
