"""Families of templates in the shade and on the pages about apps: one function per kind of task."""

from collections.abc import Sequence
from random import Random

from cua_rl.environments.phone.demo.families.basic import toggle_start
from cua_rl.environments.phone.demo.families.settings import (
    LIST_TURNS,
    SCROLL_TURNS,
    on_page,
    settings_row,
    system_start,
    tap_on,
    truth,
)
from cua_rl.environments.phone.demo.template import Instance, Move, PullShade, Tell, family, tap
from cua_rl.environments.phone.simulator.catalog import APPS, QUICK_TILES, Toggle, find_app
from cua_rl.environments.phone.simulator.start import Start, SystemStart
from cua_rl.tasks.goal import Goal

_APP_TURNS = SCROLL_TURNS + LIST_TURNS
_PULL = Move(screen="home", operation=PullShade())
_PULL_AGAIN = Move(screen="notifications", operation=PullShade())
_SPOKEN = {**QUICK_TILES, Toggle.AIRPLANE_MODE: "Airplane mode", Toggle.DO_NOT_DISTURB: "Do not disturb"}


@family(max_turns=4, category="system", difficulty="easy", tags=("system_task", "notifications"))
def open_notifications(random: Random) -> Instance:
    goal = Goal(query="shade", expected="notifications")
    return Instance(instruction="Open the notifications.", start=Start(), goal=goal, route=(_PULL,))


@family(max_turns=5, category="system", difficulty="easy", tags=("system_task", "notifications"))
def open_quick_settings(random: Random) -> Instance:
    """Pull the shade down twice."""
    goal = Goal(query="shade", expected="quick_settings")
    return Instance(instruction="Open the quick settings.", start=Start(), goal=goal, route=(_PULL, _PULL_AGAIN))


@family(max_turns=5, category="system", tags=("system_task", "notifications"))
def clear_notifications(random: Random) -> Instance:
    return Instance(
        instruction="Clear all notifications.",
        start=Start(),
        goal=Goal(query="notification_count", expected="0"),
        route=(_PULL, tap("notifications", "Clear all")),
    )


@family(max_turns=6, category="system", tags=("system_task", "quick_tile"))
def switch_quick_tile(random: Random, toggle: Toggle, *, turn_on: bool | None = None) -> Instance:
    """Switch a toggle by its tile, on or off (None: drawn by the seed); switching it in Settings does not count."""
    if turn_on is None:
        turn_on = random.random() < 0.5
    return Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} {_SPOKEN[toggle]} with its tile in the quick settings.",
        start=toggle_start(toggle, turn_on=turn_on),
        goal=Goal(query=f"quick_tile:{toggle.value}", expected=truth(turn_on)),
        route=(_PULL, _PULL_AGAIN, tap("quick_settings", QUICK_TILES[toggle])),
    )


@family(max_turns=6 + _APP_TURNS, category="settings", difficulty="hard", tags=("system_task", "app_info"))
def open_app_info(random: Random, app: str) -> Instance:
    instruction = f"Open the app info of {APPS[app].label}."
    goal = Goal(query="current_screen", expected=f"settings/app:{app}")
    return _app_instance(instruction, app, SystemStart(), goal)


@family(max_turns=7 + _APP_TURNS, category="settings", difficulty="hard", tags=("system_task", "app_notifications"))
def switch_app_notifications(random: Random, apps: Sequence[str], *, turn_on: bool) -> Instance:
    app = random.choice(apps)
    notifying, silent = ("", app) if turn_on else (app, "")
    system = SystemStart(notifying_app=notifying, silent_app=silent)
    return _app_instance(
        f"Turn {'on' if turn_on else 'off'} the notifications of {APPS[app].label}.",
        app,
        system,
        Goal(query=f"app_notifications:{APPS[app].package}", expected=truth(turn_on)),
        tap_on(f"app:{app}", "Notifications"),
    )


@family(max_turns=8 + _APP_TURNS, category="settings", difficulty="hard", tags=("system_task", "app_info"))
def force_stop(random: Random, app: str) -> Instance:
    """Stop an app that runs, and confirm it."""
    return _app_instance(
        f"Force stop {APPS[app].label}.",
        app,
        SystemStart(running_app=app),
        Goal(query=f"app_running:{APPS[app].package}", expected="false"),
        tap_on(f"app:{app}", "Force stop"),
        tap_on(f"ask:force_stop:{app}", "OK"),
    )


@family(max_turns=8 + _APP_TURNS, category="settings", difficulty="hard", tags=("system_task", "app_info"))
def clear_cache(random: Random, app: str) -> Instance:
    return _app_instance(
        f"Clear the cache of {APPS[app].label}.",
        app,
        SystemStart(running_app=app),
        Goal(query=f"cache_cleared:{APPS[app].package}", expected="true"),
        tap_on(f"app:{app}", "Storage"),
        tap_on(f"app_storage:{app}", "Clear cache"),
    )


@family(max_turns=8 + _APP_TURNS, category="settings", difficulty="hard", tags=("system_task", "app_info"))
def uninstall_app(random: Random, apps: Sequence[str]) -> Instance:
    """Uninstall an app that came from the store, and confirm it."""
    app = random.choice(apps)
    spec = find_app(app)
    return _app_instance(
        f"Uninstall {spec.label}.",
        app,
        SystemStart(store_app=app),
        Goal(query=f"app_installed:{spec.package}", expected="false"),
        tap_on(f"app:{app}", "Uninstall"),
        tap_on(f"ask:uninstall:{app}", "OK"),
    )


def _app_instance(instruction: str, app: str, system: SystemStart, goal: Goal, *moves: Move) -> Instance:
    route = settings_row("apps", tap_on("apps", find_app(app).label), *moves)
    return Instance(instruction=instruction, start=system_start(system), goal=goal, route=route)


@family(max_turns=7 + _APP_TURNS, category="system", difficulty="hard", tags=("system_task", "question"))
def check_app_storage(random: Random, apps: Sequence[str]) -> Instance:
    """Say how much storage an app takes up."""
    app = random.choice(apps)
    query = f"app_storage_mb:{APPS[app].package}"
    return Instance(
        instruction=f"How many megabytes of storage does {APPS[app].label} use in all? Answer with the number.",
        start=system_start(),
        goal=Goal(query=query, how="told"),
        route=settings_row(
            "storage", tap_on("storage", APPS[app].label), on_page(f"app_storage:{app}", Tell(query=query))
        ),
    )
