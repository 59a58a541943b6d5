"""What makes training cheap must not change it: each saving on and off gives the same loss and the same gradients."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import chz
import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from benchmarks.trainer_peaks import LiveBytes, extrapolate, measure
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.rl.datums import build_datums
from cua_rl.training import head, wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.layers import ATTENTION_KERNELS, StreamedLinear
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import Datum, EncodedTextChunk, ImageChunk, ModelInput, Rollout
from tests.builders import model_turn, rollout
from tests.real.training.tiny_qwen3_vl import (
    IMAGE_PAD,
    TINY_ROUNDINGS,
    VISION_END,
    VISION_START,
    draw_screenshot,
    image_chunk,
)
from tests.real.training.trainer_calls import run_out_of_memory
from tests.rounding import assert_equal_but_for_rounding

NUM_TURNS = 3


def make_rollout(rng: random.Random, name: str, first_screen: bytes) -> Rollout:
    """Every prompt extends the prompt and the answer before it by text and one more screenshot."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(16, 320) for _ in range(count))

    chunks: list[EncodedTextChunk | ImageChunk] = []
    turns = []
    for index in range(NUM_TURNS):
        screen = draw_screenshot(rng) if index else first_screen
        chunks.append(EncodedTextChunk(tokens=(*tokens(4), VISION_START)))
        chunks += [image_chunk(screen), EncodedTextChunk(tokens=(VISION_END,))]
        sampled = tokens(5)
        logprobs = [-4 - rng.random() for _ in sampled]
        turns.append(model_turn(ModelInput(chunks=tuple(chunks)), sampled, logprobs))
        chunks.append(EncodedTextChunk(tokens=sampled))
    return rollout(*turns, rollout_id=name)


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Two groups of two, whose members begin on the same screen."""
    rng = random.Random(0)
    screens = [draw_screenshot(rng) for _ in range(2)]
    return [make_rollout(rng, f"r{index}", screens[index // 2]) for index in range(4)]


def merged(rollouts: Sequence[Rollout]) -> list[Datum]:
    advantages = (1.0, -1.0, 0.5, -0.5)
    return [
        datum
        for played, advantage in zip(rollouts, advantages, strict=True)
        for datum in build_datums(played, advantage, IMAGE_PAD).datums
    ]


def split(rollouts: Sequence[Rollout]) -> list[Datum]:
    """One datum per turn, as if no prompt extended the one before."""
    advantages = (1.0, -1.0, 0.5, -0.5)
    return [
        datum
        for played, advantage in zip(rollouts, advantages, strict=True)
        for turn in played.turns
        for datum in build_datums(replace(played, turns=(turn,)), advantage, IMAGE_PAD).datums
    ]


@pytest.fixture(scope="module")
def moved_adapter(config: TrainerConfig, rollouts: list[Rollout]) -> Callable[..., Trainer]:
    """Makes trainers whose adapter has left its start, where half of the gradients are zero."""

    def make(**changes: object) -> Trainer:
        trainer = Trainer(chz.replace(config, **changes))
        request = wire.ForwardBackward(datums=tuple(merged(rollouts)), loss=LossConfig())
        trainer.forward_backward(request)
        trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=1e-2)))
        trainer.account.take()
        return trainer

    return make


def loss_and_gradients(trainer: Trainer, *batches: Sequence[Datum]) -> tuple[float, list[Tensor]]:
    """Summed loss and gradient of all `batches`, one request each."""
    total = 0.0
    for datums in batches:
        output = trainer.forward_backward(wire.ForwardBackward(datums=tuple(datums), loss=LossConfig()))
        total += output.metrics["loss/policy"] * output.metrics["optim/trained_tokens"]
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainer.model.trainable_parameters]
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=0.0)))
    return total, found


def assert_equal(one: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> None:
    # the loss is a sum of 60 tokens of about 1 each, advantages of both signs: they weigh more than what is left
    assert_equal_but_for_rounding([one[0]], [other[0]], TINY_ROUNDINGS, magnitude=60.0)
    assert max(gradient.abs().max() for gradient in one[1]) > 0.1  # there is something to compare
    for mine, theirs in zip(one[1], other[1], strict=True):
        assert_equal_but_for_rounding(mine, theirs, TINY_ROUNDINGS)


def test_packed_equals_unpacked(moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]) -> None:
    trainer, datums = moved_adapter(), merged(rollouts)

    assert_equal(loss_and_gradients(trainer, datums), loss_and_gradients(trainer, *[[datum] for datum in datums]))


def test_merged_equals_split_whose_turns_share_what_came_before_them(
    moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]
) -> None:
    trainer = moved_adapter()

    together = loss_and_gradients(trainer, merged(rollouts))
    of_merged = trainer.account.take()
    apart = loss_and_gradients(trainer, split(rollouts))
    of_split = trainer.account.take()
    trainer.model.shares_prefixes = False
    whole = loss_and_gradients(trainer, split(rollouts))
    of_whole = trainer.account.take()

    assert_equal(together, apart)
    assert_equal(together, whole)
    # a turn adds 4 + 1 + 6 + 1 + 5 = 17 tokens; 4 rollouts of 3 turns: 17 * 3 against 17 * (1 + 2 + 3)
    counts = [(one["trainer/tokens"], one["trainer/shared_tokens"]) for one in (of_merged, of_split, of_whole)]
    assert counts == [(4 * 51, 0), (4 * 51, 4 * 51), (4 * 102, 0)]


def test_held_features_equal_features_made_anew(moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]) -> None:
    holding, forgetting, datums = moved_adapter(), moved_adapter(vision_cache_gib=0.0), merged(rollouts)

    assert_equal(loss_and_gradients(holding, datums), loss_and_gradients(forgetting, datums))
    # 4 rollouts see 3 screens each, of which 2 are shared: 10 distinct ones
    assert holding.account.take()["trainer/encoded_images"] == 0.0
    assert forgetting.account.take()["trainer/encoded_images"] == 10.0


def test_a_screenshot_is_encoded_once_in_all_passes_of_a_step(config: TrainerConfig, rollouts: list[Rollout]) -> None:
    trainer, datums = Trainer(chz.replace(config, micro_batch_tokens=60)), tuple(merged(rollouts))

    trainer.forward(wire.Forward(datums=datums, temperature=1.0, weights="base"))
    loss_and_gradients(trainer, datums[:2])
    loss_and_gradients(trainer, datums[2:])
    trainer.forward(wire.Forward(datums=datums, temperature=1.0, weights="policy"))

    account = trainer.account.take()
    # 4 micro-batches (one rollout each) in three passes see 3 screens each, 36 in all, 10 of them for the first time
    assert (account["trainer/encoded_images"], account["trainer/reused_images"]) == (10.0, 26.0)
    assert account["trainer/tokens"] == 3 * 4 * 51


def test_checkpointed_equals_plain(moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]) -> None:
    datums = merged(rollouts)
    plain, recomputing = moved_adapter(), moved_adapter(gradient_checkpointing=True)

    assert_equal(loss_and_gradients(plain, datums), loss_and_gradients(recomputing, datums))


class CountedAttention(TorchDispatchMode):
    """How often attention is computed, forward; what was kept is not computed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_passes = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        self.num_passes += func in ATTENTION_KERNELS
        return func(*args, **(kwargs or {}))


