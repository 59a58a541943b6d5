"""Actions translated to GBox API calls; both use pixels of the last screenshot."""

from collections.abc import Mapping
from typing import Any

from gbox_sdk import AsyncGboxClient
from gbox_sdk.types.v1.boxes import ActionResult
from gbox_sdk.types.v1.boxes.action_common_options_param import ActionCommonOptionsParam

from cua_rl.environments.device import NOT_ON_PHONES, ActionRejected, DeviceKind
from cua_rl.types import actions

BUTTONS: Mapping[actions.Button, str] = {
    actions.Button.BACK: "back",
    actions.Button.HOME: "home",
    actions.Button.RECENTS: "appSwitch",
    actions.Button.POWER: "power",
    actions.Button.VOLUME_UP: "volumeUp",
    actions.Button.VOLUME_DOWN: "volumeDown",
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
    client: AsyncGboxClient, box_id: str, kind: DeviceKind, action: actions.Action, options: ActionCommonOptionsParam
) -> ActionResult:
    """Do one action in a box; raises `ActionRejected` for what this kind of box cannot do, else what the SDK raises."""
    api: Any = client.v1.boxes.actions  # its overloads know single values, not what is chosen here
    with_shot: dict[str, Any] = {"options": options}
    match action:
        case actions.Click(x=x, y=y):
            press = api.tap if kind == "android" else api.click
            return await press(box_id, x=x, y=y, **with_shot)
        case actions.DoubleClick(x=x, y=y):
            return await api.click(box_id, x=x, y=y, double=True, **with_shot)
        case actions.LongPress(x=x, y=y, duration_s=duration_s):
            return await api.long_press(box_id, x=x, y=y, duration=duration(duration_s), **with_shot)
        case actions.Drag(x=x, y=y, to_x=to_x, to_y=to_y, duration_s=duration_s):
            ends = {"start": {"x": x, "y": y}, "end": {"x": to_x, "y": to_y}, "duration": duration(duration_s)}
            move = api.swipe if kind == "android" else api.drag
            return await move(box_id, **ends, **with_shot)
        case actions.Scroll(x=x, y=y, down_px=down_px, right_px=right_px):
            # positive scrollY reveals what is below, positive scrollX what is to the right: our own signs
            return await api.scroll(box_id, x=x, y=y, scroll_x=right_px, scroll_y=down_px, **with_shot)
        case actions.TypeText(text=text):
            return await api.type(box_id, text=text, mode="append", **with_shot)
        case actions.PressKey(keys=keys):
            return await api.press_key(box_id, keys=key_names(keys), combination=len(keys) > 1, **with_shot)
        case _:
            return await _perform_special(api, box_id, kind, action, with_shot)


async def _perform_special(
    api: Any,
    box_id: str,
    kind: DeviceKind,
    action: actions.RightClick | actions.MoveMouse | actions.PressButton | actions.OpenApp | actions.Wait,
    with_shot: Mapping[str, Any],
) -> ActionResult:
    match action:
        case actions.RightClick(x=x, y=y) if kind == "linux":
            return await api.click(box_id, x=x, y=y, button="right", **with_shot)
        case actions.MoveMouse(x=x, y=y) if kind == "linux":
            return await api.move(box_id, x=x, y=y, **with_shot)
        case actions.PressButton(button=button) if kind == "android":
            return await api.press_button(box_id, buttons=[BUTTONS[button]], **with_shot)
        case actions.RightClick() | actions.MoveMouse():
            raise ActionRejected(NOT_ON_PHONES[type(action)])
        case actions.PressButton(button=button):
            raise ActionRejected(f"a desktop has no {button} button: use keys")
        case actions.OpenApp(name=name):
            raise ActionRejected(f"this desktop cannot open {name!r} by its name: use its menus")
        case actions.Wait():
            raise ActionRejected("waiting is no input")
