"""Confirmation dialogs, drawn over a dimmed page."""

from dataclasses import dataclass, replace

from cua_rl.actions import Button
from cua_rl.devices.simulator.catalog import LANGUAGES, WIDTH, find_app
from cua_rl.devices.simulator.controls import NAV_TOP, STATUS_HEIGHT, Box, button, pill, place
from cua_rl.devices.simulator.elements import Effect, Kind, Operate, Press, Screen

_PREFIX = "ask:"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    heading: str
    text: str
    confirm: str
    effect: Effect
    can_cancel: bool = True


def is_dialog(subscreen: str) -> bool:
    """Whether a subscreen is a dialog over the page before it."""
    return subscreen.startswith(_PREFIX)


def with_dialog(screen: Screen, subscreen: str) -> Screen:
    """The page with the dialog above it; nothing of the page but the navigation bar can be tapped."""
    name, _, target = subscreen.removeprefix(_PREFIX).partition(":")
    question = _question(name, target)
    bars = tuple(element for element in screen.fixed if element.element_id.startswith("nav:"))
    page = tuple(replace(element, effect=None) for element in screen.fixed if element not in bars)
    content = tuple(replace(element, effect=None) for element in screen.content)
    x, y, width, height = card = (14, 112, WIDTH - 28, 98)
    parts: tuple[tuple[Kind, Box, str], ...] = (
        ("scrim", (0, STATUS_HEIGHT, WIDTH, NAV_TOP - STATUS_HEIGHT), ""),
        ("card", card, ""),
        ("card_title", (x + 12, y + 10, width - 24, 18), question.heading),
        ("text", (x + 12, y + 32, width - 24, 16), question.text),
    )
    dialog = [place(f"dialog:{kind}", text or kind, kind, box, text=text) for kind, box, text in parts]
    if question.can_cancel:
        dialog.append(pill("Cancel", (48, y + height - 34, 58, 24), Press(button=Button.BACK)))
    dialog.append(button(question.confirm, (112, y + height - 34, 58, 24), question.effect))
    return replace(screen, content=content, fixed=(*page, *bars, *dialog), max_scroll=0)


def _question(name: str, target: str) -> _Question:
    match name:
        case "forget":
            effect = Operate(command="forget", target=target)
            return _Question(heading=f"Forget {target}?", text="Its password is lost.", confirm="Forget", effect=effect)
        case "wrong_password":
            effect = Press(button=Button.BACK)
            text = f"{target} did not accept it."
            return _Question(heading="Wrong password", text=text, confirm="OK", effect=effect, can_cancel=False)
        case "language":
            effect = Operate(command="choose_language", target=target)
            text = f"Use {LANGUAGES[target]} everywhere."
            return _Question(heading=f"Change to {target}?", text=text, confirm="Change", effect=effect)
        case "usb_debugging":
            effect = Operate(command="allow_usb_debugging")
            text = "Only for development."
            return _Question(heading="Allow USB debugging?", text=text, confirm="Allow", effect=effect)
        case "force_stop":
            effect = Operate(command="force_stop", target=target)
            return _Question(heading="Force stop?", text="The app may misbehave.", confirm="OK", effect=effect)
        case _:
            effect = Operate(command="uninstall", target=target)
            text = "Its data goes with it."
            return _Question(heading=f"Uninstall {find_app(target).label}?", text=text, confirm="OK", effect=effect)
