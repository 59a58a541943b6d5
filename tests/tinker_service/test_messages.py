from array import array
from math import isnan

import pytest

from cua_rl.host.request_limits import RequestRefused
from cua_rl.sampling.generation import Generated, GeneratedSequence
from cua_rl.tinker_service.messages import Fields, encode_pass, encode_samples, new_message, numbers, parse_message


def test_a_pass_is_one_record_with_the_rows_end_to_end() -> None:
    message = parse_message("ForwardBackwardOutput", encode_pass([[-0.5, -1.0], [-2.0]], {"loss:sum": 3.5}))
    (record,) = message.loss_fn_outputs
    logprobs = record.fields["logprobs"]
    assert list(numbers(logprobs.data, "f")) == [-0.5, -1.0, -2.0]
    assert list(numbers(logprobs.offsets, "q")) == [0, 8, 12]  # bytes: two floats, then one
    assert (record.num_datums, dict(message.metrics)) == (2, {"loss:sum": 3.5})


def test_samples_keep_their_order_and_only_the_last_prompt_tokens_are_scored() -> None:
    sequences = (
        GeneratedSequence(tokens=(5,), logprobs=(-1.0,), stop_reason="length", topk_logprobs=(((5, -1.0),),)),
        GeneratedSequence(tokens=(6, 7), logprobs=(-2.0, -3.0), stop_reason="stop"),
    )
    generated = Generated(
        sequences=sequences,
        prompt_logprobs=(None, -0.5, -0.25),
        topk_prompt_logprobs=(None, ((3, -0.5), (4, -1.5)), ((9, -0.25),)),
    )
    response = parse_message("SampleResponse", encode_samples(generated, 1))
    first, second = response.sequences
    assert (first.stop_reason, list(numbers(first.tokens, "i"))) == (1, [5])
    assert (second.stop_reason, list(numbers(second.logprobs, "f"))) == (0, [-2.0, -3.0])
    assert first.topk_sampled_logprobs.k == 1
    assert not second.HasField("topk_sampled_logprobs")
    scores = list(numbers(response.prompt_logprobs, "f"))
    assert isnan(scores[0])
    assert isnan(scores[1])
    assert scores[2] == -0.25
    top = response.topk_prompt_logprobs
    assert (top.k, top.length) == (1, 3)  # the row of two is before the last token
    assert list(numbers(top.token_ids, "i")) == [0, 0, 9]


def test_bytes_that_are_no_message_are_refused() -> None:
    with pytest.raises(RequestRefused, match="expected the protobuf message ForwardBackwardRequest"):
        parse_message("ForwardBackwardRequest", b"\xff\xff\xff")
    with pytest.raises(RequestRefused, match="numbers of 4 bytes, got 5"):
        numbers(b"12345", "i")


def test_a_oneof_holds_one_of_its_fields() -> None:
    chunk = new_message("Chunk")
    chunk.encoded_text.tokens = array("i", [1]).tobytes()
    chunk.image.format = "png"
    assert chunk.WhichOneof("chunk") == "image"


@pytest.mark.parametrize("value", [True, "1", 10**400, -1, 2.5])
def test_what_is_not_a_whole_number_in_its_range_is_refused(value: object) -> None:
    with pytest.raises(RequestRefused, match="expected n as a whole number from 0 to 9"):
        Fields({"n": value}).whole("n", 0, 9)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "0.5", False])
def test_what_is_not_a_number_in_its_range_is_refused(value: object) -> None:
    with pytest.raises(RequestRefused, match="expected x as a number from 0 to 1"):
        Fields({"x": value}).number("x", 0.0, 1.0, 0.5)


def varint(number: int) -> bytes:
    low = bytes([number & 127])
    return low if number < 128 else bytes([low[0] | 128]) + varint(number >> 7)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def tensor(content: bytes) -> bytes:
    """An input of a datum."""
    return field(2, field(1, b"a") + field(2, content))


@pytest.mark.parametrize(
    "body",
    [
        field(3, field(1, b"") * 500_001),  # chunks of a datum: 2 bytes here, 43 in memory
        field(3, b"") * 500_001,
        field(3, tensor(field(4, bytes(500_001)))),  # a shape, packed
        field(3, tensor(b"\x20\x00" * 500_001)),  # and not
        field(5, b"") * 500_001,  # a map
        field(3, field(1, (field(1, b"") + field(2, b"")) * 250_001)),  # one chunk after the other in the same place
        field(99, b"") * 500_001,
        b"\x98\x06\x00" * 500_001,
    ],
)
def test_a_message_that_takes_much_more_memory_than_its_body_is_refused_before_it_is_parsed(body: bytes) -> None:
    with pytest.raises(RequestRefused, match="at most 500000 fields") as refused:
        parse_message("ForwardBackwardRequest", body)
    assert refused.value.status == 413


def test_a_group_hides_no_fields_behind_it() -> None:
    with pytest.raises(RequestRefused, match="without groups"):
        parse_message("ForwardBackwardRequest", b"\x9b\x06\x9c\x06" + field(3, field(1, b"") * 500_001))


def test_a_request_as_large_as_the_sdk_makes_it_is_parsed() -> None:
    datum = b"".join(field(1, field(1, field(1, bytes(40)))) for _ in range(100)) + 3 * tensor(field(1, bytes(400)))
    assert len(parse_message("ForwardBackwardRequest", field(3, datum) * 1024).data) == 1024
