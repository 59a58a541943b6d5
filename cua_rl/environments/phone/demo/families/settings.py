"""Families of templates on the pages of Settings: one function per kind of task."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from cua_rl.environments.phone.demo import template
from cua_rl.environments.phone.simulator import catalog
from cua_rl.environments.phone.simulator.start import Start, SystemStart
from cua_rl.environments.phone.simulator.state import Network
from cua_rl.tasks.goal import Goal
from cua_rl.types.actions import TypeText

OPEN_SETTINGS = template.tap("home", "Settings")
SCROLL_TURNS = 3
"""Swipes that Settings, with all its rows, takes at most."""
LIST_TURNS = 4
"""Swipes that a list of all apps takes at most."""


def settings_row(name: str, *moves: template.Move) -> tuple[template.Move, ...]:
    """The route to the page behind an extra row of Settings, and on."""
    return OPEN_SETTINGS, template.tap("settings", catalog.EXTRA_ROWS[name].label), *moves


def on_page(page: str, operation: template.Operation, query: str | None = None) -> template.Move:
    return template.Move(screen=f"settings/{page}", operation=operation, query=query)


def tap_on(page: str, label: str) -> template.Move:
    return template.tap(f"settings/{page}", label)


def system_start(system: SystemStart | None = None, *, on: Sequence[catalog.Toggle] = ()) -> Start:
    """A phone with all rows of Settings; Wi-Fi is never asked for in airplane mode."""
    off = (catalog.Toggle.AIRPLANE_MODE,) if catalog.Toggle.WIFI in on else ()
    return Start(on=tuple(on), off=off, system=replace(system or SystemStart(), extra_rows=catalog.ALL_EXTRA_ROWS))


def truth(value: bool) -> str:
    """How queries write a truth value."""
    return "true" if value else "false"


def open_system_page(
    task_id: str, instruction: str, page: str, row: str, *moves: template.Move
) -> template.TaskTemplate:
    """Open a page behind one of the extra rows; `moves` lead there from the page that the row opens."""
    instance = template.Instance(
        instruction=instruction,
        start=system_start(),
        goal=Goal(query="current_screen", expected=f"settings/{page}"),
        route=settings_row(row, *moves),
    )
    max_turns = len(instance.route) + SCROLL_TURNS + (LIST_TURNS if row == "apps" else 0) + 3
    return template.TaskTemplate(
        task_id=task_id,
        category="navigation",
        difficulty="medium",
        max_turns=max_turns,
        draw=lambda random: instance,
        tags=("system_task", "system_page"),
    )


@template.family(max_turns=8 + SCROLL_TURNS, category="settings", tags=("system_task", "wifi"))
def connect_known_wifi(random: Random, networks: Sequence[str]) -> template.Instance:
    name = random.choice(networks)
    return template.Instance(
        instruction=f"Connect to the Wi-Fi network {name}.",
        start=system_start(SystemStart(saved_network=name), on=(catalog.Toggle.WIFI,)),
        goal=Goal(query="connected_wifi", expected=name),
        route=settings_row("wifi_page", tap_on("wifi", name), tap_on(f"network:{name}", "Connect")),
    )


@template.family(max_turns=9 + SCROLL_TURNS, category="settings", difficulty="hard", tags=("system_task", "wifi"))
def forget_wifi(random: Random, networks: Sequence[str]) -> template.Instance:
    """Forget the network that is in use, and confirm it."""
    name = random.choice(networks)
    return template.Instance(
        instruction=f"Forget the Wi-Fi network {name}.",
        start=system_start(SystemStart(connected_network=name), on=(catalog.Toggle.WIFI,)),
        goal=Goal(query=f"wifi_saved:{name}", expected="false"),
        route=settings_row(
            "wifi_page",
            tap_on("wifi", name),
            tap_on(f"network:{name}", "Forget"),
            tap_on(f"ask:forget:{name}", "Forget"),
        ),
    )


@template.family(max_turns=10 + SCROLL_TURNS, category="input", difficulty="hard", tags=("system_task", "wifi"))
def join_wifi(random: Random, networks: Sequence[str]) -> template.Instance:
    """Join a network that the phone does not know, with its password."""
    name, password = random.choice(networks), "".join(random.choices("abcdefghkmnprstuvwxyz", k=8))
    network = Network(name=name, password=password)
    page = f"network:{name}"
    return template.Instance(
        instruction=f'Join the Wi-Fi network {name}. Its password is "{password}".',
        start=system_start(SystemStart(locked_network=network), on=(catalog.Toggle.WIFI,)),
        goal=Goal(query="connected_wifi", expected=name),
        route=settings_row(
            "wifi_page",
            tap_on("wifi", name),
            on_page(page, template.TapOn(label="Password"), "focused_field"),
            on_page(page, TypeText(text=password), "draft_text"),
            tap_on(page, "Connect"),
        ),
    )


@template.family(max_turns=9 + SCROLL_TURNS, category="settings", difficulty="hard", tags=("system_task", "language"))
def change_language(random: Random, languages: Sequence[str]) -> template.Instance:
    """Give the phone another language, and confirm it."""
    language = random.choice(languages)
    return template.Instance(
        instruction=f"Change the system language to {catalog.LANGUAGES[language]} ({language}).",
        start=system_start(),
        goal=Goal(query="system_language", expected=language),
        route=settings_row(
            "language",
            tap_on("language", "Languages"),
            tap_on("languages", language),
            tap_on(f"ask:language:{language}", "Change"),
        ),
    )


@template.family(max_turns=7 + SCROLL_TURNS, category="settings", tags=("system_task", "wallpaper"))
def change_wallpaper(random: Random, wallpapers: Sequence[str]) -> template.Instance:
    name = random.choice(wallpapers)
    index = catalog.WALLPAPER_NAMES.index(name)
    return template.Instance(
        instruction=f"Set the {name.lower()} wallpaper.",
        start=system_start(SystemStart(not_wallpaper=index)),
        goal=Goal(query="wallpaper", expected=name),
        route=settings_row("wallpaper", tap_on("wallpaper", name), tap_on(f"set_wallpaper:{index}", "Set")),
    )


def switch_usb_debugging(task_id: str, *, turn_on: bool) -> template.TaskTemplate:
    """Flip USB debugging in the developer options; turning it on must be confirmed."""
    confirm = (tap_on("ask:usb_debugging:", "Allow"),) if turn_on else ()
    instance = template.Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} USB debugging.",
        start=_start_switched("usb_debugging", is_on=not turn_on),
        goal=Goal(query="usb_debugging", expected=truth(turn_on)),
        route=settings_row("developer", tap_on("developer", catalog.SWITCHES["usb_debugging"]), *confirm),
    )
    return template.TaskTemplate(
        task_id=task_id,
        category="settings",
        difficulty="hard",
        max_turns=len(instance.route) + SCROLL_TURNS + 3,
        draw=lambda random: instance,
        tags=("system_task", "developer"),
    )


@template.family(max_turns=6 + SCROLL_TURNS, category="settings", tags=("system_task", "sound"))
def switch_call_vibration(random: Random, *, turn_on: bool) -> template.Instance:
    return template.Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} vibration for calls.",
        start=_start_switched("call_vibration", is_on=not turn_on),
        goal=Goal(query="call_vibration", expected=truth(turn_on)),
        route=(OPEN_SETTINGS, template.tap("settings", "Sound"), tap_on("sound", catalog.SWITCHES["call_vibration"])),
    )


def _start_switched(name: str, *, is_on: bool) -> Start:
    return system_start(SystemStart(on=(name,)) if is_on else SystemStart(off=(name,)))


@template.family(max_turns=6, category="settings", tags=("system_task", "level"))
def set_brightness(random: Random, percents: Sequence[int]) -> template.Instance:
    percent = random.choice(percents)
    level = (percent + 50) % 100 * catalog.MAX_BRIGHTNESS // 100
    return template.Instance(
        instruction=f"Set the brightness to about {percent} percent.",
        start=Start(first_rows=("display",), brightness_level=max(1, level)),
        goal=Goal(query=f"brightness_is_about:{percent}", expected="true"),
        route=(
            OPEN_SETTINGS,
            template.tap("settings", "Display"),
            on_page("display", template.SlideTo(label="Brightness", share=percent / 100)),
        ),
    )


@template.family(max_turns=6, category="settings", tags=("system_task", "level"))
def set_media_volume(random: Random, percents: Sequence[int]) -> template.Instance:
    percent = random.choice(percents)
    volume = round((percent + 50) % 100 * catalog.MAX_VOLUME / 100)
    return template.Instance(
        instruction=f"Set the media volume to about {percent} percent.",
        start=Start(first_rows=("sound",), media_volume=volume),
        goal=Goal(query=f"media_volume_is_about:{percent}", expected="true"),
        route=(
            OPEN_SETTINGS,
            template.tap("settings", "Sound"),
            on_page("sound", template.SlideTo(label="Volume", share=percent / 100)),
        ),
    )
