"""The trainer against Transformers' stock forward pass, itself in other batches, and itself after a restart."""

import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import chz
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen2VLImageProcessor, Qwen3VLForConditionalGeneration

from cua_rl.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.errors import ConfigError, TrainingError
from cua_rl.metrics import check_names
from cua_rl.training import wire
from cua_rl.training.model import PolicyModel
from cua_rl.training.trainer import Trainer
from cua_rl.types import Datum, EncodedTextChunk, ModelInput
from tests.real.training.tiny_qwen3_vl import IMAGE_PAD, PREPROCESSOR, TINY_ROUNDINGS, draw_screenshot, make_datum
from tests.rounding import KeepFloat64, assert_as_exact_as, assert_equal_but_for_rounding

LOSS = LossConfig(name="importance_sampling")
STEP = wire.OptimStep(optim=OptimConfig(learning_rate=1e-2))


@pytest.fixture
def datums() -> list[Datum]:
    """Different lengths, sizes and numbers of images; one screenshot in two sequences; one sequence without images."""
    rng = random.Random(0)
    small = [draw_screenshot(rng) for _ in range(2)]
    wide = draw_screenshot(rng, width=160, height=64)
    return [
        make_datum(rng, [small[0], wide]),
        make_datum(rng, [small[0]], text=9, sampled=7),
        make_datum(rng, []),
        make_datum(rng, [wide, small[1], small[0]], text=3, sampled=4),
    ]


def forward(trainer: Trainer, datums: Sequence[Datum], temperature: float = 1.0) -> list[Tensor]:
    request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="policy")
    return [torch.tensor(row) for row in trainer.forward(request).training_logprobs]


def train(trainer: Trainer, datums: Sequence[Datum], loss: LossConfig = LOSS) -> wire.ForwardBackwardOutput:
    return trainer.forward_backward(wire.ForwardBackward(datums=tuple(datums), loss=loss))


def gradients(trainer: Trainer) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainer.model.trainable_parameters]


def weights(trainer: Trainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.trainable_parameters]


def moved(trainer: Trainer, datums: Sequence[Datum]) -> Trainer:
    """The trainer after a step, so that the adapter does something."""
    train(trainer, datums)
    trainer.optim_step(STEP)
    return trainer


def stock_logprobs(model: torch.nn.Module, model_path: Path, datum: Datum, temperature: float = 1.0) -> Tensor:
    """Log-probabilities as a user of Transformers would compute them, 0.0 off-mask."""
    ids = torch.tensor([datum.model_input.token_ids(IMAGE_PAD)])
    images = [Image.open(io.BytesIO(chunk.data)).convert("RGB") for chunk in datum.model_input.images]
    inputs = {}
    if images:
        inputs = dict(Qwen2VLImageProcessor.from_pretrained(model_path)(images=images, return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == IMAGE_PAD).int()
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0] / temperature
    logprobs = logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1).to(logprobs), logprobs]) * torch.tensor(datum.loss_mask)


def load_stock(model_path: Path, dtype: torch.dtype = torch.float32) -> Qwen3VLForConditionalGeneration:
    return Qwen3VLForConditionalGeneration.from_pretrained(model_path, dtype=dtype).eval()


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


@pytest.mark.parametrize("name", ["importance_sampling", "cross_entropy"])
def test_one_packed_batch_equals_one_sequence_at_a_time(config: TrainerConfig, datums: list[Datum], name: str) -> None:
    trainer = moved(Trainer(config), datums)
    loss = LossConfig(name=name)  # type: ignore[arg-type]

    together = train(trainer, datums, loss)
    packed = gradients(trainer)
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=0.0)))
    single = [train(trainer, [datum], loss) for datum in datums]

    totals = [output.metrics["loss/total"] * output.metrics["optim/trained_tokens"] for output in single]
    whole = together.metrics["loss/total"] * together.metrics["optim/trained_tokens"]
    assert_equal_but_for_rounding([whole], [sum(totals)], TINY_ROUNDINGS, magnitude=sum(map(abs, totals)))
    for one, other in zip(packed, gradients(trainer), strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)


def test_the_micro_batch_budget_changes_nothing_but_rounding(config: TrainerConfig, datums: list[Datum]) -> None:
    wide, narrow = Trainer(config), Trainer(chz.replace(config, micro_batch_tokens=30))

    outputs = [train(trainer, datums) for trainer in (wide, narrow)]

    assert [output.metrics["optim/num_micro_batches"] for output in outputs] == [1.0, 4.0]
    for one, other in zip(gradients(wide), gradients(narrow), strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)


def test_the_optimizer_sees_the_mean_gradient_per_trained_token(config: TrainerConfig, datums: list[Datum]) -> None:
    trainer = Trainer(config)
    train(trainer, datums[:2])
    train(trainer, datums[2:])
    norm = torch.cat([gradient.flatten() for gradient in gradients(trainer)]).double().norm()

    output = trainer.optim_step(STEP)

    # 2 images x 5 tokens, 1 x 7, text 5, 3 x 4
    assert output.num_trained_tokens == 34
    num_squares = sum(parameter.numel() for parameter in trainer.model.trainable_parameters)
    assert_equal_but_for_rounding([output.grad_norm], [norm.item() / 34], num_squares)
    assert output.policy_version == 1


