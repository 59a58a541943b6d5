"""The example agents, unchanged, over several turns: what they send back makes each prompt extend the one before."""

import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cua_rl.agent.external import AgentCommand, ExternalAgent
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource
from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.actions import Click
from cua_rl.types.rollout import ModelTurn, Rollout, StopReason
from tests.agent.gym_bench import PARAMS, call, demo_tasks
from tests.fakes import FakeRecorder
from tests.sampling.fake_vllm import FakeVllm

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
ANSWERS = (call(action="click", coordinate=[500, 500]), call(action="fly"), call(action="answer", text="42"))


async def run_example(program: str, file: str, renderer: Qwen3VLRenderer, folder: Path) -> Rollout:
    fake = FakeVllm(renderer)
    fake.answers.extend(ANSWERS)
    task = replace(demo_tasks()[0], max_turns=5)
    source = RolloutSource(phase="step", step=1)
    async with (
        serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url,
        ExternalServer(url) as server,
        SamplingClient(server, namespace="run", max_attempts=1) as sampling,
    ):
        gateway = Gateway(sampling, renderer, PARAMS)
        async with gateway.serve():
            command = AgentCommand(argv=(program, str(EXAMPLES / file)), log_folder=folder)
            runner = RolloutRunner(
                devices=DevicePool(SimulatedPhones().make, max_devices=1),
                gateway=gateway,
                agent=ExternalAgent(command),
                reward=binary_reward,
                recorder=FakeRecorder(),
                max_turns=5,
            )
            return await runner.run(
                RolloutJob(source=source, group_id="g", group_index=0, member_index=0, task=task, params=PARAMS)
            )


def extends(before: ModelTurn, after: ModelTurn) -> bool:
    whole = [*before.prompt.token_ids(0), *before.sampled_tokens]
    return after.prompt.token_ids(0)[: len(whole)] == whole


@pytest.mark.parametrize(
    ("program", "file"),
    [(sys.executable, "plain_openai.py"), ("node", "agent.mjs"), (sys.executable, "openai_agents_sdk.py")],
)
async def test_an_example_agent_acts_and_sends_its_history_back_exactly(
    program: str, file: str, small_renderer: Qwen3VLRenderer, tmp_path: Path
) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed; scripts/install_system_packages.sh installs it")

    rollout = await run_example(program, file, small_renderer, tmp_path)

    assert rollout.error is None
    assert (rollout.stop_reason, rollout.answer) == (StopReason.FINISHED, "42")
    assert [turn.agent.action for turn in rollout.turns] == [Click(x=96, y=160), None, None]
    assert "fly" in (rollout.turns[1].agent.action_error or "")
    assert all(extends(before.model, after.model) for before, after in pairwise(rollout.turns))
    assert rollout.turns[0].agent.before.sha256 == rollout.turns[0].model.prompt.images[0].sha256
    assert all(turn.model.prompt_matches_renderer for turn in rollout.turns)
