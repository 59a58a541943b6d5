"""Images as agents send them inside the JSON of a request: `data:` URLs, or their names within this process."""

import binascii
import re
from collections.abc import Mapping
from hashlib import sha256

from pybase64 import b64decode

from cua_rl.renderers.images import image_size
from cua_rl.renderers.openai_fields import FieldPath
from cua_rl.types.conversation import EncodedImage, ImageFormat
from cua_rl.types.json_values import is_array, is_object

_HEAD = re.compile(r"data:image/(?:png|jpeg|jpg);base64,")
_OPENING = b'"data:image/'
_FIELD = re.compile(rb'"(?:image_url|url)"\s*:\s*$')
_LONGEST_FIELD = 32
_MAGIC: Mapping[ImageFormat, bytes] = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}


class ImageUrls:
    """Images and their `data:` URLs, in both directions.

    An agent sends its whole conversation with every request. A rollout therefore keeps one `ImageUrls`: each of its
    screenshots is decoded once, however many requests repeat it. An agent in this process sends names instead, so a
    request is short however many screenshots it has; `with_names` makes the requests of other agents as short before
    they are parsed. Images are kept as long as this object, URLs only as their hashes.
    """

    def __init__(self) -> None:
        self._images: dict[str, EncodedImage] = {}  # by name
        self._digests: dict[bytes, EncodedImage] = {}  # by the SHA-256 of their URLs
        self._given: set[str] = set()  # names that stay valid
        self._lent: set[str] = set()  # names in requests since URLs were last forgotten, which may be under way
        self.num_characters = 0
        """Length of the URLs of all images that are recognised."""

    def url(self, image: EncodedImage) -> str:
        """The image as a URL, from which `image` gives back this object."""
        url = image.data_url()
        self._remember(sha256(url.encode()).digest(), image, len(url))
        return url

    def name(self, image: EncodedImage) -> str:
        """A short name of the image, from which `image` gives back this object; no other `ImageUrls` knows it."""
        self._given.add(_name(image))
        self._images.setdefault(_name(image), image)
        return _name(image)

    def forget_urls(self) -> None:
        """Recognise no URL any more, and free the images that were only sent as one; names stay valid."""
        names = self._given | self._lent
        self._images = {name: image for name, image in self._images.items() if name in names}
        self._lent = set()
        self._digests, self.num_characters = {}, 0

    def with_names(self, body: bytes) -> bytes:
        """The JSON of a request with names in place of the URLs that it repeats, which are recognised by their hash."""
        pieces: list[bytes] = []
        done = place = 0
        # base64 has no quotes, and a URL with an escaped one has another hash
        while (start := body.find(_OPENING, place)) >= 0 and (place := body.find(b'"', start + 1)) >= 0:
            if not _FIELD.search(body, max(0, start - _LONGEST_FIELD), start):
                continue  # a text
            image = self._digests.get(sha256(memoryview(body)[start + 1 : place]).digest())
            if image is not None:
                self._images[_name(image)] = image
                self._lent.add(_name(image))
                pieces += [body[done:start], f'"{_name(image)}"'.encode()]
                done = place + 1
        return b"".join([*pieces, body[done:]]) if pieces else body

    def image(self, url: object, at: FieldPath) -> EncodedImage:
        """The PNG or JPEG image of a name, or inside a URL; raises a `RequestError` that names the place `at`."""
        if isinstance(url, str) and (known := self._images.get(url)) is not None:
            return known
        if not isinstance(url, str) or (head := _HEAD.match(url)) is None:
            raise at.error(
                "a data: URL with a base64 PNG or JPEG image", url, "send the image itself, not a link to it"
            )
        digest = sha256(url.encode()).digest()
        if (known := self._digests.get(digest)) is not None:
            return known
        try:
            data = b64decode(url[head.end() :], validate=True)
        except (binascii.Error, ValueError) as error:
            raise at.error("base64 image data", str(error), "encode the image bytes with base64") from error
        for image_format, magic in _MAGIC.items():
            if data.startswith(magic):
                width_px, height_px = image_size(data)
                image = EncodedImage(data=data, format=image_format, width_px=width_px, height_px=height_px)
                return self._remember(digest, image, len(url))
        raise at.error("PNG or JPEG bytes", data[:8], "encode the screenshot as PNG")

    def without_images(self, request: Mapping[str, object]) -> dict[str, object]:
        """A request that was read with `image`, to be recorded: each image is replaced by `sha256:<hex>`.

        What has none is not copied: the turns of a rollout repeat one another, and garbage collection looks at each.
        """
        return {key: self._without_images(value) for key, value in request.items()}

    def _without_images(self, value: object) -> object:
        if isinstance(value, str):
            is_url = value not in self._images and _HEAD.match(value) is not None
            image = self._digests.get(sha256(value.encode()).digest()) if is_url else None
            return value if image is None else _name(image)
        if is_object(value):
            copy: object = self.without_images(value)
        elif is_array(value):
            copy = [self._without_images(inner) for inner in value]
        else:
            return value
        return value if copy == value else copy

    def _remember(self, digest: bytes, image: EncodedImage, num_characters: int) -> EncodedImage:
        if digest not in self._digests:
            self.num_characters += num_characters
        return self._digests.setdefault(digest, image)


def _name(image: EncodedImage) -> str:
    return f"sha256:{image.sha256}"
