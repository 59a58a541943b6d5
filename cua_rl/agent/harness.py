"""Harnesses: programs with their own environment and score, each of which runs a whole rollout against the gateway.

HarnessAgent ──► program ── Responses or Chat ──► gateway ── every answer ──► RolloutWatch ──► turns
      ▲             └── acts in its own environment, which we do not observe
      └── HarnessResult: reward, metrics, answer, or a fault ──► judge_run ──► HarnessWorld
"""

import asyncio
import json
import tempfile
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

import httpx

from cua_rl.agent.agent import AgentOutcome, AgentTask, ModelAccess, ModelAddress, OnTurn
from cua_rl.agent.external import AgentCommand, post
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.environments.device import Device
from cua_rl.environments.harness_world import HarnessResult, HarnessWorld, read_result
from cua_rl.host.guest_account import open_guest_account
from cua_rl.host.masking import mask_known
from cua_rl.host.processes import Report
from cua_rl.types.errors import AgentError, ConfigError, DeviceError, SamplingError, boundary
from cua_rl.types.judgement import MAX_REWARD
from cua_rl.types.rollout import AgentTurn, ModelTurn

_Done = TypeVar("_Done")

BAD_CONFIGURATION = 78  # EX_CONFIG of sysexits.h


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessAssignment:
    """The parameters of one run."""

    task: AgentTask
    world: HarnessWorld
    address: ModelAddress
    deadline_s: float
    judge: Mapping[str, str]
    """`JUDGE_BASE_URL` and `JUDGE_MODEL`, where the run has a judge."""

    def variables(self) -> dict[str, str]:
        """As environment variables, or as the fields of a JSON object; `payload` is passed separately."""
        return {
            **self.address.variables(),
            "CUA_MODEL": "policy",
            "CUA_ROLLOUT_ID": self.task.rollout_id,
            "CUA_TASK_ID": self.world.task_id,
            "CUA_INSTRUCTION": self.task.instruction,
            "CUA_SEED": str(self.world.seed),
            "CUA_MAX_TURNS": str(self.task.max_turns),
            "CUA_DEADLINE_S": f"{self.deadline_s:g}",
            **{f"CUA_{name}": value for name, value in self.judge.items()},
        }

    @property
    def payload(self) -> str:
        """What the task tells only the program, as JSON; it may hold the expected answer."""
        return json.dumps(self.world.payload)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a program ended and what it reported."""

    status: int | None
    """Exit status, 128 + n after signal n; None if the program was ended because its time was up."""
    result: HarnessResult | None = None
    said: str = ""
    """The end of its output, for messages."""


class HarnessProgram(Protocol):
    """Runs a whole rollout: a command or a server."""

    async def work(self, assignment: HarnessAssignment, over: asyncio.Event) -> RunEnd:
        """Run to the end, or until `over` is set; all processes that it started have ended on return."""
        ...


@dataclass(frozen=True, slots=True)
class HarnessCommand:
    """A command that is started once per rollout, reads its payload from standard input, and reports a result.

    What it starts may run code of the policy, which inherits environment and user: so the payload is not in the
    environment, unless the user names CUA_TASK among the variables, and the guard takes the result.
    """

    command: AgentCommand

    async def work(self, assignment: HarnessAssignment, over: asyncio.Event) -> RunEnd:
        """Run it in its own folder, which is removed at the end."""
        async with open_guest_account(self.command.argv, "agent") as account:
            path = account.home / "result.json"
            told = assignment.variables() | {"CUA_WORK_DIR": str(account.home), "CUA_RESULT_PATH": str(path)}
            if "CUA_TASK" in self.command.variables:
                told["CUA_TASK"] = assignment.payload
            with tempfile.TemporaryFile() as taken:
                process = self.command.process(
                    account,
                    assignment.task,
                    told,
                    payload=assignment.payload.encode(),
                    report=Report(path=path, taken=taken),
                )
                async with process:
                    status = await _until(over, process.wait())
                taken.seek(0)
                found, _, content = (await asyncio.to_thread(taken.read)).partition(b"\n")
            said = await asyncio.to_thread(process.log_tail, 5)
        if found == b"written":
            result = read_result(content, "a report")
        else:
            why = found.decode(errors="replace") or "the program's guard was killed"
            result = HarnessResult(reward=None, problem=f"no result: CUA_RESULT_PATH is {why}")
        return RunEnd(status=status, result=result, said=f"see {process.log_path}: {said.strip()[-500:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessService:
    """A server that receives each assignment as JSON and responds with the result."""

    url: str

    async def work(self, assignment: HarnessAssignment, over: asyncio.Event) -> RunEnd:
        """Post and wait for the response, until `over` is set; an HTTP error counts as exit status 1."""
        try:
            answer = await _until(over, post(self.url, assignment.variables() | {"CUA_TASK": assignment.payload}))
        except httpx.HTTPError as error:
            return RunEnd(status=1, said=f"{self.url} did not answer: {type(error).__name__} {error}")
        if answer is None:
            return RunEnd(status=None)
        status, content = answer
        text = content[:500].decode(errors="replace")
        if status >= HTTPStatus.BAD_REQUEST:
            return RunEnd(status=1, said=f"{self.url} answered {status}: {text}")
        return RunEnd(status=0, result=read_result(content), said=f"{self.url} answered {text!r}")


async def _until(over: asyncio.Event, work: Coroutine[Any, Any, _Done]) -> _Done | None:
    """The result of the work; None if `over` is set first, which cancels the work."""
    working, ending = asyncio.ensure_future(work), asyncio.create_task(over.wait())
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.wait({working, ending})


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessAgent:
    """Lets a program run the rollout in its own environment, and judges the result that it reports."""

    program: HarnessProgram
    judge: Mapping[str, str] = field(default_factory=dict[str, str])
    """What programs learn of the run's judge, as in `HarnessAssignment`."""

    async def run(
        self, task: AgentTask, device: Device, access: ModelAccess, *, clock: RolloutClock, on_turn: OnTurn
    ) -> AgentOutcome:
        """Run the program until it ends or its time is up; its result is stored in `device` for validation.

        Raises `AgentError` if the program failed, `SamplingError` if the model did not answer, `DeviceError` if the
        program's environment failed, `TimeoutError` if the program did not ask the model in time, `ConfigError` if the
        program reports that it cannot run with this configuration, or `device` is of another kind.
        """
        if not isinstance(device, HarnessWorld):
            raise ConfigError(f"expected tasks of a harness with agent=harness, got the device {device.device_id!r}")

        async def answered(turn: ModelTurn) -> None:
            seen = turn.prompt.images[-1] if turn.prompt.images else None
            await on_turn(
                AgentTurn(response_id=turn.response_id, before=seen, durations_s={"respond": turn.duration_s})
            )

        clock.charge_between_calls()
        watch = RolloutWatch(max_turns=task.max_turns, on_answer=answered, clock=clock)
        with access.expose(task.rollout_id, watch) as address, boundary(AgentError, "run the harness"):
            assignment = HarnessAssignment(
                task=task, world=device, address=address, deadline_s=clock.policy_left_s, judge=self.judge
            )
            end = await self._work(assignment, watch)
        watch.check_time()
        device.verdict = judge_run(end, watch)
        return AgentOutcome(
            stop_reason=watch.stop_reason(is_finished=False), num_turns=watch.num_turns, answer=device.verdict.answer
        )

    async def _work(self, assignment: HarnessAssignment, watch: RolloutWatch) -> RunEnd:
        """Wait for the program to end; end it after a fault or out of time, not out of turns: it may still score."""
        over = asyncio.Event()
        working = asyncio.create_task(self.program.work(assignment, over), name=f"harness-{assignment.task.rollout_id}")
        watching = asyncio.create_task(watch.over.wait())
        timing = asyncio.create_task(watch.clock.used_up())
        try:
            await asyncio.wait({working, watching, timing}, return_when=asyncio.FIRST_COMPLETED)
            if watch.fault is None:
                await asyncio.wait({working, timing}, return_when=asyncio.FIRST_COMPLETED)
            over.set()
            return await working
        finally:
            for task in (working, watching, timing):
                task.cancel()
            await asyncio.wait({working, watching, timing})


