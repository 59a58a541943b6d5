"""Encodes PNGs of a screen that changes little: bands of unchanged rows are not compressed again.

Packing is most of what a screenshot costs. The data of a PNG is one deflate stream (RFC 1950), which may be cut where
its window is reset; each band is such a piece, and depends only on its own pixels, so that equal pictures give equal
bytes whatever was shown before. The checksum over all rows (Adler-32) is put together from the bands'.
"""

import struct
import zlib
from dataclasses import dataclass

from PIL import Image

_BAND_ROWS = 32
_LEVEL = 1
_NO_FILTER = b"\0"
_STREAM_START = b"\x78\x01"  # deflate, window of 32 KiB, fastest
_STREAM_END = b"\x03\x00"  # an empty last block
_ADLER_MODULUS = 65521


@dataclass(frozen=True, slots=True)
class _Band:
    """One piece of the stream, and what it came from."""

    bgra: bytes
    packed: bytes
    checksum: int
    num_bytes: int
    """Before packing."""


class BandedPng:
    """Packs the pictures of one screen, remembering the bands of the last."""

    def __init__(self) -> None:
        self._bands: list[_Band] = []

    def encode(self, bgra: bytes, width_px: int) -> bytes:
        """The picture, 4 bytes a pixel of which the last says nothing, as a PNG of 8-bit RGB."""
        row_bytes = 4 * width_px
        size = _BAND_ROWS * row_bytes
        old = dict(enumerate(self._bands))
        self._bands = [
            _band(bgra[start : start + size], width_px, old.get(place))
            for place, start in enumerate(range(0, len(bgra), size))
        ]
        # Adler-32 of texts end to end, from those of each: sums of bytes, and of those sums, modulo 65521
        low, high = 1, 0
        for band in self._bands:
            high = (high + (band.checksum >> 16) + (low - 1) * band.num_bytes) % _ADLER_MODULUS
            low = (low + (band.checksum & 0xFFFF) - 1) % _ADLER_MODULUS
        packed = b"".join(band.packed for band in self._bands)
        data = b"".join((_STREAM_START, packed, _STREAM_END, (high << 16 | low).to_bytes(4, "big")))
        header = struct.pack(">IIBBBBB", width_px, len(bgra) // row_bytes, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _band(bgra: bytes, width_px: int, old: _Band | None) -> _Band:
    if old is not None and old.bgra == bgra:
        return old
    height_px = len(bgra) // (4 * width_px)
    rgb = Image.frombuffer("RGB", (width_px, height_px), bgra, "raw", "BGRX", 0, 1).tobytes()
    rows = b"".join(_NO_FILTER + rgb[start : start + 3 * width_px] for start in range(0, len(rgb), 3 * width_px))
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(rows) + packer.flush(zlib.Z_FULL_FLUSH)
    return _Band(bgra=bgra, packed=packed, checksum=zlib.adler32(rows), num_bytes=len(rows))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
