"""Reads TFRecords of `tf.train.Example` without TensorFlow: AndroidControl and Android in the Wild.

Framing: https://www.tensorflow.org/tutorials/load_data/tfrecord; messages: tensorflow/core/example/example.proto, and
google-deepmind/android_env, android_env/proto/a11y, for AndroidControl's accessibility tree of each screenshot.
"""

import gzip
import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from PIL import Image
from pybase64 import b64decode, b64encode

from cua_rl.exchange.rows import Row
from cua_rl.types.errors import ConfigError

_MAX_RECORD_BYTES = 2**30
_GZIP = b"\x1f\x8b"
_FIELD = descriptor_pb2.FieldDescriptorProto
_LISTS = ("bytes_list", "float_list", "int64_list")


def read_examples(path: Path) -> Iterator[Row]:
    """The features of each example, by name: a list of bytes, floats or integers; raises `ConfigError`."""
    try:
        with path.open("rb") as plain:
            is_compressed = plain.read(2) == _GZIP
            plain.seek(0)
            file = cast("IO[bytes]", gzip.GzipFile(fileobj=plain)) if is_compressed else plain
            for record in _read_records(file):
                example = _example_class().FromString(record)
                yield {
                    entry.key: [value for kind in _LISTS for value in getattr(entry.value, kind).value]
                    for entry in example.features.feature
                }
    except (OSError, EOFError, ValueError, DecodeError) as error:
        raise ConfigError(
            f"expected TFRecords of tf.train.Example in {str(path)!r}, got {error}; download the file again"
        ) from None


def _read_records(file: IO[bytes]) -> Iterator[bytes]:
    """Each record: its length and a checksum of it, its bytes and a checksum of them."""
    # the checksum of the bytes, in Python, would take a second per megabyte; the compressed file has another
    checksum: Any = import_module("tensorboard.compat.tensorflow_stub.pywrap_tensorflow").masked_crc32c
    while head := file.read(12):
        if len(head) < 12 or struct.pack("<I", checksum(head[:8])) != head[8:]:
            raise ValueError("a record whose length does not have its checksum")
        (length,) = struct.unpack("<Q", head[:8])
        if length > _MAX_RECORD_BYTES:
            raise ValueError(f"a record of {length:,} bytes, above {_MAX_RECORD_BYTES:,}")
        record = file.read(length + 4)
        if len(record) < length + 4:
            raise ValueError("a file that ends within a record")
        yield record[:length]


