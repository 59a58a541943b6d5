"""A runner of harness rollouts over a fake model server, and what scripted programs begin with."""

import json
import os
import shutil
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessAgent, HarnessCommand, HarnessProgram
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource
from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import score_reward
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.task_loader import load_tasks
from cua_rl.types.rollout import Rollout, SamplingParams
from tests.fakes import FakeRecorder
from tests.sampling.fake_vllm import FakeVllm

PARAMS = SamplingParams(max_tokens=64, temperature=1.0)
PYTHON = shutil.which("python3", path=os.defpath) or sys.executable
"""For programs: those that root starts reach no interpreter below /root."""

PROGRAM = """
import json, os, signal, subprocess, sys, time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

def ask(text="go", **more):
    body = {"model": os.environ["CUA_MODEL"], "messages": [{"role": "user", "content": text}]}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]} | more
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    try:
        return json.load(urlopen(Request(url, json.dumps(body).encode(), headers)))["choices"][0]["message"]["content"]
    except HTTPError as error:
        return error.code

def task():
    return json.load(sys.stdin)

def send(text):
    os.write(int(os.environ["CUA_RESULT_FD"]), text.encode())

def report(**result):
    path = os.environ["CUA_RESULT_PATH"]
    with open(path + ".new", "w") as file:
        json.dump(result, file)
    os.replace(path + ".new", path)

def hang():
    print("hangs", flush=True)
    time.sleep(600)

"""
"""What every scripted program of these tests begins with."""


class Bench:
    """A runner of harness rollouts over a fake model server."""

    def __init__(self, gateway: Gateway, fake: FakeVllm, folder: Path, params: SamplingParams) -> None:
        self.gateway, self.fake, self.folder, self.params = gateway, fake, folder, params
        self.recorder = FakeRecorder()
        self.pool = DevicePool(HarnessWorlds().make, max_devices=8)

    async def run(self, script: str, **options: Any) -> Rollout:
        command = AgentCommand(argv=(PYTHON, "-c", PROGRAM + script), log_folder=self.folder)
        return await self.run_program(HarnessCommand(command), **options)

    async def run_program(
        self,
        program: HarnessProgram,
        *,
        row: Mapping[str, object] | None = None,
        time_limits: DeviceConfig | None = None,
        rollout_id: str = "r1",
        **agent: Any,
    ) -> Rollout:
        path = self.folder / f"{rollout_id}.jsonl"
        path.write_text(json.dumps(row or {"task_id": "game", "seed": 5, "max_turns": 2}))
        source = {"source_type": "harness", "file_path": str(path)}
        runner = RolloutRunner(
            devices=self.pool,
            gateway=self.gateway,
            agent=HarnessAgent(program=program, **agent),
            reward=score_reward,
            recorder=self.recorder,
            max_turns=20,
            time_limits=time_limits or DeviceConfig(),
        )
        plan = RolloutJob(
            source=RolloutSource(phase="step", step=1),
            group_id="g",
            group_index=0,
            member_index=0,
            task=load_tasks(source, seed=0, split="train", device=HarnessWorlds.abilities).batch(0, 1)[0],
            params=self.params,
            rollout_id=rollout_id,
        )
        return await runner.run(plan)

    def log(self, rollout_id: str = "r1") -> str:
        path = self.folder / f"{rollout_id}.log"
        return path.read_text() if path.exists() else ""


async def run_out_of_time(
    bench: Bench, run: Callable[[DeviceConfig], Awaitable[Rollout]], name: str = "r1", first_s: float = 1.0
) -> Rollout:
    """The rollout with the shortest limit in which its program comes to `hang()`, however busy the machine."""
    for agent_s in (first_s, 4 * first_s, 16 * first_s):
        rollout = await run(DeviceConfig(task_timeout_s=agent_s))
        if "hangs" in bench.log(name):
            return rollout
    return await run(DeviceConfig(task_timeout_s=64 * first_s))


@asynccontextmanager
async def open_bench(
    renderer: Qwen3VLRenderer, folder: Path, *, params: SamplingParams = PARAMS, max_model_len: int = 2000
) -> AsyncGenerator[Bench]:
    fake = FakeVllm(renderer, max_model_len=max_model_len)
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(url) as server, SamplingClient(server, namespace="run", max_attempts=1) as sampling:
            gateway = Gateway(sampling, renderer, params)
            async with gateway.serve():
                yield Bench(gateway, fake, folder, params)
