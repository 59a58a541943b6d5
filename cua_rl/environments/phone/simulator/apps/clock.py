"""Clock: the alarms, a new one, the timer."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import WIDTH
from cua_rl.environments.phone.simulator.controls import (
    Column,
    place,
    plus_button,
    row,
    text_field,
    title_button,
    wide_button,
)
from cua_rl.environments.phone.simulator.elements import Do, Operate, Push
from cua_rl.environments.phone.simulator.navigation import field_value, go_up, show
from cua_rl.environments.phone.simulator.state import PhoneState


def build_clock(state: PhoneState, column: Column) -> None:
    column.add(place("time", "Time", "text", (0, 52, WIDTH, 56), text=state.clock, ink="huge"))
    column.add_heading("Alarms")
    for i, time in enumerate(state.apps.alarms):
        column.stack(
            row(
                f"alarm:{i}",
                text=time,
                effect=Operate(command="switch_alarm", target=str(i)),
                kind="switch_row",
                is_on=i in state.alarms_on,
            )
        )
    column.y += 46  # so that the last row scrolls clear of the round button
    timer = Push(subscreen="timer")
    column.pin(place("timer", "Timer", "button", (12, 264, 56, 22), effect=timer, text="Timer"), plus_button("new"))


def build_clock_page(state: PhoneState, column: Column, subscreen: str) -> str:
    """The form for a new alarm, or the timer."""
    if subscreen == "new":
        column.add(
            text_field(state, "hour", "Hour", (30, 62, 56, 26)),
            place("colon", "Colon", "text", (86, 62, 20, 26), text=":", ink="large"),
            text_field(state, "minute", "Minute", (106, 62, 56, 26)),
        )
        column.add_text("Hour and minute, 00:00 to 23:59", indent=14)
        column.pin(title_button("Save", Do(command="save_alarm")))
        return "New alarm"
    if state.apps.timer_s:
        minutes, seconds = divmod(state.apps.timer_s, 60)
        left = place("left", "Left", "text", (0, 70, WIDTH, 56), text=f"{minutes:02d}:{seconds:02d}", ink="huge")
        column.add(left, wide_button("Stop", 150, Do(command="stop_timer")))
    else:
        column.add_heading("Minutes")
        column.add(text_field(state, "minutes", "Minutes", (12, 66, 80, 26)))
        column.add(wide_button("Start", 104, Do(command="start_timer")))
    return "Timer"


def save_alarm(state: PhoneState) -> PhoneState:
    """Set the alarm that was typed, if it is a time of day."""
    hour, minute = (_number(field_value(state, field)) for field in ("hour", "minute"))
    if hour is None or minute is None or hour > 23 or minute > 59:
        return state
    time = f"{hour:02d}:{minute:02d}"
    alarms = state.apps.alarms if time in state.apps.alarms else (*state.apps.alarms, time)
    alarms_on = tuple(sorted({*state.alarms_on, alarms.index(time)}))
    return go_up(replace(state, alarms_on=alarms_on, apps=replace(state.apps, alarms=alarms)))


def start_timer(state: PhoneState) -> PhoneState:
    """Start the timer with the minutes that were typed, 1 to 600."""
    minutes = _number(field_value(state, "minutes"))
    if not minutes or minutes > 600:
        return state
    return show(replace(state, apps=replace(state.apps, timer_s=60 * minutes)), "clock", "timer")


def stop_timer(state: PhoneState) -> PhoneState:
    return show(replace(state, apps=replace(state.apps, timer_s=0)), "clock", "timer")


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() and len(text.strip()) <= 3 else None
