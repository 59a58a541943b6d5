"""Every metric on the list is written by some run, and every chart of the monitor has a metric that feeds it.

The loops, the report and the trainer are the real ones, on a random tiny model; phones and agents are fakes. Names are
read back from metrics.jsonl, where TensorBoard, Weights & Biases and the monitor get theirs too.
"""

import random
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.agent.agent import AgentOutcome
from cua_rl.judge.request import Case
from cua_rl.metrics import FAMILIES, METRICS, meaning
from cua_rl.recipes.sft import main as sft
from cua_rl.reporting.json_lines import read_records
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.progress import ProgressDisplay
from cua_rl.reporting.run_report import RunReport
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl import async_loop, sync_loop
from cua_rl.rl.curriculum import Memory, ReplayBuffer, SuccessRates
from cua_rl.rl.stages import LoopParts, LoopSettings
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.rollout.run import RolloutRunner
from cua_rl.tasks.task import Task
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, TrainerConfig
from cua_rl.types.errors import DeviceLostError
from cua_rl.types.judgement import Judgement, JudgeVote
from cua_rl.types.rollout import AgentTurn, ImageChunk, StopReason
from tests.builders import judgement, model_turn, prompt, text
from tests.fakes import FakePolicy, make_task
from tests.real.training.tiny_qwen3_vl import IMAGE_PAD, VISION_END, VISION_START, draw_screenshot, image_chunk
from tests.rl.test_sync_loop import parts, settings

WEB_APP = Path(__file__).parents[3] / "training-monitor" / "src"
NEEDS_A_GPU = {"trainer/peak_cuda_gib", "trainer/peak_reserved_gib", "trainer/mfu_frac"}
NEEDS_SERVERS_AND_WORKERS = {
    "device/num_workers",
    "device/num_workers_lost",
    "device/num_workers_missing",
    "rollout/num_model_servers",
}
"""tests/real/end_to_end/test_rollout_workers.py finds them."""
NEEDS_OTHER_TASKS_ON_RESUME = {"progress/curve"}
"""tests/run_folder/test_earlier_attempt.py finds it."""
NEEDS_A_HARNESS = {"rollout/harness/<metric>"}
"""tests/agent/test_harness.py finds it."""
NEEDS_BROKEN_WORKERS = {"rollout/worker_faults/<worker>"}
"""tests/rl/test_step_metrics.py finds it."""
NEEDS_LOST_ATTEMPTS = {"eval/<suite>/short_tasks/<k>"}
"""tests/evaluation/test_evaluate.py finds it."""

NEEDS_BRANCHES = {"rollout/shared_turns"}
"""tests/rollout/test_branches.py finds it."""
NEEDS_A_MODEL_SERVER = {f"eval/<suite>/{name}" for name in ("num_actions", "action_accuracy", "action_accuracy/<part>")}
"""tests/real/supervised/test_trajectories.py finds them."""


class TwoTurns:
    """Answers a screenshot, then a text that does not go on from there; its first device is lost on the way."""

    def __init__(self, policy: FakePolicy) -> None:
        self.policy = policy
        self.screen: ImageChunk = image_chunk(draw_screenshot(random.Random(0)))
        self.num_runs = 0

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        self.num_runs += 1
        if self.num_runs == 1:
            raise DeviceLostError("the phone is gone")
        number, version = self.num_runs, self.policy.published[-1]
        prompts = [prompt(text(20, 21, VISION_START), self.screen, text(VISION_END)), prompt(text(30, 31, 32))]
        for index, model_input in enumerate(prompts):
            turn = model_turn(
                model_input, (40, 41), (-5.0, -6.0), policy_version=version, response_id=f"{number}-{index}"
            )
            access.openai_client(task.rollout_id).append(turn)
            seen = await device.observe()
            await on_turn(
                AgentTurn(
                    response_id=turn.response_id,
                    before=seen,
                    durations_s={"respond": 0.1, "execute": 0.2},
                )
            )
        device.state = "0" if task.instruction == "hopeless" else str(number % 2)
        return AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=2, answer="done")


class KindJudge:
    """Sees success everywhere, for a cent."""

    async def judge(self, case: Case, *, decides: bool) -> Judgement:
        return judgement(JudgeVote(success=True), decides=decides, cost_usd=0.01)


class Tasks:
    """One task of two; the first one of the second step cannot be solved, and so gets a stored success."""

    def batch(self, step: int, num_tasks: int) -> list[Task]:
        tasks = [make_task(seed=100 * step + index) for index in range(num_tasks)]
        return [replace(tasks[0], instruction="hopeless"), *tasks[1:]] if step == 1 else tasks


