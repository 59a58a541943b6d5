"""Translates actions of other systems to calls of our tools.

Names and arguments differ between data sets; docs/trajectories.md lists them. Every argument is read, known to change
nothing, or refused: ignoring one would teach another action. Coordinates are pixels of the screenshot, or of
the display if its size differs, or shares of it if neither is above 1 and one is written with a decimal point.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import dist, hypot
from typing import TypeGuard

from cua_rl.agent.tools import ACTION_NAMES, MAX_COORDINATE, MAX_WAIT_S, tool_for
from cua_rl.environments.device import ActionRejected, DeviceKind
from cua_rl.environments.key_names import key_chord
from cua_rl.exchange import action_names
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_object, sequence

Arguments = dict[str, object]

WHEEL_CLICK_PX = 100.0
"""Scrolled by one click of a mouse wheel, unless the import sets another; programs differ."""
_LARGEST = 1e6  # pixels, seconds or clicks: JSON may contain NaN, and integers too large for a float
_PAGE_SHARE = 0.6  # share of the screen to scroll if only a direction is given
_TAP_SHARE = 0.04  # a touch that ends within this distance, in shares of the screen, is a tap (Android in the Wild)
_PATH_PX = 10.0  # a drag is straight if its path stays this close to the line
_SWIPE_MARGIN = 50  # of MAX_COORDINATE: swipes from the edge of a phone are gestures of the system
_MAX_PRESSES = 100  # of one call; each becomes a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignAction:
    """An action as written in its data set."""

    name: str
    given: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the coordinates and distances of an action refer to."""

    screen: EncodedImage
    kind: DeviceKind
    display: tuple[int, int] | None = None
    """Size in whose pixels coordinates are given; None is the screenshot's."""
    cursor: list[int] | None = None
    """Where the mouse is, in relative coordinates, if an action before said so."""
    wheel_click_px: float = WHEEL_CLICK_PX


class UnknownAction(ConfigError):
    """An action that cannot be read."""


class NoCounterpart(UnknownAction):
    """An action that was read, and that our tools cannot do."""

    def __init__(self, message: str, name: str) -> None:
        super().__init__(message)
        self.name = name


def tool_arguments(action: ForeignAction, view: View) -> list[Arguments]:
    """The arguments of the calls of the device's tool, none for an action that only looks; raises `UnknownAction`."""
    if action.name in ACTION_NAMES:
        return [_own_call(action, view.kind)]
    left = {key: value for key, value in action.given.items() if value is not None and value != ""}
    name = str(left.pop("action", None) or left.pop("action_type", None) or action.name)
    name = name.rpartition(".")[2].lower().replace("-", "_").replace(" ", "_")
    if name not in action_names.KIND_OF:
        name = str(left.get("type", name)).lower()
    if str(left.get("type")).lower() == name:
        del left["type"]
    if name in action_names.LOOKS:
        return []
    reading = _Reading(action=ForeignAction(name=name, given=action.given), left=left, view=view)
    calls = reading.calls()
    if unread := sorted(reading.left.keys() - action_names.NO_EFFECT):
        raise reading.error(f"arguments that are known for {name}, unlike {', '.join(unread)}")
    return calls


def _own_call(action: ForeignAction, kind: DeviceKind) -> Arguments:
    """A call of our tool, with relative coordinates; those of the other device's tool would be read as pixels."""
    expected = tool_for(kind).name
    if action.name != expected:
        raise UnknownAction(
            f"expected calls of {expected}, got {action.name}; set device to the kind of device of these trajectories"
        )
    return dict(action.given)


