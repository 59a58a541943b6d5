"""GBoxAgent: looks at a device, asks the model, acts, until the model says it is done.

It speaks the OpenAI Responses API through the `openai` package and knows nothing of training: the gateway behind
`client` records what the model read and sampled.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import TYPE_CHECKING, cast

from cua_rl.actions import Action, Click, DoubleClick, Drag, MoveMouse, RightClick
from cua_rl.agent.element_tools import (
    Aim,
    DragBetween,
    Grounder,
    PointAt,
    ScrollAt,
    element_tool_for,
    parse_element_action,
    resolve,
)
from cua_rl.agent.history import FullHistory, History
from cua_rl.agent.responses import Json, function_tool, system_item, tool_result_item, user_item
from cua_rl.agent.tools import Finish, parse_action, tool_for
from cua_rl.conversation import EncodedImage, ParseFailure, Tool, ToolCall
from cua_rl.devices.device import ActionRejected, Device, DeviceKind
from cua_rl.errors import ConfigError, SamplingError, boundary
from cua_rl.types import StopReason

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.responses import Response


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """The environment's side of a turn; the gateway has the model's side under `response_id`."""

    index: int
    response_id: str
    before: EncodedImage
    action: Action | None
    """None if the answer could not be parsed or ended the rollout."""
    action_error: str | None
    """What the model was told if its answer could not be parsed or its action could not be done."""
    after: EncodedImage | None
    """None if nothing was done."""
    durations_s: Mapping[str, float]
    """Seconds per stage: respond, ground, execute, observe."""
    more_actions: tuple[Action, ...] = ()
    """What was done after `action` on the same answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """How the agent's work ended. `success_claimed` is None if it made no claim; it is never a reward."""

    stop_reason: StopReason
    num_turns: int
    answer: str | None = None
    success_claimed: bool | None = None
    error: str | None = None
    """What went wrong with an agent that ended its rollout by failing."""


CONFIGURATION = "configuration"
"""The gateway's code for a request that no retry and no other rollout would help: the run must stop."""

OnTurn = Callable[[AgentTurn], Awaitable[None]]


def load_system_prompt(kind: DeviceKind, *, of_elements: bool = False) -> str:
    """The system prompt for a kind of device; `of_elements` for the tools that take descriptions, not coordinates."""
    name = f"{kind}_elements.txt" if of_elements else f"{kind}.txt"
    return files("cua_rl.agent").joinpath("prompts", name).read_text(encoding="utf-8").strip()


@dataclass(slots=True)
class _Work:
    """What changes while the agent works on one task."""

    device: Device
    items: list[Json]
    seen: EncodedImage
    grounder: Grounder | None
    cursor: tuple[int, int] | None = None
    used_tokens: int = 0
    durations_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def tool(self) -> Tool:
        """The tool that the model may call."""
        return tool_for(self.device.kind) if self.grounder is None else element_tool_for(self.device.kind)


