"""Families of tasks on the launcher: the app drawer, icons, wallpapers, screenshots."""

from random import Random

from cua_rl.actions import Button
from cua_rl.devices.simulator.catalog import APPS, WALLPAPER_NAMES, find_app
from cua_rl.devices.simulator.start import AppStart, Start, SystemStart
from cua_rl.tasks.demo.app_families import app_template
from cua_rl.tasks.demo.template import Hold, Instance, Move, PushButton, SwipeUp, TapOn, TaskTemplate, TypeIn
from cua_rl.tasks.goal import Goal

_OPEN_DRAWER = Move(screen="home", deed=SwipeUp())
_SHOW_RECENTS = PushButton(button=Button.RECENTS)


def find_settings_in_drawer(task_id: str) -> TaskTemplate:
    """Open Settings, which lies in the app drawer only."""

    def draw(random: Random) -> Instance:
        return Instance(
            instruction="Find Settings in the app drawer and open it.",
            start=Start(apps=AppStart(off_home=("settings",))),
            goal=Goal(query="current_app", expected=APPS["settings"].package),
            route=(_OPEN_DRAWER, Move(screen="home/drawer", deed=TapOn(label="Settings"))),
        )

    return app_template(task_id, draw, num_turns=5, category="navigation", tag="drawer")


def search_app(task_id: str, apps: tuple[str, ...]) -> TaskTemplate:
    """Find an app with the search of the app drawer."""

    def draw(random: Random) -> Instance:
        app = random.choice(apps)
        label = APPS[app].label
        drawer = "home/drawer"
        return Instance(
            instruction=f"Search for {label} in the app drawer and open it.",
            start=Start(apps=AppStart(off_home=(app,))),
            goal=Goal(query="current_app", expected=APPS[app].package),
            route=(
                _OPEN_DRAWER,
                Move(screen=drawer, deed=TapOn(label="Search"), query="focused_field"),
                Move(screen=drawer, deed=TypeIn(text=label.lower()), query="draft_text"),
                Move(screen=drawer, deed=TapOn(label=label)),
            ),
        )

    return app_template(task_id, draw, num_turns=5, category="input", tag="drawer")


def pin_app(task_id: str, apps: tuple[str, ...]) -> TaskTemplate:
    """Put an app from the drawer onto the home screen."""

    def draw(random: Random) -> Instance:
        app = random.choice(apps)
        spec = APPS[app]
        return Instance(
            instruction=f"Add {spec.label} to the home screen.",
            start=Start(apps=AppStart(off_home=(app,))),
            goal=Goal(query=f"on_home:{spec.package}", expected="true"),
            route=(
                _OPEN_DRAWER,
                Move(screen="home/drawer", deed=Hold(label=spec.label)),
                Move(screen=f"home/entry:{app}", deed=TapOn(label="Add")),
            ),
        )

    return app_template(task_id, draw, num_turns=6, category="navigation", difficulty="hard", tag="icons")


def unpin_app(task_id: str, apps: tuple[str, ...]) -> TaskTemplate:
    """Take an app's icon off the home screen."""

    def draw(random: Random) -> Instance:
        app = random.choice(apps)
        spec = APPS[app]
        return Instance(
            instruction=f"Remove the {spec.label} icon from the home screen.",
            start=Start(),
            goal=Goal(query=f"on_home:{spec.package}", expected="false"),
            route=(
                Move(screen="home", deed=Hold(label=spec.label)),
                Move(screen=f"home/menu:{app}", deed=TapOn(label="Remove")),
            ),
        )

    return app_template(task_id, draw, num_turns=4, category="navigation", tag="icons")


def move_icon(task_id: str, apps: tuple[str, ...]) -> TaskTemplate:
    """Move an icon from the first home page to the second, where one place is free."""

    def draw(random: Random) -> Instance:
        app, absent = random.sample(apps, 2)
        spec = APPS[app]
        return Instance(
            instruction=f"Move the {spec.label} icon to the second home page.",
            start=Start(first_page=("settings", app), second_page=(absent,), apps=AppStart(off_home=(absent,))),
            goal=Goal(query=f"home_page_of:{spec.package}", expected="1"),
            route=(
                Move(screen="home", deed=Hold(label=spec.label)),
                Move(screen=f"home/menu:{app}", deed=TapOn(label="Move")),
            ),
        )

    return app_template(task_id, draw, num_turns=3, category="navigation", difficulty="hard", tag="icons")


def create_app_folder(task_id: str, apps: tuple[str, ...], names: tuple[str, ...]) -> TaskTemplate:
    """Put two apps of the first home page into a new folder."""

    def draw(random: Random) -> Instance:
        app, other = random.sample(apps, 2)
        name = random.choice(names)
        return Instance(
            instruction=f"Put {APPS[app].label} and {APPS[other].label} into a home screen folder named {name}.",
            start=Start(first_page=("settings", app, other)),
            goal=_holds(name, app, other),
            route=(
                Move(screen="home", deed=Hold(label=APPS[app].label)),
                Move(screen=f"home/menu:{app}", deed=TapOn(label="Group")),
                Move(screen=f"home/group:{app}", deed=TapOn(label=APPS[other].label)),
                Move(screen=f"home/folder_of:{app}:{other}", deed=TypeIn(text=name), query="draft_text"),
                Move(screen=f"home/folder_of:{app}:{other}", deed=TapOn(label="Create")),
            ),
        )

    return app_template(task_id, draw, num_turns=6, category="navigation", difficulty="hard", tag="folders")


