"""What the commands of apps and of the launcher do to the phone's state."""

from collections.abc import Callable
from dataclasses import replace

from cua_rl.devices.simulator.app_data import AppData, Contact
from cua_rl.devices.simulator.browser_pages import WEB_PAGES, read_address
from cua_rl.devices.simulator.file_tree import DOWNLOADS, add_file, remove_file
from cua_rl.devices.simulator.forms import field_value, open_subscreen
from cua_rl.devices.simulator.home_folders import make_folder, rename_folder
from cua_rl.devices.simulator.home_layout import add_icon, move_icon, remove_icon
from cua_rl.devices.simulator.state import PhoneState, Text, Thread
from cua_rl.devices.simulator.system_reducer import uninstall


def do_in_app(state: PhoneState, command: str) -> PhoneState:
    """Carry out a command; one that does not fit what was typed changes nothing."""
    carry_out = _COMMANDS.get(command)
    return state if carry_out is None else carry_out(state)


def submit(state: PhoneState) -> PhoneState:
    """The Enter key, in fields where it does what the screen's button does; elsewhere it closes the keyboard."""
    match state.focus:
        case "address":
            return _open_address(state)
        case "folder":
            return _create_folder(state) if state.app is not None else _name_home_folder(state)
        case "minutes":
            return _start_timer(state)
        case None:
            return state
        case _:
            return replace(state, focus=None)


def conversation_with(state: PhoneState, subscreen: str) -> str:
    """Whom a screen of Messages writes to: it names a thread by its index, or a person ("to:Emma")."""
    return subscreen.removeprefix("to:") if subscreen.startswith("to:") else state.threads[int(subscreen)].contact


def subject(state: PhoneState) -> str:
    """What the current screen is about: "Emma" on "contacts/person:Emma"."""
    return state.subscreens[-1].partition(":")[2] if state.subscreens else ""


def _show(state: PhoneState, app: str | None, *subscreens: str) -> PhoneState:
    """Another screen, with nothing typed on it."""
    recent = state.recent_apps if app is None else (app, *(other for other in state.recent_apps if other != app))
    return replace(
        state,
        app=app,
        subscreens=subscreens,
        recent_apps=recent,
        is_recents_open=False,
        scroll=0,
        focus=None,
        draft="",
        draft_field=None,
        form=(),
        keyboard="lower",
    )


def _up(state: PhoneState) -> PhoneState:
    return _show(state, state.app, *state.subscreens[:-1])


def _with_apps(state: PhoneState, apps: AppData) -> PhoneState:
    return replace(state, apps=apps)


def _call(state: PhoneState) -> PhoneState:
    if not state.dialled:
        return state
    return _show(replace(state, calls=(*state.calls, state.dialled), dialled=""), "phone", "call")


def _call_contact(state: PhoneState) -> PhoneState:
    number = state.apps.number_of(subject(state))
    return state if number is None else _call(replace(state, dialled=number))


def _message_contact(state: PhoneState) -> PhoneState:
    return _show(state, "messages", f"to:{subject(state)}")


def _new_contact(state: PhoneState) -> PhoneState:
    number = state.dialled
    return replace(open_subscreen(_show(state, "phone"), "new"), form=(("number", number),))


def _save_contact(state: PhoneState) -> PhoneState:
    name, number = field_value(state, "name").strip(), field_value(state, "number").strip()
    if not name or not number:
        return state
    others = [contact for contact in state.apps.contacts if contact.name != name]
    contacts = tuple(sorted((*others, Contact(name=name, number=number)), key=lambda contact: contact.name))
    state = _with_apps(state, replace(state.apps, contacts=contacts))
    return replace(_up(state), dialled="") if state.app == "phone" else _show(state, "contacts", f"person:{name}")


def _delete_contact(state: PhoneState) -> PhoneState:
    contacts = tuple(contact for contact in state.apps.contacts if contact.name != subject(state))
    return _up(_with_apps(state, replace(state.apps, contacts=contacts)))


def _send_text(state: PhoneState) -> PhoneState:
    if not state.draft.strip():
        return state
    text = Text(text=state.draft.strip(), is_mine=True)
    contact = conversation_with(state, state.subscreens[-1])
    if contact in [thread.contact for thread in state.threads]:
        threads = tuple(_with_text(thread, text) if thread.contact == contact else thread for thread in state.threads)
    else:
        threads = (*state.threads, Thread(contact=contact, texts=(text,)))
    return replace(state, threads=threads, draft="")


