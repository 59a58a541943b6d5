"""One vLLM, one trainer and one gateway on a socket, with the tiny model, for all agents of this folder."""

import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # test machines are shared

import asyncio

import pytest
import pytest_asyncio

from cua_rl.environments.pool import DeviceBackend, DevicePool
from cua_rl.events import RolloutSource
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.rewards.reward import binary_reward, sum_parts
from cua_rl.rl.advantages import score_group
from cua_rl.rl.config import LoopConfig
from cua_rl.rl.datums import Batch, build_batch
from cua_rl.rl.train_step import TrainStepResult, train_step
from cua_rl.rollout.group import GroupJob, collect_groups, run_group
from cua_rl.rollout.run import RolloutRunner
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer, VllmServer
from cua_rl.tasks.task import Task
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.types.rollout import AdapterRef, RolloutGroup, SamplingParams
from tests.fakes import FakeRecorder

PARITY_LIMIT = 0.005
GROUP_SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One training step: what was rolled out, and what the trainer said of it."""

    groups: list[RolloutGroup]
    batch: Batch
    result: TrainStepResult
    policy_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Everything that samples and trains."""

    gateway: Gateway
    trainer: TrainingClient
    sampler: SamplingClient
    renderer: Renderer
    folder: Path

    async def train(
        self, agent: object, devices: DeviceBackend, tasks: list[Task], *, max_turns: int = 3, max_tokens: int = 48
    ) -> Trained:
        """Publish the policy, let the agent work in groups, and train one step, as the loop does.

        Rewards go up with the place in the group, so that every group teaches something.
        """
        adapter = await self._publish()
        runner = RolloutRunner(
            devices=DevicePool(devices.make, max_devices=4),
            gateway=self.gateway,
            agent=agent,  # type: ignore[arg-type]
            reward=binary_reward,
            recorder=FakeRecorder(),
            max_turns=max_turns,
        )
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0)
        plan = GroupJob(source=RolloutSource(phase="step", step=1), group_size=GROUP_SIZE, params=params)
        groups = await collect_groups(tasks, partial(run_group, runner, job=plan), _with_spread)
        scored = [score_group(group, "mean") for group in groups]
        batch = await asyncio.to_thread(build_batch, scored, self.renderer.image_token_id)
        result = await train_step(
            self.trainer, batch, SETTINGS, step=1, max_steps=1, policy_version=adapter.policy_version
        )
        return Trained(groups=groups, batch=batch, result=result, policy_version=adapter.policy_version)

    async def _publish(self) -> AdapterRef:
        version = 0 if self.sampler.current is None else self.sampler.current.policy_version + 1
        adapter = await self.trainer.save_weights_for_sampler(self.folder / f"{version:06d}")
        await self.sampler.publish(adapter)
        return adapter


SETTINGS = LoopConfig(learning_rate=1e-4, trainer=TrainerConfig(parity_limit=PARITY_LIMIT))


async def _with_spread(group: RolloutGroup, _: Task | None) -> RolloutGroup:
    rewards = [sum_parts({"place": float(rollout.member_index)}) for rollout in group.rollouts]
    pairs = zip(group.rollouts, rewards, strict=True)
    return replace(group, rollouts=tuple(replace(rollout, reward=reward) for rollout, reward in pairs))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Engine]:
    folder = tmp_path_factory.mktemp("agents")
    renderer = make_renderer(TINY_QWEN3_VL)
    trainer = TrainingClient(TrainerConfig(model_path=TINY_QWEN3_VL, lora_rank=8, lora_alpha=8), folder / "trainer.log")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(trainer)
        shared = await stack.enter_async_context(ExternalServer(server.base_url))
        sampler = await stack.enter_async_context(SamplingClient(shared, namespace="agents"))
        gateway = Gateway(sampler, renderer, SamplingParams(max_tokens=48, temperature=1.0))
        await stack.enter_async_context(gateway.serve())
        yield Engine(gateway=gateway, trainer=trainer, sampler=sampler, renderer=renderer, folder=folder)