class GBoxAgent:
    """Works on one task per call of `run`; keeps no state of its own, so one instance serves all rollouts.

    With a `grounder` the model describes elements and the grounder finds them; without one it gives coordinates.
    """

    def __init__(
        self, *, model: str = "policy", history: History | None = None, grounder: Grounder | None = None
    ) -> None:
        self._model = model
        self._grounder = grounder
        self._history = history or FullHistory()

    async def run(
        self, instruction: str, device: Device, client: "AsyncOpenAI", *, max_turns: int, on_turn: OnTurn
    ) -> AgentOutcome:
        """Act until the model ends the task, the turns are used up, or the next prompt does not fit.

        Raises:
            SamplingError: the model did not answer.
            DeviceError: the device failed.
            ConfigError: the model server will not take the prompts of this configuration.
        """
        seen = await device.observe()
        system = load_system_prompt(device.kind, of_elements=self._grounder is not None)
        work = _Work(device, [system_item(system), user_item(instruction, seen)], seen, self._grounder)
        for index in range(max_turns):
            response = await self._respond(work, client)
            if response is None:
                return AgentOutcome(stop_reason=StopReason.CONTEXT_OVERFLOW, num_turns=index)
            before = work.seen
            done = await _take_turn(work, response)
            await on_turn(_turn(index, response, before, done, work))
            if isinstance(done, Finish):
                return AgentOutcome(
                    stop_reason=StopReason.FINISHED,
                    num_turns=index + 1,
                    answer=done.answer,
                    success_claimed=done.success_claimed,
                )
        return AgentOutcome(stop_reason=StopReason.MAX_TURNS, num_turns=max_turns)

    async def _respond(self, work: _Work, client: "AsyncOpenAI") -> "Response | None":
        """Ask the model; None if the conversation has outgrown the budget or the model's context."""
        from openai import BadRequestError  # loaded already by whoever made `client`

        if not self._history.has_room(used_tokens=work.used_tokens):
            return None
        clock = time.monotonic()
        with boundary(SamplingError, "asking the model"):
            try:
                # as extra_body: what are arguments, openai walks through item by item, at half of a turn's whole cost
                response = await client.responses.create(
                    model=self._model,
                    extra_body={"input": self._history.visible(work.items), "tools": [function_tool(work.tool)]},
                )
            except BadRequestError as error:
                if error.code == CONFIGURATION:
                    raise ConfigError(error.message) from error
                if error.code != "context_length_exceeded":
                    raise
                return None
        work.durations_s = {"respond": time.monotonic() - clock}
        work.used_tokens = response.usage.total_tokens if response.usage else 0
        work.items += [cast("Json", item.to_dict()) for item in response.output]
        return response


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What a turn did: an action that changed the screen, or an error the model was told."""

    action: Action | None = None
    error: str | None = None
    after: EncodedImage | None = None


async def _take_turn(work: _Work, response: "Response") -> _Done | Finish:
    """Do what the first tool call says and append what the model reads next."""
    calls = [item for item in response.output if item.type == "function_call"]
    if not calls:
        message = _no_call_message(response, work.tool)
        work.items.append(user_item(message))
        return _Done(error=message)
    call = ToolCall(call_id=calls[0].call_id, name=calls[0].name, arguments=calls[0].arguments)
    parsed = await _understand(work, call)
    if isinstance(parsed, Finish):
        return parsed
    done = _Done(error=parsed) if isinstance(parsed, str) else await _execute(work, parsed)
    work.items.append(tool_result_item(call.call_id, done.error or "", done.after))
    work.items += [tool_result_item(extra.call_id, "Ignored: one call per answer.") for extra in calls[1:]]
    return done


async def _understand(work: _Work, call: ToolCall) -> Action | Finish | str:
    """What the call asks for, in pixels; a message for the model if that cannot be told."""
    parsed: Aim | Action | Finish | ParseFailure
    if work.grounder is None:
        parsed = parse_action(call, width_px=work.seen.width_px, height_px=work.seen.height_px, cursor=work.cursor)
    else:
        parsed = parse_element_action(call)
        if isinstance(parsed, PointAt | DragBetween | ScrollAt):
            clock = time.monotonic()
            try:
                parsed = await resolve(parsed, work.seen, work.grounder)
            except ActionRejected as error:
                return str(error)
            finally:
                work.durations_s["ground"] = time.monotonic() - clock
    return parsed.message if isinstance(parsed, ParseFailure) else parsed


async def _execute(work: _Work, action: Action) -> _Done:
    clock = time.monotonic()
    try:
        await work.device.execute(action)
    except ActionRejected as error:
        return _Done(action=action, error=str(error) or "The device cannot do this.")
    finally:
        work.durations_s["execute"] = time.monotonic() - clock
    work.cursor = cursor_after(action) or work.cursor
    clock = time.monotonic()
    work.seen = await work.device.observe()
    work.durations_s["observe"] = time.monotonic() - clock
    return _Done(action=action, after=work.seen)


def _turn(index: int, response: "Response", before: EncodedImage, done: _Done | Finish, work: _Work) -> AgentTurn:
    done = _Done() if isinstance(done, Finish) else done
    return AgentTurn(
        index=index,
        response_id=response.id,
        before=before,
        action=done.action,
        action_error=done.error,
        after=done.after,
        durations_s=work.durations_s,
    )


def cursor_after(action: Action) -> tuple[int, int] | None:
    match action:
        case Click() | DoubleClick() | RightClick() | MoveMouse():
            return (action.x, action.y)
        case Drag():
            return (action.to_x, action.to_y)
        case _:
            return None


def _no_call_message(response: "Response", tool: Tool) -> str:
    expected = f'Answer with one call: <tool_call>\n{{"name": "{tool.name}", "arguments": {{...}}}}\n</tool_call>'
    if response.status == "incomplete":
        return f"Your answer was cut off: it was too long. {expected}"
    return f"No tool call could be read from your answer. {expected}"
