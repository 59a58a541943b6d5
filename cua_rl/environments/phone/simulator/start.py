"""Build the initial state of a phone from a seed and a task's constraints."""

from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from cua_rl.environments.phone.simulator import catalog, content
from cua_rl.environments.phone.simulator.apps.files import add_file
from cua_rl.environments.phone.simulator.launcher.icons import add_icon, in_cell, make_folder, remove_icon
from cua_rl.environments.phone.simulator.state import (
    AppData,
    Contact,
    IconPlace,
    InstalledApp,
    Network,
    Notification,
    PhoneState,
    SystemState,
)

_NUM_NETWORKS = 6
_NUM_SAVED_NETWORKS = 3
_NUM_STORE_APPS = 4
_NOTIFICATIONS = (
    ("mail", "New mail", "Your invoice is ready"),
    ("mail", "Grace", "Agenda for Thursday"),
    ("messages", "Emma", "Are you on your way?"),
    ("messages", "Noah", "Thanks for yesterday!"),
    ("calendar", "Team meeting", "Starts in 15 minutes"),
    ("calendar", "Dentist", "Tomorrow at 08:30"),
    ("chrome", "Download complete", "timetable.pdf"),
    ("weather", "Rain expected", "From 16:00 this afternoon"),
    ("clock", "Missed alarm", "06:45"),
    ("maps", "Traffic on your route", "12 minutes slower than usual"),
    ("files", "Storage is filling up", "Free some space"),
    ("phone", "Missed call", "555 2040"),
)
_JITTER_X, _JITTER_Y = 13, 4
_CHANCE_ON = {catalog.Toggle.AIRPLANE_MODE: 0.1, catalog.Toggle.DARK_THEME: 0.25}


@dataclass(frozen=True, slots=True, kw_only=True)
class AppStart:
    """Constraints on the initial content of apps; the seed decides everything else."""

    contacts: tuple[Contact, ...] = ()
    """Contacts that must be in the address book."""
    without_contacts: tuple[str, ...] = ()
    """Names that must not be in the address book."""
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
    """Screens of which a screenshot was taken."""


def fill_apps(state: PhoneState, start: AppStart) -> PhoneState:
    """Add the seed's app content, changed only where `start` requires it."""
    settled = {contact.name for contact in start.contacts} | set(start.without_contacts)
    drawn = (Contact(name=name, number=number) for name, number in content.contacts(state.seed) if name not in settled)
    tracks = content.tracks(state.seed)
    if start.track is not None and start.track not in [title for title, _ in tracks]:
        tracks = (*tracks[:-1], (start.track, tracks[-1][1]))
    alarms, alarms_on = content.alarms(state.seed), {*state.alarms_on}
    if start.alarm is not None:
        alarms = alarms if start.alarm in alarms else (*alarms, start.alarm)
        others = alarms_on - {alarms.index(start.alarm)}
        alarms_on = {*others, alarms.index(start.alarm)} if start.is_alarm_on else others
    data = AppData(
        contacts=tuple(sorted((*drawn, *start.contacts), key=lambda contact: contact.name)),
        alarms=alarms,
        tracks=tracks,
        screenshots=start.screenshots,
    )
    state = replace(state, apps=data, alarms_on=tuple(sorted(alarms_on)))
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
    return state


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStart:
    """Constraints on the initial state of the system pages; the seed decides everything else."""

    extra_rows: tuple[str, ...] = ()
    """Names of `EXTRA_ROWS` to add to Settings, at positions drawn from the seed."""
    saved_network: str = ""
    """A network that must be saved but not connected."""
    connected_network: str = ""
    """A network that must be saved and connected."""
    locked_network: Network | None = None
    """A network that must be in range but not saved."""
    store_app: str = ""
    """An app that must be installed and can be uninstalled."""
    running_app: str = ""
    """An app that must be running and have a non-empty cache."""
    notifying_app: str = ""
    silent_app: str = ""
    on: tuple[str, ...] = ()
    """Names of `SWITCHES`."""
    off: tuple[str, ...] = ()
    not_wallpaper: int | None = None


