"""Rollouts whose reward a grader of OpenAI's fine-tuning gives, with and without a check of the task."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource
from cua_rl.judge.config import JudgeConfig
from cua_rl.judge.grader import Grader
from cua_rl.metrics import check_names
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.run.judge import plan_grader
from cua_rl.task_loader import load_tasks
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Rollout, SamplingParams, StopReason
from tests.builders import group
from tests.fakes import FakeAgent, FakeDevice, FakeGateway, FakeRecorder, make_task

CLOSE = {
    "type": "text_similarity",
    "name": "close",
    "input": "{{sample.output_text}}",
    "reference": "{{item.reference_answer}}",
    "evaluation_metric": "fuzzy_match",
}


async def run(grader: dict[str, Any], *, is_validated: bool, state: str = "0") -> Rollout:
    """The agent answers "done"."""

    async def make_device(_: object) -> Any:
        return FakeDevice()

    runner = RolloutRunner(
        devices=DevicePool(make_device, max_devices=1),
        gateway=FakeGateway(),  # type: ignore[arg-type]
        agent=FakeAgent([state]),
        reward=load_reward("rft_grader:grader.json"),
        recorder=FakeRecorder(),
        max_turns=5,
        judge=Grader(JudgeConfig(grader_text=json.dumps(grader)), None),
        judge_all=True,
    )
    task = replace(make_task(is_validated=is_validated), item={"reference_answer": "dome"})
    params = SamplingParams(max_tokens=8, temperature=1.0)
    source = RolloutSource(phase="step", step=0)
    return await runner.run(
        RolloutJob(source=source, group_id="g", group_index=0, member_index=0, task=task, params=params)
    )


@pytest.mark.parametrize("state", ["0", "1"])
async def test_the_grade_is_the_reward_and_the_check_decides_on_success(state: str) -> None:
    rollout = await run(CLOSE, is_validated=True, state=state)

    assert rollout.reward is not None
    assert rollout.reward.total == 0.75  # "done" and "dome" have "doe" in common: 2 * 3 / 8
    assert rollout.reward.parts == {"grade": 0.75}
    assert rollout.success is (state == "1")
    assert rollout.judgement is not None
    assert not rollout.judgement.decides


@pytest.mark.parametrize(("threshold", "success"), [(0.7, True), (0.8, False)])
async def test_without_a_check_the_threshold_decides(threshold: float, success: bool) -> None:
    rollout = await run(CLOSE | {"pass_threshold": threshold}, is_validated=False)

    assert rollout.reward is not None
    assert (rollout.reward.total, rollout.success) == (0.75, success)
    assert rollout.validation is not None
    assert (rollout.validation.query, rollout.validation.score) == ("judge grader close", 0.75)
    metrics = rollout_metrics([group(rollout)])
    check_names(metrics)
    assert metrics["judge/num_verdicts"] == 1


async def test_no_grade_is_a_fault_without_a_reward() -> None:
    broken = {"type": "python", "name": "p", "source": "import os\ndef grade(sample, item):\n    os._exit(0)"}
    rollout = await run(broken, is_validated=True)

    assert (rollout.stop_reason, rollout.reward) == (StopReason.TASK_ERROR, None)


def write(folder: Path, grader: dict[str, Any]) -> str:
    (folder / "grader.json").write_text(json.dumps(grader))
    return f"rft_grader:{folder / 'grader.json'}"


def tasks(**more: object) -> Any:
    custom = [{"instruction": "Which city? Answer.", **more}]
    source = {"source_type": "custom", "custom_tasks": custom}
    return load_tasks(source, seed=0, split="train", has_judge=True)


def test_a_run_whose_tasks_lack_what_the_grader_names_does_not_start(tmp_path: Path) -> None:
    reward = write(tmp_path, CLOSE)

    assert plan_grader(JudgeConfig(), reward, tasks(item={"reference_answer": "Rome"})).grader_text
    with pytest.raises(ConfigError, match=r"tasks with the field item.reference_answer, .* got 'custom_which_city"):
        plan_grader(JudgeConfig(), reward, tasks(item={"answer": "Rome"}))
    with pytest.raises(ConfigError, match="expected item as an object"):
        tasks(item="Rome")


def test_a_field_may_have_a_name_that_is_not_ascii(tmp_path: Path) -> None:
    reward = write(tmp_path, CLOSE | {"reference": "{{item.größe}}"})

    assert plan_grader(JudgeConfig(), reward, tasks(item={"größe": "2 m"})).grader_text


def test_a_grader_that_asks_a_model_needs_the_judges_endpoint(tmp_path: Path) -> None:
    model = {"type": "score_model", "name": "m", "model": "o4-mini", "input": [{"role": "user", "content": "Is it?"}]}
    reward = write(tmp_path, model)

    with pytest.raises(ConfigError, match=r"judge.base_url: expected the endpoint .* in place of 'o4-mini'"):
        plan_grader(JudgeConfig(), reward, tasks())
    endpoint = JudgeConfig(base_url="http://localhost:1/v1", model="own")
    assert plan_grader(endpoint, reward, tasks()).model == "own"
    with pytest.raises(ConfigError, match=r"judge.votes: expected it without a grader"):
        plan_grader(JudgeConfig(votes=3), reward, tasks())
