"""Images that agents send as links: fetched once from allowed hosts, and inlined into the request."""

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
    """Replaces links by `data:` URLs, because training needs the bytes and links expire.

    If no hosts are allowed, requests are not changed, and links are refused when the request is parsed.
    """

    def __init__(self, allowed_hosts: Sequence[str] = (), *, timeout_s: float = 60.0) -> None:
        self._allowed_hosts = frozenset(allowed_hosts)
        self._timeout_s = timeout_s
        self._fetched: dict[str, asyncio.Task[str]] = {}

    async def inline(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request with linked images inlined; raises `RequestError` for a host that is not allowed."""
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
        shown = url.partition("?")[0]  # the query is often a signature
        refused = RequestError(expected=f"an image at {shown}", got="no such image, or one too large", do="send it")
        data = bytearray()
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                # redirects are not followed: they could lead to a host that is not allowed
                async with client.stream("GET", url) as response:
                    if not response.is_success:
                        raise refused
                    async for piece in response.aiter_bytes():
                        data += piece
                        if len(data) > MAX_IMAGE_BYTES:
                            raise refused
        except httpx.HTTPError as error:
            raise RequestError(expected=f"an image at {shown}", got=type(error).__name__, do="send it again") from error
        kind = "jpeg" if data.startswith(b"\xff\xd8\xff") else "png"
        return f"data:image/{kind};base64,{(await asyncio.to_thread(b64encode, data)).decode()}"


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
    """The link of an image part: `image_url` is a string, or an object with the string as `url`."""
    if part.get("type") not in _IMAGE_TYPES:
        return None
    given = part.get("image_url")
    url = cast("Mapping[str, object]", given).get("url") if isinstance(given, Mapping) else given
    return url if isinstance(url, str) and url.startswith(("http://", "https://")) else None


def _replaced(value: object, data_urls: Mapping[str, str]) -> object:
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, object]", value)
        copy = {key: _replaced(inner, data_urls) for key, inner in fields.items()}
        if (url := _linked_url(fields)) is not None:
            given, inlined = fields["image_url"], data_urls[url]
            is_object = isinstance(given, Mapping)
            copy["image_url"] = {**cast("Mapping[str, object]", given), "url": inlined} if is_object else inlined
        return copy
    if isinstance(value, list):
        return [_replaced(inner, data_urls) for inner in cast("list[object]", value)]
    return value
