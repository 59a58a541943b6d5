"""Learning-rate schedules: pure functions of the step, so that a resumed run continues as if never stopped."""

from math import cos, pi

from cua_rl.training.config import LearningConfig


def learning_rate_at(step: int, config: LearningConfig, max_steps: int) -> float:
    """The learning rate of `step`, counted from 1: linear warm-up over `warmup_steps`, then the schedule.

    "linear" and "cosine" decay to 0, as in Transformers, and reach it after the last step, not in it: at rate 0 the
    rollouts of a step would be wasted. The first step after the warm-up has the full rate, and so has a single one.
    """
    highest, warmup_steps = config.learning_rate, config.warmup_steps
    if step <= warmup_steps:
        return highest * step / (warmup_steps + 1)
    progress = (step - 1 - warmup_steps) / max(1, max_steps - warmup_steps)
    match config.learning_rate_schedule:
        case "constant":
            return highest
        case "linear":
            return highest * (1 - progress)
        case "cosine":
            return highest * (1 + cos(pi * progress)) / 2
