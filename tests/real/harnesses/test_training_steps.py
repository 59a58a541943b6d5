"""Programs of others train for a step, unmodified: vendors' computer-use loops, and Harbor on tasks of a registry.

`python -m tests.sampling.clients.loops` makes the environments of the loops and says which checkouts they need;
`make test-harnesses` makes Harbor's.
"""

import os
import re
import shutil
import tempfile
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.agent.external import AgentCommand, ExternalAgent
from cua_rl.agent.harness import HarnessAgent, HarnessCommand
from cua_rl.environments.browser.chromium import find_chromium
from cua_rl.environments.desktop.session import PROGRAMS as SERVER_PROGRAMS
from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer
from cua_rl.rl.datums import ForkReason, fork_reason
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.ignored_fields import Api
from cua_rl.sampling.openai_answers import Answer
from cua_rl.sampling.server import VllmServer
from cua_rl.task_loader import load_tasks
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import ModelTurn, SamplingParams, Turn
from tests.real.agents.conftest import GROUP_SIZE, PARITY_LIMIT, Engine, Trained
from tests.real.harnesses.harbor_registry import EXAMPLE, PYTHON, TASKS, open_registry, reward_of
from tests.sampling.clients.loops import LOOPS, device_backend
from tests.sampling.clients.record import ENVIRONMENTS, PROGRAMS
from tests.sampling.clients.targets import SIZES, DeviceName
from tests.sampling.test_clients import GOAL

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

MAX_MODEL_LEN = 16_384  # Anthropic's demo has a long system prompt
NUM_TASKS, MAX_TURNS, MAX_TOKENS = 1, 3, 160  # of a byte each
DESKTOP_PROGRAMS = (*SERVER_PROGRAMS, "mousepad", "pcmanfm", "xterm")


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


class CallingGateway(Gateway):
    """Lets every answer be a call of the computer tool, as a `tool_choice` of the loop would: the tiny model has never
    seen the tool.
    """

    async def answer(self, rollout_id: str, request: Mapping[str, Any], api: Api, *, is_trained: bool = True) -> Answer:
        """Answer as the gateway does."""
        choice = {"type": "tool", "name": "computer"} if api == "messages" else {"type": "computer_use_preview"}
        return await super().answer(rollout_id, {**request, "tool_choice": choice}, api, is_trained=is_trained)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(engine: Engine) -> AsyncGenerator[Engine]:
    """The engine behind such a gateway."""
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
    gateway = CallingGateway(engine.sampler, engine.renderer, params)
    async with gateway.serve():
        yield replace(engine, gateway=gateway)


def lacking(name: str, device: DeviceName) -> str:
    """Why a loop cannot run here on a device; empty if it can."""
    if not (ENVIRONMENTS / name).exists():
        return f"no environment of {name}; python -m tests.sampling.clients.loops makes it"
    checkout = LOOPS[name].checkout
    if checkout is not None and checkout not in os.environ:
        return f"no checkout of {name}; name one in {checkout}"
    missing = [one for one in DESKTOP_PROGRAMS if shutil.which(one) is None]
    if device == "desktop" and missing:
        return f"desktops need {', '.join(missing)}; scripts/install_system_packages.sh installs them"
    try:
        if device == "page":
            find_chromium()
    except ConfigError as error:
        return str(error)
    return ""


HERE = [
    pytest.param(name, device, marks=pytest.mark.skipif(bool(lack := lacking(name, device)), reason=lack))
    for name, device in product(LOOPS, SIZES)
]


def has_answer(renderer: Renderer, last: ModelTurn, following: ModelTurn) -> bool:
    """Whether a prompt begins with the one before and its answer, or with that answer's text: an untrained model
    samples words in pieces, which prompts encode in one token.
    """
    image = renderer.image_token_id
    reason = fork_reason(last, following, image)
    after = following.prompt.token_ids(image)[last.prompt.length :]
    is_same_text = renderer.decode([token for token in after if token != image]).startswith(last.text)
    return reason is None or (reason is ForkReason.ANSWER_RETOKENISED and is_same_text)


@pytest.mark.parametrize(("name", "device"), HERE)
async def test_a_vendors_loop_trains_a_step_and_its_turns_merge(
    name: str, device: DeviceName, caller: Engine, tmp_path: Path
) -> None:
    loop = LOOPS[name]
    argv = (str(ENVIRONMENTS / name / "bin" / "python"), str(PROGRAMS / loop.program))
    variables = () if loop.checkout is None else (loop.checkout,)
    agent = ExternalAgent(AgentCommand(argv=argv, log_folder=tmp_path, variables=variables))
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to a browser's user
        backend, sources = device_backend(device, Path(folder))
        tasks = load_tasks(sources, seed=0, split="train", device=backend.abilities).batch(0, NUM_TASKS)
        tasks = [replace(task, max_turns=MAX_TURNS) for task in tasks]
        async with backend:
            trained = await caller.train(agent, backend, tasks, max_turns=MAX_TURNS, max_tokens=MAX_TOKENS)

    turns = assert_trained(trained, num_groups=NUM_TASKS)
    assert all(turn.model.grammar for turn in turns)
    assert any(datum.model_input.images for datum in trained.batch.datums)
    rollouts = [member for group in trained.groups for member in group.rollouts]
    pairs = [pair for one in rollouts for pair in pairwise(turn.model for turn in one.turns)]
    assert len(pairs) >= len(rollouts), [[turn.model.text for turn in one.turns] for one in rollouts]
    assert sum(has_answer(caller.renderer, *pair) for pair in pairs) / len(pairs) >= GOAL
