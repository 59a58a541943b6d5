"""Metrics of a step's rollouts. Names are explained in `cua_rl/metrics.py`."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import ceil
from statistics import pstdev

from cua_rl.evaluation.statistics import mean_over_tasks
from cua_rl.metrics import merge_metrics
from cua_rl.types.group_members import without_siblings
from cua_rl.types.rollout import Rollout, RolloutGroup, Turn


def rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Reward, turns, stops, faults and durations over all rollouts of a step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.own_turns]
    num_shared = sum(rollout.fork_turn for rollout in rollouts)
    num_turns = [float(len(rollout.turns)) for rollout in rollouts]
    attempts = [[rollout.member_index for rollout in (*group.rollouts, *group.faulty)] for group in groups]
    durations = sorted(rollout.duration_s for rollout in rollouts)
    stops = Counter(rollout.stop_reason for rollout in rollouts)
    metrics = {
        "rollout/num_rollouts": float(len(rollouts)),
        "rollout/num_dropped_groups": float(sum(group.is_incomplete for group in groups)),
        "rollout/num_faults": float(sum(len(group.faulty) for group in groups)),
        "rollout/num_retries": float(sum(len(members) - len(set(members)) for members in attempts)),
        "rollout/num_turns/mean": _mean(num_turns),
        "rollout/num_turns/max": max(num_turns, default=0.0),
        "rollout/duration_s/mean": _mean(durations),
        "time/rollout_s/p90": durations[ceil(0.9 * len(durations)) - 1] if durations else 0.0,
        "time/rollout_s/max": durations[-1] if durations else 0.0,
    } | {f"stop/{reason}": count / len(rollouts) for reason, count in stops.items()}
    faults = Counter(rollout.stop_reason for group in groups for rollout in group.faulty)
    workers = Counter(rollout.worker for group in groups for rollout in group.faulty if rollout.worker is not None)
    bounds: dict[str, float] = {}
    if faults:
        worst, best = zip(*(_first_try_bounds(without_siblings(group)) for group in groups), strict=True)
        bounds = {"reward/success_rate_worst": _mean(worst), "reward/success_rate_best": _mean(best)}
    return merge_metrics(
        metrics,
        {f"rollout/faults/{reason}": float(count) for reason, count in faults.items()},
        {f"rollout/worker_faults/{worker}": float(count) for worker, count in workers.items()},
        bounds,
        {"rollout/shared_turns": float(num_shared)} if num_shared else {},
        _reward_metrics(groups),
        _turn_metrics(turns),
        _harness_metrics(rollouts),
        _judge_metrics([rollout for group in groups for rollout in (*group.rollouts, *group.faulty)]),
    )


def _harness_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """The mean of every number that a harness reports, over the rollouts that have it."""
    reported: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if rollout.validation is not None:
            for name, value in rollout.validation.metrics.items():
                reported[name].append(value)
    return {f"rollout/harness/{name}": _mean(values) for name, values in reported.items()}


def _judge_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Verdicts and cost of the judge, faults included; empty if no judge was asked."""
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


def _reward_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Rewards and success rates, how they vary over groups and categories, and the parts, 0 where there is none."""
    rewards, begun = [reward for group in groups for reward in group.rewards], [without_siblings(one) for one in groups]
    parts: defaultdict[str, float] = defaultdict(float)
    for group in begun:
        for reward in (rollout.reward for rollout in group.rollouts if rollout.reward is not None):
            for name, value in reward.parts.items():
                parts[name] += value / len(group.rollouts)
    judged = [[rollout.success for rollout in group.rollouts] for group in begun if group.rollouts]
    ended = [[rollout.success for rollout in group.rollouts] for group in groups if group.rollouts]
    by_category: defaultdict[str, list[list[bool]]] = defaultdict(list)
    for group in begun:
        by_category[group.category].append([rollout.success for rollout in group.rollouts])
    metrics = {
        "reward/mean": mean_over_tasks(group.rewards for group in begun),
        "reward/std": pstdev(rewards) if rewards else 0.0,
        "reward/std_in_group": _mean([pstdev(group.rewards) for group in groups if group.rewards]),
        "reward/success_rate": mean_over_tasks(judged),
        "reward/constant_group_frac": _mean([float(group.is_constant) for group in groups]),
        "reward/all_failed_group_frac": _mean([float(not any(group)) for group in ended]),
        "reward/all_solved_group_frac": _mean([float(all(group)) for group in ended]),
    }
    metrics |= {f"reward/parts/{name}": total / len(judged) for name, total in parts.items()}
    return metrics | {
        f"reward/success_rate/{name}": mean_over_tasks(tasks)
        for name, tasks in sorted(by_category.items())
        if name and any(tasks)
    }


def _first_try_bounds(group: RolloutGroup) -> tuple[float, float]:
    """The success rate of first tries if those that a fault ended had all failed, and if they had succeeded."""
    struck = {rollout.member_index for rollout in group.faulty}
    members = struck | {rollout.member_index for rollout in group.rollouts}
    num_solved = sum(rollout.success for rollout in group.rollouts if rollout.member_index not in struck)
    return num_solved / len(members), (num_solved + len(struck)) / len(members)


def _turn_metrics(turns: Sequence[Turn]) -> dict[str, float]:
    models = [turn.model for turn in turns]
    sampled = [logprob for model in models for logprob in model.sampling_logprobs]
    prompt_tokens = sum(model.prompt.length for model in models)
    refused = [turn.agent.action_error is not None and turn.model.failure is None for turn in turns]
    return {
        "rollout/sampled_tokens": float(len(sampled)),
        "rollout/sampled_tokens_per_turn/mean": len(sampled) / max(1, len(turns)),
        "rollout/prompt_tokens": float(prompt_tokens),
        "rollout/cached_prompt_frac": sum(model.cached_tokens for model in models) / max(1, prompt_tokens),
        "rollout/parse_failure_frac": _mean([float(model.failure is not None) for model in models]),
        "rollout/action_error_frac": _mean([float(is_refused) for is_refused in refused]),
        "rollout/truncated_turn_frac": _mean([float(model.stop == "length") for model in models]),
        "rollout/prompt_mismatches": float(sum(not model.prompt_matches_renderer for model in models)),
        "policy/entropy_estimate": -_mean(sampled),
        "time/turn_s/mean": _mean([sum(turn.agent.durations_s.values()) for turn in turns]),
        "time/sampling_s/mean": _mean([model.duration_s for model in models]),
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
