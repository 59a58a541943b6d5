"""The account's FLOPs against PyTorch's own count of the operations that ran."""

import random

import chz
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cua_rl.config import LoraConfig, LossConfig, TrainerConfig
from cua_rl.families import LoraModule
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


# 6 screenshots of 24 patches, 36 tokens; a patch's product is 1536 x 48, a block's 48 x (144, 48, 96) and 96 x 48, a
# merger's 192 x 192 and 192 x 64. Below the first adapter, nothing needs a gradient to its input: fc1 of three mergers
# with their updates; the patches' product, and queries, keys and values of the first block. addmm_, which PyTorch does
# not count, adds updates (outputs of 192, 64; 144, 48, 96, 48) and their gradients (inputs of 192; 48, 48, 96).
ADAPTED = (
    ("merger", 36 * 3 * (192 * 192 + RANK * 192 + RANK * (192 + 64 + 192)), 1),
    ("vision", 144 * (1536 * 48 + 48 * 144 + RANK * 48 + RANK * (2 * 336 + 2 * 240 - 48)), 3),
)


@pytest.mark.parametrize(("module", "not_counted", "attention_passes"), ADAPTED)
def test_frozen_weights_under_an_adapter_on_vision_have_one_backward_product_and_those_below_it_none(
    config: TrainerConfig, module: LoraModule, not_counted: int, attention_passes: int
) -> None:
    lora, rng = LoraConfig(rank=RANK, alpha=8, modules=(module,)), random.Random(0)
    trainer = Trainer(chz.replace(config, lora=lora))
    datums = tuple(make_datum(rng, [draw_screenshot(rng) for _ in range(2)]) for _ in range(3))

    found = counted_flops(trainer, wire.ForwardBackward(datums=datums, loss=LossConfig()))
    account = trainer.account.take()

    counted = sum(found.get(name, 0) for name in LINEAR)
    predictors = [place for d in datums for place, is_trained in enumerate(d.loss_mask[1:]) if is_trained]
    pairs = (LAYERS - 1) * sum(d.model_input.length * (d.model_input.length + 1) // 2 for d in datums)
    attention = 3 * 2 * 2 * HIDDEN * (pairs + sum(place + 1 for place in predictors))
    vision_attention = attention_passes * 2 * 2 * 48 * 2 * 6 * 24**2
    total = 1e12 * sum(account[f"trainer/{part}_tflop"] for part in ("language", "vision", "lora", "head"))
    assert total - 2 * not_counted - attention - vision_attention == pytest.approx(counted, rel=1e-3)
    # three products of both matrices: of a merger for 36 tokens, of a block for 144 patches
    sides = {"merger": 36 * 3 * (192 + 192 + 192 + 64), "vision": 144 * 2 * (336 + 240)}[module]
    assert account["trainer/lora_tflop"] == pytest.approx(3 * 2 * RANK * sides / 1e12)


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
