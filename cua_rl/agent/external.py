"""Any agent, in any language: it speaks OpenAI to the gateway and operates the device over HTTP.

ExternalAgent ──► agent program ── Responses or Chat ──► gateway ── every answer ──► RolloutWatch ─┐
                      └────────── screenshots, actions ──► OfferedDevice ── every deed ──► TurnJoin ──► turns
"""

import asyncio
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import httpx

from cua_rl.agent.gbox_agent import AgentOutcome, OnTurn
from cua_rl.agent.offered_device import DeviceDesk, OfferedDevice
from cua_rl.agent.policy_time import RolloutClock, TimedDevice
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.agent.turn_join import TurnJoin
from cua_rl.devices.device import Device
from cua_rl.errors import AgentError
from cua_rl.processes import OwnedProcess
from cua_rl.types import StopReason

logger = logging.getLogger(__name__)

GRACE_S = 10.0
"""How long an agent may go on after its rollout is over."""

_OUR_SECRETS = (
    "DATABASE_URL", "POSTGRES_PASSWORD", "GBOX_API_KEY", "JUDGE_API_KEY", "TINKER_API_KEY", "WANDB_API_KEY", "HF_TOKEN",
    "PROJECT_TOKEN", "MONITOR_PROJECT_TOKEN", "MONITOR_READ_TOKEN", "MONITOR_WRITE_TOKEN",
)  # fmt: skip


