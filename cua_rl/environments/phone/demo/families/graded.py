"""Families that fill scarce levels of difficulty: tasks that start closer to their goal, or farther from it."""

from dataclasses import replace
from random import Random

from cua_rl.environments.phone.demo.families.apps import open_from_home, tap_keys
from cua_rl.environments.phone.demo.families.launcher import DRAWER, OPEN_DRAWER, SHOW_RECENTS
from cua_rl.environments.phone.demo.template import (
    Hold,
    Instance,
    Move,
    PullShade,
    TapOn,
    TaskTemplate,
    Tell,
    family,
    tap,
)
from cua_rl.environments.phone.simulator.catalog import APPS, find_app
from cua_rl.environments.phone.simulator.start import AppStart, Start, SystemStart
from cua_rl.tasks.goal import Goal
from cua_rl.types.actions import Button, PressButton

_DRAWER_TURNS = 3
"""A swipe that opens the drawer, and those that scroll it."""
_TAKE = TapOn(label="Screenshot")


def in_open_app(task_id: str, app: str, template: TaskTemplate) -> TaskTemplate:
    """The task of `template`, with its app already open."""

    def draw(random: Random) -> Instance:
        instance = template.draw(random)
        return replace(instance, start=replace(instance.start, app=app))

    return replace(
        template,
        task_id=task_id,
        difficulty="easy",
        draw=draw,
        max_turns=template.max_turns - 1,
        tags=("app_task", "open_app_task"),
    )


def through_drawer(task_id: str, app: str, template: TaskTemplate) -> TaskTemplate:
    """The task of `template`, with its app in the drawer only; the home screen gives no hint of that."""
    spec = APPS[app]
    open_app = (OPEN_DRAWER, tap(DRAWER, spec.label))

    def draw(random: Random) -> Instance:
        instance = template.draw(random)
        first_page = tuple(other for other in instance.start.first_page if other != app)
        apps = replace(instance.start.apps, off_home=(app,))
        return replace(
            instance,
            start=replace(instance.start, first_page=first_page, apps=apps),
            route=(*open_app, *(move for move in instance.route if move != open_from_home(app))),
        )

    return replace(
        template,
        task_id=task_id,
        difficulty="hard",
        draw=draw,
        max_turns=template.max_turns + _DRAWER_TURNS,
        tags=("app_task", "drawer_task"),
    )


@family(max_turns=7, category="input", difficulty="easy", tags=("app_task", "phone"))
def type_number(random: Random) -> Instance:
    """Type a number in Phone, which is open, and leave it there."""
    number = str(random.randrange(1000, 10_000))
    return Instance(
        instruction=f"Type the number {number} in Phone, but do not call it.",
        start=Start(app="phone"),
        goal=Goal(query="dialled_number", expected=number),
        route=tap_keys("phone", number, "dialled_number"),
    )


@family(max_turns=4, category="system", difficulty="easy", tags=("app_task", "shade"))
def open_notifications_over_app(random: Random, apps: tuple[str, ...]) -> Instance:
    return _opening_shade(random, apps, "notifications")


@family(max_turns=5, category="system", difficulty="easy", tags=("app_task", "shade"))
def open_quick_settings_over_app(random: Random, apps: tuple[str, ...]) -> Instance:
    return _opening_shade(random, apps, "quick settings")


def _opening_shade(random: Random, apps: tuple[str, ...], name: str) -> Instance:
    app = random.choice(apps)
    return Instance(
        instruction=f"Open the {name} over {APPS[app].label}, which is open.",
        start=Start(app=app),
        goal=Goal(query="shade", expected=name.replace(" ", "_")),
        route=tuple(Move(screen=screen, operation=PullShade()) for screen in (app, "notifications")),
    )


@family(max_turns=4, category="system", difficulty="easy", tags=("app_task", "question"))
def count_notifications(random: Random) -> Instance:
    """Say how many notifications the shade shows."""
    query = "notification_count"
    return Instance(
        instruction="How many notifications are there? Answer with the number.",
        start=Start(),
        goal=Goal(query=query, how="told"),
        route=(Move(screen="home", operation=PullShade()), Move(screen="notifications", operation=Tell(query=query))),
    )


@family(max_turns=6 + _DRAWER_TURNS, category="system", difficulty="hard", tags=("app_task", "screenshots"))
def screenshot_from_drawer(random: Random, apps: tuple[str, ...]) -> Instance:
    """Open an app that lies in the drawer only, and take a screenshot of it."""
    app = random.choice(apps)
    return Instance(
        instruction=f"Open {APPS[app].label} from the app drawer and take a screenshot of it.",
        start=Start(apps=AppStart(off_home=(app,))),
        goal=Goal(query="screenshots", expected=f'["{app}"]'),
        route=(
            OPEN_DRAWER,
            tap(DRAWER, APPS[app].label),
            Move(screen=app, operation=SHOW_RECENTS),
            Move(screen="recents", operation=_TAKE),
        ),
    )


@family(max_turns=9, category="system", difficulty="hard", tags=("app_task", "screenshots"))
def take_two_screenshots(random: Random, apps: tuple[str, ...]) -> Instance:
    """Take a screenshot of the app that is open, then one of another app."""
    one, two = random.sample(apps, 2)
    return Instance(
        instruction=f"Take a screenshot of {APPS[one].label}, which is open, then one of {APPS[two].label}.",
        start=Start(first_page=("settings", two), app=one),
        goal=Goal(query="screenshots", expected=f'["{one}", "{two}"]'),
        route=(
            Move(screen=one, operation=SHOW_RECENTS),
            Move(screen="recents", operation=_TAKE, query="num_screenshots", value="0"),
            Move(screen="recents", operation=_TAKE, query="current_app", value=APPS[two].package),
            Move(screen="recents", operation=PressButton(button=Button.HOME)),
            open_from_home(two),
            Move(screen=two, operation=SHOW_RECENTS),
        ),
    )


@family(max_turns=6 + _DRAWER_TURNS, category="system", difficulty="hard", tags=("app_task", "icons"))
def uninstall_from_drawer(random: Random, store_apps: tuple[str, ...]) -> Instance:
    app = random.choice(store_apps)
    spec = find_app(app)
    return Instance(
        instruction=f"Uninstall {spec.label} from the app drawer.",
        start=Start(system=SystemStart(store_app=app)),
        goal=Goal(query=f"app_installed:{spec.package}", expected="false"),
        route=(
            OPEN_DRAWER,
            Move(screen=DRAWER, operation=Hold(label=spec.label)),
            tap(f"home/entry:{app}", "Uninstall"),
            tap(f"home/uninstall:{app}", "OK"),
        ),
    )


@family(max_turns=6, category="navigation", difficulty="hard", tags=("app_task", "icons"))
def move_icon_back(random: Random, apps: tuple[str, ...]) -> Instance:
    """Move an icon from the second home page to the first, where one place is free."""
    app, absent = random.sample(apps, 2)
    spec = APPS[app]
    return Instance(
        instruction=f"Move the {spec.label} icon to the first home page.",
        start=Start(first_page=("settings", absent), second_page=(app,), apps=AppStart(off_home=(absent,))),
        goal=Goal(query=f"home_page_of:{spec.package}", expected="0"),
        route=(Move(screen="home", operation=Hold(label=spec.label)), tap(f"home/menu:{app}", "Move")),
    )
