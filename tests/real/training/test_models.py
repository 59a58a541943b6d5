"""Several models in one trainer: each is as if it were alone."""

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import chz
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cua_rl.training import wire
from cua_rl.training.client import ModelClient, TrainingClient
from cua_rl.training.config import LoraSpec, LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import ConfigError, TrainingError
from cua_rl.types.rollout import Datum
from tests.real.training.test_client import worker_pids
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum
from tests.real.training.trainer_calls import STEP, forward, gradients, train, weights

SMALL = LoraSpec(rank=2, alpha=3, seed=5)
SEEING = LoraSpec(rank=4, alpha=16, modules=("language", "merger", "vision"), seed=6)
OPTIM = OptimConfig(learning_rate=1e-2)


def alone(config: TrainerConfig, spec: LoraSpec) -> Trainer:
    """A trainer whose only model has this adapter."""
    return Trainer(
        chz.replace(config, lora_rank=spec.rank, lora_alpha=spec.alpha, lora_modules=spec.modules, seed=spec.seed)
    )


def draw_batches(seed: int, num: int = 3) -> list[list[Datum]]:
    """One after the other, of two datums each: with two screenshots, and with none."""
    rng = random.Random(seed)
    return [
        [make_datum(rng, [draw_screenshot(rng) for _ in range(2)], text=seed), make_datum(rng, [])] for _ in range(num)
    ]


