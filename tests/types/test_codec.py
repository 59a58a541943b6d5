"""What one process writes the other reads, to the last bit; whatever else comes is refused and changes nothing."""

import json
import math
import random
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import chz
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cua_rl.training import wire
from cua_rl.types.actions import Action, Click, DoubleClick
from cua_rl.types.codec import MessageError, decode, encode
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import Datum, EncodedTextChunk, ImageChunk, ModelInput, ModelTurn, Reward, Rollout, StopReason
from tests.builders import encoded_image, image, model_turn, prompt, rollout, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A small message."""

    name: str
    num_slots: int
    code_version: str


MESSAGES = (wire.Request, wire.Reply, Hello, Rollout)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=4,
)
PLAIN: Mapping[object, st.SearchStrategy[Any]] = {
    NoneType: st.none(),
    bool: st.booleans(),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=5) | st.just("\ud83d\0"),
    bytes: st.binary(max_size=5),
    object: JSON,
    Path: st.sampled_from([Path("/a/b"), Path("c")]),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotated type that keep the invariants of their classes."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if kind in MADE:
        return MADE[kind]()
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of([values(one) for one in inner])
    if origin is tuple:
        if inner[1:] == (...,):
            return st.lists(values(inner[0]), max_size=3).map(tuple)
        return st.tuples(*map(values, inner))
    if origin is Mapping:
        return st.dictionaries(st.text(max_size=5), values(inner[1]), max_size=2)
    if issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    return st.builds(kind, **{name: values(one) for name, one in parameters(kind).items()})


def parameters(kind: Any) -> dict[str, Any]:
    if chz.is_chz(kind):
        return {name: one.x_type for name, one in chz.chz_fields(kind).items()}
    assert is_dataclass(kind)
    return {one.name: get_type_hints(kind)[one.name] for one in fields(kind) if one.init}


def model_turns() -> st.SearchStrategy[ModelTurn]:
    some = {name: values(one) for name, one in parameters(ModelTurn).items() if not name.startswith("sampl")}
    pairs = st.lists(st.tuples(values(int), values(float)), max_size=3)
    return st.builds(
        lambda pairs, **others: ModelTurn(
            sampled_tokens=tuple(one for one, _ in pairs), sampling_logprobs=tuple(one for _, one in pairs), **others
        ),
        pairs,
        **some,
    )


def rollouts() -> st.SearchStrategy[Rollout]:
    some = {name: values(one) for name, one in parameters(Rollout).items() if name not in ("reward", "stop_reason")}
    ends = st.one_of(
        st.tuples(st.sampled_from([one for one in StopReason if one.is_fault]), st.none()),
        st.tuples(st.sampled_from([one for one in StopReason if not one.is_fault]), values(Reward)),
    )
    return st.builds(lambda end, **others: Rollout(stop_reason=end[0], reward=end[1], **others), ends, **some)


def datums() -> st.SearchStrategy[Datum]:
    rows = st.lists(st.tuples(values(int), st.booleans(), values(float), st.floats(-9, 0)), max_size=4)

    def build(rows: list[tuple[int, bool, float, float]], shown: EncodedImage, seed: int) -> Datum:
        chunks = (EncodedTextChunk(tokens=tuple(row[0] for row in rows)), ImageChunk(image=shown, expected_tokens=2))
        return Datum(
            rollout_id=str(seed),
            model_input=ModelInput(chunks=chunks),
            loss_mask=(*(row[1] and place > 0 for place, row in enumerate(rows)), False, True),
            advantages=(*(row[2] for row in rows), 0.0, -0.5),
            sampling_logprobs=(*(row[3] for row in rows), 0.0, -1e-300),
            policy_versions=(seed, 1),
        )

    return st.builds(build, rows, values(EncodedImage), values(int)).filter(lambda datum: not datum.loss_mask[0])


MADE = {ModelTurn: model_turns, Rollout: rollouts, Datum: datums}


@pytest.mark.parametrize("kind", MESSAGES, ids=["Request", "Reply", "Hello", "Rollout"])
def test_every_message_comes_out_as_it_went_in(kind: Any) -> None:
    @settings(max_examples=30, deadline=None, database=None)
    @given(values(kind))
    def check(message: Any) -> None:
        read = decode(encode(message, kind), kind)
        assert read == message
        assert repr(read) == repr(message)  # 1 is not 1.0 or True, and -0.0 not 0.0

    check()


@pytest.mark.parametrize("kind", MESSAGES, ids=["Request", "Reply", "Hello", "Rollout"])
def test_changed_bytes_are_another_message_of_the_type_or_refused(kind: Any) -> None:
    @settings(max_examples=30, deadline=None, database=None)
    @given(values(kind), st.randoms(use_true_random=False))
    def check(message: Any, rng: random.Random) -> None:
        payload = bytearray(encode(message, kind))
        for _ in range(rng.randint(1, 3)):
            payload[rng.randrange(len(payload))] = rng.randrange(256)
        try:
            read = decode(payload, kind)
        except MessageError:
            return
        assert isinstance(read, kind)

    check()


def test_numbers_that_json_lacks_travel_where_a_type_has_them() -> None:
    output = wire.ForwardOutput(training_logprobs=((math.nan, math.inf, -math.inf),))
    metrics = wire.TrainerMetricsOutput(metrics={"a": math.nan, "b": math.inf})

    ((first, *rest),) = decode(encode(output), wire.ForwardOutput).training_logprobs
    read = decode(encode(metrics), wire.TrainerMetricsOutput).metrics

    assert math.isnan(first)
    assert rest == [math.inf, -math.inf]
    assert math.isnan(read["a"])
    assert read["b"] == math.inf


def test_what_a_message_holds_twice_is_sent_once_and_is_one_object_again() -> None:
    shown, tokens = encoded_image(b"p" * 10_000), tuple(range(1000))
    again = EncodedImage(data=bytes(bytearray(shown.data)), format="png", width_px=1, height_px=1)
    chunks = [EncodedTextChunk(tokens=tokens), ImageChunk(image=shown, expected_tokens=1)] * 3
    given_input = ModelInput(chunks=(*chunks, ImageChunk(image=again, expected_tokens=1)))

    payload = encode(given_input)
    read = decode(payload, ModelInput)

    assert read == given_input
    assert len(payload) < 1.1 * (10_000 + 8 * 1000)
    assert read.images[0] is read.images[2]
    assert read.images[0].data == read.images[-1].data
    assert read.chunks[0].tokens is read.chunks[2].tokens


def test_one_tuple_in_fields_of_two_types_is_written_as_both() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Both:
        ints: tuple[int, ...]
        floats: tuple[float, ...]

    pair = (1, 2)
    assert decode(encode(Both(ints=pair, floats=pair)), Both) == Both(ints=(1, 2), floats=(1.0, 2.0))


def message(value: object, *parts: bytes, lengths: object = None) -> bytes:
    """As a stranger may write it."""
    text = json.dumps([[len(part) for part in parts] if lengths is None else lengths, value]).encode()
    return struct.pack(">Q", len(text)) + text + b"".join(parts)


HELLO = {"name": "a", "num_slots": 1, "code_version": "1"}
CLICK = {"x": 1, "y": 2}
ROLLOUT = rollout(model_turn(prompt(text(1))))


def changed(**values: object) -> bytes:
    return message({**HELLO, **values})


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\0" * 7,
        struct.pack(">Q", 2**63) + b"{}",
        struct.pack(">Q", 3) + b"{}",
        struct.pack(">Q", 2) + b"{}" + b"more",
        message(HELLO) + b"more",
        message(HELLO, b"four", lengths=[3]),
        message(HELLO, b"four", lengths=[5]),
        message(HELLO, b"four", lengths=[5, -1]),
        message(HELLO, b"four", lengths=[4.0]),
        message(HELLO, b"four", lengths=[3, True]),
        message(HELLO, lengths=[2**64]),
        message(HELLO, lengths=[2**63, 2**63]),
        message(HELLO, lengths={"0": 0}),
        message(HELLO, lengths=7),
        struct.pack(">Q", 200_000) + b"[" * 100_000 + b"]" * 100_000,
        struct.pack(">Q", 4300) + b"[[]," + b"9" * 4295 + b"]",
        struct.pack(">Q", 12) + b'[[],{"a":\xff}]',
        message([]),
        message(None),
        message({}),
        changed(more=1),
        changed(name=None),
        changed(name=["a"]),
        changed(num_slots="1"),
        changed(num_slots=1.0),
        changed(num_slots=True),
        changed(num_slots=math.nan),
        changed(__class__="Orders"),
    ],
    ids=str,
)
def test_anything_but_the_message_is_refused(payload: bytes) -> None:
    with pytest.raises(MessageError, match="expected a Hello: "):
        decode(payload, Hello)


def test_a_name_that_comes_twice_is_refused() -> None:
    text = b'[[],{"name":"a","num_slots":1,"code_version":"1","num_slots":2}]'

    with pytest.raises(MessageError, match="expected each name once"):
        decode(struct.pack(">Q", len(text)) + text, Hello)


@pytest.mark.parametrize(
    ("kind", "value", "complaint"),
    [
        (Action, ["Hello", CLICK], r"expected one of \['Click'"),
        (Action, ["Click", {**CLICK, "x": None}], "expected int, got None"),
        (Action, CLICK, "expected one of"),
        (Action, ["Click", CLICK, CLICK], "too many values"),
        (Action, None, "cannot unpack"),
        (Click | DoubleClick | None, [["Click"], CLICK], "expected one of"),
        (wire.Failed, {"kind": "other", "message": ""}, r"\['config', 'disk', 'training'\], got 'other'"),
        (StopReason, "bored", "'bored' is not a valid StopReason"),
        (StopReason, 1, "expected str, got 1"),
        (tuple[int, ...], [1, 2], r"expected int, got \[1, 2\]"),
        (tuple[int, ...], 1, "KeyError: 1"),
        (tuple[int, ...], -1, "KeyError: -1"),
        (tuple[int, ...], False, "expected int, got False"),
        (tuple[int, ...], 0, "unpack requires a buffer of 0 bytes"),
        (tuple[str, ...], "ab", "expected list, got 'ab'"),
        (tuple[str, int], ["a", 1], "expected dict"),
        (tuple[str, int], {"0": "a"}, r"expected the fields \['0', '1'\], got \['0'\]"),
        (EncodedImage, [0, "svg", 1, 1], r"expected one of \['png', 'jpeg'\], got 'svg'"),
        (EncodedImage, [0, "png", 1], "not enough values"),
        (EncodedImage, [0, "png", 1, 1.5], "expected int, got 1.5"),
        (EncodedImage, [0, "png", 1, 1, 1], "too many values"),
        (EncodedImage, [0, "png", 1, 1, "sha256"], "expected int, got 'sha256'"),
    ],
)
def test_values_of_another_type_are_refused(kind: Any, value: object, complaint: str) -> None:
    with pytest.raises(MessageError, match=complaint):
        decode(message(value, b"four"), kind)


def test_constructors_check_what_no_type_says() -> None:
    datum = Datum(
        rollout_id="r",
        model_input=prompt(text(1), image(b"p"), text(2)),
        loss_mask=(False,) * 4,
        advantages=(0.0,) * 4,
        sampling_logprobs=(0.0, -0.5, 0.0, 0.0),
        policy_versions=(),
    )
    payload = encode(datum)
    (length,), ended = struct.unpack(">Q", encode(ROLLOUT)[:8]), encode(ROLLOUT)[8:]
    fault = struct.pack(">Q", length + 2) + ended.replace(b'"finished"', b'"task_error"')

    with pytest.raises(MessageError, match="expected finite sampling log-probabilities"):
        decode(payload.replace(struct.pack("<d", -0.5), struct.pack("<d", math.nan)), Datum)
    with pytest.raises(MessageError, match="expected a reward for"):
        decode(fault, Rollout)


def test_an_image_is_known_by_its_own_bytes() -> None:
    payload = encode(encoded_image(b"pixels"))

    assert decode(payload, EncodedImage) == encoded_image(b"pixels")
    assert decode(payload.replace(b"pixels", b"others"), EncodedImage) == encoded_image(b"others")


def test_types_that_could_do_more_than_hold_values_have_no_message() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Odd:
        call: type

    with pytest.raises(TypeError, match="expected a type that messages may hold, got <class 'type'>"):
        encode(Odd(call=dict))
