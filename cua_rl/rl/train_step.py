"""One training step on a batch of datums: forward_backward, parity gate, optim_step; once per sub-step."""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul
from random import Random
from typing import Protocol

from cua_rl.command_line.fields import with_values
from cua_rl.metrics import SUMMED, merge_metrics
from cua_rl.rl.advantages import divide_by_batch_std, penalise_divergence
from cua_rl.rl.config import LoopConfig
from cua_rl.rl.datums import Batch
from cua_rl.rl.parity import ParityGate, choose_datums
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types.rollout import Datum

Rows = Sequence[tuple[float, ...]]
"""One value per token of every datum, 0.0 off-mask."""


class Trainer(Protocol):
    """What a step asks of the trainer; `training.client.TrainingClient` says what the methods do."""

    async def begin_step(self) -> None: ...

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

    async def trainer_metrics(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStepResult:
    """The trainer's log-probabilities before the update, per datum and token, and metrics."""

    training_logprobs: tuple[tuple[float, ...], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    trained_on: str | None = None
    """The machine that took the optimizer steps, if the trainer says."""


async def train_step(
    trainer: Trainer, batch: Batch, config: LoopConfig, *, step: int, max_steps: int, policy_version: int | None = None
) -> TrainStepResult:
    """Train on `batch` in `num_substeps` optimizer steps; raises `ParityError` before the first one is taken.

    The parity gate checks the first sub-step only, unless the log-probabilities of all datums are needed in advance:
    later sub-steps have other weights than the sampler. For the same reason it leaves out replayed rollouts,
    and turns of other versions than `policy_version` (None: all turns are of the current one).
    """
    await trainer.begin_step()
    # a divergence is a mean over all tokens, a policy loss over those that would be trained on without it
    is_shared = config.loss.normalisation == "token_mean" and config.has_kl_term
    teaching = teaching_share(batch.datums) if is_shared else 1.0
    loss = with_values(config.loss, temperature=config.temperature, kl_loss_coef=config.loss.kl_loss_coef * teaching)
    datums, reference, metrics = await _complete_advantages(trainer, batch.datums, config, teaching)
    gate = ParityGate(
        limit=config.parity_limit, step=step, replayed_ids=batch.replayed_ids, policy_version=policy_version
    )
    parts = deal_datums(datums, config.num_substeps, f"{config.seed}/{step - 1}")
    before: Rows | None = None
    # with one part, the policy before the step is the one that its gradient is computed with
    if (loss.has_behaviour_weight or config.compute_post_kl) and len(parts) > 1:
        before = await trainer.forward(datums, temperature=loss.temperature)
        metrics = merge_metrics(metrics, await asyncio.to_thread(gate.check, datums, before))
    proximal = before if loss.has_behaviour_weight else None
    optim = with_values(config.adam, learning_rate=config.learning_rate_at(step, max_steps))
    rollouts_per_member = batch.num_rollouts / _num_members(datums)  # rollouts without datums count in means too
    rows: dict[int, tuple[float, ...]] = {}
    part_metrics: list[dict[str, float]] = []
    trained_on: str | None = None
    for part in parts:
        chosen = [datums[index] for index in part]
        num_rollouts = rollouts_per_member * _num_members(chosen)
        output = await trainer.forward_backward(
            chosen,
            loss,
            token_weights=token_weights(chosen, loss, num_rollouts=num_rollouts, teaching=teaching),
            proximal_logprobs=proximal and [proximal[index] for index in part],
            reference_logprobs=reference and [reference[index] for index in part],
        )
        if not rows and before is None:
            metrics = merge_metrics(metrics, await asyncio.to_thread(gate.check, chosen, output.training_logprobs))
        rows |= zip(part, output.training_logprobs, strict=True)
        taken = await trainer.optim_step(optim)
        trained_on = taken.machine or None
        part_metrics.append(merge_metrics(output.metrics, {"optim/grad_norm": taken.grad_norm}))
    before = before or [rows[index] for index in range(len(datums))]
    metrics = merge_metrics(
        metrics,
        combine_metrics(part_metrics),
        {"optim/learning_rate": optim.learning_rate, "optim/num_substeps": float(len(parts))},
        await _measure_move(trainer, datums, before, config, batch.replayed_ids),
        await trainer.trainer_metrics(),
    )
    return TrainStepResult(training_logprobs=tuple(before), metrics=metrics, trained_on=trained_on)


async def _complete_advantages(
    trainer: Trainer, datums: Sequence[Datum], config: LoopConfig, teaching: float
) -> tuple[list[Datum], Rows | None, dict[str, float]]:
    """Complete the advantages with terms over the whole batch: its standard deviation, and the share `teaching` of the
    KL penalty. Also returns reference log-probabilities if the loss has a KL term, and metrics.
    """
    completed, metrics = list(datums), dict[str, float]()
    if config.advantages == "batch_std":
        completed, metrics["loss/advantage_std"] = divide_by_batch_std(completed)
    if not config.has_kl_term:
        return completed, None, metrics
    reference = await trainer.reference_logprobs(completed, temperature=config.temperature)
    if config.kl_penalty_coef:
        completed, metrics["policy/kl_base"] = await asyncio.to_thread(
            penalise_divergence, completed, reference, config.kl_penalty_coef * teaching
        )
    return completed, reference if config.loss.kl_loss_coef else None, metrics


def deal_datums(datums: Sequence[Datum], num_parts: int, seed: str) -> list[list[int]]:
    """Assign datums to at most `num_parts` sub-steps: the indices of each, ascending.

    Datums of one rollout stay together. Of every `num_parts` consecutive rollouts each part gets one, drawn by `seed`:
    so the rollouts of a group are spread over the parts, and sizes differ by one rollout at most.
    """
    members = list(dict.fromkeys(datum.member for datum in datums))
    rng = Random(seed)
    part_of: dict[tuple[str, str], int] = {}
    for start in range(0, len(members), num_parts):
        order = rng.sample(range(num_parts), num_parts)
        part_of |= zip(members[start : start + num_parts], order, strict=False)
    parts = [
        [index for index, datum in enumerate(datums) if part_of[datum.member] == part] for part in range(num_parts)
    ]
    return [part for part in parts if part]


def teaching_share(datums: Sequence[Datum]) -> float:
    """Share of the trained tokens that are of groups with advantages; 1 if a KL term is all that there is to train."""
    groups = {datum.group_id for datum in datums if any(datum.advantages)}
    counts = [(datum.num_trained_tokens, datum.group_id in groups) for datum in datums]
    return sum(count for count, teaches in counts if teaches) / sum(count for count, _ in counts) or 1.0


def token_weights(
    datums: Sequence[Datum], loss: LossConfig, *, num_rollouts: float, teaching: float = 1.0
) -> list[float]:
    """The weight of every trained token of each datum in the summed loss of an optimizer step.

    The trainer only sums. The divisor is that of the whole optimizer step, so a gradient does not depend on how
    rollouts are split into datums, or datums into micro-batches and requests. `num_rollouts` is the step's share of
    judged rollouts, including those of constant groups: their gradient is zero, and a token must not weigh more because
    other groups have no learning signal.

    constant: 1 / (rollouts * normalisation_tokens). Tokens of long rollouts weigh as much as those of short ones, and a
    step of long rollouts moves further than one of short ones (Dr. GRPO, arXiv 2503.20783).
    token_mean: 1 / trained tokens of the step (DAPO, arXiv 2503.14476, whose batch only has groups with a learning
    signal). The same, but the step's length cancels. Tokens kept only for a KL term do not count: the share `teaching`
    of all tokens does. The caller multiplies the KL term's coefficient by it, too, for a mean over all tokens.
    sequence_mean: the mean over a rollout's tokens, then the mean over rollouts (GRPO, arXiv 2402.03300). Tokens of
    long rollouts, which fail more often than not, weigh less.
    token_sum: 1.
    """
    tokens = Counter[tuple[str, str]]()
    for datum in datums:
        tokens[datum.member] += datum.num_trained_tokens
    match loss.normalisation:
        case "constant":
            return [1 / loss.normalisation_tokens / num_rollouts] * len(datums)
        case "token_mean":
            return [1 / (tokens.total() * teaching)] * len(datums)
        case "sequence_mean":
            return [1 / tokens[datum.member] / num_rollouts for datum in datums]
        case "token_sum":
            return [1.0] * len(datums)


def _num_members(datums: Sequence[Datum]) -> int:
    return len({datum.member for datum in datums})


_OF_OPTIMIZER_STEPS = frozenset({"loss/total", "optim/grad_norm"})


def combine_metrics(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of a whole step from those of its sub-steps.

    Counts are summed; extremes stay extremes, the 99th percentile included. Figures of a whole optimizer step become
    plain means, all others means weighted by `optim/trained_tokens`.
    """
    if len(parts) == 1:
        return dict(parts[0])
    weights = [part.get("optim/trained_tokens", 1.0) for part in parts]
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        values = [part[name] for part in parts if name in part]
        if name in SUMMED:
            combined[name] = sum(values)
        elif name.endswith(("max", "_p99")):
            combined[name] = max(values)
        elif name.endswith("min"):
            combined[name] = min(values)
        elif name in _OF_OPTIMIZER_STEPS:
            combined[name] = sum(values) / len(values)
        else:
            present = [weight for part, weight in zip(parts, weights, strict=True) if name in part]
            combined[name] = sum(map(mul, values, present)) / sum(present)
    return combined


async def _measure_move(
    trainer: Trainer, datums: Sequence[Datum], before: Rows, config: LoopConfig, replayed_ids: Collection[str]
) -> dict[str, float]:
    """How far replayed rollouts are from the policy, and, with `compute_post_kl`, how far the step moved it."""
    replayed, rows = choose_datums(datums, before, lambda datum: datum.rollout_id in replayed_ids)
    metrics = ratio_metrics(replayed, rows)
    fresh, rows = choose_datums(datums, before, lambda datum: datum.rollout_id not in replayed_ids)
    if config.compute_post_kl and fresh:
        after = await trainer.forward(fresh, temperature=config.temperature)
        gaps = _gaps(fresh, rows, after)
        metrics["policy/kl_post"] = sum(gaps) / len(gaps)  # an estimate of KL(before || after)
    return metrics


def ratio_metrics(datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far the policy has moved from the one that sampled `datums`: |log ratio| per trained token, nats."""
    sampled = [datum.sampling_logprobs for datum in datums]
    gaps = [abs(gap) for gap in _gaps(datums, training_logprobs, sampled)]
    return {"replay/log_ratio/mean": sum(gaps) / len(gaps), "replay/log_ratio/max": max(gaps)} if gaps else {}


def _gaps(datums: Sequence[Datum], left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> list[float]:
    """`left` minus `right` per trained token."""
    return [
        one - other
        for datum, left_row, right_row in zip(datums, left, right, strict=True)
        for one, other, is_trained in zip(left_row, right_row, datum.loss_mask, strict=True)
        if is_trained
    ]
