"""Settings: the list of rows, and the pages that they open."""

from collections.abc import Callable

from cua_rl.environments.phone.simulator import catalog, controls
from cua_rl.environments.phone.simulator.elements import Element, Operate, Push, Slide
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.phone.simulator.system.apps import app_info, app_list, app_storage, storage
from cua_rl.environments.phone.simulator.system.dialogs import is_dialog
from cua_rl.environments.phone.simulator.system.networks import build_bluetooth, build_network, build_wifi


def build_settings(state: PhoneState) -> tuple[str, controls.Column]:
    """The title and the elements of the current page; a dialog has those of the page beneath it."""
    pages = [name for name in state.subscreens if not is_dialog(name)]
    name, _, argument = (pages or [""])[-1].partition(":")
    column = controls.Column(top=controls.CONTENT_TOP)
    match name:
        case "network":
            build_network(state, column, argument)
            return argument, column
        case "app":
            return app_info(state, column, argument), column
        case "app_storage":
            return app_storage(state, column, argument), column
        case "set_wallpaper":
            build_wallpaper_preview(column, int(argument))
            return catalog.WALLPAPER_NAMES[int(argument)], column
        case _:
            heading, build = _PAGES[name]
            build(state, column)
            return heading, column


def build_rows(state: PhoneState, column: controls.Column) -> None:
    for name in state.setting_rows:
        column.stack(_setting_row(state, name))


def _setting_row(state: PhoneState, name: str) -> Element:
    row, system = catalog.SETTINGS.get(name) or catalog.EXTRA_ROWS[name], state.system
    if row.toggle is not None:
        return controls.toggle_row(state, row.toggle, row.title, label=row.label, glyph=row.glyph, paper=row.paper)
    details = {
        "wifi_page": (system.connected_network or "Not connected") if state.is_on(catalog.Toggle.WIFI) else "Off",
        "bluetooth_page": "On" if state.is_on(catalog.Toggle.BLUETOOTH) else "Off",
        "language": system.language,
    }
    detail = details.get(name, "")
    return controls.page_row(row.subscreen, row.title, label=row.label, detail=detail, glyph=row.glyph, paper=row.paper)


def build_display(state: PhoneState, column: controls.Column) -> None:
    column.add_heading("Brightness")
    column.stack(
        controls.slider(
            "Brightness", state.brightness_level / catalog.MAX_BRIGHTNESS, Slide(level="brightness"), "display"
        )
    )
    column.add_heading("Screen timeout")
    for timeout_ms, text in catalog.SCREEN_TIMEOUTS_MS.items():
        column.stack(
            controls.row(
                f"timeout:{timeout_ms}",
                text=text,
                effect=Operate(command="choose_screen_timeout", target=str(timeout_ms)),
                kind="choice_row",
                is_on=timeout_ms == state.screen_timeout_ms,
                height=26,
            )
        )


def build_sound(state: PhoneState, column: controls.Column) -> None:
    """Media volume, do not disturb, vibration."""
    column.add_heading("Media volume")
    column.stack(
        controls.slider("Volume", state.media_volume / catalog.MAX_VOLUME, Slide(level="media_volume"), "sound")
    )
    column.stack(_setting_row(state, catalog.Toggle.DO_NOT_DISTURB.value))
    for name in ("call_vibration", "touch_vibration"):
        column.stack(controls.switch_row(state, name))


def build_date(state: PhoneState, column: controls.Column) -> None:
    """The time, automatic or not, and its zone."""
    paper = catalog.SETTINGS["date"].paper
    column.stack(
        controls.toggle_row(
            state, catalog.Toggle.AUTO_TIME, "Automatic time", label="Automatic", glyph="date", paper=paper
        )
    )
    column.add_text(f"The time is {state.clock}.", indent=14)
    column.stack(controls.page_row("time_zone", "Time zone", label="Zone", detail=state.system.time_zone))


def build_about(state: PhoneState, column: controls.Column) -> None:
    """Model, serial number, battery."""
    for name, value in (
        ("Model", "Simulated phone"),
        ("Serial number", f"SP-{state.seed:07d}"),
        ("Battery", f"{state.battery_pct} %"),
        ("Apps", str(len(catalog.APPS))),
    ):
        column.stack(controls.row(f"about:{name}", text=name, detail=value))


