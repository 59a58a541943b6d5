"""Group-relative advantages: a rollout is good or bad compared with the others of its group."""

from collections.abc import Sequence
from math import sqrt
from typing import Literal

AdvantageKind = Literal["mean", "mean_std"]


def group_advantages(rewards: Sequence[float], kind: AdvantageKind) -> tuple[float, ...]:
    """Centre rewards in their group: [1, 0, 0, 1] -> [.5, -.5, -.5, .5] (Dr. GRPO, arXiv:2503.20783).

    "mean_std" also divides by the population standard deviation (GRPO, arXiv:2402.03300): [1, 0, 0, 0] -> [1.73, -.58,
    ...]. A constant group gets exact zeros: it must not train on rounding errors.
    """
    if len(set(rewards)) <= 1:
        return (0.0,) * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    if kind == "mean":
        return tuple(centred)
    std = sqrt(sum(value * value for value in centred) / len(centred))
    return tuple(value / std for value in centred)
