"""The wire format of the `tinker` SDK: protobuf messages with its names and numbers, and fields of JSON bodies.

The messages are in a pool of their own, so that a process may load the SDK, too.
"""

import json
import re
import reprlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from struct import calcsize, unpack
from typing import Any, Literal

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from starlette.requests import Request

from cua_rl.host.request_limits import RequestRefused, parse_json
from cua_rl.sampling.generation import Generated, TopLogprobs
from cua_rl.types.json_values import Json, as_number, is_array, is_object

_PACKAGE = "tinker_public"
_INLINE_BYTES, _LABELS_BYTES = 2**18, 2**14
_MAX_FIELDS = 500_000
"""Of a message: each may take 2 bytes there, and 50 once it is parsed. 16,384 data of a text each have 330,000."""
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}
FLOAT32, INT64 = 1, 2
# fields as "name number type"; *: repeated, ?: may be absent, %: a map from strings; of a oneof: "oneof.name"
_MESSAGES = {
    "SampleResponse": "sequences 1 *SampledSequence, prompt_logprobs 2 ?bytes, topk_prompt_logprobs 3 ?TopkLogprobs, "
    "prompt_cache_hit_tokens 4 int32",
    "SampledSequence": "stop_reason 1 StopReason, tokens 2 bytes, logprobs 3 ?bytes, "
    "topk_sampled_logprobs 4 ?TopkLogprobs",
    "TopkLogprobs": "token_ids 1 bytes, logprobs 2 bytes, k 3 uint32, length 4 uint32",
    "SparseCsr": "values 1 bytes, crow_indices 2 bytes, col_indices 3 bytes",
    "Tensor": "encoding.dense 1 bytes, encoding.sparse_csr 2 SparseCsr, dtype 3 DType, shape 4 *int64",
    "BatchedTensor": "data 1 bytes, offsets 2 bytes, dtype 3 DType, trailing_shape 4 *int64",
    "ArrayRecord": "type_tag 1 string, fields 2 %BatchedTensor, num_datums 3 int64",
    "ForwardBackwardOutput": "loss_fn_output_type 1 string, loss_fn_outputs 2 *ArrayRecord, metrics 3 %double",
    "ForwardBackwardRequest": "model_id 1 string, seq_id 2 int32, data 3 *Datum, loss_fn 4 string, "
    "loss_fn_config 5 %double, forward_only 6 bool, loss_fn_config_v2 7 %LossConfigValue",
    "LossConfigValue": "value.number 1 double, value.text 2 string",
    "Datum": "model_input 1 *Chunk, loss_fn_inputs 2 %Tensor",
    "Chunk": "chunk.encoded_text 1 EncodedTextChunk, chunk.image 2 ImageChunk, chunk.dmel 3 DmelChunk",
    "EncodedTextChunk": "tokens 1 bytes",
    "ImageChunk": "data 1 bytes, format 2 string, expected_tokens 3 ?int32, override_dimensions 4 ?ImageDimensions",
    "ImageDimensions": "width 1 uint32, height 2 uint32",
    "DmelChunk": "dmel 1 bytes",
}
_FIELD = descriptor_pb2.FieldDescriptorProto
_LENGTH_DELIMITED, _GROUP, _WIDTHS = 2, (3, 4), {1: 8, 5: 4}


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in _ENUMS or kind in _MESSAGES:
        field.type = _FIELD.TYPE_ENUM if kind in _ENUMS else _FIELD.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{kind}"
    else:
        field.type = _FIELD.Type.Value(f"TYPE_{kind.upper()}")


def _add_field(message: descriptor_pb2.DescriptorProto, text: str) -> None:
    path, number, kind = text.split()
    oneof, _, name = path.rpartition(".")
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    mark, kind = (kind[0], kind[1:]) if kind[0] in "*?%" else ("", kind)
    if mark == "%":
        entry = message.nested_type.add(name="".join(map(str.capitalize, name.split("_"))) + "Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_FIELD.TYPE_STRING, label=_FIELD.LABEL_OPTIONAL)
        _set_type(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), kind)
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{_PACKAGE}.{message.name}.{entry.name}"
    else:
        _set_type(field, kind)
    if mark in ("*", "%"):
        field.label = _FIELD.LABEL_REPEATED
    if mark == "?":
        oneof, field.proto3_optional = f"_{name}", True
    if oneof:
        names = [one.name for one in message.oneof_decl]
        if oneof not in names:
            message.oneof_decl.add(name=oneof)
        field.oneof_index = (names if oneof in names else [*names, oneof]).index(oneof)


