"""Reports of gbox-mini-agent about a run: its events by step, and its actions converted to ours.

Events may arrive in any order and more than once. An action that cannot be parsed was still executed; it is only
missing from the record.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from cua_rl.types import actions
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.json_values import Json, as_number, is_object, mapping, sequence

_STEP_STARTS = ("step_start", "turn_start")
_STEP_ENDS = ("step_end", "turn_end")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedAction:
    """One action as the agent reports it."""

    name: str
    args: Json
    duration_s: float = 0.0
    error: str | None = None


@dataclass(slots=True)
class Step:
    """One step of a run: usually one answer of the model and one action."""

    response_ids: list[str] = field(default_factory=list[str])
    actions: list[ReportedAction] = field(default_factory=list[ReportedAction])
    is_ended: bool = False

    def add(self, kind: str, event: Json) -> None:
        """Add an event of the step; one that is malformed adds nothing."""
        if kind == "model_output":
            output = event.get("modelOutput")
            response_id = mapping(output).get("id")
            if isinstance(response_id, str):
                self.response_ids.append(response_id)
        elif kind == "action_executed":
            given = event.get("action")
            action: Json = mapping(given)
            name, args, error = action.get("name"), action.get("args"), action.get("error")
            if isinstance(name, str):
                self.actions.append(
                    ReportedAction(
                        name=name,
                        args=mapping(args),
                        duration_s=_seconds(event, 0.0),
                        error=error if isinstance(error, str) else None,
                    )
                )
        elif kind in (*_STEP_STARTS, *_STEP_ENDS):
            self.is_ended = kind in _STEP_ENDS


class Journal:
    """The events of a run, each counted once; steps may be numbered from 0 or from 1."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._steps: dict[int, Step] = {}
        self.last_ts: str | None = None
        """Time of the last event: the next request asks for events from then on."""
        self.end: Json | None = None
        """The event that ended the run."""
        self.errors: list[str] = []

    def add(self, events: Sequence[object]) -> bool:
        """Add events; True if one of them is new."""
        is_new = False
        for event in events:
            key = json.dumps(event, sort_keys=True, default=str)
            if key not in self._seen and is_object(event):
                self._seen.add(key)
                self._add(event)
                is_new = True
        return is_new

    def step_of(self, response_id: str, position: int) -> Step | None:
        """The step of an answer of the model: found by the answer's id, else by its position among the steps."""
        steps = [self._steps[number] for number in sorted(self._steps)]
        found = next((step for step in steps if response_id in step.response_ids), None)
        if found is not None or any(step.response_ids for step in steps):
            return found
        return steps[position] if position < len(steps) else None

    def _add(self, event: Json) -> None:
        ts = event.get("ts")
        if isinstance(ts, str | int):
            self.last_ts = str(ts)
        kind, number = event.get("type"), event.get("step", event.get("turn"))
        if kind == "run_end":
            self.end = event
        elif kind == "error":
            self.errors.append(str(event.get("message") or event))
        elif isinstance(number, int):
            self._steps.setdefault(number, Step()).add(str(kind), event)


Pixel = tuple[int, int]

FINISH_NAMES = frozenset({"finished", "finish", "terminate", "answer"})
"""Actions that end the run."""

_BUTTONS = {button.value: button for button in actions.Button} | {
    "menu": actions.Button.RECENTS,
    "app_switch": actions.Button.RECENTS,
}
_LARGEST = 1e9
"""Limit for coordinates and milliseconds: the model wrote some of them, and pixels of 1e308 overflow."""
_SCROLL_SHARE = 0.3  # share of the screen, because reports give a direction without a distance


def parse_mini_agent_action(reported: ReportedAction, screen: EncodedImage) -> actions.Action | None:
    """The action in pixels of the screen that it was decided on; None if it cannot be parsed."""
    maker = _MAKERS.get(reported.name.lower().replace("-", "_"))
    return maker(reported.args, screen) if maker is not None else None


