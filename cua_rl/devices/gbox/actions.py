"""Actions translated to GBox API calls; both use pixels of the last screenshot."""

from collections.abc import Mapping
from typing import Any

from gbox_sdk import AsyncGboxClient
from gbox_sdk.types.v1.boxes import ActionResult
from gbox_sdk.types.v1.boxes.action_common_options_param import ActionCommonOptionsParam

from cua_rl.actions import (
    Action,
    Button,
    Click,
    DoubleClick,
    Drag,
    LongPress,
    MoveMouse,
    OpenApp,
    PressButton,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.devices.device import NOT_ON_PHONES, ActionRejected, DeviceKind

BUTTONS: Mapping[Button, str] = {
    Button.BACK: "back",
    Button.HOME: "home",
    Button.RECENTS: "appSwitch",
    Button.POWER: "power",
    Button.VOLUME_UP: "volumeUp",
    Button.VOLUME_DOWN: "volumeDown",
}
_OTHER_NAMES: Mapping[str, str] = {
    "ctrl": "control",
    "return": "enter",
    "esc": "escape",
    "del": "delete",
    "super": "meta",
    "up": "arrowup",
    "down": "arrowdown",
    "left": "arrowleft",
    "right": "arrowright",
    "pgup": "pageup",
    "pgdn": "pagedown",
    "page_up": "pageup",
    "page_down": "pagedown",
}
_KEYS: Mapping[str, str] = {
    name.lower(): name
    for name in (
        *"abcdefghijklmnopqrstuvwxyz0123456789;=,-./`[\\]'",
        *(f"f{i}" for i in range(1, 13)),
        *("control", "alt", "shift", "meta", "win", "cmd", "option", "arrowUp", "arrowDown", "arrowLeft", "arrowRight"),
        *("home", "end", "pageUp", "pageDown", "enter", "space", "tab", "escape", "backspace", "delete", "insert"),
        *("capsLock", "numLock", "scrollLock", "pause", "printScreen", "volumeUp", "volumeDown", "volumeMute"),
    )
}


def duration(seconds: float) -> str:
    """A duration as the API writes it: 0.5 is "500ms"."""
    return f"{round(seconds * 1000)}ms"


def key_names(keys: tuple[str, ...]) -> list[str]:
    """The API's names of keys; raises `ActionRejected` for a key that it does not have."""
    if not keys:
        raise ActionRejected("there is no key to press: name at least one")
    names: list[str] = []
    for key in keys:
        plain = key.strip().lower()
        name = _KEYS.get(_OTHER_NAMES.get(plain, plain.replace("_", "")))
        if name is None:
            raise ActionRejected(f"there is no key {key!r}: there are letters, digits, {', '.join(sorted(_KEYS)[47:])}")
        names.append(name)
    return names


async def perform(
    client: AsyncGboxClient, box_id: str, kind: DeviceKind, action: Action, options: ActionCommonOptionsParam
) -> ActionResult:
    """Do one action in a box; raises `ActionRejected` for what this kind of box cannot do, else what the SDK raises."""
    actions: Any = client.v1.boxes.actions  # its overloads know single values, not what is chosen here
    with_shot: dict[str, Any] = {"options": options}
    match action:
        case Click(x=x, y=y):
            press = actions.tap if kind == "android" else actions.click
            return await press(box_id, x=x, y=y, **with_shot)
        case DoubleClick(x=x, y=y):
            return await actions.click(box_id, x=x, y=y, double=True, **with_shot)
        case LongPress(x=x, y=y, duration_s=duration_s):
            return await actions.long_press(box_id, x=x, y=y, duration=duration(duration_s), **with_shot)
        case Drag(x=x, y=y, to_x=to_x, to_y=to_y, duration_s=duration_s):
            ends = {"start": {"x": x, "y": y}, "end": {"x": to_x, "y": to_y}, "duration": duration(duration_s)}
            move = actions.swipe if kind == "android" else actions.drag
            return await move(box_id, **ends, **with_shot)
        case Scroll(x=x, y=y, down_px=down_px, right_px=right_px):
            # positive scrollY reveals what is below, positive scrollX what is to the right: our own signs
            return await actions.scroll(box_id, x=x, y=y, scroll_x=right_px, scroll_y=down_px, **with_shot)
        case TypeText(text=text):
            return await actions.type(box_id, text=text, mode="append", **with_shot)
        case PressKey(keys=keys):
            return await actions.press_key(box_id, keys=key_names(keys), combination=len(keys) > 1, **with_shot)
        case _:
            return await _perform_special(actions, box_id, kind, action, with_shot)


async def _perform_special(
    actions: Any,
    box_id: str,
    kind: DeviceKind,
    action: RightClick | MoveMouse | PressButton | OpenApp | Wait,
    with_shot: Mapping[str, Any],
) -> ActionResult:
    """Actions that only one kind of box supports."""
    match action:
        case RightClick(x=x, y=y) if kind == "linux":
            return await actions.click(box_id, x=x, y=y, button="right", **with_shot)
        case MoveMouse(x=x, y=y) if kind == "linux":
            return await actions.move(box_id, x=x, y=y, **with_shot)
        case PressButton(button=button) if kind == "android":
            return await actions.press_button(box_id, buttons=[BUTTONS[button]], **with_shot)
        case RightClick() | MoveMouse():
            raise ActionRejected(NOT_ON_PHONES[type(action)])
        case PressButton(button=button):
            raise ActionRejected(f"a desktop has no {button} button: use keys")
        case OpenApp(name=name):
            raise ActionRejected(f"this desktop cannot open {name!r} by its name: use its menus")
        case Wait():
            raise ActionRejected("waiting is no input")
