"""Demonstrations: the real agent acts on a device, and an expert answers instead of the model.

The imitated conversation is therefore the one that the model has in a rollout; the model's renderer writes its text.
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from cua_rl.agent.agent import AgentOutcome, AgentTask, ModelAccess
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.agent.tools import MAX_COORDINATE, tool_for
from cua_rl.environments.device import Device, DeviceKind
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_items import Conversation, conversation_from_responses, responses_input
from cua_rl.renderers.renderer import Renderer
from cua_rl.tasks.expert import Decision, Expert
from cua_rl.types import actions
from cua_rl.types.actions import Finish
from cua_rl.types.conversation import EncodedImage, Item, Message, Reasoning, TextPart, Tool, ToolCall
from cua_rl.types.errors import TaskError
from cua_rl.types.rollout import AgentTurn, Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A conversation that ends with an answer; all its answers are imitated."""

    items: tuple[Item, ...]
    tools: tuple[Tool, ...]
    is_open: bool = False
    """The last answer is incomplete: its end of turn is not imitated."""
    answer: str | None = None
    """The expert's final answer, for tasks that ask a question."""


_AnswerItem = Message | Reasoning | ToolCall
_TaughtItem = TypeVar("_TaughtItem", _AnswerItem, Item)

AnswerItems = tuple[_AnswerItem, ...]

Answer = Callable[[EncodedImage], Awaitable[AnswerItems]]
"""Answers in place of the model, on the screen that the agent sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstratedTurn:
    """A request of the agent, the answer that stands in for the model's, and what the agent did with it."""

    request: Mapping[str, object]
    images: ImageUrls
    answer: AnswerItems
    agent: AgentTurn

    def conversation(self) -> Conversation:
        """What the model would have read."""
        return conversation_from_responses(self.request, self.images)


async def demonstrate(instruction: str, device: Device, expert: Expert, *, max_turns: int) -> Demonstration:
    """Let the expert work on the device until it ends the task or has answered `max_turns` times."""

    async def answer(screen: EncodedImage) -> AnswerItems:
        return build_answer(await expert(), screen, device.kind)

    turns, outcome = await demonstrate_turns(instruction, device, answer, max_turns=max_turns)
    last = turns[-1].conversation()
    return Demonstration(items=(*last.items, *turns[-1].answer), tools=last.tools, answer=outcome.answer)


async def demonstrate_turns(
    instruction: str, device: Device, answer: Answer, *, max_turns: int
) -> tuple[list[DemonstratedTurn], AgentOutcome]:
    """As `demonstrate`, with every turn."""
    model = _ExpertModel(device, answer)
    turns: list[DemonstratedTurn] = []

    async def note(turn: AgentTurn) -> None:
        turns.append(DemonstratedTurn(request=model.request, images=model.images, answer=model.answer, agent=turn))

    task = AgentTask(rollout_id="demonstration", instruction=instruction, max_turns=max_turns)
    outcome = await GBoxAgent().run(task, device, cast("ModelAccess", model), clock=RolloutClock(), on_turn=note)
    return turns, outcome


def build_supervised_datum(renderer: Renderer, demonstration: Demonstration, *, name: str) -> Datum:
    """The datum whose trained tokens are the answers."""
    items = as_taught(demonstration.items, renderer)
    model_input, loss_mask = renderer.render_supervised(items, demonstration.tools)
    if demonstration.is_open:
        loss_mask = (*loss_mask[:-1], False)
    return Datum(
        rollout_id=name,
        model_input=model_input,
        loss_mask=loss_mask,
        advantages=tuple(map(float, loss_mask)),  # a weight of 1 for every token of an answer
        sampling_logprobs=(0.0,) * model_input.length,
        policy_versions=(),
    )


def as_taught(items: Sequence[_TaughtItem], renderer: Renderer) -> tuple[_TaughtItem | Message, ...]:
    """The items, with reasoning as text before an answer for models whose prompts end with a closed think block.

    Their template would open another block for it, so that answers would be trained behind prompts that never occur.
    """
    if not renderer.closes_thinking:
        return tuple(items)
    taught: list[_TaughtItem | Message] = []
    thoughts: list[str] = []
    for item in (*items, None):
        thought = "\n".join(thoughts)
        match item:
            case Reasoning():
                thoughts.append(item.text)
                continue
            case Message(role="assistant") if thoughts:
                taught.append(replace(item, content=(TextPart(text=f"{thought}\n\n"), *item.content)))
            case _:
                taught += [Message(role="assistant", content=(TextPart(text=thought),))] if thoughts else []
                taught += [] if item is None else [item]
        thoughts = []
    return tuple(taught)


