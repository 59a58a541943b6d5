"""Experts' decisions as answers to imitate: reasoning that names what was scanned, then a call.

The renderer of the model that learns writes them as text.
"""

import json

from cua_rl.agent.tools import MAX_COORDINATE, tool_for
from cua_rl.environments.device import DeviceKind
from cua_rl.tasks.expert import Decision, Finish
from cua_rl.types import actions
from cua_rl.types.conversation import EncodedImage, Reasoning, ToolCall
from cua_rl.types.errors import TaskError

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
