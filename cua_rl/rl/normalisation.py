"""What a step's summed loss is divided by, as one weight per datum: the trainer only adds up.

The numbers are those of the whole optimizer step, so neither micro-batches nor several forward_backward calls nor the
split of a rollout into several datums change a gradient. Under "sequence_mean" all datums of a rollout share a weight.

A mean over rollouts is over all that were judged, also those of groups in which all are equally good. Their gradient is
zero, and that is what they say: the weight of a token must not depend on how many of the other groups teach.
"""

from collections import Counter
from collections.abc import Sequence

from cua_rl.config import LossConfig
from cua_rl.types import Datum


def token_weights(datums: Sequence[Datum], loss: LossConfig, *, num_rollouts: float) -> list[float]:
    """The weight of every trained token of each datum, if the optimizer step's share of judged rollouts is that many.

    constant: 1 / (rollouts * normalisation_tokens). Long rollouts weigh as much per token as short ones do, and a step
    of long rollouts moves further than one of short ones (Dr. GRPO, arXiv 2503.20783).
    token_mean: 1 / trained tokens of the step (DAPO, arXiv 2503.14476, whose batch has teaching groups only). The same,
    but the step's length cancels.
    sequence_mean: the mean over a rollout's tokens, then the mean over rollouts (GRPO, arXiv 2402.03300). Tokens of
    long rollouts, which are the failed ones more often than not, weigh less.
    token_sum: 1.
    """
    tokens = Counter[tuple[str, str]]()
    for datum in datums:
        tokens[datum.member] += datum.num_trained_tokens
    match loss.normalisation:
        case "constant":
            return [1 / loss.normalisation_tokens / num_rollouts] * len(datums)
        case "token_mean":
            return [1 / tokens.total()] * len(datums)
        case "sequence_mean":
            return [1 / tokens[datum.member] / num_rollouts for datum in datums]
        case "token_sum":
            return [1.0] * len(datums)
