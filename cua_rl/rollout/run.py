"""One rollout. Only here an error becomes data: an infrastructure fault becomes a `Rollout` without a reward."""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace
from uuid import uuid4

from cua_rl.agent.agent import Agent, AgentTask, RecordingAccess
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.device import Device
from cua_rl.environments.pool import DeviceSource
from cua_rl.events import Recorder, RolloutSource, RolloutStarted, TurnTaken
from cua_rl.host.masking import mask_known
from cua_rl.rewards.reward import RewardFunction
from cua_rl.rollout.branches import BEGINNING, Fork, go_on_from, retell, take_moment
from cua_rl.rollout.fresh_check import FreshCheck
from cua_rl.rollout.outcome import Judge, Outcome, ask_judge, report_end, take_turn
from cua_rl.rollout.time_limits import time_limit
from cua_rl.rollout.watched import Watched
from cua_rl.tasks.readiness import instruct
from cua_rl.tasks.task import Task
from cua_rl.types.errors import CheckError, CuaError
from cua_rl.types.rollout import AdapterRef, AgentTurn, Moment, Rollout, SamplingParams, Turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutJob:
    """The rollout to run: its position in the run, its task instance, and the policy."""

    source: RolloutSource
    group_id: str
    group_index: int
    member_index: int
    task: Task
    params: SamplingParams
    adapter: AdapterRef | None = None
    """None: always the current policy; evaluations pin one."""
    rollout_id: str = field(default_factory=lambda: uuid4().hex)
    failed_in: frozenset[str | None] = frozenset()  # workers of earlier attempts; retries skip the queue
    fork: Fork = BEGINNING
    keeps_moments: bool = False  # whether others may go on from its turns

    def started(self, device_id: str, limit: int) -> RolloutStarted:
        """What is recorded once it has a device; `limit` is that of the run's turns."""
        return RolloutStarted(
            source=self.source,
            rollout_id=self.rollout_id,
            group_id=self.group_id,
            group_index=self.group_index,
            member_index=self.member_index,
            task=self.task,
            device_id=device_id,
            max_turns=self.task.turns_within(limit),
            parent_id=self.fork.parent_id,
            fork_turn=len(self.fork.turns),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRunner:
    """Runs rollouts on pooled devices through one gateway.

    With `watch_goal` the validator and the milestones are asked after every turn: rewards know when they first held.
    The judge decides tasks without a validator; with `judge_all` it also judges the others, without deciding.
    """

    devices: DeviceSource
    gateway: RecordingAccess
    agent: Agent
    reward: RewardFunction
    recorder: Recorder
    max_turns: int
    watch_goal: bool = False
    judge: Judge | None = None
    judge_all: bool = False
    time_limits: DeviceConfig = field(default_factory=DeviceConfig)
    _beginning: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _check: FreshCheck = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_check", FreshCheck(devices=self.devices, limits=self.time_limits))

    async def run(self, job: RolloutJob) -> Rollout:
        """Run one rollout to its end; never raises for faults of device, server or task."""
        async with self._beginning:  # hundreds starting at once would stay in lockstep and block the loop in each stage
            await asyncio.sleep(0)
        rollout_id, started_at, clock = job.rollout_id, time.time(), time.monotonic()
        turns: list[Turn] = []
        self.gateway.open_rollout(rollout_id, params=job.params, adapter=job.adapter)
        if job.fork.turns:
            self.gateway.tell(rollout_id, job.fork.turns, job.fork.arrival)
        try:
            outcome = await self._attempt(job, rollout_id, turns)
            # the device has been returned: the judge needs only the record
            outcome = await ask_judge(self.judge, job.task, outcome, turns, always=self.judge_all)
        except (CuaError, TimeoutError) as error:
            outcome = Outcome.of_fault(error)
        finally:
            self.gateway.close_rollout(rollout_id)
        if outcome.error:
            logger.warning(
                "rollout_id=%s task=%s stop=%s %s", rollout_id, job.task.task_id, outcome.stop_reason, outcome.error
            )
        max_turns = job.task.turns_within(self.max_turns)
        evidence = outcome.evidence(turns, max_turns)  # None after a fault, which must never become a reward
        return Rollout(
            rollout_id=rollout_id,
            task_id=job.task.task_id,
            seed=job.task.seed,
            group_index=job.group_index,
            member_index=job.member_index,
            device_id=outcome.device_id,
            turns=tuple(turns),
            stop_reason=outcome.stop_reason,
            answer=outcome.answer,
            validation=outcome.validation,
            reward=None if evidence is None else self.reward(evidence),
            error=outcome.error,
            started_at=started_at,
            duration_s=time.monotonic() - clock,
            judgement=outcome.judgement,
            max_turns=max_turns,
            moments=outcome.moments,
            parent_id=job.fork.parent_id,
            fork_turn=len(job.fork.turns),
        )

    async def _attempt(self, job: RolloutJob, rollout_id: str, turns: list[Turn]) -> Outcome:
        """Lease, act, validate; turns are appended to `turns` as they happen, so that a fault keeps them."""
        outcome: Outcome | None = None
        try:
            async with self.devices.lease(job.task.device_request(rollout_id, job.fork.snapshot)) as device:
                outcome = await self._act(job, rollout_id, turns, device)
                if job.task.validate is None:
                    return outcome
                validation = await self._check.validate(job.task, device, outcome.answer)
        except CheckError as failure:  # its device is not reused
            if outcome is None:
                raise
            validation = await self._check.verdict(job.task, failure)
        return replace(outcome, validation=validation)

    async def _act(self, job: RolloutJob, rollout_id: str, turns: list[Turn], device: Device) -> Outcome:
        """Prepare the device and let the agent work; the outcome is not validated yet."""
        task, fork, limits, max_turns = job.task, job.fork, self.time_limits, job.task.turns_within(self.max_turns)
        clock = RolloutClock(task_timeout_s=limits.task_timeout_s, turn_timeout_s=limits.turn_timeout_s)
        watched = Watched(check=self._check, task=task if self.watch_goal else None, device=device)
        moments: list[Moment | None] = []

        async def on_turn(done: AgentTurn) -> None:
            clock.next_turn()
            with clock.call():
                told = fork.next_turn(turns)
                turns.append(told or take_turn(len(turns), done, self.gateway.turns(rollout_id)))
                with clock.uncharged():  # the database may be unreachable
                    await self.recorder.record(TurnTaken(rollout_id=rollout_id, turn=turns[-1], is_told=bool(told)))
                if told is None or fork.arrival is not None:
                    await watched.look(len(turns))
                elif fork.moment and fork.next_turn(turns) is None:
                    go_on_from(fork.moment, clock, watched)
                if job.keeps_moments:
                    moments.extend(await take_moment(device, instruction, clock, watched))

        await self.recorder.record(job.started(device.device_id, self.max_turns))
        async with time_limit("set-up", limits.setup_timeout_s):
            if fork.moment is None:
                await self._check.prepare(task, device)
                instruction = await instruct(task, device)
                await watched.look(0)
            else:
                instruction = fork.moment.instruction
        async with clock.limit():
            asked = AgentTask(rollout_id=rollout_id, instruction=instruction, max_turns=max_turns)
            done = await self.agent.run(asked, retell(device, fork, turns), self.gateway, clock=clock, on_turn=on_turn)
        fork.require_taken(turns)
        report_end(device, done, turns, max_turns=max_turns)
        return Outcome(
            stop_reason=done.stop_reason,
            device_id=device.device_id,
            instruction=instruction,
            answer=done.answer,
            first_success_turn=watched.first_success_turn,
            milestone_turns=watched.milestone_turns,
            moments=tuple(moments),
            error=None if done.error is None else mask_known(done.error),  # it may quote a program's log
        )
