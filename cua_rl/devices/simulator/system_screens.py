"""The pages of Settings that only phones with extra rows lead to: networks, language, wallpaper, security."""

from cua_rl.devices.simulator.catalog import WALLPAPERS, WIDTH, Toggle
from cua_rl.devices.simulator.elements import Element, FocusField, Operate, Push, Rect, Switch
from cua_rl.devices.simulator.layout import CONTENT_TOP, Column, row
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_app_screens import app_info, app_list, app_storage, storage
from cua_rl.devices.simulator.system_catalog import (
    EXTRA_ROWS,
    LANGUAGES,
    SCREEN_LOCKS,
    TIME_ZONES,
    WALLPAPER_NAMES,
)
from cua_rl.devices.simulator.system_controls import button, pill, switch_row
from cua_rl.devices.simulator.system_dialogs import is_dialog
from cua_rl.devices.simulator.system_state import Network


def extra_row(state: PhoneState, name: str, y: int) -> Element:
    """A row of Settings that opens a system page."""
    spec = EXTRA_ROWS[name]
    return row(
        f"page:{spec.subscreen}",
        y=y,
        label=spec.label,
        text=spec.title,
        detail=_summary(state, name),
        glyph=spec.glyph,
        paper=spec.paper,
        effect=Push(subscreen=spec.subscreen),
    )


def _summary(state: PhoneState, name: str) -> str:
    match name:
        case "wifi_page" if state.is_on(Toggle.WIFI):
            return state.system.connected_network or "Not connected"
        case "wifi_page":
            return "Off"
        case "bluetooth_page":
            return "On" if state.is_on(Toggle.BLUETOOTH) else "Off"
        case "language":
            return state.system.language
        case _:
            return ""


def system_page(state: PhoneState) -> tuple[str, Column]:
    """The title and the elements of the current system page; a dialog has those of the page beneath it."""
    subscreens = [name for name in state.subscreens if not is_dialog(name)]
    name, _, argument = subscreens[-1].partition(":")
    column = Column(top=CONTENT_TOP)
    match name:
        case "network":
            _network(state, column, state.system.find_network(argument))
            return argument, column
        case "app":
            return app_info(state, column, argument), column
        case "app_storage":
            return app_storage(state, column, argument), column
        case "set_wallpaper":
            _wallpaper_preview(column, int(argument))
            return WALLPAPER_NAMES[int(argument)], column
        case _:
            return _plain_page(state, column, name), column


def _plain_page(state: PhoneState, column: Column, name: str) -> str:
    build, heading = {
        "wifi": (_wifi, "Wi-Fi"),
        "bluetooth": (_bluetooth, "Bluetooth"),
        "apps": (app_list, "Apps"),
        "storage": (storage, "Storage"),
        "security": (_security, "Security"),
        "screen_lock": (_screen_lock, "Screen lock"),
        "wallpaper": (_wallpapers, "Wallpaper"),
        "language": (_language, "Language and input"),
        "languages": (_languages, "Languages"),
        "developer": (_developer, "Developer options"),
        "time_zone": (_time_zones, "Time zone"),
    }[name]
    build(state, column)
    return heading


def _wifi(state: PhoneState, column: Column) -> None:
    column.add(_toggle_row(state, Toggle.WIFI, "Use Wi-Fi", column.y))
    if not state.is_on(Toggle.WIFI):
        column.add_text("Turn on Wi-Fi to see networks.")
        return
    saved = [network for network in state.system.networks if network.is_saved]
    others = [network for network in state.system.networks if not network.is_saved]
    for heading, networks in (("Known networks", saved), ("Other networks", others)):
        if networks:
            column.add_heading(heading)
        for network in networks:
            column.add(_network_row(state, network, column.y))


def _network_row(state: PhoneState, network: Network, y: int) -> Element:
    return row(
        f"network:{network.name}",
        y=y,
        label=network.name,
        text=network.name,
        detail=_network_status(state, network),
        glyph="wifi",
        paper="#2f6fed" if network.is_saved else "#7a8494",
        effect=Push(subscreen=f"network:{network.name}"),
    )


def _network_status(state: PhoneState, network: Network) -> str:
    if state.system.connected_network == network.name:
        return "Connected"
    if network.is_saved:
        return "Saved"
    return "Needs a password" if network.password else "Open"


def _network(state: PhoneState, column: Column, network: Network) -> None:
    is_connected = state.system.connected_network == network.name
    status = _network_status(state, network)
    column.add(row("status", y=column.y, label="Status", text=status, glyph="wifi", paper="#2f6fed"))
    if network.is_saved:
        command, label = ("disconnect", "Disconnect") if is_connected else ("connect", "Connect")
        ask = Push(subscreen=f"ask:forget:{network.name}")
        column.add(
            button(label, (12, column.y + 8, 80, 24), Operate(command=command, target=network.name)),
            pill("Forget", (100, column.y + 8, 80, 24), ask),
        )
    elif network.password:
        _password_form(state, column, network.name)
    else:
        connect = Operate(command="connect", target=network.name)
        column.add(button("Connect", (12, column.y + 8, 80, 24), connect))


