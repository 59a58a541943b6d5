"""The simulated phone as a device: actions in pixels, screenshots as PNG."""

import asyncio
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache
from hashlib import sha256
from typing import Literal

from cua_rl.environments.device import NOT_ON_PHONES, ActionRejected
from cua_rl.environments.phone.simulator import reducer
from cua_rl.environments.phone.simulator.apps.commands import take_screenshot as take_screenshot_file
from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH, find_app
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.types import actions
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError
from cua_rl.types.snapshot import Snapshot

Operation = Literal["observe", "execute", "query"]


class SimulatedPhone:
    """A simulated phone. It is deterministic: the same state and actions always give the same pixels.

    `latency_s` is waited before every operation; `on_operation` is called with its name and may raise `DeviceError`, so
    that tests can make a phone slow or faulty.
    """

    kind: Literal["android"] = "android"

    def __init__(
        self,
        state: PhoneState,
        *,
        scale: int = 1,
        device_id: str | None = None,
        latency_s: float = 0.0,
        on_operation: Callable[[Operation], None] | None = None,
    ) -> None:
        if scale < 1:
            raise ValueError(f"expected a scale of at least 1, got {scale!r}")
        self.state = state
        self.scale = scale
        self.device_id = device_id or f"simulator-{state.seed}"
        self._latency_s = latency_s
        self._on_operation = on_operation
        self._is_closed = False

    async def observe(self) -> EncodedImage:
        """Take a screenshot of 192 x 320 pixels times the scale."""
        await self._begin("observe")
        return await asyncio.to_thread(take_screenshot, self.state, self.scale)

    async def execute(self, action: actions.Action) -> None:
        """Do one action; raises `ActionRejected` for what a phone, or this screen, cannot do."""
        await self._begin("execute")
        self.state = perform(self.state, action, self.scale)

    async def query(self, name: str) -> str:
        """Read one piece of state; raises `TaskError` for an unknown name."""
        await self._begin("query")
        return read_query(self.state, name)

    async def snapshot(self) -> Snapshot:
        """The state, which is never changed in place."""
        return Snapshot(state=self.state, screen=await self.observe())

    async def close(self) -> None:
        """Close the phone; safe to call twice."""
        self._is_closed = True

    async def _begin(self, operation: Operation) -> None:
        if self._is_closed:
            raise DeviceError(f"expected an open phone to {operation}, got {self.device_id!r}, which is closed")
        await asyncio.sleep(self._latency_s)
        if self._on_operation is not None:
            self._on_operation(operation)


@lru_cache(maxsize=256)  # the members of a group all begin on the same screen
def take_screenshot(state: PhoneState, scale: int) -> EncodedImage:
    from cua_rl.environments.phone.simulator.painter import draw_png

    png, size = draw_png(state, scale), (WIDTH * scale, HEIGHT * scale)
    return EncodedImage(data=png, format="png", width_px=size[0], height_px=size[1], state=state_name(state))


def state_name(state: PhoneState) -> str:
    """The same for equal states in every process."""
    return sha256(repr(state).encode()).hexdigest()


def perform(state: PhoneState, action: actions.Action, scale: int) -> PhoneState:
    """The state after an action whose coordinates are pixels; raises `ActionRejected`."""
    if not state.is_screen_on and not isinstance(action, actions.PressButton):
        return state
    match action:
        case actions.Click(x=x, y=y):
            return reducer.tap(state, *_units(x, y, scale))
        case actions.DoubleClick(x=x, y=y):
            point = _units(x, y, scale)
            return reducer.tap(reducer.tap(state, *point), *point)
        case actions.LongPress(x=x, y=y):
            return reducer.hold(state, *_units(x, y, scale))
        case actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y):
            return reducer.drag(state, *_units(x, y, scale), *_units(to_x, to_y, scale))
        case actions.Scroll(x=x, y=y, down_px=down_px, right_px=right_px):
            _units(x, y, scale)
            if state.screen == "home" and abs(right_px) > abs(down_px):
                return reducer.turn_page(state, 1 if right_px > 0 else -1)
            return reducer.scroll_by(state, round(down_px / scale))
        case actions.PressButton(button=button):
            return reducer.press(state, button)
        case actions.Wait():
            return state
        case _:
            return _perform_text(state, action)


def _perform_text(
    state: PhoneState,
    action: actions.TypeText | actions.PressKey | actions.OpenApp | actions.RightClick | actions.MoveMouse,
) -> PhoneState:
    match action:
        case actions.TypeText(text=text):
            if state.focus is None:
                raise ActionRejected("nothing has the focus: tap a text field before typing")
            return reducer.type_text(state, text)
        case actions.PressKey(keys=keys):
            return _press_keys(state, keys)
        case actions.OpenApp(name=name):
            by_label = {find_app(entry.app).label.lower(): entry.app for entry in state.system.apps}
            app = by_label.get(name.strip().lower())
            if app is None:
                near = get_close_matches(name.strip().lower(), by_label, n=1)
                hint = f"; did you mean {find_app(by_label[near[0]]).label}?" if near else ""
                raise ActionRejected(f"no app is called {name!r}{hint}")
            return reducer.launch(state, app)
        case actions.RightClick() | actions.MoveMouse():
            raise ActionRejected(NOT_ON_PHONES[type(action)])


def _units(x: int, y: int, scale: int) -> tuple[float, float]:
    width_px, height_px = WIDTH * scale, HEIGHT * scale
    if not (0 <= x < width_px and 0 <= y < height_px):
        raise ActionRejected(f"({x}, {y}) is outside the screen of {width_px} x {height_px} pixels")
    return x / scale, y / scale


def _press_keys(state: PhoneState, keys: tuple[str, ...]) -> PhoneState:
    match tuple(key.lower() for key in keys):
        case ("enter",) | ("return",):
            return reducer.enter_key(state)
        case ("backspace",):
            return reducer.erase_key(state)
        case ("back",) | ("escape",) | ("esc",):
            return reducer.press(state, actions.Button.BACK)
        case ("home",):
            return reducer.press(state, actions.Button.HOME)
        case ("power", "volume_down") | ("volume_down", "power"):
            return take_screenshot_file(state)
        case _:
            raise ActionRejected(f"this phone has no key {'+'.join(keys)!r}: it knows enter, backspace, back and home")
