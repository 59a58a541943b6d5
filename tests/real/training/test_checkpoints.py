"""What the trainer writes: checkpoints that continue a run, adapters and models for the sampler."""

from pathlib import Path

import chz
import pytest
from safetensors.torch import load_file

from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import Datum
from tests.real.training.tiny_qwen3_vl import TINY_ROUNDINGS
from tests.real.training.trainer_calls import STEP, forward, moved, train, weights
from tests.rounding import assert_equal_but_for_rounding


@pytest.mark.parametrize("full", [False, True])
def test_continuing_from_a_checkpoint_equals_never_stopping(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path, full: bool
) -> None:
    config = chz.replace(config, lora_rank=0) if full else config
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
    other = Trainer(chz.replace(config, lora_rank=2))

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
    trainer = Trainer(chz.replace(config, lora_rank=0))
    loss = LossConfig(name="cross_entropy")
    first = train(trainer, datums, loss).metrics["loss/cross_entropy"]
    grads = {name: p.grad for name, p in trainer.model.base.named_parameters()}
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=1e-3)))
    trainer.save_weights_for_sampler(tmp_path / "model")

    assert {n for n, g in grads.items() if g is None or not g.abs().sum() > 0} == set()
    assert train(trainer, datums, loss).metrics["loss/cross_entropy"] < first
    reloaded = Trainer(chz.replace(config, lora_rank=0, model_path=tmp_path / "model"))
    for one, other in zip(forward(trainer, datums), forward(reloaded, datums), strict=True):
        assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)
