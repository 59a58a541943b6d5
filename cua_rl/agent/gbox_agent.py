"""GBoxAgent: looks at a device, asks the model, acts, until the model says it is done.

It speaks the OpenAI Responses API and knows nothing of training: the gateway that answers it records what the model
read and sampled.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cua_rl.agent.agent import AgentOutcome, AgentTask, ModelAccess, OnTurn
from cua_rl.agent.device_step import DeviceStep, cursor_after, perform
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
from cua_rl.agent.history import DropOldScreenshots, system_item, tool_result_item, user_item
from cua_rl.agent.policy_time import RolloutClock, TimedDevice
from cua_rl.agent.tools import function_tool, load_system_prompt, parse_action, tool_for
from cua_rl.agent.ui_tars import UiTars
from cua_rl.environments.device import ActionRejected, Device
from cua_rl.renderers.request_error import ContextOverflow
from cua_rl.types.actions import Action, Finish
from cua_rl.types.conversation import EncodedImage, ParseFailure, Tool, ToolCall
from cua_rl.types.errors import SamplingError, boundary
from cua_rl.types.json_values import Json, mapping, sequence
from cua_rl.types.rollout import AgentTurn, StopReason

_NO_CALL = "No tool call could be read from your answer."


@dataclass(frozen=True, slots=True, kw_only=True)
class GBoxAgent:
    """The built-in agent. It keeps no state between calls of `run`, so one instance serves all rollouts.

    With a `grounder` the model describes elements and the grounder finds them; with `ui_tars` it answers in that
    format, without tools; with neither it gives coordinates.
    """

    model: str = "policy"
    history: DropOldScreenshots | None = None
    """None keeps everything."""
    grounder: Grounder | None = None
    ui_tars: UiTars | None = None

    async def run(
        self, task: AgentTask, device: Device, access: ModelAccess, *, clock: RolloutClock, on_turn: OnTurn
    ) -> AgentOutcome:
        """Act until the model ends the task, turns or time are used up, or the next prompt does not fit.

        Raises:
            SamplingError: the model did not answer.
            DeviceError: the device failed.
            ConfigError: the model server takes no prompts of this configuration.
        """
        url_of = access.image_url_of(task.rollout_id)
        timed = TimedDevice(device, clock)
        seen = await timed.observe()
        if self.ui_tars is not None:
            items = self.ui_tars.opening(device.kind, task.instruction, url_of(seen))
        else:
            system = load_system_prompt(device.kind, of_elements=self.grounder is not None)
            items = [system_item(system), user_item(task.instruction, url_of(seen))]
        conversation = _Conversation(timed, self.grounder, self.ui_tars, url_of, seen, items)
        for index in range(task.max_turns):
            with clock.uncharged():
                response = await self._respond(conversation, access, task.rollout_id)
            if response is None:
                return AgentOutcome(stop_reason=StopReason.CONTEXT_OVERFLOW, num_turns=index)
            before = conversation.seen
            done = await conversation.take_turn(response)
            step = DeviceStep() if isinstance(done, Finish) else done
            await on_turn(
                AgentTurn(
                    response_id=str(response["id"]),
                    before=before,
                    action=step.action,
                    action_error=step.error,
                    after=step.after,
                    durations_s=conversation.durations_s,
                )
            )
            if clock.is_used_up or step.is_last:
                error = step.error if step.is_last else None  # a refused action is recorded with its turn
                return AgentOutcome(stop_reason=StopReason.MAX_TIME, num_turns=index + 1, error=error)
            if isinstance(done, Finish):
                return AgentOutcome(
                    stop_reason=StopReason.FINISHED,
                    num_turns=index + 1,
                    answer=done.answer,
                    success_claimed=done.success_claimed,
                )
        return AgentOutcome(stop_reason=StopReason.MAX_TURNS, num_turns=task.max_turns)

    async def _respond(self, conversation: "_Conversation", access: ModelAccess, rollout_id: str) -> Json | None:
        """Ask the model for a Response; None if the conversation has outgrown the model's context."""
        clock, items = time.monotonic(), list(conversation.items)
        with boundary(SamplingError, "asking the model"):
            body = {
                "model": self.model,
                "input": items if self.history is None else self.history.visible(items),
                "tools": [function_tool(conversation.tool)] if self.ui_tars is None else [],
            }
            try:
                response = await access.respond(rollout_id, body)
            except ContextOverflow:
                return None
        conversation.durations_s = {"respond": time.monotonic() - clock}
        return response


