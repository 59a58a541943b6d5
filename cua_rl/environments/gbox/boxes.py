"""GBox boxes of a run: labelled with the run, terminated on release, and cleaned up when the run starts and ends."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from socket import gethostname
from typing import Literal, Self

import gbox_sdk
from gbox_sdk import AsyncGboxClient

from cua_rl.environments.android.queries import ANDROID_QUERIES
from cua_rl.environments.device import AttachDevice, Device, DeviceAbilities, DeviceKind
from cua_rl.environments.gbox.actions import duration
from cua_rl.environments.gbox.device import Capture, GboxDevice
from cua_rl.environments.gbox.service import Gbox, ask, gbox_errors
from cua_rl.environments.pool import DeviceRequest
from cua_rl.environments.query_values import LINUX_BOX_QUERIES, PHONE_QUERIES
from cua_rl.types.errors import ConfigError, DeviceError, DeviceLostError, DeviceTimeoutError

logger = logging.getLogger(__name__)

RUN_LABEL, NAME_LABEL, ROLLOUT_LABEL, TASK_LABEL = "cua_rl_run", "cua_rl_run_name", "cua_rl_rollout", "cua_rl_task"
BoxType = Literal["android", "linux"]
_PAGE_SIZE = 100
_POLL_S = 0.5
_SIDE_BY_SIDE = 16

ABILITIES: dict[BoxType, DeviceAbilities] = {
    "android": DeviceAbilities(
        name="a GBox Android box",
        has_shell=True,
        is_seeded=False,
        queries={name: PHONE_QUERIES[name] for name in ANDROID_QUERIES},
    ),
    "linux": DeviceAbilities(name="a GBox Linux box", has_shell=True, is_seeded=False, queries=LINUX_BOX_QUERIES),
}


def run_key(log_path: Path) -> str:
    """An id that is stable when a run is resumed in its folder and unique to that run."""
    return sha256(f"{gethostname()}:{log_path.absolute()}".encode()).hexdigest()[:16]


@dataclass(slots=True, kw_only=True)
class GboxBoxes:
    """The `DeviceBackend` of GBox boxes, one fresh box a rollout."""

    connect: Callable[[], Gbox]
    box_type: BoxType
    run_name: str
    run_key: str
    """Names this run among all that use the account; a resumed run has the same one."""
    expires_s: float = 3600.0
    """Boxes expire after this long even if the controller is gone."""
    start_timeout_s: float = 120.0
    """The longest that GBox may take to start one; it deletes those that take longer."""
    capture: Capture = field(default_factory=Capture)
    recordings: Path | None = None
    """Folder for videos of the rollouts; None records none."""
    _gbox: Gbox | None = field(default=None, init=False)

    @property
    def abilities(self) -> DeviceAbilities:
        return ABILITIES[self.box_type]

    async def make(self, request: DeviceRequest) -> Device:
        """A new box whose screen has been seen; raises `DeviceError`."""
        gbox = self._open()
        client = gbox.client
        labels = {TASK_LABEL: request.task_id[:63], ROLLOUT_LABEL: request.rollout_id}
        box_id, is_running = await self._create(client, labels)
        film = self.recordings
        device = GboxDevice(
            gbox,
            box_id,
            kind=self.box_type,
            end=self._terminate,
            capture=self.capture,
            recording_path=None if film is None else film / f"{request.rollout_id or box_id}.mp4",
        )
        try:
            if not is_running:
                await self._await_running(client, box_id)
            await device.check()
            if film is not None:
                await device.start_recording()
        except BaseException:
            await asyncio.shield(self._terminate(box_id))
            raise
        return device

    async def __aenter__(self) -> Self:
        self._gbox = self.connect()
        try:
            await self._check_key(self._gbox.client)
            num_removed = await self.remove_boxes()
        except BaseException:
            await self._disconnect()
            raise
        if num_removed:
            logger.warning("terminated %d boxes that an earlier attempt at this run had left", num_removed)
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            num_removed = await self.remove_boxes()
            if num_removed:
                logger.warning("terminated %d boxes at the end of the run that no lease had returned", num_removed)
        except DeviceError as failure:
            logger.warning("boxes of this run may be left over; they expire by themselves: %s", failure)
        finally:
            await self._disconnect()

    async def remove_boxes(self) -> int:
        """Terminate every living box with the run's label; returns how many there were. Raises `DeviceError`."""
        client = self._open().client
        left = await self._list_box_ids(client)
        side_by_side = asyncio.Semaphore(_SIDE_BY_SIDE)

        async def remove(box_id: str) -> None:
            async with side_by_side:
                await self._terminate(box_id)

        async with asyncio.TaskGroup() as removing:
            for box_id in left:
                removing.create_task(remove(box_id), name=f"remove-{box_id}")
        return len(left)

    async def _check_key(self, client: AsyncGboxClient) -> None:
        """Check the API key once, before any box is made; raises `ConfigError`."""
        try:
            await client.v1.boxes.list(page=1, page_size=1)
        except (gbox_sdk.AuthenticationError, gbox_sdk.PermissionDeniedError) as error:
            raise ConfigError(
                f"gbox_api_key: expected a key that GBox at {client.base_url} accepts, got status {error.status_code}; "
                "set GBOX_API_KEY, and GBOX_CLIENT_BASE_URL for a server of your own"
            ) from error
        except gbox_sdk.GboxClientError:
            return  # nothing to do with the key: asked again below, with retries

    async def _create(self, client: AsyncGboxClient, labels: dict[str, str]) -> tuple[str, bool]:
        """The new box, and whether it runs already, as it should: creation waits for that."""
        create = client.v1.boxes.create_android
        if self.box_type == "linux":
            create = client.v1.boxes.create_linux
        marks = {RUN_LABEL: self.run_key, NAME_LABEL: self.run_name[:63], **labels}
        with gbox_errors(f"start a {self.box_type} box"):
            box = await create(
                config={"expires_in": duration(self.expires_s), "labels": marks},
                wait=True,
                api_timeout=duration(self.start_timeout_s),
                timeout=self.start_timeout_s + 30.0,
            )
        return box.id, box.status == "running"

    async def _await_running(self, client: AsyncGboxClient, box_id: str) -> None:
        deadline = time.monotonic() + self.start_timeout_s
        while True:
            box = await ask(lambda: client.v1.boxes.retrieve(box_id), f"show {box_id!r}", is_repeatable=True)
            if box.status == "running":
                return
            if box.status != "pending":
                raise DeviceLostError(f"expected box {box_id!r} to run, got {box.status!r}: {box.reason!r}")
            if time.monotonic() > deadline:
                raise DeviceTimeoutError(f"expected box {box_id!r} to run, it is pending for too long")
            await asyncio.sleep(_POLL_S)

    async def _list_box_ids(self, client: AsyncGboxClient) -> list[str]:
        """All living boxes with the run's label. The server may filter by labels, we do in any case."""
        found: list[str] = []
        page = 1
        while True:
            answer = await ask(
                lambda page=page: client.v1.boxes.list(
                    page=page,
                    page_size=_PAGE_SIZE,
                    status=["pending", "running"],
                    labels={RUN_LABEL: self.run_key},
                ),
                "list boxes",
                is_repeatable=True,
            )
            found += [
                box.id
                for box in answer.data
                if box.config.labels.get(RUN_LABEL) == self.run_key and box.status in ("pending", "running")
            ]
            if len(answer.data) < _PAGE_SIZE:
                return found
            page += 1

    async def _terminate(self, box_id: str) -> None:
        """End a box; one that is gone already is fine."""
        client = self._open().client
        try:
            await ask(
                lambda: client.v1.boxes.terminate(box_id, wait=False), f"terminate {box_id!r}", is_repeatable=True
            )
        except DeviceLostError:
            logger.debug("box_id=%s was gone before it was terminated", box_id)

    def _open(self) -> Gbox:
        if self._gbox is None:
            raise RuntimeError("expected the backend to be entered before it makes devices")
        return self._gbox

    async def _disconnect(self) -> None:
        gbox, self._gbox = self._open(), None
        await gbox.client.close()


@asynccontextmanager
async def open_held_boxes(gbox: Gbox, kind: DeviceKind) -> AsyncGenerator[AttachDevice]:
    """Attach to boxes by id; the connections are dropped at the end."""

    async def attach(box_id: str) -> Device:
        device = GboxDevice(gbox, box_id, kind=kind, end=leave)
        await device.check()
        return device

    async def leave(box_id: str) -> None:
        """The server ends the box with its execution."""

    try:
        yield attach
    finally:
        await gbox.client.close()
