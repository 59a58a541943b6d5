"""One training step on a batch of datums: forward_backward, parity gate, optim_step."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import chz

from cua_rl.config import LossConfig, OptimConfig
from cua_rl.rl.advantages import AdvantageKind, divide_by_batch_std
from cua_rl.rl.kl_penalty import penalise_divergence
from cua_rl.rl.normalisation import token_weights
from cua_rl.rl.parity import measure_parity, of_version, require_parity
from cua_rl.rl.replay import ratio_metrics
from cua_rl.rl.substeps import combine_metrics, deal_datums
from cua_rl.supervised.learning_rate import RateSchedule, learning_rate_at
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types import Datum

Schedule = RateSchedule
LAST_SHARE = 0.05  # the last step still moves: at rate 0 its rollouts would be wasted
Rows = Sequence[tuple[float, ...]]
"""One value per token of every datum, 0.0 off-mask."""


class Trainer(Protocol):
    """What a training step needs of the trainer (Tinker's verbs)."""

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]: ...

    async def reference_logprobs(
        self, datums: Sequence[Datum], *, temperature: float = 1.0
    ) -> list[tuple[float, ...]]: ...

    async def forward_backward(
        self,
        datums: Sequence[Datum],
        loss: LossConfig,
        *,
        token_weights: Sequence[float] | None = None,
        proximal_logprobs: Rows | None = None,
        reference_logprobs: Rows | None = None,
    ) -> ForwardBackwardOutput: ...

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput: ...

    async def take_account(self) -> dict[str, float]:
        """What was computed since the last time, how fast and in how much memory, under metric names."""
        ...


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
    warmup_steps: int = 0
    advantages: AdvantageKind = "mean"
    """Groups have theirs already; "batch_std" is completed here."""
    seed: int = 0
    """Of the draw which rollout is trained in which sub-step."""

    @property
    def has_kl_term(self) -> bool:
        """True if groups whose advantages are all 0 teach all the same: not to leave the reference model."""
        return bool(self.kl_penalty_coef or self.loss.kl_loss_coef)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepResult:
    """What the trainer said: its log-probabilities before the update, per datum and token, and metrics."""

    training_logprobs: tuple[tuple[float, ...], ...]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What the parity gate compares: turns that the trainer's own weights sampled."""

    limit: float
    step: int
    replayed_ids: Collection[str]
    policy_version: int | None

    def check(self, datums: Sequence[Datum], rows: Sequence[Sequence[float]]) -> dict[str, float]:
        """Metrics of what the current policy sampled, nothing if there is none; raises `ParityError`."""
        compared = [of_version(datum, self.policy_version) for datum in datums]
        fresh, fresh_rows = _choose(compared, rows, lambda datum: datum.rollout_id not in self.replayed_ids)
        if not any(datum.num_trained_tokens for datum in fresh):
            return {}
        parity = measure_parity(fresh, fresh_rows)
        require_parity(parity, self.limit, step=self.step)
        return parity.metrics()


def scheduled_learning_rate(settings: TrainStepSettings, step: int, max_steps: int) -> float:
    """The learning rate of a step, counted from 1: a pure function, so that a resumed run goes on as if never stopped.

    It rises over `warmup_steps`; then "linear" and "cosine" fall from the full rate to a twentieth at the last step.
    """
    return learning_rate_at(
        step,
        highest=settings.optim.learning_rate,
        schedule=settings.schedule,
        warmup_steps=settings.warmup_steps,
        max_steps=max_steps,
        last_share=LAST_SHARE,
    )


async def train_step(
    trainer: Trainer,
    datums: Sequence[Datum],
    settings: TrainStepSettings,
    *,
    step: int,
    learning_rate: float,
    num_rollouts: int | None = None,
    replayed_ids: Collection[str] = (),
    policy_version: int | None = None,
) -> TrainStepResult:
    """Train on `datums` in `num_substeps` optimizer steps; raises `ParityError` before the first one is taken.

    `num_rollouts` were judged, those without datums included (None: all have datums); each sub-step's share of them is
    its share of the rollouts with datums.

    The parity gate looks at the first sub-step only, unless the loss needs the log-probabilities of all datums before
    it: later ones compare the sampler with weights that have moved. For the same reason it leaves out the rollouts in
    `replayed_ids`, and turns that another version than `policy_version` sampled (None: there are none): older policies
    did.
    """
    num_members = len({datum.member for datum in datums})
    work = await _prepare(trainer, datums, settings)
    work.rollouts_per_member = 1.0 if num_rollouts is None else num_rollouts / num_members
    gate = Gate(limit=settings.parity_limit, step=step, replayed_ids=replayed_ids, policy_version=policy_version)
    parts = deal_datums(work.datums, settings.num_substeps, f"{settings.seed}/{step - 1}")
    if settings.loss.has_behaviour_weight and len(parts) > 1:  # with one part, the policy before it is the one in it
        work.proximal = await trainer.forward(work.datums, temperature=settings.loss.temperature)
        work.metrics |= await asyncio.to_thread(gate.check, work.datums, work.proximal)
    optim = chz.replace(settings.optim, learning_rate=learning_rate)  # pyright: ignore[reportUnknownMemberType]
    rows: dict[int, tuple[float, ...]] = {}
    metrics: list[dict[str, float]] = []
    for part in parts:
        output = await _forward_backward(trainer, work, part, settings.loss)
        if not rows and work.proximal is None:
            chosen = [work.datums[index] for index in part]
            work.metrics |= await asyncio.to_thread(gate.check, chosen, output.training_logprobs)
        rows |= zip(part, output.training_logprobs, strict=True)
        taken = await trainer.optim_step(optim)
        metrics.append({**output.metrics, "optim/grad_norm": taken.grad_norm})
    before = work.proximal or [rows[index] for index in range(len(datums))]
    work.metrics |= combine_metrics(metrics)
    work.metrics |= {"optim/learning_rate": learning_rate, "optim/num_substeps": float(len(parts))}
    work.metrics |= await _measure_move(trainer, work.datums, before, settings, replayed_ids)
    work.metrics |= await trainer.take_account()
    return TrainStepResult(training_logprobs=tuple(before), metrics=work.metrics)


