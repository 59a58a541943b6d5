"""Translates actions of other systems to calls of our tools.

Names and arguments differ between data sets. Supported are those of AndroidControl (arXiv:2406.03679), BrowserGym's
coordinate actions (arXiv:2412.05467), the computer tools of model providers, and pyautogui's functions as AgentTrek
(arXiv:2412.09605) and AGUVIS (arXiv:2412.04454) write them. Coordinates are pixels of the screenshot or, if neither is
above 1 and one has a fraction, shares of it. Actions on an element given only by an identifier are not supported.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cua_rl.agent.tools import ACTION_NAMES, MAX_COORDINATE, tool_for
from cua_rl.conversation import EncodedImage
from cua_rl.devices.device import DeviceKind
from cua_rl.errors import ConfigError

Arguments = dict[str, object]

_KINDS: Mapping[str, frozenset[str]] = {
    "click": frozenset({"click", "tap", "left_click", "mouse_click", "leftclick"}),
    "double_click": frozenset({"double_click", "doubleclick", "dblclick", "mouse_dblclick"}),
    "right_click": frozenset({"right_click", "rightclick"}),
    "long_press": frozenset({"long_press", "longpress", "long_tap"}),
    "move": frozenset({"mouse_move", "move", "moveto", "hover"}),
    "drag": frozenset({"drag", "dragto", "swipe", "left_click_drag", "drag_and_drop", "mouse_drag_and_drop"}),
    "scroll": frozenset({"scroll", "vscroll"}),
    "type": frozenset({"type", "input_text", "write", "typewrite", "keyboard_type", "type_text", "input"}),
    "keys": frozenset({"key", "press", "hotkey", "keyboard_press", "press_key", "keypress"}),
    "back": frozenset({"navigate_back", "go_back", "press_back", "back"}),
    "home": frozenset({"navigate_home", "press_home", "home"}),
    "enter": frozenset({"keyboard_enter", "press_enter", "enter"}),
    "wait": frozenset({"wait", "noop", "sleep"}),
    "answer": frozenset({"answer", "send_msg_to_user"}),
    "finish": frozenset({"status", "terminate", "finish", "finished", "done", "complete", "stop", "report_infeasible"}),
}
_KIND_OF = {name: kind for kind, names in _KINDS.items() for name in names}
OPENS_APP = frozenset({"open_app", "open", "launch", "launch_app"})
"""Actions without a counterpart: our tools cannot open an app by name."""
_NOTCH_PX = 100  # scrolled by one click of a mouse wheel
_LARGEST = 1e6
"""Limit for pixels, seconds and notches, because JSON may contain NaN and integers too large for a float."""
_PAGE_SHARE = 0.6  # share of the screen to scroll if only a direction is given
_POSITIONAL: Mapping[str, Sequence[str]] = {
    "write": ("text", "interval"), "typewrite": ("text", "interval"), "scroll": ("clicks", "x", "y"),
    "sleep": ("time",), "wait": ("time",), "terminate": ("status",), "answer": ("text",), "type": ("text",),
    "drag": ("from_x", "from_y", "x", "y"), "swipe": ("from_x", "from_y", "x", "y"), "press": ("keys", "presses"),
    "click": ("x", "y", "clicks", "interval", "button"), "mouse_click": ("x", "y", "button"),
}  # fmt: skip
_MAX_PRESSES = 100  # of one call; each becomes a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignAction:
    """An action as written in its data set."""

    name: str
    given: Mapping[str, object]


class UnknownAction(ConfigError):
    """An action that has no counterpart in our tools."""


def tool_arguments(action: ForeignAction, screen: EncodedImage, kind: DeviceKind) -> list[Arguments]:
    """The arguments of one or more calls of the device's tool; raises `UnknownAction`."""
    if action.name in ACTION_NAMES:
        return [_own_call(action, kind)]
    name = str(action.given.get("action") or action.given.get("action_type") or action.name)
    name = name.rpartition(".")[2].lower().replace("-", "_").replace(" ", "_")
    reading = _Reading(ForeignAction(name=name, given=action.given), screen, kind)
    match _KIND_OF.get(name):
        case None:
            raise reading.error("an action with a counterpart in our tools")
        case "click" | "double_click" | "right_click" | "long_press" | "move" as what:
            return [reading.pointed(what)]
        case "drag":
            return reading.dragged()
        case "scroll":
            return [reading.scrolled()]
        case "type":
            return reading.typed()
        case "keys" | "enter" | "back" | "home" as what:
            return [reading.pressed(what)]
        case "wait":
            return [{"action": "wait", "time": reading.number("time", "duration", "seconds", default=1.0)}]
        case "answer":
            return [{"action": "answer", "text": reading.text()}]
        case _:
            said = [str(action.given.get(key, "")).lower() for key in ("goal_status", "status", "success")]
            has_failed = name == "report_infeasible" or any(
                word in ("infeasible", "failure", "fail", "false") for word in said
            )
            return [{"action": "terminate", "status": "failure" if has_failed else "success"}]


