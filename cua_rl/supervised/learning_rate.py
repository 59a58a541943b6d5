"""The learning rate of each step: a pure function, so that a resumed run goes on as if never stopped."""

from math import cos, pi
from typing import Literal

RateSchedule = Literal["constant", "linear", "cosine"]
LAST_SHARE = 0.1


def learning_rate_at(step: int, *, highest: float, schedule: RateSchedule, warmup_steps: int, max_steps: int) -> float:
    """The rate of the 0-based `step`: up in a line over `warmup_steps`, then as `schedule` says.

    "linear" and "cosine" reach a tenth of `highest` at the last step.
    """
    if step < warmup_steps:
        return highest * (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(1, max_steps - 1 - warmup_steps)
    match schedule:
        case "constant":
            return highest
        case "linear":
            return highest * (1 - (1 - LAST_SHARE) * progress)
        case "cosine":
            return highest * (LAST_SHARE + (1 - LAST_SHARE) * (1 + cos(pi * progress)) / 2)
