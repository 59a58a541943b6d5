"""One rollout: lease a device, let the agent work through the gateway, read success from the device, score.

The only place that turns an error into data: infrastructure faults end as a `Rollout` without reward.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol
from uuid import uuid4

from cua_rl.agent.external import ExternalAgent
from cua_rl.agent.gbox_agent import AgentOutcome, AgentTurn, GBoxAgent, OnTurn
from cua_rl.agent.mini_agent import MiniAgent
from cua_rl.agent.policy_time import RolloutClock, TimedDevice
from cua_rl.devices.device import Device
from cua_rl.devices.gym.client import AgentReport
from cua_rl.devices.gym.device import GymDevice
from cua_rl.devices.pool import DeviceSource
from cua_rl.errors import CuaError, DeviceError, JudgeError, SamplingError, TaskError, boundary
from cua_rl.events import Recorder, RolloutSource, RolloutStarted, TurnTaken
from cua_rl.judge.request import Case
from cua_rl.rewards.evidence import build_evidence
from cua_rl.rewards.reward import RewardFunction
from cua_rl.tasks.readiness import instruct, prepare
from cua_rl.tasks.task import Task
from cua_rl.types import (
    AdapterRef,
    Judgement,
    ModelTurn,
    Reward,
    Rollout,
    SamplingParams,
    StopReason,
    Turn,
    Validation,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

logger = logging.getLogger(__name__)


class Agent(Protocol):
    """Works on a task until it is done; everything it asks the model goes through `client`."""

    async def run(
        self, instruction: str, device: Device, client: "AsyncOpenAI", *, max_turns: int, on_turn: OnTurn
    ) -> AgentOutcome: ...


class ModelAccess(Protocol):
    """Where rollouts reach the model: one OpenAI address each, everything recorded (the gateway)."""

    def open_rollout(
        self, rollout_id: str, *, params: SamplingParams | None = None, adapter: AdapterRef | None = None
    ) -> None: ...

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]: ...

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]: ...

    def openai_client(self, rollout_id: str) -> "AsyncOpenAI": ...


class Judge(Protocol):
    """Decides from the record of an attempt whether the task was done."""

    async def judge(self, case: Case, *, decides: bool) -> Judgement: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """The longest that the stages of a rollout may take, seconds; how long the lease may take is the pool's matter."""

    prepare_s: float = 300.0
    turn_s: float = 300.0
    """Of model server and device together, from one turn's end to the next one's; beyond it, it is a fault."""
    agent_s: float = 1800.0
    """The policy's own time, in which neither model server nor device work for it; it ends the rollout as turns do."""
    validate_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Which rollout to run: its place in the run, its task instance, and the policy that acts."""

    source: RolloutSource
    group_id: str
    group_index: int
    member_index: int
    task: Task
    params: SamplingParams
    adapter: AdapterRef | None = None
    """None follows the current policy; evaluations pin theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended, before it is scored."""

    stop_reason: StopReason
    device_id: str | None = None
    instruction: str = ""
    answer: str | None = None
    validation: Validation | None = None
    judgement: Judgement | None = None
    max_turns: int = 0
    first_success_turn: int | None = None
    error: str | None = None


class RolloutRunner:
    """Runs rollouts on pooled devices through one gateway.

    With `watch_goal` the validator is asked after every turn, so that rewards know when the goal first held. The judge
    is asked about tasks without a validator; with `judge_all` also about the others, where the validator decides.
    """

    def __init__(
        self,
        *,
        devices: DeviceSource,
        gateway: ModelAccess,
        agent: Agent | ExternalAgent | MiniAgent,
        reward: RewardFunction,
        recorder: Recorder,
        max_turns: int,
        watch_goal: bool = False,
        judge: Judge | None = None,
        judge_all: bool = False,
        time_limits: TimeLimits | None = None,
        make_id: Callable[[], str] = lambda: uuid4().hex,
    ) -> None:
        self._devices = devices
        self._gateway = gateway
        self._agent = agent
        self._reward = reward
        self._recorder = recorder
        self._max_turns = max_turns
        self._watch_goal = watch_goal
        self._judge = judge
        self._judge_all = judge_all
        self._limits = time_limits or TimeLimits()
        self._make_id = make_id
        self._beginning = asyncio.Lock()

    async def run(self, plan: RolloutPlan) -> Rollout:
        """Run one rollout to its end; never raises for faults of device, server or task."""
        async with self._beginning:  # hundreds that begin at once would stay in step, and hold up all else at every one
            await asyncio.sleep(0)
        rollout_id, started_at, clock = self._make_id(), time.time(), time.monotonic()
        turns: list[Turn] = []
        self._gateway.open_rollout(rollout_id, params=plan.params, adapter=plan.adapter)
        try:
            outcome = await self._judged(plan.task, await self._attempt(plan, rollout_id, turns), turns)
        except TimeoutError as error:
            outcome = Outcome(stop_reason=StopReason.TIME_LIMIT, error=str(error) or "a stage ran out of time")
        except CuaError as error:
            outcome = Outcome(stop_reason=_fault_of(error), error=str(error))
        finally:
            self._gateway.close_rollout(rollout_id)
        if outcome.error:
            logger.warning(
                "rollout_id=%s task=%s stop=%s %s", rollout_id, plan.task.task_id, outcome.stop_reason, outcome.error
            )
        return Rollout(
            rollout_id=rollout_id,
            task_id=plan.task.task_id,
            seed=plan.task.seed,
            group_index=plan.group_index,
            member_index=plan.member_index,
            device_id=outcome.device_id,
            turns=tuple(turns),
            stop_reason=outcome.stop_reason,
            answer=outcome.answer,
            validation=outcome.validation,
            reward=self._score(outcome, turns),
            error=outcome.error,
            started_at=started_at,
            duration_s=time.monotonic() - clock,
            judgement=outcome.judgement,
        )

    async def _attempt(self, plan: RolloutPlan, rollout_id: str, turns: list[Turn]) -> Outcome:
        """Lease, act, validate; `turns` fills up on the way, so that a fault keeps what was done."""
        max_turns = min(plan.task.max_turns, self._max_turns)
        first_success_turn: int | None = None

        async with self._devices.lease(plan.task, rollout_id=rollout_id) as device:
            clock = RolloutClock(
                policy_s=self._limits.agent_s,
                turn_s=self._limits.turn_s,
                acts_between_calls=isinstance(self._agent, ExternalAgent | MiniAgent),
            )

            async def on_turn(done: AgentTurn) -> None:
                nonlocal first_success_turn
                clock.next_turn()
                with clock.call():
                    turn = join_turn(len(turns), done, self._gateway.turns(rollout_id))
                    turns.append(turn)
                    await self._recorder.record(TurnTaken(rollout_id=rollout_id, turn=turn))
                    if self._watch_goal and first_success_turn is None and plan.task.validate is not None:
                        is_reached = (await validate(plan.task, device, None)).success
                        first_success_turn = len(turns) if is_reached else None

            await self._recorder.record(_started(plan, rollout_id, device, max_turns))
            async with time_limit("set-up", self._limits.prepare_s):
                await prepare(plan.task, device)
                instruction = await instruct(plan.task, device)
            async with clock.limit():
                done = await self._act(instruction, device, rollout_id, max_turns, on_turn, clock)
            if isinstance(device, GymDevice):
                device.report(_report(done, turns, max_turns))
            validation: Validation | None = None
            if plan.task.validate is not None:
                async with time_limit("validation", self._limits.validate_s):
                    validation = await validate(plan.task, device, done.answer)
            return Outcome(
                stop_reason=done.stop_reason,
                device_id=device.device_id,
                instruction=instruction,
                answer=done.answer,
                validation=validation,
                max_turns=max_turns,
                first_success_turn=first_success_turn,
                error=done.error,
            )

    async def _act(
        self,
        instruction: str,
        device: Device,
        rollout_id: str,
        max_turns: int,
        on_turn: OnTurn,
        clock: RolloutClock,
    ) -> AgentOutcome:
        """Let the agent work: inside this process over a client, outside it over the rollout's address."""
        match self._agent:
            case ExternalAgent() | MiniAgent() as outside:
                return await outside.run(
                    instruction, device, rollout_id, max_turns=max_turns, on_turn=on_turn, clock=clock
                )
            case GBoxAgent() as policy:
                num_turns = 0

                async def on_timed_turn(done: AgentTurn) -> None:
                    nonlocal num_turns
                    await on_turn(done)
                    num_turns += 1
                    if clock.is_used_up:
                        raise _TimeUsedUp

                client, timed = self._gateway.openai_client(rollout_id), TimedDevice(device, clock)
                try:
                    return await policy.run(instruction, timed, client, max_turns=max_turns, on_turn=on_timed_turn)
                except _TimeUsedUp:
                    return AgentOutcome(stop_reason=StopReason.MAX_TIME, num_turns=num_turns)
            case other:  # an expert, which operates the device as what it is, and does not wait
                client = self._gateway.openai_client(rollout_id)
                return await other.run(instruction, device, client, max_turns=max_turns, on_turn=on_turn)

    async def _judged(self, task: Task, outcome: Outcome, turns: Sequence[Turn]) -> Outcome:
        """The outcome with what the judge says of it; asked when the device is given back, it needs the record only.

        Where nothing else validates the task, no verdict is a fault of the task; a rollout that ended before its first
        turn, as one whose first prompt did not fit, has failed and needs no verdict.
        """
        is_validated = outcome.validation is not None
        if is_validated and not (self._judge is not None and self._judge_all and turns):
            return outcome
        if self._judge is None:
            raise JudgeError(f"expected a judge for task {task.task_id!r}, which has no validator; set judge_model")
        if not turns:
            nothing_done = Validation(query="turns", expected="at least 1", actual="0", success=False)
            return replace(outcome, validation=nothing_done)
        case = Case(
            instruction=outcome.instruction, turns=turns, answer=outcome.answer, stop_reason=outcome.stop_reason
        )
        judgement = await self._judge.judge(case, decides=not is_validated)
        judged = replace(outcome, judgement=judgement)
        if is_validated:
            return judged
        if judgement.success is None:
            error = f"expected a verdict on {task.task_id!r} by a majority of votes, got none: {judgement.reason}"
            return replace(judged, stop_reason=StopReason.TASK_ERROR, error=error)
        return replace(judged, validation=validation_of(judgement))

    def _score(self, outcome: Outcome, turns: list[Turn]) -> Reward | None:
        if outcome.validation is None:
            return None
        evidence = build_evidence(
            outcome.validation,
            outcome.stop_reason,
            turns,
            max_turns=outcome.max_turns,
            first_success_turn=outcome.first_success_turn,
        )
        return self._reward(evidence)


