import json
from io import BytesIO
from pathlib import Path
from zlib import crc32

import pytest
from PIL import Image

from cua_rl.renderers.images import (
    ImageSettings,
    image_size,
    load_image_settings,
    num_image_tokens,
    require_pixel_statistics,
    smart_resize,
)
from cua_rl.renderers.request_error import RequestError
from cua_rl.types.errors import ConfigError
from tests.renderers.generated import encode_image, make_image

QWEN3_VL = ImageSettings(patch_size_px=16, merge_size=2, min_pixels=65_536, max_pixels=16_777_216)


@pytest.mark.parametrize(
    ("size", "resized", "num_tokens"),
    [
        ((640, 480), (640, 480), 300),
        ((800, 600), (800, 608), 475),
        ((1024, 768), (1024, 768), 768),
        ((1280, 720), (1280, 704), 880),  # 720 / 32 = 22.5 rounds to the even 22
        ((1280, 800), (1280, 800), 1_000),
        ((1366, 768), (1376, 768), 1_032),
        ((1440, 900), (1440, 896), 1_260),
        ((1920, 1080), (1920, 1088), 2_040),
        ((2560, 1440), (2560, 1440), 3_600),
        ((3840, 2160), (3840, 2176), 8_160),
        ((224, 224), (256, 256), 64),
        ((150, 224), (224, 320), 70),
        ((400, 300), (384, 288), 108),
    ],
)
def test_screen_sizes_take_the_known_numbers_of_tokens(
    size: tuple[int, int], resized: tuple[int, int], num_tokens: int
) -> None:
    assert smart_resize(*size, QWEN3_VL) == resized
    assert num_image_tokens(*size, QWEN3_VL) == num_tokens


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (0, 5)])
def test_images_that_are_too_long_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(RequestError, match="aspect ratio"):
        num_image_tokens(*size, QWEN3_VL)


@pytest.mark.parametrize("image_format", ["png", "jpeg"])
def test_the_size_of_an_encoded_image_is_read(image_format: str) -> None:
    assert image_size(encode_image(make_image(123, 45), image_format)) == (123, 45)


@pytest.mark.parametrize("image_format", ["png", "jpeg"])
def test_an_image_that_is_stored_turned_is_measured_as_it_is_shown(image_format: str, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees to show
    path = tmp_path / f"turned.{image_format}"
    make_image(120, 40).save(path, exif=exif)
    assert image_size(path.read_bytes()) == (40, 120)


@pytest.mark.parametrize("data", [b"", b"no image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"])
def test_bytes_that_are_no_image_are_refused(data: bytes) -> None:
    with pytest.raises(RequestError, match="readable PNG or JPEG"):
        image_size(data)


def test_images_that_take_minutes_to_decode_are_refused_by_their_parts() -> None:
    plain, progressive = encode_image(make_image(64, 64), "PNG"), BytesIO()
    make_image(64, 64).save(progressive, "JPEG", progressive=True)
    chunk = b"\0\0\0\0prVt" + crc32(b"prVt").to_bytes(4)  # empty, and private: to be passed over
    *before, last_scan = progressive.getvalue().removesuffix(b"\xff\xd9").split(b"\xff\xda")
    scans = [*before, *[last_scan] * 80]

    assert image_size(plain[:33] + chunk * 60_000 + plain[33:]) == (64, 64)
    assert image_size(b"\xff\xda".join(scans) + b"\xff\xd9") == (64, 64)
    with pytest.raises(RequestError, match="more than 65536 chunks"):
        image_size(plain[:33] + chunk * 66_000 + plain[33:])
    with pytest.raises(RequestError, match="more than 100 scans"):
        image_size(b"\xff\xda".join([*scans, *[last_scan] * 20]) + b"\xff\xd9")


@pytest.mark.parametrize(
    "given",
    [
        {"size": {"shortest_edge": 1_024, "longest_edge": 65_536}},
        {"size": {"min_pixels": 1_024, "max_pixels": 65_536}},
        {"min_pixels": 1_024, "max_pixels": 65_536},
        {"size": {"shortest_edge": 5, "longest_edge": 6}, "min_pixels": 1_024, "max_pixels": 65_536},
    ],
)
def test_settings_are_read_in_every_form(tmp_path: Path, given: dict[str, object]) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 16, "merge_size": 2, **given}))
    expected = ImageSettings(patch_size_px=16, merge_size=2, min_pixels=1_024, max_pixels=65_536)
    assert load_image_settings(tmp_path) == expected


def test_settings_inside_the_processor_s_file_come_first(tmp_path: Path) -> None:
    inside = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1, "longest_edge": 2}}
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": inside}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    assert load_image_settings(tmp_path).max_pixels == 2


def test_a_folder_that_leaves_the_normalisation_of_pixels_open_is_refused(tmp_path: Path) -> None:
    settings = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    file = tmp_path / "preprocessor_config.json"
    for whole in (settings, {"do_normalize": False}):
        file.write_text(json.dumps(whole))
        require_pixel_statistics(tmp_path)
    file.write_text(json.dumps({"image_mean": settings["image_mean"]}))
    with pytest.raises(ConfigError, match="expected image_std in"):
        require_pixel_statistics(tmp_path)


@pytest.mark.parametrize(
    "content", [None, {}, {"patch_size": 16, "merge_size": 2}, {"patch_size": 0, "merge_size": 2}, {"do_resize": False}]
)
def test_settings_that_do_not_say_enough_are_refused(tmp_path: Path, content: object) -> None:
    if content is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="preprocessor_config"):
        load_image_settings(tmp_path)