@dataclass(slots=True)
class _Conversation:
    """The conversation with the model about one task, and the device of the task."""

    device: Device
    grounder: Grounder | None
    ui_tars: UiTars | None
    url_of: Callable[[EncodedImage], str]
    seen: EncodedImage
    """The last screenshot."""
    items: list[Json]
    cursor: tuple[int, int] | None = None
    durations_s: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def tool(self) -> Tool:
        """The tool that the model may call."""
        return tool_for(self.device.kind) if self.grounder is None else element_tool_for(self.device.kind)

    async def take_turn(self, response: Json) -> DeviceStep | Finish:
        """Execute the first tool call, or UI-TARS' action, and append the items that the model reads next."""
        output = [mapping(item) for item in sequence(response["output"])]
        self.items += output
        calls = [
            ToolCall(call_id=str(item["call_id"]), name=str(item["name"]), arguments=str(item["arguments"]))
            for item in output
            if item["type"] == "function_call" and self.ui_tars is None
        ]
        parsed = await self._parse(response, calls)
        if isinstance(parsed, Finish):
            return parsed
        if isinstance(parsed, str):
            step, shown = DeviceStep(error=parsed), None
        else:
            step, shown = await perform(self.device, parsed), None
            self.durations_s["execute"] = step.execute_s
            if step.after is not None:
                self.seen, shown = step.after, self.url_of(step.after)
                self.cursor = cursor_after(parsed) or self.cursor
                self.durations_s["observe"] = step.observe_s
        if calls:
            self.items.append(tool_result_item(calls[0].call_id, step.error or "", shown))
        else:
            self.items.append(user_item(step.error or "", shown))
        self.items += [tool_result_item(extra.call_id, "Ignored: one call per answer.") for extra in calls[1:]]
        return step

    async def _parse(self, response: Json, calls: Sequence[ToolCall]) -> Action | Finish | str:
        """The action in pixels, or the end of the rollout; a message for the model if it asks for neither."""
        parsed: Aim | Action | Finish | ParseFailure
        if self.ui_tars is not None:
            parsed = self.ui_tars.parse(_text_of(response), self.seen)
            return parsed.message if isinstance(parsed, ParseFailure) else parsed
        if not calls:
            is_cut_off = response["status"] == "incomplete"
            problem = "Your answer was cut off: it was too long." if is_cut_off else _NO_CALL
            return f"{problem} Answer with one call of {self.tool.name}, in the form that its definition asks for."
        call = calls[0]
        if self.grounder is None:
            parsed = parse_action(call, width_px=self.seen.width_px, height_px=self.seen.height_px, cursor=self.cursor)
        else:
            parsed = parse_element_action(call)
            if isinstance(parsed, PointAt | DragBetween | ScrollAt):
                clock = time.monotonic()
                try:
                    parsed = await resolve(parsed, self.seen, self.grounder)
                except ActionRejected as error:
                    return str(error)
                finally:
                    self.durations_s["ground"] = time.monotonic() - clock
        return parsed.message if isinstance(parsed, ParseFailure) else parsed


def _text_of(response: Json) -> str:
    """All text that the model wrote outside of reasoning and calls."""
    messages = [item for item in map(mapping, sequence(response["output"])) if item["type"] == "message"]
    parts = [mapping(part) for message in messages for part in sequence(message["content"])]
    return "".join(str(part["text"]) for part in parts if part["type"] == "output_text")
