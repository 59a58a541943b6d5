"""Families of tasks on the launcher: the app drawer, icons, wallpapers, screenshots."""

from random import Random

from cua_rl.environments.phone.demo.template import Hold, Instance, Move, SwipeUp, family, tap, type_in
from cua_rl.environments.phone.simulator.catalog import APPS, WALLPAPER_NAMES, find_app
from cua_rl.environments.phone.simulator.start import AppStart, Start, SystemStart
from cua_rl.tasks.goal import Goal
from cua_rl.types.actions import Button, PressButton

DRAWER = "home/drawer"
OPEN_DRAWER = Move(screen="home", operation=SwipeUp())
SHOW_RECENTS = PressButton(button=Button.RECENTS)


@family(max_turns=7, category="navigation", tags=("app_task", "drawer"))
def find_settings_in_drawer(random: Random) -> Instance:
    """Open Settings, which lies in the app drawer only."""
    return Instance(
        instruction="Find Settings in the app drawer and open it.",
        start=Start(apps=AppStart(off_home=("settings",))),
        goal=Goal(query="current_app", expected=APPS["settings"].package),
        route=(OPEN_DRAWER, tap(DRAWER, "Settings")),
    )


@family(max_turns=7, category="input", tags=("app_task", "drawer"))
def search_app(random: Random, apps: tuple[str, ...]) -> Instance:
    app = random.choice(apps)
    label = APPS[app].label
    return Instance(
        instruction=f"Search for {label} in the app drawer and open it.",
        start=Start(apps=AppStart(off_home=(app,))),
        goal=Goal(query="current_app", expected=APPS[app].package),
        route=(
            OPEN_DRAWER,
            tap(DRAWER, "Search", query="focused_field"),
            type_in(DRAWER, label.lower(), query="draft_text"),
            tap(DRAWER, label),
        ),
    )


@family(max_turns=8, category="navigation", difficulty="hard", tags=("app_task", "icons"))
def pin_app(random: Random, apps: tuple[str, ...]) -> Instance:
    """Put an app from the drawer onto the home screen."""
    app = random.choice(apps)
    spec = APPS[app]
    return Instance(
        instruction=f"Add {spec.label} to the home screen.",
        start=Start(apps=AppStart(off_home=(app,))),
        goal=Goal(query=f"on_home:{spec.package}", expected="true"),
        route=(OPEN_DRAWER, Move(screen=DRAWER, operation=Hold(label=spec.label)), tap(f"home/entry:{app}", "Add")),
    )


@family(max_turns=6, category="navigation", tags=("app_task", "icons"))
def unpin_app(random: Random, apps: tuple[str, ...]) -> Instance:
    """Take an app's icon off the home screen."""
    app = random.choice(apps)
    spec = APPS[app]
    return Instance(
        instruction=f"Remove the {spec.label} icon from the home screen.",
        start=Start(),
        goal=Goal(query=f"on_home:{spec.package}", expected="false"),
        route=(Move(screen="home", operation=Hold(label=spec.label)), tap(f"home/menu:{app}", "Remove")),
    )


@family(max_turns=5, category="navigation", difficulty="hard", tags=("app_task", "icons"))
def move_icon(random: Random, apps: tuple[str, ...]) -> Instance:
    """Move an icon from the first home page to the second, where one place is free."""
    app, absent = random.sample(apps, 2)
    spec = APPS[app]
    return Instance(
        instruction=f"Move the {spec.label} icon to the second home page.",
        start=Start(first_page=("settings", app), second_page=(absent,), apps=AppStart(off_home=(absent,))),
        goal=Goal(query=f"home_page_of:{spec.package}", expected="1"),
        route=(Move(screen="home", operation=Hold(label=spec.label)), tap(f"home/menu:{app}", "Move")),
    )


@family(max_turns=8, category="navigation", difficulty="hard", tags=("app_task", "folders"))
def create_app_folder(random: Random, apps: tuple[str, ...], names: tuple[str, ...]) -> Instance:
    """Put two apps of the first home page into a new folder."""
    app, other = random.sample(apps, 2)
    name = random.choice(names)
    return Instance(
        instruction=f"Put {APPS[app].label} and {APPS[other].label} into a home screen folder named {name}.",
        start=Start(first_page=("settings", app, other)),
        goal=_holds(name, app, other),
        route=(
            Move(screen="home", operation=Hold(label=APPS[app].label)),
            tap(f"home/menu:{app}", "Group"),
            tap(f"home/group:{app}", APPS[other].label),
            type_in(f"home/folder_of:{app}:{other}", name, query="draft_text"),
            tap(f"home/folder_of:{app}:{other}", "Create"),
        ),
    )


