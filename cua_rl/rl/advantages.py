"""Group-relative advantages: a rollout is good or bad compared with the others of its group."""

from collections.abc import Sequence
from dataclasses import replace
from math import fsum, sqrt
from typing import Literal

from cua_rl.types import Datum, RolloutGroup

AdvantageKind = Literal["mean", "mean_std", "leave_one_out", "batch_std"]


def advantages_of(group: RolloutGroup, kind: AdvantageKind) -> tuple[float, ...]:
    """The advantages of what a group compares; zeros if it teaches nothing."""
    rewards = group.compared_rewards
    return (0.0,) * len(rewards) if group.is_constant else group_advantages(rewards, kind)


def group_advantages(rewards: Sequence[float], kind: AdvantageKind) -> tuple[float, ...]:
    """Centre rewards in their group: [1, 0, 0, 1] -> [.5, -.5, -.5, .5] (Dr. GRPO, arXiv 2503.20783).

    "mean_std" also divides by the population standard deviation (GRPO, arXiv 2402.03300): [1, 0, 0, 0] -> [1.73, -.58,
    ...]. "leave_one_out" compares each rollout with the mean of the others (RLOO, arXiv 2402.14740), which is
    n / (n - 1) times the centred reward: [1, 0, 0, 0] -> [1, -1/3, ...]. "batch_std" is "mean" here: the division
    belongs to the whole step, see `divide_by_batch_std`.

    A constant group gets exact zeros: the mean of eight times 0.1 is not quite 0.1, and what is left of the subtraction
    must not be trained on, least of all divided by its own size. Constant means equal, without a tolerance: rewards are
    rounded where they are made (`rewards/reward.py`), so that those which are equal on paper are equal here.
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
    """Divide advantages by their population standard deviation over the step's rollouts; also that deviation.

    Every rollout counts once, however many tokens and datums it has (as REINFORCE++ with a group baseline does, arXiv
    2501.03262). Groups that teach nothing do not count, whether or not a KL term keeps their datums. It is done when a
    step trains, not when a group ends: recorded advantages are those of the group.
    """
    by_member = {datum.member: _advantage(datum) for datum in datums}
    teaching = {group_id for (group_id, _), value in by_member.items() if value}
    values = [value for (group_id, _), value in by_member.items() if group_id in teaching]
    if not values:
        return list(datums), 0.0
    mean = fsum(values) / len(values)
    std = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
    if not std:
        return list(datums), std
    return [replace(datum, advantages=tuple(value / std for value in datum.advantages)) for datum in datums], std


def _advantage(datum: Datum) -> float:
    """All tokens of a rollout share one advantage."""
    return next((value for value, is_trained in zip(datum.advantages, datum.loss_mask, strict=True) if is_trained), 0.0)
