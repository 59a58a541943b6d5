"""A leased device as it is offered to agents outside this process: screenshots out, actions in, both remembered."""

import asyncio
import json
import secrets
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from cua_rl.actions import Action
from cua_rl.agent.gbox_agent import cursor_after, load_system_prompt
from cua_rl.agent.responses import function_tool
from cua_rl.agent.rollout_watch import RolloutOver, RolloutWatch
from cua_rl.agent.tools import ACTION_NAMES, COMPUTER_USE, MAX_COORDINATE, MOBILE_USE, Finish, parse_action, tool_for
from cua_rl.agent.turn_join import Deed, TurnJoin
from cua_rl.conversation import EncodedImage, ParseFailure, Tool, ToolCall
from cua_rl.devices.device import ActionRejected, Device
from cua_rl.errors import DeviceError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of an action."""

    error: str | None
    """Why nothing was done, fit to be shown to the model; None if it was done."""
    is_finished: bool
    """True if the action ended the rollout."""
    screen: EncodedImage
    """What the device shows now."""


class OfferedDevice:
    """One rollout's device; operations follow one another, however many are asked for at a time."""

    def __init__(
        self, device: Device, *, instruction: str, max_turns: int, join: TurnJoin, watch: RolloutWatch
    ) -> None:
        self._device = device
        self._instruction = instruction
        self._max_turns = max_turns
        self._join = join
        self._watch = watch
        self._one_at_a_time = asyncio.Lock()
        self._cursor: tuple[int, int] | None = None
        self.token = secrets.token_urlsafe(24)
        """Whoever knows it may operate the device."""
        self.finish: Finish | None = None
        """How the agent ended the rollout, if it did."""

    def describe(self) -> dict[str, object]:
        """What an agent needs to know: the task, the screen, and the tool to give to the model."""
        return {
            "instruction": self._instruction,
            "max_turns": self._max_turns,
            "kind": self._device.kind,
            "width_px": self._join.seen.width_px,
            "height_px": self._join.seen.height_px,
            "max_coordinate": MAX_COORDINATE,
            "prompt": load_system_prompt(self._device.kind),
            "tool": function_tool(tool_for(self._device.kind)),
        }

    async def observe(self) -> EncodedImage:
        """Take a screenshot; raises `RolloutOver` or `DeviceError`."""
        async with self._one_at_a_time:
            self._require_open()
            self._join.seen = await self._observe()
            return self._join.seen

    async def act(self, arguments: Mapping[str, object]) -> Reply:
        """Do one action, given as the arguments of a tool call; raises `RolloutOver` or `DeviceError`."""
        async with self._one_at_a_time:
            self._require_open()
            parsed = self._parse(arguments)
            if isinstance(parsed, Finish):
                return self._finish(parsed)
            deed = (
                Deed(action=None, error=parsed.message) if isinstance(parsed, ParseFailure) else await self._do(parsed)
            )
            self._join.did(deed)
            return Reply(error=deed.error, is_finished=False, screen=self._join.seen)

    def _require_open(self) -> None:
        if self.finish is not None or self._watch.over.is_set() or self._watch.is_closed:
            raise RolloutOver("rollout_over", "expected a rollout that goes on, got one that has ended; stop")

    def _parse(self, arguments: Mapping[str, object]) -> Action | Finish | ParseFailure:
        seen, tool = self._join.seen, _tool_with(arguments.get("action"), tool_for(self._device.kind))
        call = ToolCall(call_id="", name=tool.name, arguments=json.dumps(arguments))
        return parse_action(call, width_px=seen.width_px, height_px=seen.height_px, cursor=self._cursor)

    def _finish(self, finish: Finish) -> Reply:
        self._join.did(Deed(action=None))
        self.finish = finish
        self._watch.over.set()
        return Reply(error=None, is_finished=True, screen=self._join.seen)

    async def _do(self, action: Action) -> Deed:
        clock = time.monotonic()
        try:
            await self._device.execute(action)
        except ActionRejected as error:
            return Deed(action=action, error=str(error) or "The device cannot do this.")
        except DeviceError as error:
            self._watch.fail(error)
            raise
        self._cursor = cursor_after(action) or self._cursor
        executed = time.monotonic()
        after = await self._observe()
        return Deed(action=action, after=after, execute_s=executed - clock, observe_s=time.monotonic() - executed)

    async def _observe(self) -> EncodedImage:
        try:
            return await self._device.observe()
        except DeviceError as error:
            self._watch.fail(error)
            raise


class DeviceDesk:
    """The devices on offer, by rollout."""

    def __init__(self) -> None:
        self._offered: dict[str, OfferedDevice] = {}

    @contextmanager
    def offer(self, rollout_id: str, device: OfferedDevice) -> Generator[None]:
        """Offer a rollout's device for a while."""
        self._offered[rollout_id] = device
        try:
            yield
        finally:
            del self._offered[rollout_id]

    def find(self, rollout_id: str, token: str) -> OfferedDevice | None:
        """The device of a rollout for whoever knows its token."""
        device = self._offered.get(rollout_id)
        is_known = device is not None and secrets.compare_digest(token.encode(), device.token.encode())
        return device if is_known else None


def _tool_with(action: object, preferred: Tool) -> Tool:
    """The tool that knows an action: the device's own, else the other one."""
    other = COMPUTER_USE if preferred is MOBILE_USE else MOBILE_USE
    return other if action in ACTION_NAMES[other.name] and action not in ACTION_NAMES[preferred.name] else preferred
