"""Text fields: which screens open with the cursor in one, and screens that have several."""

from dataclasses import replace

from cua_rl.devices.simulator.state import Field, PhoneState

_AUTOFOCUS: dict[tuple[str | None, str], Field] = {
    ("notes", "new"): "note",
    ("contacts", "search"): "search",
    ("contacts", "new"): "name",
    ("phone", "new"): "name",
    ("files", "new"): "folder",
    ("clock", "new"): "hour",
    ("clock", "timer"): "minutes",
    (None, "rename"): "folder",
    (None, "folder_of"): "folder",
}


def autofocus(app: str | None, subscreen: str) -> Field | None:
    """The field that has the focus when a screen opens."""
    return _AUTOFOCUS.get((app, subscreen.partition(":")[0]))


def open_subscreen(state: PhoneState, subscreen: str) -> PhoneState:
    """Open a screen inside the app, with the cursor in its first field if it is there to be typed into."""
    field = autofocus(state.app, subscreen)
    state = replace(state, subscreens=(*state.subscreens, subscreen))
    return state if field is None else focus_field(state, field)


def focus_field(state: PhoneState, field: Field) -> PhoneState:
    """Put the cursor into a field; what stands in the screen's other fields is kept."""
    layer = "symbols" if field in ("number", "hour", "minute", "minutes") else "lower"
    state = replace(state, focus=field, keyboard=layer)
    if state.draft_field is None or state.draft_field == field:
        return replace(state, draft_field=field)
    values = dict(state.form) | {state.draft_field: state.draft}
    draft = values.pop(field, "")
    return replace(state, draft=draft, draft_field=field, form=tuple(sorted(values.items())))


def field_value(state: PhoneState, field: Field) -> str:
    """What stands in a field of the current screen."""
    return state.draft if state.draft_field in (None, field) else dict(state.form).get(field, "")
