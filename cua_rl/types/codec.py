"""Messages between processes: JSON and binary parts, checked against an annotated type; reading one calls nothing else.

    length of the JSON, 8 bytes (big endian) | JSON: [lengths of the parts, value] | the parts, end to end

Data classes, configurations and tuples of several types are objects with all their fields; one of several classes is
[name, value]. Bytes, images, and tuples of numbers (64 bits, little endian) or truth values are the index of a part.
"""

import json
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import fields, is_dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from pathlib import Path
from reprlib import repr as short
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import chz

from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import CuaError, boundary

_LENGTH = struct.Struct(">Q")
_NUMBERS: Mapping[object, str] = {int: "q", float: "d", bool: "?"}

# (key, what makes the bytes) -> index of the part with this key: what a message holds twice, it sends once
Put = Callable[[object, Callable[[], bytes]], int]
# (index, key, what reads it) -> what is in a part, read once for each key, so that memory grows with the message alone
Take = Callable[[object, object, Callable[[memoryview], Any]], Any]
# what writes a value as JSON, and what reads it
Codecs = tuple[Callable[[Any, Put], object], Callable[[Any, Take], Any]]


class MessageError(CuaError):
    """Bytes that are not a message of the expected type."""


class Codec:
    """Writes and reads messages; `leaves` are types that need other libraries."""

    def __init__(self, leaves: Mapping[object, Codecs]) -> None:
        self._known: dict[object, Codecs] = {**_LEAVES, **leaves}

    def encode(self, message: object, kind: Any = None) -> bytes:
        """A message of the type `kind`, or else of its own class."""
        places: dict[object, int] = {}
        parts: list[bytes] = []

        def put(key: object, make: Callable[[], bytes]) -> int:
            if key not in places:
                places[key] = len(parts)
                parts.append(make())
            return places[key]

        value = self._of(kind or type(message))[0](message, put)
        text = json.dumps([[len(part) for part in parts], value], separators=(",", ":")).encode("ascii")
        return b"".join([_LENGTH.pack(len(text)), text, *parts])

    def decode(self, payload: bytes | bytearray | memoryview, kind: Any) -> Any:
        """The message of the type `kind` that `encode` was given; raises `MessageError` for anything else."""
        made: dict[object, Any] = {}

        def take(index: object, key: object, read: Callable[[memoryview], Any]) -> Any:
            if (_plain(index, int), key) not in made:
                made[index, key] = read(parts[index])
            return made[index, key]

        with boundary(MessageError, f"expected a {kind.__name__ if isinstance(kind, type) else kind}"):
            view = memoryview(payload)
            start = _LENGTH.size + _LENGTH.unpack(view[: _LENGTH.size])[0]
            lengths, value = json.loads(str(view[_LENGTH.size : start], "ascii"), object_pairs_hook=_without_repeats)
            if any(_plain(one, int) < 0 for one in lengths) or start + sum(lengths) != len(view):
                raise ValueError(f"expected parts of {len(view) - start} bytes in all, got lengths {short(lengths)}")
            ends = accumulate(lengths, initial=start)
            parts: dict[object, memoryview] = dict(enumerate(view[one:end] for one, end in pairwise(ends)))
            return self._of(kind)[1](value, take)

    def _of(self, kind: Any) -> Codecs:
        if kind not in self._known:
            self._known[kind] = self._make(kind)
        return self._known[kind]

    def _make(self, kind: Any) -> Codecs:
        origin, inner = get_origin(kind), get_args(kind)
        if origin is Literal:
            return _same, lambda given, _: _choose(given, inner)
        if origin in (Union, UnionType):
            return self._make_union(inner)
        if origin is tuple and inner[1:] != (...,):
            names = {str(place): one for place, one in enumerate(inner)}
            return self._make_record(names, tuple, _make_tuple)
        if origin is tuple and inner[0] in _NUMBERS:
            return _make_numbers(_NUMBERS[inner[0]])
        if origin is tuple:
            write, read = self._of(inner[0])
            return (
                lambda value, put: [write(one, put) for one in value],
                lambda given, take: tuple([read(one, take) for one in _plain(given, list)]),
            )
        if origin in (Mapping, dict):
            write, read = self._of(inner[1])
            return (
                lambda value, put: {name: write(one, put) for name, one in value.items()},
                lambda given, take: {name: read(one, take) for name, one in _plain(given, dict).items()},
            )
        if issubclass(kind, StrEnum | Path):
            return lambda value, _: str(value), lambda given, _: kind(_plain(given, str))
        kinds = _field_types(kind)
        return self._make_record(kinds, lambda value: [getattr(value, name) for name in kinds], kind)

    def _make_union(self, kinds: tuple[Any, ...]) -> Codecs:
        codecs = {kind.__name__: self._of(kind) for kind in kinds if kind is not NoneType}

        def write_named(value: object, put: Put) -> object:
            name = type(value).__name__
            return [name, codecs[name][0](value, put)]

        def read_named(given: Any, take: Take) -> object:
            name, value = given
            return codecs[_choose(name, codecs)][1](value, take)

        write, read = write_named, read_named
        if NoneType not in kinds:
            return write, read
        if len(codecs) == 1:
            ((write, read),) = codecs.values()
        return (
            lambda value, put: None if value is None else write(value, put),
            lambda given, take: None if given is None else read(given, take),
        )

    def _make_record(
        self, kinds: Mapping[str, Any], split: Callable[[Any], Iterable[object]], make: Callable[..., object]
    ) -> Codecs:
        codecs = [(name, *self._of(kind)) for name, kind in kinds.items()]

        def read(given: Any, take: Take) -> object:
            if _plain(given, dict).keys() != kinds.keys():
                raise ValueError(f"expected the fields {list(kinds)}, got {short(list(given))}")
            return make(**{name: read(given[name], take) for name, _, read in codecs})

        return (
            lambda value, put: {
                name: write(one, put) for (name, write, _), one in zip(codecs, split(value), strict=True)
            },
            read,
        )


