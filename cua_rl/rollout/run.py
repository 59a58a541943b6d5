"""One rollout: lease a device, let the agent work on the task, read success from the device, score.

This is the only place that turns an error into data: an infrastructure fault ends as a `Rollout` without a reward.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from cua_rl.agent.agent import Agent, AgentOutcome, AgentTask, ModelAccess
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.devices.device import AgentReport, Device, ReportedDevice
from cua_rl.devices.pool import DeviceSource
from cua_rl.errors import CuaError, SamplingError
from cua_rl.events import Recorder, RolloutStarted, Source, TurnTaken
from cua_rl.rewards.evidence import build_evidence
from cua_rl.rewards.reward import RewardFunction
from cua_rl.rollout.outcome import Judge, Outcome, ask_judge
from cua_rl.tasks.readiness import instruct, prepare, validate
from cua_rl.tasks.task import Task
from cua_rl.types import AdapterRef, AgentTurn, ModelTurn, Reward, Rollout, SamplingParams, Turn

logger = logging.getLogger(__name__)


class RecordingAccess(ModelAccess, Protocol):
    """The gateway as rollouts use it: it records what the model reads and samples between opening and closing."""

    def open_rollout(
        self, rollout_id: str, *, params: SamplingParams | None = None, adapter: AdapterRef | None = None
    ) -> None: ...

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]: ...

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Time limits of the stages of a rollout, seconds; the pool has its own for the lease."""

    prepare_s: float = 300.0
    turn_s: float = 300.0
    """For model server and device together, from the end of one turn to the end of the next; beyond it is a fault."""
    agent_s: float = 1800.0
    """The policy's own time, while neither model server nor device works for it. It ends the rollout as turns do."""
    validate_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Which rollout to run: its place in the run, its task instance, and the policy that acts."""

    source: Source
    group_id: str
    group_index: int
    member_index: int
    task: Task
    params: SamplingParams
    adapter: AdapterRef | None = None
    """None follows the current policy; evaluations pin theirs."""


class RolloutRunner:
    """Runs rollouts on pooled devices through one gateway.

    With `watch_goal` the validator is asked after every turn, so that rewards know when the goal was first reached.
    The judge decides tasks without a validator; with `judge_all` it also judges the others, without deciding.
    """

    def __init__(
        self,
        *,
        devices: DeviceSource,
        gateway: RecordingAccess,
        agent: Agent,
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
        async with self._beginning:  # hundreds that begin at once would run in step, and block the loop at every stage
            await asyncio.sleep(0)
        rollout_id, started_at, clock = self._make_id(), time.time(), time.monotonic()
        turns: list[Turn] = []
        self._gateway.open_rollout(rollout_id, params=plan.params, adapter=plan.adapter)
        try:
            outcome = await self._attempt(plan, rollout_id, turns)
            # the device is given back already: the judge needs the record only
            outcome = await ask_judge(self._judge, plan.task, outcome, turns, always=self._judge_all)
        except (CuaError, TimeoutError) as error:
            outcome = Outcome.of_fault(error)
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
        """Lease, prepare, act, validate; `turns` fills up on the way, so that a fault keeps what was done."""
        task, max_turns = plan.task, min(plan.task.max_turns, self._max_turns)
        first_success_turn: int | None = None

        async with self._devices.lease(task.device_request(rollout_id)) as device:
            clock = RolloutClock(policy_s=self._limits.agent_s, turn_s=self._limits.turn_s)

            async def on_turn(done: AgentTurn) -> None:
                nonlocal first_success_turn
                clock.next_turn()
                with clock.call():
                    model = _find_answer(done.response_id, self._gateway.turns(rollout_id))
                    turns.append(Turn(index=len(turns), model=model, agent=done))
                    await self._recorder.record(TurnTaken(rollout_id=rollout_id, turn=turns[-1]))
                    if self._watch_goal and first_success_turn is None and task.validate is not None:
                        is_reached = (await validate(task, device, None)).success
                        first_success_turn = len(turns) if is_reached else None

            await self._recorder.record(_started(plan, rollout_id, device, max_turns))
            async with time_limit("set-up", self._limits.prepare_s):
                await prepare(task, device)
                instruction = await instruct(task, device)
            async with clock.limit():
                agent_task = AgentTask(rollout_id=rollout_id, instruction=instruction, max_turns=max_turns)
                done = await self._agent.run(agent_task, device, self._gateway, clock=clock, on_turn=on_turn)
            if isinstance(device, ReportedDevice):
                device.report(_report(done, turns, max_turns))
            validation = None
            if task.validate is not None:
                async with time_limit("validation", self._limits.validate_s):
                    validation = await validate(task, device, done.answer)
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


@asynccontextmanager
async def time_limit(stage: str, limit_s: float) -> AsyncGenerator[None]:
    """End the block after `limit_s` seconds: raises `TimeoutError` with a message; one from inside passes unchanged."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"expected {stage} to take at most {limit_s:g} s, it took longer") from error


def _find_answer(response_id: str, recorded: tuple[ModelTurn, ...]) -> ModelTurn:
    """The gateway's record of the answer that the agent acted on."""
    model = next((turn for turn in reversed(recorded) if turn.response_id == response_id), None)
    if model is None:
        raise SamplingError(f"expected the gateway to know response {response_id!r}, it has {len(recorded)} others")
    return model


def _report(done: AgentOutcome, turns: list[Turn], max_turns: int) -> AgentReport:
    return AgentReport(
        answer=done.answer,
        success_claimed=done.success_claimed,
        num_turns=len(turns),
        max_turns=max_turns,
        errors=tuple(turn.agent.action_error for turn in turns if turn.agent.action_error),
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
