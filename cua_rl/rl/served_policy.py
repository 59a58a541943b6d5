"""The policy on its way from the trainer to the sampler: saved, proven, announced; and kept as checkpoints."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cua_rl.sampling.canary import Canary, canary_datum
from cua_rl.types import AdapterRef, Datum

CANARY_CHANGE = 1e-4  # nats; below it rounding in the server's precision may hide what the adapter does
NUM_KEPT_ADAPTERS = 3  # the served one, the one before it (rollouts may still use it), and one for a look back


class WeightSource(Protocol):
    """What the policy needs of the trainer."""

    async def save_state(self, path: Path) -> None: ...

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef: ...


@dataclass
class ServedPolicy:
    """Publishes the trainer's weights under `folder`/sampler_weights and checkpoints under `folder`/weights.

    `prove_and_serve` loads an adapter into the model server and returns when it is announced.
    """

    trainer: WeightSource
    prove_and_serve: Callable[[AdapterRef], Awaitable[None]]
    state_path: Callable[[int], Path]
    sampler_path: Callable[[int], Path]
    record_checkpoint: Callable[[int, Path, Path], None]
    _published: list[tuple[int, Path]] = field(default_factory=list[tuple[int, Path]])
    _checkpointed: set[int] = field(default_factory=set[int])

    async def publish(self, step: int) -> AdapterRef:
        """Save the weights after `step` training steps and serve them."""
        adapter = await self.trainer.save_weights_for_sampler(self.sampler_path(step))
        await self.prove_and_serve(adapter)
        self._published.append((step, adapter.path))
        await asyncio.to_thread(self._prune)
        return adapter

    async def save_checkpoint(self, step: int) -> tuple[Path, Path]:
        """Save everything a resume needs after `step` steps; durable when this returns."""
        state_path, sampler_path = self.state_path(step), self.sampler_path(step)
        if not sampler_path.exists():
            await self.trainer.save_weights_for_sampler(sampler_path)
        await self.trainer.save_state(state_path)
        self._checkpointed.add(step)
        await asyncio.to_thread(self.record_checkpoint, step, state_path, sampler_path)
        return state_path, sampler_path

    def _prune(self) -> None:
        """Delete adapters that are neither recent nor part of a checkpoint."""
        old, self._published = self._published[:-NUM_KEPT_ADAPTERS], self._published[-NUM_KEPT_ADAPTERS:]
        for step, path in old:
            if step not in self._checkpointed:
                shutil.rmtree(path)


class CanaryTrainer(Protocol):
    """Whoever can say what policy and base model make of a text."""

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]: ...

    async def base_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]: ...


async def make_canary(trainer: CanaryTrainer, tokens: tuple[int, ...]) -> Canary:
    """What the server must say about the canary, by the trainer's word."""
    datum = canary_datum(tokens)
    (policy,), (base,) = await trainer.forward([datum]), await trainer.base_logprobs([datum])
    change = sum(abs(one - other) for one, other in zip(policy, base, strict=True)) / len(tokens)
    return Canary(tokens=tokens, changes_model=change > CANARY_CHANGE, training_logprobs=policy)
