"""Datums as others make them: any token on the mask, any weight, images side by side, one token alone."""

import io
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import Tensor

from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import Datum, EncodedTextChunk, ImageChunk, ModelInput
from tests.real.training.test_exactness import load_stock, stock_logprobs
from tests.real.training.tiny_qwen3_vl import TINY_ROUNDINGS, draw_screenshot, image_chunk
from tests.real.training.trainer_calls import STEP, forward, gradients, moved, train, weights
from tests.rounding import KeepFloat64, assert_as_exact_as, assert_equal_but_for_rounding

CROSS_ENTROPY = LossConfig(name="cross_entropy")


def text(*tokens: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=tokens)


def whole(*chunks: EncodedTextChunk | ImageChunk, weights: Sequence[float] | None = None) -> Datum:
    """A datum with everything on its mask but the first token and images; weights of 1, if none are given."""
    model_input = ModelInput(chunks=chunks)
    is_text = [isinstance(chunk, EncodedTextChunk) for chunk in chunks for _ in range(chunk.length)]
    mask = (False, *is_text[1:])
    return Datum(
        rollout_id="whole",
        model_input=model_input,
        loss_mask=mask,
        advantages=tuple(map(float, mask)) if weights is None else tuple(weights),
        sampling_logprobs=(0.0,) * model_input.length,
        policy_versions=(),
    )


def on_mask_everywhere(datum: Datum) -> Datum:
    """The same datum with every text token on its mask; those that were not have an advantage of zero."""
    return replace(datum, loss_mask=whole(*datum.model_input.chunks).loss_mask)


def three_axes(*parts: tuple[int, int, int]) -> Tensor:
    """[3, 1, seq] from parts (start, rows, columns) of images, or (start, 1, 0) of a text token."""
    columns: list[tuple[int, int, int]] = []
    for start, height, width in parts:
        places = [(start, start + row, start + column) for row in range(height) for column in range(width)]
        columns += places or [(start, start, start)]
    return torch.tensor(columns).T[:, None]


@pytest.mark.parametrize("begins_with_text", [True, False])
def test_images_side_by_side_have_the_positions_of_the_model(config: TrainerConfig, begins_with_text: bool) -> None:
    rng = random.Random(0)
    # of 2 x 3, 2 x 5 and 2 x 3 tokens: each moves what follows by its longer side
    first, wide, last = (draw_screenshot(rng, width=width) for width in (96, 160, 96))
    images = (image_chunk(first), text(), image_chunk(wide), image_chunk(last))
    before, start = ((text(20, 21),), 2) if begins_with_text else ((), 0)
    datum = whole(*before, *images, text(22, 23, 24))
    parts = [(place, 1, 0) for place in range(start)]
    parts += [(start, 2, 3), (start + 3, 2, 5), (start + 8, 2, 3), *((start + 11 + place, 1, 0) for place in range(3))]
    positions = three_axes(*parts)
    stock, exact = load_stock(config.model_path), load_stock(config.model_path, torch.float64)

    rows = forward(Trainer(config), [datum])

    expected = [stock_logprobs(stock, config.model_path, datum, position_ids=positions)]
    with KeepFloat64():
        truth = [stock_logprobs(exact, config.model_path, datum, position_ids=positions)]
    assert_as_exact_as(rows, expected, truth)
    # the order of the images is read
    swapped = whole(*before, image_chunk(last), image_chunk(wide), image_chunk(first), text(22, 23, 24))
    assert (forward(Trainer(config), [swapped])[0] - rows[0]).abs().max() > 0.01


def test_every_token_has_a_log_probability_also_a_single_target(config: TrainerConfig, datums: list[Datum]) -> None:
    trainer = moved(Trainer(config), datums)
    everywhere = [on_mask_everywhere(datum) for datum in datums]
    pair = whole(text(20, 21))

    rows, single = forward(trainer, everywhere), forward(trainer, [pair, *datums])[0]

    for row, datum, own in zip(rows, everywhere, forward(trainer, datums), strict=True):
        assert all((value != 0.0) == trained for value, trained in zip(row.tolist(), datum.loss_mask, strict=True))
        trained = own != 0.0
        assert_equal_but_for_rounding(row[trained], own[trained], TINY_ROUNDINGS)
    longer = forward(trainer, [whole(text(20, 21, 22))])[0]
    assert_equal_but_for_rounding(single[1:], longer[1:2], TINY_ROUNDINGS)
    with pytest.raises(TrainingError, match=r"of 0 to below 320 in 'whole', got -1"):
        forward(trainer, [whole(text(20, -1))])


