"""A GBox box as a device: an Android phone or a Linux desktop, screenshots and actions over HTTP."""

import asyncio
import io
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Literal

import gbox_sdk
import httpx
from gbox_sdk import omit
from gbox_sdk.types.v1.boxes import ActionResult
from gbox_sdk.types.v1.boxes.action_common_options_param import ActionCommonOptionsParam
from PIL import Image
from pybase64 import b64decode

from cua_rl.environments.android.queries import read_android_query
from cua_rl.environments.android.shell import DeviceShell
from cua_rl.environments.app_names import find_package
from cua_rl.environments.device import ActionRejected, DeviceKind, ShellDevice
from cua_rl.environments.gbox.actions import duration, perform
from cua_rl.environments.gbox.service import Gbox, ask, gbox_errors
from cua_rl.types.actions import Action, OpenApp, Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, DeviceServiceError, DeviceTimeoutError, TaskError, boundary

_TIMED_OUT = 124  # exit status of a command that ran past the API's own limit
_COMMAND_S = 60.0


_YES, _NO = "cua_rl:true", "cua_rl:false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """How screenshots are taken."""

    settle_s: float = 0.5
    """Pause between an action and its screenshot, for animations to end."""
    is_stored: bool = False
    """Through GBox's storage, by addresses that expire, instead of inside the answer."""

    @property
    def output_format(self) -> Literal["storageKey", "base64"]:
        return "storageKey" if self.is_stored else "base64"

    def options(self) -> ActionCommonOptionsParam:
        """Ask for the screenshot after an action together with the action."""
        delay = duration(self.settle_s)
        return {"screenshot": {"phases": ["after"], "delay": delay, "output_format": self.output_format}}


