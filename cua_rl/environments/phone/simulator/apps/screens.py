"""The screens of every app but Settings: plain, but working."""

from collections.abc import Callable

from cua_rl.environments.phone.simulator import content
from cua_rl.environments.phone.simulator.apps.browser import build_chrome, build_chrome_page
from cua_rl.environments.phone.simulator.apps.calculator import build_calculator
from cua_rl.environments.phone.simulator.apps.clock import build_clock, build_clock_page
from cua_rl.environments.phone.simulator.apps.contacts import (
    build_contacts,
    build_contacts_page,
    build_phone,
    build_phone_page,
)
from cua_rl.environments.phone.simulator.apps.files import build_files, build_files_page
from cua_rl.environments.phone.simulator.apps.messages import build_messages, build_messages_page
from cua_rl.environments.phone.simulator.apps.notes import build_note, build_notes
from cua_rl.environments.phone.simulator.catalog import WIDTH, find_app
from cua_rl.environments.phone.simulator.controls import CONTENT_TOP, Column, person_row, place, row
from cua_rl.environments.phone.simulator.elements import Do, Operate, Push
from cua_rl.environments.phone.simulator.state import PhoneState


def build_app(state: PhoneState, app: str) -> tuple[str, Column]:
    """The title and the elements of the app's current screen."""
    column = Column(top=CONTENT_TOP)
    if not state.subscreens:
        _ROOTS.get(app, build_store_app)(state, column)
        return find_app(app).label, column
    return _PAGES[app](state, column, state.subscreens[-1]), column


def build_mails(state: PhoneState, column: Column) -> None:
    """The mails, newest first."""
    for i, (sender, about) in enumerate(content.mails(state.seed)):
        column.stack(person_row(f"mail:{i}", sender, about, str(i), height=42))


def build_mail(state: PhoneState, column: Column, subscreen: str) -> str:
    sender, subject_line = content.mails(state.seed)[int(subscreen)]
    column.add_heading(f"From {sender}")
    for line in (*content.MAIL_LINES, sender):
        column.add_text(line)
    return subject_line


def build_camera(state: PhoneState, column: Column) -> None:
    column.add(place("view", "View", "art", (0, CONTENT_TOP, WIDTH, 196), glyph="viewfinder"))
    shutter = Do(command="take_photo")
    column.add(
        place("shutter", "Shutter", "round_button", (75, 248, 42, 42), effect=shutter, glyph="shutter", paper="#e8eaee")
    )
    column.add(place("count", "Photos", "text", (10, 262, 62, 14), text=f"{state.num_photos} photos"))


def build_gallery(state: PhoneState, column: Column) -> None:
    """Photos, then screenshots."""
    names = [f"photo:{i}" for i in range(state.num_photos)]
    names += [f"screenshot:{i}" for i in range(len(state.apps.screenshots))]
    for i, name in enumerate(names):
        rect = (7 + i % 3 * 60, CONTENT_TOP + 4 + i // 3 * 60, 56, 56)
        effect = Push(subscreen=name)
        column.add(place(name, _label(name), "photo", rect, text=_photo_name(state, name), effect=effect))


def _label(name: str) -> str:
    """ "photo:0" is called "Photo 1"."""
    kind, _, index = name.partition(":")
    return f"{kind.capitalize()} {int(index) + 1}"


def build_picture(state: PhoneState, column: Column, subscreen: str) -> str:
    is_photo = subscreen.startswith("photo:")
    rect = (6, CONTENT_TOP + 6, WIDTH - 12, 180) if is_photo else (46, CONTENT_TOP + 6, 100, 166)
    column.add(place("picture", "Picture", "photo", rect, text=_photo_name(state, subscreen)))
    column.y += 8
    column.add_text("Taken on this phone" if is_photo else "Saved in Pictures/Screenshots")
    return _label(subscreen)


def _photo_name(state: PhoneState, name: str) -> str:
    """What the picture is drawn from: a number for photos, the screen that it shows for screenshots."""
    kind, _, index = name.partition(":")
    return str(state.seed * 31 + int(index)) if kind == "photo" else f"screen:{state.apps.screenshots[int(index)]}"


def build_calendar(state: PhoneState, column: Column) -> None:
    """The month, and what comes next."""
    column.add(place("month", "Month", "art", (8, CONTENT_TOP, WIDTH - 16, 180), glyph="month", text=str(state.seed)))
    column.add_heading("Next")
    column.add_text("09:30  Team meeting")
    column.add_text("18:00  Dinner")


def build_map(state: PhoneState, column: Column) -> None:
    column.add(place("map", "Map", "art", (0, CONTENT_TOP, WIDTH, 254), glyph="map", text=str(state.seed)))


def build_music(state: PhoneState, column: Column) -> None:
    """The tracks, one of which may play."""
    for i, (name, artist) in enumerate(state.apps.tracks):
        is_on = i == state.track
        column.stack(
            row(
                f"track:{i}",
                text=name,
                detail="Playing" if is_on else artist,
                glyph="pause" if is_on else "play",
                paper="#f4721e",
                effect=Operate(command="play_track", target=str(i)),
                is_on=is_on,
            )
        )


def build_store_app(state: PhoneState, column: Column) -> None:
    app = state.app or ""
    banner = (12, CONTENT_TOP + 6, WIDTH - 24, 60)
    column.add(place("banner", "Banner", "art", banner, glyph="banner", text=find_app(app).label))
    column.add_text("Welcome back.")
    column.add_text("There is nothing new today.")


def build_weather(state: PhoneState, column: Column) -> None:
    forecast = content.forecast(state.seed)
    _, sky, degrees = forecast[0]
    column.add(place("now", "Now", "art", (0, CONTENT_TOP, WIDTH, 84), glyph="sky", text=f"{degrees}°|{sky}"))
    for day, later_sky, later_degrees in forecast[1:]:
        column.stack(row(f"day:{day}", text=day, detail=f"{later_sky}, {later_degrees}°"))


_ROOTS: dict[str, Callable[[PhoneState, Column], None]] = {
    "phone": build_phone,
    "messages": build_messages,
    "mail": build_mails,
    "notes": build_notes,
    "contacts": build_contacts,
    "clock": build_clock,
    "camera": build_camera,
    "gallery": build_gallery,
    "calendar": build_calendar,
    "maps": build_map,
    "music": build_music,
    "files": build_files,
    "chrome": build_chrome,
    "calculator": build_calculator,
    "weather": build_weather,
}

_PAGES: dict[str, Callable[[PhoneState, Column, str], str]] = {
    "phone": build_phone_page,
    "messages": build_messages_page,
    "mail": build_mail,
    "notes": build_note,
    "contacts": build_contacts_page,
    "clock": build_clock_page,
    "gallery": build_picture,
    "files": build_files_page,
    "chrome": build_chrome_page,
}
"""Builders of an app's further screens, by the name of the screen; they answer its title."""
