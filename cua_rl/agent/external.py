"""Agent programs in any language: they speak the OpenAI API to the gateway and operate the device over HTTP.

ExternalAgent ──► agent program ── Responses or Chat ──► gateway ── every answer ──► RolloutWatch ─┐
                      └────────── screenshots, actions ──► OfferedDevice ── every step ──► TurnJoin ──► turns
"""

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import httpx

from cua_rl.agent.agent import AgentOutcome, AgentTask, ModelAccess, ModelAddress, OnTurn
from cua_rl.agent.offered_device import OfferedDevice, TurnJoin
from cua_rl.agent.policy_time import RolloutClock, TimedDevice
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.environments.device import Device
from cua_rl.host.guest_account import GuestAccount, open_guest_account
from cua_rl.host.process_guard import MAX_RESULT_BYTES
from cua_rl.host.processes import OwnedProcess, Report
from cua_rl.host.users import bare_environment
from cua_rl.types.errors import AgentError, boundary
from cua_rl.types.json_values import mapping

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long a program may continue after its rollout is over."""


Assignment = Mapping[str, str]
"""The parameters of an agent program, as environment variables or as the fields of a JSON object."""


def make_assignment(task: AgentTask, address: ModelAddress, device_token: str) -> Assignment:
    return {
        **address.variables(),
        "CUA_INSTRUCTION": task.instruction,
        "CUA_DEVICE_URL": f"{address.url}/device",
        "CUA_DEVICE_TOKEN": device_token,
        "CUA_MAX_TURNS": str(task.max_turns),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """The end of an agent program: an error, or a normal exit."""

    error: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """A command that is started once per rollout, without a shell, with its assignment in environment variables.

    It acts on the output of a model, so it must not see our keys: it gets only the named variables of our environment
    and, if root starts the run, its own guest account.
    """

    argv: tuple[str, ...]
    log_folder: Path
    """Each rollout's output goes to `<rollout_id>.log` in it."""
    variables: tuple[str, ...] = ()
    """Names of environment variables that are passed on to it."""

    async def work(self, task: AgentTask, assignment: Assignment) -> ProgramEnd:
        """Run the command to its end. If cancelled, end it and every process that it started."""
        async with open_guest_account(self.argv, "agent") as account:
            async with self.process(account, task, assignment) as process:
                status = await process.wait()
        if status == 0:
            return ProgramEnd()
        tail = await asyncio.to_thread(process.log_tail, 5)
        return ProgramEnd(error=f"the agent ended with status {status}, see {process.log_path}: {tail.strip()[-500:]}")

    def process(
        self,
        account: GuestAccount,
        task: AgentTask,
        told: Assignment,
        *,
        payload: bytes | None = None,
        report: Report | None = None,
    ) -> OwnedProcess:
        """The command under a guest account, not yet started; `told` are the variables of the rollout."""
        named = {name: os.environ[name] for name in self.variables if name in os.environ}
        return OwnedProcess(
            self.argv,
            name=f"agent-{task.rollout_id}",
            log_path=self.log_folder / f"{task.rollout_id}.log",
            environment=bare_environment(account.home, {**named, **told}),
            stop_timeout_s=3.0,
            user=account.user,
            told=payload,
            report=report,
        )


async def post(url: str, told: Assignment) -> tuple[int, bytes]:
    """Post an assignment and wait without a time limit for the response: its status, and as much as a result may be."""
    async with (
        httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), trust_env=False) as client,
        client.stream("POST", url, json=told) as response,
    ):
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > MAX_RESULT_BYTES:
                break
        return response.status_code, bytes(content[: MAX_RESULT_BYTES + 1])


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentService:
    """A server that receives each assignment as JSON and responds when the rollout is done."""

    url: str

    async def work(self, task: AgentTask, assignment: Assignment) -> ProgramEnd:
        """Post and wait for the response, without a time limit. If cancelled, close the connection."""
        try:
            status, content = await post(self.url, assignment)
        except httpx.HTTPError as error:
            return ProgramEnd(error=f"the agent at {self.url} did not answer: {type(error).__name__} {error}")
        if status >= HTTPStatus.BAD_REQUEST:
            said = content[:500].decode(errors="replace")
            return ProgramEnd(error=f"the agent at {self.url} answered {status}: {said}")
        try:
            body: object = json.loads(content)
        except (ValueError, RecursionError):
            body = None
        answer = mapping(body).get("answer")
        return ProgramEnd(answer=answer if isinstance(answer, str) else None)


@dataclass(frozen=True, slots=True)
class ExternalAgent:
    """Starts one program per rollout, and builds turns from its requests to the gateway and to the device."""

    program: AgentCommand | AgentService
    grace_s: float = GRACE_S

    async def run(
        self, task: AgentTask, device: Device, access: ModelAccess, *, clock: RolloutClock, on_turn: OnTurn
    ) -> AgentOutcome:
        """Run the program until it ends, finishes the task, or is out of turns or time; raises as `Agent.run` does."""
        clock.charge_between_calls()
        timed = TimedDevice(device, clock)
        join = TurnJoin(seen=await timed.observe(), on_turn=on_turn)
        watch = RolloutWatch(max_turns=task.max_turns, on_answer=join.answered, clock=clock)
        offered = OfferedDevice(timed, instruction=task.instruction, max_turns=task.max_turns, join=join, watch=watch)
        with access.expose(task.rollout_id, watch, offered) as address, boundary(AgentError, "run the agent"):
            end = await self._work(task, make_assignment(task, address, offered.token), watch)
        await offered.settle()  # a program may end without waiting for its last action
        await join.close()
        if watch.fault is not None:
            raise watch.fault
        if watch.num_turns == 0:
            raise AgentError(end.error or "the agent ended without calling the model; does it use OPENAI_BASE_URL?")
        if end.error:  # after an answer, a program that fails has given up: that is a result, not a fault
            logger.warning("an agent failed after %d turns, which ends its rollout: %s", watch.num_turns, end.error)
        finish = offered.finish
        return AgentOutcome(
            stop_reason=watch.stop_reason(is_finished=finish is not None),
            num_turns=watch.num_turns,
            answer=finish.answer if finish else end.answer,
            success_claimed=finish.success_claimed if finish else None,
            error=end.error,
        )

    async def _work(self, task: AgentTask, assignment: Assignment, watch: RolloutWatch) -> ProgramEnd:
        """Wait for the program to end. Once the rollout is over, it has `grace_s` to do so; after a fault, none."""
        working = asyncio.create_task(self.program.work(task, assignment), name=f"agent-{task.rollout_id}")
        over = asyncio.create_task(watch.over.wait())
        in_time = asyncio.create_task(watch.end_in_time())
        try:
            await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and watch.fault is None:
                await asyncio.wait({working}, timeout=self.grace_s)
            return working.result() if working.done() else ProgramEnd()
        finally:
            for one in (over, in_time, working):
                one.cancel()
            await asyncio.wait({over, in_time, working})
