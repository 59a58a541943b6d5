"""Commands that name their target, on system pages, in the shade and in lists: pure functions from state to state."""

from collections.abc import Callable
from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import TIME_ZONES, Toggle
from cua_rl.environments.phone.simulator.elements import Operate
from cua_rl.environments.phone.simulator.launcher.icons import drop_from_folders, remove_icon
from cua_rl.environments.phone.simulator.navigation import go_up
from cua_rl.environments.phone.simulator.state import InstalledApp, PhoneState, SystemCommand
from cua_rl.environments.phone.simulator.system.networks import operate_network

_MINUTES_PER_DAY = 24 * 60


def operate(state: PhoneState, effect: Operate) -> PhoneState:
    """Carry out a command that names its target."""
    return _COMMANDS[effect.command](state, effect.target)


def uninstall(state: PhoneState, app: str) -> PhoneState:
    """Take an app off the phone: out of the list, the home pages, their folders and the recent apps."""
    state = drop_from_folders(state, app)
    left = tuple(entry for entry in state.system.apps if entry.app != app)
    pages = remove_icon(state.home_pages, app)
    recent = tuple(other for other in state.recent_apps if other != app)
    return replace(state, system=replace(state.system, apps=left), home_pages=pages, recent_apps=recent)


def _toggle(state: PhoneState, name: str) -> PhoneState:
    toggle = Toggle(name)
    is_on = not state.is_on(toggle)
    state = state.with_toggle(toggle, is_on)
    if toggle is Toggle.AIRPLANE_MODE and is_on:
        return state.with_toggle(Toggle.WIFI, False).with_toggle(Toggle.BLUETOOTH, False)
    return state


def _toggle_tile(state: PhoneState, name: str) -> PhoneState:
    """Flip a toggle in the shade, and remember that it was there."""
    used = tuple(sorted({*state.system.tiles_used, name}))
    return _toggle(replace(state, system=replace(state.system, tiles_used=used)), name)


def _choose_time_zone(state: PhoneState, zone: str) -> PhoneState:
    shift = 60 * (TIME_ZONES[zone] - TIME_ZONES[state.system.time_zone])
    minute = (state.minute_of_day + shift) % _MINUTES_PER_DAY
    return replace(state, minute_of_day=minute, system=replace(state.system, time_zone=zone))


def _change_app(state: PhoneState, app: str, change: Callable[[InstalledApp], InstalledApp]) -> PhoneState:
    entry = state.system.find_app(app)
    assert entry is not None  # pages of apps that are not installed cannot be reached
    return replace(state, system=state.system.with_app(change(entry)))


_COMMANDS: dict[SystemCommand, Callable[[PhoneState, str], PhoneState]] = {
    "toggle": _toggle,
    "toggle_tile": _toggle_tile,
    "play_track": lambda state, index: replace(state, track=None if state.track == int(index) else int(index)),
    "switch_alarm": lambda state, index: replace(state, alarms_on=tuple(sorted({*state.alarms_on} ^ {int(index)}))),
    "choose_screen_timeout": lambda state, timeout_ms: replace(state, screen_timeout_ms=int(timeout_ms)),
    "switch": lambda state, name: replace(
        state, system=state.system.with_switch(name, name not in state.system.switched_on)
    ),
    "allow_usb_debugging": lambda state, _: go_up(
        replace(state, system=state.system.with_switch("usb_debugging", True))
    ),
    "choose_language": lambda state, language: go_up(replace(state, system=replace(state.system, language=language))),
    "choose_screen_lock": lambda state, lock: replace(state, system=replace(state.system, screen_lock=lock)),
    "choose_time_zone": _choose_time_zone,
    "set_wallpaper": lambda state, index: go_up(replace(state, wallpaper=int(index))),
    "clear_notifications": lambda state, _: replace(state, system=replace(state.system, notifications=())),
    "connect": lambda state, name: operate_network(state, "connect", name),
    "disconnect": lambda state, name: operate_network(state, "disconnect", name),
    "forget": lambda state, name: operate_network(state, "forget", name),
    "join": lambda state, name: operate_network(state, "join", name),
    "force_stop": lambda state, app: go_up(_change_app(state, app, lambda entry: replace(entry, is_running=False))),
    "clear_cache": lambda state, app: _change_app(state, app, lambda entry: replace(entry, cache_mb=0)),
    "uninstall": lambda state, app: go_up(uninstall(state, app), by=2),
    "switch_notifications": lambda state, app: _change_app(
        state, app, lambda entry: replace(entry, may_notify=not entry.may_notify)
    ),
}
