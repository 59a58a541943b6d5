"""Moving between screens, and the text fields on them."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.state import Field, PhoneState

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
"""The field that has the focus when a screen opens, by app and name of the screen."""


def subject(state: PhoneState) -> str:
    """What the current screen is about: "Emma" on "contacts/person:Emma"."""
    return state.subscreens[-1].partition(":")[2] if state.subscreens else ""


def leave(state: PhoneState) -> PhoneState:
    """Close whatever lies over the screen, and forget what was typed and scrolled."""
    return replace(
        state,
        shade=None,
        is_recents_open=False,
        scroll=0,
        focus=None,
        draft="",
        draft_field=None,
        form=(),
        keyboard="lower",
    )


def show(state: PhoneState, app: str | None, *subscreens: str) -> PhoneState:
    """Bring an app (None is the launcher) to the foreground, on its first screen or on one of its subscreens."""
    recent = state.recent_apps if app is None else (app, *(other for other in state.recent_apps if other != app))
    return replace(leave(state), app=app, subscreens=subscreens, recent_apps=recent)


def go_up(state: PhoneState, by: int = 1) -> PhoneState:
    """Close the topmost screens of the app."""
    return replace(leave(state), subscreens=state.subscreens[:-by])


def open_subscreen(state: PhoneState, subscreen: str) -> PhoneState:
    """Open a screen inside the app, with the cursor in its text field if it opens with one."""
    field = _AUTOFOCUS.get((state.app, subscreen.partition(":")[0]))
    state = replace(leave(state), subscreens=(*state.subscreens, subscreen))
    return state if field is None else focus_field(state, field)


def focus_field(state: PhoneState, field: Field) -> PhoneState:
    """Put the cursor into a field; the text in the screen's other fields is kept."""
    layer = "symbols" if field in ("number", "hour", "minute", "minutes") else "lower"
    state = replace(state, focus=field, keyboard=layer)
    if state.draft_field is None or state.draft_field == field:
        return replace(state, draft_field=field)
    values = state.typed
    draft = values.pop(field, "")
    return replace(state, draft=draft, draft_field=field, form=tuple(sorted(values.items())))


def field_value(state: PhoneState, field: Field) -> str:
    return state.draft if state.draft_field in (None, field) else dict(state.form).get(field, "")
