from pathlib import Path
from typing import Any

import pytest

from cua_rl.environments.pool import DevicePool
from cua_rl.evaluation.attempts import TaskOutcomes
from cua_rl.evaluation.evaluate import Evaluator, summarise
from cua_rl.events import EvaluationEnded, GroupEnded, RolloutSource, SourceStarted
from cua_rl.metrics import check_names
from cua_rl.reporting.step_line import format_evaluation_line
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.run import RolloutRunner
from cua_rl.types.errors import DeviceError
from cua_rl.types.rollout import AdapterRef, SamplingParams
from tests.fakes import FakeAgent, FakeDevice, FakeGateway, FakeRecorder, make_task

SOURCE = RolloutSource(phase="eval", step=7)
ADAPTER = AdapterRef(path=Path("/adapters/7"), policy_version=7)


def outcomes(*successes: bool, category: str = "app", difficulty: str = "easy", num_faults: int = 0) -> TaskOutcomes:
    return TaskOutcomes(
        category=category,
        difficulty=difficulty,
        successes=successes,
        num_turns=tuple(range(1, len(successes) + 1)),
        rewards=tuple(map(float, successes)),
        num_faults=num_faults,
    )


def make_evaluator(agent: FakeAgent, recorder: FakeRecorder, num_attempts: int) -> Evaluator:
    async def make_device(_: object) -> Any:
        return FakeDevice()

    runner = RolloutRunner(
        devices=DevicePool(make_device, max_devices=1),
        gateway=FakeGateway(),  # type: ignore[arg-type]
        agent=agent,
        reward=binary_reward,
        recorder=recorder,
        max_turns=5,
    )
    tasks = [make_task("first"), make_task("second", seed=2)]
    params = SamplingParams(max_tokens=8, temperature=0.0)
    return Evaluator(tasks=tasks, runner=runner, params=params, recorder=recorder, num_attempts=num_attempts)


def test_a_summary_by_hand() -> None:
    result = summarise(
        [outcomes(True, False, False, False, category="settings", difficulty="hard"), outcomes(True, True, True, False)]
    )

    assert (result.success_rate, result.num_rollouts, result.num_successes) == (0.5, 8, 4)
    assert (result.num_tasks, result.num_faults, result.num_turns_mean) == (2, 0, 2.5)
    # pass@2: the mean of 1 - C(3,2)/C(4,2) = 0.5 and 1; pass@4: both have a success
    assert result.pass_at == {1: 0.5, 2: 0.75, 4: 1.0}
    assert result.success_rate_by_category == {"app": 0.75, "settings": 0.25}
    assert result.success_rate_by_difficulty == {"easy": 0.75, "hard": 0.25}


def test_tasks_count_alike_if_faults_took_attempts_of_some() -> None:
    result = summarise([outcomes(True, True, True, True), outcomes(False, num_faults=9)])

    assert (result.success_rate, result.reward_mean, result.num_turns_mean) == (0.5, 0.5, 1.75)
    assert result.success_rate_by_difficulty == {"easy": 0.5}


def test_pass_at_k_is_left_out_if_tasks_have_fewer_attempts() -> None:
    result = summarise([outcomes(False, True, True), outcomes(False), outcomes(True, True)])

    assert result.pass_at == {1: pytest.approx((2 / 3 + 1) / 3)}
    assert result.num_short_tasks == {2: 1, 3: 2}
    assert result.metrics("x")["eval/x/short_tasks/3"] == 2
    assert "pass@2 left out: fewer attempts at 1 task" in format_evaluation_line("Eval", "x", result.metrics("x"))


def test_a_task_lost_to_faults_widens_the_interval_and_leaves_out_pass_at_k() -> None:
    complete, lost = ([outcomes(True, False)] * 9 + [outcomes(*last)] for last in ((True, False), ()))

    assert summarise(lost).success_rate == summarise(complete).success_rate == 0.5
    assert summarise(lost).low < summarise(complete).low < summarise(complete).high < summarise(lost).high
    assert (summarise(lost).pass_at, summarise(lost).num_short_tasks) == ({}, {1: 1, 2: 1})
    assert "1 task lost to faults, pass@2" in format_evaluation_line("Eval", "x", summarise(lost).metrics("x"))


def test_every_metric_of_an_evaluation_is_known_by_name() -> None:
    metrics = summarise([outcomes(True, False)]).metrics("held_out")

    check_names(metrics)
    assert metrics["eval/held_out/pass_at_2"] == 1.0
    assert metrics["eval/held_out/success_rate/easy"] == 0.5


def test_nothing_judged_is_no_success_and_no_knowledge() -> None:
    result = summarise([outcomes(num_faults=3)])

    assert (result.success_rate, result.low, result.high, result.num_rollouts, result.pass_at) == (0, 0, 1, 0, {})


async def test_an_evaluation_tries_every_task_so_often_and_records_it_under_its_adapter() -> None:
    recorder = FakeRecorder()
    # the first task: a fault, then 1, 0; the second: 1, 1
    agent = FakeAgent([DeviceError("gone"), "1", "0", "1", "1"])

    result = await make_evaluator(agent, recorder, 2).run(SOURCE, ADAPTER)

    assert (result.num_rollouts, result.num_faults, result.success_rate) == (4, 1, 0.75)
    started = [event for event in recorder.events if isinstance(event, SourceStarted)]
    assert [(event.group_size, event.policy_version) for event in started] == [(2, 7)]
    assert sum(isinstance(event, GroupEnded) and event.source == SOURCE for event in recorder.events) == 2
    assert isinstance(recorder.events[-1], EvaluationEnded)


def test_bounds_say_what_may_hang_on_faults() -> None:
    def task(successes: tuple[bool, ...], **faults: Any) -> TaskOutcomes:
        turns = (1,) * len(successes)
        return TaskOutcomes(category="app", difficulty="easy", successes=successes, num_turns=turns, **faults)

    # 1 of 2; a success at the second try and one at the first; given up: (1/2 + 1/2 + 0) / 3, (1/2 + 1 + 1) / 3
    tasks = [
        task((True, False)),
        task((True, True), num_faults=1, retried=(True,)),
        task((), num_faults=3, num_given_up=1),
    ]
    result = summarise(tasks)

    assert (result.worst, result.best) == (pytest.approx(1 / 3), pytest.approx(2.5 / 3))
    assert "eval/x/success_rate_worst" in result.metrics("x")
    assert "eval/x/success_rate_worst" not in summarise(tasks[:1]).metrics("x")
