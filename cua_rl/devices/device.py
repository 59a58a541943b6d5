"""The seam between agents and whatever they operate."""

from typing import Literal, Protocol

from cua_rl.actions import Action
from cua_rl.types import Observation

DeviceKind = Literal["android", "linux", "browser"]


class ActionRejected(Exception):
    """The device understood the action but cannot do it; the message is told to the model (a policy fault, no
    error).
    """


class Device(Protocol):
    """One leased device. Methods raise `DeviceError` if the device itself fails, `ActionRejected` if the action
    cannot be done.
    """

    @property
    def device_id(self) -> str: ...

    @property
    def kind(self) -> DeviceKind: ...

    async def observe(self) -> Observation:
        """Take a screenshot."""
        ...

    async def execute(self, action: Action) -> None:
        """Do one action and wait until the screen has settled."""
        ...

    async def query(self, name: str) -> str:
        """Read one piece of device state by name, for set-up and validation; agents never see it.

        Raises `TaskError` for a name the device does not know.
        """
        ...

    async def close(self) -> None:
        """Give the device back; safe to call twice."""
        ...
