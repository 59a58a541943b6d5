"""Notes: the list, one of them, a new one."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import (
    CONTENT_TOP,
    Column,
    place,
    plus_button,
    row,
    text_field,
    title_button,
)
from cua_rl.environments.phone.simulator.elements import Do, Push
from cua_rl.environments.phone.simulator.navigation import go_up, subject
from cua_rl.environments.phone.simulator.state import PhoneState


def build_notes(state: PhoneState, column: Column) -> None:
    for i, note in enumerate(state.notes):
        column.stack(
            row(
                f"note:{i}",
                text=note,
                glyph="notes",
                paper="#f7c927",
                ink="#4a3b00",
                effect=Push(subscreen=f"note:{i}"),
            )
        )
    column.pin(plus_button("new"))


def build_note(state: PhoneState, column: Column, subscreen: str) -> str:
    """A new note, or one that was written."""
    if subscreen == "new":
        column.add(text_field(state, "note", "Write here", (10, CONTENT_TOP + 6, WIDTH - 20, 110)))
        column.pin(title_button("Save", Do(command="save_note")))
        return "New note"
    text = state.notes[int(subject(state))]
    column.add(place("paper", "Paper", "field", (10, CONTENT_TOP + 6, WIDTH - 20, 110), text=text))
    column.pin(title_button("Delete", Do(command="delete_note")))
    return "Note"


def save_note(state: PhoneState) -> PhoneState:
    note = state.draft.strip()
    return go_up(replace(state, notes=(*state.notes, note))) if note else state


def delete_note(state: PhoneState) -> PhoneState:
    index = int(subject(state))
    return go_up(replace(state, notes=(*state.notes[:index], *state.notes[index + 1 :])))
