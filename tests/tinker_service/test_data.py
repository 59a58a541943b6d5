import asyncio
import threading
import tracemalloc
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest

from cua_rl.host.request_limits import RequestRefused
from cua_rl.tinker_service.data import json_chunk, read_optim
from cua_rl.tinker_service.messages import Fields
from cua_rl.types.rollout import EncodedTextChunk, ImageChunk
from tests.tinker_service.clients import Picture, add_datum, make_pass, make_reader, png


def read(message: Any) -> Any:
    return make_reader().read_pass(message.SerializeToString())


def text_message(loss: str = "cross_entropy", **inputs: list[float]) -> Any:
    message = make_pass("m", 1, loss)
    add_datum(message, [[1, 2, 3]], {"target_tokens": [2, 3, 4], **inputs})
    return message


def test_a_datum_is_its_inputs_and_the_last_target_with_weights_at_the_targets() -> None:
    (datum,) = read(text_message(weights=[0.0, -0.5, 2.0])).datums
    assert datum.model_input.chunks == (EncodedTextChunk(tokens=(1, 2, 3, 4)),)
    assert datum.loss_mask == (False, True, True, True)
    assert datum.advantages == (0.0, 0.0, -0.5, 2.0)


def test_cross_entropy_without_weights_counts_every_target_once() -> None:
    assert read(text_message()).datums[0].advantages == (0.0, 1.0, 1.0, 1.0)


def test_images_keep_their_places_and_are_not_predicted() -> None:
    message = make_pass("m", 1)
    chunks = [[1], Picture(), Picture(data=png(kind="JPEG"), format="jpeg", expected_tokens=None), [2]]
    # 6 input tokens: text, 2 + 2 of images, text; the text after an image is predicted by the image's last token
    add_datum(message, chunks, {"target_tokens": [0, 0, 0, 0, 2, 3], "weights": [0, 0, 0, 0, 1.0, 1.0]})
    (datum,) = read(message).datums
    assert [type(chunk) for chunk in datum.model_input.chunks] == [
        EncodedTextChunk,
        ImageChunk,
        ImageChunk,
        EncodedTextChunk,
    ]
    assert datum.loss_mask == (False, False, False, False, False, True, True)
    assert datum.model_input.images[0].data == png()


def test_a_sequence_may_end_with_an_image_whose_last_token_predicts() -> None:
    message = make_pass("m", 1)
    add_datum(message, [[1], Picture()], {"target_tokens": [0, 0, 5], "weights": [0, 0, 1.0]})
    (datum,) = read(message).datums
    assert datum.model_input.chunks[-1] == EncodedTextChunk(tokens=(5,))
    assert datum.loss_mask == (False, False, False, True)


def test_policy_losses_take_sampling_logprobs_and_advantages() -> None:
    asked = read(text_message("ppo", logprobs=[0.0, -1.0, -2.0], advantages=[0.0, 0.5, 0.5]))
    assert asked.datums[0].sampling_logprobs == (0.0, 0.0, -1.0, -2.0)
    assert (asked.loss.name, asked.loss.clip_low, asked.loss.clip_high) == ("ppo", 0.2, 0.2)


def test_absolute_clip_thresholds_become_distances() -> None:
    message = text_message("cispo", logprobs=[0.0] * 3, advantages=[1.0] * 3)
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.7
    message.loss_fn_config_v2["clip_high_threshold"].number = 1.5
    loss = read(message).loss
    assert (loss.clip_low, loss.clip_high) == (0.3, 0.5)


def test_a_gspo_ratio_is_over_its_mask_or_else_over_what_has_an_advantage() -> None:
    rows = {"logprobs": [0.0, -1.0, -1.0], "advantages": [0.0, 0.5, 0.5]}
    assert read(text_message("gspo", **rows)).ratio_masks == ((False, False, True, True),)
    masked = text_message("gspo", **rows, sequence_ratio_mask=[0.0, 1.0, 0.0])
    assert read(masked).ratio_masks == ((False, False, True, False),)
    rows["advantages"] = [0.0] * 3
    assert read(text_message("gspo", **rows)).ratio_masks == ((False, True, True, True),)


def test_a_loss_whose_formula_tinker_does_not_publish_is_refused() -> None:
    with pytest.raises(RequestRefused, match="got 'stable_reinforce'"):
        read(text_message("stable_reinforce", logprobs=[0.0, -1.0, -2.0], advantages=[0.0, 0.5, 0.5]))


def with_target(message: Any) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].dense = b"\x09" + bytes(23)


def with_shape(message: Any) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].shape[:] = [3, 1]


def with_sparse(message: Any) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].sparse_csr.values = bytes(24)


def with_dtype(message: Any) -> None:
    message.data[0].loss_fn_inputs["target_tokens"].dtype = 1


def with_infinity(message: Any) -> None:
    message.data[0].loss_fn_inputs["weights"].dense = b"\x00\x00\x80\x7f" * 3


def with_thresholds(message: Any) -> None:
    message.loss_fn_config_v2["clip_low_threshold"].number = 0.5


def with_broken_image(message: Any) -> None:
    image = message.data[0].model_input.add().image
    image.data, image.format = png()[:60], "png"


def with_other_format(message: Any) -> None:
    image = message.data[0].model_input.add().image
    image.data, image.format = png(), "jpeg"


def with_wrong_size(message: Any) -> None:
    image = message.data[0].model_input.add().image
    image.data, image.format, image.expected_tokens = png(), "png", 3


def with_dimensions(message: Any) -> None:
    image = message.data[0].model_input.add().image
    image.data, image.format, image.override_dimensions.width = png(), "png", 64