def judge_run(end: RunEnd, watch: RolloutWatch) -> HarnessResult:
    """The result of a run that counts, with a reward; the first matching rule applies, and faults are raised.

    What the policy causes ends as a result, never as a fault: dropping such rollouts would leave mostly successes in
    the batch.
    """
    result = end.result
    if watch.fault is not None:
        raise watch.fault
    if end.status is not None and 128 < end.status <= 128 + 64:
        raise AgentError(f"the harness was ended by signal {end.status - 128}, {end.said}")
    is_late = end.status is None and not watch.is_out_of_turns
    if is_late and watch.num_turns == 0:
        raise TimeoutError(f"expected a model request from the harness within task_timeout_s, got none; {end.said}")
    is_out_of_time = is_late and (result is None or result.fault is None)  # its own, not the model server's
    if is_out_of_time or watch.is_out_of_turns or watch.is_out_of_context:
        return result if result is not None and result.reward is not None else HarnessResult(reward=0.0, success=False)
    if end.status == BAD_CONFIGURATION and watch.num_turns == 0:  # later, the policy can cause it
        raise ConfigError(f"harness: expected a program that can run, got exit status 78: {mask_known(end.said)}")
    if result is not None and result.fault is not None:
        kind = {"environment": DeviceError, "model": SamplingError, "harness": AgentError}[result.fault.kind]
        raise kind(f"the harness reports a fault of its {result.fault.kind}: {result.fault.message[:500]}")
    if end.status != 0:
        raise AgentError(f"the harness ended with status {end.status}, {end.said}")
    if watch.num_turns == 0:
        raise AgentError(f"the harness ended without calling the model; does it use OPENAI_BASE_URL? {end.said}")
    if result is None or result.reward is None:
        raise AgentError(
            f"expected a result with a reward from {-MAX_REWARD:,.0f} to {MAX_REWARD:,.0f}, got "
            f"{'no result' if result is None else result.problem}; {end.said}"
        )
    return result