def _password_form(state: PhoneState, column: Column, name: str) -> None:
    has_focus = state.focus == "password"
    rect = Rect(x=12, y=column.y + 8, width=WIDTH - 24, height=26)
    column.add(
        Element(
            element_id="field:password",
            label="Password",
            kind="field",
            rect=rect,
            text=state.draft or ("" if has_focus else "Password"),
            ink="" if state.draft or has_focus else "hint",
            effect=FocusField(field="password"),
            is_on=has_focus,
        )
    )
    join = Operate(command="join", target=name) if state.draft else None
    column.add(pill("Connect", (12, column.y + 8, 80, 24), join))


def _bluetooth(state: PhoneState, column: Column) -> None:
    column.add(_toggle_row(state, Toggle.BLUETOOTH, "Use Bluetooth", column.y))
    if not state.is_on(Toggle.BLUETOOTH):
        column.add_text("Turn on Bluetooth to see devices.")
        return
    column.add_heading("Known devices")
    for name in state.system.bluetooth_devices:
        column.add(row(f"device:{name}", y=column.y, label=name, text=name, glyph="bluetooth", paper="#26348f"))


def _toggle_row(state: PhoneState, toggle: Toggle, text: str, y: int) -> Element:
    return row(
        f"toggle:{toggle.value}",
        y=y,
        label="Use",
        text=text,
        effect=Switch(toggle=toggle),
        kind="switch_row",
        is_on=state.is_on(toggle),
    )


def _security(state: PhoneState, column: Column) -> None:
    column.add(
        row(
            "page:screen_lock",
            y=column.y,
            label="Lock",
            text="Screen lock",
            detail=state.system.screen_lock,
            glyph="lock",
            paper="#00796b",
            effect=Push(subscreen="screen_lock"),
        ),
    )
    column.add(switch_row(state, "lock_notifications", column.y))


def _screen_lock(state: PhoneState, column: Column) -> None:
    for lock in SCREEN_LOCKS:
        effect = Operate(command="choose_screen_lock", target=lock)
        column.add(_choice(lock, column.y, effect, is_on=lock == state.system.screen_lock))


def _choice(text: str, y: int, effect: Operate | Push | None, *, is_on: bool) -> Element:
    return row(f"choice:{text}", y=y, label=text, text=text, effect=effect, kind="choice_row", is_on=is_on, height=30)


def _wallpapers(state: PhoneState, column: Column) -> None:
    width, height, gap = 52, 84, 8
    top = column.y + 6
    for i, name in enumerate(WALLPAPER_NAMES):
        rect = Rect(x=10 + i % 3 * (width + gap), y=top + i // 3 * (height + 24), width=width, height=height)
        effect = Push(subscreen=f"set_wallpaper:{i}")
        column.add(_swatch(i, name, rect, effect=effect, is_on=i == state.wallpaper))


def _swatch(index: int, name: str, rect: Rect, *, effect: Push | None = None, is_on: bool = False) -> Element:
    top, bottom = WALLPAPERS[index]
    return Element(
        element_id=f"wallpaper:{name}",
        label=name,
        kind="swatch",
        rect=rect,
        effect=effect,
        text=name,
        paper=top,
        ink=bottom,
        is_on=is_on,
    )


def _wallpaper_preview(column: Column, index: int) -> None:
    rect = Rect(x=46, y=column.y + 4, width=100, height=166)
    column.add(_swatch(index, WALLPAPER_NAMES[index], rect))
    effect = Operate(command="set_wallpaper", target=str(index))
    column.add(button("Set wallpaper", (46, column.y + 24, 100, 24), effect, label="Set"))


def _language(state: PhoneState, column: Column) -> None:
    column.add(
        row(
            "page:languages",
            y=column.y,
            label="Languages",
            text="Languages",
            detail=state.system.language,
            glyph="globe",
            paper="#16b5cf",
            effect=Push(subscreen="languages"),
        )
    )
    column.add(switch_row(state, "spell_checker", column.y))


def _languages(state: PhoneState, column: Column) -> None:
    for language in LANGUAGES:
        is_current = language == state.system.language
        effect = None if is_current else Push(subscreen=f"ask:language:{language}")
        column.add(_choice(language, column.y, effect, is_on=is_current))


def _developer(state: PhoneState, column: Column) -> None:
    column.add(switch_row(state, "developer_options", column.y))
    if "developer_options" not in state.system.switched_on:
        return
    usb = "usb_debugging"
    is_on = usb in state.system.switched_on
    effect = Operate(command="switch", target=usb) if is_on else Push(subscreen="ask:usb_debugging:")
    column.add(switch_row(state, usb, column.y, effect=effect, detail="When USB is connected"))
    for name in ("stay_awake", "show_taps"):
        column.add(switch_row(state, name, column.y))


def _time_zones(state: PhoneState, column: Column) -> None:
    for zone in TIME_ZONES:
        effect = Operate(command="choose_time_zone", target=zone)
        column.add(_choice(zone, column.y, effect, is_on=zone == state.system.time_zone))


def time_zone_row(state: PhoneState, y: int) -> Element:
    """The row of the Date and time page that leads to the time zones."""
    zone = state.system.time_zone
    return row("page:time_zone", y=y, label="Zone", text="Time zone", detail=zone, effect=Push(subscreen="time_zone"))


def vibration_rows(state: PhoneState, y: int) -> tuple[Element, ...]:
    """The rows of the Sound page that switch vibration."""
    return tuple(switch_row(state, name, y + 36 * i) for i, name in enumerate(("call_vibration", "touch_vibration")))
