"""Screenshots that a model server has processed; later requests name them (`uuid`) instead of sending them again."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from cua_rl.types.conversation import EncodedImage
from cua_rl.types.json_values import JsonDict, is_array, is_object, mapping, sequence

_FIRST_VERSION = (0, 32)
"""The oldest version tested; a server that ignores names would leave the images out of the prompt."""
_MOST_NAMES = 65536
_CONTENT_PARTS = "content_parts"  # images of a prompt that is sent as tokens
_IMAGES = ("input_image", "image_url")
MISSING_DATA = "data is not provided"
"""Part of vLLM's error message for an image that it has evicted."""


def takes_names(version: str) -> bool:
    """Whether a server of this vLLM version takes images by name."""
    found = re.match(r"(\d+)\.(\d+)\.", version)
    return found is not None and (int(found[1]), int(found[2])) >= _FIRST_VERSION


def name_images(conversation: Sequence[Mapping[str, object]]) -> None:
    """Name every image of a Responses request by the SHA-256 of its bytes, in place."""
    for part in _image_parts({"input": conversation}):
        if isinstance(image := part["image_url"], EncodedImage):
            part["uuid"] = image.sha256


class KnownImages:
    """Names of the images in one server's cache, most recently used last."""

    def __init__(self) -> None:
        self._names: dict[object, None] = {}

    def leave_out(self, request: Mapping[str, object]) -> Mapping[str, object]:
        """The request without the data of known images; the same object if it contains none."""
        if not any(part.get("uuid") in self._names for part in _image_parts(request)):
            return request
        if _CONTENT_PARTS in request:
            return {**request, _CONTENT_PARTS: self._without_data(request[_CONTENT_PARTS], "url")}
        conversation = map(mapping, sequence(request["input"]))
        items = [{key: self._without_data(value, "image_url") for key, value in item.items()} for item in conversation]
        return {**request, "input": items}

    def _without_data(self, content: object, name: str) -> object:
        if not is_array(content):
            return content
        return [
            {**part, name: None} if is_object(part) and part.get("uuid") in self._names else part for part in content
        ]

    def add(self, request: Mapping[str, object]) -> None:
        for part in _image_parts(request):
            if (name := part.get("uuid")) is not None:
                self._names.pop(name, None)
                self._names[name] = None
        while len(self._names) > _MOST_NAMES:
            del self._names[next(iter(self._names))]

    def forget(self, request: Mapping[str, object]) -> None:
        """Note that the server has evicted at least one image of this request."""
        for part in _image_parts(request):
            self._names.pop(part.get("uuid"), None)


def _image_parts(request: Mapping[str, object]) -> Iterator[JsonDict]:
    contents = [request.get(_CONTENT_PARTS)]
    for item in map(mapping, sequence(request.get("input"))):
        contents += (item.get("content"), item.get("output"))
    for content in contents:
        yield from (part for part in cast("Sequence[JsonDict]", sequence(content)) if part.get("type") in _IMAGES)