def with_system(state: PhoneState, start: SystemStart | None) -> PhoneState:
    """Add the seed's networks, apps and notifications, changed only where `start` requires it."""
    demand = start or SystemStart()
    random = Random(f"system-{state.seed}")
    networks, connected = _networks(random, demand)
    notifications = [
        Notification(app=app, title=title, text=text)
        for app, title, text in random.sample(_NOTIFICATIONS, random.randrange(2, 5))
    ]
    system = SystemState(
        networks=networks,
        connected_network=connected,
        bluetooth_devices=tuple(random.sample(catalog.BLUETOOTH_DEVICES, 3)),
        notifications=tuple(notifications),
        apps=tuple(_apps(random, demand, notifying={notification.app for notification in notifications})),
        screen_lock=random.choice(catalog.SCREEN_LOCKS),
        time_zone=random.choice(list(catalog.TIME_ZONES)),
        switched_on=tuple(
            sorted(
                ({name for name in catalog.SWITCHES if random.random() < 0.5} | {"developer_options", *demand.on})
                - {*demand.off}
            )
        ),
    )
    rows, row_random = list(state.setting_rows), Random(f"extra-rows-{state.seed}")
    for name in demand.extra_rows:
        replaced = catalog.EXTRA_ROWS[name].replaces
        if replaced:
            rows[rows.index(replaced)] = name
        else:
            rows.insert(row_random.randrange(len(rows) + 1), name)
    wallpaper = state.wallpaper
    if wallpaper == demand.not_wallpaper:
        wallpaper = (wallpaper + random.randrange(1, len(catalog.WALLPAPERS))) % len(catalog.WALLPAPERS)
    return replace(state, system=system, setting_rows=tuple(rows), wallpaper=wallpaper)


def _networks(random: Random, demand: SystemStart) -> tuple[tuple[Network, ...], str]:
    locked = demand.locked_network
    wanted = [name for name in (demand.connected_network, demand.saved_network) if name]
    taken = {*wanted, locked.name if locked else ""}
    drawn = [name for name in random.sample(catalog.NETWORKS, len(catalog.NETWORKS)) if name not in taken]
    saved = [*wanted, *drawn][:_NUM_SAVED_NETWORKS]
    others = [name for name in drawn if name not in saved][: _NUM_NETWORKS - len(saved) - (locked is not None)]
    networks = [Network(name=name, is_saved=True, password=_password(random)) for name in saved]
    networks += [Network(name=name, password=random.choice(("", _password(random)))) for name in others]
    networks += [] if locked is None else [locked]
    random.shuffle(networks)
    usable = [name for name in saved if name != demand.saved_network]
    return tuple(networks), demand.connected_network or random.choice(["", *usable])


def _password(random: Random) -> str:
    return "".join(random.choices("abcdefghkmnpqrstuvwxyz", k=8))


