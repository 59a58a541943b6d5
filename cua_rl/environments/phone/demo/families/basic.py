"""Families of basic tasks: opening apps, plain settings, navigation, a note and a message."""

import json
from random import Random

from cua_rl.environments.phone.demo.template import Instance, Move, SlideTo, Tell, TurnPage, family, tap, type_in
from cua_rl.environments.phone.simulator.catalog import APPS, HOME_PACKAGE, SCREEN_TIMEOUTS_MS, SETTINGS, Toggle
from cua_rl.environments.phone.simulator.queries import TOGGLE_QUERIES
from cua_rl.environments.phone.simulator.start import Start
from cua_rl.tasks.goal import Goal
from cua_rl.types.actions import Button, PressButton


@family(max_turns=1, difficulty="easy", tags=("demo", "open_app"))
def open_app(random: Random, app: str) -> Instance:
    """Open an app whose icon is on the first home page; there is no second try."""
    return _opening(app, Start(first_page=tuple(dict.fromkeys(("settings", app)))))


@family(max_turns=4, difficulty="easy", tags=("open_app", "page_two"))
def open_app_on_page_two(random: Random, app: str) -> Instance:
    """Open an app whose icon is on the second home page."""
    return _opening(app, Start(second_page=(app,)))


def _opening(app: str, start: Start) -> Instance:
    return Instance(
        instruction=f"Open {APPS[app].label}.",
        start=start,
        goal=Goal(query="current_app", expected=APPS[app].package),
        route=(tap("home", APPS[app].label),),
    )


@family(max_turns=2, category="settings", difficulty="easy", tags=("demo", "toggle_setting"))
def toggle_setting(random: Random, toggle: Toggle, *, turn_on: bool) -> Instance:
    """Flip a toggle that shows in Settings without scrolling; there is no second try, and no time to flip it back."""
    return _toggling(toggle, toggle_start(toggle, turn_on=turn_on, first_rows=(toggle.value,)), turn_on=turn_on)


@family(max_turns=6, category="settings", tags=("toggle_setting", "scrolling"))
def toggle_hidden_setting(random: Random, toggle: Toggle, *, turn_on: bool) -> Instance:
    """Flip a toggle that shows in Settings only after scrolling."""
    return _toggling(toggle, toggle_start(toggle, turn_on=turn_on, hidden_rows=(toggle.value,)), turn_on=turn_on)


def toggle_start(
    toggle: Toggle, *, turn_on: bool, first_rows: tuple[str, ...] = (), hidden_rows: tuple[str, ...] = ()
) -> Start:
    on, off = ((), (toggle,)) if turn_on else ((toggle,), ())
    return Start(first_rows=first_rows, hidden_rows=hidden_rows, on=on, off=off)


def _toggling(toggle: Toggle, start: Start, *, turn_on: bool) -> Instance:
    spec = SETTINGS[toggle.value]
    return Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} {spec.title}.",
        start=start,
        goal=Goal(query=TOGGLE_QUERIES[toggle], expected="true" if turn_on else "false"),
        route=(tap("home", "Settings"), tap("settings", spec.label)),
    )


@family(max_turns=5, category="navigation", difficulty="easy", tags=("settings_page",))
def open_settings_page(random: Random, page: str) -> Instance:
    goal = Goal(query="current_screen", expected=f"settings/{page}")
    return _on_settings_page(f"Open the {SETTINGS[page].title} settings.", page, goal)


@family(max_turns=6, category="settings", tags=("slider",))
def set_slider(
    random: Random, instruction: str, page: str, label: str, *, query: str, value: int, share: float
) -> Instance:
    slide = Move(screen=f"settings/{page}", operation=SlideTo(label=label, share=share))
    return _on_settings_page(instruction, page, Goal(query=query, expected=str(value)), slide)


@family(max_turns=6, category="settings", tags=("choice",))
def set_screen_timeout(random: Random, timeout_ms: int) -> Instance:
    label = SCREEN_TIMEOUTS_MS[timeout_ms]
    return _on_settings_page(
        f"Set the screen timeout to {label}.",
        "display",
        Goal(query="screen_timeout", expected=str(timeout_ms)),
        tap("settings/display", label),
        start=Start(not_screen_timeout_ms=timeout_ms, first_rows=("display",)),
    )


