"""The phone's behaviour: pure functions from a state and a gesture to the next state."""

from dataclasses import replace

from cua_rl.environments.phone.simulator import elements
from cua_rl.environments.phone.simulator.apps.calculator import evaluate
from cua_rl.environments.phone.simulator.apps.commands import do_in_app, submit
from cua_rl.environments.phone.simulator.catalog import MAX_BRIGHTNESS, MAX_VOLUME, MIN_BRIGHTNESS
from cua_rl.environments.phone.simulator.controls import SLIDER_LEFT, SLIDER_RIGHT
from cua_rl.environments.phone.simulator.launcher.screens import menu_of_held
from cua_rl.environments.phone.simulator.navigation import focus_field, go_up, leave, open_subscreen, show
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.phone.simulator.system.commands import operate
from cua_rl.environments.phone.simulator.system.networks import join_network
from cua_rl.environments.phone.simulator.system.shade import drag_shade
from cua_rl.types.actions import Button

MIN_SWIPE = 24
"""Logical units; a shorter drag is a tap."""


def tap(state: PhoneState, x: float, y: float) -> PhoneState:
    """Touch a point (logical units)."""
    state = replace(state, is_volume_shown=False)
    element = build_screen(state).element_at(x, y)
    return state if element is None or element.effect is None else _apply(state, element.effect, x)


def drag(state: PhoneState, x: float, y: float, to_x: float, to_y: float) -> PhoneState:
    """Move a finger from one point to another (logical units): turns home pages, scrolls lists, moves sliders."""
    state = replace(state, is_volume_shown=False)
    element = build_screen(state).element_at(x, y)
    if element is not None and isinstance(element.effect, elements.Slide):
        return _apply(state, element.effect, to_x)
    dx, dy = to_x - x, to_y - y
    pulled = drag_shade(state, element, y, dx, dy)
    if pulled is not None:
        return pulled
    if max(abs(dx), abs(dy)) < MIN_SWIPE:
        return tap(state, x, y)
    if state.screen == "home" and -dy > abs(dx):
        return open_subscreen(state, "drawer")
    if abs(dx) > abs(dy):
        return turn_page(state, -1 if dx > 0 else 1)
    return scroll_by(state, round(-dy))


def scroll_by(state: PhoneState, down: int) -> PhoneState:
    """Scroll the current list down (logical units; negative is up), as far as it goes."""
    max_scroll = build_screen(state).max_scroll
    return replace(state, scroll=min(max(state.scroll + down, 0), max_scroll), is_volume_shown=False)


def hold(state: PhoneState, x: float, y: float) -> PhoneState:
    """Long-press a point: opens a menu on the launcher, acts as a tap elsewhere."""
    element = build_screen(state).element_at(x, y)
    menu = menu_of_held(state, element)
    if menu is not None:
        return open_subscreen(state, menu)
    return tap(state, x, y)


def turn_page(state: PhoneState, by: int) -> PhoneState:
    """Show the next (1) or previous (-1) home page, if the home screen shows and has one."""
    if state.screen != "home":
        return state
    return replace(state, home_page=min(max(state.home_page + by, 0), len(state.home_pages) - 1))


def type_text(state: PhoneState, text: str) -> PhoneState:
    """Type into the focused field; a state without focus stays as it is."""
    return state if state.focus is None else replace(state, draft=state.draft + text)


def press(state: PhoneState, button: Button) -> PhoneState:
    state = replace(state, is_volume_shown=False)
    match button:
        case Button.POWER:
            return replace(state, is_screen_on=not state.is_screen_on)
        case Button.VOLUME_UP | Button.VOLUME_DOWN:
            volume = state.media_volume + (1 if button is Button.VOLUME_UP else -1)
            return replace(state, media_volume=min(max(volume, 0), MAX_VOLUME), is_volume_shown=True)
        case _ if not state.is_screen_on:
            return state
        case Button.RECENTS:
            return replace(leave(state), is_recents_open=not state.is_recents_open)
        case Button.BACK if state.shade is not None:
            return replace(state, shade=None)
        case Button.BACK if state.focus is not None:
            return replace(state, focus=None)
        case Button.BACK if state.is_recents_open:
            return leave(state)
        case Button.BACK if state.subscreens:
            return go_up(state)
        case Button.BACK | Button.HOME:
            return replace(show(state, None), home_page=0 if state.app is None else state.home_page)


def launch(state: PhoneState, app: str) -> PhoneState:
    """Bring an app to the foreground, on its first screen."""
    return show(replace(state, system=state.system.with_running(app)), app)


def enter_key(state: PhoneState) -> PhoneState:
    """The Enter key of a keyboard: sends, opens, or starts a new line, depending on the field."""
    match state.focus:
        case "message":
            return do_in_app(state, "send_text")
        case "note":
            return type_text(state, "\n")
        case "password":
            return join_network(state)
        case _:
            return submit(state)


def erase_key(state: PhoneState) -> PhoneState:
    return state if state.focus is None else replace(state, draft=state.draft[:-1])


def _apply(state: PhoneState, effect: elements.Effect, x: float) -> PhoneState:
    match effect:
        case elements.Launch(app=app):
            return launch(state, app)
        case elements.Push(subscreen=subscreen):
            return open_subscreen(state, subscreen)
        case elements.Slide(level=level):
            return _slide(state, level, x)
        case elements.Press(button=button):
            return press(state, button)
        case elements.FocusField(field=field):
            return focus_field(state, field)
        case elements.TypeKey(key=key):
            return _type_key(state, key)
        case elements.Enter(key=key):
            return _enter(state, key)
        case elements.Do(command=command):
            return do_in_app(state, command)
        case elements.Operate():
            return operate(state, effect)


def _slide(state: PhoneState, level: str, x: float) -> PhoneState:
    share = min(max((x - SLIDER_LEFT) / (SLIDER_RIGHT - SLIDER_LEFT), 0.0), 1.0)
    if level == "brightness":
        return replace(state, brightness_level=max(MIN_BRIGHTNESS, round(share * MAX_BRIGHTNESS)))
    return replace(state, media_volume=round(share * MAX_VOLUME))


def _type_key(state: PhoneState, key: str) -> PhoneState:
    match key:
        case "lower" | "upper" | "symbols":
            return replace(state, keyboard=key)
        case "enter":
            return enter_key(state)
        case "backspace":
            return erase_key(state)
        case _:
            return type_text(state, key)


def _enter(state: PhoneState, key: str) -> PhoneState:
    match state.app, key:
        case "phone", "delete":
            return replace(state, dialled=state.dialled[:-1])
        case "phone", _:
            return replace(state, dialled=(state.dialled + key)[:14])
        case _, "C":
            return replace(state, calculation="")
        case _, "=":
            return replace(state, calculation=evaluate(state.calculation))
        case _:
            return replace(state, calculation=(state.calculation + key)[:14])
