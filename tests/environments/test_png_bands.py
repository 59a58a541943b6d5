import io
import random
import zlib

from PIL import Image

from cua_rl.environments.desktop.png_bands import BandedPng

WIDTH, HEIGHT = 50, 70  # two bands of 32 rows and one of 6


def picture(seed: int) -> bytes:
    return random.Random(seed).randbytes(WIDTH * HEIGHT * 4)


def test_a_picture_comes_out_of_its_png_and_the_checksum_holds() -> None:
    png = BandedPng().encode(picture(0), WIDTH)
    expected = Image.frombytes("RGB", (WIDTH, HEIGHT), picture(0), "raw", "BGRX")
    assert Image.open(io.BytesIO(png)).tobytes() == expected.tobytes()
    start = png.index(b"IDAT")
    size = int.from_bytes(png[start - 4 : start], "big")
    assert len(zlib.decompress(png[start + 4 : start + 4 + size])) == HEIGHT * (1 + 3 * WIDTH)


def test_equal_pictures_give_equal_bytes_whatever_was_shown_before() -> None:
    changed = bytearray(picture(0))
    changed[40 * WIDTH * 4] ^= 0xFF  # one pixel of the second band
    packer = BandedPng()
    first, second, again = (packer.encode(bgra, WIDTH) for bgra in (picture(0), bytes(changed), picture(0)))
    assert first == again != second
    assert second == BandedPng().encode(bytes(changed), WIDTH)


def test_a_screen_of_another_size_is_packed_anew() -> None:
    packer = BandedPng()
    packer.encode(picture(0), WIDTH)
    assert packer.encode(bytes(4 * 20 * 10), 20) == BandedPng().encode(bytes(4 * 20 * 10), 20)
