"""Phone and Contacts: the dialler, a call, the list of people, one person, a new one."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import (
    BLUE,
    CONTENT_TOP,
    GREEN,
    RED,
    Column,
    add_field,
    add_keypad,
    person_row,
    place,
    plus_button,
    text_field,
    title_button,
    wide_button,
)
from cua_rl.environments.phone.simulator.elements import Do, Enter, Push
from cua_rl.environments.phone.simulator.navigation import field_value, go_up, open_subscreen, show, subject
from cua_rl.environments.phone.simulator.state import Contact, PhoneState

_TEAL = "#00796b"


def build_phone(state: PhoneState, column: Column) -> None:
    column.add(
        place("number", "Number", "text", (20, 52, WIDTH - 40, 28), text=state.dialled or "Dial a number", ink="large")
    )
    add_keypad(column, "123456789*0#", top=86, num_columns=3, key_height=38)
    column.add(
        place("call", "Call", "round_button", (78, 244, 36, 36), effect=Do(command="call"), glyph="phone", paper=GREEN)
    )
    column.add(place("key:delete", "Delete", "button", (134, 252, 40, 20), effect=Enter(key="delete"), text="Del"))
    if state.dialled:
        save = Do(command="new_contact")
        column.add(place("add", "Add", "button", (18, 252, 40, 20), effect=save, text="Add"))


def build_phone_page(state: PhoneState, column: Column, subscreen: str) -> str:
    """A call, or the form for a new contact."""
    if subscreen == "new":
        return _new_contact(state, column)
    number = state.calls[-1]
    name = state.apps.name_of(number)
    _add_portrait(column)
    column.add(place("callee", "Callee", "text", (10, 148, WIDTH - 20, 24), text=name or number, ink="large"))
    line = number if name else "Mobile"
    column.add(place("line", "Line", "text", (10, 174, WIDTH - 20, 14), text=line, ink="centre"))
    column.add(
        place("end", "End", "round_button", (74, 228, 44, 44), effect=Do(command="end_call"), glyph="phone", paper=RED)
    )
    return "Calling"


def build_contacts(state: PhoneState, column: Column) -> None:
    for contact in state.apps.contacts:
        _add_contact(column, contact)
    column.y += 46  # so that the last row scrolls clear of the round button
    search = Push(subscreen="search")
    column.pin(
        place("search", "Search", "round_button", (158, 18, 24, 24), effect=search, glyph="search", paper=_TEAL),
        plus_button("new"),
    )


def _add_contact(column: Column, contact: Contact) -> None:
    name, page = contact.name, f"person:{contact.name}"
    column.stack(person_row(f"contact:{name}", name, contact.number, page, paper=_TEAL))


def build_contacts_page(state: PhoneState, column: Column, subscreen: str) -> str:
    """The form for a new contact, the search, or one person."""
    if subscreen == "new":
        return _new_contact(state, column)
    if subscreen == "search":
        column.pin(text_field(state, "search", "Name to find", (12, CONTENT_TOP + 2, WIDTH - 24, 26)))
        column.y += 32
        found = [contact for contact in state.apps.contacts if state.draft.strip().lower() in contact.name.lower()]
        for contact in found if state.draft.strip() else ():
            _add_contact(column, contact)
        if not found:
            column.add_text("Nobody has that name")
        return "Search"
    name = subject(state)
    number = state.apps.number_of(name)
    if number is None:
        column.add_text("This contact was deleted")
        return name
    _add_portrait(column)
    column.add(
        place("phone_number", "Number", "text", (10, 146, WIDTH - 20, 24), text=number, ink="large"),
        wide_button("Call", 182, Do(command="call_contact")),
        wide_button("Message", 214, Do(command="message_contact")),
        wide_button("Delete", 246, Do(command="delete_contact")),
    )
    return name


def _new_contact(state: PhoneState, column: Column) -> str:
    column.add_heading("Name")
    add_field(column, state, "name", "Name")
    column.add_heading("Number")
    add_field(column, state, "number", "Number")
    column.pin(title_button("Save", Do(command="save_contact")))
    return "New contact"


def _add_portrait(column: Column) -> None:
    column.add(place("portrait", "Portrait", "art", (62, 62, 68, 68), glyph="portrait", paper=BLUE))


def call(state: PhoneState) -> PhoneState:
    if not state.dialled:
        return state
    return show(replace(state, calls=(*state.calls, state.dialled), dialled=""), "phone", "call")


def call_contact(state: PhoneState) -> PhoneState:
    """Call the person whom the screen shows."""
    number = state.apps.number_of(subject(state))
    return state if number is None else call(replace(state, dialled=number))


def new_contact(state: PhoneState) -> PhoneState:
    """Open the form for a contact with the number that was dialled."""
    return replace(open_subscreen(show(state, "phone"), "new"), form=(("number", state.dialled),))


def save_contact(state: PhoneState) -> PhoneState:
    """Save the contact that was typed, in place of one of the same name."""
    name, number = field_value(state, "name").strip(), field_value(state, "number").strip()
    if not name or not number:
        return state
    others = [contact for contact in state.apps.contacts if contact.name != name]
    contacts = tuple(sorted((*others, Contact(name=name, number=number)), key=lambda contact: contact.name))
    state = replace(state, apps=replace(state.apps, contacts=contacts))
    return replace(go_up(state), dialled="") if state.app == "phone" else show(state, "contacts", f"person:{name}")


def delete_contact(state: PhoneState) -> PhoneState:
    contacts = tuple(contact for contact in state.apps.contacts if contact.name != subject(state))
    return go_up(replace(state, apps=replace(state.apps, contacts=contacts)))