def with_sound(message: Any) -> None:
    message.data[0].model_input.add().dmel.dmel = b"sound"


def with_large_token(message: Any) -> None:
    message.data[0].model_input[0].encoded_text.tokens = (100).to_bytes(4, "little") * 3


def with_odd_tokens(message: Any) -> None:
    message.data[0].model_input[0].encoded_text.tokens = b"123"


def with_nothing(message: Any) -> None:
    del message.data[0].model_input[:]


def with_many_tokens(message: Any) -> None:
    message.data[0].model_input[0].encoded_text.tokens = bytes(4 * 64)


def with_unknown_input(message: Any) -> None:
    message.data[0].loss_fn_inputs["mask"].dense = bytes(12)


def without_data(message: Any) -> None:
    del message.data[:]


def with_loss(message: Any) -> None:
    message.loss_fn = "custom"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_target, "to be the next token of model_input, 2, got 9"),
        (with_shape, r"of shape \[3\], one value per token of model_input, got shape \[3, 1\]"),
        (with_sparse, "dense int64 tensor"),
        (with_dtype, "dense int64 tensor"),
        (with_infinity, "finite values"),
        (with_thresholds, "loss_fn_config of cross_entropy"),
        (with_broken_image, "send the encoded screenshot whole"),
        (with_other_format, "whole jpeg image"),
        (with_wrong_size, "expected 2 expected_tokens for an image of 64x32 pixels"),
        (with_dimensions, "PNG or JPEG images as they are"),
        (with_sound, "PNG or JPEG images as they are"),
        (with_large_token, "tokens from 0 to 99"),
        (with_odd_tokens, "numbers of 4 bytes"),
        (with_nothing, "expected 1 to 63 tokens"),
        (with_many_tokens, "expected 1 to 63 tokens"),
        (with_unknown_input, "expected only"),
        (without_data, "expected 1 to 16384 data, got 0"),
        (with_loss, "expected loss_fn among"),
    ],
)
def test_what_the_trainer_cannot_express_is_refused_with_a_reason(change: Callable[[Any], None], reason: str) -> None:
    message = text_message(weights=[1.0, 1.0, 1.0])
    change(message)
    with pytest.raises(RequestRefused, match=reason) as refused:
        read(message)
    assert refused.value.status == 400


def test_a_weight_where_an_image_follows_is_refused() -> None:
    message = make_pass("m", 1)
    add_datum(message, [[1], Picture()], {"target_tokens": [0, 0, 5], "weights": [1.0, 0, 1.0]})
    with pytest.raises(RequestRefused, match="expected weight 0 at position 0"):
        read(message)


def test_nothing_of_a_prompt_is_unpacked_or_decoded_beyond_what_the_context_holds() -> None:
    message = make_pass("m", 1)
    add_datum(message, [[1], *[Picture()] * 32, Picture(data=b"no image")], {})
    with pytest.raises(RequestRefused, match=r"expected 1 to 63 tokens in .* got 65 or more"):
        read(message)
    message = text_message()
    message.data[0].model_input[0].encoded_text.tokens = bytes(4 * 10_000_000)
    tracemalloc.start()
    with pytest.raises(RequestRefused, match="expected at most 64 numbers of 4 bytes, got 40000000 bytes"):
        read(message)
    message = text_message()
    message.data[0].loss_fn_inputs["target_tokens"].dense = bytes(8 * 5_000_000)
    with pytest.raises(RequestRefused, match="expected at most 3 numbers of 8 bytes"):
        read(message)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 150 * 2**20  # the message, and its bytes once more; as numbers, they would take 460 MiB


async def test_a_key_that_reads_long_bodies_keeps_nobody_from_reading_another() -> None:
    reader, goes_on = make_reader(), threading.Event()
    slow = [asyncio.create_task(reader.in_turn(1, goes_on.wait)) for _ in range(50)]
    assert await reader.in_turn(2, len, b"123") == 3
    assert not any(task.done() for task in slow)
    goes_on.set()
    assert await asyncio.gather(*slow) == [True] * 50


def test_prompts_in_json_hold_text_and_images() -> None:
    encoded = b64encode(png()).decode()
    chunks = [
        json_chunk({"type": "encoded_text", "tokens": [1, 2]}),
        json_chunk({"type": "image", "data": encoded, "format": "png", "expected_tokens": 2}),
    ]
    assert make_reader().prompt(chunks, "prompt", room=1).length == 4


@pytest.mark.parametrize(
    "chunk",
    [
        7,
        {"type": "image_asset_pointer", "location": "https://example.org/a.png"},
        {"type": "encoded_text", "tokens": ["1"]},
        {"type": "encoded_text"},
        {"type": "image", "data": "###", "format": "png"},
        {"type": "image", "data": "", "format": "gif"},
    ],
)
def test_other_chunks_in_json_are_refused(chunk: object) -> None:
    with pytest.raises(RequestRefused):
        json_chunk(chunk)


def test_an_optimizer_step_without_settings_has_those_of_the_sdk() -> None:
    optim = read_optim(Fields({"adam_params": {"learning_rate": 2e-4}}))
    assert (optim.learning_rate, optim.beta1, optim.beta2, optim.eps) == (2e-4, 0.9, 0.95, 1e-12)
    assert optim.grad_clip_norm == 0.0


@pytest.mark.parametrize(
    "fields", [{}, {"adam_params": {"learning_rate": -1}}, {"optimizer_params": {"type": "dimuon"}}]
)
def test_other_optimizers_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(RequestRefused):
        read_optim(Fields(fields))
