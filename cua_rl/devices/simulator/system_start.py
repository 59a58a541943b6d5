"""Drawing the system part of a phone from its seed, and bending it to what a task demands."""

from collections.abc import Container
from dataclasses import dataclass, replace
from random import Random

from cua_rl.devices.simulator.catalog import APPS, WALLPAPERS
from cua_rl.devices.simulator.state import PhoneState
from cua_rl.devices.simulator.system_catalog import (
    BLUETOOTH_DEVICES,
    EXTRA_ROWS,
    NETWORKS,
    SCREEN_LOCKS,
    STORE_APPS,
    SWITCHES,
    TIME_ZONES,
    find_app,
)
from cua_rl.devices.simulator.system_state import InstalledApp, Network, Notification, SystemState

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


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStart:
    """What must hold on the system pages when a rollout begins; the rest is the seed's choice."""

    extra_rows: tuple[str, ...] = ()
    """Rows that Settings has besides the plain ones, names of `EXTRA_ROWS`; they lie where the seed puts them."""
    saved_network: str = ""
    """A network that must be known, and not in use."""
    connected_network: str = ""
    """A network that must be known and in use."""
    locked_network: Network | None = None
    """A network that must be within reach, and not known."""
    store_app: str = ""
    """An app that must be installed and can be uninstalled."""
    running_app: str = ""
    """An app that must run and have something in its cache."""
    notifying_app: str = ""
    silent_app: str = ""
    on: tuple[str, ...] = ()
    """Names of `SWITCHES`."""
    off: tuple[str, ...] = ()
    not_wallpaper: int | None = None


def with_system(state: PhoneState, start: SystemStart | None) -> PhoneState:
    """The phone with the system part of its seed, bent as little as possible to what `start` demands."""
    demand = start or SystemStart()
    random = Random(f"system-{state.seed}")
    networks, connected = _networks(random, demand)
    notifications = _notifications(random)
    system = SystemState(
        networks=networks,
        connected_network=connected,
        bluetooth_devices=tuple(random.sample(BLUETOOTH_DEVICES, 3)),
        notifications=notifications,
        apps=_apps(random, demand, notifying={notification.app for notification in notifications}),
        screen_lock=random.choice(SCREEN_LOCKS),
        time_zone=random.choice(list(TIME_ZONES)),
        switched_on=_switches(random, demand),
    )
    rows = _rows(Random(f"extra-rows-{state.seed}"), state.setting_rows, demand.extra_rows)
    wallpaper = state.wallpaper
    if wallpaper == demand.not_wallpaper:
        wallpaper = (wallpaper + random.randrange(1, len(WALLPAPERS))) % len(WALLPAPERS)
    return replace(state, system=system, setting_rows=rows, wallpaper=wallpaper)


def _networks(random: Random, demand: SystemStart) -> tuple[tuple[Network, ...], str]:
    locked = demand.locked_network
    wanted = [name for name in (demand.connected_network, demand.saved_network) if name]
    taken = {*wanted, locked.name if locked else ""}
    drawn = [name for name in random.sample(NETWORKS, len(NETWORKS)) if name not in taken]
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


def _notifications(random: Random) -> tuple[Notification, ...]:
    chosen = random.sample(_NOTIFICATIONS, random.randrange(2, 5))
    return tuple(Notification(app=app, title=title, text=text) for app, title, text in chosen)


def _apps(random: Random, demand: SystemStart, *, notifying: Container[str]) -> tuple[InstalledApp, ...]:
    store = [demand.store_app] if demand.store_app else []
    store += [app for app in random.sample(list(STORE_APPS), len(STORE_APPS)) if app not in store]
    names = sorted((*APPS, *store[:_NUM_STORE_APPS]), key=lambda app: find_app(app).label)
    return tuple(_installed(random, app, demand, has_notified=app in notifying) for app in names)


def _installed(random: Random, app: str, demand: SystemStart, *, has_notified: bool) -> InstalledApp:
    is_running, may_notify = random.random() < 0.5, random.random() < 0.7 or has_notified
    return InstalledApp(
        app=app,
        size_mb=random.randrange(12, 400),
        cache_mb=random.randrange(2, 90),
        is_running=is_running or app == demand.running_app,
        may_notify=(may_notify or app == demand.notifying_app) and app != demand.silent_app,
    )


def _switches(random: Random, demand: SystemStart) -> tuple[str, ...]:
    drawn = {name for name in SWITCHES if random.random() < 0.5} | {"developer_options"}
    return tuple(sorted((drawn | {*demand.on}) - {*demand.off}))


def _rows(random: Random, plain: tuple[str, ...], extra: tuple[str, ...]) -> tuple[str, ...]:
    rows = list(plain)
    for name in extra:
        replaced = EXTRA_ROWS[name].replaces
        if replaced:
            rows[rows.index(replaced)] = name
        else:
            rows.insert(random.randrange(len(rows) + 1), name)
    return tuple(rows)
