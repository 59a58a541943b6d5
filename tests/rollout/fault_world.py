"""A world in which the truth about a policy is known, and faults strike rollouts on their real paths.

Every repetition draws tasks from a population, attempts each several times through `Evaluator`, `RolloutRunner` and
`DevicePool`, and looks whether what is reported covers the population's success rate and pass@k.
`python -m tests.rollout.fault_world 400` prints the table of all policies and faults.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import comb
from random import Random
from statistics import fmean
from typing import Any, Literal, cast, get_args

from cua_rl.agent.agent import AgentOutcome, ModelAddress
from cua_rl.agent.device_step import perform
from cua_rl.agent.harness import HarnessAgent, HarnessAssignment, RunEnd
from cua_rl.agent.policy_time import TimedDevice
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.harness.environment import HarnessTask
from cua_rl.environments.harness_world import HarnessResult, HarnessWorld
from cua_rl.environments.pool import DevicePool, DeviceRequest
from cua_rl.evaluation.evaluate import Evaluator
from cua_rl.evaluation.statistics import sum_tasks
from cua_rl.events import GroupEnded, RolloutSource, RolloutStarted
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.step_metrics import rollout_metrics
from cua_rl.rollout.run import RolloutRunner
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Click
from cua_rl.types.errors import AbsentError, DeviceError, UnusableError
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import AdapterRef, AgentTurn, SamplingParams, StopReason
from tests.builders import model_turn, prompt, text
from tests.fakes import FakeDevice, FakeGateway, FakeRecorder
from tests.jumping_time import run_jumping

FaultName = Literal[
    "none",
    "element gone",
    "check raises",
    "check hangs",
    "device hangs",
    "slow answers",
    "late harness",
    "lost devices",
    "lost devices on hard tasks",
]
FAULTS = get_args(FaultName)
BETA: Mapping[str, tuple[float, float]] = {"weak": (0.4, 1.8), "middling": (1.0, 1.0), "strong": (3.0, 0.6)}
"""How the success rates of a policy's tasks are distributed."""
SHARE = 0.8
"""Of the failures, those in which the policy does what could pass for a fault."""
LIMITS = DeviceConfig(turn_timeout_s=120.0, task_timeout_s=600.0, validate_timeout_s=60.0)


def true_success(policy: str) -> float:
    """The mean of the distribution."""
    a, b = BETA[policy]
    return a / (a + b)


def true_pass_at(policy: str, k: int) -> float:
    """1 - E[(1 - p)^k] = 1 - B(a, b + k) / B(a, b)."""
    a, b = BETA[policy]
    missed = 1.0
    for step in range(k):
        missed *= (b + step) / (a + b + step)
    return 1 - missed


@dataclass
class WorldDevice(FakeDevice):
    """Its page may lose the element, hold no JSON, hang when it is read, or hang when it is touched."""

    async def query(self, name: str) -> str:
        if self.state == "gone":
            raise AbsentError("expected an element '#done', got none")
        if self.state == "hangs":
            await asyncio.Event().wait()
        return self.state

    async def execute(self, action: object) -> None:
        if self.state == "stuck":
            raise UnusableError("expected the page to draw, it hangs")


async def validate(device: Any, answer: str | None) -> Validation:
    """As a user writes it: it raises where the state is not JSON."""
    actual = await device.query("state")
    return Validation(query="state", expected="1", actual=actual, success=json.loads(actual) == 1)


class WorldGateway(FakeGateway):
    """Also lets harnesses ask."""

    def __init__(self) -> None:
        super().__init__()
        self.watches: dict[str, RolloutWatch] = {}

    @contextmanager
    def expose(self, rollout_id: str, watch: RolloutWatch) -> Generator[ModelAddress]:
        self.watches[rollout_id] = watch
        yield ModelAddress(url="http://model", api_key="key")


@dataclass
class World:
    """One policy, one kind of fault; agent and harness program of every rollout."""

    policy: str
    fault: FaultName
    random: Random
    rates: dict[str, float] = field(default_factory=dict)
    gateway: WorldGateway = field(default_factory=WorldGateway)
    recorder: "WorldRecorder" = field(default_factory=lambda: WorldRecorder())
    num_answers: int = 0

    async def make_device(self, request: DeviceRequest) -> Any:
        return HarnessWorld(request.task_id, request.seed) if self.fault == "late harness" else WorldDevice()

    def make_task(self, index: int) -> Task:
        task_id = f"task-{index}"
        self.rates[task_id] = self.random.betavariate(*BETA[self.policy])
        about: dict[str, Any] = {"task_id": task_id, "category": "app", "difficulty": "easy", "max_turns": 3}
        if self.fault == "late harness":
            return HarnessTask(instruction="Do it.", payload="{}", **about).make_task(index)
        return Task(seed=index, instruction="Do it.", validate=validate, **about)

    def answer(self, rollout_id: str) -> Any:
        self.num_answers += 1
        turn = model_turn(prompt(text(1, 2)), response_id=f"resp-{self.num_answers}")
        self.gateway.recorded[rollout_id].append(turn)
        return turn

    async def run(self, task: Any, device: Any, access: Any, *, clock: Any, on_turn: Any) -> AgentOutcome:
        """The agent: succeeds at the task's rate, fails in the way of this world."""
        rate = self.rates[self.recorder.task_of[task.rollout_id]]
        is_success, is_bad = self.random.random() < rate, self.random.random() < SHARE
        with clock.uncharged():
            await asyncio.sleep(3600.0 if self.fault == "slow answers" and is_bad and not is_success else 1.0)
        turn = self.answer(task.rollout_id)
        await on_turn(AgentTurn(response_id=turn.response_id, before=await device.observe()))
        is_hard = self.fault == "lost devices on hard tasks" and rate < true_success(self.policy)
        if self.random.random() < (0.5 if is_hard else 0.3 if self.fault == "lost devices" else 0.0):
            raise DeviceError("the device is gone")
        ways = {"element gone": "gone", "check raises": "{", "check hangs": "hangs", "device hangs": "stuck"}
        device.state = "1" if is_success else ways.get(self.fault, "0") if is_bad else "0"
        step = await perform(TimedDevice(device, clock), Click(x=1, y=1))
        stop = StopReason.MAX_TIME if step.is_last else StopReason.FINISHED
        return AgentOutcome(stop_reason=stop, num_turns=1)

    async def work(self, assignment: HarnessAssignment, over: asyncio.Event) -> RunEnd:
        """The harness's program: as above, where failures may never end."""
        rollout_id = assignment.task.rollout_id
        is_success = self.random.random() < self.rates[assignment.world.task_id]
        await self.gateway.watches[rollout_id].answered(self.answer(rollout_id))
        if not is_success and self.random.random() < SHARE:
            await over.wait()
            return RunEnd(status=None)
        return RunEnd(status=0, result=HarnessResult(reward=float(is_success), success=is_success))


