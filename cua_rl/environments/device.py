"""The interface between agents and devices."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from cua_rl.environments.query_values import Query
from cua_rl.types.actions import Action, MoveMouse, RightClick
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.snapshot import Snapshot

DeviceKind = Literal["android", "linux", "browser"]


class ActionRejected(Exception):
    """The device cannot execute the action. The message is shown to the model: a mistake of the policy, not a fault."""


NOT_ON_PHONES: Mapping[type, str] = {
    RightClick: "a phone has no right mouse button: tap or long-press instead",
    MoveMouse: "a phone has no mouse: tap instead",
}
"""What the model is told about actions that no phone can do."""


class Device(Protocol):
    """One leased device. Methods raise `DeviceError` if it fails, and `ActionRejected` if it cannot do an action."""

    @property
    def device_id(self) -> str: ...

    @property
    def kind(self) -> DeviceKind: ...

    async def observe(self) -> EncodedImage:
        """Take a screenshot."""
        ...

    async def execute(self, action: Action) -> None:
        """Execute one action and wait until the screen has settled."""
        ...

    async def query(self, name: str) -> str:
        """Read one piece of device state by name, for set-up and validation; agents never see it.

        Raises `TaskError` for a name the device does not know.
        """
        ...

    async def close(self) -> None:
        """Give the device back; safe to call twice."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceAround:
    """What a device that wraps another one leaves to it."""

    device: Device

    @property
    def device_id(self) -> str:
        return self.device.device_id

    @property
    def kind(self) -> DeviceKind:
        return self.device.kind

    async def query(self, name: str) -> str:
        return await self.device.query(name)

    async def close(self) -> None:
        await self.device.close()


@runtime_checkable
class ShellDevice(Device, Protocol):
    """A device with a shell, as Android devices have through adb."""

    async def shell(self, command: str) -> str:
        """Run a command on the device and return what it printed, whatever its exit status.

        Raises `DeviceError` if the command could not be run.
        """
        ...


@runtime_checkable
class AppDevice(Device, Protocol):
    """A device on which apps can be installed and opened."""

    async def install_app(self, source: str) -> None:
        """Install an app from an address, or from a file of this machine; raises `DeviceError`."""
        ...

    async def open_app(self, package: str, activity: str = "") -> None:
        """Open an app, at its main activity unless one is named; raises `DeviceError`."""
        ...


@runtime_checkable
class CopiedDevice(Device, Protocol):
    """A device that can be copied: its environment makes others that go on exactly as it would."""

    async def snapshot(self) -> Snapshot | None:
        """All of its state now; nothing that happens to the device later changes it. None if it cannot be copied."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """The agent's account of its work; `success_claimed` is only its claim."""

    answer: str | None = None
    success_claimed: bool | None = None
    num_turns: int | None = None
    max_turns: int | None = None
    errors: tuple[str, ...] = ()


@runtime_checkable
class ReportedDevice(Device, Protocol):
    """A device whose service evaluates the task itself, and takes the agent's report into account."""

    def report(self, report: AgentReport) -> None:
        """How the agent's work ended; called before validation."""
        ...


@runtime_checkable
class RemoteDevice(Device, Protocol):
    """A device of a server at which an agent elsewhere can operate it."""

    @property
    def address(self) -> Mapping[str, str]:
        """How such an agent finds the device, as the server's protocol says it."""
        ...


AttachDevice = Callable[[str], Awaitable[Device]]
"""From the id of a device that a server holds to the device; closing it only lets go of it."""

Direction = Literal["up", "down", "left", "right"]
Pixel = tuple[int, int]


class Grounder(Protocol):
    """Finds described elements on a screenshot; raises `DeviceError` if its model does not answer."""

    async def find(self, seen: EncodedImage, target: str) -> Pixel | None:
        """The pixel of an element; None if it is not on the screen."""
        ...

    async def find_drag(self, seen: EncodedImage, target: str, destination: str) -> tuple[Pixel, Pixel] | None:
        """Both ends of a drag; None if one of the elements is not on the screen."""
        ...

    async def find_scroll(self, seen: EncodedImage, target: str, direction: Direction) -> tuple[Pixel, int] | None:
        """Where to scroll, and how far in pixels (0 if unknown); None if the element is not on the screen."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Screen:
    """The size of a device's screenshots."""

    kind: DeviceKind
    width_px: int
    height_px: int

    def scaled(self, factor: float) -> "Screen":
        """The screen with both sides times `factor`."""
        return replace(self, width_px=int(self.width_px * factor), height_px=int(self.height_px * factor))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceAbilities:
    """What the devices of a run can do, known before one is leased: which tasks can run there."""

    name: str
    """For messages, such as "the embedded simulator"."""
    has_shell: bool
    """They are `ShellDevice`s."""
    is_seeded: bool
    """A task's seed makes the device: instances of a template differ, and can be told how to begin."""
    is_repeatable: bool = True
    """Actions of a rollout show the same on another device for its task, or it can be copied: it may have branches."""
    environment: str | None = None
    """The environment whose tasks, and no others, run there; None for tasks without devices of their own."""
    queries: Mapping[str, Query] | None = None
    """What `query` knows, by name without what may follow a colon; None if only a device can tell."""
