"""What an expert decides, as the text the tiny model should write: a thought naming what it scans, then a call."""

import json

from cua_rl.actions import Action, Button, Click, Drag, LongPress, PressButton, PressKey, TypeText, Wait
from cua_rl.agent.tools import MAX_COORDINATE, MOBILE_USE
from cua_rl.conversation import ToolCall
from cua_rl.errors import TaskError
from cua_rl.models.vocabulary import COORDINATE_STEP
from cua_rl.renderers.answers import write_answer
from cua_rl.tasks.demo.expert import Decision, Finish
from cua_rl.types import Observation

_BUTTON_NAMES = {Button.BACK: "Back", Button.HOME: "Home", Button.RECENTS: "Menu"}


def write_decision(decision: Decision, screen: Observation) -> str:
    """The answer, byte for byte as the model should sample it, without the end of turn."""
    arguments = _arguments(decision.action, screen)
    call = ToolCall(call_id="expert", name=MOBILE_USE.name, arguments=json.dumps(arguments, ensure_ascii=False))
    return write_answer(reasoning=" ".join(decision.scanned) or None, text=None, tool_calls=[call])


def _arguments(action: Action | Finish, screen: Observation) -> dict[str, object]:
    match action:
        case Click():
            return {"action": "click", "coordinate": _relative(action.x, action.y, screen)}
        case LongPress(x=x, y=y):
            return {"action": "long_press", "coordinate": _relative(x, y, screen)}
        case Drag():
            ends = _relative(action.x, action.y, screen), _relative(action.to_x, action.to_y, screen)
            return {"action": "swipe", "coordinate": ends[0], "coordinate2": ends[1]}
        case TypeText(text=text):
            return {"action": "type", "text": text}
        case PressButton(button=button) if button in _BUTTON_NAMES:
            return {"action": "system_button", "button": _BUTTON_NAMES[button]}
        case PressKey(keys=("enter",)):
            return {"action": "system_button", "button": "Enter"}
        case Wait(duration_s=duration_s):
            return {"action": "wait", "time": duration_s}
        case Finish(answer=str(answer)):
            return {"action": "answer", "text": answer}
        case Finish(success_claimed=success_claimed):
            return {"action": "terminate", "status": "success" if success_claimed else "failure"}
        case _:
            raise TaskError(f"expected an action that mobile_use has, got {action!r}")


def _relative(x: int, y: int, screen: Observation) -> list[int]:
    return [_nearest_step(x, screen.width_px), _nearest_step(y, screen.height_px)]


def _nearest_step(position_px: int, length_px: int) -> int:
    return round(position_px * MAX_COORDINATE / length_px / COORDINATE_STEP) * COORDINATE_STEP