class OpenGateway(Protocol):
    """What agents outside this process need of the gateway."""

    @property
    def devices(self) -> DeviceDesk: ...

    def address(self, rollout_id: str) -> str:
        """Where a rollout is reached over a socket, without `/v1` or `/device`."""
        ...

    def watched(self, rollout_id: str, watch: RolloutWatch) -> AbstractContextManager[None]:
        """Let `watch` admit a rollout's requests and hear of its answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What an agent program is told."""

    rollout_id: str
    instruction: str
    address: str
    device_token: str
    max_turns: int

    def variables(self) -> dict[str, str]:
        """As environment variables, or as the fields of a JSON object."""
        return {
            "OPENAI_BASE_URL": f"{self.address}/v1",
            "OPENAI_API_KEY": "anything",
            "CUA_INSTRUCTION": self.instruction,
            "CUA_DEVICE_URL": f"{self.address}/device",
            "CUA_DEVICE_TOKEN": self.device_token,
            "CUA_MAX_TURNS": str(self.max_turns),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEnd:
    """How an agent program ended: with an error, or of its own accord."""

    error: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCommand:
    """A command that is started once for every rollout, without a shell, and told its assignment by environment."""

    argv: tuple[str, ...]
    log_folder: Path
    """Each rollout's output goes to `<rollout_id>.log` in it."""

    async def work(self, assignment: Assignment) -> ProgramEnd:
        """Run it to its end; cancelled, it and everything it started are ended."""
        inherited = {name: value for name, value in os.environ.items() if name not in _OUR_SECRETS}
        process = OwnedProcess(
            self.argv,
            name=f"agent-{assignment.rollout_id}",
            log_path=self.log_folder / f"{assignment.rollout_id}.log",
            environment=inherited | assignment.variables(),
            stop_timeout_s=3.0,
        )
        async with process:
            status = await process.wait()
        if status == 0:
            return ProgramEnd()
        tail = await asyncio.to_thread(process.log_tail, 5)
        return ProgramEnd(error=f"the agent ended with status {status}, see {process.log_path}: {tail.strip()[-500:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentService:
    """A server that is sent each assignment as JSON and answers when the work is done."""

    url: str

    async def work(self, assignment: Assignment) -> ProgramEnd:
        """Post and wait, as long as it takes; cancelled, the connection is closed."""
        try:
            async with httpx.AsyncClient(timeout=httpx.Timeout(None, connect=30.0), trust_env=False) as client:
                response = await client.post(self.url, json=assignment.variables())
        except httpx.HTTPError as error:
            return ProgramEnd(error=f"the agent at {self.url} did not answer: {type(error).__name__} {error}")
        if response.is_error:
            return ProgramEnd(error=f"the agent at {self.url} answered {response.status_code}: {response.text[:500]}")
        return ProgramEnd(answer=_answer(response))


class ExternalAgent:
    """Lets one program work on each rollout, and makes turns of what the gateway and the device saw of it."""

    def __init__(self, program: AgentCommand | AgentService, gateway: OpenGateway, *, grace_s: float = GRACE_S) -> None:
        self._program = program
        self._gateway = gateway
        self._grace_s = grace_s

    async def run(
        self,
        instruction: str,
        device: Device,
        rollout_id: str,
        *,
        max_turns: int,
        on_turn: OnTurn,
        clock: RolloutClock,
    ) -> AgentOutcome:
        """Let the program act until it ends, turns or time are used up, or it says on the device that it is done.

        Raises:
            AgentError: the program failed, or ended, without one answer of the model.
            SamplingError: the model did not answer.
            DeviceError: the device failed.
        """
        timed = TimedDevice(device, clock)
        join = TurnJoin(seen=await timed.observe(), on_turn=on_turn)
        watch = RolloutWatch(max_turns=max_turns, on_answer=join.answered, clock=clock)
        offered = OfferedDevice(timed, instruction=instruction, max_turns=max_turns, join=join, watch=watch)
        assignment = Assignment(
            rollout_id=rollout_id,
            instruction=instruction,
            address=self._gateway.address(rollout_id),
            device_token=offered.token,
            max_turns=max_turns,
        )
        with self._gateway.watched(rollout_id, watch), self._gateway.devices.offer(rollout_id, offered):
            end = await self._work(assignment, watch)
        await join.close()
        if watch.fault is not None:
            raise watch.fault
        return _outcome(end, watch, offered, max_turns)

    async def _work(self, assignment: Assignment, watch: RolloutWatch) -> ProgramEnd:
        """The program's end; once the rollout is over it has a little time left, after a fault none."""
        working = asyncio.create_task(self._program.work(assignment), name=f"agent-{assignment.rollout_id}")
        over = asyncio.create_task(watch.over.wait())
        in_time = asyncio.create_task(watch.end_in_time())
        try:
            await asyncio.wait({working, over}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and watch.fault is None:
                await asyncio.wait({working}, timeout=self._grace_s)
            return working.result() if working.done() else ProgramEnd()
        finally:
            for task in (over, in_time, working):
                task.cancel()
            await asyncio.wait({over, in_time, working})


def _outcome(end: ProgramEnd, watch: RolloutWatch, offered: OfferedDevice, max_turns: int) -> AgentOutcome:
    """How the rollout ended: a program that fails after an answer has ended it, as any other way of giving up."""
    if watch.num_turns == 0:
        raise AgentError(end.error or "the agent ended without asking the model; see that it uses OPENAI_BASE_URL")
    if end.error:
        logger.warning("an agent failed after %d turns, which ends its rollout: %s", watch.num_turns, end.error)
    return AgentOutcome(
        stop_reason=_stop_reason(watch, offered, max_turns),
        num_turns=watch.num_turns,
        answer=offered.finish.answer if offered.finish else end.answer,
        success_claimed=offered.finish.success_claimed if offered.finish else None,
        error=end.error,
    )


def _stop_reason(watch: RolloutWatch, offered: OfferedDevice, max_turns: int) -> StopReason:
    if offered.finish is not None:
        return StopReason.FINISHED
    if watch.is_out_of_time:
        return StopReason.MAX_TIME
    if watch.is_out_of_turns or watch.num_turns >= max_turns:
        return StopReason.MAX_TURNS
    return StopReason.CONTEXT_OVERFLOW if watch.is_out_of_context else StopReason.FINISHED


def _answer(response: httpx.Response) -> str | None:
    """The final message, where the service gives one."""
    try:
        body: object = response.json()
    except ValueError:
        return None
    answer = cast("Mapping[str, object]", body).get("answer") if isinstance(body, Mapping) else None
    return answer if isinstance(answer, str) else None