@family(max_turns=7, category="navigation", difficulty="hard", tags=("app_task", "folders"))
def rename_folder(random: Random, apps: tuple[str, ...], names: tuple[str, ...]) -> Instance:
    """Give a folder on the home screen another name."""
    app, other = random.sample(apps, 2)
    old, new = random.sample(names, 2)
    folder = (old, app, other)
    return Instance(
        instruction=f"Rename the home screen folder {old} to {new}.",
        start=Start(first_page=("settings", app, other), apps=AppStart(home_folder=folder)),
        goal=_holds(new, app, other),
        route=(
            tap("home", old),
            tap(f"home/folder:{old}", "Rename"),
            type_in(f"home/rename:{old}", new, query="draft_text"),
            tap(f"home/rename:{old}", "Save"),
        ),
    )


def _holds(name: str, *apps: str) -> Goal:
    return Goal(query=f"home_folder:{name}", expected=" ".join(sorted(APPS[app].package for app in apps)))


@family(max_turns=7, category="system", difficulty="hard", tags=("app_task", "icons"))
def uninstall_app(random: Random, store_apps: tuple[str, ...], apps: tuple[str, ...]) -> Instance:
    app, absent = random.choice(store_apps), random.choice(apps)
    spec = find_app(app)
    return Instance(
        instruction=f"Uninstall {spec.label} from the home screen.",
        start=Start(apps=AppStart(off_home=(absent,), on_home=(app,)), system=SystemStart(store_app=app)),
        goal=Goal(query=f"app_installed:{spec.package}", expected="false"),
        route=(
            Move(screen="home", operation=Hold(label=spec.label)),
            tap(f"home/menu:{app}", "Uninstall"),
            tap(f"home/uninstall:{app}", "OK"),
        ),
    )


@family(max_turns=7, category="settings", tags=("app_task", "wallpaper"))
def change_wallpaper(random: Random, wallpapers: tuple[int, ...]) -> Instance:
    """Choose another wallpaper, beginning on the home screen."""
    wallpaper = random.choice(wallpapers)
    name = WALLPAPER_NAMES[wallpaper]
    return Instance(
        instruction=f"Change the wallpaper to {name}, from the home screen.",
        start=Start(system=SystemStart(not_wallpaper=wallpaper)),
        goal=Goal(query="wallpaper", expected=name),
        route=(
            Move(screen="home", operation=Hold(label="")),
            tap("home/options", "Wallpapers"),
            tap("home/wallpapers", name),
            tap(f"home/wallpaper:{wallpaper}", "Set"),
        ),
    )


@family(max_turns=5, category="system", difficulty="easy", tags=("app_task", "screenshots"))
def take_screenshot(random: Random, apps: tuple[str, ...]) -> Instance:
    """Take a screenshot of the app that is open, with the button in the list of recent apps."""
    app = random.choice(apps)
    return Instance(
        instruction=f"Take a screenshot of {APPS[app].label}, which is open.",
        start=Start(app=app),
        goal=Goal(query="screenshots", expected=f'["{app}"]'),
        route=(Move(screen=app, operation=SHOW_RECENTS), tap("recents", "Screenshot")),
    )


@family(max_turns=5, tags=("app_task", "screenshots"))
def open_last_screenshot(random: Random, apps: tuple[str, ...]) -> Instance:
    shown = tuple(random.sample(apps, random.randrange(2, 4)))
    last = len(shown)
    return Instance(
        instruction="Open the last screenshot in Gallery.",
        start=Start(first_page=("settings", "gallery"), apps=AppStart(screenshots=shown)),
        goal=Goal(query="current_screen", expected=f"gallery/screenshot:{last - 1}"),
        route=(tap("home", "Gallery"), tap("gallery", f"Screenshot {last}")),
    )


@family(max_turns=8, category="system", difficulty="hard", tags=("app_task", "screenshots"))
def take_and_open_screenshot(random: Random, apps: tuple[str, ...]) -> Instance:
    """Take a screenshot of the app that is open, then look at it."""
    app = random.choice(apps)
    return Instance(
        instruction=f"Take a screenshot of {APPS[app].label}, which is open, then open the screenshot in Gallery.",
        start=Start(first_page=("settings", "gallery"), app=app),
        goal=Goal(query="current_screen", expected="gallery/screenshot:0"),
        route=(
            Move(screen=app, operation=SHOW_RECENTS),
            tap("recents", "Screenshot", query="num_screenshots", value="0"),
            Move(screen="recents", operation=PressButton(button=Button.HOME)),
            tap("home", "Gallery"),
            tap("gallery", "Screenshot 1"),
        ),
    )
