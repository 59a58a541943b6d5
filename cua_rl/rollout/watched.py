"""Watches a task's goal and milestones while an agent works: the turn at which each first held."""

from dataclasses import dataclass

from cua_rl.environments.device import Device
from cua_rl.rollout.fresh_check import FreshCheck
from cua_rl.tasks.task import Task


@dataclass(slots=True, kw_only=True)
class Watched:
    """Turns taken when the goal, and each milestone, first held; None as long as it never has, or without a `task`."""

    check: FreshCheck
    task: Task | None
    device: Device
    first_success_turn: int | None = None
    milestone_turns: tuple[int | None, ...] = ()

    async def look(self, num_turns: int) -> None:
        """Ask what has never held; at 0 turns only milestones, of which nobody reaches those that hold already."""
        if (task := self.task) is None:
            return
        holds, goal = self.check.holds, task.validate
        if num_turns and self.first_success_turn is None and goal and await holds(task, goal, self.device):
            self.first_success_turn = num_turns
        known = self.milestone_turns or (None,) * len(task.milestones)
        self.milestone_turns = tuple(
            [
                num_turns if turn is None and await holds(task, milestone, self.device) else turn
                for milestone, turn in zip(task.milestones, known, strict=True)
            ]
        )
