"""Faults between sampler and trainer, injected into a run, stop it before anything is learned."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.environments.device import Device
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.pool import DevicePool, DeviceRequest
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.config import LoopConfig, SamplingSettings
from cua_rl.rl.served_policy import ServedPolicy, make_canary
from cua_rl.rl.stages import LoopParts, LoopSettings
from cua_rl.rl.sync_loop import train
from cua_rl.rollout.run import RolloutRunner
from cua_rl.sampling.canary import Canary, text_canary
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import VllmServer
from cua_rl.task_loader import load_tasks
from cua_rl.training.config import TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import AdapterError, CuaError, ParityError, TrainingError
from cua_rl.types.rollout import AdapterRef, SamplingParams
from tests.fakes import FakeRecorder
from tests.real.training.trainer_calls import LocalTrainer
from tests.rl.test_sync_loop import Log

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PARAMS = SamplingParams(max_tokens=48, temperature=1.0)
PARITY_LIMIT = 0.005


def make_trainer(model_path: Path = TINY_QWEN3_VL) -> Trainer:
    return Trainer(TrainerConfig(model_path=model_path, lora_rank=8, lora_alpha=8))


async def run_steps(
    trainer: Trainer,
    server: VllmServer,
    folder: Path,
    *,
    change_adapter: Callable[[AdapterRef], AdapterRef] = lambda adapter: adapter,
    has_canary: bool = True,
) -> Log:
    """Two steps of the loop as the recipe puts it together, with the trainer of this process."""
    renderer, local, log = make_renderer(TINY_QWEN3_VL), LocalTrainer(trainer), Log()
    async with SamplingClient(server, namespace=folder.name) as sampler:

        async def canary() -> Canary | None:
            return await make_canary(local, text_canary(renderer), 0.02) if has_canary else None

        async def serve(adapter: AdapterRef, canary: Canary | None) -> None:
            await sampler.publish(change_adapter(adapter), canary)

        policy = ServedPolicy(
            trainer=local,
            make_canary=canary,
            load_and_prove=serve,
            state_path=lambda step: folder / "weights" / f"{step:06d}",
            sampler_path=lambda step: folder / "sampler_weights" / f"{step:06d}",
            record_checkpoint=lambda step, state, sampler, is_interim: None,
        )
        parts = LoopParts(
            tasks=load_tasks({"source_type": "demo_training", "tags": ["demo", "open_app"]}, seed=0, split="train"),
            runner=make_runner(Gateway(sampler, renderer, PARAMS)),
            trainer=local,
            policy=policy,
            evaluator=None,
            recorder=FakeRecorder(),
            log=log,
        )
        await train(make_settings(renderer), parts)
    return log


def make_runner(gateway: Gateway) -> RolloutRunner:
    async def make_device(task: DeviceRequest) -> Device:
        return make_simulated_phone(task)

    return RolloutRunner(
        devices=DevicePool(make_device, max_devices=36),
        gateway=gateway,
        agent=GBoxAgent(),
        reward=binary_reward,
        recorder=FakeRecorder(),
        max_turns=2,
    )


def make_settings(renderer: Renderer) -> LoopSettings:
    return LoopSettings(
        config=LoopConfig(
            max_steps=2,
            groups_per_batch=6,
            group_size=6,
            learning_rate=1e-3,
            trainer=TrainerConfig(parity_limit=PARITY_LIMIT),
            sampling=SamplingSettings(min_group_size=1),
            eval_every=0,
            save_every=0,
            num_groups_to_log=0,
        ),
        params=PARAMS,
        image_token_id=renderer.image_token_id,
    )


async def test_without_a_fault_sampler_and_trainer_agree(server: VllmServer, tmp_path: Path) -> None:
    log = await run_steps(make_trainer(), server, tmp_path)

    assert [step for step, _ in log.steps] == [1, 2]
    assert all(metrics["policy/parity_mean_abs"] <= PARITY_LIMIT for _, metrics in log.steps)


async def test_positions_in_one_dimension_are_refused(
    server: VllmServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_tokens(input_ids: Tensor, token_types: Tensor, grids: Tensor | None) -> Tensor:
        return torch.arange(input_ids.shape[1]).expand(3, 1, -1)

    trainer = make_trainer()
    monkeypatch.setattr(trainer.model, "rope_index", count_tokens)

    await assert_refused(ParityError, "M-RoPE", trainer, server, tmp_path)


async def test_another_resize_of_the_screenshots_is_refused(server: VllmServer, tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_QWEN3_VL, tmp_path / "model")
    file = folder / "preprocessor_config.json"
    settings = json.loads(file.read_text())
    settings["size"]["longest_edge"] = 32_768  # pixels; half of what the screenshots have
    file.write_text(json.dumps(settings))

    await assert_refused(TrainingError, "preprocessor settings", make_trainer(folder), server, tmp_path)


async def test_another_adapter_than_the_trainers_fails_the_canary(server: VllmServer, tmp_path: Path) -> None:
    trainer = make_trainer()

    with pytest.raises(AdapterError, match="another adapter than the trainer's"):
        await run_steps(trainer, server, tmp_path, change_adapter=lambda adapter: disturb(adapter, tmp_path))

    assert trainer.policy_version == 0


async def test_another_adapter_that_no_canary_looked_at_is_refused_by_the_parity_gate(
    server: VllmServer, tmp_path: Path
) -> None:
    trainer = make_trainer()

    with pytest.raises(ParityError, match="another adapter"):
        await run_steps(
            trainer, server, tmp_path, change_adapter=lambda adapter: disturb(adapter, tmp_path), has_canary=False
        )

    assert trainer.policy_version == 0


async def assert_refused(
    error: type[CuaError], reason: str, trainer: Trainer, server: VllmServer, folder: Path
) -> None:
    with pytest.raises(error, match=reason):
        await run_steps(trainer, server, folder)

    assert trainer.policy_version == 0


def disturb(adapter: AdapterRef, folder: Path) -> AdapterRef:
    """The adapter with other numbers in it."""
    copy = shutil.copytree(adapter.path, folder / "disturbed", dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(copy / "adapter_model.safetensors")
    others = {
        name: tensor + torch.empty_like(tensor).normal_(0.0, 0.05, generator=generator)
        for name, tensor in weights.items()
    }
    save_file(others, copy / "adapter_model.safetensors")
    return AdapterRef(path=copy, policy_version=adapter.policy_version)
