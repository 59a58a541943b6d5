"""One training step on a batch of datums: forward_backward, parity gate, optim_step."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Protocol

import chz

from cua_rl.config import LossConfig, OptimConfig
from cua_rl.rl.kl_penalty import penalise_divergence
from cua_rl.rl.parity import measure_parity, of_version, require_parity
from cua_rl.rl.replay import ratio_metrics
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types import Datum

Schedule = Literal["constant", "linear"]
LAST_SHARE = 0.05  # the last step still moves: at rate 0 its rollouts would be wasted


class Trainer(Protocol):
    """What a training step needs of the trainer (Tinker's verbs)."""

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]: ...

    async def base_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]: ...

    async def forward_backward(self, datums: Sequence[Datum], loss: LossConfig) -> ForwardBackwardOutput: ...

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepSettings:
    """How a batch is trained on."""

    loss: LossConfig
    optim: OptimConfig
    num_substeps: int
    parity_limit: float
    kl_penalty_coef: float
    compute_post_kl: bool
    schedule: Schedule = "constant"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepResult:
    """What the trainer said: its log-probabilities before the update, per datum and token, and metrics."""

    training_logprobs: tuple[tuple[float, ...], ...]
    metrics: dict[str, float]


def scheduled_learning_rate(settings: TrainStepSettings, step: int, max_steps: int) -> float:
    """The learning rate of a 0-based step: a pure function, so that a resumed run goes on as if never stopped.

    "linear" falls from the full rate at step 0 to a twentieth at the last step.
    """
    if settings.schedule == "constant" or max_steps == 1:
        return settings.optim.learning_rate
    return settings.optim.learning_rate * (1 - (1 - LAST_SHARE) * step / (max_steps - 1))


async def train_step(
    trainer: Trainer,
    datums: Sequence[Datum],
    settings: TrainStepSettings,
    *,
    step: int,
    learning_rate: float,
    replayed_ids: Collection[str] = (),
    policy_version: int | None = None,
) -> TrainStepResult:
    """Train on `datums` in `num_substeps` optimizer steps; raises `ParityError` before the first one is taken.

    The parity gate looks at the first sub-step only: later ones compare the sampler with weights that have moved. For
    the same reason it leaves out the rollouts in `replayed_ids`, and turns that another version than `policy_version`
    sampled (None: there are none): older policies did.
    """
    metrics: dict[str, float] = {}
    if settings.kl_penalty_coef:
        base = await trainer.base_logprobs(datums, temperature=settings.loss.temperature)
        datums, metrics["policy/kl_base"] = penalise_divergence(datums, base, settings.kl_penalty_coef)
    training_logprobs: list[tuple[float, ...]] = []
    for substep, part in enumerate(_split(datums, settings.num_substeps)):
        output = await trainer.forward_backward(part, settings.loss)
        training_logprobs += output.training_logprobs
        if substep == 0:
            compared = [of_version(datum, policy_version) for datum in part]
            metrics |= _check_parity(compared, output.training_logprobs, replayed_ids, settings.parity_limit, step=step)
        optim = chz.replace(settings.optim, learning_rate=learning_rate)  # pyright: ignore[reportUnknownMemberType]
        taken = await trainer.optim_step(optim)
        metrics |= {**output.metrics} | {"optim/grad_norm": taken.grad_norm, "optim/learning_rate": taken.learning_rate}
    fresh, before = _choose(datums, training_logprobs, lambda datum: datum.rollout_id not in replayed_ids)
    if settings.compute_post_kl and fresh:
        after = await trainer.forward(fresh, temperature=settings.loss.temperature)
        metrics["policy/kl_post"] = _mean_gap(fresh, before, after)
    replayed, rows = _choose(datums, training_logprobs, lambda datum: datum.rollout_id in replayed_ids)
    metrics |= ratio_metrics(replayed, rows)
    return TrainStepResult(training_logprobs=tuple(training_logprobs), metrics=metrics)


def _check_parity(
    datums: Sequence[Datum],
    training_logprobs: Sequence[Sequence[float]],
    replayed_ids: Collection[str],
    limit: float,
    *,
    step: int,
) -> dict[str, float]:
    """Parity of what the current policy sampled; nothing if none of that was trained."""
    fresh, rows = _choose(datums, training_logprobs, lambda datum: datum.rollout_id not in replayed_ids)
    if not any(datum.num_trained_tokens for datum in fresh):
        return {}
    parity = measure_parity(fresh, rows)
    require_parity(parity, limit, step=step)
    return parity.metrics()


def _choose(
    datums: Sequence[Datum], rows: Sequence[Sequence[float]], is_wanted: Callable[[Datum], bool]
) -> tuple[list[Datum], list[Sequence[float]]]:
    """The datums that are wanted, and their rows."""
    chosen = [(datum, row) for datum, row in zip(datums, rows, strict=True) if is_wanted(datum)]
    return [datum for datum, _ in chosen], [row for _, row in chosen]


def _split(datums: Sequence[Datum], num_parts: int) -> list[Sequence[Datum]]:
    """Deal `datums` to at most `num_parts` parts, as even as possible, in order."""
    bounds = [len(datums) * part // num_parts for part in range(num_parts + 1)]
    return [datums[start:end] for start, end in pairwise(bounds) if end > start]


def _mean_gap(datums: Sequence[Datum], before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> float:
    """Mean of log-probability before minus after over trained tokens: an estimate of KL(before || after)."""
    gaps = [
        old - new
        for datum, old_row, new_row in zip(datums, before, after, strict=True)
        for old, new, is_trained in zip(old_row, new_row, datum.loss_mask, strict=True)
        if is_trained
    ]
    return sum(gaps) / len(gaps)