class Runs:
    """Runs the loops and keeps the names of what they write."""

    def __init__(self, trainer: TrainingClient, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder

    def parts(self, log: RunReport, memory: Memory) -> LoopParts:
        policy = FakePolicy()
        agent: Any = TwoTurns(policy)
        made, bench, _, _ = parts(agent)
        runner = RolloutRunner(
            devices=bench.pool,
            gateway=bench.gateway,  # type: ignore[arg-type]
            agent=agent,
            reward=binary_reward,
            recorder=bench.recorder,
            max_turns=5,
            judge=KindJudge(),
            judge_all=True,
        )
        changes: dict[str, Any] = {"trainer": self.trainer, "log": log, "memory": memory, "policy": policy}
        changes["runner"] = runner
        return replace(made, tasks=Tasks(), device_metrics=bench.pool.take_metrics, **changes)

    async def run(self, name: str, loop: LoopSettings, memory: Memory | None = None, max_lag: int = 0) -> set[str]:
        with (
            MetricLog(self.folder / name, config={}) as metric_log,
            ProgressDisplay(loop.config.max_steps) as display,
        ):
            made = self.parts(
                RunReport(metric_log=metric_log, display=display, total_steps=loop.config.max_steps), memory or Memory()
            )
            if max_lag:
                await async_loop.train(loop, made, max_lag=max_lag, limit=RolloutLimit(largest=8))
            else:
                await sync_loop.train(loop, made)
        return names_in(self.folder / name)


def names_in(folder: Path) -> set[str]:
    return {name for record in read_records(folder / "metrics.jsonl") for name in record} - {"step"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Runs]:
    folder = tmp_path_factory.mktemp("runs")
    config = TrainerConfig(model_path=model_path, num_threads=1)
    async with TrainingClient(config, folder / "trainer.log") as trainer:
        yield Runs(trainer, folder)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def written(runs: Runs) -> set[str]:
    """The names that a synchronous run, one with everything on and an asynchronous one write."""
    loop = partial(settings, image_token_id=IMAGE_PAD, parity_limit=10.0, save_every=0)
    mean = LossConfig(normalisation="token_mean")
    everything = loop(
        loss=LossConfig(name="ppo", icepop_low=0.5, icepop_high=5.0, normalisation="token_mean"),
        num_substeps=2,
        kl_penalty_coef=0.1,
        compute_post_kl=True,
        advantages="batch_std",
    )
    memory = Memory(rates=SuccessRates(), replay=ReplayBuffer(capacity_per_task=2))
    away = loop(loss=LossConfig(kl_loss_coef=0.1, normalisation="token_mean"))
    return set[str]().union(
        await runs.run("everything", everything, memory),
        await runs.run("away", away),
        await runs.run("async", loop(loss=mean), max_lag=1),
    )


@pytest.fixture(scope="module")
def imitated(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names that a supervised run writes."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    small = ["max_steps=1", "batch_size=1", "num_eval_conversations=1", "save_every=0", "num_threads=1"]
    talk = '{"input": [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]}\n'
    (folder.parent / "talks.jsonl").write_text(2 * talk.replace("Hi.", "Hi.") + talk.replace("Hi", "Good morning"))
    assert sft([f"log_path={folder}", f"data={folder.parent / 'talks.jsonl'}", *small]) == 0
    return names_in(folder)


async def test_every_listed_metric_is_written_by_some_run(written: set[str], imitated: set[str]) -> None:
    names = written | imitated

    needs = NEEDS_A_GPU | NEEDS_SERVERS_AND_WORKERS | NEEDS_OTHER_TASKS_ON_RESUME | NEEDS_BRANCHES
    assert sorted(set(METRICS) - needs - names) == []
    fed = {meaning(name) for name in names}
    elsewhere = NEEDS_A_HARNESS | NEEDS_BROKEN_WORKERS | NEEDS_LOST_ATTEMPTS | NEEDS_A_MODEL_SERVER
    assert sorted(family for family, text in FAMILIES.items() if text not in fed and family not in elsewhere) == []


async def test_every_chart_of_the_monitor_is_fed(written: set[str], imitated: set[str]) -> None:
    elsewhere = NEEDS_A_HARNESS | NEEDS_BROKEN_WORKERS | NEEDS_BRANCHES
    names = written | imitated | NEEDS_A_GPU | NEEDS_SERVERS_AND_WORKERS | elsewhere
    areas = "|".join(sorted({name.split("/")[0] for name in METRICS}))
    pages = [*WEB_APP.glob("charts/*.ts*"), *WEB_APP.glob("pages/**/*.tsx")]
    app = "".join(path.read_text(encoding="utf-8") for path in pages)
    charted = set(re.findall(rf'"((?:{areas})/[\w/]+)"', app))
    prefixes = set(re.findall(r'prefix: "([^"]+)"', app))

    assert len(charted) > 40
    assert sorted(charted - prefixes - names) == []
    assert [prefix for prefix in prefixes if not any(name.startswith(prefix) for name in names)] == []
