"""Collects the words, screenshots and actions that a reader finds in an external file, in the order of the file."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from pybase64 import b64decode

from cua_rl.environments.device import DeviceKind
from cua_rl.exchange.action_names import LOOKS, STARTS
from cua_rl.exchange.foreign_actions import WHEEL_CLICK_PX, ForeignAction
from cua_rl.renderers.images import image_size
from cua_rl.renderers.request_error import RequestError
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError

_MAX_IMAGE_BYTES = 64 * 2**20

Size = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """A screenshot, read on demand."""

    source: str
    """A path, base64, or a `data:` URL. Paths lead below the imported folder, because the files are untrusted."""
    folder: Path
    """The folder that a path is relative to."""
    root: Path
    """The imported folder, which contains all images."""
    display: Size | None = None
    """Size in whose pixels the coordinates on it are given; None is its own."""

    def load(self) -> EncodedImage:
        """The image; raises `ConfigError`."""
        try:
            data = self._read()
            width_px, height_px = image_size(data)
        except (OSError, ValueError, RequestError) as error:
            raise ConfigError(
                f"expected a PNG or JPEG image at {self.source[:200]!r}, relative to {str(self.folder)!r}, got "
                f"{error}; put the images where the file says"
            ) from None
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        return EncodedImage(data=data, format=kind, width_px=width_px, height_px=height_px)

    def _read(self) -> bytes:
        head, comma, tail = self.source.partition(",")
        if head.startswith("data:") and comma:
            return b64decode(tail, validate=True)
        # the beginnings of PNG and JPEG in base64
        if self.source.startswith(("iVBOR", "/9j/")) and len(self.source) > 200:
            return b64decode(self.source, validate=True)
        path = Path(os.path.normpath(self.folder / self.source))
        # without resolving links: caches of data sets link to files elsewhere
        if not path.is_relative_to(self.root):
            raise ValueError(f"a path that leaves {str(self.root)!r}")
        if not path.is_file() or path.stat().st_size > _MAX_IMAGE_BYTES:
            raise ValueError(f"no file, or one of more than {_MAX_IMAGE_BYTES} bytes")
        return path.read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignStep:
    """One step: what the agent saw, its reasoning, and its action."""

    screen: Screen
    action: ForeignAction
    thought: str | None = None
    box: tuple[float, ...] = ()
    """Left, top, right, bottom of the element that the action aims at, in pixels as its point; empty if not told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignTrajectory:
    """A trajectory recorded by another system."""

    where: str
    """Path and position, for messages."""
    trajectory_id: str
    instruction: str
    steps: tuple[ForeignStep, ...]
    last_screen: Screen | None
    """The screen after the last step, if recorded."""
    kind: DeviceKind | None
    """None if the file does not say it."""
    success: bool = True
    """Assumed true unless the file says otherwise, as in data sets of demonstrations."""
    num_looks: int = 0
    """Actions that only looked at the screen, which are not steps."""
    num_starts: int = 0
    """Actions at the beginning that went to an app or page, which are not steps: the task begins there."""
    num_unseen: int = 0
    """Actions at the beginning whose screens were not recorded, which are not steps."""
    format: str = ""
    wheel_click_px: float = WHEEL_CLICK_PX


@dataclass(slots=True, kw_only=True)
class Recorder:
    """What has been read of one trajectory."""

    where: str
    folder: Path
    """Of the file, in which its images are."""
    root: Path
    told_display: Size | None = None
    """What the user says of all screens."""
    display: Size | None = None
    """What the file says of all its screens."""
    instruction: str = ""
    steps: list[ForeignStep] = field(default_factory=list[ForeignStep])
    screen: Screen | None = None
    thought: str | None = None
    is_seen_after: bool = False
    num_looks: int = 0
    num_starts: int = 0
    num_unseen: int = 0
    zooms: set[object] = field(default_factory=set[object])
    """Calls whose images are parts of the screen."""

    def tell(self, text: str) -> None:
        """The user's words, of which the first are the instruction."""
        self.instruction = self.instruction or text

    def think(self, text: str) -> None:
        """Words before the next action."""
        self.thought = text or self.thought

    def see(self, source: object, *, call_id: object = None, display: Size | None = None) -> None:
        """A screenshot: a path or an image in base64."""
        if call_id is not None and call_id in self.zooms:
            return
        if not isinstance(source, str):
            raise TypeError(f"expected the path of an image or the image in base64, got {source!r}")
        shown = self.told_display or display or self.display
        self.screen = Screen(source=source, folder=self.folder, root=self.root, display=shown)
        self.is_seen_after = True

    def leave(self) -> None:
        """The result of the last action begins: without a screenshot, what the next one refers to is unknown."""
        if self.steps and not self.is_seen_after:
            self.screen = None

    def act(
        self, action: ForeignAction, *, thought: str | None = None, call_id: object = None, box: tuple[float, ...] = ()
    ) -> None:
        """An action; raises `ConfigError` for one that is a step and was not preceded by a screenshot."""
        name = str(action.given.get("action") or action.name)
        if name == "zoom":
            self.zooms.add(call_id)
        if name in LOOKS:
            self.num_looks += 1
            return
        told, self.thought = thought or self.thought, None
        if name in STARTS and not self.steps:
            self.num_starts += 1
            return
        if self.screen is None:
            raise ConfigError(
                f"expected a screenshot before action {len(self.steps) + 1} of {self.where}, got {name!r}; import with "
                "unreadable=skip, which leaves such trajectories out"
            )
        self.steps.append(ForeignStep(screen=self.screen, action=action, thought=told, box=box))
        self.is_seen_after = False

    def finish(self, name: str, *, kind: DeviceKind | None, success: bool = True) -> ForeignTrajectory:
        """The whole trajectory, under this name."""
        return ForeignTrajectory(
            where=self.where,
            trajectory_id=name,
            instruction=self.instruction,
            steps=tuple(self.steps),
            last_screen=self.screen if self.is_seen_after else None,
            kind=kind,
            success=success,
            num_looks=self.num_looks,
            num_starts=self.num_starts,
            num_unseen=self.num_unseen,
        )