@dataclass(kw_only=True)
class _Work:
    """A step's datums as they are trained on, and what travels beside them."""

    datums: list[Datum]
    reference: Rows | None = None
    proximal: Rows | None = None
    rollouts_per_member: float = 1.0
    """Judged rollouts per rollout with datums."""
    metrics: dict[str, float] = field(default_factory=dict[str, float])

    def num_rollouts(self, datums: Sequence[Datum]) -> float:
        """How many judged rollouts these datums stand for."""
        return self.rollouts_per_member * len({datum.member for datum in datums})


async def _prepare(trainer: Trainer, datums: Sequence[Datum], settings: TrainStepSettings) -> _Work:
    """Complete the advantages (batch standard deviation, KL penalty), and get the reference log-probabilities."""
    work = _Work(datums=list(datums))
    if settings.advantages == "batch_std":
        work.datums, work.metrics["loss/advantage_std"] = divide_by_batch_std(work.datums)
    if settings.has_kl_term:
        work.reference = await trainer.reference_logprobs(work.datums, temperature=settings.loss.temperature)
    if settings.kl_penalty_coef and work.reference is not None:
        work.datums, work.metrics["policy/kl_base"] = await asyncio.to_thread(
            penalise_divergence, work.datums, work.reference, settings.kl_penalty_coef
        )
    return work


async def _forward_backward(
    trainer: Trainer, work: _Work, part: Sequence[int], loss: LossConfig
) -> ForwardBackwardOutput:
    def chosen(rows: Rows | None) -> Rows | None:
        return None if rows is None else [rows[index] for index in part]

    datums = [work.datums[index] for index in part]
    return await trainer.forward_backward(
        datums,
        loss,
        token_weights=token_weights(datums, loss, num_rollouts=work.num_rollouts(datums)),
        proximal_logprobs=chosen(work.proximal),
        reference_logprobs=chosen(work.reference if loss.kl_loss_coef else None),
    )


async def _measure_move(
    trainer: Trainer,
    datums: Sequence[Datum],
    before: Rows,
    settings: TrainStepSettings,
    replayed_ids: Collection[str],
) -> dict[str, float]:
    """How far the step moved the policy, if that is asked for, and how far replayed rollouts are from it."""
    replayed, rows = _choose(datums, before, lambda datum: datum.rollout_id in replayed_ids)
    metrics = ratio_metrics(replayed, rows)
    fresh, rows = _choose(datums, before, lambda datum: datum.rollout_id not in replayed_ids)
    if settings.compute_post_kl and fresh:
        after = await trainer.forward(fresh, temperature=settings.loss.temperature)
        metrics["policy/kl_post"] = _mean_gap(fresh, rows, after)
    return metrics


def _choose(
    datums: Sequence[Datum], rows: Sequence[Sequence[float]], is_wanted: Callable[[Datum], bool]
) -> tuple[list[Datum], list[Sequence[float]]]:
    """The datums that are wanted, and their rows."""
    chosen = [(datum, row) for datum, row in zip(datums, rows, strict=True) if is_wanted(datum)]
    return [datum for datum, _ in chosen], [row for _, row in chosen]


def _mean_gap(datums: Sequence[Datum], before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> float:
    """Mean of log-probability before minus after over trained tokens: an estimate of KL(before || after)."""
    gaps = [
        old - new
        for datum, old_row, new_row in zip(datums, before, after, strict=True)
        for old, new, is_trained in zip(old_row, new_row, datum.loss_mask, strict=True)
        if is_trained
    ]
    return sum(gaps) / len(gaps)