class _ExpertModel:
    """Stands in for the gateway: the expert answers."""

    def __init__(self, device: Device, answer: Answer) -> None:
        self._device = device
        self._answer = answer
        self.images = ImageUrls()
        self.request: Mapping[str, object] = {}
        self.answer: AnswerItems = ()

    def image_url_of(self, rollout_id: str) -> Callable[[EncodedImage], str]:
        return self.images.name

    async def respond(self, rollout_id: str, request: Mapping[str, object]) -> Mapping[str, object]:
        self.request = request
        self.answer = await self._answer(await self._device.observe())
        return {"id": "expert", "status": "completed", "output": [_output(item) for item in self.answer]}


def _output(item: Message | Reasoning | ToolCall) -> Mapping[str, object]:
    """A part of an answer; of messages, answers have another form than requests."""
    if not isinstance(item, Message):
        return responses_input((item,))[0]
    texts = [part.text for part in item.content if isinstance(part, TextPart)]
    content = [{"type": "output_text", "text": text, "annotations": list[object]()} for text in texts]
    return {"type": "message", "id": "expert", "role": "assistant", "status": "completed", "content": content}


COORDINATE_STEP = 5
"""Experts click at multiples of this, 0-1000 on both axes: the tiny model has a token for each."""

_BUTTON_NAMES = {actions.Button.BACK: "Back", actions.Button.HOME: "Home", actions.Button.RECENTS: "Menu"}


def build_answer(
    decision: Decision, screen: EncodedImage, kind: DeviceKind = "android"
) -> tuple[Reasoning | ToolCall, ...]:
    """The answer of a model that decides like the expert; without reasoning if nothing was scanned."""
    arguments: dict[str, object]
    match decision.action:
        case actions.TypeText(text=text):
            arguments = {"action": "type", "text": text}
        case actions.Wait(duration_s=duration_s):
            arguments = {"action": "wait", "time": duration_s}
        case Finish(answer=str(answer)):
            arguments = {"action": "answer", "text": answer}
        case Finish(success_claimed=success_claimed):
            arguments = {"action": "terminate", "status": "success" if success_claimed else "failure"}
        case action:
            arguments = _touch(action, screen) if kind == "android" else _mouse_or_keys(action, screen)
    call = ToolCall(call_id="expert", name=tool_for(kind).name, arguments=json.dumps(arguments, ensure_ascii=False))
    return (Reasoning(text=" ".join(decision.scanned)), call) if decision.scanned else (call,)


def _touch(action: actions.Action, screen: EncodedImage) -> dict[str, object]:
    match action:
        case actions.Click():
            return {"action": "click", "coordinate": _relative(action.x, action.y, screen)}
        case actions.LongPress(x=x, y=y):
            return {"action": "long_press", "coordinate": _relative(x, y, screen)}
        case actions.Drag():
            ends = _relative(action.x, action.y, screen), _relative(action.to_x, action.to_y, screen)
            return {"action": "swipe", "coordinate": ends[0], "coordinate2": ends[1]}
        case actions.PressButton(button=button) if button in _BUTTON_NAMES:
            return {"action": "system_button", "button": _BUTTON_NAMES[button]}
        case actions.PressKey(keys=("enter",)):
            return {"action": "system_button", "button": "Enter"}
        case _:
            raise TaskError(f"expected an action that mobile_use has, got {action!r}")


def _mouse_or_keys(action: actions.Action, screen: EncodedImage) -> dict[str, object]:
    """A drag starts at the mouse position: the expert moves the mouse there first."""
    match action:
        case actions.Click(x=x, y=y):
            return {"action": "left_click", "coordinate": _relative(x, y, screen)}
        case actions.DoubleClick(x=x, y=y):
            return {"action": "double_click", "coordinate": _relative(x, y, screen)}
        case actions.RightClick(x=x, y=y):
            return {"action": "right_click", "coordinate": _relative(x, y, screen)}
        case actions.MoveMouse(x=x, y=y):
            return {"action": "mouse_move", "coordinate": _relative(x, y, screen)}
        case actions.Drag(to_x=x, to_y=y):
            return {"action": "left_click_drag", "coordinate": _relative(x, y, screen)}
        case actions.Scroll(x=x, y=y, down_px=down_px, right_px=0):
            return {"action": "scroll", "coordinate": _relative(x, y, screen), "pixels": -down_px}
        case actions.PressKey(keys=keys):
            return {"action": "key", "keys": list(keys)}
        case _:
            raise TaskError(f"expected an action that computer_use has, got {action!r}")


def _relative(x: int, y: int, screen: EncodedImage) -> list[int]:
    return [_nearest_step(x, screen.width_px), _nearest_step(y, screen.height_px)]


def _nearest_step(position_px: int, length_px: int) -> int:
    return round(position_px * MAX_COORDINATE / length_px / COORDINATE_STEP) * COORDINATE_STEP