@family(max_turns=6, category="settings", tags=("settings_page",))
def toggle_auto_time(random: Random, *, turn_on: bool) -> Instance:
    """Flip the automatic time on the Date and time page."""
    return _on_settings_page(
        f"Turn {'on' if turn_on else 'off'} automatic time.",
        "date",
        Goal(query="auto_time_enabled", expected="true" if turn_on else "false"),
        tap("settings/date", "Automatic"),
        start=toggle_start(Toggle.AUTO_TIME, turn_on=turn_on, first_rows=("date",)),
    )


def _on_settings_page(instruction: str, page: str, goal: Goal, *moves: Move, start: Start | None = None) -> Instance:
    return Instance(
        instruction=instruction,
        start=start or Start(first_rows=(page,), brightness_level=128, media_volume=7),
        goal=goal,
        route=(tap("home", "Settings"), tap("settings", SETTINGS[page].label), *moves),
    )


@family(max_turns=3, category="navigation", difficulty="easy", tags=("navigation",))
def go_home(random: Random) -> Instance:
    return Instance(
        instruction="Go to the home screen.",
        start=Start(app="clock"),
        goal=Goal(query="current_app", expected=HOME_PACKAGE),
        route=(Move(screen="clock", operation=PressButton(button=Button.HOME)),),
    )


@family(max_turns=3, category="navigation", difficulty="easy", tags=("navigation",))
def go_to_home_page(random: Random, page: int) -> Instance:
    """Swipe to the first home page (0), or to the second."""
    return Instance(
        instruction=f"Go to the {('first', 'second')[page]} home page.",
        start=Start(home_page=1 - page),
        goal=Goal(query="home_page", expected=str(page)),
        route=(Move(screen="home", operation=TurnPage(by=1 if page else -1)),),
    )


@family(max_turns=3, category="navigation", difficulty="easy", tags=("navigation",))
def open_recents(random: Random) -> Instance:
    return Instance(
        instruction="Show the recent apps.",
        start=Start(recent_apps=("mail", "maps")),
        goal=Goal(query="current_screen", expected="recents"),
        route=(Move(screen="home", operation=PressButton(button=Button.RECENTS)),),
    )


@family(max_turns=4, category="navigation", difficulty="easy", tags=("navigation",))
def switch_to_app(random: Random, app: str) -> Instance:
    """Get from one app to another through the recent apps."""
    return Instance(
        instruction=f"Switch to {APPS[app].label}, which was open a moment ago.",
        start=Start(app="mail", recent_apps=("music", app)),
        goal=Goal(query="current_app", expected=APPS[app].package),
        route=(Move(screen="mail", operation=PressButton(button=Button.RECENTS)), tap("recents", APPS[app].label)),
    )


@family(max_turns=3, category="system", tags=("question",))
def check_battery(random: Random) -> Instance:
    """Answer a question from what the screen shows."""
    return Instance(
        instruction="What is the battery level in percent? Answer with the number.",
        start=Start(),
        goal=Goal(query="battery_level", how="told"),
        route=(Move(screen="home", operation=Tell(query="battery_level")),),
    )


@family(max_turns=8, category="input", difficulty="hard", tags=("text_entry",))
def write_note(random: Random, text: str) -> Instance:
    return Instance(
        instruction=f'Add a new note that says "{text}".',
        start=Start(first_page=("settings", "notes")),
        goal=Goal(query="note_texts", expected=json.dumps(text), how="includes"),
        route=(
            tap("home", "Notes"),
            tap("notes", "New"),
            type_in("notes/new", text, query="draft_text"),
            tap("notes/new", "Save"),
        ),
    )


@family(max_turns=8, category="input", difficulty="hard", tags=("text_entry",))
def send_message(random: Random, contact: str, text: str) -> Instance:
    on_thread = tuple(
        move
        for screen in (f"messages/{i}" for i in range(5))
        for move in (
            tap(screen, "Message", query="focused_field"),
            type_in(screen, text, query="draft_text"),
            tap(screen, "Send"),
        )
    )
    return Instance(
        instruction=f'Send the message "{text}" to {contact}.',
        start=Start(first_page=("settings", "messages"), contact=contact),
        goal=Goal(query="sent_messages", expected=json.dumps({"to": contact, "text": text}), how="includes"),
        route=(tap("home", "Messages"), tap("messages", contact), *on_thread),
    )
