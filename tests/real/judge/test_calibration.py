"""A judge of known error, calibrated on rollouts that a real recorder wrote into a real Postgres."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cua_rl.agent.agent import AgentOutcome, AgentTask, OnTurn
from cua_rl.command_line.fields import with_values
from cua_rl.command_line.parsing import make_config
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.environments.device import Device
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import DevicePool
from cua_rl.events import GroupEnded, RolloutSource, SourceStarted, TrainingEnded, TrainingStarted
from cua_rl.judge.request import Case, build_messages
from cua_rl.recipes.calibrate_judge import CalibrateConfig, cli_main
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.group import GroupJob, collect_groups, run_group
from cua_rl.rollout.run import RolloutRunner
from cua_rl.run.judge import make_judge_config, require_precision
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Button, Click, PressButton
from cua_rl.types.errors import ConfigError, JudgeError
from cua_rl.types.rollout import AgentTurn, ModelTurn, Rollout, RolloutGroup, SamplingParams, StopReason
from tests.builders import model_turn, prompt, text
from tests.doubles.judge_endpoint import KEY, MODEL, Asked, JudgeEndpoint, serve_judge, verdict
from tests.fakes import FakeGateway
from tests.real.database.conftest import run_sql

GROUPS, MEMBERS = 80, 4
TASKS = [
    {
        "task_id": f"leave_{app}",
        "instruction": f"Leave {app}.",
        "category": category,
        "max_turns": 2,
        "start": {"app": app},
        "check": {"query": "current_app", "expected": "com.android.launcher3"},
    }
    for app, category in (("clock", "app"), ("mail", "app"), ("settings", "navigation"))
]


@dataclass
class CoinFlips:
    """Presses Home or taps somewhere, by chance, and says that it is done either way."""

    random: Random = field(default_factory=lambda: Random(1))
    num_turns: int = 0

    async def run(
        self, task: AgentTask, device: Device, access: Any, *, clock: object, on_turn: OnTurn
    ) -> AgentOutcome:
        turns: list[ModelTurn] = access.openai_client(task.rollout_id)
        self.num_turns += 1
        response_id = f"resp-{self.num_turns}"
        turns.append(model_turn(prompt(text(1, 2)), response_id=response_id))
        action: Action = PressButton(button=Button.HOME)
        if self.random.random() < 0.6:
            action = Click(x=self.random.randrange(192), y=self.random.randrange(40, 280))
        before = await device.observe()
        await device.execute(action)
        await on_turn(
            AgentTurn(
                response_id=response_id,
                before=before,
                action=action,
                after=await device.observe(),
            )
        )
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=1, answer='{"success": true, "reason": "done"}')


async def record_rollouts(url: str) -> list[tuple[str, Rollout]]:
    """An evaluation on simulated phones as a run records it: (instruction, rollout) of each."""
    params, source = SamplingParams(max_tokens=8, temperature=1.0), RolloutSource(phase="baseline", step=0)
    tasks = load_tasks({"source_type": "custom", "custom_tasks": TASKS}, seed=0, split="eval").held_out(GROUPS)
    async with DatabaseRecorder(url, image_token_id=9) as recorder, SimulatedPhones() as phones:
        await recorder.record(
            TrainingStarted(run_name="known", log_path="/runs/known", config={}, first_step=0, total_steps=1)
        )
        await recorder.record(SourceStarted(source=source, tasks=tuple(tasks), group_size=MEMBERS, policy_version=0))

        async def record_end(group: RolloutGroup, _: Task | None) -> RolloutGroup:
            await recorder.record(GroupEnded(source=source, group=group, advantages=None))
            return group

        runner = RolloutRunner(
            devices=DevicePool(phones.make, max_devices=16),
            gateway=FakeGateway(),  # type: ignore[arg-type]
            agent=CoinFlips(),  # type: ignore[arg-type]
            reward=binary_reward,
            recorder=recorder,
            max_turns=2,
        )
        plan = GroupJob(source=source, group_size=MEMBERS, params=params)
        groups = await collect_groups(tasks, partial(run_group, runner, job=plan), record_end)
        await recorder.record(TrainingEnded(status="completed"))
    return [
        (task.instruction, rollout) for task, group in zip(tasks, groups, strict=True) for rollout in group.rollouts
    ]


@dataclass
class KnownJudge:
    """Says what `verdicts` holds for what it is shown; None is an answer that is none."""

    verdicts: Mapping[str, bool | None]

    def __call__(self, asked: Asked) -> str:
        said = self.verdicts[self.key(asked.body["messages"])]
        return "I cannot tell." if said is None else verdict(said, "so it is")

    @staticmethod
    def key(messages: Sequence[Mapping[str, Any]]) -> str:
        return json.dumps(messages[1]["content"])


def mistaken(recorded: Sequence[tuple[str, Rollout]]) -> tuple[KnownJudge, dict[str, int]]:
    """A judge that is wrong about every fifth failure and every fourth success and silent about every ninth
    rollout, by what it is shown; and the matrix that this makes.
    """
    verdicts: dict[str, bool | None] = {}
    keys: list[tuple[str, bool]] = []
    counts = {True: 0, False: 0}
    for instruction, rollout in recorded:
        case = Case(
            instruction=instruction, turns=rollout.turns, answer=rollout.answer, stop_reason=rollout.stop_reason
        )
        key = KnownJudge.key(build_messages("", case, "final"))
        keys.append((key, rollout.success))
        if key not in verdicts:
            counts[rollout.success] += 1
            is_wrong = counts[rollout.success] % (4 if rollout.success else 5) == 0
            verdicts[key] = None if len(verdicts) % 9 == 8 else rollout.success is not is_wrong
    names = {
        (True, True): "true_positives",
        (False, True): "false_positives",
        (True, False): "false_negatives",
        (False, False): "true_negatives",
        (True, None): "num_without_verdict",
        (False, None): "num_without_verdict",
    }
    matrix = dict.fromkeys(names.values(), 0)
    for key, truth in keys:
        matrix[names[truth, verdicts[key]]] += 1
    return KnownJudge(verdicts), matrix


def config(base_url: str, folder: Path, **more: Any) -> CalibrateConfig:
    settings: dict[str, Any] = {"run": "known", "num_rollouts": 1000, "log_dir": str(folder)}
    judge = {"judge_base_url": base_url, "judge_model": MODEL}
    prices = {"judge_input_price": 1.0, "judge_output_price": 5.0}
    return make_config(CalibrateConfig, settings | judge | prices | more)


@pytest.fixture
def environ(url: str) -> dict[str, str]:
    return {"DATABASE_URL": url, "JUDGE_API_KEY": KEY}


async def test_the_matrix_of_a_judge_of_known_error_is_right_and_the_gate_refuses_it(
    url: str, environ: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = await record_rollouts(url)
    assert len(recorded) == GROUPS * MEMBERS == 320
    judge, matrix = mistaken(recorded)
    assert min(matrix.values()) >= 15  # enough of everything to tell a right matrix from a wrong one

    async with serve_judge(JudgeEndpoint(judge)) as base_url:
        settings = config(base_url, tmp_path)
        await cli_main(settings, environ)

    judge_config = make_judge_config(settings.judge)
    assert judge_config is not None
    record = json.loads((tmp_path / "judge_calibrations" / f"{judge_config.fingerprint}.json").read_text())
    found = record["all"]
    assert {name: found[name] for name in matrix} == matrix
    positives = matrix["true_positives"] + matrix["false_positives"]
    assert found["precision"]["value"] == matrix["true_positives"] / positives
    successes = matrix["true_positives"] + matrix["false_negatives"]
    assert found["recall"]["value"] == matrix["true_positives"] / successes
    assert found["precision"]["low"] < found["precision"]["value"] < found["precision"]["high"]
    for parts in (record["by_category"], record["by_task"]):
        assert {name: sum(part[name] for part in parts.values()) for name in matrix} == matrix
    assert set(record["by_category"]) == {"app", "navigation"}
    assert record["num_malformed_votes"] == matrix["num_without_verdict"]
    # 1000 tokens at 1 and 40 at 5 dollars per million, each
    assert record["cost_usd"] == pytest.approx(320 * (1000 * 1 + 40 * 5) / 1e6)
    assert len(record["mistakes"]) == 320 - matrix["true_positives"] - matrix["true_negatives"]
    assert KEY not in json.dumps(record)
    shown = capsys.readouterr().out
    assert "leave_clock" in shown
    assert f"{found['precision']['value']:.1%}" in shown

    low = found["precision"]["low"]
    require_precision(with_values(judge_config, min_precision=low), str(tmp_path))
    with pytest.raises(ConfigError, match=r"judge.min_precision: expected the 95 % interval .* at 0\.9 or above, got"):
        require_precision(with_values(judge_config, min_precision=0.9), str(tmp_path))


async def test_what_a_judge_decided_itself_is_no_truth_to_calibrate_on(
    url: str, environ: dict[str, str], tmp_path: Path
) -> None:
    await record_rollouts(url)
    run_sql(url, "INSERT INTO judge_prompts (sha256, text) VALUES ('x', 'Decide.')")
    run_sql(
        url,
        "INSERT INTO judgements (rollout_pk, prompt_sha256, model, screenshots, decides, reason, agreement, votes,"
        " num_prompt_tokens, num_answer_tokens, duration_s)"
        " SELECT id, 'x', 'm', 'final', true, '', 1, '[]', 0, 0, 0 FROM rollouts",
    )

    async with serve_judge(JudgeEndpoint(lambda asked: verdict(True))) as base_url:
        with pytest.raises(ConfigError, match="finished rollouts of tasks with validators, got none"):
            await cli_main(config(base_url, tmp_path), environ)


async def test_a_judge_without_any_verdict_leaves_no_record(url: str, environ: dict[str, str], tmp_path: Path) -> None:
    await record_rollouts(url)

    endpoint = JudgeEndpoint(lambda asked: "no JSON")
    async with serve_judge(endpoint) as base_url:
        with pytest.raises(JudgeError, match="expected verdicts of 'judge-1', got none"):
            await cli_main(config(base_url, tmp_path, num_rollouts=5), environ)

    assert endpoint.num_requests == 5
    assert not list(tmp_path.iterdir())
