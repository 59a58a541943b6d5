"""Learning-rate schedules: pure functions of the step, so that a resumed run continues as if never stopped."""

from math import cos, pi
from typing import Literal

RateSchedule = Literal["constant", "linear", "cosine"]
LAST_SHARE = 0.1


def learning_rate_at(
    step: int,
    *,
    highest: float,
    schedule: RateSchedule,
    warmup_steps: int,
    max_steps: int,
    last_share: float = LAST_SHARE,
) -> float:
    """The learning rate of `step`, counted from 1: linear warm-up over `warmup_steps`, then `schedule`.

    "linear" and "cosine" reach `last_share` of `highest` in the last step, a tenth by default.
    """
    if step <= warmup_steps:
        return highest * step / (warmup_steps + 1)
    progress = (step - 1 - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    match schedule:
        case "constant":
            return highest
        case "linear":
            return highest * (1 - (1 - last_share) * progress)
        case "cosine":
            return highest * (last_share + (1 - last_share) * (1 + cos(pi * progress)) / 2)
