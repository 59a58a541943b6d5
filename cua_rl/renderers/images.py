"""The number of tokens of an image: smart resize as in the model's own image processor, without decoding pixels.

The arithmetic is that of the Qwen2-VL image processor, which Qwen3-VL uses: round to a multiple of patch size times
merge size (half to even), then scale into the range of pixels. The size of an image is that after applying its EXIF
orientation, as in vLLM.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from PIL import Image

from cua_rl.renderers.request_error import RequestError
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_object, mapping

MAX_ASPECT_RATIO = 200
_ORIENTATION_TAG = 0x0112
_ROTATED_BY_90 = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """The settings of a model's image processor that determine token counts; `min_pixels`, `max_pixels` are areas."""

    patch_size_px: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @property
    def factor_px(self) -> int:
        """Both sides of a resized image are multiples of this; a square of this size is one token."""
        return self.patch_size_px * self.merge_size


def load_image_settings(model_path: Path) -> ImageSettings:
    """Read the settings of a model folder, from `processor_config.json` first (as Transformers does).

    The range of pixels may be given as `size.shortest_edge` and `size.longest_edge` (areas, in spite of their names),
    as `size.min_pixels` and `size.max_pixels`, or as top-level `min_pixels` and `max_pixels`, which take precedence.
    Raises `ConfigError` if there are no settings, or a range or patch size is missing.
    """
    source, settings = _read_settings(model_path)
    size = settings.get("size")
    ranges: Mapping[str, object] = mapping(size)
    if settings.get("do_resize") is False:
        raise ConfigError(
            f"expected an image processor that resizes, got do_resize false in {str(source)!r}; {_hint()}"
        )
    return ImageSettings(
        patch_size_px=_count(source, "patch_size", settings.get("patch_size")),
        merge_size=_count(source, "merge_size", settings.get("merge_size")),
        min_pixels=_count(source, "min_pixels", _first(settings, ranges, "min_pixels", "shortest_edge")),
        max_pixels=_count(source, "max_pixels", _first(settings, ranges, "max_pixels", "longest_edge")),
    )


def require_pixel_statistics(model_path: Path) -> None:
    """Raise `ConfigError` unless a folder says how pixels are normalised: Transformers would silently use CLIP's."""
    source, settings = _read_settings(model_path)
    missing = [name for name in ("image_mean", "image_std") if settings.get(name) is None]
    if missing and settings.get("do_normalize", True):
        raise ConfigError(f"expected {' and '.join(missing)} in {str(source)!r}, got none; {_hint()}")


def smart_resize(width_px: int, height_px: int, settings: ImageSettings) -> tuple[int, int]:
    """Width and height after resizing; raises `RequestError` if one side is over 200 times the other, or zero."""
    short_px, long_px = sorted((width_px, height_px))
    if short_px < 1 or long_px / short_px > MAX_ASPECT_RATIO:
        raise RequestError(
            expected=f"an image with an aspect ratio of at most {MAX_ASPECT_RATIO}",
            got=f"{width_px}x{height_px} pixels",
            do="crop it",
        )
    factor = settings.factor_px
    height, width = round(height_px / factor) * factor, round(width_px / factor) * factor
    if height * width > settings.max_pixels:
        shrink = math.sqrt(height_px * width_px / settings.max_pixels)
        height = max(factor, math.floor(height_px / shrink / factor) * factor)
        width = max(factor, math.floor(width_px / shrink / factor) * factor)
    elif height * width < settings.min_pixels:
        grow = math.sqrt(settings.min_pixels / (height_px * width_px))
        height = math.ceil(height_px * grow / factor) * factor
        width = math.ceil(width_px * grow / factor) * factor
    return width, height


def num_image_tokens(width_px: int, height_px: int, settings: ImageSettings) -> int:
    """Number of tokens of an image, without the vision start and end tokens around it."""
    width, height = smart_resize(width_px, height_px, settings)
    return (width // settings.factor_px) * (height // settings.factor_px)


def largest_image_tokens(model_path: Path, max_pixels: int | None) -> int:
    """Tokens of the largest image that a model takes, with a limit on its pixels if there is one."""
    settings = load_image_settings(model_path)
    return (max_pixels or settings.max_pixels) // settings.factor_px**2


MAX_PIXELS = 40_000_000
"""Largest image: an 8K screen has 33 million pixels, and each takes three bytes once decoded."""
_PNG = b"\x89PNG\r\n\x1a\n"
_START_OF_SCAN, _END_OF_JPEG = b"\xff\xda", b"\xff\xd9"
_MAX_CHUNKS, _MAX_SCANS = 65_536, 100
"""Of a PNG and a JPEG, which encoders stay far below: each takes a few bytes, but a decoder up to 3 us and 25 ms."""


def image_size(data: bytes) -> tuple[int, int]:
    """Width and height in pixels, oriented; raises `RequestError` if it is no image or takes too much to decode."""
    try:
        _require_few_parts(data)
        with Image.open(BytesIO(data), formats=("PNG", "JPEG")) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ValueError(f"{width} x {height} pixels, more than {MAX_PIXELS}")
            # Pillow decodes a PNG to find its orientation, so ask only if the bytes contain one
            may_be_rotated = image.format != "PNG" or b"eXIf" in data or b"tiff:Orientation" in data
            is_rotated = may_be_rotated and image.getexif().get(_ORIENTATION_TAG) in _ROTATED_BY_90
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise RequestError(
            expected="a readable PNG or JPEG image",
            got=f"{len(data)} bytes beginning with {data[:8]!r} ({error})",
            do="send the encoded screenshot whole",
        ) from error
    return (height, width) if is_rotated else (width, height)


def _require_few_parts(data: bytes) -> None:
    """Raise `ValueError` for an image that takes long to decode for its size in bytes and pixels, or has no end."""
    if (b"IEND" if data.startswith(_PNG) else _END_OF_JPEG) not in data:
        raise ValueError("cut off")
    place, num_chunks = len(_PNG), 0
    while data.startswith(_PNG) and place < len(data) and num_chunks <= _MAX_CHUNKS:
        place, num_chunks = place + 12 + int.from_bytes(data[place : place + 4]), num_chunks + 1
    if num_chunks > _MAX_CHUNKS:
        raise ValueError(f"more than {_MAX_CHUNKS} chunks")
    # compressed data has no marker, but a PNG may have it anywhere
    if not data.startswith(_PNG) and data.count(_START_OF_SCAN) > _MAX_SCANS:
        raise ValueError(f"more than {_MAX_SCANS} scans")


def _read_settings(model_path: Path) -> tuple[Path, Mapping[str, object]]:
    processor = model_path / "processor_config.json"
    if processor.is_file():
        nested = mapping(json.loads(processor.read_text(encoding="utf-8"))).get("image_processor")
        if is_object(nested):
            return processor, nested
    preprocessor = model_path / "preprocessor_config.json"
    if preprocessor.is_file():
        return preprocessor, json.loads(preprocessor.read_text(encoding="utf-8"))
    raise ConfigError(f"expected image processor settings in {str(preprocessor)!r}, got no such file; {_hint()}")


def _first(settings: Mapping[str, object], ranges: Mapping[str, object], name: str, edge: str) -> object:
    given = (settings.get(name), ranges.get(edge), ranges.get(name))
    return next((value for value in given if value is not None), None)


def _count(source: Path, name: str, value: object) -> int:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"expected a positive {name} in {str(source)!r}, got {value!r}; {_hint()}")
    return value


def _hint() -> str:
    return "copy the model's own preprocessor_config.json beside its weights"