def build_security(state: PhoneState, column: controls.Column) -> None:
    """The screen lock, and what it shows."""
    lock = state.system.screen_lock
    column.stack(
        controls.page_row("screen_lock", "Screen lock", label="Lock", detail=lock, glyph="lock", paper="#00796b")
    )
    column.stack(controls.switch_row(state, "lock_notifications"))


def build_screen_lock(state: PhoneState, column: controls.Column) -> None:
    for lock in catalog.SCREEN_LOCKS:
        effect = Operate(command="choose_screen_lock", target=lock)
        column.stack(_choice(lock, effect, is_on=lock == state.system.screen_lock))


def build_wallpapers(state: PhoneState, column: controls.Column) -> None:
    width, height, gap = 52, 84, 8
    top = column.y + 6
    for i in range(len(catalog.WALLPAPERS)):
        box = (10 + i % 3 * (width + gap), top + i // 3 * (height + 24), width, height)
        effect = Push(subscreen=f"set_wallpaper:{i}")
        column.add(_swatch(i, box, effect=effect, is_on=i == state.wallpaper))


def _swatch(index: int, box: controls.Box, *, effect: Push | None = None, is_on: bool = False) -> Element:
    name, (top, bottom) = catalog.WALLPAPER_NAMES[index], catalog.WALLPAPERS[index]
    element_id = f"wallpaper:{name}"
    return controls.place(element_id, name, "swatch", box, effect=effect, text=name, paper=top, ink=bottom, is_on=is_on)


def build_wallpaper_preview(column: controls.Column, index: int) -> None:
    """One wallpaper, to be set."""
    column.add(_swatch(index, (46, column.y + 4, 100, 166)))
    effect = Operate(command="set_wallpaper", target=str(index))
    column.add(controls.button("Set wallpaper", (46, column.y + 24, 100, 24), effect, label="Set"))


def _choice(text: str, effect: Operate | Push | None, *, is_on: bool) -> Element:
    return controls.row(f"choice:{text}", text=text, effect=effect, kind="choice_row", is_on=is_on, height=30)


def build_language(state: PhoneState, column: controls.Column) -> None:
    """The language, and the spell checker."""
    column.stack(
        controls.page_row("languages", "Languages", detail=state.system.language, glyph="globe", paper="#16b5cf")
    )
    column.stack(controls.switch_row(state, "spell_checker"))


def build_languages(state: PhoneState, column: controls.Column) -> None:
    for language in catalog.LANGUAGES:
        is_current = language == state.system.language
        effect = None if is_current else Push(subscreen=f"ask:language:{language}")
        column.stack(_choice(language, effect, is_on=is_current))


def build_developer(state: PhoneState, column: controls.Column) -> None:
    """The developer options, empty while they are off."""
    column.stack(controls.switch_row(state, "developer_options"))
    if "developer_options" not in state.system.switched_on:
        return
    usb = "usb_debugging"
    is_on = usb in state.system.switched_on
    effect = Operate(command="switch", target=usb) if is_on else Push(subscreen="ask:usb_debugging:")
    column.stack(controls.switch_row(state, usb, effect=effect, detail="When USB is connected"))
    for name in ("stay_awake", "show_taps"):
        column.stack(controls.switch_row(state, name))


def build_time_zones(state: PhoneState, column: controls.Column) -> None:
    for zone in catalog.TIME_ZONES:
        effect = Operate(command="choose_time_zone", target=zone)
        column.stack(_choice(zone, effect, is_on=zone == state.system.time_zone))


_PAGES: dict[str, tuple[str, Callable[[PhoneState, controls.Column], None]]] = {
    "": ("Settings", build_rows),
    "display": ("Display", build_display),
    "sound": ("Sound", build_sound),
    "date": ("Date and time", build_date),
    "about": ("About phone", build_about),
    "wifi": ("Wi-Fi", build_wifi),
    "bluetooth": ("Bluetooth", build_bluetooth),
    "apps": ("Apps", app_list),
    "storage": ("Storage", storage),
    "security": ("Security", build_security),
    "screen_lock": ("Screen lock", build_screen_lock),
    "wallpaper": ("Wallpaper", build_wallpapers),
    "language": ("Language and input", build_language),
    "languages": ("Languages", build_languages),
    "developer": ("Developer options", build_developer),
    "time_zone": ("Time zone", build_time_zones),
}
"""Title and builder of the pages without an argument; "" is the list of rows."""
