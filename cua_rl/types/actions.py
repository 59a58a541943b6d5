"""What an agent can do to a device. Coordinates are pixels of the last screenshot, origin top left."""

from dataclasses import dataclass
from enum import StrEnum


class Button(StrEnum):
    """Hardware or system buttons of a phone."""

    BACK = "back"
    HOME = "home"
    RECENTS = "recents"
    POWER = "power"
    VOLUME_UP = "volume_up"
    VOLUME_DOWN = "volume_down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Click:
    """Tap (phone) or left click (desktop) at a pixel."""

    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleClick:
    """Two taps or clicks at one pixel."""

    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RightClick:
    """Right click at a pixel (desktop only)."""

    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMouse:
    """Move the mouse to a pixel without pressing anything (desktop only)."""

    x: int
    y: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPress:
    """Press and hold at a pixel."""

    x: int
    y: int
    duration_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Drag:
    """Move from one pixel to another while pressing: a swipe on a phone, a drag on a desktop."""

    x: int
    y: int
    to_x: int
    to_y: int
    duration_s: float = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scroll:
    """Turn the wheel at a pixel; positive `down_px` reveals what is below, positive `right_px` what is to the right."""

    x: int
    y: int
    down_px: int = 0
    right_px: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeText:
    """Type text into whatever has the focus."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PressKey:
    """Press keys together, such as ("ctrl", "s")."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PressButton:
    """Press a system button of a phone."""

    button: Button


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenApp:
    """Open an app by its visible name, where the device can."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Let the device run for a while."""

    duration_s: float


Action = (
    Click
    | DoubleClick
    | RightClick
    | MoveMouse
    | LongPress
    | Drag
    | Scroll
    | TypeText
    | PressKey
    | PressButton
    | OpenApp
    | Wait
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Ends the rollout. `success_claimed` is what the agent or expert says, never a reward."""

    success_claimed: bool
    answer: str | None = None
