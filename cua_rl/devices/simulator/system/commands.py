"""What system pages and the shade do: pure functions from state to the next state."""

from dataclasses import replace

from cua_rl.devices.simulator.catalog import TIME_ZONES
from cua_rl.devices.simulator.elements import Operate
from cua_rl.devices.simulator.launcher.icons import drop_from_folders, remove_icon
from cua_rl.devices.simulator.navigation import go_up
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system.networks import operate_network

_MINUTES_PER_DAY = 24 * 60


def operate(state: PhoneState, effect: Operate) -> PhoneState:
    """Carry out a command of a system page."""
    system, target = state.system, effect.target
    match effect.command:
        case "switch":
            return replace(state, system=system.with_switch(target, target not in system.switched_on))
        case "allow_usb_debugging":
            return go_up(replace(state, system=system.with_switch("usb_debugging", True)))
        case "choose_language":
            return go_up(replace(state, system=replace(system, language=target)))
        case "choose_screen_lock":
            return replace(state, system=replace(system, screen_lock=target))
        case "choose_time_zone":
            shift = 60 * (TIME_ZONES[target] - TIME_ZONES[system.time_zone])
            minute = (state.minute_of_day + shift) % _MINUTES_PER_DAY
            return replace(state, minute_of_day=minute, system=replace(system, time_zone=target))
        case "set_wallpaper":
            return go_up(replace(state, wallpaper=int(target)))
        case "clear_notifications":
            return replace(state, system=replace(system, notifications=()))
        case "connect" | "disconnect" | "forget" | "join":
            return operate_network(state, effect.command, target)
        case _:
            return _operate_app(state, effect.command, target)


def uninstall(state: PhoneState, app: str) -> PhoneState:
    """Take an app off the phone: out of the list, the home pages, their folders and the recent apps."""
    state = drop_from_folders(state, app)
    left = tuple(entry for entry in state.system.apps if entry.app != app)
    pages = remove_icon(state.home_pages, app)
    recent = tuple(other for other in state.recent_apps if other != app)
    return replace(state, system=replace(state.system, apps=left), home_pages=pages, recent_apps=recent)


def _operate_app(state: PhoneState, command: str, app: str) -> PhoneState:
    system = state.system
    entry = system.find_app(app)
    assert entry is not None  # pages of apps that are not installed cannot be reached
    match command:
        case "force_stop":
            return go_up(replace(state, system=system.with_app(replace(entry, is_running=False))))
        case "clear_cache":
            return replace(state, system=system.with_app(replace(entry, cache_mb=0)))
        case "uninstall":
            return go_up(uninstall(state, app), by=2)
        case _:
            return replace(state, system=system.with_app(replace(entry, may_notify=not entry.may_notify)))
