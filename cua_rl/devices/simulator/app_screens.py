"""The screens of every app but Settings: plain, but they do what they show."""

from collections.abc import Callable

from cua_rl.devices.simulator import content
from cua_rl.devices.simulator.catalog import APPS, WIDTH
from cua_rl.devices.simulator.elements import (
    Do,
    Effect,
    Element,
    Enter,
    FocusField,
    Kind,
    PlayTrack,
    Push,
    Rect,
    SwitchAlarm,
)
from cua_rl.devices.simulator.keyboard import KEYBOARD_HEIGHT
from cua_rl.devices.simulator.layout import CONTENT_BOTTOM, CONTENT_TOP, NAV_TOP, Column, row
from cua_rl.devices.simulator.state import Field, PhoneState

_GREEN = "#2e9e4f"


def build_app(state: PhoneState, app: str) -> tuple[str, Column]:
    """The title and the elements of the app's current screen."""
    column = Column(top=CONTENT_TOP)
    if not state.subscreens:
        _ROOTS[app](state, column)
        return APPS[app].label, column
    subscreen = state.subscreens[-1]
    match app:
        case "messages":
            return _thread(state, column, int(subscreen))
        case "mail":
            return _mail(state, column, int(subscreen))
        case "notes":
            return _new_note(state, column)
        case _:
            return _web_page(column, subscreen)


def _place(
    element_id: str,
    label: str,
    kind: Kind,
    rect: tuple[int, int, int, int],
    *,
    effect: Effect | None = None,
    text: str = "",
    glyph: str = "",
    paper: str = "",
    ink: str = "",
    is_on: bool = False,
) -> Element:
    x, y, width, height = rect
    box = Rect(x=x, y=y, width=width, height=height)
    return Element(
        element_id=element_id,
        label=label,
        kind=kind,
        rect=box,
        effect=effect,
        text=text,
        glyph=glyph,
        paper=paper,
        ink=ink,
        is_on=is_on,
    )


def _field(state: PhoneState, field: Field, hint: str, rect: tuple[int, int, int, int]) -> Element:
    text = state.draft or ("" if state.focus == field else hint)
    return _place(
        f"field:{field}",
        hint.split(maxsplit=1)[0],
        "field",
        rect,
        effect=FocusField(field=field),
        text=text,
        is_on=state.focus == field,
        ink="" if state.draft else "hint",
    )


def _phone(state: PhoneState, column: Column) -> None:
    column.add(
        _place("number", "Number", "text", (20, 52, WIDTH - 40, 28), text=state.dialled or "Dial a number", ink="large")
    )
    _add_keypad(column, "123456789*0#", top=86, num_columns=3, key_height=38)
    column.add(
        _place(
            "call", "Call", "round_button", (78, 244, 36, 36), effect=Do(command="call"), glyph="phone", paper=_GREEN
        )
    )
    column.add(_place("key:delete", "Delete", "button", (134, 252, 40, 20), effect=Enter(key="delete"), text="Del"))


