"""The trainer against Transformers' stock forward pass and peft's gradients."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessor

from cua_rl.training.config import TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import Datum
from tests.real.training.tiny_qwen3_vl import IMAGE_PAD
from tests.real.training.trainer_calls import forward, gradients, moved, train
from tests.rounding import KeepFloat64, assert_as_exact_as


def stock_logprobs(
    model: torch.nn.Module,
    model_path: Path,
    datum: Datum,
    temperature: float = 1.0,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Log-probabilities as a user of Transformers would compute them, 0.0 off-mask."""
    ids = torch.tensor([datum.model_input.token_ids(IMAGE_PAD)])
    images = [Image.open(io.BytesIO(chunk.data)).convert("RGB") for chunk in datum.model_input.images]
    inputs = {}
    if images:
        inputs = dict(Qwen2VLImageProcessor.from_pretrained(model_path)(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == IMAGE_PAD).int()
    if position_ids is not None:
        inputs["position_ids"] = position_ids
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0] / temperature
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1).to(logprobs), logprobs]) * torch.tensor(datum.loss_mask)


def load_stock(model_path: Path, dtype: torch.dtype = torch.float32) -> Any:
    # grouped products, the default of mixtures of experts, know no float64
    return AutoModelForImageTextToText.from_pretrained(model_path, dtype=dtype, experts_implementation="eager").eval()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_as_exact_as_the_stock_forward_pass(
    config: TrainerConfig, datums: list[Datum], temperature: float
) -> None:
    stock, exact = load_stock(config.model_path), load_stock(config.model_path, torch.float64)

    rows = forward(Trainer(config), datums, temperature)

    expected = [stock_logprobs(stock, config.model_path, datum, temperature) for datum in datums]
    with KeepFloat64():
        truth = [stock_logprobs(exact, config.model_path, datum, temperature) for datum in datums]
    assert_as_exact_as(rows, expected, truth)


def test_logprobs_and_gradients_with_a_moved_adapter_are_as_exact_as_those_of_peft_on_the_stock_model(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    trainer = moved(Trainer(config), datums)
    trainer.save_weights_for_sampler(tmp_path / "adapter")
    before = stock_logprobs(load_stock(config.model_path), config.model_path, datums[0])
    stock, exact = (
        PeftModel.from_pretrained(load_stock(config.model_path, dtype), tmp_path / "adapter", is_trainable=True)
        for dtype in (torch.float32, torch.float64)
    )
    exact.double()

    rows, expected = forward(trainer, datums), stock_rows_and_gradients(stock, config.model_path, datums)
    train(trainer, datums)
    with KeepFloat64():
        truth = stock_rows_and_gradients(exact, config.model_path, datums)

    assert_as_exact_as(rows, expected[0], truth[0])
    assert max(gradient.abs().max() for gradient in truth[1]) > 0.1
    assert_as_exact_as(gradients(trainer), expected[1], truth[1])
    assert (rows[0] - before).abs().max() > 0.01


def stock_rows_and_gradients(
    model: PeftModel, model_path: Path, datums: Sequence[Datum]
) -> tuple[list[Tensor], list[Tensor]]:
    """Log-probabilities of all datums, and the gradient of their summed loss, -exp(log ratio) * advantage a token."""
    rows = [stock_logprobs(model, model_path, datum) for datum in datums]
    for row, datum in zip(rows, datums, strict=True):
        log_ratios = row - torch.tensor(datum.sampling_logprobs).to(row)
        (-log_ratios.exp() * torch.tensor(datum.advantages).to(row)).sum().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return [row.detach() for row in rows], [gradient for gradient in trained if gradient is not None]
