"""The account's FLOPs against PyTorch's own count of the operations that ran."""

import random
from dataclasses import replace
from pathlib import Path

import chz
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cua_rl.metrics import check_names
from cua_rl.renderers.families import LoraModule
from cua_rl.training import wire
from cua_rl.training.config import LossConfig, TrainerConfig
from cua_rl.training.metrics import Account, ModelShape, measure_matmul_peak
from cua_rl.training.trainer import Trainer
from tests.real.training.tiny_families import BUILDERS, make_datums
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum

LINEAR = ("aten.mm", "aten.addmm", "aten.bmm")
LAYERS, HIDDEN, RANK = 3, 64, 4


def counted_flops(trainer: Trainer, request: wire.ForwardBackward) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        trainer.forward_backward(request)
    return {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("num_shared", [0, 13])
def test_flops_equal_what_pytorch_counts(config: TrainerConfig, num_shared: int) -> None:
    trainer, rng = Trainer(config), random.Random(0)
    datums = tuple(make_datum(rng, [draw_screenshot(rng) for _ in range(2)]) for _ in range(3))
    num_images = 6
    if num_shared:  # the first prompt, 6 + 1 + 6 + 1 tokens, without the one that predicts
        first = datums[0].model_input.chunks[:3]
        inputs = [replace(one.model_input, chunks=(*first, *one.model_input.chunks[3:])) for one in datums]
        datums = tuple(replace(one, model_input=changed) for one, changed in zip(datums, inputs, strict=True))
        num_images = 4
    request = wire.ForwardBackward(datums=datums, loss=LossConfig())

    found = counted_flops(trainer, request)
    account = trainer.account.take()

    lengths = [d.model_input.length for d in datums]
    tokens = sum(lengths) - 2 * num_shared
    assert (account["trainer/tokens"], account["trainer/shared_tokens"]) == (tokens, 2 * num_shared)
    predictors = [place for d in datums for place, is_trained in enumerate(d.loss_mask[1:]) if is_trained]
    counted = sum(found.get(name, 0) for name in LINEAR)
    # not counted by PyTorch: addmm_, which adds LoRA's update (out: 512 a layer), its gradient (in: 512, less q, k, v)
    counted += 2 * tokens * RANK * ((LAYERS - 1) * (512 + 512) - 3 * HIDDEN)
    # in the last layer, k and v (out: 64, in: 128) for all tokens, the others for those that predict
    counted += 2 * RANK * (tokens * (64 + 128) + len(predictors) * (448 + 384))
    # the first layer's q, k, v [64 -> 64, 32, 32] need no gradient to their input, which the account does not look at
    below_first = 2 * tokens * (HIDDEN * 128 + 3 * RANK * HIDDEN)
    # scores and values: 2 * heads * head_dim * 2 per pair and layer; forward 1, backward 2
    pairs = sum(n * (n + 1) // 2 for n in lengths) - 2 * num_shared * (num_shared + 1) // 2
    attention = 3 * 2 * 2 * HIDDEN * ((LAYERS - 1) * pairs + sum(place + 1 for place in predictors))
    # screenshots of 4 x 6 patches in 2 layers of width 48, counted for every pair of patches
    vision_attention = 2 * 2 * 48 * 2 * num_images * 24**2
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
    rng = random.Random(0)
    trainer = Trainer(chz.replace(config, lora_rank=RANK, lora_alpha=8, lora_modules=(module,)))
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


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_5", "qwen3_vl"])
def test_the_vision_tower_costs_what_pytorch_counts_with_its_attention(family: str, tmp_path: Path) -> None:
    trainer = Trainer(TrainerConfig(model_path=BUILDERS[family](tmp_path)))
    request = wire.Forward(datums=tuple(make_datums(family)), temperature=1.0, weights="base")

    # PyTorch counts attention where it consists of two products
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        trainer.forward(request)
    found = counter.get_flop_counts().items()
    (visual,) = (operations for module, operations in found if "Vision" in module and "." not in module)

    account = trainer.account.take()
    assert 1e12 * account["trainer/vision_tflop"] == pytest.approx(sum(visual.values()), rel=1e-3)


def test_utilisation_is_the_one_worked_by_hand() -> None:
    shape = ModelShape(
        language=100, language_last=50, language_attention=8, num_attentions=2, lora=10, lora_last=5, head=40,
        vision=20, vision_lora=0, vision_attention=2, window_attention=1, window_patches=3, merger=16, merger_lora=0,
        merge_area=4,
    )  # fmt: skip
    account = Account(
        shape=shape, device=torch.device("cpu"), dtype=torch.float32, trains_base=False, held_bytes=0, _busy_s=2.0
    )

    account.add_encoded_images([(1, 2, 4)], backward=False)
    account.add_sequences([4], [0], [torch.tensor([2, 3])], backward=True, adapter=True)
    metrics = account.take()
    account.add_sequences([2], [4], [torch.tensor([1])], backward=False, adapter=False)
    behind_four = account.take()

    # vision: 8 patches x 20 + 64 pairs x 2 + windows of 2 x 3 and 2 x 1 patches, 36 + 4 pairs, + 2 tokens x 16 = 360
    # multiply-adds, forward alone: 720
    # language: 4 tokens x 100 + 2 predictors x 50 = 500, forward and gradient of inputs: 2000; pairs 1 + 2 + 3 + 4 in
    # the first layer, 3 + 4 in the last: 17 x 8, forward and two gradients: 816
    # adapter: 4 x 10 + 2 x 5 = 50, three times: 300; head: 2 x 40, twice: 320
    parts = {part: 1e12 * metrics[f"trainer/{part}_tflop"] for part in ("vision", "language", "lora", "head")}
    assert parts == pytest.approx({"vision": 720, "language": 2816, "lora": 300, "head": 320})
    assert metrics["trainer/tflop_per_s"] == pytest.approx(4156 / 2e12)
    # 2 tokens x 100 + 1 predictor x 50; pairs 5 + 6 in the first layer, 6 in the last: 17 x 8; forward alone
    assert 1e12 * behind_four["trainer/language_tflop"] == pytest.approx(2 * (250 + 136))
    assert (behind_four["trainer/tokens"], behind_four["trainer/shared_tokens"]) == (2.0, 4.0)


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