def _add_keypad(column: Column, keys: str, *, top: int, num_columns: int, key_height: int) -> None:
    width = (WIDTH - 24) // num_columns
    for i, key in enumerate(keys):
        rect = (12 + i % num_columns * width + 2, top + i // num_columns * key_height + 2, width - 4, key_height - 4)
        column.add(_place(f"key:{key}", key, "key", rect, effect=Enter(key=key), text=key))


def _messages(state: PhoneState, column: Column) -> None:
    for i, thread in enumerate(state.threads):
        last = thread.texts[-1]
        detail = f"You: {last.text}" if last.is_mine else last.text
        column.add(
            row(
                f"thread:{i}",
                y=column.y,
                label=thread.contact,
                text=thread.contact,
                detail=detail,
                glyph="person",
                paper="#7a8494",
                effect=Push(subscreen=str(i)),
                height=42,
            )
        )


def _thread(state: PhoneState, column: Column, index: int) -> tuple[str, Column]:
    thread = state.threads[index]
    for i, text in enumerate(thread.texts):
        column.y += 6
        column.add(
            _place(f"text:{i}", text.text, "bubble", (10, column.y, WIDTH - 20, 24), text=text.text, is_on=text.is_mine)
        )
    column.y += 40
    y = (CONTENT_BOTTOM if state.focus is None else NAV_TOP - KEYBOARD_HEIGHT) - 28
    column.pin(_field(state, "message", "Message", (8, y, 138, 24)))
    column.pin(_place("send", "Send", "button", (150, y + 1, 36, 22), effect=Do(command="send_text"), text="Send"))
    return thread.contact, column


def _mails(state: PhoneState, column: Column) -> None:
    for i, (sender, subject) in enumerate(content.mails(state.seed)):
        column.add(
            row(
                f"mail:{i}",
                y=column.y,
                label=sender,
                text=sender,
                detail=subject,
                glyph="person",
                paper="#7a8494",
                effect=Push(subscreen=str(i)),
                height=42,
            )
        )


def _mail(state: PhoneState, column: Column, index: int) -> tuple[str, Column]:
    sender, subject = content.mails(state.seed)[index]
    column.add_heading(f"From {sender}")
    for line in content.mail_lines():
        column.add_text(line)
    column.add_text(sender)
    return subject, column


def _notes(state: PhoneState, column: Column) -> None:
    for i, note in enumerate(state.notes):
        column.add(row(f"note:{i}", y=column.y, label=note, text=note, glyph="notes", paper="#f7c927", ink="#4a3b00"))
    column.pin(
        _place(
            "new",
            "New",
            "round_button",
            (146, 256, 36, 36),
            effect=Push(subscreen="new"),
            glyph="plus",
            paper="#1f6fe5",
        )
    )


def _new_note(state: PhoneState, column: Column) -> tuple[str, Column]:
    column.add(_field(state, "note", "Write here", (10, CONTENT_TOP + 6, WIDTH - 20, 110)))
    column.pin(_place("save", "Save", "button", (140, 19, 44, 22), effect=Do(command="save_note"), text="Save"))
    return "New note", column


def _contacts(state: PhoneState, column: Column) -> None:
    for name, number in content.contacts(state.seed):
        column.add(
            row(f"contact:{name}", y=column.y, label=name, text=name, detail=number, glyph="person", paper="#00796b")
        )


def _clock(state: PhoneState, column: Column) -> None:
    column.add(_place("time", "Time", "text", (0, 52, WIDTH, 56), text=state.clock, ink="huge"))
    column.add_heading("Alarms")
    for i, time in enumerate(content.alarms(state.seed)):
        column.add(
            row(
                f"alarm:{i}",
                y=column.y,
                label=time,
                text=time,
                effect=SwitchAlarm(alarm=i),
                kind="switch_row",
                is_on=i in state.alarms_on,
            )
        )


def _camera(state: PhoneState, column: Column) -> None:
    column.add(_place("view", "View", "art", (0, CONTENT_TOP, WIDTH, 196), glyph="viewfinder"))
    shutter = Do(command="take_photo")
    column.add(
        _place(
            "shutter", "Shutter", "round_button", (75, 248, 42, 42), effect=shutter, glyph="shutter", paper="#e8eaee"
        )
    )
    column.add(_place("count", "Photos", "text", (10, 262, 62, 14), text=f"{state.num_photos} photos"))


def _gallery(state: PhoneState, column: Column) -> None:
    for i in range(state.num_photos):
        rect = (7 + i % 3 * 60, CONTENT_TOP + 4 + i // 3 * 60, 56, 56)
        column.add(_place(f"photo:{i}", f"Photo {i + 1}", "photo", rect, text=str(state.seed * 31 + i)))


def _calendar(state: PhoneState, column: Column) -> None:
    column.add(_place("month", "Month", "art", (8, CONTENT_TOP, WIDTH - 16, 180), glyph="month", text=str(state.seed)))
    column.add_heading("Next")
    column.add_text("09:30  Team meeting")
    column.add_text("18:00  Dinner")


def _maps(state: PhoneState, column: Column) -> None:
    column.add(_place("map", "Map", "art", (0, CONTENT_TOP, WIDTH, 254), glyph="map", text=str(state.seed)))


def _music(state: PhoneState, column: Column) -> None:
    for i, (name, artist) in enumerate(content.tracks(state.seed)):
        is_on = i == state.track
        column.add(
            row(
                f"track:{i}",
                y=column.y,
                label=name,
                text=name,
                detail="Playing" if is_on else artist,
                glyph="pause" if is_on else "play",
                paper="#f4721e",
                effect=PlayTrack(track=i),
                is_on=is_on,
            )
        )


def _files(state: PhoneState, column: Column) -> None:
    for name, count in content.folders(state.seed):
        column.add(
            row(
                f"folder:{name}",
                y=column.y,
                label=name,
                text=name,
                detail=f"{count} files",
                glyph="files",
                paper="#8a6a4a",
            )
        )


def _chrome(state: PhoneState, column: Column) -> None:
    column.add(_field(state, "address", "Search or type address", (10, CONTENT_TOP + 2, WIDTH - 20, 26)))
    column.add_heading("Bookmarks")
    for name in ("News", "Recipes", "Trains", "Library"):
        column.add(
            row(
                f"bookmark:{name}",
                y=column.y,
                label=name,
                text=name,
                glyph="chrome",
                paper="#16b5cf",
                effect=Push(subscreen=name),
            )
        )


def _web_page(column: Column, address: str) -> tuple[str, Column]:
    column.add_heading(address)
    for line in ("This page was saved on the", "phone. There is no network", "behind it."):
        column.add_text(line)
    return address, column


def _calculator(state: PhoneState, column: Column) -> None:
    column.add(
        _place("display", "Display", "text", (14, 52, WIDTH - 28, 44), text=state.calculation or "0", ink="right")
    )
    _add_keypad(column, "789/456*123-C0=+", top=104, num_columns=4, key_height=46)


def _weather(state: PhoneState, column: Column) -> None:
    forecast = content.forecast(state.seed)
    _, sky, degrees = forecast[0]
    column.add(_place("now", "Now", "art", (0, CONTENT_TOP, WIDTH, 84), glyph="sky", text=f"{degrees}°|{sky}"))
    for day, later_sky, later_degrees in forecast[1:]:
        column.add(row(f"day:{day}", y=column.y, label=day, text=day, detail=f"{later_sky}, {later_degrees}°"))


_ROOTS: dict[str, Callable[[PhoneState, Column], None]] = {
    "phone": _phone,
    "messages": _messages,
    "mail": _mails,
    "notes": _notes,
    "contacts": _contacts,
    "clock": _clock,
    "camera": _camera,
    "gallery": _gallery,
    "calendar": _calendar,
    "maps": _maps,
    "music": _music,
    "files": _files,
    "chrome": _chrome,
    "calculator": _calculator,
    "weather": _weather,
}