def test_weights_of_cross_entropy_may_be_anything(config: TrainerConfig, datums: list[Datum]) -> None:
    rng = random.Random(1)
    trainer = moved(Trainer(config), datums)
    drawn = [
        replace(datum, advantages=tuple(rng.choice([-1.5, 0.0, 0.25]) * trained for trained in datum.loss_mask))
        for datum in map(on_mask_everywhere, datums)
    ]
    ones = (1.0,) * len(drawn)

    output = trainer.forward_backward(wire.ForwardBackward(datums=tuple(drawn), loss=CROSS_ENTROPY, token_weights=ones))
    found = gradients(trainer)
    step = trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=0.0)))

    total = -sum(
        weight * logprob
        for datum, row in zip(drawn, output.training_logprobs, strict=True)
        for weight, logprob in zip(datum.advantages, row, strict=True)
    )
    assert output.metrics["loss/total"] == pytest.approx(total, abs=1e-3)
    assert step.grad_norm > 0.1
    # on policy, importance sampling has the gradient of weighted cross entropy
    sampled = [replace(one, sampling_logprobs=row) for one, row in zip(drawn, output.training_logprobs, strict=True)]
    trainer.forward_backward(wire.ForwardBackward(datums=tuple(sampled), loss=LossConfig(), token_weights=ones))
    for one, other in zip(gradients(trainer), found, strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)


def test_weights_that_are_all_zero_take_a_step_that_changes_nothing(config: TrainerConfig, datums: list[Datum]) -> None:
    trainer = Trainer(config)
    before = weights(trainer)

    output = train(
        trainer, [replace(datum, advantages=(0.0,) * len(datum.advantages)) for datum in datums], CROSS_ENTROPY
    )
    step = trainer.optim_step(STEP)

    assert output.metrics["loss/total"] == step.grad_norm == 0.0
    assert step.policy_version == 1
    assert all(map(torch.equal, before, weights(trainer)))


def test_what_a_loss_is_can_be_asked_without_its_gradient(config: TrainerConfig, datums: list[Datum]) -> None:
    trainer = moved(Trainer(config), datums)
    request = wire.ForwardBackward(datums=tuple(datums), loss=LossConfig(name="ppo"), token_weights=(1.0,) * 4)
    asked = trainer.forward_backward(replace(request, with_gradient=False))
    with pytest.raises(TrainingError, match="no gradient to step along"):
        trainer.optim_step(STEP)
    first = trainer.forward_backward(request)
    kept = gradients(trainer)
    improbable = replace(datums[1], sampling_logprobs=tuple(-1e4 if one else 0.0 for one in datums[1].loss_mask))

    again = trainer.forward_backward(replace(request, with_gradient=False, token_weights=None))
    with pytest.raises(TrainingError, match="finite loss"):
        trainer.forward_backward(
            replace(request, datums=(improbable,), loss=LossConfig(), token_weights=None, with_gradient=False)
        )

    assert asked.training_logprobs == first.training_logprobs == again.training_logprobs
    encoded = {"optim/encoded_images": 0.0}
    assert {**asked.metrics, **encoded} == {**first.metrics, **encoded}
    assert all(map(torch.equal, kept, gradients(trainer)))
    assert trainer.optim_step(STEP).num_trained_tokens == asked.metrics["optim/trained_tokens"]


def test_gspo_of_a_whole_datum_is_that_of_its_turn_if_the_ratio_counts_the_turn_only(
    config: TrainerConfig, datums: list[Datum]
) -> None:
    trainer = moved(Trainer(config), datums)
    turns = datums[1:3]  # of one turn each
    loss, ones = LossConfig(name="gspo", clip_low=0.7, clip_high=5.0), (1.0, 1.0)

    trainer.forward_backward(wire.ForwardBackward(datums=tuple(turns), loss=loss, token_weights=ones))
    expected = gradients(trainer)
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=0.0)))
    trainer.forward_backward(
        wire.ForwardBackward(
            datums=tuple(map(on_mask_everywhere, turns)),
            loss=loss,
            token_weights=ones,
            ratio_masks=tuple(datum.loss_mask for datum in turns),
        )
    )

    assert max(one.abs().max() for one in expected) > 0.01
    for one, other in zip(gradients(trainer), expected, strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)
    short = wire.ForwardBackward(datums=tuple(turns), loss=loss, token_weights=ones, ratio_masks=((True,),))
    with pytest.raises(TrainingError, match="ratio masks aligned"):
        trainer.forward_backward(short)


def test_a_jpeg_is_what_it_decodes_to(config: TrainerConfig) -> None:
    picture, jpeg, png = Image.open(io.BytesIO(draw_screenshot(random.Random(0)))), io.BytesIO(), io.BytesIO()
    picture.save(jpeg, "JPEG", quality=30)
    Image.open(jpeg).save(png, "PNG")
    rows = [
        forward(Trainer(config), [whole(text(20), image_chunk(data.getvalue()), text(21, 22))])[0]
        for data in (jpeg, png)
    ]

    assert rows[0].equal(rows[1])
    assert image_chunk(jpeg.getvalue()).image.format == "jpeg"
