"""Families of templates on the pages of Settings: one function per kind of task."""

from collections.abc import Callable, Sequence
from random import Random

from cua_rl.devices.simulator.catalog import (
    ALL_EXTRA_ROWS,
    EXTRA_ROWS,
    LANGUAGES,
    MAX_BRIGHTNESS,
    MAX_VOLUME,
    SWITCHES,
    WALLPAPER_NAMES,
    Toggle,
)
from cua_rl.devices.simulator.start import Start, SystemStart
from cua_rl.devices.simulator.state import Network
from cua_rl.tasks.demo.template import Deed, Instance, Move, SlideTo, TapOn, TaskTemplate, TypeIn, always
from cua_rl.tasks.goal import Goal
from cua_rl.tasks.task import Category, Difficulty

OPEN_SETTINGS = Move(screen="home", deed=TapOn(label="Settings"))
SCROLL_TURNS = 3
"""Swipes that Settings, with all its rows, takes at most."""
LIST_TURNS = 4
"""Swipes that a list of all apps takes at most."""
_SLACK_TURNS = 3


def system_template(
    task_id: str,
    draw: Callable[[Random], Instance],
    *,
    num_turns: int,
    category: Category = "settings",
    difficulty: Difficulty = "medium",
    tag: str,
) -> TaskTemplate:
    """A template whose expert takes at most `num_turns`; agents get a few more."""
    return TaskTemplate(
        task_id=task_id,
        category=category,
        difficulty=difficulty,
        max_turns=num_turns + _SLACK_TURNS,
        draw=draw,
        tags=("system_task", tag),
    )


def settings_row(name: str, *moves: Move) -> tuple[Move, ...]:
    """The route to the page behind an extra row of Settings, and on."""
    return OPEN_SETTINGS, Move(screen="settings", deed=TapOn(label=EXTRA_ROWS[name].label)), *moves


def on_page(page: str, deed: Deed, query: str | None = None, value: str = "") -> Move:
    """What to do on a page of Settings."""
    return Move(screen=f"settings/{page}", deed=deed, query=query, value=value)


def tap_on(page: str, label: str) -> Move:
    """Tap an element on a page of Settings."""
    return on_page(page, TapOn(label=label))


def system_start(*, on: Sequence[Toggle] = (), system: SystemStart) -> Start:
    """A phone with system pages; Wi-Fi is never asked for in airplane mode."""
    return Start(on=tuple(on), off=(Toggle.AIRPLANE_MODE,) if Toggle.WIFI in on else (), system=system)


def truth(value: bool) -> str:
    """How queries write a truth value."""
    return "true" if value else "false"


def open_system_page(task_id: str, instruction: str, page: str, row: str, *moves: Move) -> TaskTemplate:
    """Open a page behind one of the extra rows; `moves` lead there from the page that the row opens."""
    instance = Instance(
        instruction=instruction,
        start=system_start(system=SystemStart(extra_rows=ALL_EXTRA_ROWS)),
        goal=Goal(query="current_screen", expected=f"settings/{page}"),
        route=settings_row(row, *moves),
    )
    num_turns = len(instance.route) + SCROLL_TURNS + (LIST_TURNS if row == "apps" else 0)
    return system_template(task_id, always(instance), num_turns=num_turns, category="navigation", tag="system_page")


def connect_known_wifi(task_id: str, networks: Sequence[str]) -> TaskTemplate:
    """Connect to a network that the phone knows."""

    def draw(random: Random) -> Instance:
        name = random.choice(networks)
        return Instance(
            instruction=f"Connect to the Wi-Fi network {name}.",
            start=system_start(on=(Toggle.WIFI,), system=SystemStart(extra_rows=ALL_EXTRA_ROWS, saved_network=name)),
            goal=Goal(query="connected_wifi", expected=name),
            route=settings_row("wifi_page", tap_on("wifi", name), tap_on(f"network:{name}", "Connect")),
        )

    return system_template(task_id, draw, num_turns=4 + SCROLL_TURNS + 1, tag="wifi")


def forget_wifi(task_id: str, networks: Sequence[str]) -> TaskTemplate:
    """Forget the network that is in use, and confirm it."""

    def draw(random: Random) -> Instance:
        name = random.choice(networks)
        return Instance(
            instruction=f"Forget the Wi-Fi network {name}.",
            start=system_start(
                on=(Toggle.WIFI,), system=SystemStart(extra_rows=ALL_EXTRA_ROWS, connected_network=name)
            ),
            goal=Goal(query=f"wifi_saved:{name}", expected="false"),
            route=settings_row(
                "wifi_page",
                tap_on("wifi", name),
                tap_on(f"network:{name}", "Forget"),
                tap_on(f"ask:forget:{name}", "Forget"),
            ),
        )

    return system_template(task_id, draw, num_turns=5 + SCROLL_TURNS + 1, difficulty="hard", tag="wifi")