def file_descriptor() -> descriptor_pb2.FileDescriptorProto:
    """All messages, as the SDK's own file describes them."""
    file = descriptor_pb2.FileDescriptorProto(name="tinker_public.proto", package=_PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for text in fields.split(", "):
            _add_field(message, text)
    return file


_POOL = descriptor_pool.DescriptorPool()
_POOL.Add(file_descriptor())


def new_message(name: str) -> Any:
    """An empty message of the SDK; its fields are known only by `_MESSAGES`."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"{_PACKAGE}.{name}"))()


def parse_message(name: str, body: bytes) -> Any:
    """The message in a body; raises `RequestRefused`."""
    message = new_message(name)
    try:
        require_few_fields(message.DESCRIPTOR, memoryview(body), _MAX_FIELDS)
        message.ParseFromString(body)
    except DecodeError as error:
        raise RequestRefused(400, f"expected the protobuf message {name}, got {len(body)} bytes ({error})") from None
    return message


def require_few_fields(kind: Descriptor, body: memoryview, most: int) -> int:
    """Raise `RequestRefused` for a message, all of whose fields and numbers would take much memory once it is parsed.

    Returns how many fewer may follow; what is no message is left to the parser.
    """
    place, fields = 0, kind.fields_by_number
    while place < len(body):
        tag, place = _varint(body, place)
        field, wire = fields.get(tag >> 3), tag & 7
        if wire == _LENGTH_DELIMITED:
            length, place = _varint(body, place)
            end = place + length
        elif wire in _WIDTHS:
            end = place + _WIDTHS[wire]
        elif wire == 0:
            _, end = _varint(body, place)
        elif wire in _GROUP:
            raise RequestRefused(400, "expected a message without groups, got one; it has none in this protocol")
        else:
            return most
        most -= 1
        if field is not None and wire == _LENGTH_DELIMITED:
            if field.message_type is not None:
                most = require_few_fields(field.message_type, body[place:end], most)
            elif field.type not in (_FIELD.TYPE_BYTES, _FIELD.TYPE_STRING):
                most -= end - place  # packed numbers, of a byte or more
        if most < 0:
            raise RequestRefused(413, f"expected at most {_MAX_FIELDS} fields in a message, got more; send fewer data")
        place = end
    return most


def _varint(body: memoryview, place: int) -> tuple[int, int]:
    """A number of 7 bits a byte, and where it ends."""
    value = shift = 0
    for byte in body[place : place + 10]:
        value, shift, place = value | (byte & 127) << shift, shift + 7, place + 1
        if byte < 128:
            break
    return value, place


def numbers(data: bytes, kind: Literal["i", "q", "f"], most: int = 2**31) -> list[Any]:
    """At most so many numbers from their little-endian bytes: int32, int64 or float32; raises `RequestRefused`."""
    size = calcsize(kind)
    if len(data) % size or len(data) > size * most:
        raise RequestRefused(400, f"expected at most {most} numbers of {size} bytes, got {len(data)} bytes")
    return list(unpack(f"<{len(data) // size}{kind}", data))


def encode_pass(rows: Sequence[Sequence[float]], metrics: Mapping[str, float]) -> bytes:
    """A `ForwardBackwardOutput`: log-probabilities of each datum's targets, and metrics as `name:reduction`."""
    output = new_message("ForwardBackwardOutput")
    output.loss_fn_output_type = "ArrayRecord"
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
    offsets = array("q", [0])
    for row in rows:
        offsets.append(offsets[-1] + 4 * len(row))
    logprobs = record.fields["logprobs"]
    logprobs.data = array("f", [value for row in rows for value in row]).tobytes()
    logprobs.offsets, logprobs.dtype = offsets.tobytes(), FLOAT32
    for name, value in metrics.items():
        output.metrics[name] = value
    return output.SerializeToString()


def encode_samples(generated: Generated, last_n: int | None) -> bytes:
    """A `SampleResponse`; of the prompt only the last tokens are scored if `last_n` says so."""
    response = new_message("SampleResponse")
    for sequence in generated.sequences:
        sample = response.sequences.add(stop_reason=int(sequence.stop_reason == "length"))
        sample.tokens = array("i", sequence.tokens).tobytes()
        sample.logprobs = array("f", sequence.logprobs).tobytes()
        if sequence.topk_logprobs is not None:
            _set_top(sample.topk_sampled_logprobs, sequence.topk_logprobs)
    if generated.prompt_logprobs is not None:
        first = 0 if last_n is None else len(generated.prompt_logprobs) - last_n
        row = [nan if value is None or at < first else value for at, value in enumerate(generated.prompt_logprobs)]
        response.prompt_logprobs = array("f", row).tobytes()
    if generated.topk_prompt_logprobs is not None:
        first = 0 if last_n is None else len(generated.topk_prompt_logprobs) - last_n
        tops = [() if at < first else top or () for at, top in enumerate(generated.topk_prompt_logprobs)]
        _set_top(response.topk_prompt_logprobs, tops)
    return response.SerializeToString()


def _set_top(message: Any, rows: Sequence[TopLogprobs]) -> None:
    """Rows of the most likely tokens, filled up to the longest one as the SDK expects it."""
    message.k, message.length = max(map(len, rows), default=0), len(rows)
    filled = [pair for row in rows for pair in (*row, *[(0, -99999.0)] * (message.k - len(row)))]
    message.token_ids = array("i", [token for token, _ in filled]).tobytes()
    message.logprobs = array("f", [logprob for _, logprob in filled]).tobytes()


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a JSON object from a client; every method raises `RequestRefused` for what it cannot be."""

    values: Json

    @classmethod
    def of(cls, value: object, what: str = "body") -> "Fields":
        """The fields of a value, which must be an object."""
        if not is_object(value):
            raise RequestRefused(400, f"expected an object as {what}, got {_shown(value)}")
        return cls(value)

    def inner(self, name: str) -> "Fields":
        """The fields of an object in this one."""
        return Fields.of(self.values.get(name), name)

    def text(self, name: str, *, pattern: str = r"[^\x00]{1,4096}") -> str:
        """A text that matches the pattern as a whole."""
        value = self.values.get(name)
        if not isinstance(value, str) or re.fullmatch(pattern, value) is None or not value.isprintable():
            raise RequestRefused(400, f"expected {name} as a text like {pattern}, got {_shown(value)}")
        return value

    def optional_text(self, name: str, *, pattern: str = r"[^\x00]{1,4096}") -> str | None:
        return None if self.values.get(name) is None else self.text(name, pattern=pattern)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number; without a default it must be there."""
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise RequestRefused(400, f"expected {name} as a whole number from {low} to {high}, got {_shown(value)}")
        return value

    def optional_whole(self, name: str, low: int, high: int) -> int | None:
        return None if self.values.get(name) is None else self.whole(name, low, high)

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """A number in a range."""
        given = self.values.get(name, default)
        value = as_number(given, largest=max(abs(low), abs(high)))
        if value is None or not low <= value <= high:
            raise RequestRefused(400, f"expected {name} as a number from {low:g} to {high:g}, got {_shown(given)}")
        return value

    def yes(self, name: str, default: bool) -> bool:
        """A truth value."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise RequestRefused(400, f"expected {name} as true or false, got {_shown(value)}")
        return default if value is None else value

    def items(self, name: str) -> Sequence[object]:
        """An array."""
        value = self.values.get(name)
        if not is_array(value):
            raise RequestRefused(400, f"expected {name} as an array, got {_shown(value)}")
        return value

    def labels(self, name: str = "user_metadata") -> dict[str, object] | None:
        """An object that is kept as it is, and returned in lists of a thousand."""
        value = self.values.get(name)
        if value is None:
            return None
        labels = dict(Fields.of(value, name).values)
        try:
            written = json.dumps(labels, ensure_ascii=False, allow_nan=False).encode()
        except ValueError as error:
            raise RequestRefused(400, f"expected finite numbers and Unicode in {name}, got others ({error})") from None
        if len(written) > _LABELS_BYTES or b"\\u0000" in written:
            raise RequestRefused(400, f"expected {name} of at most {_LABELS_BYTES} bytes, without NUL; shorten it")
        return labels

    def refuse_other(self, name: str, *allowed: object) -> None:
        """Raise unless a field is absent or one of these values, which is all that works here."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            known = f" or {allowed!r}" if allowed else ""
            raise RequestRefused(400, f"expected no {name}{known}, got {_shown(value)}: this service has no other")


def _shown(value: object) -> str:
    """The beginning of a value, however long it is."""
    return repr(value[:100]) if isinstance(value, str) else reprlib.repr(value)[:100]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request of a known key, with its body."""

    request: Request
    key_id: int
    body: bytes

    def fields(self) -> Fields:
        """The body as a JSON object, short enough to be read here and now; an empty one has no fields."""
        if len(self.body) > _INLINE_BYTES:
            raise RequestRefused(413, f"expected at most {_INLINE_BYTES} bytes, got {len(self.body)}; send less")
        return Fields.of(parse_json(self.body or b"{}"))

    def path(self, name: str) -> str:
        """A part of the address."""
        part = str(self.request.path_params[name])
        if "\0" in part:  # which Postgres takes in no text
            raise RequestRefused(404, f"expected an address without NUL, got {part[:100]!r}")
        return part
