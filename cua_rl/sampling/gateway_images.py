"""Fetches images that agents send as links, once each and from allowed hosts only, and inlines them."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
from pybase64 import b64encode

from cua_rl.host.request_limits import host_name
from cua_rl.renderers.images import image_size
from cua_rl.renderers.request_error import RequestError
from cua_rl.types.json_values import Json, is_array, is_object

MAX_IMAGE_BYTES = 20 * 2**20
_MAX_REQUEST_BYTES = 256 * 2**20
"""Limit for all images of a request as `data:` URLs, equal to the limit for the body of a request."""
_MAX_CACHED_BYTES = 512 * 2**20
_MAX_FETCHES = 8  # at a time
_IMAGE_TYPES = ("image_url", "input_image")


class ImageFetcher:
    """Replaces links by `data:` URLs, because links expire; without allowed hosts, parsing refuses links."""

    def __init__(self, allowed_hosts: Sequence[str] = ()) -> None:
        self._allowed_hosts = frozenset(allowed_hosts)
        self._cached: dict[str, str] = {}
        self._fetching: dict[str, asyncio.Task[str]] = {}
        self._places = asyncio.Semaphore(_MAX_FETCHES)

    async def inline(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """The request with linked images inlined; raises `RequestError` for a host that is not allowed."""
        if not self._allowed_hosts:
            return request
        urls = dict.fromkeys(_linked_images(request))
        if not urls:
            return request
        data_urls = await self._data_urls(tuple(urls))
        return _replaced(request, dict(zip(urls, data_urls, strict=True)))

    async def _data_urls(self, urls: Sequence[str]) -> list[str]:
        found: list[str] = []
        for start in range(0, len(urls), _MAX_FETCHES):
            found += await asyncio.gather(*(self._data_url(url) for url in urls[start : start + _MAX_FETCHES]))
            if sum(map(len, found)) > _MAX_REQUEST_BYTES:
                raise RequestError(
                    expected=f"images of at most {_MAX_REQUEST_BYTES} bytes in a request", got="more", do="send fewer"
                )
        return found

    async def _data_url(self, url: str) -> str:
        if host_name(url) not in self._allowed_hosts:
            raise RequestError(
                expected=f"an image inside the request, or on one of {sorted(self._allowed_hosts)}",
                got=repr(url.partition("?")[0]),
                do="name its host in allowed_media_domains",
            )
        if (cached := self._cached.get(url)) is not None:
            return cached
        if url not in self._fetching:
            self._fetching[url] = asyncio.create_task(self._fetch(url))
        return await asyncio.shield(self._fetching[url])

    async def _fetch(self, url: str) -> str:
        try:
            async with self._places:
                data_url = self._cached[url] = await self._load(url)
        finally:
            del self._fetching[url]
        while sum(map(len, self._cached.values())) > _MAX_CACHED_BYTES:
            del self._cached[next(iter(self._cached))]
        return data_url

    async def _load(self, url: str) -> str:
        shown = url.partition("?")[0]  # the query is often a signature
        refused = RequestError(expected=f"an image at {shown}", got="no such image, or one too large", do="send it")
        data = bytearray()
        try:
            async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
                # no redirects, which could lead to a host that is not allowed
                async with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
                    # refuse compression: a body can expand a thousandfold
                    is_plain = response.headers.get("content-encoding", "identity") == "identity"
                    if not (response.is_success and is_plain):
                        raise refused
                    async for piece in response.aiter_raw():
                        data += piece
                        if len(data) > MAX_IMAGE_BYTES:
                            raise refused
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise RequestError(expected=f"an image at {shown}", got=type(error).__name__, do="send it again") from error
        return await asyncio.to_thread(_encode, bytes(data))


def _encode(data: bytes) -> str:
    """A PNG or JPEG image as a `data:` URL; raises `RequestError` for anything else, or one with too many pixels."""
    image_size(data)
    kind = "jpeg" if data.startswith(b"\xff\xd8\xff") else "png"
    return f"data:image/{kind};base64,{b64encode(data).decode()}"


def _linked_images(value: object) -> Iterator[str]:
    if is_object(value):
        url = _linked_url(value)
        if url is not None:
            yield url
        for inner in value.values():
            yield from _linked_images(inner)
    elif is_array(value):
        for inner in value:
            yield from _linked_images(inner)


def _linked_url(part: Mapping[str, object]) -> str | None:
    """The link of an image part: `image_url` is a string, or an object with the string as `url`."""
    if part.get("type") not in _IMAGE_TYPES:
        return None
    given = part.get("image_url")
    url = given.get("url") if is_object(given) else given
    return url if isinstance(url, str) and url.startswith(("http://", "https://")) else None


def _replaced(fields: Json, data_urls: Mapping[str, str]) -> Json:
    copy = {key: _replaced_in(inner, data_urls) for key, inner in fields.items()}
    if (url := _linked_url(fields)) is not None:
        given, inlined = fields["image_url"], data_urls[url]
        copy["image_url"] = {**given, "url": inlined} if is_object(given) else inlined
    return copy


def _replaced_in(value: object, data_urls: Mapping[str, str]) -> object:
    if is_object(value):
        return _replaced(value, data_urls)
    return [_replaced_in(inner, data_urls) for inner in value] if is_array(value) else value