def _pixel(args: Json, screen: EncodedImage, *names: str) -> Pixel | None:
    """A point; some agents report coordinates from 0 to 1, others from 0 to 1000."""
    given = next((args[name] for name in names if args.get(name) is not None), None)
    items = [given.get("x"), given.get("y")] if is_object(given) else sequence(given)
    numbers = [number for item in items if (number := as_number(item, largest=_LARGEST)) is not None]
    if len(numbers) != 2:
        return None
    scale = 1.0 if max(numbers) <= 1 else 1000.0
    x, y = numbers[0] / scale * screen.width_px, numbers[1] / scale * screen.height_px
    return max(0, min(round(x), screen.width_px - 1)), max(0, min(round(y), screen.height_px - 1))


def _at(make: Callable[[Pixel, Json], actions.Action]) -> "_Maker":
    """Makes an action at one point, from the point and the other arguments."""

    def maker(args: Json, screen: EncodedImage) -> actions.Action | None:
        pixel = _pixel(args, screen, "point", "coordinate", "startPoint")
        return None if pixel is None else make(pixel, args)

    return maker


def _drag(args: Json, screen: EncodedImage) -> actions.Action | None:
    start = _pixel(args, screen, "startPoint", "point", "coordinate")
    end = _pixel(args, screen, "endPoint", "coordinate2")
    if start is None or end is None:
        return _scroll(args, screen)
    return actions.Drag(x=start[0], y=start[1], to_x=end[0], to_y=end[1], duration_s=_seconds(args, 0.3))


def _scroll(args: Json, screen: EncodedImage) -> actions.Action | None:
    """The direction is that of the content to reveal: down shows what is below."""
    x, y = _pixel(args, screen, "point", "coordinate") or (screen.width_px // 2, screen.height_px // 2)
    across, along = round(screen.width_px * _SCROLL_SHARE), round(screen.height_px * _SCROLL_SHARE)
    ways = {"down": (0, along), "up": (0, -along), "right": (across, 0), "left": (-across, 0)}
    way = ways.get(str(args.get("direction")))
    return None if way is None else actions.Scroll(x=x, y=y, right_px=way[0], down_px=way[1])


def _type(args: Json, screen: EncodedImage) -> actions.Action | None:
    text = args.get("content", args.get("text"))
    return actions.TypeText(text=text) if isinstance(text, str) else None


def _press(args: Json, screen: EncodedImage) -> actions.Action | None:
    key = args.get("key", args.get("button"))
    if not isinstance(key, str) or not key:
        return None
    button = _BUTTONS.get(key.lower())
    return (
        actions.PressButton(button=button)
        if button
        else actions.PressKey(keys=tuple(key.lower().replace("+", " ").split()))
    )


def _button(button: actions.Button) -> "_Maker":
    return lambda args, screen: actions.PressButton(button=button)


def _open(args: Json, screen: EncodedImage) -> actions.Action | None:
    app = args.get("content", args.get("target"))
    return actions.OpenApp(name=app) if isinstance(app, str) else None


def _seconds(args: Json, default: float) -> float:
    given = as_number(args.get("durationMs"), largest=_LARGEST)
    return default if given is None else given / 1000


_Maker = Callable[[Json, EncodedImage], actions.Action | None]
_MAKERS: Mapping[str, _Maker] = {
    **dict.fromkeys(("click", "tap", "left_click"), _at(lambda at, args: actions.Click(x=at[0], y=at[1]))),
    **dict.fromkeys(
        ("double_click", "double_tap", "left_double"), _at(lambda at, args: actions.DoubleClick(x=at[0], y=at[1]))
    ),
    **dict.fromkeys(("right_click", "right_single"), _at(lambda at, args: actions.RightClick(x=at[0], y=at[1]))),
    "move": _at(lambda at, args: actions.MoveMouse(x=at[0], y=at[1])),
    "long_press": _at(lambda at, args: actions.LongPress(x=at[0], y=at[1], duration_s=_seconds(args, 1.0))),
    **dict.fromkeys(("swipe", "drag"), _drag),
    "scroll": _scroll,
    **dict.fromkeys(("type", "input"), _type),
    **dict.fromkeys(("press", "key", "hotkey", "press_key", "system_button"), _press),
    "press_home": _button(actions.Button.HOME),
    "press_back": _button(actions.Button.BACK),
    **dict.fromkeys(("open", "open_app"), _open),
    "wait": lambda args, screen: actions.Wait(duration_s=_seconds(args, 1.0)),
}
