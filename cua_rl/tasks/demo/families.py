"""Families of templates: one function per kind of task."""

import json

from cua_rl.actions import Button
from cua_rl.devices.simulator.catalog import APPS, HOME_PACKAGE, SCREEN_TIMEOUTS_MS, SETTINGS, Toggle
from cua_rl.devices.simulator.start import Start
from cua_rl.tasks.demo.template import (
    Deed,
    Instance,
    Move,
    PushButton,
    SlideTo,
    TapOn,
    TaskTemplate,
    Tell,
    TurnPage,
    always,
    tap,
    type_in,
)
from cua_rl.tasks.goal import Goal
from cua_rl.tasks.task import Category, Difficulty

_QUERIES = {
    Toggle.WIFI: "wifi_enabled",
    Toggle.BLUETOOTH: "bluetooth_enabled",
    Toggle.AIRPLANE_MODE: "airplane_mode",
    Toggle.DARK_THEME: "dark_theme_enabled",
    Toggle.BATTERY_SAVER: "battery_saver_enabled",
    Toggle.LOCATION: "location_enabled",
    Toggle.DO_NOT_DISTURB: "dnd_enabled",
    Toggle.AUTO_ROTATE: "auto_rotate_enabled",
    Toggle.AUTO_TIME: "auto_time_enabled",
}
_OPEN_SETTINGS = tap("home", "Settings")


def open_app(task_id: str, app: str) -> TaskTemplate:
    """Open an app whose icon is on the first home page; there is no second try."""
    return _open_app(
        task_id, app, Start(first_page=tuple(dict.fromkeys(("settings", app)))), max_turns=1, tags=("demo", "open_app")
    )


def open_app_on_page_two(task_id: str, app: str) -> TaskTemplate:
    """Open an app whose icon is on the second home page."""
    return _open_app(task_id, app, Start(second_page=(app,)), max_turns=4, tags=("open_app", "page_two"))


def _open_app(task_id: str, app: str, start: Start, *, max_turns: int, tags: tuple[str, ...]) -> TaskTemplate:
    return TaskTemplate(
        task_id=task_id,
        category="app",
        difficulty="easy",
        max_turns=max_turns,
        draw=always(
            Instance(
                instruction=f"Open {APPS[app].label}.",
                start=start,
                goal=Goal(query="current_app", expected=APPS[app].package),
                route=(tap("home", APPS[app].label),),
            )
        ),
        tags=tags,
    )


def toggle_setting(task_id: str, toggle: Toggle, *, turn_on: bool) -> TaskTemplate:
    """Flip a toggle that shows in Settings without scrolling; there is no second try, and no time to flip it back."""
    start = _toggle_start(toggle, turn_on=turn_on, first_rows=(toggle.value,))
    tags = "demo", "toggle_setting"
    return _toggle_setting(task_id, toggle, start, turn_on=turn_on, difficulty="easy", max_turns=2, tags=tags)


def toggle_hidden_setting(task_id: str, toggle: Toggle, *, turn_on: bool) -> TaskTemplate:
    """Flip a toggle that shows in Settings only after scrolling."""
    start = _toggle_start(toggle, turn_on=turn_on, hidden_rows=(toggle.value,))
    tags = "toggle_setting", "scrolling"
    return _toggle_setting(task_id, toggle, start, turn_on=turn_on, difficulty="medium", max_turns=6, tags=tags)


def _toggle_start(
    toggle: Toggle, *, turn_on: bool, first_rows: tuple[str, ...] = (), hidden_rows: tuple[str, ...] = ()
) -> Start:
    on, off = ((), (toggle,)) if turn_on else ((toggle,), ())
    return Start(first_rows=first_rows, hidden_rows=hidden_rows, on=on, off=off)


def _toggle_setting(
    task_id: str,
    toggle: Toggle,
    start: Start,
    *,
    turn_on: bool,
    difficulty: Difficulty,
    max_turns: int,
    tags: tuple[str, ...],
) -> TaskTemplate:
    spec = SETTINGS[toggle.value]
    return TaskTemplate(
        task_id=task_id,
        category="settings",
        difficulty=difficulty,
        max_turns=max_turns,
        draw=always(
            Instance(
                instruction=f"Turn {'on' if turn_on else 'off'} {spec.title}.",
                start=start,
                goal=Goal(query=_QUERIES[toggle], expected="true" if turn_on else "false"),
                route=(_OPEN_SETTINGS, tap("settings", spec.label)),
            )
        ),
        tags=tags,
    )


def open_settings_page(task_id: str, page: str) -> TaskTemplate:
    """Open one of the pages of Settings."""
    return _in_settings(
        task_id,
        f"Open the {SETTINGS[page].title} settings.",
        page,
        Goal(query="current_screen", expected=f"settings/{page}"),
        category="navigation",
        difficulty="easy",
        tags=("settings_page",),
    )


def set_slider(
    task_id: str, instruction: str, page: str, label: str, *, query: str, value: int, share: float
) -> TaskTemplate:
    """Move a slider on a page of Settings to one of its ends."""
    deed = SlideTo(label=label, share=share)
    return _in_settings(task_id, instruction, page, Goal(query=query, expected=str(value)), deed, tags=("slider",))


def set_screen_timeout(task_id: str, timeout_ms: int) -> TaskTemplate:
    """Choose a screen timeout on the Display page."""
    label = SCREEN_TIMEOUTS_MS[timeout_ms]
    return _in_settings(
        task_id,
        f"Set the screen timeout to {label}.",
        "display",
        Goal(query="screen_timeout", expected=str(timeout_ms)),
        TapOn(label=label),
        start=Start(not_screen_timeout_ms=timeout_ms, first_rows=("display",)),
        tags=("choice",),
    )