class _TimeUsedUp(Exception):
    """The policy's time ended with the turn: nothing of that turn is lost."""


@asynccontextmanager
async def time_limit(stage: str, limit_s: float) -> AsyncGenerator[None]:
    """End the block after `limit_s` seconds: raises `TimeoutError` with a message; one from inside passes as it is."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"expected {stage} to take at most {limit_s:g} s, it took longer") from error


async def validate(task: Task, device: Device, answer: str | None) -> Validation:
    """Read success from the device's state; raises `TaskError` if there is no validator, or it fails itself."""
    if task.validate is None:
        raise TaskError(f"expected a validator of task {task.task_id!r}, got none: only a judge can decide it")
    clock = time.monotonic()
    with boundary(TaskError, f"validate task {task.task_id!r}"):
        validation = await task.validate(device, answer)
    return replace(validation, duration_s=time.monotonic() - clock)


def validation_of(judgement: Judgement) -> Validation:
    """A verdict as the validation of a task that has no validator."""
    num_agreeing = sum(vote.success is judgement.success for vote in judgement.votes)
    return Validation(
        query=f"judge {judgement.model}",
        expected="success",
        actual=f"{'success' if judgement.success else 'no success'}, {num_agreeing} of {len(judgement.votes)} votes",
        success=judgement.success is True,
        duration_s=judgement.duration_s,
        score=judgement.score,
    )