def rename_folder(task_id: str, apps: tuple[str, ...], names: tuple[str, ...]) -> TaskTemplate:
    """Give a folder on the home screen another name."""

    def draw(random: Random) -> Instance:
        app, other = random.sample(apps, 2)
        old, new = random.sample(names, 2)
        folder = (old, app, other)
        return Instance(
            instruction=f"Rename the home screen folder {old} to {new}.",
            start=Start(first_page=("settings", app, other), apps=AppStart(home_folder=folder)),
            goal=_holds(new, app, other),
            route=(
                Move(screen="home", deed=TapOn(label=old)),
                Move(screen=f"home/folder:{old}", deed=TapOn(label="Rename")),
                Move(screen=f"home/rename:{old}", deed=TypeIn(text=new), query="draft_text"),
                Move(screen=f"home/rename:{old}", deed=TapOn(label="Save")),
            ),
        )

    return app_template(task_id, draw, num_turns=5, category="navigation", difficulty="hard", tag="folders")


def _holds(name: str, *apps: str) -> Goal:
    return Goal(query=f"home_folder:{name}", expected=" ".join(sorted(APPS[app].package for app in apps)))


def uninstall_app(task_id: str, store_apps: tuple[str, ...], apps: tuple[str, ...]) -> TaskTemplate:
    """Uninstall an app from its icon on the home screen."""

    def draw(random: Random) -> Instance:
        app, absent = random.choice(store_apps), random.choice(apps)
        spec = find_app(app)
        return Instance(
            instruction=f"Uninstall {spec.label} from the home screen.",
            start=Start(apps=AppStart(off_home=(absent,), on_home=(app,)), system=SystemStart(store_app=app)),
            goal=Goal(query=f"app_installed:{spec.package}", expected="false"),
            route=(
                Move(screen="home", deed=Hold(label=spec.label)),
                Move(screen=f"home/menu:{app}", deed=TapOn(label="Uninstall")),
                Move(screen=f"home/uninstall:{app}", deed=TapOn(label="OK")),
            ),
        )

    return app_template(task_id, draw, num_turns=5, category="system", difficulty="hard", tag="icons")


def change_wallpaper(task_id: str, wallpapers: tuple[int, ...]) -> TaskTemplate:
    """Choose another wallpaper, beginning on the home screen."""

    def draw(random: Random) -> Instance:
        wallpaper = random.choice(wallpapers)
        name = WALLPAPER_NAMES[wallpaper]
        return Instance(
            instruction=f"Change the wallpaper to {name}, from the home screen.",
            start=Start(system=SystemStart(not_wallpaper=wallpaper)),
            goal=Goal(query="wallpaper", expected=name),
            route=(
                Move(screen="home", deed=Hold(label="")),
                Move(screen="home/options", deed=TapOn(label="Wallpapers")),
                Move(screen="home/wallpapers", deed=TapOn(label=name)),
                Move(screen=f"home/wallpaper:{wallpaper}", deed=TapOn(label="Set")),
            ),
        )

    return app_template(task_id, draw, num_turns=5, category="settings", tag="wallpaper")


def take_screenshot(task_id: str, apps: tuple[str, ...]) -> TaskTemplate:
    """Take a screenshot of the app that is open, with the button in the list of recent apps."""

    def draw(random: Random) -> Instance:
        app = random.choice(apps)
        return Instance(
            instruction=f"Take a screenshot of {APPS[app].label}, which is open.",
            start=Start(app=app),
            goal=Goal(query="screenshots", expected=f'["{app}"]'),
            route=(
                Move(screen=app, deed=_SHOW_RECENTS),
                Move(screen="recents", deed=TapOn(label="Screenshot")),
            ),
        )

    return app_template(task_id, draw, num_turns=3, category="system", difficulty="easy", tag="screenshots")


def open_last_screenshot(task_id: str, apps: tuple[str, ...]) -> TaskTemplate:
    """Open the newest of several screenshots."""

    def draw(random: Random) -> Instance:
        shown = tuple(random.sample(apps, random.randrange(2, 4)))
        last = len(shown)
        return Instance(
            instruction="Open the last screenshot in Gallery.",
            start=Start(first_page=("settings", "gallery"), apps=AppStart(screenshots=shown)),
            goal=Goal(query="current_screen", expected=f"gallery/screenshot:{last - 1}"),
            route=(
                Move(screen="home", deed=TapOn(label="Gallery")),
                Move(screen="gallery", deed=TapOn(label=f"Screenshot {last}")),
            ),
        )

    return app_template(task_id, draw, num_turns=3, tag="screenshots")


def take_and_open_screenshot(task_id: str, apps: tuple[str, ...]) -> TaskTemplate:
    """Take a screenshot of the app that is open, then look at it."""

    def draw(random: Random) -> Instance:
        app = random.choice(apps)
        return Instance(
            instruction=f"Take a screenshot of {APPS[app].label}, which is open, then open the screenshot in Gallery.",
            start=Start(first_page=("settings", "gallery"), app=app),
            goal=Goal(query="current_screen", expected="gallery/screenshot:0"),
            route=(
                Move(screen=app, deed=_SHOW_RECENTS),
                Move(screen="recents", deed=TapOn(label="Screenshot"), query="num_screenshots", value="0"),
                Move(screen="recents", deed=PushButton(button=Button.HOME)),
                Move(screen="home", deed=TapOn(label="Gallery")),
                Move(screen="gallery", deed=TapOn(label="Screenshot 1")),
            ),
        )

    return app_template(task_id, draw, num_turns=6, category="system", difficulty="hard", tag="screenshots")
