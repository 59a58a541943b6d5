"""Screen elements. Drawing and hit testing use the same elements, so what is visible is what gets tapped."""

from dataclasses import dataclass, replace
from typing import Literal

from cua_rl.environments.phone.simulator.catalog import Colour
from cua_rl.environments.phone.simulator.state import Field, SystemCommand
from cua_rl.types.actions import Button

Command = Literal[
    "call",
    "end_call",
    "new_contact",
    "save_contact",
    "delete_contact",
    "call_contact",
    "message_contact",
    "send_text",
    "delete_note",
    "save_alarm",
    "start_timer",
    "stop_timer",
    "create_folder",
    "delete_file",
    "download",
    "take_screenshot",
    "pin_icon",
    "unpin_icon",
    "move_icon",
    "uninstall",
    "make_home_folder",
    "rename_home_folder",
    "set_wallpaper",
    "save_note",
    "take_photo",
    "clear_recents",
]
"""Commands of buttons in apps and on the launcher; the current screen determines their target."""


Kind = Literal[
    "app_icon",
    "title",
    "heading",
    "text",
    "row",
    "switch_row",
    "choice_row",
    "slider",
    "button",
    "field",
    "key",
    "round_button",
    "photo",
    "bubble",
    "art",
    "panel",
    "nav",
    "pill",
    "tile",
    "notification",
    "meter",
    "swatch",
    "scrim",
    "card",
    "card_title",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Bring an app to the foreground."""

    app: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Open a screen inside the app."""

    subscreen: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Slide:
    """Set a level by touching the slider; works for taps and drags."""

    level: Literal["brightness", "media_volume"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeKey:
    """A key of the on-screen keyboard: a character, "backspace", "enter"."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FocusField:
    """Put the cursor into a text field and show the keyboard."""

    field: Field


@dataclass(frozen=True, slots=True, kw_only=True)
class Press:
    """A button of the navigation bar."""

    button: Button


@dataclass(frozen=True, slots=True, kw_only=True)
class Enter:
    """A key of the dialler or the calculator."""

    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Do:
    """A command that acts on the current screen."""

    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Operate:
    """A command with a target: a toggle, switch, network, app, language, track or the like."""

    command: SystemCommand
    target: str = ""


Effect = Launch | Push | Slide | TypeKey | FocusField | Press | Enter | Do | Operate


@dataclass(frozen=True, slots=True, kw_only=True)
class Rect:
    """A rectangle in logical units; right and bottom edges are outside."""

    x: int
    y: int
    width: int
    height: int

    @property
    def right(self) -> int:
        return self.x + self.width

    @property
    def bottom(self) -> int:
        return self.y + self.height

    @property
    def centre(self) -> tuple[int, int]:
        return self.x + self.width // 2, self.y + self.height // 2

    def contains(self, x: float, y: float) -> bool:
        """Whether the point lies inside."""
        return self.x <= x < self.right and self.y <= y < self.bottom

    def inset(self, by: int) -> "Rect":
        """The rectangle shrunk by `by` on every side."""
        return Rect(x=self.x + by, y=self.y + by, width=self.width - 2 * by, height=self.height - 2 * by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Element:
    """A visible part of a screen."""

    element_id: str
    """Unique on its screen, such as "app:mail"."""
    label: str
    """A short stable name."""
    kind: Kind
    rect: Rect
    effect: Effect | None = None
    text: str = ""
    detail: str = ""
    glyph: str = ""
    paper: Colour = ""
    ink: Colour = ""
    is_on: bool = False
    """Switches, choices, bubbles of the owner, pressed keys."""
    level: float = 0.0
    """Sliders, 0-1."""

    @property
    def is_tappable(self) -> bool:
        return self.effect is not None

    def scrolled(self, distance: int) -> "Element":
        """The same element after its list was scrolled down by `distance`."""
        return replace(self, rect=replace(self.rect, y=self.rect.y - distance)) if distance else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """What the phone shows: `content` scrolls inside `viewport`, `fixed` lies above it. Both in reading order."""

    name: str
    content: tuple[Element, ...]
    fixed: tuple[Element, ...] = ()
    viewport: Rect
    max_scroll: int = 0
    """How far the content can be scrolled down, logical units."""

    def visible_content(self) -> tuple[Element, ...]:
        """The content elements whose centre can be seen."""
        return tuple(element for element in self.content if self.viewport.contains(*element.rect.centre))

    def element_at(self, x: float, y: float) -> Element | None:
        content = self.content if self.viewport.contains(x, y) else ()
        for element in (*reversed(self.fixed), *reversed(content)):
            if element.is_tappable and element.rect.contains(x, y):
                return element
        return None
