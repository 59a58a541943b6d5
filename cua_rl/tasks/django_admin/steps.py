"""The steps of a way through the admin site: where, what, and when it is done."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Follow:
    """On a page whose path matches, click a link; `selector` may end in :text("...") for what it says."""

    path: str
    selector: str


@dataclass(frozen=True, slots=True)
class Fill:
    """On a page whose path matches, let a field hold a text."""

    path: str
    selector: str
    text: str


@dataclass(frozen=True, slots=True)
class Tick:
    """On a page whose path matches, let a box be ticked or not."""

    path: str
    selector: str
    is_on: bool


@dataclass(frozen=True, slots=True)
class Press:
    """On a page whose path matches, press a button."""

    path: str
    selector: str


Step = Follow | Fill | Tick | Press
