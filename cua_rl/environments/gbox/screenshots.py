"""Screenshots as GBox hands them out: a data URI, or a key of its storage with an address that expires."""

import asyncio
import io
import struct
from base64 import b64decode

import httpx
from PIL import Image

from cua_rl.environments.gbox.service import Gbox, ask
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, DeviceServiceError, DeviceTimeoutError, boundary

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
