"""Gradients of groups that have ended, while others of the same step still run: the trainer does not wait for the last.

A step's gradient is a sum over rollouts, and only what it is divided by needs all of them (`normalisation.py`). So a
group is passed forward and backward once it has ended, with the weights that its own rollouts say, and the optimizer
step divides the sum: the same step, but for the order in which floats are added. The parity gate sees all rollouts
before it, as ever. Advantages are the group's, and the policy does not move while a step is sampled.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from cua_rl.config import LossConfig
from cua_rl.rl.advantages import AdvantageKind, advantages_of
from cua_rl.rl.batch import build_datums_of_groups
from cua_rl.rl.normalisation import own_weights
from cua_rl.rl.substeps import combine_metrics
from cua_rl.rl.train_step import Trainer
from cua_rl.training.wire import ForwardBackwardOutput
from cua_rl.types import Datum, RolloutGroup

Pass = tuple[Sequence[Datum], ForwardBackwardOutput]


class EarlyPasses:
    """The passes of one step: `add` each group that ends, `complete` with the datums of all."""

    def __init__(self, trainer: Trainer, loss: LossConfig, advantages: AdvantageKind, image_token_id: int) -> None:
        self._trainer = trainer
        self._loss = loss
        self._advantages: AdvantageKind = advantages
        self._image_token_id = image_token_id
        self._ended: asyncio.Queue[RolloutGroup] = asyncio.Queue()
        self._passes: list[Pass] = []
        self._in_pass = asyncio.Lock()
        self._is_complete = False

    def add(self, group: RolloutGroup) -> None:
        """Let the trainer begin with a group when it has time."""
        self._ended.put_nowait(group)

    async def work(self) -> None:
        """Pass groups as they come, those that wait together in one request, until the step is complete."""
        while True:
            groups = [await self._ended.get()]
            async with self._in_pass:
                if self._is_complete:
                    return
                while not self._ended.empty():
                    groups.append(self._ended.get_nowait())
                advantages = [advantages_of(group, self._advantages) for group in groups]
                datums, _ = await asyncio.to_thread(build_datums_of_groups, groups, advantages, self._image_token_id)
                await self._pass(datums)

    async def complete(self, datums: Sequence[Datum]) -> ForwardBackwardOutput:
        """Wait for the pass under way, pass what is left of the step's datums, and answer for all of them.

        Metrics of several passes are combined as those of several sub-steps are.
        """
        async with self._in_pass:
            self._is_complete = True
            begun = {datum.rollout_id for passed, _ in self._passes for datum in passed}
            await self._pass([datum for datum in datums if datum.rollout_id not in begun])
        rows: dict[str, list[tuple[float, ...]]] = {}
        for passed, output in self._passes:
            for datum, row in zip(passed, output.training_logprobs, strict=True):
                rows.setdefault(datum.rollout_id, []).append(row)
        in_order = {rollout_id: iter(entries) for rollout_id, entries in rows.items()}
        metrics = combine_metrics([output.metrics for _, output in self._passes])
        return ForwardBackwardOutput(
            training_logprobs=tuple(next(in_order[datum.rollout_id]) for datum in datums),
            metrics=metrics | {"optim/num_passes": float(len(self._passes))},
        )

    async def _pass(self, datums: Sequence[Datum]) -> None:
        if datums:
            weights = own_weights(datums, self._loss)
            output = await self._trainer.forward_backward(datums, self._loss, token_weights=weights)
            self._passes.append((datums, output))


@asynccontextmanager
async def early_passes(
    trainer: Trainer, loss: LossConfig, advantages: AdvantageKind, image_token_id: int
) -> AsyncGenerator[EarlyPasses]:
    """The early passes of a step, at work while the block runs; if a pass fails, so does the block."""
    early = EarlyPasses(trainer, loss, advantages, image_token_id)
    async with asyncio.TaskGroup() as tasks:
        worker = tasks.create_task(early.work(), name="early-passes")
        yield early
        worker.cancel()