def _with_text(thread: Thread, text: Text) -> Thread:
    return replace(thread, texts=(*thread.texts, text))


def _delete_note(state: PhoneState) -> PhoneState:
    index = int(subject(state))
    return _up(replace(state, notes=(*state.notes[:index], *state.notes[index + 1 :])))


def _save_alarm(state: PhoneState) -> PhoneState:
    hour, minute = (_number(field_value(state, field)) for field in ("hour", "minute"))
    if hour is None or minute is None or hour > 23 or minute > 59:
        return state
    time = f"{hour:02d}:{minute:02d}"
    alarms = state.apps.alarms if time in state.apps.alarms else (*state.apps.alarms, time)
    alarms_on = tuple(sorted({*state.alarms_on, alarms.index(time)}))
    return _up(replace(state, alarms_on=alarms_on, apps=replace(state.apps, alarms=alarms)))


def _start_timer(state: PhoneState) -> PhoneState:
    minutes = _number(field_value(state, "minutes"))
    if not minutes or minutes > 600:
        return state
    return _show(_with_apps(state, replace(state.apps, timer_s=60 * minutes)), "clock", "timer")


def _stop_timer(state: PhoneState) -> PhoneState:
    return _show(_with_apps(state, replace(state.apps, timer_s=0)), "clock", "timer")


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() and len(text.strip()) <= 3 else None


def _create_folder(state: PhoneState) -> PhoneState:
    name = field_value(state, "folder").strip()
    if not name or "/" in name:
        return state
    parent = state.subscreens[-2] if len(state.subscreens) > 1 else ""
    return _up(add_file(state, f"{parent}{name}/"))


def _delete_file(state: PhoneState) -> PhoneState:
    return _up(remove_file(state, state.subscreens[-1].removeprefix("file:")))


def _open_address(state: PhoneState) -> PhoneState:
    if not state.draft.strip():
        return state
    return _show(state, "chrome", *state.subscreens, read_address(state.draft))


def _download(state: PhoneState) -> PhoneState:
    page = WEB_PAGES.get(state.subscreens[-1])
    return state if page is None or page.file is None else add_file(state, f"{DOWNLOADS}{page.file}")


def take_screenshot(state: PhoneState) -> PhoneState:
    """Save a picture of what shows; from the list of recent apps, of the app that is on top of it."""
    shown = state.screen if not state.is_recents_open else (state.recent_apps or ("home",))[0]
    return _with_apps(state, replace(state.apps, screenshots=(*state.apps.screenshots, shown)))


def _pin_icon(state: PhoneState) -> PhoneState:
    app = subject(state)
    pages = add_icon(remove_icon(state.home_pages, app), app)
    return replace(_show(state, None), home_pages=pages)


def _unpin_icon(state: PhoneState) -> PhoneState:
    return replace(_show(state, None), home_pages=remove_icon(state.home_pages, subject(state)))


def _move_icon(state: PhoneState) -> PhoneState:
    return replace(_show(state, None), home_pages=move_icon(state.home_pages, subject(state)))


def _uninstall(state: PhoneState) -> PhoneState:
    return uninstall(_show(state, None), subject(state))


def _set_wallpaper(state: PhoneState) -> PhoneState:
    return replace(_show(state, None), wallpaper=int(subject(state)))


def _name_home_folder(state: PhoneState) -> PhoneState:
    name = field_value(state, "folder").strip()
    if state.subscreens[-1].startswith("rename:"):
        named = rename_folder(state, subject(state), name)
    else:
        app, _, other = subject(state).partition(":")
        named = make_folder(state, name, app, other)
    return state if named == state else _show(named, None)


_COMMANDS: dict[str, Callable[[PhoneState], PhoneState]] = {
    "call": _call,
    "end_call": _up,
    "new_contact": _new_contact,
    "save_contact": _save_contact,
    "delete_contact": _delete_contact,
    "call_contact": _call_contact,
    "message_contact": _message_contact,
    "send_text": _send_text,
    "delete_note": _delete_note,
    "save_alarm": _save_alarm,
    "start_timer": _start_timer,
    "stop_timer": _stop_timer,
    "create_folder": _create_folder,
    "delete_file": _delete_file,
    "open_address": _open_address,
    "download": _download,
    "take_screenshot": take_screenshot,
    "pin_icon": _pin_icon,
    "unpin_icon": _unpin_icon,
    "move_icon": _move_icon,
    "uninstall": _uninstall,
    "set_wallpaper": _set_wallpaper,
    "make_home_folder": _name_home_folder,
    "rename_home_folder": _name_home_folder,
}
