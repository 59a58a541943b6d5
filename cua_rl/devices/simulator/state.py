"""The whole state of the phone as an immutable tree; `PhoneState.to_json` is plain JSON."""

import json
from dataclasses import asdict, dataclass, field, replace
from typing import Literal, Self

from cua_rl.devices.simulator.app_data import AppData
from cua_rl.devices.simulator.catalog import HOME_PACKAGE, Toggle
from cua_rl.devices.simulator.system_catalog import find_app
from cua_rl.devices.simulator.system_state import Shade, SystemState

Field = Literal[
    "note",
    "message",
    "address",
    "name",
    "number",
    "search",
    "folder",
    "hour",
    "minute",
    "minutes",
    "drawer",
    "password",
]
KeyboardLayer = Literal["lower", "upper", "symbols"]


@dataclass(frozen=True, slots=True, kw_only=True)
class IconPlace:
    """Where an app's icon sits on its home page: top left corner, logical units."""

    app: str
    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text message; `is_mine` if the phone's owner sent it."""

    text: str
    is_mine: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """The text messages exchanged with one person."""

    contact: str
    texts: tuple[Text, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PhoneState:
    """Everything that decides what the phone shows and does."""

    seed: int
    home_pages: tuple[tuple[IconPlace, ...], ...]
    """Icons in reading order, one tuple per page."""
    setting_rows: tuple[str, ...]
    """Rows of the Settings app, from the top."""
    wallpaper: int
    minute_of_day: int
    battery_pct: int
    enabled: tuple[Toggle, ...] = ()
    """The toggles that are on, sorted."""
    brightness_level: int = 128
    """1-255."""
    screen_timeout_ms: int = 60_000
    media_volume: int = 7
    """0-15."""
    notes: tuple[str, ...] = ()
    threads: tuple[Thread, ...] = ()
    num_photos: int = 6
    track: int | None = None
    """Index of the track that plays."""
    dialled: str = ""
    calls: tuple[str, ...] = ()
    """Numbers that were called, last one last."""
    calculation: str = ""
    alarms_on: tuple[int, ...] = (0,)
    system: SystemState = field(default_factory=SystemState)
    apps: AppData = field(default_factory=AppData)

    app: str | None = None
    """None is the home screen."""
    subscreens: tuple[str, ...] = ()
    """Screens opened inside the app, the current one last."""
    home_page: int = 0
    scroll: int = 0
    """How far the current list is scrolled down, logical units."""
    recent_apps: tuple[str, ...] = ()
    """Most recent first."""
    is_recents_open: bool = False
    shade: Shade | None = None
    """What was pulled down over the screen."""
    is_screen_on: bool = True
    is_volume_shown: bool = False
    focus: Field | None = None
    draft: str = ""
    """What stands in the text field of the current screen."""
    draft_field: Field | None = None
    """Which field `draft` stands in, on a screen that has several."""
    form: tuple[tuple[Field, str], ...] = ()
    """What stands in the screen's other fields."""
    keyboard: KeyboardLayer = "lower"

    @property
    def screen(self) -> str:
        """The current screen's name: "home", "recents", an app such as "settings", or "settings/display"."""
        if not self.is_screen_on:
            return "off"
        if self.shade is not None:
            return self.shade
        if self.is_recents_open:
            return "recents"
        return "/".join(("home" if self.app is None else self.app, *self.subscreens[-1:]))

    @property
    def package(self) -> str:
        """The package name of the app in the foreground."""
        return HOME_PACKAGE if self.app is None else find_app(self.app).package

    @property
    def clock(self) -> str:
        """The time of day, such as "09:05"."""
        return f"{self.minute_of_day // 60:02d}:{self.minute_of_day % 60:02d}"

    def is_on(self, toggle: Toggle) -> bool:
        """Whether the toggle is on."""
        return toggle in self.enabled

    def with_toggle(self, toggle: Toggle, is_on: bool) -> Self:
        """The state with one toggle set, and nothing else touched."""
        others = {other for other in self.enabled if other != toggle}
        return replace(self, enabled=tuple(sorted(others | {toggle} if is_on else others)))

    def to_json(self) -> str:
        """The whole state as JSON with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True)
