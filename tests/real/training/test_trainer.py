"""The trainer: batches, optimizer steps, which weights answer, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import chz
import pytest
import torch
from torch import Tensor

from cua_rl.metrics import check_names
from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.model import PolicyModel
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import ConfigError, TrainingError
from cua_rl.types.rollout import Datum, EncodedTextChunk, ModelInput
from tests.real.training.tiny_qwen3_vl import PREPROCESSOR, TINY_ROUNDINGS
from tests.real.training.trainer_calls import STEP, forward, gradients, moved, run_out_of_memory, train, weights
from tests.rounding import assert_equal_but_for_rounding


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


def test_rows_of_text_alone_leave_adapters_of_the_vision_tower_as_they_are(
    config: TrainerConfig, datums: list[Datum]
) -> None:
    vision = chz.replace(config, lora_rank=4, lora_alpha=8, lora_modules=("vision",), micro_batch_tokens=30)
    (text,) = (datum for datum in datums if not datum.model_input.images)
    trainer, expected = Trainer(vision), Trainer(vision)

    train(trainer, datums)
    train(expected, [datum for datum in datums if datum is not text])

    for one, other in zip(gradients(trainer), gradients(expected), strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)
    assert any(gradient.any() for gradient in gradients(trainer))


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


PROBE = wire.Probe(strength=0.4)


def test_the_probe_changes_log_probabilities_by_far_more_than_rounding_and_the_policy_not_at_all(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    def ask(weights: Literal["policy", "base", "probe"]) -> list[float]:
        request = wire.Forward(datums=tuple(datums), temperature=1.0, weights=weights, probe=PROBE)
        output = trainer.forward(request)
        return [logprob for row in output.training_logprobs for logprob in row if logprob]

    trainer = Trainer(config)
    moved(trainer, datums)
    policy, base, probe = ask("policy"), ask("base"), ask("probe")
    trainer.save_weights_for_sampler(tmp_path / "probe", PROBE)
    trainer.save_weights_for_sampler(tmp_path / "policy")

    assert sum(abs(one - other) for one, other in zip(probe, base, strict=True)) / len(base) > 0.05
    assert ask("policy") == policy
    trainer.model.load_weights(tmp_path / "probe")
    assert ask("policy") == probe  # what the server loads is what was computed
    trainer.model.load_weights(tmp_path / "policy")
    assert ask("policy") == policy


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

    trainer.model.adapters.load_reference(tmp_path / "start")
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


def test_a_step_that_runs_out_of_memory_is_tried_again_with_half_the_row(
    config: TrainerConfig, datums: list[Datum], caplog: pytest.LogCaptureFixture
) -> None:
    longest = max(datum.model_input.length for datum in datums)
    config = chz.replace(config, micro_batch_tokens=2 * longest)
    roomy, short = Trainer(config), Trainer(config)
    for trainer in (roomy, short):
        train(trainer, datums[:1])  # gradients of an earlier request must survive
    run_out_of_memory(short, above=longest)

    expected, output = train(roomy, datums), train(short, datums)

    assert output.metrics["optim/num_micro_batches"] > expected.metrics["optim/num_micro_batches"]
    for one, other in zip(gradients(roomy), gradients(short), strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)
    assert short.account.take()["trainer/memory_retries"] == 1
    assert f"trying again with {longest}" in caplog.text
    # what did not fit will not fit the next time: nothing is tried in vain
    train(short, datums)
    forward(short, datums)
    assert short.account.take()["trainer/memory_retries"] == 0


def test_a_step_that_never_fits_fails_with_advice_and_drops_gradients(
    config: TrainerConfig, datums: list[Datum]
) -> None:
    trainer = Trainer(config)
    run_out_of_memory(trainer, above=0)

    with pytest.raises(TrainingError, match=r"expected a step that fits into memory, got CUDA out of memory.*lower"):
        train(trainer, datums)

    with pytest.raises(TrainingError, match="no gradient to step along"):
        trainer.optim_step(STEP)
