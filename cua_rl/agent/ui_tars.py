"""UI-TARS-1.5's action format: no tools, but a thought and one call as text, as in its training.

Coordinates are pixels of the screenshot as the model sees it, after its image processor has resized it. Prompts,
actions and coordinates are those of github.com/bytedance/UI-TARS (Apache License 2.0), whose wording is in
`prompts/ui_tars_*.txt`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from cua_rl.agent.action_format import Parsed, ScreenAnswer, reach
from cua_rl.agent.history import user_item
from cua_rl.agent.tools import MAX_TYPED_CHARACTERS
from cua_rl.environments.device import DeviceKind
from cua_rl.renderers.images import ImageSettings
from cua_rl.types import actions
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.json_values import Json

WAIT_S = 5.0
"""The pause that the prompt promises."""
_ACTION = re.compile(r"^[ \t]*Action:", re.MULTILINE)
_CALL = re.compile(r"\s*(\w+)\s*\((.*)\)\s*", re.DOTALL)
_CONTENT = re.compile(r"\s*content\s*=\s*(['\"])(.*)\1\s*", re.DOTALL)  # to the last quote: some inside are not escaped
_ARGUMENT = re.compile(r"\s*(\w+)\s*=\s*(['\"])(.*?)\2\s*(?:,|\Z)", re.DOTALL)
_TAG = re.compile(r"<\|\w+\|>|</?\w+>")  # <|box_start|>, <point>
_NUMBER = re.compile(r"\d{1,6}(\.\d{1,9})?")
_ESCAPE = re.compile(r"\\([ntr'\"\\])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_OTHER_NAMES = {"point": "start_box", "start_point": "start_box", "end_point": "end_box"}


class _Malformed(Exception):
    """A call that does not describe an action; the message is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    arguments: Mapping[str, str]
    seen: EncodedImage
    resized_px: tuple[int, int]

    def text(self, name: str) -> str:
        if name not in self.arguments:
            raise _Malformed(f"it needs {name}")
        return self.arguments[name]

    def pixel(self, name: str = "start_box") -> tuple[int, int]:
        """The pixel of the screenshot at a point, or at the centre of a box."""
        value = self.text(name)
        words = re.split(r"[\s,]+", _TAG.sub(" ", value).strip(" ()[]\n"))
        if len(words) not in (2, 4) or not all(map(_NUMBER.fullmatch, words)):
            raise _Malformed(f"{name} is {_shortened(value)}, not a point such as '(100,200)'")
        left, top, right, bottom = map(float, words * (4 // len(words)))
        width_px, height_px = self.resized_px
        x, y = (left + right) / 2, (top + bottom) / 2
        if x > width_px or y > height_px:
            raise _Malformed(f"{name} is {value!r}, but the screenshot has {width_px} x {height_px} pixels")
        return (
            min(round(x * self.seen.width_px / width_px), self.seen.width_px - 1),
            min(round(y * self.seen.height_px / height_px), self.seen.height_px - 1),
        )


def _at(kind: Callable[..., actions.Action]) -> "_Maker":
    def maker(call: _Call) -> actions.Action:
        x, y = call.pixel()
        return kind(x=x, y=y)

    return maker


def _drag(call: _Call) -> actions.Action:
    (x, y), (to_x, to_y) = call.pixel(), call.pixel("end_box")
    return actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y)


def _scroll(call: _Call) -> actions.Action:
    """Half a screen, as the format has no distance; where nothing is named, in the middle."""
    width_px, height_px = call.seen.width_px, call.seen.height_px
    x, y = call.pixel() if "start_box" in call.arguments else (width_px // 2, height_px // 2)
    match call.text("direction").strip():
        case "down" | "up" as direction:
            return actions.Scroll(x=x, y=y, down_px=height_px // 2 if direction == "down" else -(height_px // 2))
        case "right" | "left" as direction:
            return actions.Scroll(x=x, y=y, right_px=width_px // 2 if direction == "right" else -(width_px // 2))
        case other:
            raise _Malformed(f"direction is {_shortened(other)}, not down, up, right or left")


def _hotkey(call: _Call) -> actions.Action:
    keys = tuple(call.text("key").split())
    if not keys:
        raise _Malformed("key is empty, not names such as 'ctrl c'")
    return actions.PressKey(keys=keys)


def _type(call: _Call) -> actions.Action:
    text = call.text("content")
    if len(text) > MAX_TYPED_CHARACTERS:
        raise _Malformed(f"content has {len(text)} characters, more than {MAX_TYPED_CHARACTERS}")
    return actions.TypeText(text=text)


_Maker = Callable[[_Call], actions.Action | actions.Finish]
_MAKERS: Mapping[str, _Maker] = {
    "click": _at(actions.Click),
    "left_single": _at(actions.Click),
    "left_double": _at(actions.DoubleClick),
    "right_single": _at(actions.RightClick),
    "long_press": _at(actions.LongPress),
    "drag": _drag,
    "scroll": _scroll,
    "hotkey": _hotkey,
    "type": _type,
    "open_app": lambda call: actions.OpenApp(name=call.text("app_name")),
    "press_home": lambda _: actions.PressButton(button=actions.Button.HOME),
    "press_back": lambda _: actions.PressButton(button=actions.Button.BACK),
    "wait": lambda _: actions.Wait(duration_s=WAIT_S),
    "finished": lambda call: actions.Finish(success_claimed=True, answer=call.arguments.get("content") or None),
    "call_user": lambda _: actions.Finish(success_claimed=False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UiTars:
    """The format for a model whose screenshots are resized by `image_settings`."""

    image_settings: ImageSettings

    def opening(self, kind: DeviceKind, instruction: str, image_url: str) -> list[Json]:
        """Prompt and task, then the screenshot as its own message."""
        name = f"ui_tars_{'mobile' if kind == 'android' else 'computer'}.txt"
        prompt = files("cua_rl.agent").joinpath("prompts", name).read_text(encoding="utf-8")
        return [user_item(prompt + instruction), user_item("", image_url)]

    def tools(self, kind: DeviceKind, seen: EncodedImage) -> list[Json]:
        """None: the prompt has the actions."""
        return []

    def reply(self, answer: ScreenAnswer, error: str, image_url: str | None) -> list[Json]:
        """Error and screenshot as a message."""
        return [user_item(error, image_url)]

    def parse(self, answer: ScreenAnswer) -> Parsed:
        """The action after the last `Action:`."""
        *_, written = _ACTION.split(answer.text)  # a thought may quote an earlier action
        called = _CALL.fullmatch(written)
        if called is None:
            return _failure("tool_call_form", f"expected one call after Action:, got {_shortened(written.strip())}")
        name, inside = called.groups()
        if name not in _MAKERS:
            return _failure("tool_name", f"there is no action {_shortened(name)}, only {', '.join(_MAKERS)}")
        resized_px = reach(answer.seen, self.image_settings)
        try:
            action = _MAKERS[name](_Call(arguments=_read_arguments(inside), seen=answer.seen, resized_px=resized_px))
            return action if isinstance(action, actions.Finish) else (action,)
        except _Malformed as error:
            return _failure("tool_arguments", f"in {name}, {error}")


def _read_arguments(inside: str) -> Mapping[str, str]:
    if content := _CONTENT.fullmatch(inside):
        return {"content": _unescape(content[2])}
    arguments: dict[str, str] = {}
    end = 0
    while found := _ARGUMENT.match(inside, end):
        arguments[_OTHER_NAMES.get(found[1], found[1])] = _unescape(found[3])
        end = found.end()
    if inside[end:].strip():
        raise _Malformed(f"expected arguments such as start_box='(100,200)', got {_shortened(inside[end:])}")
    return arguments


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPED.get(found[1], found[1]), text)


def _failure(kind: Literal["tool_call_form", "tool_name", "tool_arguments"], what: str) -> ParseFailure:
    message = f"Your answer could not be understood: {what}. Write one action, such as click(start_box='(100,200)')."
    return ParseFailure(kind=kind, message=message)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
