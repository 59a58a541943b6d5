"""Metrics of a step's rollouts. Names are explained in `cua_rl/metrics.py`."""

from collections import Counter
from collections.abc import Sequence

from cua_rl.rl.datums import ForkReason
from cua_rl.types import Datum, ModelTurn, Rollout, RolloutGroup


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Reward, turns, stops and faults over all rollouts of a step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    turns = [turn.model for rollout in rollouts for turn in rollout.turns]
    metrics = {
        "reward/mean": _mean(rewards),
        "reward/success_rate": _mean([float(rollout.success) for rollout in rollouts]),
        "reward/constant_group_frac": _mean([float(group.is_constant) for group in groups]),
        "rollout/num_rollouts": float(len(rollouts)),
        "rollout/num_dropped_groups": float(sum(group.is_incomplete for group in groups)),
        "rollout/num_faults": float(sum(len(group.faulty) for group in groups)),
        "rollout/num_turns/mean": _mean([float(len(rollout.turns)) for rollout in rollouts]),
        "rollout/duration_s/mean": _mean([rollout.duration_s for rollout in rollouts]),
    }
    judged = _judge_metrics([rollout for group in groups for rollout in (*group.rollouts, *group.faulty)])
    return metrics | _turn_metrics(turns) | _stop_metrics(rollouts) | _part_metrics(rollouts) | judged


def _judge_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """What the judge said and cost, faults included; nothing if it was not asked."""
    judged = [(rollout.judgement, rollout) for rollout in rollouts if rollout.judgement is not None]
    if not judged:
        return {}
    judgements = [judgement for judgement, _ in judged]
    verdicts = [judgement for judgement in judgements if judgement.success is not None]
    votes = [vote for judgement in judgements for vote in judgement.votes]
    costs = [judgement.cost_usd for judgement in judgements if judgement.cost_usd is not None]
    beside = [
        float(judgement.success is rollout.success)
        for judgement, rollout in judged
        if not judgement.decides and judgement.success is not None
    ]
    metrics = {
        "judge/num_verdicts": float(len(verdicts)),
        "judge/num_without_verdict": float(len(judgements) - len(verdicts)),
        "judge/success_rate": _mean([float(judgement.success is True) for judgement in verdicts]),
        "judge/agreement": _mean([judgement.agreement for judgement in verdicts]),
        "judge/malformed_frac": _mean([float(vote.is_malformed) for vote in votes]),
        "judge/latency_s/mean": _mean([judgement.duration_s for judgement in judgements]),
        "judge/latency_s/max": max(judgement.duration_s for judgement in judgements),
        "judge/prompt_tokens": float(sum(vote.num_prompt_tokens for vote in votes)),
        "judge/answer_tokens": float(sum(vote.num_answer_tokens for vote in votes)),
    }
    metrics |= {"judge/cost_usd": sum(costs)} if costs else {}
    return metrics | ({"judge/validator_agreement": _mean(beside)} if beside else {})


def _part_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over all rollouts, those without the part counted as 0: they add up to the mean reward."""
    parts: Counter[str] = Counter()
    for rollout in rollouts:
        if rollout.reward is not None:
            parts.update(rollout.reward.parts)
    return {f"reward/parts/{name}": total / len(rollouts) for name, total in parts.items()}


def _turn_metrics(turns: Sequence[ModelTurn]) -> dict[str, float]:
    sampled = [logprob for turn in turns for logprob in turn.sampling_logprobs]
    prompt_tokens = sum(turn.prompt.length for turn in turns)
    return {
        "rollout/sampled_tokens": float(len(sampled)),
        "rollout/prompt_tokens": float(prompt_tokens),
        "rollout/cached_prompt_frac": sum(turn.cached_tokens for turn in turns) / max(1, prompt_tokens),
        "rollout/parse_failure_frac": _mean([float(turn.failure is not None) for turn in turns]),
        "rollout/prompt_mismatches": float(sum(not turn.prompt_matches_renderer for turn in turns)),
        "policy/entropy_estimate": -_mean(sampled),
    }


def _stop_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    stops = Counter(rollout.stop_reason for rollout in rollouts)
    return {f"stop/{reason}": count / len(rollouts) for reason, count in stops.items()}


def datum_metrics(datums: Sequence[Datum], forks: Counter[ForkReason], num_retokenised: int) -> dict[str, float]:
    """How rollouts became training sequences."""
    num_turns = sum(len(datum.turn_indices) for datum in datums)
    return {
        "rollout/num_datums": float(len(datums)),
        "rollout/trained_tokens": float(sum(datum.num_trained_tokens for datum in datums)),
        "rollout/datum_tokens": float(sum(datum.model_input.length for datum in datums)),
        "rollout/merged_turn_frac": 1 - len(datums) / num_turns if num_turns else 0.0,
        "rollout/retokenised_tokens": float(num_retokenised),
    } | {f"rollout/forks/{reason}": float(count) for reason, count in forks.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