class WorldRecorder(FakeRecorder):
    """Knows the task of each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.task_of: dict[str, str] = {}

    async def record(self, event: Any) -> None:
        await super().record(event)
        if isinstance(event, RolloutStarted):
            self.task_of[event.rollout_id] = event.task.task_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one repetition reports, of evaluation and of training metrics."""

    rate: float
    interval: tuple[float, float]
    step_rate: float
    step_interval: tuple[float, float]
    pass_at: Mapping[int, float]
    step_bounds: tuple[float, float] | None
    num_faults: int


async def attempt(world: World, num_tasks: int, num_attempts: int) -> Report:
    """One repetition: an evaluation, and its groups as those of a training step."""
    tasks = [world.make_task(index) for index in range(num_tasks)]
    runner = RolloutRunner(
        devices=DevicePool(world.make_device, max_devices=num_tasks * num_attempts),
        gateway=world.gateway,  # type: ignore[arg-type]
        agent=cast(Any, HarnessAgent(program=world) if world.fault == "late harness" else world),
        reward=binary_reward,
        recorder=world.recorder,
        max_turns=3,
        time_limits=LIMITS,
    )
    evaluator = Evaluator(
        tasks=tasks,
        runner=runner,
        params=SamplingParams(max_tokens=8, temperature=1.0),
        recorder=world.recorder,
        num_attempts=num_attempts,
    )
    adapter = AdapterRef(path=cast(Any, None), policy_version=0)
    result = await evaluator.run(RolloutSource(phase="eval", step=0), adapter)
    groups = [event.group for event in world.recorder.events if isinstance(event, GroupEnded)]
    metrics = rollout_metrics(groups)
    bounds = metrics.get("reward/success_rate_worst"), metrics.get("reward/success_rate_best")
    return Report(
        rate=result.success_rate,
        interval=(result.low, result.high),
        step_rate=metrics["reward/success_rate"],
        step_interval=sum_tasks(
            (sum(rollout.success for rollout in group.rollouts), len(group.rollouts)) for group in groups
        ).interval,
        pass_at=result.pass_at,
        step_bounds=None if bounds[0] is None or bounds[1] is None else (bounds[0], bounds[1]),
        num_faults=result.num_faults,
    )


def repeat(policy: str, fault: FaultName, num: int, *, num_tasks: int = 16, num_attempts: int = 4) -> list[Report]:
    """Repetitions with tasks of their own."""
    random = Random(f"{policy}-{fault}")

    async def run() -> list[Report]:
        logging.disable(logging.WARNING)  # of every rollout that ended as it should here
        try:
            return [await attempt(World(policy, fault, random), num_tasks, num_attempts) for _ in range(num)]
        finally:
            logging.disable(logging.NOTSET)

    return run_jumping(run())


def coverage(reports: list[Report], truth: float, interval_of: Callable[[Report], tuple[float, float]]) -> float:
    """Share of the repetitions whose interval holds the truth."""
    return fmean(low - 1e-9 <= truth <= high + 1e-9 for low, high in map(interval_of, reports))


def fewest_covered(num: int, share: float = 0.93) -> int:
    """So few of `num` repetitions cover with a probability below 1 in 10,000 if the coverage is `share`."""
    below = 0.0
    for covered in range(num + 1):
        below += comb(num, covered) * share**covered * (1 - share) ** (num - covered)
        if below > 1e-4:
            return covered
    return num


def print_table(num: int) -> None:
    print("| policy | fault | truth | evaluation | covers | step | covers | pass@4 truth | pass@4 |")  # noqa: T201
    print("|---|---|---|---|---|---|---|---|---|")  # noqa: T201
    for policy in BETA:
        for fault in FAULTS:
            reports, truth = repeat(policy, fault, num), true_success(policy)
            passes = [report.pass_at[4] for report in reports if 4 in report.pass_at]
            columns = (
                f"{truth:.3f}",
                f"{fmean(report.rate for report in reports):.3f}",
                f"{coverage(reports, truth, lambda report: report.interval):.3f}",
                f"{fmean(report.step_rate for report in reports):.3f}",
                f"{coverage(reports, truth, lambda report: report.step_interval):.3f}",
                f"{true_pass_at(policy, 4):.3f}",
                f"{fmean(passes):.3f} ({len(passes)})" if passes else "left out",
            )
            print("| " + " | ".join((policy, fault, *columns)) + " |", flush=True)  # noqa: T201


if __name__ == "__main__":
    print_table(int(sys.argv[1]))