def _apps(random: Random, demand: SystemStart, *, notifying: Container[str]) -> Iterator[InstalledApp]:
    store = [demand.store_app] if demand.store_app else []
    store += [app for app in random.sample(list(catalog.STORE_APPS), len(catalog.STORE_APPS)) if app not in store]
    for app in sorted((*catalog.APPS, *store[:_NUM_STORE_APPS]), key=lambda app: catalog.find_app(app).label):
        is_running, may_notify = random.random() < 0.5, random.random() < 0.7 or app in notifying
        yield InstalledApp(
            app=app,
            size_mb=random.randrange(12, 400),
            cache_mb=random.randrange(2, 90),
            is_running=is_running or app == demand.running_app,
            may_notify=(may_notify or app == demand.notifying_app) and app != demand.silent_app,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Constraints on the phone's initial state; the seed decides everything else."""

    first_page: tuple[str, ...] = ("settings",)
    """Apps that must be on the first home page."""
    second_page: tuple[str, ...] = ()
    first_rows: tuple[str, ...] = ()
    """Rows of Settings that must show without scrolling."""
    hidden_rows: tuple[str, ...] = ()
    """Rows of Settings that must show only after scrolling."""
    on: tuple[catalog.Toggle, ...] = ()
    off: tuple[catalog.Toggle, ...] = ()
    brightness_level: int | None = None
    media_volume: int | None = None
    not_screen_timeout_ms: int | None = None
    app: str | None = None
    """The app in the foreground; None is the home screen."""
    home_page: int = 0
    recent_apps: tuple[str, ...] = ()
    contact: str | None = None
    """A person with whom text messages were exchanged."""
    apps: AppStart = field(default_factory=AppStart)
    system: SystemStart | None = None
    """Constraints on system pages; None gives a phone whose Settings has only the basic rows."""


def make_phone_state(seed: int, start: Start | None = None) -> PhoneState:
    """The phone of this seed, changed only where `start` requires it."""
    start = start or Start()
    random = Random(f"phone-{seed}")
    timeouts = [timeout for timeout in catalog.SCREEN_TIMEOUTS_MS if timeout != start.not_screen_timeout_ms]
    threads = content.threads(seed)
    if start.contact is not None and start.contact not in [thread.contact for thread in threads]:
        threads = (*threads[:-1], replace(threads[-1], contact=start.contact))
    state = PhoneState(
        seed=seed,
        home_pages=tuple(_home_pages(random, start)),
        setting_rows=_setting_rows(random, start),
        wallpaper=random.randrange(len(catalog.WALLPAPERS)),
        minute_of_day=random.randrange(24 * 60),
        battery_pct=random.randrange(15, 101),
        enabled=_enabled(random, start),
        brightness_level=random.randrange(40, 200),
        screen_timeout_ms=random.choice(timeouts),
        media_volume=random.randrange(3, 13),
        notes=content.notes(seed),
        threads=threads,
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


def _home_pages(random: Random, start: Start) -> Iterator[tuple[IconPlace, ...]]:
    free = [app for app in catalog.APPS if app not in start.first_page and app not in start.second_page]
    random.shuffle(free)
    num_free_first = catalog.NUM_ICONS_PER_PAGE - len(start.first_page)
    pages = [*start.first_page, *free[:num_free_first]], [*start.second_page, *free[num_free_first:]]
    for page in pages:
        random.shuffle(page)
        cells = [in_cell(app, position) for position, app in enumerate(page)]
        yield tuple(
            replace(
                cell, x=cell.x + random.randint(-_JITTER_X, _JITTER_X), y=cell.y + random.randint(-_JITTER_Y, _JITTER_Y)
            )
            for cell in cells
        )


def _setting_rows(random: Random, start: Start) -> tuple[str, ...]:
    rows = list(catalog.SETTINGS)
    random.shuffle(rows)
    wanted = {**dict.fromkeys(start.first_rows, True), **dict.fromkeys(start.hidden_rows, False)}
    for row, is_first in wanted.items():
        places = range(catalog.NUM_ROWS_VISIBLE) if is_first else range(catalog.NUM_ROWS_VISIBLE, len(rows))
        place = rows.index(row)
        if place not in places:
            other = random.choice([i for i in places if rows[i] not in wanted])
            rows[place], rows[other] = rows[other], rows[place]
    return tuple(rows)


def _enabled(random: Random, start: Start) -> tuple[catalog.Toggle, ...]:
    drawn = {toggle for toggle in catalog.Toggle if random.random() < _CHANCE_ON.get(toggle, 0.5)}
    if catalog.Toggle.AIRPLANE_MODE in drawn:
        drawn -= {catalog.Toggle.WIFI, catalog.Toggle.BLUETOOTH}
    return tuple(sorted((drawn | set(start.on)) - set(start.off)))