def assert_same(one: Sequence[Tensor], other: Sequence[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


def test_interleaved_training_of_two_models_equals_each_alone_bit_for_bit(config: TrainerConfig) -> None:
    small, seeing = draw_batches(3), draw_batches(4)
    both = Trainer(config)
    both.models.create("small", SMALL)
    both.models.create("seeing", SEEING)
    outputs: dict[str, list[wire.ForwardBackwardOutput]] = {"small": [], "seeing": []}

    def take(name: str, batch: Sequence[Datum]) -> None:
        both.models.use(name)
        outputs[name].append(train(both, batch))

    def step(name: str) -> wire.OptimStepOutput:
        both.models.use(name)
        return both.optim_step(STEP)

    # gradients of one wait while the other steps
    take("small", small[0])
    take("seeing", seeing[0])
    take("small", small[1])
    steps = [step("seeing"), step("small")]
    take("seeing", seeing[1])
    take("small", small[2])
    steps += [step("small"), step("seeing")]
    for name, spec, batches in (("small", SMALL, small[:3]), ("seeing", SEEING, seeing[:2])):
        expected = alone(config, spec)
        whole = [batches[:2], batches[2:]] if name == "small" else [batches[:1], batches[1:]]
        results, norms = list[wire.ForwardBackwardOutput](), list[float]()
        for part in whole:
            results += [train(expected, batch) for batch in part]
            norms.append(expected.optim_step(STEP).grad_norm)
        both.models.use(name)
        assert results == outputs[name]
        assert norms == [steps[index].grad_norm for index in ((1, 2) if name == "small" else (0, 3))]
        assert_same(weights(both), weights(expected))
        assert both.policy_version == expected.policy_version == 2
        assert_same(forward(both, batches[0]), forward(expected, batches[0]))
        of_both = both.account.take()
        for shape in ("trainer/lora_tflop", "trainer/vision_tflop"):
            assert of_both[shape] > 0
        assert both.account.shape == expected.account.shape
    both.models.use("")
    assert both.policy_version == 0


def test_the_model_that_the_trainer_begins_with_does_not_notice_others(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    plain, several = Trainer(config), Trainer(config)
    train(several, datums)
    several.models.create("other", SEEING)
    train(several, datums[:1])
    several.optim_step(STEP)
    several.models.use("")
    several.optim_step(STEP)
    train(plain, datums)
    plain.optim_step(STEP)
    base = wire.Forward(datums=tuple(datums), temperature=1.0, weights="base")

    for trainer, name in ((plain, "plain"), (several, "several")):
        trainer.save_weights_for_sampler(tmp_path / name)
    assert_same(weights(several), weights(plain))
    assert several.forward(base) == plain.forward(base)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("plain", "several")]
    assert files[0].keys() == files[1].keys()
    assert all(files[0][name].equal(files[1][name]) for name in files[0])
    several.models.use("other")
    several.models.drop("other")
    assert_same(weights(several), weights(plain))
    assert several.account.held_bytes == plain.account.held_bytes
    assert_same(forward(several, datums), forward(plain, datums))
    with pytest.raises(TrainingError, match=r"expected a model among .* got 'other'"):
        several.models.use("other")


def test_a_failed_forward_backward_drops_the_gradients_of_its_model_only(
    config: TrainerConfig, datums: list[Datum]
) -> None:
    trainer = Trainer(config)
    for name in ("one", "two"):
        trainer.models.create(name, SMALL)
        train(trainer, datums[:1])
    kept = gradients(trainer)
    trainer.models.use("one")
    improbable = tuple(-1e4 if trained else 0.0 for trained in datums[1].loss_mask)
    with pytest.raises(TrainingError, match="finite loss"):
        train(trainer, [replace(datums[1], sampling_logprobs=improbable)])
    with pytest.raises(TrainingError, match="no gradient to step along"):
        trainer.optim_step(STEP)
    trainer.models.use("two")
    assert_same(gradients(trainer), kept)
    assert trainer.optim_step(STEP).policy_version == 1


def test_checkpoints_and_references_are_those_of_their_model(
    config: TrainerConfig, datums: list[Datum], tmp_path: Path
) -> None:
    trainer = Trainer(config)
    trainer.models.create("small", SMALL)
    train(trainer, datums)
    trainer.optim_step(STEP)
    trainer.save_state(tmp_path / "small")
    trainer.save_weights_for_sampler(tmp_path / "adapter")
    trainer.model.adapters.load_reference(tmp_path / "adapter")
    reference = wire.Forward(datums=tuple(datums), temperature=1.0, weights="reference")
    of_small = trainer.forward(reference)
    trainer.models.use("")
    assert trainer.forward(reference) == trainer.forward(
        wire.Forward(datums=tuple(datums), temperature=1.0, weights="base")
    )
    with pytest.raises(TrainingError, match="another rank"):
        trainer.load_state(tmp_path / "small", with_optimizer=True)
    trainer.models.use("small")
    train(trainer, datums)
    trainer.optim_step(STEP)
    assert trainer.forward(reference) == of_small

    resumed = alone(config, SMALL)
    resumed.load_state(tmp_path / "small", with_optimizer=True)
    train(resumed, datums)
    resumed.optim_step(STEP)
    assert_same(weights(resumed), weights(trainer))
    assert trainer.policy_version == resumed.policy_version == 2


def test_a_model_that_memory_or_settings_do_not_allow_is_refused_and_changes_nothing(
    config: TrainerConfig, datums: list[Datum]
) -> None:
    trainer = Trainer(config)
    before = forward(trainer, datums)
    with pytest.raises(
        ConfigError, match=r"expected .* GiB of memory for weights, gradient and moments of model 'big'"
    ):
        trainer.models.create("big", LoraSpec(rank=10**8))
    with pytest.raises(TrainingError, match="'big'"):
        trainer.models.use("big")
    trainer.models.create("small", SMALL)
    with pytest.raises(ConfigError, match="new name for a model, got 'small' again"):
        trainer.models.create("small", SMALL)
    trainer.models.use("")
    assert_same(forward(trainer, datums), before)
    with pytest.raises(ConfigError, match="to train several models"):
        Trainer(chz.replace(config, lora_rank=0)).models.create("small", SMALL)
    with pytest.raises(ConfigError, match="to train several models"):
        Trainer(chz.replace(config, sharding="offload")).models.create("small", SMALL)
    for spec in (LoraSpec(rank=0), LoraSpec(rank=1, alpha=0), LoraSpec(rank=1, modules=())):
        with pytest.raises(ConfigError, match="at least 1"):
            trainer.models.create("none", spec)


def test_an_adapter_has_as_many_weights_as_were_counted_for_its_memory(config: TrainerConfig) -> None:
    trainer = Trainer(config)
    for name, spec in (("small", SMALL), ("seeing", SEEING)):
        counted = trainer.model.adapters.count_parameters(spec)
        trainer.models.create(name, spec)
        assert counted == sum(parameter.numel() for parameter in trainer.model.trainable_parameters)


async def train_interleaved(client: TrainingClient, folder: Path, *, kill_at: int | None = None) -> None:
    """Three steps of each of two models, and their weights in `folder`; the worker dies before a request."""
    models: dict[str, ModelClient] = {
        "small": await client.create_model("small", SMALL),
        "seeing": await client.create_model("seeing", SEEING),
    }
    batches = {"small": draw_batches(3), "seeing": draw_batches(4)}
    work = [
        (name, kind, index)
        for index in range(3)
        for kind in ("gradient", "step")
        for name in (("small", "seeing") if (index + (kind == "step")) % 2 else ("seeing", "small"))
    ]
    for place, (name, kind, index) in enumerate(work):
        if place == kill_at:
            (worker,) = worker_pids()
            os.kill(worker, signal.SIGKILL)
        if kind == "gradient":
            await models[name].forward_backward(batches[name][index], LossConfig())
        else:
            await models[name].optim_step(OPTIM)
    for name, model in models.items():
        await model.save_weights_for_sampler(folder / name)
        assert model.policy_version == 3


async def test_a_trainer_that_is_killed_while_it_trains_two_models_leaves_no_trace(
    config: TrainerConfig, tmp_path: Path
) -> None:
    config = chz.replace(config, max_restarts=2)
    for kill_at in (None, 6):
        async with TrainingClient(config, tmp_path / f"{kill_at}.log") as client:
            await train_interleaved(client, tmp_path / str(kill_at), kill_at=kill_at)
            assert client.num_restarts == (kill_at is not None)
    for name in ("small", "seeing"):
        whole, killed = (
            load_file(tmp_path / str(kill_at) / name / "adapter_model.safetensors") for kill_at in (None, 6)
        )
        assert whole.keys() == killed.keys()
        assert all(whole[weight].equal(killed[weight]) for weight in whole)


@pytest.mark.parametrize("sharding", ["replicated", "full"])
async def test_two_processes_train_two_models_as_they_train_each_alone(
    sharding: str, config: TrainerConfig, tmp_path: Path
) -> None:
    config = chz.replace(config, num_processes=2, sharding=sharding)
    other = LoraSpec(rank=3, seed=7)
    batches = {"small": draw_batches(3, 2), "other": draw_batches(4, 2)}
    async with TrainingClient(config, tmp_path / "both.log") as client:
        models = {
            "small": await client.create_model("small", SMALL),
            "other": await client.create_model("other", other),
        }
        for index in range(2):
            for name, model in models.items():
                await model.forward_backward(batches[name][index], LossConfig())
            for model in models.values():
                await model.optim_step(OPTIM)
        for name, model in models.items():
            await model.save_weights_for_sampler(tmp_path / "both" / name)
        with pytest.raises(ConfigError, match="GiB of memory"):
            await client.create_model("big", LoraSpec(rank=10**8))
        await client.drop_model("small")
        with pytest.raises(TrainingError, match="create it first"):
            client.model("small")
    async with TrainingClient(config, tmp_path / "alone.log") as client:
        for name, spec in (("small", SMALL), ("other", other)):
            model = await client.create_model(name, spec)
            for batch in batches[name]:
                await model.forward_backward(batch, LossConfig())
                await model.optim_step(OPTIM)
            await model.save_weights_for_sampler(tmp_path / "alone" / name)
            await client.drop_model(name)
    for name in models:
        one, two = (load_file(tmp_path / kind / name / "adapter_model.safetensors") for kind in ("both", "alone"))
        assert all(one[weight].equal(two[weight]) for weight in one)


async def test_a_model_whose_creator_gave_up_leaves_the_trainer_and_may_be_made_again(
    config: TrainerConfig, tmp_path: Path
) -> None:
    async with TrainingClient(config, tmp_path / "trainer.log") as client:
        creation = asyncio.create_task(client.create_model("small", SMALL))
        await asyncio.sleep(0)  # it has begun
        creation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creation
        await client.forward(draw_batches(3)[0])
        with pytest.raises(TrainingError, match="expected a model among"):
            client.model("small")
        assert (await client.create_model("small", SMALL)).policy_version == 0
