"""Commands of buttons in apps and on the launcher; the current screen determines their target."""

from collections.abc import Callable
from dataclasses import replace

from cua_rl.environments.phone.simulator.apps import browser, clock, contacts, files, messages, notes
from cua_rl.environments.phone.simulator.elements import Command
from cua_rl.environments.phone.simulator.launcher.icons import (
    add_icon,
    make_folder,
    move_icon,
    remove_icon,
    rename_folder,
)
from cua_rl.environments.phone.simulator.navigation import field_value, go_up, show, subject
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.phone.simulator.system.commands import uninstall


def do_in_app(state: PhoneState, command: Command) -> PhoneState:
    """Carry out a command; one that does not fit what was typed changes nothing."""
    return _COMMANDS[command](state)


def submit(state: PhoneState) -> PhoneState:
    """The Enter key, in fields where it does what the screen's button does; elsewhere it closes the keyboard."""
    match state.focus:
        case "address":
            return browser.open_address(state)
        case "folder":
            return files.create_folder(state) if state.app is not None else _name_home_folder(state)
        case "minutes":
            return clock.start_timer(state)
        case None:
            return state
        case _:
            return replace(state, focus=None)


def take_screenshot(state: PhoneState) -> PhoneState:
    """Save a screenshot of the current screen; in the list of recent apps, of the most recent app."""
    shown = state.screen if not state.is_recents_open else (state.recent_apps or ("home",))[0]
    return replace(state, apps=replace(state.apps, screenshots=(*state.apps.screenshots, shown)))


def _name_home_folder(state: PhoneState) -> PhoneState:
    name = field_value(state, "folder").strip()
    if state.subscreens[-1].startswith("rename:"):
        named = rename_folder(state, subject(state), name)
    else:
        app, _, other = subject(state).partition(":")
        named = make_folder(state, name, app, other)
    return state if named == state else show(named, None)


_COMMANDS: dict[Command, Callable[[PhoneState], PhoneState]] = {
    "call": contacts.call,
    "end_call": go_up,
    "new_contact": contacts.new_contact,
    "save_contact": contacts.save_contact,
    "delete_contact": contacts.delete_contact,
    "call_contact": contacts.call_contact,
    "message_contact": lambda state: show(state, "messages", f"to:{subject(state)}"),
    "send_text": messages.send_text,
    "save_note": notes.save_note,
    "delete_note": notes.delete_note,
    "save_alarm": clock.save_alarm,
    "start_timer": clock.start_timer,
    "stop_timer": clock.stop_timer,
    "create_folder": files.create_folder,
    "delete_file": files.delete_file,
    "download": browser.download,
    "take_photo": lambda state: replace(state, num_photos=state.num_photos + 1),
    "take_screenshot": take_screenshot,
    "clear_recents": lambda state: replace(show(state, None), recent_apps=()),
    "pin_icon": lambda state: replace(
        show(state, None), home_pages=add_icon(remove_icon(state.home_pages, subject(state)), subject(state))
    ),
    "unpin_icon": lambda state: replace(show(state, None), home_pages=remove_icon(state.home_pages, subject(state))),
    "move_icon": lambda state: replace(show(state, None), home_pages=move_icon(state.home_pages, subject(state))),
    "uninstall": lambda state: uninstall(show(state, None), subject(state)),
    "set_wallpaper": lambda state: replace(show(state, None), wallpaper=int(subject(state))),
    "make_home_folder": _name_home_folder,
    "rename_home_folder": _name_home_folder,
}