def join_wifi(task_id: str, networks: Sequence[str]) -> TaskTemplate:
    """Join a network that the phone does not know, with its password."""

    def draw(random: Random) -> Instance:
        name, password = random.choice(networks), "".join(random.choices("abcdefghkmnprstuvwxyz", k=8))
        network = Network(name=name, password=password)
        page = f"network:{name}"
        return Instance(
            instruction=f'Join the Wi-Fi network {name}. Its password is "{password}".',
            start=system_start(
                on=(Toggle.WIFI,), system=SystemStart(extra_rows=ALL_EXTRA_ROWS, locked_network=network)
            ),
            goal=Goal(query="connected_wifi", expected=name),
            route=settings_row(
                "wifi_page",
                tap_on("wifi", name),
                on_page(page, TapOn(label="Password"), "focused_field"),
                on_page(page, TypeIn(text=password), "draft_text"),
                tap_on(page, "Connect"),
            ),
        )

    return system_template(
        task_id, draw, num_turns=6 + SCROLL_TURNS + 1, category="input", difficulty="hard", tag="wifi"
    )


def change_language(task_id: str, languages: Sequence[str]) -> TaskTemplate:
    """Give the phone another language, and confirm it."""

    def draw(random: Random) -> Instance:
        language = random.choice(languages)
        return Instance(
            instruction=f"Change the system language to {LANGUAGES[language]} ({language}).",
            start=system_start(system=SystemStart(extra_rows=ALL_EXTRA_ROWS)),
            goal=Goal(query="system_language", expected=language),
            route=settings_row(
                "language",
                tap_on("language", "Languages"),
                tap_on("languages", language),
                tap_on(f"ask:language:{language}", "Change"),
            ),
        )

    return system_template(task_id, draw, num_turns=5 + SCROLL_TURNS + 1, difficulty="hard", tag="language")


def change_wallpaper(task_id: str, wallpapers: Sequence[str]) -> TaskTemplate:
    """Choose a wallpaper by its name."""

    def draw(random: Random) -> Instance:
        name = random.choice(wallpapers)
        index = WALLPAPER_NAMES.index(name)
        return Instance(
            instruction=f"Set the {name.lower()} wallpaper.",
            start=system_start(system=SystemStart(extra_rows=ALL_EXTRA_ROWS, not_wallpaper=index)),
            goal=Goal(query="wallpaper", expected=name),
            route=settings_row("wallpaper", tap_on("wallpaper", name), tap_on(f"set_wallpaper:{index}", "Set")),
        )

    return system_template(task_id, draw, num_turns=4 + SCROLL_TURNS, tag="wallpaper")


def switch_usb_debugging(task_id: str, *, turn_on: bool) -> TaskTemplate:
    """Flip USB debugging in the developer options; turning it on must be confirmed."""
    switches = ("usb_debugging",)
    system = SystemStart(extra_rows=ALL_EXTRA_ROWS, on=() if turn_on else switches, off=switches if turn_on else ())
    confirm = (tap_on("ask:usb_debugging:", "Allow"),) if turn_on else ()
    instance = Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} USB debugging.",
        start=system_start(system=system),
        goal=Goal(query="usb_debugging", expected=truth(turn_on)),
        route=settings_row("developer", tap_on("developer", SWITCHES["usb_debugging"]), *confirm),
    )
    return system_template(
        task_id, always(instance), num_turns=len(instance.route) + SCROLL_TURNS, difficulty="hard", tag="developer"
    )


def switch_call_vibration(task_id: str, *, turn_on: bool) -> TaskTemplate:
    """Flip the vibration for calls on the Sound page."""
    switches = ("call_vibration",)
    system = SystemStart(extra_rows=ALL_EXTRA_ROWS, on=() if turn_on else switches, off=switches if turn_on else ())
    instance = Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} vibration for calls.",
        start=system_start(system=system),
        goal=Goal(query="call_vibration", expected=truth(turn_on)),
        route=(
            OPEN_SETTINGS,
            Move(screen="settings", deed=TapOn(label="Sound")),
            tap_on("sound", SWITCHES["call_vibration"]),
        ),
    )
    return system_template(task_id, always(instance), num_turns=3 + SCROLL_TURNS, tag="sound")


def set_brightness(task_id: str, percents: Sequence[int]) -> TaskTemplate:
    """Set the brightness to about a level."""

    def draw(random: Random) -> Instance:
        percent = random.choice(percents)
        level = (percent + 50) % 100 * MAX_BRIGHTNESS // 100
        return Instance(
            instruction=f"Set the brightness to about {percent} percent.",
            start=Start(first_rows=("display",), brightness_level=max(1, level)),
            goal=Goal(query=f"brightness_is_about:{percent}", expected="true"),
            route=(
                OPEN_SETTINGS,
                Move(screen="settings", deed=TapOn(label="Display")),
                on_page("display", SlideTo(label="Brightness", share=percent / 100)),
            ),
        )

    return system_template(task_id, draw, num_turns=3, tag="level")


def set_media_volume(task_id: str, percents: Sequence[int]) -> TaskTemplate:
    """Set the media volume to about a level."""

    def draw(random: Random) -> Instance:
        percent = random.choice(percents)
        volume = round((percent + 50) % 100 * MAX_VOLUME / 100)
        return Instance(
            instruction=f"Set the media volume to about {percent} percent.",
            start=Start(first_rows=("sound",), media_volume=volume),
            goal=Goal(query=f"media_volume_is_about:{percent}", expected="true"),
            route=(
                OPEN_SETTINGS,
                Move(screen="settings", deed=TapOn(label="Sound")),
                on_page("sound", SlideTo(label="Volume", share=percent / 100)),
            ),
        )

    return system_template(task_id, draw, num_turns=3, tag="level")
