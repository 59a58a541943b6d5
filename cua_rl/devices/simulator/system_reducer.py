"""What system pages and the shade do: pure functions from state to the next state."""

from dataclasses import replace

from cua_rl.devices.simulator.elements import Element, Operate
from cua_rl.devices.simulator.home_folders import drop_from_folders
from cua_rl.devices.simulator.layout import STATUS_HEIGHT
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import TIME_ZONES
from cua_rl.devices.simulator.system_state import Network

_MIN_PULL = 60
"""Logical units that a finger must move to pull the shade down or push it up."""
_MINUTES_PER_DAY = 24 * 60


def drag_shade(state: PhoneState, element: Element | None, y: float, dx: float, dy: float) -> PhoneState | None:
    """The state after a drag that the shade takes; None for a drag that is for the screen beneath.

    Down from the status bar opens the notifications, down again the quick settings; up closes the shade, and a
    notification that is pushed aside goes away.
    """
    is_downwards, is_sideways = dy >= _MIN_PULL, abs(dx) > abs(dy)
    if state.shade is None:
        if y < STATUS_HEIGHT and is_downwards and not is_sideways:
            return replace(state, shade="notifications", focus=None)
        return None
    if is_sideways:
        is_notification = element is not None and element.kind == "notification"
        return _dismiss(state, element.element_id) if element is not None and is_notification else state
    if is_downwards:
        return replace(state, shade="quick_settings")
    return replace(state, shade=None) if dy <= -_MIN_PULL else state


def _dismiss(state: PhoneState, element_id: str) -> PhoneState:
    shown = state.system.shown_notifications()
    gone = shown[int(element_id.partition(":")[2])]
    left = tuple(notification for notification in state.system.notifications if notification != gone)
    return replace(state, system=replace(state.system, notifications=left))


def operate(state: PhoneState, effect: Operate) -> PhoneState:
    """Carry out a command of a system page."""
    system, target = state.system, effect.target
    match effect.command:
        case "switch":
            return replace(state, system=system.with_switch(target, target not in system.switched_on))
        case "allow_usb_debugging":
            return _go_up(replace(state, system=system.with_switch("usb_debugging", True)))
        case "choose_language":
            return _go_up(replace(state, system=replace(system, language=target)))
        case "choose_screen_lock":
            return replace(state, system=replace(system, screen_lock=target))
        case "choose_time_zone":
            return _choose_time_zone(state, target)
        case "set_wallpaper":
            return _go_up(replace(state, wallpaper=int(target)))
        case "clear_notifications":
            return replace(state, system=replace(system, notifications=()))
        case "connect" | "disconnect" | "forget" | "join":
            return _operate_network(state, effect.command, system.find_network(target))
        case _:
            return _operate_app(state, effect.command, target)


def uninstall(state: PhoneState, app: str) -> PhoneState:
    """Take an app off the phone: out of the list, the home pages, their folders and the recent apps."""
    state = drop_from_folders(state, app)
    left = tuple(entry for entry in state.system.apps if entry.app != app)
    pages = tuple(tuple(place for place in page if place.app != app) for page in state.home_pages)
    recent = tuple(other for other in state.recent_apps if other != app)
    return replace(state, system=replace(state.system, apps=left), home_pages=pages, recent_apps=recent)


def join_network(state: PhoneState) -> PhoneState:
    """Join the network whose password was typed; nothing happens without one."""
    if not state.draft:
        return state
    return operate(state, Operate(command="join", target=state.subscreens[-1].partition(":")[2]))


def record_tile(state: PhoneState, toggle: str) -> PhoneState:
    """Remember that a toggle was flipped in the shade."""
    used = tuple(sorted({*state.system.tiles_used, toggle}))
    return replace(state, system=replace(state.system, tiles_used=used))


def _go_up(state: PhoneState, by: int = 1) -> PhoneState:
    return _without_draft(replace(state, subscreens=state.subscreens[:-by], scroll=0))


def _without_draft(state: PhoneState) -> PhoneState:
    return replace(state, focus=None, draft="", draft_field=None, form=())


def _choose_time_zone(state: PhoneState, zone: str) -> PhoneState:
    shift = 60 * (TIME_ZONES[zone] - TIME_ZONES[state.system.time_zone])
    minute = (state.minute_of_day + shift) % _MINUTES_PER_DAY
    return replace(state, minute_of_day=minute, system=replace(state.system, time_zone=zone))


def _operate_network(state: PhoneState, command: str, network: Network) -> PhoneState:
    system = state.system
    match command:
        case "disconnect":
            return replace(state, system=replace(system, connected_network=""))
        case "forget":
            forgotten = system.with_network(replace(network, is_saved=False))
            is_connected = system.connected_network == network.name
            connected = "" if is_connected else system.connected_network
            return _go_up(replace(state, system=replace(forgotten, connected_network=connected)))
        case "join" if state.draft.strip() != network.password:
            subscreens = (*state.subscreens, f"ask:wrong_password:{network.name}")
            return _without_draft(replace(state, subscreens=subscreens))
        case _:
            saved = system.with_network(replace(network, is_saved=True))
            return _without_draft(replace(state, system=replace(saved, connected_network=network.name)))


def _operate_app(state: PhoneState, command: str, app: str) -> PhoneState:
    system = state.system
    entry = system.find_app(app)
    assert entry is not None  # pages of apps that are not installed cannot be reached
    match command:
        case "force_stop":
            return _go_up(replace(state, system=system.with_app(replace(entry, is_running=False))))
        case "clear_cache":
            return replace(state, system=system.with_app(replace(entry, cache_mb=0)))
        case "uninstall":
            return _go_up(uninstall(state, app), by=2)
        case _:
            return replace(state, system=system.with_app(replace(entry, may_notify=not entry.may_notify)))