def _own_call(action: ForeignAction, kind: DeviceKind) -> Arguments:
    """A call of our tool, with relative coordinates; those of the other device's tool would be read as pixels."""
    expected = tool_for(kind).name
    if action.name != expected:
        raise UnknownAction(f'expected calls of {expected}, got {action.name}; give the device as "platform"')
    return dict(action.given)


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads the arguments of one action on one screenshot."""

    action: ForeignAction
    screen: EncodedImage
    kind: DeviceKind

    def error(self, expected: str) -> UnknownAction:
        return UnknownAction(
            f"expected {expected}, got {self.action.name!r} with {dict(self.action.given)!r}; leave the trajectory "
            "out, or import with unreadable=skip"
        )

    def pointed(self, what: str) -> Arguments:
        button, clicks = str(self.action.given.get("button") or "left").lower(), self.action.given.get("clicks") or 1
        if button != "left" or clicks != 1:
            is_known = what == "click" and (button, clicks) in (("right", 1), ("left", 2))
            what = f"{'right' if clicks == 1 else 'double'}_click" if is_known else ""
        on_phone = {"click": "click", "long_press": "long_press"}
        on_computer = {"click": "left_click", "move": "mouse_move", "long_press": ""}
        name = on_phone.get(what, "") if self.kind == "android" else on_computer.get(what, what)
        if not name:
            raise self.error(f"an action of {tool_for(self.kind).name}")
        return {"action": name, "coordinate": self.point()}

    def dragged(self) -> list[Arguments]:
        given = self.action.given
        if "direction" in given:
            return [self.scrolled(finger=True)]
        start = self.point("start", "from") if _has_point(given, "start", "from") else None
        end = self.point("end", "to", "")
        if self.kind == "android":
            if start is None:
                raise self.error("where the swipe starts")
            return [{"action": "swipe", "coordinate": start, "coordinate2": end}]
        moved: list[Arguments] = [] if start is None else [{"action": "mouse_move", "coordinate": start}]
        return [*moved, {"action": "left_click_drag", "coordinate": end}]

    def scrolled(self, *, finger: bool = False) -> Arguments:
        """A scroll reveals what lies in its direction; a finger that swipes moves the other way."""
        at = self.point() if _has_point(self.action.given, "") else [MAX_COORDINATE // 2, MAX_COORDINATE // 2]
        right, down = self._distance_px()
        if finger:
            right, down = -right, -down
        if self.kind != "android":
            if right:
                raise self.error("a vertical scroll")
            return {"action": "scroll", "coordinate": at, "pixels": -down}
        width, height = self.screen.width_px, self.screen.height_px
        shares = (right / width * MAX_COORDINATE / 2, down / height * MAX_COORDINATE / 2)
        ends = [
            [_clamp(round(middle + sign * share)) for middle, share in zip(at, shares, strict=True)] for sign in (1, -1)
        ]
        return {"action": "swipe", "coordinate": ends[0], "coordinate2": ends[1]}

    def typed(self) -> list[Arguments]:
        text: list[Arguments] = [{"action": "type", "text": self.text()}]
        if not _has_point(self.action.given, ""):
            return text
        return [self.pointed("click"), *text]

    def pressed(self, what: str) -> Arguments:
        keys: object = [what]
        if what == "keys":
            keys = next(
                (self.action.given[key] for key in ("keys", "key", "key_comb") if key in self.action.given), None
            )
        words = keys.replace("+", " ").split() if isinstance(keys, str) else keys
        if not isinstance(words, list) or not words:
            raise self.error("keys")
        named = [str(word).lower() for word in cast("list[object]", words)]
        if self.kind != "android":
            if named in (["back"], ["home"]) and what in ("back", "home"):
                return {"action": "key", "keys": ["alt", "left"] if what == "back" else ["alt", "home"]}
            return {"action": "key", "keys": ["ctrl" if word == "control" else word for word in named]}
        buttons = {"back": "Back", "home": "Home", "enter": "Enter", "menu": "Menu", "return": "Enter"}
        if len(named) != 1 or named[0] not in buttons:
            raise self.error("Back, Home, Menu or Enter")
        return {"action": "system_button", "button": buttons[named[0]]}

    def text(self) -> str:
        for key in ("text", "content", "value", "message"):
            value = self.action.given.get(key)
            if isinstance(value, str):
                return value
        raise self.error("a text")

    def number(self, *keys: str, default: float) -> float:
        value = next((self.action.given[key] for key in keys if key in self.action.given), default)
        if not _is_number(value):
            raise self.error("a number")
        return float(cast("float", value))

    def point(self, *prefixes: str) -> list[int]:
        """The point in relative coordinates; raises `UnknownAction` if there is none on the screenshot."""
        width, height = self.screen.width_px, self.screen.height_px
        for x, y in _points(self.action.given, prefixes or ("",)):
            is_share = max(x, y) <= 1 and not (float(x).is_integer() and float(y).is_integer())
            shares = (x, y) if is_share else (x / width, y / height)
            if all(0 <= share <= 1 for share in shares):
                return [_clamp(round(share * MAX_COORDINATE)) for share in shares]
        raise self.error(f"coordinates on the screenshot of {width} x {height} pixels")

    def _distance_px(self) -> tuple[float, float]:
        """Distance to the right and down, from a direction, pixels, pages or notches of the wheel."""
        width, height = self.screen.width_px, self.screen.height_px
        given = self.action.given
        direction = given.get("direction", given.get("scroll_direction"))
        if direction is not None:
            steps = {"down": (0, 1), "up": (0, -1), "right": (1, 0), "left": (-1, 0)}
            if str(direction).lower() not in steps:
                raise self.error("up, down, left or right")
            right, down = steps[str(direction).lower()]
            return right * _PAGE_SHARE * width, down * _PAGE_SHARE * height
        if "pixels" in given:
            return 0.0, -self.number("pixels", default=0.0)
        if "page" in given:  # of AGUVIS: positive is up
            return 0.0, -self.number("page", default=0.0) * height
        if "clicks" in given:
            return 0.0, -self.number("clicks", default=0.0) * _NOTCH_PX
        if {"delta_x", "delta_y", "scroll_x", "scroll_y"} & given.keys():
            return self.number("delta_x", "scroll_x", default=0.0), self.number("delta_y", "scroll_y", default=0.0)
        raise self.error("a direction or a distance")


def parse_code(code: str) -> Iterator[ForeignAction]:
    """The calls in Python code such as `pyautogui.click(x=0.4, y=0.2)`; raises `UnknownAction` for anything else."""
    try:
        body = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnknownAction(
            f"expected calls of pyautogui, got {code[:200]!r} ({error}); leave the trajectory out"
        ) from None
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        call = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(call, ast.Call):
            raise UnknownAction(f"expected calls of pyautogui, got {code[:200]!r}; leave the trajectory out")
        name = ast.unparse(call.func).rpartition(".")[2]
        try:
            positional = [cast("object", ast.literal_eval(value)) for value in call.args]
            given = {word.arg or "": cast("object", ast.literal_eval(word.value)) for word in call.keywords}
        except (ValueError, TypeError, RecursionError, MemoryError):
            raise UnknownAction(f"expected constants in {code[:200]!r}, got names; leave the trajectory out") from None
        if name == "hotkey":
            is_list = len(positional) == 1 and isinstance(positional[0], list)
            given["keys"] = (positional[0] if is_list else positional) or given.get("keys")
        else:
            names = _POSITIONAL.get(name, ("x", "y", "duration"))
            given |= dict(zip(names, positional, strict=False))
            if len(positional) > len(names):
                raise UnknownAction(f"expected {name}{names}, got {code[:200]!r}; leave the trajectory out")
        if name == "press":  # one key after the other, unlike a hotkey
            yield from _presses(given, code)
            continue
        yield ForeignAction(name=name, given={key: value for key, value in given.items() if value is not None})


def _presses(given: Mapping[str, object], code: str) -> list[ForeignAction]:
    keys, times = given.get("keys"), given.get("presses", 1)
    pressed = cast("list[object]", keys) if isinstance(keys, list) else [keys]
    if not isinstance(times, int) or times * len(pressed) > _MAX_PRESSES:
        raise UnknownAction(f"expected up to {_MAX_PRESSES} keys, got {code[:200]!r}; leave the trajectory out")
    return [ForeignAction(name="press", given={"keys": [key]}) for key in pressed] * times


def _points(given: Mapping[str, object], prefixes: Sequence[str]) -> Iterator[tuple[float, float]]:
    """Every point in the arguments with one of the prefixes, given as x and y or as a pair."""
    for prefix in prefixes:
        x_names = (f"{prefix}_x", f"{prefix}x", f"x_{prefix}", f"{prefix}X") if prefix else ("x",)
        y_names = (f"{prefix}_y", f"{prefix}y", f"y_{prefix}", f"{prefix}Y") if prefix else ("y",)
        for x_name, y_name in zip(x_names, y_names, strict=True):
            x, y = given.get(x_name), given.get(y_name)
            if _is_number(x) and _is_number(y):
                yield float(cast("Any", x)), float(cast("Any", y))
        for name in (f"{prefix}_coordinate", f"{prefix}_point") if prefix else ("coordinate", "point", "position"):
            pair = given.get(name)
            values = cast("Sequence[object]", pair) if isinstance(pair, list | tuple) else ()
            if len(values) == 2 and all(map(_is_number, values)):
                yield float(cast("Any", values[0])), float(cast("Any", values[1]))


def _has_point(given: Mapping[str, object], *prefixes: str) -> bool:
    return next(_points(given, prefixes), None) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _clamp(value: int) -> int:
    return min(max(value, 0), MAX_COORDINATE)
