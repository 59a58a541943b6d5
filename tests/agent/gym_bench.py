"""A runner over doubles: gym server, gbox-mini-agent and model server, all on sockets."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from cua_rl.agent.mini_agent import MiniAgent
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.device import AttachDevice
from cua_rl.environments.gym.environment import GYM_ABILITIES, GymExecutions
from cua_rl.environments.pool import DevicePool, PoolLimits
from cua_rl.events import RolloutSource
from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import score_reward
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import Rollout, SamplingParams
from tests.doubles.gym_server import GymDouble
from tests.doubles.mini_agent_server import MiniAgentDouble
from tests.fakes import FakeRecorder
from tests.sampling.fake_vllm import FakeVllm

PARAMS = SamplingParams(max_tokens=64, temperature=1.0)
DEMO_IDS = ("train_01_open_settings", "train_04_open_chrome", "train_22_open_dialer")


def demo_tasks() -> list[Task]:
    """What the gym double serves."""
    found = load_tasks({"source_type": "ids", "task_ids": list(DEMO_IDS)}, seed=0, split="train").batch(0, 3)
    return sorted(found, key=lambda task: task.task_id)


def call(**arguments: Any) -> str:
    """An answer of the model that calls our tool."""
    body = json.dumps({"name": "mobile_use", "arguments": arguments})
    return f"<tool_call>\n{body}\n</tool_call>"


def quick_executions(
    create_timeout_s: float = 1.0,
    parallel_creates: int = 1,
    open_attach: Callable[[], AbstractAsyncContextManager[AttachDevice]] | None = None,
) -> GymExecutions:
    """Executions that are tried again after hundredths of a second."""
    settings = DeviceConfig(lease_timeout_s=create_timeout_s, gym_parallel_creates=parallel_creates)
    return GymExecutions(settings, open_attach=open_attach, sleep=lambda _: asyncio.sleep(0.01))


@dataclass
class GymBench:
    """The doubles, and a way to run rollouts over them."""

    gym: GymDouble
    gym_url: str
    mini: MiniAgentDouble
    fake: FakeVllm
    runner: RolloutRunner
    recorder: FakeRecorder
    tasks: list[Task] = field(default_factory=list)

    async def run(self, number: int = 0) -> Rollout:
        return await self.runner.run(
            RolloutJob(
                source=RolloutSource(phase="step", step=1),
                group_id="g",
                group_index=0,
                member_index=0,
                task=self.tasks[number],
                params=PARAMS,
            )
        )


@asynccontextmanager
async def open_gym(tasks: Sequence[Task] | None = None) -> AsyncGenerator[tuple[GymDouble, str]]:
    """A gym double on a socket."""
    gym = GymDouble(tasks or demo_tasks())
    async with serve_app(gym.app(), "127.0.0.1", 0, grace_s=0) as url:
        try:
            yield gym, url
        finally:
            gym.stop()


@asynccontextmanager
async def open_bench(
    renderer: Qwen3VLRenderer,
    *,
    time_limits: DeviceConfig | None = None,
    slack_s: float = 0.5,
) -> AsyncGenerator[GymBench]:
    """Everything on sockets, with gbox-mini-agent's double at work."""
    fake, mini = FakeVllm(renderer), MiniAgentDouble()
    async with open_gym() as (gym, gym_url), serve_app(mini.app(), "127.0.0.1", 0, grace_s=0) as mini_url:
        async with (
            serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as model_url,
            ExternalServer(model_url) as server,
            SamplingClient(server, namespace="run", max_attempts=1) as sampling,
        ):
            gateway = Gateway(sampling, renderer, PARAMS)
            agent = MiniAgent(
                base_url=mini_url, poll_s=0.05, retry_s=0.01, max_step_time_s=0.5, slack_s=slack_s, max_run_time_s=20
            )
            async with gateway.serve(), quick_executions() as executions:
                recorder = FakeRecorder()
                runner = RolloutRunner(
                    devices=DevicePool(executions.make, max_devices=4, limits=PoolLimits(max_make_attempts=1)),
                    gateway=gateway,
                    agent=agent,
                    reward=score_reward,
                    recorder=recorder,
                    max_turns=3,
                    time_limits=time_limits or DeviceConfig(),
                )
                source = {"source_type": "gym", "gym_base_url": gym_url, "gym_id": "phones"}
                loaded = await asyncio.to_thread(load_tasks, source, seed=0, split="train", device=GYM_ABILITIES)
                tasks = sorted((item.make_task(0) for item in loaded.templates), key=lambda task: task.task_id)
                try:
                    yield GymBench(gym, gym_url, mini, fake, runner, recorder, tasks)
                finally:
                    await mini.stop()
