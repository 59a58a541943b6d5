"""A leased device, as an agent outside this process sees it.

`OfferedDevice` returns screenshots and executes actions. `TurnJoin` joins these actions with the model's answers, in
order of time, to turns.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from cua_rl.agent.device_step import DeviceStep, cursor_after, perform
from cua_rl.agent.rollout_watch import RolloutOver, RolloutWatch
from cua_rl.agent.tools import (
    ACTION_NAMES,
    COMPUTER_USE,
    MAX_COORDINATE,
    MOBILE_USE,
    function_tool,
    load_system_prompt,
    parse_action,
    tool_for,
)
from cua_rl.environments.device import Device
from cua_rl.host.masking import make_key
from cua_rl.types.actions import Finish
from cua_rl.types.conversation import EncodedImage, ParseFailure, ToolCall
from cua_rl.types.errors import DeviceError, UnusableError
from cua_rl.types.rollout import AgentTurn, ModelTurn


@dataclass(slots=True)
class _OpenTurn:
    model: ModelTurn
    before: EncodedImage
    steps: list[DeviceStep] = field(default_factory=list[DeviceStep])


class TurnJoin:
    """Joins answers and actions to turns, each complete when the next begins; `seen` is the last screenshot."""

    def __init__(self, *, seen: EncodedImage, on_turn: Callable[[AgentTurn], Awaitable[None]]) -> None:
        self.seen = seen
        self._on_turn = on_turn
        self._open: _OpenTurn | None = None
        self._in_order = asyncio.Lock()

    async def answered(self, model: ModelTurn) -> None:
        """Begin a new turn with this answer."""
        async with self._in_order:
            await self._hand_on()
            self._open = _OpenTurn(model, self.seen)

    def add(self, step: DeviceStep) -> None:
        """Add a step to the open turn; steps before the first answer belong to no turn."""
        if self._open is not None:
            self._open.steps.append(step)
        self.seen = step.after or self.seen

    async def close(self) -> None:
        """Pass on the last turn."""
        async with self._in_order:
            await self._hand_on()

    async def _hand_on(self) -> None:
        done, self._open = self._open, None
        if done is not None:
            await self._on_turn(_join(done))


def _join(turn: _OpenTurn) -> AgentTurn:
    """The turn; its `action` is the first one that could be parsed, its `after` the screen after the last one."""
    main = next((step for step in turn.steps if step.action is not None), turn.steps[0] if turn.steps else None)
    unread = turn.model.failure.message if turn.model.failure and not turn.steps else None
    return AgentTurn(
        response_id=turn.model.response_id,
        before=turn.before,
        action=main.action if main else None,
        action_error=main.error if main else unread,
        after=next((step.after for step in reversed(turn.steps) if step.after is not None), None),
        durations_s={
            "respond": turn.model.duration_s,
            "execute": sum(step.execute_s for step in turn.steps),
            "observe": sum(step.observe_s for step in turn.steps),
        },
        more_actions=tuple(step.action for step in turn.steps if step.action is not None and step is not main),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of an action."""

    error: str | None
    """Why it was not executed, in words for the model; None if it was."""
    is_finished: bool
    """True if the action ended the rollout."""
    screen: EncodedImage
    """The screen after the action."""


class OfferedDevice:
    """One rollout's device. Operations run one after the other, even if several requests arrive at once."""

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
        self.token = make_key()
        """Grants access to the device."""
        self.finish: Finish | None = None
        """The action with which the agent ended the rollout, if it did."""

    def accepts(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())

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
            with self._failing():
                try:
                    self._join.seen = await self._device.observe()
                except UnusableError:
                    self._watch.wear_out()  # the last screen is all there is
            return self._join.seen

    async def act(self, arguments: Mapping[str, object]) -> Reply:
        """Execute one action, given as the arguments of a tool call; raises `RolloutOver` or `DeviceError`."""
        async with self._one_at_a_time:
            self._require_open()
            # the device's own tool if it has this action, else the other one
            seen, tool, action = self._join.seen, tool_for(self._device.kind), str(arguments.get("action"))
            other = COMPUTER_USE if tool is MOBILE_USE else MOBILE_USE
            if action in ACTION_NAMES[other.name] and action not in ACTION_NAMES[tool.name]:
                tool = other
            call = ToolCall(call_id="", name=tool.name, arguments=json.dumps(arguments))
            parsed = parse_action(call, width_px=seen.width_px, height_px=seen.height_px, cursor=self._cursor)
            match parsed:
                case Finish():
                    step = DeviceStep()
                    self.finish = parsed
                    self._watch.over.set()
                case ParseFailure():
                    step = DeviceStep(error=parsed.message)
                case _:
                    with self._failing():
                        step = await perform(self._device, parsed)
                    if step.is_last:
                        self._watch.wear_out()
                    if step.after is not None:
                        self._cursor = cursor_after(parsed) or self._cursor
            self._join.add(step)
            return Reply(error=step.error, is_finished=self.finish is not None, screen=self._join.seen)

    async def settle(self) -> None:
        """Wait for the operation in progress: it must change neither what a validator reads nor the next rollout."""
        async with self._one_at_a_time:
            pass

    @contextmanager
    def _failing(self) -> Generator[None]:
        """Turn a device failure in the block into a fault of the rollout, however the agent handles it."""
        try:
            yield
        except DeviceError as error:
            self._watch.fail(error)
            raise

    def _require_open(self) -> None:
        if self.finish is not None or self._watch.over.is_set() or self._watch.is_closed:
            raise RolloutOver("rollout_over", "expected an open rollout, got one that has ended; stop")
