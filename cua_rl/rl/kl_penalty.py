"""KL penalty against what training started from, in the reward, as a change of the advantages."""

from collections.abc import Sequence
from dataclasses import replace

from cua_rl.types import Datum


def penalise_divergence(
    datums: Sequence[Datum], reference_logprobs: Sequence[Sequence[float]], coef: float
) -> tuple[list[Datum], float]:
    """Lower the advantage of tokens that the policy likes better than the reference does; also the mean KL estimate.

    Per trained token the estimate is d = sampling_logprob - reference_logprob; the advantage changes by coef * (mean(d)
    - d): the mean is taken out so that the penalty moves probability around instead of pushing all of it one way.

    A token answers for its own divergence only. Penalties that are summed over later tokens, discounted, have to be
    masked once more after the sum: else prompt tokens and screenshots before an answer get an advantage, with
    a sampling log-probability of 0 that nobody sampled. Here no sum crosses tokens, and tokens off the mask keep their
    exact zeros.
    """
    gaps = [
        logprob - reference
        for datum, row in zip(datums, reference_logprobs, strict=True)
        for logprob, reference, is_trained in zip(datum.sampling_logprobs, row, datum.loss_mask, strict=True)
        if is_trained
    ]
    mean = sum(gaps) / len(gaps)
    penalised = [_penalise(datum, row, coef, mean) for datum, row in zip(datums, reference_logprobs, strict=True)]
    return penalised, mean


def _penalise(datum: Datum, references: Sequence[float], coef: float, mean: float) -> Datum:
    advantages = tuple(
        advantage + coef * (mean - (logprob - reference)) if is_trained else 0.0
        for advantage, logprob, reference, is_trained in zip(
            datum.advantages, datum.sampling_logprobs, references, datum.loss_mask, strict=True
        )
    )
    return replace(datum, advantages=advantages)