def test_base_logprobs_ignore_the_adapter(config: TrainerConfig, datums: list[Datum]) -> None:
    trainer = Trainer(config)
    before = trainer.forward(wire.Forward(datums=tuple(datums), temperature=1.0, weights="policy"))
    moved(trainer, datums)

    base = trainer.forward(wire.Forward(datums=tuple(datums), temperature=1.0, weights="base"))
    after = trainer.forward(wire.Forward(datums=tuple(datums), temperature=1.0, weights="policy"))

    for one, other in zip(base.training_logprobs, before.training_logprobs, strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)
    assert after.training_logprobs[0] != pytest.approx(before.training_logprobs[0], abs=1e-3)


def test_the_reference_is_the_adapter_that_training_started_from(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    def ask(weights: Literal["policy", "reference", "base"]) -> tuple[tuple[float, ...], ...]:
        return trainer.forward(wire.Forward(datums=tuple(datums), temperature=1.0, weights=weights)).training_logprobs

    trainer = Trainer(config)
    assert ask("reference") == ask("base")  # nothing was loaded: it is the base model
    moved(trainer, datums)
    start = ask("policy")
    trainer.save_weights_for_sampler(tmp_path / "start")

    trainer.model.load_reference(tmp_path / "start")
    assert ask("policy") == start  # the trained weights are as they were
    moved(trainer, datums)
    weights = [parameter.detach().clone() for parameter in trainer.model.trainable_parameters]

    assert ask("reference") == start
    assert ask("reference")[0] != pytest.approx(ask("base")[0], abs=1e-3)
    assert ask("policy")[0] != pytest.approx(start[0], abs=1e-3)
    assert all(map(torch.equal, weights, trainer.model.trainable_parameters))


def test_wrong_positions_show_in_the_logprobs(
    config: TrainerConfig, datums: list[Datum], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(config)
    right = forward(trainer, datums)

    def one_axis(ids: Tensor, _types: Tensor, _grids: Tensor | None) -> Tensor:
        return torch.arange(ids.shape[1]).expand(3, 1, -1)

    monkeypatch.setattr(trainer.model, "rope_index", one_axis)
    wrong = forward(trainer, datums)

    assert (right[0] - wrong[0]).abs().mean() > 0.01
    assert right[2].equal(wrong[2])  # text alone has the same positions on all axes


def test_images_of_another_size_than_the_sampler_saw_are_refused(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    for file in config.model_path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = PREPROCESSOR | {"size": {"shortest_edge": 65536, "longest_edge": 1048576}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))

    with pytest.raises(TrainingError, match=r"to take 6 tokens.*preprocessor settings"):
        forward(Trainer(chz.replace(config, model_path=tmp_path)), datums)


def test_half_precision_stays_close_and_learns(config: TrainerConfig, datums: list[Datum]) -> None:
    exact, half = Trainer(config), Trainer(chz.replace(config, dtype="bfloat16"))
    loss = LossConfig(name="cross_entropy")

    for one, other in zip(forward(exact, datums), forward(half, datums), strict=True):
        assert (one - other).abs().mean() < 0.05
    losses = []
    for _ in range(3):
        losses.append(train(half, datums, loss).metrics["loss/total"])
        half.optim_step(STEP)

    assert losses[2] < losses[1] < losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in half.model.trainable_parameters)


def test_the_same_screenshot_is_encoded_once(config: TrainerConfig, datums: list[Datum]) -> None:
    output = train(Trainer(config), datums)

    assert sum(len(datum.model_input.images) for datum in datums) == 6
    assert output.metrics["optim/encoded_images"] == 3.0
    check_names(output.metrics)


def test_gradient_checkpointing_changes_no_gradient(config: TrainerConfig, datums: list[Datum]) -> None:
    plain, saving = Trainer(config), Trainer(chz.replace(config, gradient_checkpointing=True))

    for trainer in (plain, saving):
        train(trainer, datums)

    for one, other in zip(gradients(plain), gradients(saving), strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)


@pytest.mark.parametrize("full", [False, True])
def test_continuing_from_a_checkpoint_equals_never_stopping(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path, full: bool
) -> None:
    config = chz.replace(config, lora=None) if full else config
    trainer = moved(Trainer(config), datums)
    trainer.save_state(tmp_path / "state")
    outputs = [(train(trainer, datums).training_logprobs, trainer.optim_step(STEP)) for _ in range(2)]

    resumed = Trainer(config)
    resumed.load_state(tmp_path / "state", with_optimizer=True)
    again = [(train(resumed, datums).training_logprobs, resumed.optim_step(STEP)) for _ in range(2)]

    assert again == outputs
    assert resumed.policy_version == 3
    assert all(one.equal(other) for one, other in zip(weights(trainer), weights(resumed), strict=True))


def test_weights_without_the_optimizer_start_a_new_run(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    trainer = moved(Trainer(config), datums)
    trainer.save_state(tmp_path / "state")

    fresh = Trainer(config)
    fresh.load_state(tmp_path / "state", with_optimizer=False)

    assert fresh.policy_version == 0
    assert all(one.equal(other) for one, other in zip(weights(trainer), weights(fresh), strict=True))


@pytest.mark.parametrize("name", ["trainer_state.pt", "adapter_model.safetensors", "checkpoint.json"])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path, name: str
) -> None:
    trainer = moved(Trainer(config), datums)
    trainer.save_state(tmp_path / "state")
    before = weights(moved(trainer, datums))
    data = bytearray((tmp_path / "state" / name).read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / "state" / name).write_bytes(bytes(data))

    with pytest.raises(TrainingError, match="damaged"):
        trainer.load_state(tmp_path / "state", with_optimizer=True)

    assert all(one.equal(other) for one, other in zip(before, weights(trainer), strict=True))


def test_a_missing_checkpoint_and_one_of_another_rank_are_refused(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    trainer = moved(Trainer(config), datums)
    trainer.save_state(tmp_path / "state")
    other = Trainer(chz.replace(config, lora=chz.replace(config.lora, rank=2)))

    with pytest.raises(TrainingError, match="found none"):
        trainer.load_state(tmp_path / "elsewhere", with_optimizer=True)
    with pytest.raises(TrainingError, match="another rank"):
        other.load_state(tmp_path / "state", with_optimizer=True)


def test_saving_again_replaces_the_folder_and_leaves_nothing_beside_it(config: TrainerConfig, tmp_path: Path) -> None:
    trainer = Trainer(config)

    trainer.save_weights_for_sampler(tmp_path / "policy")
    trainer.save_weights_for_sampler(tmp_path / "policy")

    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_the_adapter_covers_the_language_model_and_has_the_servers_names(config: TrainerConfig, tmp_path: Path) -> None:
    Trainer(config).save_weights_for_sampler(tmp_path / "adapter")

    names = set(load_file(tmp_path / "adapter" / "adapter_model.safetensors"))

    prefix = "base_model.model.model.language_model.layers"
    modules = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    assert names == {f"{prefix}.{n}.{m}.lora_{ab}.weight" for n in range(3) for m in modules for ab in "AB"}


def test_full_training_reaches_the_vision_tower_and_exports_a_model_folder(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    trainer = Trainer(chz.replace(config, lora=None))
    loss = LossConfig(name="cross_entropy")
    first = train(trainer, datums, loss).metrics["loss/cross_entropy"]
    grads = {name: p.grad for name, p in trainer.model.base.named_parameters()}
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=1e-3)))
    trainer.save_weights_for_sampler(tmp_path / "model")

    assert {n for n, g in grads.items() if g is None or not g.abs().sum() > 0} == set()
    assert train(trainer, datums, loss).metrics["loss/cross_entropy"] < first
    reloaded = Trainer(chz.replace(config, lora=None, model_path=tmp_path / "model"))
    for one, other in zip(forward(trainer, datums), forward(reloaded, datums), strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)