def test_attention_whose_results_are_kept_runs_once_and_equals_that_which_runs_again(
    moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]
) -> None:
    datums = merged(rollouts)
    found: list[tuple[float, list[Tensor]]] = []
    counts: list[int] = []
    for changes in ({}, {"keeps_attention": True}):
        trainer = moved_adapter(gradient_checkpointing=True, **changes)
        with CountedAttention() as counted:
            found.append(loss_and_gradients(trainer, datums))
        counts.append(counted.num_passes)

    num_layers = trainer.model.base.config.text_config.num_hidden_layers
    assert counts == [2 * num_layers * len(datums), num_layers * len(datums)]
    assert found[0][0] == found[1][0]
    assert all(one.equal(other) for one, other in zip(found[0][1], found[1][1], strict=True))  # bit for bit


def test_attention_is_not_kept_any_more_when_memory_ran_out(
    moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]
) -> None:
    datums = merged(rollouts)
    trainer = moved_adapter(gradient_checkpointing=True, keeps_attention=True, micro_batch_tokens=102)
    run_out_of_memory(trainer, above=51)  # rows of two sequences do not fit, those of one do

    with CountedAttention() as counted:
        loss_and_gradients(trainer, datums)

    assert counted.num_passes == 2 * trainer.model.base.config.text_config.num_hidden_layers * len(datums)