def _field_types(kind: type[Any]) -> Mapping[str, Any]:
    """What the constructor takes."""
    if chz.is_chz(kind):
        declared: Mapping[str, Any] = chz.chz_fields(kind)
        return {name: one.x_type for name, one in declared.items()}
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        return {one.name: hints[one.name] for one in fields(kind) if one.init}
    if not issubclass(kind, tuple):
        raise TypeError(f"expected a type that messages may hold, got {kind}")
    return hints


def _make_tuple(**values: object) -> tuple[object, ...]:
    return tuple(values.values())


def _make_numbers(letter: str) -> Codecs:
    size = struct.calcsize(letter)
    return (
        lambda value, put: put((id(value), letter), lambda: struct.pack(f"<{len(value)}{letter}", *value)),
        lambda given, take: take(given, letter, lambda part: struct.unpack(f"<{len(part) // size}{letter}", part)),
    )


def _write_image(image: EncodedImage, put: Put) -> object:
    return [put(image.sha256, lambda: image.data), image.format, image.width_px, image.height_px]


def _read_image(given: Any, take: Take) -> EncodedImage:
    index, image_format, *size = given
    image_format, (width_px, height_px) = _choose(image_format, ("png", "jpeg")), [_plain(one, int) for one in size]

    def read(data: memoryview) -> EncodedImage:
        return EncodedImage(data=bytes(data), format=image_format, width_px=width_px, height_px=height_px)

    return take(index, (image_format, width_px, height_px), read)


def _same(value: Any, _: object) -> Any:
    return value


def _plain(given: object, *kinds: type) -> Any:
    if type(given) not in kinds:
        raise ValueError(f"expected {kinds[0].__name__}, got {short(given)}")
    return given


def _choose(given: object, among: Collection[object]) -> Any:
    if type(given) is not str or given not in among:
        raise ValueError(f"expected one of {list(among)}, got {short(given)}")
    return given


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"expected each name once, got {short([name for name, _ in pairs])}")
    return found


_LEAVES: Mapping[object, Codecs] = {
    str: (_same, lambda given, _: _plain(given, str)),
    int: (_same, lambda given, _: _plain(given, int)),
    bool: (_same, lambda given, _: _plain(given, bool)),
    float: (_same, lambda given, _: _plain(given, float, int)),
    object: (_same, _same),
    bytes: (lambda value, put: put(id(value), lambda: value), lambda given, take: take(given, bytes, bytes)),
    EncodedImage: (_write_image, _read_image),
}
_PLAIN = Codec({})
encode, decode = _PLAIN.encode, _PLAIN.decode
