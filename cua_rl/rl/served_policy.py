"""The policy on its way from the trainer to the sampler: saved, verified, announced; and kept as checkpoints."""

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from cua_rl.sampling.canary import Canary, canary_datum, scored_tokens
from cua_rl.training.client import TrainingClient
from cua_rl.training.wire import AdapterPart, Probe
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import AdapterRef, ModelInput

CANARY_CHANGE = 1e-4  # nats; a smaller effect of the adapter may vanish in the server's rounding
PROBE_STRENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6)  # models differ in how much an adapter changes them
PROBE_CHANGE = 5.0  # times what rounding may explain
# servers cache prompts by the adapter's name: no policy of a run has one of these
PROBE_VERSIONS = {"language": 999_999, "vision": 999_998}
NUM_KEPT_ADAPTERS = 3  # the served one, the previous one (rollouts may still use it), and one more for inspection


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPolicy:
    """An adapter on disk, and the canary that the server must reproduce once it has loaded the adapter."""

    step: int
    adapter: AdapterRef
    canary: Canary | None


class WeightSource(Protocol):
    """What saves weights; `training.client.TrainingClient` says what the methods do."""

    async def save_state(self, path: Path) -> None: ...

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef: ...


@dataclass
class ServedPolicy:
    """Publishes the trainer's weights under `folder`/sampler_weights and checkpoints under `folder`/weights.

    `make_canary` measures the trainer's current weights; `load_and_prove` loads an adapter into the model server and
    returns when it is announced; `record_checkpoint` records a checkpoint, with whether it stays only until the next
    one, and deletes the states of those given up.
    """

    trainer: WeightSource
    make_canary: Callable[[], Awaitable[Canary | None]]
    load_and_prove: Callable[[AdapterRef, Canary | None], Awaitable[None]]
    state_path: Callable[[int], Path]
    sampler_path: Callable[[int], Path]
    record_checkpoint: Callable[[int, Path, Path, bool], None]
    _steps: dict[Path, int] = field(default_factory=dict[Path, int])
    """Adapter folders with their steps, in the order in which they were served."""
    _held: Counter[Path] = field(default_factory=Counter[Path])

    async def publish(self, step: int) -> AdapterRef:
        """Save the weights after `step` training steps and serve them."""
        return await self.serve(await self.save(step))

    async def save(self, step: int) -> SavedPolicy:
        """Save the weights after `step` steps; the trainer may continue when this returns."""
        adapter = await self.trainer.save_weights_for_sampler(self.sampler_path(step))
        return SavedPolicy(step=step, adapter=adapter, canary=await self.make_canary())

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        """Load saved weights into the model server, verify and announce them."""
        await self.load_and_prove(saved.adapter, saved.canary)
        self._steps.pop(saved.adapter.path, None)
        self._steps[saved.adapter.path] = saved.step
        await asyncio.to_thread(self._prune)
        return saved.adapter

    @contextmanager
    def hold(self, adapter: AdapterRef) -> Generator[None]:
        """Keep an adapter's folder while the block runs: the server may have to load it again."""
        self._held[adapter.path] += 1
        try:
            yield
        finally:
            self._held[adapter.path] -= 1

    async def save_checkpoint(self, step: int, *, is_interim: bool) -> tuple[Path, Path]:
        """Save everything a resume needs after `step` steps; durable when this returns."""
        state_path, sampler_path = self.state_path(step), self.sampler_path(step)
        if not sampler_path.exists():
            await self.trainer.save_weights_for_sampler(sampler_path)
        await self.trainer.save_state(state_path)
        self._steps.setdefault(sampler_path, step)
        await asyncio.to_thread(self.record_checkpoint, step, state_path, sampler_path, is_interim)
        return state_path, sampler_path

    def _prune(self) -> None:
        """Delete adapters that are neither recent nor held nor part of a checkpoint."""
        for path, step in list(self._steps.items())[:-NUM_KEPT_ADAPTERS]:
            # by its state, because a resumed run builds on a checkpoint that it did not save itself
            is_checkpointed = self.state_path(step).exists()
            if not is_checkpointed and not self._held[path]:
                del self._steps[path]
                shutil.rmtree(path)


async def make_canary(trainer: TrainingClient, prompt: ModelInput, limit: float) -> Canary:
    """The canary with the trainer's log-probabilities, whose change from the base model the server must reproduce."""
    datum = canary_datum(prompt)
    (policy,), (base,) = await trainer.forward([datum]), await trainer.base_logprobs([datum])
    return _canary(prompt, policy, base, limit)


async def make_probe(
    trainer: TrainingClient, prompt: ModelInput, limit: float, folder: Path, part: AdapterPart = "language"
) -> tuple[AdapterRef, Canary]:
    """A random adapter with a strong effect, saved to `folder`, and its canary; the trainer's weights do not change.

    It is random in one part of the model and zero in the other, so that neither masks the other's effect.

    The first steps of a run change log-probabilities by less than half precision rounds: with only their adapters, a
    server that ignores adapters would pass.
    """
    datum = canary_datum(prompt)
    (base,) = await trainer.base_logprobs([datum])
    change, wanted = 0.0, PROBE_CHANGE * limit
    for strength in PROBE_STRENGTHS:
        probe = Probe(strength=strength, part=part)
        (changed,) = await trainer.probe_logprobs([datum], probe)
        change = _mean_change(changed, base, len(scored_tokens(prompt)))
        if change > wanted:
            await trainer.save_probe(folder, probe)
            version = PROBE_VERSIONS[part]
            return AdapterRef(path=folder, policy_version=version), _canary(prompt, changed, base, limit)
    raise TrainingError(
        f"expected a random {part} adapter of {PROBE_STRENGTHS[-1]} times the weights' norm to change the canary's "
        f"log-probabilities by {wanted:.3f}, got {change:.3f}: the trainer's adapter has no effect"
    )


def _mean_change(policy: tuple[float, ...], base: tuple[float, ...], num_scored: int) -> float:
    return sum(abs(one - other) for one, other in zip(policy, base, strict=True)) / num_scored


def _canary(prompt: ModelInput, policy: tuple[float, ...], base: tuple[float, ...], limit: float) -> Canary:
    tokens = scored_tokens(prompt)
    return Canary(
        tokens=tokens,
        image=prompt.images[0] if prompt.images else None,
        changes_model=_mean_change(policy, base, len(tokens)) > CANARY_CHANGE,
        training_logprobs=policy[-len(tokens) :],
        training_base_logprobs=base[-len(tokens) :],
        limit=limit,
    )
