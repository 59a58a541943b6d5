"""GBox boxes that a gym server holds: operated from here, ended by the server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from cua_rl.devices.device import Device, DeviceKind
from cua_rl.devices.gbox.device import GboxDevice
from cua_rl.devices.gbox.service import Gbox
from cua_rl.devices.gym.device import AttachDevice


@asynccontextmanager
async def open_held_boxes(gbox: Gbox, kind: DeviceKind) -> AsyncGenerator[AttachDevice]:
    """Attach to boxes by id; the connections are dropped at the end."""

    async def attach(box_id: str) -> Device:
        device = GboxDevice(gbox, box_id, kind=kind, end=_leave)
        await device.check()
        return device

    try:
        yield attach
    finally:
        await gbox.client.close()


async def _leave(box_id: str) -> None:
    """The server ends the box with its execution."""
