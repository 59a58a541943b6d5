"""Reads TFRecords of `tf.train.Example` without TensorFlow: AndroidControl and Android in the Wild.

Framing: https://www.tensorflow.org/tutorials/load_data/tfrecord; message: tensorflow/core/example/example.proto.
"""

import gzip
import struct
from collections.abc import Iterator, Sequence
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from PIL import Image
from pybase64 import b64encode

from cua_rl.exchange.rows import Row
from cua_rl.types.errors import ConfigError

_MAX_RECORD_BYTES = 2**30
_GZIP = b"\x1f\x8b"
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


@cache
def _example_class() -> Any:
    """The message `Example`; its map of features has the same bytes as a list of entries."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")

    def add(message: str, *fields: tuple[str, object, bool]) -> None:
        described = file.message_type.add(name=message)
        for number, (name, kind, is_list) in enumerate(fields, start=1):
            label = field.LABEL_REPEATED if is_list else field.LABEL_OPTIONAL
            if isinstance(kind, str):
                described.field.add(
                    name=name, number=number, label=label, type=field.TYPE_MESSAGE, type_name=f".tensorflow.{kind}"
                )
            else:
                described.field.add(name=name, number=number, label=label, type=cast("Any", kind))

    add("BytesList", ("value", field.TYPE_BYTES, True))
    add("FloatList", ("value", field.TYPE_FLOAT, True))
    add("Int64List", ("value", field.TYPE_INT64, True))
    add(
        "Feature",
        *((name, kind, False) for name, kind in zip(_LISTS, ("BytesList", "FloatList", "Int64List"), strict=True)),
    )
    add("Entry", ("key", field.TYPE_STRING, False), ("value", "Feature", False))
    add("Features", ("feature", "Entry", True))
    add("Example", ("features", "Features", False))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("tensorflow.Example"))


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
        "screenshots": [b64encode(picture).decode() for picture in example["screenshots"]],
    }


def raw_screenshot(example: Row) -> str:
    """The pixels of a step of Android in the Wild as a PNG in base64; raises `ValueError` if their number is wrong."""
    width, height, channels = (int(example[f"image/{name}"][0]) for name in ("width", "height", "channels"))
    pixels: Sequence[bytes] = example["image/encoded"]
    if channels != 3 or len(pixels[0]) != width * height * channels:
        raise ValueError(f"{len(pixels[0])} bytes for a picture of {width} x {height} pixels and {channels} channels")
    Image.frombytes("RGB", (width, height), pixels[0]).save(encoded := BytesIO(), "PNG")
    return b64encode(encoded.getvalue()).decode()
