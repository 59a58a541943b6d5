"""Messages: the conversations, one of them, a new one."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import (
    CONTENT_BOTTOM,
    NAV_TOP,
    Column,
    person_row,
    place,
    plus_button,
    text_field,
)
from cua_rl.environments.phone.simulator.elements import Do
from cua_rl.environments.phone.simulator.keyboard import KEYBOARD_HEIGHT
from cua_rl.environments.phone.simulator.state import PhoneState, Text, Thread


def build_messages(state: PhoneState, column: Column) -> None:
    for i, thread in enumerate(state.threads):
        last = thread.texts[-1]
        detail = f"You: {last.text}" if last.is_mine else last.text
        column.stack(person_row(f"thread:{i}", thread.contact, detail, str(i), height=42))
    column.y += 46  # so that the last row scrolls clear of the round button
    column.pin(plus_button("new"))


def build_messages_page(state: PhoneState, column: Column, subscreen: str) -> str:
    """A conversation, or the people to write to."""
    if subscreen == "new":
        for person in state.apps.contacts:
            recipient = f"to:{person.name}"
            column.stack(person_row(recipient, person.name, person.number, recipient))
        return "New message"
    contact = conversation_with(state, subscreen)
    texts = next((thread.texts for thread in state.threads if thread.contact == contact), ())
    for i, text in enumerate(texts):
        column.y += 6
        column.add(
            place(f"text:{i}", text.text, "bubble", (10, column.y, WIDTH - 20, 24), text=text.text, is_on=text.is_mine)
        )
    column.y += 40
    y = (CONTENT_BOTTOM if state.focus is None else NAV_TOP - KEYBOARD_HEIGHT) - 28
    column.pin(text_field(state, "message", "Message", (8, y, 138, 24)))
    column.pin(place("send", "Send", "button", (150, y + 1, 36, 22), effect=Do(command="send_text"), text="Send"))
    return contact


def conversation_with(state: PhoneState, subscreen: str) -> str:
    """Whom a screen of Messages writes to: it names a thread by its index, or a person ("to:Emma")."""
    return subscreen.removeprefix("to:") if subscreen.startswith("to:") else state.threads[int(subscreen)].contact


def send_text(state: PhoneState) -> PhoneState:
    if not state.draft.strip():
        return state
    text = Text(text=state.draft.strip(), is_mine=True)
    contact = conversation_with(state, state.subscreens[-1])
    if contact in [thread.contact for thread in state.threads]:
        threads = tuple(
            replace(thread, texts=(*thread.texts, text)) if thread.contact == contact else thread
            for thread in state.threads
        )
    else:
        threads = (*state.threads, Thread(contact=contact, texts=(text,)))
    return replace(state, threads=threads, draft="")