@dataclass(slots=True, kw_only=True)
class _Reading:
    """Reads the arguments of one action on one screenshot, each once."""

    action: ForeignAction
    left: dict[str, object]
    """Arguments that have not been read."""
    view: View

    def error(self, expected: str) -> UnknownAction:
        return UnknownAction(
            f"expected {expected}, got {self.action.name!r} with {dict(self.action.given)!r}; import with "
            "unreadable=skip, which leaves such trajectories out, or see docs/trajectories.md for what is read"
        )

    def lacks(self, expected: str) -> NoCounterpart:
        return NoCounterpart(str(self.error(expected)), self.action.name)

    @property
    def is_phone(self) -> bool:
        return self.view.kind == "android"

    def calls(self) -> list[Arguments]:
        readers: Mapping[str, Callable[[], list[Arguments]]] = {
            **dict.fromkeys(("drag", "touch"), self.dragged),
            **{"scroll": lambda: [self.scrolled()], "page": self.paged, "type": self.typed},
            **{"wait": lambda: [self.waited()], "finish": lambda: [self.finished()]},
            "answer": lambda: [{"action": "answer", "text": self.text()}],
        }
        match action_names.KIND_OF.get(self.action.name):
            case None:
                raise self.error("an action that is known")
            case "start" | "none":
                raise self.lacks("an action with a counterpart in our tools")
            case "click" | "double_click" | "right_click" | "long_press" | "move" as what:
                return self.pointed(what)
            case "keys" | "enter" | "back" | "home" as what:
                return self.pressed(what)
            case what:
                return readers[what]()

    def pointed(self, what: str) -> list[Arguments]:
        button, clicks = str(self.take("button", default="left")).lower(), self.take("clicks", default=1)
        if what in ("click", "move"):
            self.take("duration", "tween")  # of the way there
        self.require_no_keys()
        if what == "click" and button == "back":
            self.point("")
            return self.pressed("back")
        more = {("right", 1): "right_click", ("left", 2): "double_click"} if what == "click" else {}
        kinds: dict[tuple[str, object], str] = {("left", 1): what, **more}
        on_phone = {"click": "click", "long_press": "long_press"}
        on_computer = {"click": "left_click", "move": "mouse_move", "long_press": ""}
        found = kinds.get((button, clicks), "")
        name = on_phone.get(found, "") if self.is_phone else on_computer.get(found, found)
        if not name:
            raise self.lacks(f"an action of {tool_for(self.view.kind).name}")
        call: Arguments = {"action": name, "coordinate": self.point("") or self.require_cursor()}
        held_s = self.number("time", "duration") if what == "long_press" else None
        return [call if held_s is None else call | {"time": held_s}]

    def dragged(self) -> list[Arguments]:
        if "direction" in self.left:
            return [self.scrolled(finger=True)]
        if str(self.take("button", default="left")).lower() != "left":
            raise self.lacks("a drag with the left button")
        self.require_no_keys()
        self.take("duration", "tween")
        if "path" in self.left:
            start, end = self._path_ends()
        else:
            end = self.point("end", "to", "destination", "1")
            start = self.point("start", "from", "0") or (self.point("") if end else None)
            end = end or self.point("")
        if end is None or (start is None and self.is_phone):
            raise self.error(f"where the {'swipe' if self.is_phone else 'drag'} starts and ends")
        if start is None:
            return [{"action": "left_click_drag", "coordinate": end}]
        is_tap = action_names.KIND_OF[self.action.name] == "touch" and dist(start, end) <= _TAP_SHARE * MAX_COORDINATE
        if is_tap:
            return [{"action": "click" if self.is_phone else "left_click", "coordinate": start}]
        if self.is_phone:
            return [{"action": "swipe", "coordinate": start, "coordinate2": end}]
        return [{"action": "mouse_move", "coordinate": start}, {"action": "left_click_drag", "coordinate": end}]

    def _path_ends(self) -> tuple[list[int], list[int]]:
        path = self.take("path")
        given = sequence(path)
        points = [point for point in map(_pair, given) if point is not None]
        if not 2 <= len(points) == len(given):
            raise self.error("a path of two points or more")
        (x, y), *between, (to_x, to_y) = points
        across, along = to_x - x, to_y - y
        for at_x, at_y in between:
            share = ((at_x - x) * across + (at_y - y) * along) / max(across**2 + along**2, 1.0)
            nearest = min(max(share, 0.0), 1.0)
            if hypot(at_x - x - nearest * across, at_y - y - nearest * along) > _PATH_PX:
                raise self.lacks(f"a drag along a line, at most {_PATH_PX:g} px off")
        return self.relative(x, y), self.relative(to_x, to_y)

    def scrolled(self, *, finger: bool = False) -> Arguments:
        """A scroll reveals what lies in its direction; a finger that swipes moves the other way."""
        self.require_no_keys()
        middle = [MAX_COORDINATE // 2, MAX_COORDINATE // 2]
        at = self.point("") or (None if self.is_phone else self.view.cursor) or middle
        right, down = self._distance_px()
        if finger:
            right, down = -right, -down
        if not self.is_phone:
            if right:
                raise self.lacks("a vertical scroll")
            return {"action": "scroll", "coordinate": at, "pixels": -round(down)}
        width, height = self.view.screen.width_px, self.view.screen.height_px
        starts, ends = [0, 0], [0, 0]
        for axis, share in enumerate((right / width, down / height)):
            half = round(share * MAX_COORDINATE / 2)
            room = MAX_COORDINATE // 2 - _SWIPE_MARGIN - abs(half)
            if room < 0:
                raise self.lacks("a scroll of at most 90 % of the phone's screen")
            # moved into the screen as a whole: cut off, it would scroll less
            centre = at[axis] if not half else min(max(at[axis], 500 - room), 500 + room)
            starts[axis], ends[axis] = centre + half, centre - half
        return {"action": "swipe", "coordinate": starts, "coordinate2": ends}

    def paged(self) -> list[Arguments]:
        """Gemini's own program presses a key to scroll a document."""
        keys = {"down": "pagedown", "up": "pageup"}
        direction = str(self.take("direction")).lower()
        if self.is_phone or direction not in keys:
            raise self.lacks("up or down, in a browser")
        return [{"action": "key", "keys": [keys[direction]]}]

    def typed(self) -> list[Arguments]:
        point = self.point("")
        clears = self.flag("clear_before_typing", default=self.action.name == "type_text_at")
        enters = self.flag("press_enter", default=False)
        click: Arguments = {"action": "click" if self.is_phone else "left_click", "coordinate": point}
        calls: list[Arguments] = [] if point is None else [click]
        if clears:
            if self.is_phone:
                raise self.lacks("typing that adds to what is there")
            calls.extend({"action": "key", "keys": keys} for keys in (["ctrl", "a"], ["delete"]))
        return [*calls, {"action": "type", "text": self.text()}, *(self.pressed("enter") if enters else [])]

    def pressed(self, what: str) -> list[Arguments]:
        chords = [[what]] if what != "keys" else self._chords()
        times = self.take("repeat", "presses", default=1)
        if not isinstance(times, int) or not 1 <= times * len(chords) <= _MAX_PRESSES:
            raise self.error(f"1 to {_MAX_PRESSES} presses")
        if self.is_phone:
            if any(len(chord) != 1 or chord[0] not in action_names.BUTTONS for chord in chords):
                raise self.lacks("Back, Home, Enter or the recent apps")
            return [{"action": "system_button", "button": action_names.BUTTONS[chord[0]]} for chord in chords] * times
        if what in ("back", "home"):
            chords = [["alt", "left" if what == "back" else "home"]]
        for chord in chords:
            try:
                key_chord(tuple(key for key in chord if len(key) > 1))
            except ActionRejected:
                raise self.lacks("keys that our devices have") from None
        return [{"action": "key", "keys": chord} for chord in chords] * times

    def _chords(self) -> list[list[str]]:
        """Keys pressed together, one list for each press."""
        is_text = "text" in self.left  # in xdotool's notation, where blanks separate presses
        keys = self.take("keys", "key", "key_comb", "key_name", "text")
        if isinstance(keys, str):
            if not is_text and len(keys.split()) > 1:
                raise self.error("keys pressed together, joined by +")
            presses = keys.split() or ["space"]
            chords = [re.sub(r"\+$", "plus", press).split("+") for press in presses]
        else:
            chords = [["space" if key == " " else key for key in sequence(keys) if isinstance(key, str) and key]]
            if not 0 < len(chords[0]) == len(sequence(keys)):
                raise self.error("keys")
        folded = [[key.lower() if len(key) > 1 or len(chord) > 1 else key for key in chord] for chord in chords]
        return [[action_names.KEYS.get(key, key.removeprefix("kp_")) for key in chord] for chord in folded]

    def waited(self) -> Arguments:
        milliseconds = self.number("ms")
        seconds = self.number("time", "duration", "seconds") if milliseconds is None else milliseconds / 1000
        if seconds is None:
            seconds = 5.0 if self.action.name == "wait_5_seconds" else 1.0
        if seconds > MAX_WAIT_S:
            raise self.lacks(f"a wait of at most {MAX_WAIT_S:g} s")
        return {"action": "wait", "time": seconds}

    def finished(self) -> Arguments:
        said = self.take("goal_status", "status", "success", "succeeds")
        self.take("reason", "message")
        word = "success" if said is None else str(said).lower()
        if word not in action_names.SUCCEEDED | action_names.FAILED:
            raise self.error("success or failure")
        has_failed = self.action.name == "report_infeasible" or word in action_names.FAILED
        answer = self.take("answer", "text")
        if answer is not None and not has_failed:
            return {"action": "answer", "text": str(answer)}
        return {"action": "terminate", "status": "failure" if has_failed else "success"}

    def text(self) -> str:
        for key in ("text", "content", "value", "message"):
            value = self.action.given.get(key)  # may be empty
            if isinstance(value, str):
                self.left.pop(key, None)
                return value
        raise self.error("a text")

    def take(self, *keys: str, default: object = None) -> object:
        """The first of the arguments that is there; every other one of them is refused."""
        return next((self.left.pop(key) for key in keys if key in self.left), default)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.take(key, default=default)
        if not isinstance(value, bool):
            raise self.error(f"true or false as {key}")
        return value

    def number(self, *keys: str) -> float | None:
        value = self.take(*keys)
        if value is not None and not _is_number(value):
            raise self.error("a number")
        return None if value is None else float(value)

    def require_no_keys(self) -> None:
        held = [self.take(key) for key in ("text", "key", "keys", "modifiers", "hold_keys")]
        if any(held):
            raise self.lacks("no keys held down meanwhile")

    def require_cursor(self) -> list[int]:
        if self.is_phone or self.view.cursor is None or {"x", "y", "coordinate"} & self.left.keys():
            raise self.error("coordinates on the screenshot")
        return self.view.cursor

    def point(self, *prefixes: str) -> list[int] | None:
        """The point in relative coordinates, if there is one with a prefix; raises `UnknownAction` outside of it."""
        for prefix in prefixes:
            names = [(f"{prefix}_x", f"{prefix}_y"), (f"x_{prefix}", f"y_{prefix}"), (f"x{prefix}", f"y{prefix}")]
            names += [(f"{prefix}x", f"{prefix}y"), (f"{prefix}X", f"{prefix}Y")]
            for x_name, y_name in names:
                pair = _pair([self.left.get(x_name), self.left.get(y_name)])
                if pair is not None:
                    del self.left[x_name], self.left[y_name]
                    return self.relative(*pair)
            names = [f"{prefix}_{word}" for word in ("coordinate", "point", "coord")]
            for name in names if prefix else ("coordinate", "point", "position"):
                pair = _pair(self.left.get(name))
                if pair is not None:
                    del self.left[name]
                    return self.relative(*pair)
        return None

    def relative(self, x: float, y: float) -> list[int]:
        """A point in relative coordinates; raises `UnknownAction` if it is not on the screenshot."""
        screen = (self.view.screen.width_px, self.view.screen.height_px)
        is_gemini = self.action.name in action_names.THOUSANDTHS or "destination_x" in self.action.given
        width, height = (1000, 1000) if is_gemini else self.view.display or screen
        is_share = self.view.display is None and max(x, y) <= 1 and any(isinstance(one, float) for one in (x, y))
        shares = (x, y) if is_share else (x / width, y / height)
        if not all(0 <= share <= 1 for share in shares):
            raise self.error(f"coordinates on the screenshot of {width} x {height} pixels")
        return [round(share * MAX_COORDINATE) for share in shares]

    def _distance_px(self) -> tuple[float, float]:
        """Distance to the right and down, from a direction, pixels, pages or clicks of the wheel."""
        width, height = self.view.screen.width_px, self.view.screen.height_px
        per_x, per_y = (
            (1.0, 1.0) if self.view.display is None else (width / self.view.display[0], height / self.view.display[1])
        )
        direction = self.take("direction", "scroll_direction")
        if direction is not None:
            if str(direction).lower() not in action_names.DIRECTIONS:
                raise self.error("up, down, left or right")
            right, down = action_names.DIRECTIONS[str(direction).lower()]
            clicks, thousandths = self.number("scroll_amount"), self.number("magnitude")
            if min(clicks or 0, thousandths or 0) < 0:
                raise self.error("a distance of 0 or more")
            if clicks is not None:
                return right * clicks * self.view.wheel_click_px, down * clicks * self.view.wheel_click_px
            default = 0.8 if self.action.name == "scroll_at" else _PAGE_SHARE
            share = default if thousandths is None else thousandths / 1000
            return right * share * width, down * share * height
        units = {"pixels": -per_y, "page": -height, "clicks": -self.view.wheel_click_px}  # of these, positive is up
        for key, unit in units.items():
            value = self.number(key)
            if value is not None:
                return 0.0, value * unit
        if not {"delta_x", "delta_y", "scroll_x", "scroll_y"} & self.left.keys():
            raise self.error("a direction or a distance")
        across, along = self.number("delta_x", "scroll_x"), self.number("delta_y", "scroll_y")
        return (across or 0.0) * per_x, (along or 0.0) * per_y


def _pair(value: object) -> tuple[float, float] | None:
    """Two numbers, from a pair or an object with x and y."""
    match [value.get("x"), value.get("y")] if is_object(value) else sequence(value):
        case [x, y] if _is_number(x) and _is_number(y):
            return x, y
        case _:
            return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
