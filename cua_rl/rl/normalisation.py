"""What a step's summed loss is divided by, as one weight per datum: the trainer only adds up.

The numbers are those of the whole optimizer step, so neither micro-batches nor several forward_backward calls nor the
split of a rollout into several datums change a gradient. Under "sequence_mean" all datums of a rollout share a weight.
"""

from collections import Counter
from collections.abc import Sequence

from cua_rl.config import LossConfig
from cua_rl.types import Datum


def token_weights(datums: Sequence[Datum], loss: LossConfig) -> list[float]:
    """The weight of every trained token of each datum.

    constant: 1 / (rollouts * normalisation_tokens). Long rollouts weigh as much per token as short ones do, and a step
    of long rollouts moves further than one of short ones (Dr. GRPO, arXiv 2503.20783).
    token_mean: 1 / trained tokens of the step (DAPO, arXiv 2503.14476). The same, but the step's length cancels.
    sequence_mean: the mean over a rollout's tokens, then the mean over rollouts (GRPO, arXiv 2402.03300). Tokens of
    long rollouts, which are the failed ones more often than not, weigh less.
    token_sum: 1.
    """
    divisor = step_divisor(datums, loss)
    return [weight / divisor for weight in own_weights(datums, loss)]


def own_weights(datums: Sequence[Datum], loss: LossConfig) -> list[float]:
    """What each datum's own rollout says of its weight, whatever else the step trains."""
    match loss.normalisation:
        case "constant":
            return [1 / loss.normalisation_tokens] * len(datums)
        case "sequence_mean":
            tokens = _tokens_by_rollout(datums)
            return [1 / tokens[datum.rollout_id] for datum in datums]
        case "token_mean" | "token_sum":
            return [1.0] * len(datums)


def step_divisor(datums: Sequence[Datum], loss: LossConfig) -> float:
    """What all of a step's own weights are divided by."""
    tokens = _tokens_by_rollout(datums)
    match loss.normalisation:
        case "constant" | "sequence_mean":
            return float(len(tokens))
        case "token_mean":
            return float(tokens.total())
        case "token_sum":
            return 1.0


def _tokens_by_rollout(datums: Sequence[Datum]) -> Counter[str]:
    tokens: Counter[str] = Counter()
    for datum in datums:
        tokens[datum.rollout_id] += datum.num_trained_tokens
    return tokens
