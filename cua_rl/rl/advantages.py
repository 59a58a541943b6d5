"""Group-relative advantages: a rollout is good or bad compared with the others of its group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum, sqrt
from typing import Literal

from cua_rl.types.rollout import Datum, RolloutGroup

AdvantageKind = Literal["mean", "mean_std", "leave_one_out", "batch_std"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group and its advantages, aligned with `group.compared`; all 0 if the group has no learning signal."""

    group: RolloutGroup
    advantages: tuple[float, ...]


def score_group(group: RolloutGroup, kind: AdvantageKind) -> ScoredGroup:
    rewards = group.compared_rewards
    advantages = (0.0,) * len(rewards) if group.is_constant else group_advantages(rewards, kind)
    return ScoredGroup(group=group, advantages=advantages)


def group_advantages(rewards: Sequence[float], kind: AdvantageKind) -> tuple[float, ...]:
    """Centre rewards in their group: [1, 0, 0, 1] -> [.5, -.5, -.5, .5] (Dr. GRPO, arXiv 2503.20783).

    "mean_std" also divides by the population standard deviation (GRPO, arXiv 2402.03300): [1, 0, 0, 0] -> [1.73, -.58,
    ...]. "leave_one_out" compares each rollout with the mean of the others (RLOO, arXiv 2402.14740), which is
    n / (n - 1) times the centred reward: [1, 0, 0, 0] -> [1, -1/3, ...]. "batch_std" is "mean" here: the division
    belongs to the whole step, see `divide_by_batch_std`.

    A constant group gets exact zeros. The mean of eight times 0.1 is not quite 0.1, and the rounding error must not be
    trained on, least of all after division by its own size. Constant means equal, without a tolerance: rewards are
    rounded where they are made (`rewards/reward.py`), so rewards that should be equal are.
    """
    if len(set(rewards)) <= 1:
        return (0.0,) * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    match kind:
        case "mean" | "batch_std":
            return tuple(centred)
        case "mean_std":
            std = sqrt(sum(value * value for value in centred) / len(centred))
            return tuple(value / std for value in centred)
        case "leave_one_out":
            return tuple(value * len(rewards) / (len(rewards) - 1) for value in centred)


def divide_by_batch_std(datums: Sequence[Datum]) -> tuple[list[Datum], float]:
    """Divide advantages by their population standard deviation over the step's rollouts; also returns the deviation.

    Every rollout counts once, however many tokens and datums it has (as in REINFORCE++ with a group baseline, arXiv
    2501.03262). Groups without a learning signal do not count, even if a KL term keeps their datums. The division
    happens when a step trains, not when a group ends: recorded advantages are those of the group.
    """
    by_member: dict[tuple[str, str], float] = {}
    for datum in datums:  # all trained tokens of a rollout share its advantage
        trained = zip(datum.advantages, datum.loss_mask, strict=True)
        by_member[datum.member] = next((value for value, is_trained in trained if is_trained), 0.0)
    teaching = {group_id for (group_id, _), value in by_member.items() if value}
    values = [value for (group_id, _), value in by_member.items() if group_id in teaching]
    if not values:
        return list(datums), 0.0
    mean = fsum(values) / len(values)
    std = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
    if not std:
        return list(datums), std
    return [replace(datum, advantages=tuple(value / std for value in datum.advantages)) for datum in datums], std


def penalise_divergence(
    datums: Sequence[Datum], reference_logprobs: Sequence[Sequence[float]], coef: float
) -> tuple[list[Datum], float]:
    """KL penalty in the reward: lower the advantage of tokens that the policy prefers more than the reference model.

    Per trained token the KL estimate is d = sampling_logprob - reference_logprob; the advantage changes by coef *
    (mean(d) - d). Subtracting the mean makes the penalty move probability between tokens instead of lowering all of
    them. Also returns that mean.

    A token is penalised only for its own divergence. Penalties that are summed (and discounted) over later tokens need
    the mask applied again after the sum: otherwise prompt tokens and screenshots before an answer get an advantage,
    with a sampling log-probability of 0 that does not exist. Here no sum crosses tokens, and masked tokens keep exact
    zeros.
    """
    gaps = [
        logprob - reference
        for datum, row in zip(datums, reference_logprobs, strict=True)
        for logprob, reference, is_trained in zip(datum.sampling_logprobs, row, datum.loss_mask, strict=True)
        if is_trained
    ]
    mean = sum(gaps) / len(gaps)
    penalised: list[Datum] = []
    for datum, row in zip(datums, reference_logprobs, strict=True):
        tokens = zip(datum.advantages, datum.sampling_logprobs, row, datum.loss_mask, strict=True)
        advantages = tuple(
            advantage + coef * (mean - (logprob - reference)) if is_trained else 0.0
            for advantage, logprob, reference, is_trained in tokens
        )
        penalised.append(replace(datum, advantages=advantages))
    return penalised, mean
