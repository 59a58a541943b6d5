"""What the apps keep: people, alarms, files, tracks, what was looked up; part of the phone's state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    """Somebody in the address book."""

    name: str
    number: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HomeFolder:
    """A folder of apps on a home page."""

    name: str
    apps: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppData:
    """Everything that apps remember beside what `PhoneState` holds itself."""

    contacts: tuple[Contact, ...] = ()
    """Sorted by name."""
    alarms: tuple[str, ...] = ()
    """Times such as "06:45", in the order in which they were set."""
    timer_s: int = 0
    """What the timer was started with; 0 when it does not run."""
    tracks: tuple[tuple[str, str], ...] = ()
    """(title, artist)."""
    created_files: tuple[str, ...] = ()
    """Paths below the storage's root, beside those that the seed gives; folders end with a slash."""
    deleted_files: tuple[str, ...] = ()
    screenshots: tuple[str, ...] = ()
    """What each screenshot shows: the name of a screen."""
    home_folders: tuple[HomeFolder, ...] = ()
    """Folders on the home pages."""

    def number_of(self, name: str) -> str | None:
        """The phone number of a contact."""
        return next((contact.number for contact in self.contacts if contact.name == name), None)

    def name_of(self, number: str) -> str | None:
        """The contact with a phone number; spaces do not matter."""
        plain = number.replace(" ", "")
        return next((contact.name for contact in self.contacts if contact.number.replace(" ", "") == plain), None)
