"""Images that agents send as links: fetched once, from hosts that the run allows, and put into the request itself."""

import asyncio
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import httpx

from cua_rl.renderers.request_error import RequestError

MAX_IMAGE_BYTES = 20 * 2**20
_MAX_CACHED = 512
_IMAGE_TYPES = ("image_url", "input_image")


class ImageFetcher:
    """Turns links into `data:` URLs, since training needs the bytes and links expire.

    With no hosts allowed, requests stay as they are, and links are refused where the request is read.
    """

    def __init__(self, allowed_hosts: Sequence[str] = (), *, timeout_s: float = 60.0) -> None:
        self._allowed_hosts = frozenset(allowed_hosts)
        self._timeout_s = timeout_s
        self._fetched: dict[str, asyncio.Task[str]] = {}

    async def inline(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request with its linked images inside it; raises `RequestError` for a host that is not allowed."""
        if not self._allowed_hosts:
            return request
        urls = dict.fromkeys(_linked_images(request))
        if not urls:
            return request
        data_urls = await asyncio.gather(*(self._data_url(url) for url in urls))
        return cast("Mapping[str, Any]", _replaced(request, dict(zip(urls, data_urls, strict=True))))

    async def _data_url(self, url: str) -> str:
        if urlsplit(url).hostname not in self._allowed_hosts:
            raise RequestError(
                expected=f"an image inside the request, or on one of {sorted(self._allowed_hosts)}",
                got=repr(url.partition("?")[0]),
                do="name its host in allowed_media_domains",
            )
        fetching = self._fetched.get(url)
        if fetching is None:
            while len(self._fetched) >= _MAX_CACHED:
                del self._fetched[next(iter(self._fetched))]
            fetching = self._fetched[url] = asyncio.create_task(self._fetch(url))
        try:
            return await asyncio.shield(fetching)
        except RequestError:
            self._fetched.pop(url, None)
            raise

    async def _fetch(self, url: str) -> str:
        shown = url.partition("?")[0]  # what follows is often a signature
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                data = await _read(client, url)
        except httpx.HTTPError as error:
            raise RequestError(expected=f"an image at {shown}", got=type(error).__name__, do="send it again") from error
        if data is None:
            raise RequestError(expected=f"an image at {shown}", got="no such image, or one too large", do="send it")
        kind = "jpeg" if data.startswith(b"\xff\xd8\xff") else "png"
        return f"data:image/{kind};base64,{(await asyncio.to_thread(b64encode, data)).decode()}"


async def _read(client: httpx.AsyncClient, url: str) -> bytes | None:
    """The bytes behind a link, or None if there are none or too many; redirects are not followed."""
    async with client.stream("GET", url) as response:
        if not response.is_success:
            return None
        data = bytearray()
        async for piece in response.aiter_bytes():
            data += piece
            if len(data) > MAX_IMAGE_BYTES:
                return None
        return bytes(data)


def _linked_images(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, object]", value)
        url = _linked_url(fields)
        if url is not None:
            yield url
        for inner in fields.values():
            yield from _linked_images(inner)
    elif isinstance(value, list):
        for inner in cast("list[object]", value):
            yield from _linked_images(inner)


def _linked_url(part: Mapping[str, object]) -> str | None:
    """The link of an image part, in either form: `image_url` is a text or holds one as `url`."""
    if part.get("type") not in _IMAGE_TYPES:
        return None
    given = part.get("image_url")
    url = cast("Mapping[str, object]", given).get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) and url.startswith(("http://", "https://")) else None


def _replaced(value: object, data_urls: Mapping[str, str]) -> object:
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, object]", value)
        copy = {key: _replaced(inner, data_urls) for key, inner in fields.items()}
        url = _linked_url(fields)
        return copy if url is None else copy | {"image_url": _in_form(fields["image_url"], data_urls[url])}
    if isinstance(value, list):
        return [_replaced(inner, data_urls) for inner in cast("list[object]", value)]
    return value


def _in_form(given: object, url: str) -> object:
    return {**cast("Mapping[str, object]", given), "url": url} if isinstance(given, Mapping) else url
