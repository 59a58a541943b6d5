"""GBoxAgent: takes a screenshot, asks the model, acts, until the model says that it is done.

It speaks the OpenAI Responses API and knows nothing of training: the gateway that answers it records what the model
read and sampled.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cua_rl.agent.action_format import BY_ELEMENTS, Parsed, ScreenAnswer, ToolCalls
from cua_rl.agent.agent import AgentOutcome, AgentTask, ModelAccess, OnTurn
from cua_rl.agent.device_step import DeviceStep, cursor_after, perform
from cua_rl.agent.element_tools import DragBetween, PointAt, ScrollAt, parse_element_action, resolve
from cua_rl.agent.history import DropOldScreenshots
from cua_rl.agent.holo import Holo
from cua_rl.agent.policy_time import RolloutClock, TimedDevice
from cua_rl.agent.ui_tars import UiTars
from cua_rl.environments.device import ActionRejected, Device, Grounder
from cua_rl.renderers.request_error import ContextOverflow
from cua_rl.types.actions import Finish
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.errors import SamplingError, boundary
from cua_rl.types.json_values import Json
from cua_rl.types.rollout import AgentTurn, StopReason

ActionFormat = ToolCalls | UiTars | Holo


@dataclass(frozen=True, slots=True, kw_only=True)
class GBoxAgent:
    """The built-in agent. It keeps no state between calls of `run`, so one instance serves all rollouts.

    With a `grounder` the model describes elements and the grounder finds them; otherwise it gives coordinates, in
    `action_format`.
    """

    model: str = "policy"
    history: DropOldScreenshots | None = None
    """None keeps everything."""
    grounder: Grounder | None = None
    action_format: ActionFormat = field(default_factory=ToolCalls)

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
        action_format = self.action_format if self.grounder is None else BY_ELEMENTS
        items = action_format.opening(device.kind, task.instruction, url_of(seen))
        tools = action_format.tools(device.kind, seen)
        conversation = _Conversation(timed, self.grounder, action_format, url_of, seen, tools, items)
        for index in range(task.max_turns):
            with clock.uncharged():
                response = await self._respond(conversation, access, task.rollout_id)
            if response is None:
                return AgentOutcome(stop_reason=StopReason.CONTEXT_OVERFLOW, num_turns=index)
            before = conversation.seen
            done = await conversation.take_turn(response, index + 1)
            step = DeviceStep() if isinstance(done, Finish) else done
            await on_turn(
                AgentTurn(
                    response_id=str(response["id"]),
                    before=before,
                    action=step.action,
                    action_error=step.error,
                    after=step.after,
                    durations_s=conversation.durations_s,
                    more_actions=step.more_actions,
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
                "tools": conversation.tools,
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
    action_format: ActionFormat
    url_of: Callable[[EncodedImage], str]
    seen: EncodedImage
    """The last screenshot."""
    tools: list[Json]
    items: list[Json]
    cursor: tuple[int, int] | None = None
    durations_s: dict[str, float] = field(default_factory=dict[str, float])

    async def take_turn(self, response: Json, turn: int) -> DeviceStep | Finish:
        """Execute what the model asks for, and append the items that it reads next."""
        answer = ScreenAnswer(response=response, turn=turn, kind=self.device.kind, seen=self.seen, cursor=self.cursor)
        self.items += answer.items
        parsed = await self._parse(answer)
        match parsed:
            case Finish():
                return parsed
            case ParseFailure(message=message):
                step = DeviceStep(error=message)
            case actions:
                step = await perform(self.device, *actions)
                self.durations_s["execute"] = step.execute_s
        if step.after is not None:
            self.seen = step.after
            for action in () if step.action is None else (step.action, *step.more_actions):
                self.cursor = cursor_after(action) or self.cursor
            self.durations_s["observe"] = step.observe_s
        shown = None if step.after is None else self.url_of(step.after)
        self.items += self.action_format.reply(answer, step.error or "", shown)
        return step

    async def _parse(self, answer: ScreenAnswer) -> Parsed:
        """What the answer asks for; with a grounder, after it has found the elements."""
        if self.grounder is None or not answer.calls:
            return self.action_format.parse(answer)
        parsed = parse_element_action(answer.calls[0])
        if isinstance(parsed, PointAt | DragBetween | ScrollAt):
            clock = time.monotonic()
            try:
                parsed = await resolve(parsed, self.seen, self.grounder)
            except ActionRejected as error:
                return ParseFailure(kind="tool_arguments", message=str(error))
            finally:
                self.durations_s["ground"] = time.monotonic() - clock
        return parsed if isinstance(parsed, Finish | ParseFailure) else (parsed,)
