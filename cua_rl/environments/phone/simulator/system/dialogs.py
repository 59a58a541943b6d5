"""Confirmation dialogs, drawn over a dimmed page."""

from dataclasses import replace

from cua_rl.environments.phone.simulator.catalog import LANGUAGES, WIDTH, find_app
from cua_rl.environments.phone.simulator.controls import NAV_TOP, STATUS_HEIGHT, Box, button, pill, place
from cua_rl.environments.phone.simulator.elements import Effect, Kind, Operate, Press, Screen
from cua_rl.types.actions import Button

_PREFIX = "ask:"
_CLOSE = Press(button=Button.BACK)


def is_dialog(subscreen: str) -> bool:
    """Whether a subscreen is a dialog over the page before it."""
    return subscreen.startswith(_PREFIX)


def with_dialog(screen: Screen, subscreen: str) -> Screen:
    """The page with the dialog above it; nothing of the page but the navigation bar can be tapped."""
    name, _, target = subscreen.removeprefix(_PREFIX).partition(":")
    heading, question, confirm, effect = _question(name, target)
    bars = tuple(element for element in screen.fixed if element.element_id.startswith("nav:"))
    page = tuple(replace(element, effect=None) for element in screen.fixed if element not in bars)
    content = tuple(replace(element, effect=None) for element in screen.content)
    x, y, width, height = card = (14, 112, WIDTH - 28, 98)
    parts: tuple[tuple[Kind, Box, str], ...] = (
        ("scrim", (0, STATUS_HEIGHT, WIDTH, NAV_TOP - STATUS_HEIGHT), ""),
        ("card", card, ""),
        ("card_title", (x + 12, y + 10, width - 24, 18), heading),
        ("text", (x + 12, y + 32, width - 24, 16), question),
    )
    dialog = [place(f"dialog:{kind}", text or kind, kind, box, text=text) for kind, box, text in parts]
    if effect != _CLOSE:
        dialog.append(pill("Cancel", (48, y + height - 34, 58, 24), _CLOSE))
    dialog.append(button(confirm, (112, y + height - 34, 58, 24), effect))
    return replace(screen, content=content, fixed=(*page, *bars, *dialog), max_scroll=0)


def _question(name: str, target: str) -> tuple[str, str, str, Effect]:
    """Heading, text, the label of the button that confirms, and what that does."""
    match name:
        case "forget":
            effect = Operate(command="forget", target=target)
            return f"Forget {target}?", "Its password is lost.", "Forget", effect
        case "wrong_password":
            return "Wrong password", f"{target} did not accept it.", "OK", _CLOSE
        case "language":
            effect = Operate(command="choose_language", target=target)
            return f"Change to {target}?", f"Use {LANGUAGES[target]} everywhere.", "Change", effect
        case "usb_debugging":
            return "Allow USB debugging?", "Only for development.", "Allow", Operate(command="allow_usb_debugging")
        case "force_stop":
            effect = Operate(command="force_stop", target=target)
            return "Force stop?", "The app may misbehave.", "OK", effect
        case _:
            effect = Operate(command="uninstall", target=target)
            return f"Uninstall {find_app(target).label}?", "Its data goes with it.", "OK", effect