def join_turn(index: int, done: AgentTurn, recorded: tuple[ModelTurn, ...]) -> Turn:
    """Put together what the agent did and what the gateway recorded of the same answer."""
    model = next((turn for turn in reversed(recorded) if turn.response_id == done.response_id), None)
    if model is None:
        raise SamplingError(
            f"expected the gateway to know response {done.response_id!r}, it has {len(recorded)} others"
        )
    return Turn(
        index=index,
        model=model,
        before=done.before,
        action=done.action,
        action_error=done.action_error,
        after=done.after,
        durations_s=done.durations_s,
        more_actions=done.more_actions,
    )


def _report(done: AgentOutcome, turns: list[Turn], max_turns: int) -> AgentReport:
    """What a gym server is told of the agent's work."""
    return AgentReport(
        answer=done.answer,
        success_claimed=done.success_claimed,
        num_turns=len(turns),
        max_turns=max_turns,
        errors=tuple(turn.action_error for turn in turns if turn.action_error),
    )


def _started(plan: RolloutPlan, rollout_id: str, device: Device, max_turns: int) -> RolloutStarted:
    return RolloutStarted(
        source=plan.source,
        rollout_id=rollout_id,
        group_id=plan.group_id,
        group_index=plan.group_index,
        member_index=plan.member_index,
        task=plan.task,
        device_id=device.device_id,
        max_turns=max_turns,
    )


def _fault_of(error: CuaError) -> StopReason:
    match error:
        case DeviceError():
            return StopReason.DEVICE_ERROR
        case SamplingError():
            return StopReason.SAMPLING_ERROR
        case TaskError():
            return StopReason.TASK_ERROR
        case _:
            raise error
