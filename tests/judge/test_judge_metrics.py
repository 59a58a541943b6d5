"""What a step's metrics say about the judge."""

from dataclasses import replace

import pytest

from cua_rl.metrics import check_names
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.types.judgement import Judgement, JudgeVote
from cua_rl.types.rollout import Rollout, StopReason
from tests.builders import group, judgement, rollout


def votes(*says: bool | None) -> tuple[JudgeVote, ...]:
    return tuple(
        JudgeVote(success=vote, is_malformed=vote is None, num_prompt_tokens=100, num_answer_tokens=10) for vote in says
    )


def judged(given: Judgement, reward: float | None = 1.0) -> Rollout:
    reason = StopReason.TASK_ERROR if reward is None else StopReason.FINISHED
    return replace(rollout(reward=reward, stop_reason=reason), judgement=given)


def test_verdicts_votes_latency_and_cost_are_summed_over_all_rollouts_faults_included() -> None:
    agreed = judged(judgement(*votes(True, True, True), cost_usd=0.25))
    divided = judged(judgement(*votes(True, False, None), cost_usd=0.5), reward=None)
    outvoted = judged(judgement(*votes(False, False, True), cost_usd=0.25), reward=0.0)

    metrics = rollout_metrics([group(agreed, outvoted, faulty=[divided])])

    check_names(metrics)
    assert (metrics["judge/num_verdicts"], metrics["judge/num_without_verdict"]) == (2, 1)
    assert metrics["judge/success_rate"] == 0.5
    assert metrics["judge/agreement"] == pytest.approx((1 + 2 / 3) / 2)
    assert metrics["judge/malformed_frac"] == pytest.approx(1 / 9)
    assert (metrics["judge/prompt_tokens"], metrics["judge/answer_tokens"]) == (900, 90)
    assert metrics["judge/cost_usd"] == 1.0
    assert (metrics["judge/latency_s/mean"], metrics["judge/latency_s/max"]) == (0.5, 0.5)
    assert "judge/validator_agreement" not in metrics


def test_beside_validators_the_judges_agreement_with_them_is_measured() -> None:
    right = judged(judgement(*votes(True), decides=False), reward=1.0)
    wrong = judged(judgement(*votes(True), decides=False), reward=0.0)

    assert rollout_metrics([group(right, wrong)])["judge/validator_agreement"] == 0.5


def test_without_a_judge_there_are_no_such_metrics() -> None:
    assert not [name for name in rollout_metrics([group(rollout())]) if name.startswith("judge/")]


def test_a_vote_without_a_score_leaves_the_score_to_the_others() -> None:
    given = [JudgeVote(success=True, score=score) for score in (0.6, 0.8, None)]

    assert judgement(*given, JudgeVote(success=False, score=0.0)).score == pytest.approx(0.7)
    assert judgement(JudgeVote(success=True)).score is None