def test_a_loss_that_is_not_finite_leaves_weights_and_gradients_clean(
    config: TrainerConfig, datums: list[Datum]
) -> None:
    trainer = moved(Trainer(config), datums)
    before = weights(trainer)
    improbable = tuple(-1e4 if trained else 0.0 for trained in datums[1].loss_mask)

    with pytest.raises(TrainingError, match=f"finite loss.*{datums[1].rollout_id}"):
        train(trainer, [datums[0], replace(datums[1], sampling_logprobs=improbable)])
    with pytest.raises(TrainingError, match="no gradient"):
        trainer.optim_step(STEP)

    assert all(one.equal(other) for one, other in zip(before, weights(trainer), strict=True))


def test_a_gradient_that_is_not_finite_takes_no_step(config: TrainerConfig, datums: list[Datum]) -> None:
    trainer = Trainer(config)
    before = weights(trainer)
    train(trainer, datums)
    gradient = trainer.model.trainable_parameters[-1].grad
    assert gradient is not None
    gradient[0, 0] = float("nan")

    with pytest.raises(TrainingError, match="finite gradient norm"):
        trainer.optim_step(STEP)

    assert trainer.policy_version == 0
    assert all(one.equal(other) for one, other in zip(before, weights(trainer), strict=True))


def test_datums_the_model_cannot_read_are_refused(config: TrainerConfig, datums: list[Datum]) -> None:
    trainer = Trainer(config)
    text = datums[2]
    foreign = ModelInput(chunks=(EncodedTextChunk(tokens=(5000,) * text.model_input.length),))

    with pytest.raises(TrainingError, match=r"below 320.*got 5000"):
        forward(trainer, [replace(text, model_input=foreign)])
    with pytest.raises(TrainingError, match="at least one trained token"):
        forward(trainer, [replace(text, loss_mask=(False,) * len(text.loss_mask))])


def test_a_folder_without_a_model_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        PolicyModel(TrainerConfig(model_path=tmp_path))
