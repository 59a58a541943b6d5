"""Executes one action of an agent on the device, and returns its result."""

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
    more_actions: tuple[Action, ...] = ()
    """What the same answer asked for after it, up to the action that was refused."""
    error: str | None = None
    after: EncodedImage | None = None
    execute_s: float = 0.0
    observe_s: float = 0.0
    is_last: bool = False
    """Whether it left a device that shows and takes nothing more, which ends the rollout."""


async def perform(device: Device, *actions: Action) -> DeviceStep:
    """Execute actions up to one that is refused, and take a screenshot if any was; raises `DeviceError`."""
    clock = executed = time.monotonic()
    tried, error, after = list[Action](), None, None
    is_last = False
    try:
        try:
            for action in actions:
                tried.append(action)
                await device.execute(action)
        except ActionRejected as refused:
            error = str(refused) or "The device cannot do this."
        executed = time.monotonic()
        if error is None or len(tried) > 1:
            after = await device.observe()
    except UnusableError as unusable:
        error, is_last = str(unusable), True
    return DeviceStep(
        action=actions[0],
        more_actions=tuple(tried[1:]),
        error=error,
        after=after,
        execute_s=executed - clock,
        observe_s=time.monotonic() - executed,
        is_last=is_last,
    )


def cursor_after(action: Action) -> tuple[int, int] | None:
    """Position of the mouse after the action, pixels; None if the action does not move it."""
    match action:
        case Click() | DoubleClick() | RightClick() | MoveMouse():
            return (action.x, action.y)
        case Drag():
            return (action.to_x, action.to_y)
        case _:
            return None
