"""Programs of others, in environments of their own, train for a step: `make test-harnesses` makes those."""

import re
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessAgent, HarnessCommand
from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from cua_rl.task_loader import load_tasks
from cua_rl.types.rollout import Turn
from tests.real.agents.conftest import GROUP_SIZE, PARITY_LIMIT, Engine, Trained
from tests.real.harnesses.harbor_registry import EXAMPLE, PYTHON, TASKS, open_registry, reward_of

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

MAX_MODEL_LEN = 16_384  # system prompts of others are long


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[VllmServer]:
    """With the tiny model, told that it reads prompts of this length."""
    model = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(TINY_QWEN3_VL, model)
    config_path = model / "config.json"
    told = re.sub(r'("max_position_embeddings": )\d+', rf"\g<1>{MAX_MODEL_LEN}", config_path.read_text())
    config_path.write_text(told)
    config = ServerConfig(
        model_path=model, max_lora_rank=16, max_model_len=MAX_MODEL_LEN, max_num_seqs=8, kv_cache_gib=0.5
    )
    async with VllmServer(config, tmp_path_factory.mktemp("logs") / "vllm.log") as server:
        yield server


def assert_trained(trained: Trained, num_groups: int) -> list[Turn]:
    """One step on exactly what was sampled; returns its turns."""
    rollouts = [member for group in trained.groups for member in group.rollouts]
    turns = [turn for one in rollouts for turn in one.turns]
    assert len(rollouts) == num_groups * GROUP_SIZE
    assert all(one.reward is not None for one in rollouts), [(one.stop_reason, one.error) for one in rollouts]
    assert all(turn.model.prompt_matches_renderer for turn in turns)
    assert {turn.model.policy_version for turn in turns} == {trained.policy_version}
    num_trained = sum(datum.num_trained_tokens for datum in trained.batch.datums)
    assert num_trained == sum(len(turn.model.sampled_tokens) for turn in turns)
    assert trained.result.metrics["policy/parity_mean_abs"] <= PARITY_LIMIT
    assert trained.result.metrics["optim/grad_norm"] > 0
    return turns


@pytest.mark.skipif(not PYTHON.exists(), reason="no environment of the example harbor; make test-harnesses makes it")
async def test_three_tasks_of_a_registry_of_harbor_train_a_step_and_their_verifiers_pay_exactly(
    engine: Engine, tmp_path: Path
) -> None:
    command = AgentCommand(argv=(str(PYTHON), str(EXAMPLE / "wrapper.py")), log_folder=tmp_path)
    with open_registry() as listing:
        source = {"source_type": "harness", "list_command": listing}
        tasks = load_tasks(source, seed=0, split="train", device=HarnessWorlds.abilities).batch(0, 3)
        trained = await engine.train(HarnessAgent(program=HarnessCommand(command)), HarnessWorlds(), tasks)

    assert_trained(trained, num_groups=3)
    assert {group.task_id for group in trained.groups} == set(TASKS)
    for one in (member for group in trained.groups for member in group.rollouts):
        assert one.validation is not None
        assert one.validation.score == reward_of(one.task_id, one.turns[0].model.text)
