"""Datasets of a supervised run, and the part on which a step trains: a pure function of seed and step."""

import asyncio
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from cua_rl.environments.pool import DeviceBackend
from cua_rl.renderers.renderer import Renderer
from cua_rl.supervised.demonstrations import build_supervised_datum, demonstrate
from cua_rl.task_loader import TaskSet
from cua_rl.tasks.expert import Experts
from cua_rl.tasks.readiness import instruct, prepare
from cua_rl.tasks.task import Task
from cua_rl.types.errors import ConfigError, TaskError
from cua_rl.types.rollout import Datum

Example = tuple[Datum, ...]
"""One conversation; several sequences if later prompts do not extend the earlier ones."""


class Dataset(Protocol):
    """Conversations to imitate. The same arguments always give the same sequences."""

    @property
    def num_examples(self) -> int | None:
        """Conversations to train on; None if there is no end of them."""
        ...

    async def batch(self, number: int, size: int) -> list[Datum]:
        """The sequences of `size` conversations."""
        ...

    async def held_out(self) -> list[Datum]:
        """Sequences that are never trained on."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedExamples:
    """Finitely many conversations, in a new order in every epoch."""

    load: Callable[[int], Example]
    """May read files, so it runs in a thread."""
    train: Sequence[int]
    held_out_indices: Sequence[int]
    seed: int

    @property
    def num_examples(self) -> int | None:
        return len(self.train)

    async def batch(self, number: int, size: int) -> list[Datum]:
        """The next `size` conversations in the order of the epoch; a batch may extend into the next epoch."""
        epoch, place = divmod(number * size, len(self.train))
        indices: list[int] = []
        while len(indices) < size:
            order = list(self.train)
            Random(f"order-{self.seed}-{epoch}").shuffle(order)
            indices += order[place : place + size - len(indices)]
            epoch, place = epoch + 1, 0
        return await asyncio.to_thread(self._load_all, indices)

    async def held_out(self) -> list[Datum]:
        return await asyncio.to_thread(self._load_all, self.held_out_indices)

    def _load_all(self, indices: Sequence[int]) -> list[Datum]:
        return [datum for index in indices for datum in self.load(index)]


def split_examples(keys: Sequence[Hashable], num_held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on, and at least `num_held_out` indices to hold out; equal keys stay on the same side.

    Raises:
        ConfigError: nothing would be left to train on.
    """
    order = list(dict.fromkeys(keys))
    Random(f"held-out-{seed}").shuffle(order)
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    held_out: list[int] = []
    while order and len(held_out) < num_held_out:
        held_out += members[order.pop()]
    if not order:
        raise ConfigError(
            f"num_eval_conversations: expected conversations left to train on, got {num_held_out} held out of "
            f"{len(keys)}; lower num_eval_conversations, or give more data"
        )
    return sorted(set(range(len(keys))) - set(held_out)), sorted(held_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExamples:
    """An endless sequence of demonstrations by scripted experts, each on its own device.

    An example has at most as many turns as a rollout of its task.
    """

    tasks: TaskSet
    held_out_tasks: Sequence[Task]
    """With seeds that training never uses."""
    devices: DeviceBackend
    """Entered and closed by the recipe."""
    experts: Experts
    renderer: Renderer
    error_rate: float
    """Probability per turn that the expert taps a random element; at 0 every example ends in success."""
    max_turns: int
    """Maximum turns of an example; a task may allow fewer."""
    seed: int

    @property
    def num_examples(self) -> int | None:
        return None

    async def batch(self, number: int, size: int) -> list[Datum]:
        tasks = self.tasks.batch(number, size)
        return [await self._demonstrate(task, f"{number}-{place}") for place, task in enumerate(tasks)]

    async def held_out(self) -> list[Datum]:
        return [await self._demonstrate(task, f"held-out-{place}") for place, task in enumerate(self.held_out_tasks)]

    async def _demonstrate(self, task: Task, name: str) -> Datum:
        device = await self.devices.make(task.device_request())
        try:
            await prepare(task, device)
            max_turns = task.turns_within(self.max_turns)
            random = Random(f"expert-{self.seed}-{name}")
            expert = self.experts.make(task, device, error_rate=self.error_rate, random=random)
            lesson = await demonstrate(await instruct(task, device), device, expert, max_turns=max_turns)
            if self.error_rate == 0 and task.validate is not None:
                validation = await task.validate(device, lesson.answer)
                if not validation.success:
                    raise TaskError(
                        f"expected the expert to do {task.task_id!r} on seed {task.seed} in {max_turns} turns, got "
                        f"{validation.actual!r} of {validation.query}; leave the task out, or raise max_turns"
                    )
        finally:
            await device.close()
        return build_supervised_datum(self.renderer, lesson, name=f"{task.task_id}-{task.seed}")


def require_experts(task_ids: Sequence[str], experts: Experts) -> None:
    """Raises `ConfigError` for a task that no scripted expert can do."""
    unknown = [task_id for task_id in task_ids if not experts.knows(task_id)]
    if unknown:
        raise ConfigError(
            f"tasks: expected tasks with a scripted expert, got {len(unknown)} without one, such as {unknown[0]!r}; "
            "leave them out with task_names or tags"
        )
