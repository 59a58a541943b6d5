"""An Android box of the GBox double: the simulated phone on its screen, Android's commands in its shell."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from cua_rl.environments.device import ActionRejected
from cua_rl.environments.phone.simulator import reducer
from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH, Toggle, find_app
from cua_rl.environments.phone.simulator.device import perform, take_screenshot
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.types.actions import (
    Action,
    Button,
    Click,
    DoubleClick,
    Drag,
    LongPress,
    PressButton,
    PressKey,
    Scroll,
    TypeText,
)
from tests.environments.android.phone_double import HOME, SETTINGS, PhoneDouble

BUTTONS = {"back": Button.BACK, "home": Button.HOME, "appSwitch": Button.RECENTS, "power": Button.POWER}
SWITCHES = {
    Toggle.WIFI: "global wifi_on",
    Toggle.AIRPLANE_MODE: "global airplane_mode_on",
    Toggle.AUTO_ROTATE: "system accelerometer_rotation",
    Toggle.AUTO_TIME: "global auto_time",
    Toggle.BATTERY_SAVER: "global low_power",
    Toggle.DO_NOT_DISTURB: "global zen_mode",
}


class PhoneBox:
    """What is tapped on the screen shows in the shell, and the other way round."""

    def __init__(self, seed: int) -> None:
        self.state: PhoneState = make_phone_state(seed)
        self.phone = PhoneDouble()
        self.installed: list[str] = []

    def draw(self) -> bytes:
        return take_screenshot(self.state, 1).data

    def elements(self) -> Mapping[str, tuple[int, int]]:
        """Centre of everything that can be tapped, by its label in small letters."""
        screen = build_screen(self.state)
        visible = (*screen.visible_content(), *screen.fixed)
        return {element.label.lower(): element.rect.centre for element in visible if element.is_tappable}

    def act(self, name: str, body: Mapping[str, Any]) -> bool:
        """Do an action of the API; False if its coordinates lie outside."""
        action = to_action(name, body)
        points = [(body["x"], body["y"])] if "x" in body else [(p["x"], p["y"]) for p in _ends(body)]
        if not all(0 <= x < WIDTH and 0 <= y < HEIGHT for x, y in points):
            return False
        with suppress(ActionRejected):  # a real phone takes every touch and does nothing
            self.state = perform(self.state, action, 1)
        return True

    async def shell(self, command: str) -> str:
        self._tell_shell()
        if found := re.fullmatch(r"pm list packages ([\w.]+)", command):
            printed = "".join(f"package:{name}\n" for name in self.packages() if found[1] in name)
        elif found := re.fullmatch(r"test -e (\S+) && echo yes", command):
            printed = "yes\n" if found[1] in self.phone.files else ""
        else:
            printed = await self.phone.run(command)
        self._tell_screen()
        return printed

    def packages(self) -> list[str]:
        return sorted(self.phone.packages | {find_app(entry.app).package for entry in self.state.system.apps})

    def install(self, package: str) -> None:
        self.phone.packages.add(package)
        self.installed.append(package)

    def open(self, package: str) -> None:
        app = self._app_of(package)
        if app is not None:
            self.state = reducer.launch(self.state, app)

    def _app_of(self, package: str) -> str | None:
        return next((e.app for e in self.state.system.apps if find_app(e.app).package == package), None)

    def _tell_shell(self) -> None:
        for toggle, key in SWITCHES.items():
            self.phone.settings[key] = "1" if self.state.is_on(toggle) else "0"
        self.phone.bluetooth = self.state.is_on(Toggle.BLUETOOTH)
        self.phone.night = "yes" if self.state.is_on(Toggle.DARK_THEME) else "no"
        self.phone.settings["secure location_mode"] = "3" if self.state.is_on(Toggle.LOCATION) else "0"
        self.phone.settings["system screen_brightness"] = str(self.state.brightness_level)
        self.phone.packages |= {find_app(entry.app).package for entry in self.state.system.apps}
        self.phone.foreground = self._activity()

    def _activity(self) -> str:
        if self.state.app is None:
            return HOME
        return SETTINGS if self.state.app == "settings" else f"{self.state.package}/.Main"

    def _tell_screen(self) -> None:
        on = {toggle: self.phone.settings[key] != "0" for toggle, key in SWITCHES.items()}
        on[Toggle.BLUETOOTH] = self.phone.bluetooth
        on[Toggle.DARK_THEME] = self.phone.night == "yes"
        on[Toggle.LOCATION] = self.phone.settings["secure location_mode"] != "0"
        for toggle, is_on in on.items():
            self.state = self.state.with_toggle(toggle, is_on)
        self.state = replace(self.state, brightness_level=int(self.phone.settings["system screen_brightness"]))
        if self.phone.foreground == self._activity():
            return
        if self.phone.foreground == HOME:
            self.state = reducer.press(self.state, Button.HOME)
        else:
            self.open(self.phone.foreground.partition("/")[0])


def to_action(name: str, body: Mapping[str, Any]) -> Action:
    """What a request asks for, as our own action."""
    match name:
        case "tap":
            return Click(x=body["x"], y=body["y"])
        case "click":
            return (DoubleClick if body.get("double") else Click)(x=body["x"], y=body["y"])
        case "long-press":
            return LongPress(x=body["x"], y=body["y"])
        case "swipe" | "drag":
            start, end = _ends(body)
            return Drag(x=start["x"], y=start["y"], to_x=end["x"], to_y=end["y"])
        case "scroll":
            return Scroll(x=body["x"], y=body["y"], down_px=body["scrollY"], right_px=body["scrollX"])
        case "type":
            return TypeText(text=body["text"])
        case "press-key":
            return PressKey(keys=tuple(body["keys"]))
        case "press-button":
            return PressButton(button=BUTTONS[body["buttons"][0]])
        case _:
            raise AssertionError(f"a phone has no action {name!r}")


def _ends(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [body["start"], body["end"]] if "start" in body else []
