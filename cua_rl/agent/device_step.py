"""One step on the device: an action that an agent asked for, and its result."""

import time
from dataclasses import dataclass

from cua_rl.environments.device import ActionRejected, Device
from cua_rl.types.actions import Action, Click, DoubleClick, Drag, MoveMouse, RightClick
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import UnusableError


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStep:
    """An action that was executed, or the error that the agent was shown instead."""

    action: Action | None = None
    """None if it could not be parsed or ended the rollout."""
    error: str | None = None
    after: EncodedImage | None = None
    execute_s: float = 0.0
    observe_s: float = 0.0
    is_last: bool = False
    """Whether it left a device that shows and takes nothing more, which ends the rollout."""


async def perform(device: Device, action: Action) -> DeviceStep:
    """Execute an action and take a screenshot; raises `DeviceError`."""
    clock = time.monotonic()
    try:
        await device.execute(action)
        executed = time.monotonic()
        after = await device.observe()
    except ActionRejected as error:
        message = str(error) or "The device cannot do this."
        return DeviceStep(action=action, error=message, execute_s=time.monotonic() - clock)
    except UnusableError as error:
        return DeviceStep(action=action, error=str(error), execute_s=time.monotonic() - clock, is_last=True)
    return DeviceStep(action=action, after=after, execute_s=executed - clock, observe_s=time.monotonic() - executed)


def cursor_after(action: Action) -> tuple[int, int] | None:
    """Position of the mouse after the action, pixels; None if the action does not move it."""
    match action:
        case Click() | DoubleClick() | RightClick() | MoveMouse():
            return (action.x, action.y)
        case Drag():
            return (action.to_x, action.to_y)
        case _:
            return None