def test_streamed_weights_equal_held_ones(moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]) -> None:
    datums = merged(rollouts)
    held, streamed = (
        moved_adapter(),
        moved_adapter(gradient_checkpointing=True, sharding="offload", keeps_attention=True),
    )

    assert any(isinstance(module, StreamedLinear) for module in streamed.model.base.modules())
    assert_equal(loss_and_gradients(held, datums), loss_and_gradients(streamed, datums))


def test_streamed_weights_stay_where_they_are_and_leave_nothing_behind() -> None:
    first, second = (StreamedLinear(torch.nn.Linear(64, 64, bias=False).requires_grad_(False)) for _ in range(2))
    model = torch.nn.Sequential(first, second).to("meta")  # stands for the device: shapes without data
    x = torch.empty(1, 64, device="meta", requires_grad=True)

    with LiveBytes((0,), 0) as live:
        output = checkpoint(model, x, use_reentrant=False)
        after_forward = live.now
        output.sum().backward()
        del output

    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    # two matrices of 64 x 64 float32 are 32 KiB; the forward pass leaves a row, the backward pass needs both
    assert after_forward < 2048
    assert 2 * 64 * 64 * 4 <= live.peak < 2 * 64 * 64 * 4 + 8192
    assert live.now < 2048


@pytest.mark.parametrize(("recomputes", "keeps_attention"), [(False, False), (True, False), (True, True)])
def test_peaks_for_the_memory_plan_are_measured_on_shapes_alone(recomputes: bool, keeps_attention: bool) -> None:
    found = measure(TINY_QWEN3_VL, 2200, recomputes=recomputes, keeps_attention=keeps_attention, rank=4)

    assert found["peak_gib"] > found["saved_gib"] > found["weights_gib"]


@pytest.mark.parametrize("sharding", ["full", "offload"])
def test_the_peaks_of_presets_are_those_of_the_sharded_layers(sharding: str) -> None:
    folder = Path(__file__).parents[2] / "machine"
    kept = [json.loads(line) for line in (folder / "preset_peaks.jsonl").read_text().splitlines()]
    (peak,) = [one for one in kept if one.get("sharding") == sharding]
    names = ("recomputes", "keeps_attention", "sharding", "num_processes")

    found = extrapolate(
        folder / "model_configs" / peak["model"],
        peak["num_tokens"],
        rank=peak["lora_rank"],
        **{name: peak[name] for name in names},
    )

    sizes = {name: size for name, size in peak.items() if name.endswith("_gib")}
    assert {name: found[name] for name in sizes} == pytest.approx(sizes, rel=0.02)


def test_a_chunked_head_equals_a_plain_one(
    moved_adapter: Callable[..., Trainer], rollouts: list[Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, datums = moved_adapter(), merged(rollouts)
    whole = loss_and_gradients(trainer, datums)
    monkeypatch.setattr(head, "_MAX_LOGITS", 7 * 320)  # 7 of 60 tokens at a time
    chunked = loss_and_gradients(trainer, datums)

    def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, _: object) -> head.TokenScores:
        logprobs = (hidden @ weight.T / temperature).log_softmax(1)
        entropies = -(logprobs.exp() * logprobs).sum(1).detach()
        return head.TokenScores(logprobs.gather(1, targets[:, None])[:, 0], entropies)

    monkeypatch.setattr("cua_rl.training.model.token_scores", plain)

    assert_equal(whole, chunked)
    assert_equal(chunked, loss_and_gradients(trainer, datums))


def test_no_tensor_of_a_packed_row_has_a_value_per_pair_of_its_tokens(
    moved_adapter: Callable[..., Trainer], rollouts: list[Rollout]
) -> None:
    trainer, datums = moved_adapter(), tuple(merged(rollouts)) * 12  # 48 sequences of 51 tokens in one row
    trainer.model.shares_prefixes = False
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        trainer.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))

    assert trainer.account.take()["trainer/tokens"] == 48 * 51
    # the widest is the MLP's [2448, 128]; a value per pair would be 2448 * 2448
    assert max(sizes) <= 2448 * 128
