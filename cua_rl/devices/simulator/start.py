"""Making a phone from a seed: which apps lie where, what is on, what was written; and what a task demands of it."""

from collections.abc import Container
from dataclasses import dataclass, field, replace
from random import Random

from cua_rl.devices.simulator import content
from cua_rl.devices.simulator.app_start import AppStart, fill_apps
from cua_rl.devices.simulator.catalog import (
    APPS,
    NUM_ICONS_PER_PAGE,
    NUM_ROWS_VISIBLE,
    SCREEN_TIMEOUTS_MS,
    SETTINGS,
    WALLPAPERS,
    Toggle,
)
from cua_rl.devices.simulator.state import IconPlace, PhoneState, Thread
from cua_rl.devices.simulator.system_start import SystemStart, with_system

_CELL_X, _CELL_Y, _CELL_WIDTH, _CELL_HEIGHT = 0, 46, 96, 60
_JITTER_X, _JITTER_Y = 13, 4
ICON_SIZE = 34

_CHANCE_ON = {Toggle.AIRPLANE_MODE: 0.1, Toggle.DARK_THEME: 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What must hold when a rollout begins, whatever the seed; everything else is the seed's choice."""

    first_page: tuple[str, ...] = ("settings",)
    """Apps that must lie on the first home page."""
    second_page: tuple[str, ...] = ()
    first_rows: tuple[str, ...] = ()
    """Rows of Settings that must show without scrolling."""
    hidden_rows: tuple[str, ...] = ()
    """Rows of Settings that must show only after scrolling."""
    on: tuple[Toggle, ...] = ()
    off: tuple[Toggle, ...] = ()
    brightness_level: int | None = None
    media_volume: int | None = None
    not_screen_timeout_ms: int | None = None
    app: str | None = None
    """The app in the foreground; None is the home screen."""
    home_page: int = 0
    recent_apps: tuple[str, ...] = ()
    contact: str | None = None
    """Somebody with whom text messages were exchanged."""
    apps: AppStart = field(default_factory=AppStart)
    system: SystemStart | None = None
    """What must hold on system pages; None is a phone whose Settings have the plain rows only."""


def make_phone_state(seed: int, start: Start | None = None) -> PhoneState:
    """The phone of this seed, bent as little as possible to what `start` demands."""
    start = start or Start()
    random = Random(f"phone-{seed}")
    timeouts = [timeout for timeout in SCREEN_TIMEOUTS_MS if timeout != start.not_screen_timeout_ms]
    state = PhoneState(
        seed=seed,
        home_pages=_home_pages(random, start),
        setting_rows=_setting_rows(random, start),
        wallpaper=random.randrange(len(WALLPAPERS)),
        minute_of_day=random.randrange(24 * 60),
        battery_pct=random.randrange(15, 101),
        enabled=_enabled(random, start),
        brightness_level=random.randrange(40, 200),
        screen_timeout_ms=random.choice(timeouts),
        media_volume=random.randrange(3, 13),
        notes=content.notes(seed),
        threads=_threads(seed, start),
        num_photos=random.randrange(3, 9),
        app=start.app,
        home_page=start.home_page,
        recent_apps=start.recent_apps if start.app is None else (start.app, *start.recent_apps),
    )
    if start.brightness_level is not None:
        state = replace(state, brightness_level=start.brightness_level)
    if start.media_volume is not None:
        state = replace(state, media_volume=start.media_volume)
    return with_system(fill_apps(state, start.apps), start.system)


def _home_pages(random: Random, start: Start) -> tuple[tuple[IconPlace, ...], ...]:
    free = [app for app in APPS if app not in start.first_page and app not in start.second_page]
    random.shuffle(free)
    num_free_first = NUM_ICONS_PER_PAGE - len(start.first_page)
    first = [*start.first_page, *free[:num_free_first]]
    second = [*start.second_page, *free[num_free_first:]]
    return tuple(_home_page(random, apps) for apps in (first, second))


def _home_page(random: Random, apps: list[str]) -> tuple[IconPlace, ...]:
    random.shuffle(apps)
    return tuple(_icon_place(random, app, position) for position, app in enumerate(apps))


def _icon_place(random: Random, app: str, position: int) -> IconPlace:
    row, column = divmod(position, 2)
    x = _CELL_X + column * _CELL_WIDTH + (_CELL_WIDTH - ICON_SIZE) // 2
    y = _CELL_Y + row * _CELL_HEIGHT + 5
    return IconPlace(app=app, x=x + random.randint(-_JITTER_X, _JITTER_X), y=y + random.randint(-_JITTER_Y, _JITTER_Y))


def _setting_rows(random: Random, start: Start) -> tuple[str, ...]:
    rows = list(SETTINGS)
    random.shuffle(rows)
    wanted = {**dict.fromkeys(start.first_rows, True), **dict.fromkeys(start.hidden_rows, False)}
    for row, is_first in wanted.items():
        _move_row(random, rows, row, is_first=is_first, keep=wanted)
    return tuple(rows)


def _move_row(random: Random, rows: list[str], row: str, *, is_first: bool, keep: Container[str]) -> None:
    places = range(NUM_ROWS_VISIBLE) if is_first else range(NUM_ROWS_VISIBLE, len(rows))
    place = rows.index(row)
    if place not in places:
        other = random.choice([i for i in places if rows[i] not in keep])
        rows[place], rows[other] = rows[other], rows[place]


def _threads(seed: int, start: Start) -> tuple[Thread, ...]:
    threads = content.threads(seed)
    if start.contact is None or start.contact in (thread.contact for thread in threads):
        return threads
    return (*threads[:-1], replace(threads[-1], contact=start.contact))


def _enabled(random: Random, start: Start) -> tuple[Toggle, ...]:
    drawn = {toggle for toggle in Toggle if random.random() < _CHANCE_ON.get(toggle, 0.5)}
    if Toggle.AIRPLANE_MODE in drawn:
        drawn -= {Toggle.WIFI, Toggle.BLUETOOTH}
    return tuple(sorted((drawn | set(start.on)) - set(start.off)))