def message_class(name: str, messages: Mapping[str, Mapping[int, tuple[str, object, bool]]]) -> Any:
    """The class of a message, whose fields are given by their numbers: name, type or message, whether it is a list.

    Fields that are not given are skipped.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="read", syntax="proto3")
    for message, fields in messages.items():
        described = file.message_type.add(name=message)
        for number, (field, kind, is_list) in fields.items():
            label = _FIELD.LABEL_REPEATED if is_list else _FIELD.LABEL_OPTIONAL
            if isinstance(kind, str):
                described.field.add(
                    name=field, number=number, label=label, type=_FIELD.TYPE_MESSAGE, type_name=f".read.{kind}"
                )
            else:
                described.field.add(name=field, number=number, label=label, type=cast("Any", kind))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"read.{name}"))


@cache
def _example_class() -> Any:
    """The message `Example`; its map of features has the same bytes as a list of entries."""
    kinds = ("BytesList", "FloatList", "Int64List")
    types = (_FIELD.TYPE_BYTES, _FIELD.TYPE_FLOAT, _FIELD.TYPE_INT64)
    lists = zip(_LISTS, kinds, strict=True)
    return message_class(
        "Example",
        {
            **{kind: {1: ("value", held, True)} for kind, held in zip(kinds, types, strict=True)},
            "Feature": {number: (name, kind, False) for number, (name, kind) in enumerate(lists, start=1)},
            "Entry": {1: ("key", _FIELD.TYPE_STRING, False), 2: ("value", "Feature", False)},
            "Features": {1: ("feature", "Entry", True)},
            "Example": {1: ("features", "Features", False)},
        },
    )


def android_control_episode(example: Row, where: str) -> Row:
    """An episode of AndroidControl as the JSON that its reader takes; raises `ConfigError` for other examples."""
    if not {"goal", "screenshots", "actions"} <= example.keys():
        raise ConfigError(
            f"expected an episode of AndroidControl (goal, screenshots, actions) or a step of Android in the Wild "
            f"(goal_info) in {where}, got {sorted(example)[:12]}; docs/trajectories.md lists what is read"
        )
    texts = {
        name: [text.decode() for text in example.get(name, ())] for name in ("goal", "actions", "step_instructions")
    }
    return {
        **{name: example[name] for name in ("screenshot_widths", "screenshot_heights") if name in example},
        "episode_id": example["episode_id"][0],
        "goal": texts["goal"][0],
        "actions": texts["actions"],
        "step_instructions": texts["step_instructions"],
        **{
            name: [b64encode(one).decode() for one in example.get(name, ())]
            for name in ("screenshots", "accessibility_trees")
        },
    }


def raw_screenshot(example: Row) -> str:
    """The pixels of a step of Android in the Wild as a PNG in base64; raises `ValueError` if their number is wrong."""
    width, height, channels = (int(example[f"image/{name}"][0]) for name in ("width", "height", "channels"))
    pixels: Sequence[bytes] = example["image/encoded"]
    if channels != 3 or len(pixels[0]) != width * height * channels:
        raise ValueError(f"{len(pixels[0])} bytes for a picture of {width} x {height} pixels and {channels} channels")
    Image.frombytes("RGB", (width, height), pixels[0]).save(encoded := BytesIO(), "PNG")
    return b64encode(encoded.getvalue()).decode()


@cache
def _forest_class() -> Any:
    """The accessibility tree of a screenshot, with those fields of its nodes that say what takes touches."""
    sides = {1: "left", 2: "top", 3: "right", 4: "bottom"}
    flags = {14: "is_clickable", 15: "is_editable", 19: "is_long_clickable", 23: "is_visible"}
    return message_class(
        "Forest",
        {
            "Rect": {number: (side, _FIELD.TYPE_INT32, False) for number, side in sides.items()},
            "Node": {2: ("bounds", "Rect", False)} | {n: (flag, _FIELD.TYPE_BOOL, False) for n, flag in flags.items()},
            "Tree": {1: ("nodes", "Node", True)},
            "Window": {4: ("layer", _FIELD.TYPE_INT32, False), 11: ("tree", "Tree", False)},
            "Forest": {1: ("windows", "Window", True)},
        },
    )


def find_element(tree: str, x: float, y: float) -> tuple[float, ...]:
    """Left, top, right and bottom of what a touch at a pixel hits; empty if it hits nothing that takes touches.

    It is the smallest element there in the front window that has one. `tree` is in base64; raises `ConfigError`.
    """
    try:
        forest = _forest_class().FromString(b64decode(tree, validate=True))
    except (ValueError, DecodeError) as error:
        raise ConfigError(
            f"expected accessibility trees of AndroidControl in base64, got {tree[:60]!r} ({error}); leave them out, "
            "and clicks are compared by their distance"
        ) from None
    for window in sorted(forest.windows, key=lambda one: one.layer, reverse=True):
        hit = [
            (node.bounds.right - node.bounds.left, node.bounds.bottom - node.bounds.top, node.bounds)
            for node in window.tree.nodes
            if node.is_visible and (node.is_clickable or node.is_long_clickable or node.is_editable)
            if node.bounds.left <= x <= node.bounds.right and node.bounds.top <= y <= node.bounds.bottom
        ]
        if hit:
            *_, bounds = min(hit, key=lambda one: one[0] * one[1])
            return bounds.left, bounds.top, bounds.right, bounds.bottom
    return ()