def toggle_auto_time(task_id: str, *, turn_on: bool) -> TaskTemplate:
    """Flip the automatic time on the Date and time page."""
    return _in_settings(
        task_id,
        f"Turn {'on' if turn_on else 'off'} automatic time.",
        "date",
        Goal(query="auto_time_enabled", expected="true" if turn_on else "false"),
        TapOn(label="Automatic"),
        start=_toggle_start(Toggle.AUTO_TIME, turn_on=turn_on, first_rows=("date",)),
        tags=("settings_page",),
    )


def _in_settings(
    task_id: str,
    instruction: str,
    page: str,
    goal: Goal,
    deed: Deed | None = None,
    *,
    start: Start | None = None,
    category: Category = "settings",
    difficulty: Difficulty = "medium",
    tags: tuple[str, ...],
) -> TaskTemplate:
    on_page = () if deed is None else (Move(screen=f"settings/{page}", deed=deed),)
    route = (_OPEN_SETTINGS, tap("settings", SETTINGS[page].label), *on_page)
    return TaskTemplate(
        task_id=task_id,
        category=category,
        difficulty=difficulty,
        max_turns=len(route) + 3,
        draw=always(
            Instance(
                instruction=instruction,
                start=start or Start(first_rows=(page,), brightness_level=128, media_volume=7),
                goal=goal,
                route=route,
            )
        ),
        tags=tags,
    )


def go_home(task_id: str) -> TaskTemplate:
    """Leave an app for the home screen."""
    return _navigate(
        task_id,
        "Go to the home screen.",
        Start(app="clock"),
        Goal(query="current_app", expected=HOME_PACKAGE),
        Move(screen="clock", deed=PushButton(button=Button.HOME)),
    )


def go_to_home_page(task_id: str, page: int) -> TaskTemplate:
    """Swipe to the first home page (0), or to the second."""
    return _navigate(
        task_id,
        f"Go to the {('first', 'second')[page]} home page.",
        Start(home_page=1 - page),
        Goal(query="home_page", expected=str(page)),
        Move(screen="home", deed=TurnPage(by=1 if page else -1)),
    )


def open_recents(task_id: str) -> TaskTemplate:
    """Open the list of recent apps."""
    return _navigate(
        task_id,
        "Show the recent apps.",
        Start(recent_apps=("mail", "maps")),
        Goal(query="current_screen", expected="recents"),
        Move(screen="home", deed=PushButton(button=Button.RECENTS)),
    )


def switch_to_app(task_id: str, app: str) -> TaskTemplate:
    """Get from one app to another through the recent apps."""
    return _navigate(
        task_id,
        f"Switch to {APPS[app].label}, which was open a moment ago.",
        Start(app="mail", recent_apps=("music", app)),
        Goal(query="current_app", expected=APPS[app].package),
        Move(screen="mail", deed=PushButton(button=Button.RECENTS)),
        tap("recents", APPS[app].label),
    )


def _navigate(task_id: str, instruction: str, start: Start, goal: Goal, *route: Move) -> TaskTemplate:
    return TaskTemplate(
        task_id=task_id,
        category="navigation",
        difficulty="easy",
        max_turns=len(route) + 2,
        draw=always(Instance(instruction=instruction, start=start, goal=goal, route=route)),
        tags=("navigation",),
    )


def check_battery(task_id: str) -> TaskTemplate:
    """Answer a question from what the screen shows."""
    return TaskTemplate(
        task_id=task_id,
        category="system",
        difficulty="medium",
        max_turns=3,
        draw=always(
            Instance(
                instruction="What is the battery level in percent? Answer with the number.",
                start=Start(),
                goal=Goal(query="battery_level", how="told"),
                route=(Move(screen="home", deed=Tell(query="battery_level")),),
            )
        ),
        tags=("question",),
    )


def write_note(task_id: str, text: str) -> TaskTemplate:
    """Write and save a note."""
    return _write(
        task_id,
        f'Add a new note that says "{text}".',
        Start(first_page=("settings", "notes")),
        Goal(query="note_texts", expected=json.dumps(text), how="includes"),
        tap("home", "Notes"),
        tap("notes", "New"),
        type_in("notes/new", text, query="draft_text"),
        tap("notes/new", "Save"),
    )


def send_message(task_id: str, contact: str, text: str) -> TaskTemplate:
    """Send a text message to somebody in Messages."""
    on_thread = tuple(
        move
        for screen in (f"messages/{i}" for i in range(5))
        for move in (
            tap(screen, "Message", query="focused_field"),
            type_in(screen, text, query="draft_text"),
            tap(screen, "Send"),
        )
    )
    return _write(
        task_id,
        f'Send the message "{text}" to {contact}.',
        Start(first_page=("settings", "messages"), contact=contact),
        Goal(query="sent_messages", expected=json.dumps({"to": contact, "text": text}), how="includes"),
        tap("home", "Messages"),
        tap("messages", contact),
        *on_thread,
    )


def _write(task_id: str, instruction: str, start: Start, goal: Goal, *route: Move) -> TaskTemplate:
    return TaskTemplate(
        task_id=task_id,
        category="input",
        difficulty="hard",
        max_turns=8,
        draw=always(Instance(instruction=instruction, start=start, goal=goal, route=route)),
        tags=("text_entry",),
    )