class GboxDevice:
    """One box. `end` terminates it; it is called once, by `close`."""

    def __init__(
        self,
        gbox: Gbox,
        box_id: str,
        *,
        kind: DeviceKind,
        end: Callable[[str], Awaitable[None]],
        capture: Capture | None = None,
        recording_path: Path | None = None,
    ) -> None:
        self._gbox = gbox
        self._client = gbox.client
        self.device_id = box_id
        self.kind: DeviceKind = kind
        self._end = end
        self._capture = capture or Capture()
        self._recording_path = recording_path
        self._is_recording = False
        self._is_closed = False
        self._shown: EncodedImage | None = None
        """The screenshot that came with the last action, until somebody looks or the box may have changed."""

    async def observe(self) -> EncodedImage:
        """The screen: as the last action's answer showed it, else a new screenshot; raises `DeviceError`."""
        self._check_open("take a screenshot")
        shown, self._shown = self._shown, None
        return shown or await self._take_screenshot()

    async def check(self) -> None:
        """Check that the box shows a screen; raises `DeviceError`. The next `observe` gives this screenshot."""
        self._shown = await self._take_screenshot()

    async def execute(self, action: Action) -> None:
        """Do one action; its screenshot comes in the same answer. Raises `ActionRejected` and `DeviceError`."""
        self._check_open("act")
        self._shown = None
        match action:
            case Wait(duration_s=duration_s):
                await asyncio.sleep(duration_s)
            case OpenApp(name=name) if self.kind == "android":
                await self.open_app(find_package(name, await self.list_apps()))
                await asyncio.sleep(self._capture.settle_s)
            case _:
                result = await self._perform(action)
                after = result.screenshot.after if result.screenshot else None
                if after is not None and after.uri:  # without one, `observe` takes a screenshot
                    self._shown = await fetch_observation(self._gbox, self.device_id, after.uri, after.presigned_url)

    async def query(self, name: str) -> str:
        """Read one piece of state through the shell; raises `TaskError` for an unknown name."""
        if self.kind == "android":
            return await read_android_query(DeviceShell(self), name)
        return await read_linux_query(self, name)

    async def shell(self, command: str) -> str:
        """Run a command and return what it printed; raises `DeviceError`, also if it takes more than a minute."""
        self._check_open("run a command")
        self._shown = None
        result = await ask(
            lambda: self._client.v1.boxes.execute_commands(
                self.device_id, command=command, api_timeout=duration(_COMMAND_S), timeout=_COMMAND_S + 30
            ),
            f"run {command!r} in {self.device_id!r}",
            is_repeatable=False,
        )
        if result.exit_code == _TIMED_OUT:
            raise DeviceTimeoutError(f"expected {command!r} to end within {_COMMAND_S:g} s in {self.device_id!r}")
        return result.stdout if result.exit_code == 0 else result.stdout + result.stderr

    async def list_apps(self) -> list[str]:
        """Packages of the apps that can be opened (Android)."""
        apps = await ask(
            lambda: self._client.v1.boxes.android.list_app(self.device_id), "list the apps", is_repeatable=True
        )
        return [app.package_name for app in apps.data]

    async def install_app(self, source: str) -> None:
        """Install an app from an address, or from an APK file of this machine (Android); raises `DeviceError`."""
        self._check_open("install an app")
        self._shown = None
        apk = source if source.startswith(("http://", "https://")) else Path(source)
        with gbox_errors(f"install {source!r}"):
            await self._client.v1.boxes.android.install(self.device_id, apk=apk, timeout=300.0)

    async def open_app(self, package: str, activity: str = "") -> None:
        """Open an app (Android), at its main activity unless one is named; raises `DeviceError`."""
        self._check_open("open an app")
        self._shown = None
        with gbox_errors(f"open {package!r}"):
            await self._client.v1.boxes.android.open(package, box_id=self.device_id, activity_name=activity or omit)

    async def start_recording(self) -> None:
        """Start to record the screen; raises `DeviceError`."""
        with gbox_errors("start a recording"):
            await self._client.v1.boxes.actions.recording_start(self.device_id)
        self._is_recording = True

    async def stop_recording(self) -> bytes:
        """Stop recording and download the video; raises `DeviceError`."""
        self._is_recording = False
        with gbox_errors("stop the recording"):
            film = await self._client.v1.boxes.actions.recording_stop(self.device_id)
        return await fetch_stored(
            self._gbox, self.device_id, storage_key=film.storage_key, presigned_url=film.presigned_url
        )

    async def close(self) -> None:
        """Keep the recording, if there is one, and terminate the box; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._is_recording and self._recording_path is not None:
                film = await self.stop_recording()
                self._recording_path.parent.mkdir(parents=True, exist_ok=True)
                await asyncio.to_thread(self._recording_path.write_bytes, film)
        finally:
            await self._end(self.device_id)

    async def _perform(self, action: Action) -> ActionResult:
        async def act() -> ActionResult:
            try:
                return await perform(self._client, self.device_id, self.kind, action, self._capture.options())
            except (gbox_sdk.BadRequestError, gbox_sdk.UnprocessableEntityError) as error:
                raise ActionRejected(f"this device refused: {error.message[:200]}") from error

        return await ask(act, f"do {action!r} in {self.device_id!r}", is_repeatable=False)

    async def _take_screenshot(self) -> EncodedImage:
        shot = await ask(
            lambda: self._client.v1.boxes.actions.screenshot(self.device_id, output_format=self._capture.output_format),
            f"take a screenshot of {self.device_id!r}",
            is_repeatable=True,
        )
        return await fetch_observation(self._gbox, self.device_id, shot.uri, shot.presigned_url)

    def _check_open(self, doing: str) -> None:
        if self._is_closed:
            raise DeviceError(f"expected an open box to {doing}, got {self.device_id!r}, which is closed")


async def read_linux_query(device: ShellDevice, name: str) -> str:
    """Read "file_exists:/a", "file_text:/a" ("" without such a file) or "app_running:firefox"; raises `TaskError`."""
    base, _, argument = name.partition(":")
    read = LINUX_QUERIES.get(base)
    if read is None or not argument:
        known = ", ".join(f"{query}:..." for query in sorted(LINUX_QUERIES))
        raise TaskError(f"expected a query that a Linux box answers, got {name!r}; choose one of {known}")
    return await read(device, argument)


async def _test(device: ShellDevice, condition: str) -> str:
    said = (await device.shell(f"if {condition}; then echo {_YES}; else echo {_NO}; fi")).strip()
    if said not in (_YES, _NO):
        raise DeviceError(f"expected {_YES} or {_NO} from {device.device_id!r}, got {said[:200]!r}")
    return said.removeprefix("cua_rl:")


async def _file_exists(device: ShellDevice, path: str) -> str:
    return await _test(device, f"test -e {quote(path)}")


async def _file_text(device: ShellDevice, path: str) -> str:
    if await _file_exists(device, path) == "false":
        return ""
    return (await device.shell(f"cat {quote(path)}")).removesuffix("\n")


LINUX_QUERIES: Mapping[str, Callable[[ShellDevice, str], Awaitable[str]]] = {
    "file_exists": _file_exists,
    "file_text": _file_text,
    "app_running": lambda device, program: _test(device, f"pgrep -x {quote(program)} >/dev/null"),
}


_PNG = b"\x89PNG\r\n\x1a\n"
_DOWNLOAD_TIMEOUT_S = 60.0
_EXPIRED = (400, 401, 403, 404, 410)
"""The statuses with which storages refuse an expired address."""


async def fetch_observation(gbox: Gbox, box_id: str, uri: str, presigned_url: str | None) -> EncodedImage:
    """The screenshot behind an answer's `uri`; raises `DeviceError`."""
    if uri.startswith("data:"):
        head, comma, body = uri.partition(",")
        if not comma or not head.endswith(";base64"):
            raise DeviceError(f"expected a screenshot as data:image/png;base64,... from GBox, got {uri[:60]!r}")
        with boundary(DeviceError, "read a screenshot of GBox"):
            return await asyncio.to_thread(lambda: build_observation(b64decode(body)))
    address = uri if uri.startswith(("http://", "https://")) else presigned_url
    data = await fetch_stored(gbox, box_id, storage_key=uri, presigned_url=address)
    with boundary(DeviceError, "read a screenshot of GBox"):
        return await asyncio.to_thread(build_observation, data)


