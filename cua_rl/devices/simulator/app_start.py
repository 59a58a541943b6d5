"""What the apps hold when a phone is made: the seed's choice, bent to what a task demands."""

from dataclasses import dataclass, replace

from cua_rl.devices.simulator import content
from cua_rl.devices.simulator.app_data import AppData, Contact
from cua_rl.devices.simulator.file_tree import add_file
from cua_rl.devices.simulator.home_folders import make_folder
from cua_rl.devices.simulator.home_layout import add_icon, remove_icon
from cua_rl.devices.simulator.state import PhoneState


@dataclass(frozen=True, slots=True, kw_only=True)
class AppStart:
    """What must hold in the apps when a rollout begins; everything else is the seed's choice."""

    contacts: tuple[Contact, ...] = ()
    """Who must be in the address book, with this number."""
    without_contacts: tuple[str, ...] = ()
    """Names that must not be there."""
    note: str | None = None
    """A note that must have been written."""
    alarm: str | None = None
    """An alarm that must be set."""
    is_alarm_on: bool = False
    folders: tuple[str, ...] = ()
    """Paths that must exist, such as "Downloads/"."""
    track: str | None = None
    """The title of a track that must be there."""
    off_home: tuple[str, ...] = ()
    """Apps that are installed, but have no icon on a home page."""
    on_home: tuple[str, ...] = ()
    """Apps from the store that have an icon where `off_home` left room."""
    home_folder: tuple[str, str, str] | None = None
    """Name of a folder on a home page, and the two apps in it, which must have icons on that page."""
    num_photos: int | None = None
    screenshots: tuple[str, ...] = ()
    """Screens of which a picture was taken."""


def fill_apps(state: PhoneState, start: AppStart) -> PhoneState:
    """The phone with the apps' content of its seed, and with what `start` demands."""
    state = replace(state, apps=_app_data(state.seed, start))
    for path in start.folders:
        state = add_file(state, path)
    for app in start.off_home:
        state = replace(state, home_pages=remove_icon(state.home_pages, app))
    for app in start.on_home:
        state = replace(state, home_pages=add_icon(state.home_pages, app))
    if start.home_folder is not None:
        state = make_folder(state, *start.home_folder)
    if start.num_photos is not None:
        state = replace(state, num_photos=start.num_photos)
    if start.note is not None:
        state = replace(state, notes=(*(note for note in state.notes if note != start.note), start.note))
    return state if start.alarm is None else _with_alarm(state, start.alarm, is_on=start.is_alarm_on)


def _app_data(seed: int, start: AppStart) -> AppData:
    return AppData(
        contacts=_contacts(seed, start),
        alarms=content.alarms(seed),
        tracks=_tracks(seed, start.track),
        screenshots=start.screenshots,
    )


def _contacts(seed: int, start: AppStart) -> tuple[Contact, ...]:
    settled = {contact.name for contact in start.contacts} | set(start.without_contacts)
    others = [Contact(name=name, number=number) for name, number in content.contacts(seed) if name not in settled]
    return tuple(sorted((*others, *start.contacts), key=lambda contact: contact.name))


def _tracks(seed: int, wanted: str | None) -> tuple[tuple[str, str], ...]:
    tracks = content.tracks(seed)
    if wanted is None or wanted in [title for title, _ in tracks]:
        return tracks
    return (*tracks[:-1], (wanted, tracks[-1][1]))


def _with_alarm(state: PhoneState, time: str, *, is_on: bool) -> PhoneState:
    alarms = state.apps.alarms if time in state.apps.alarms else (*state.apps.alarms, time)
    index = alarms.index(time)
    others = {alarm for alarm in state.alarms_on if alarm != index}
    alarms_on = tuple(sorted(others | {index} if is_on else others))
    return replace(state, alarms_on=alarms_on, apps=replace(state.apps, alarms=alarms))
