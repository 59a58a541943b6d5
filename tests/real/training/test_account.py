"""The account's FLOPs against PyTorch's own count of the operations that ran."""

import random

import chz
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cua_rl.config import LossConfig, TrainerConfig
from cua_rl.metrics import check_names
from cua_rl.training import wire
from cua_rl.training.metrics import measure_matmul_peak
from cua_rl.training.trainer import Trainer
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum

LINEAR = ("aten.mm", "aten.addmm", "aten.bmm")
LAYERS, HIDDEN, RANK = 3, 64, 4


def counted_flops(trainer: Trainer, request: wire.ForwardBackward) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        trainer.forward_backward(request)
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


def test_flops_equal_what_pytorch_counts(config: TrainerConfig) -> None:
    trainer, rng = Trainer(config), random.Random(0)
    datums = tuple(make_datum(rng, [draw_screenshot(rng) for _ in range(2)]) for _ in range(3))
    request = wire.ForwardBackward(datums=datums, loss=LossConfig())

    found = counted_flops(trainer, request)
    account = trainer.account.take()

    tokens, lengths = sum(d.model_input.length for d in datums), [d.model_input.length for d in datums]
    predictors = [place for d in datums for place, is_trained in enumerate(d.loss_mask[1:]) if is_trained]
    counted = sum(found.get(name, 0) for name in LINEAR)
    # not counted by PyTorch: addmm_, which adds LoRA's update (out: 512 a layer), its gradient (in: 512, less q, k, v)
    counted += 2 * tokens * RANK * ((LAYERS - 1) * (512 + 512) - 3 * HIDDEN)
    # in the last layer, k and v (out: 64, in: 128) for all tokens, the others for those that predict
    counted += 2 * RANK * (tokens * (64 + 128) + len(predictors) * (448 + 384))
    # the first layer's q, k, v [64 -> 64, 32, 32] need no gradient to their input, which the account does not look at
    below_first = 2 * tokens * (HIDDEN * 128 + 3 * RANK * HIDDEN)
    # scores and values: 2 * heads * head_dim * 2 per pair and layer; forward 1, backward 2
    pairs = (LAYERS - 1) * sum(n * (n + 1) // 2 for n in lengths) + sum(place + 1 for place in predictors)
    attention = 3 * 2 * 2 * HIDDEN * pairs
    # 6 screenshots of 4 x 6 patches in 2 layers of width 48, counted for every pair of patches
    vision_attention = 2 * 2 * 48 * 2 * 6 * 24**2
    total = 1e12 * sum(account[f"trainer/{part}_tflop"] for part in ("language", "vision", "lora", "head"))
    assert total - below_first - attention - vision_attention == pytest.approx(counted, rel=1e-3)


def test_an_account_begins_anew_when_it_is_taken(config: TrainerConfig) -> None:
    trainer, rng = Trainer(chz.replace(config, vision_cache_gib=0.1)), random.Random(0)
    datums = (make_datum(rng, [draw_screenshot(rng)]),)
    with trainer.account.busy():
        trainer.forward(wire.Forward(datums=datums, temperature=1.0, weights="base"))

    first, second = trainer.account.take(), trainer.account.take()

    check_names(first)
    assert first["trainer/tokens"] == datums[0].model_input.length
    assert (first["trainer/trained_tokens"], first["trainer/lora_tflop"]) == (0.0, 0.0)  # no gradient, no adapter
    assert 0.0 < first["trainer/matmul_frac"] < 1.0
    assert first["trainer/rss_gib"] <= first["trainer/peak_rss_gib"]
    assert (second["trainer/tokens"], second["trainer/busy_s"], second["trainer/encoded_images"]) == (0.0, 0.0, 0.0)


def test_the_peak_is_no_less_than_what_a_small_product_reaches() -> None:
    assert measure_matmul_peak(torch.device("cpu"), torch.float32) > 1e8