async def fetch_stored(gbox: Gbox, box_id: str, *, storage_key: str, presigned_url: str | None) -> bytes:
    """Download from a box's storage; an expired address is requested again, once."""
    if presigned_url is not None:
        response = await _get(gbox.http, presigned_url)
        if response.is_success:
            return response.content
        if response.status_code not in _EXPIRED:
            raise DeviceServiceError(_no_download(storage_key, response))
    url = await ask(
        lambda: gbox.client.v1.boxes.storage.presigned_url(box_id, storage_key=storage_key),
        f"make an address for {storage_key!r}",
        is_repeatable=True,
    )
    response = await _get(gbox.http, url.strip().strip('"'))
    if not response.is_success:
        raise DeviceServiceError(_no_download(storage_key, response))
    return response.content


def build_observation(data: bytes) -> EncodedImage:
    """A screenshot from an encoded image; what is no PNG becomes one."""
    if not data.startswith(_PNG):
        encoded = io.BytesIO()
        try:
            with Image.open(io.BytesIO(data)) as picture:
                picture.convert("RGB").save(encoded, "PNG")
        except OSError as error:
            raise DeviceError(
                f"expected an image from GBox, got {len(data)} bytes that begin {data[:40]!r} ({error})"
            ) from error
        data = encoded.getvalue()
    width_px, height_px = struct.unpack(">II", data[16:24])
    return EncodedImage(data=data, format="png", width_px=width_px, height_px=height_px)


async def _get(http: httpx.AsyncClient, url: str) -> httpx.Response:
    try:
        return await http.get(url, timeout=_DOWNLOAD_TIMEOUT_S, follow_redirects=True)
    except httpx.TimeoutException as error:
        raise DeviceTimeoutError(f"expected a download from GBox within {_DOWNLOAD_TIMEOUT_S:g} s, got none") from error
    except httpx.HTTPError as error:
        raise DeviceServiceError(f"expected a download from GBox, got {type(error).__name__}: {error}") from error


def _no_download(storage_key: str, response: httpx.Response) -> str:
    return f"expected to download {storage_key!r} from GBox, got status {response.status_code}"
