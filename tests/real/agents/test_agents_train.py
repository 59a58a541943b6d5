"""Agents that are not ours train: real model server, real trainer, exact tokens, the parity gate."""

import shutil
import sys
from pathlib import Path

import psutil
import pytest

from cua_rl.agent.external import AgentCommand, ExternalAgent
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.harness import HarnessAgent, HarnessCommand
from cua_rl.agent.mini_agent import MiniAgent
from cua_rl.environments.browser.chromium import find_chromium
from cua_rl.environments.browser.page_tasks import PAGE_BROWSER, UserPages
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.gbox.coordinate_model import GboxCoordinateModel
from cua_rl.environments.gym.environment import GYM_ABILITIES, GymExecutions
from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.table import parse_sources
from cua_rl.host.http_server import serve_app
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.types.errors import ConfigError
from tests.doubles.gbox_desktop import NOTE
from tests.doubles.gbox_service import serve_gbox
from tests.doubles.gym_server import GymDouble
from tests.doubles.mini_agent_server import MiniAgentDouble
from tests.real.agents.conftest import GROUP_SIZE, PARITY_LIMIT, Engine, Trained

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
AGENTS = {
    "plain_openai": (sys.executable, str(EXAMPLES / "plain_openai.py")),
    "node": ("node", str(EXAMPLES / "agent.mjs")),
    "openai_agents_sdk": (sys.executable, str(EXAMPLES / "openai_agents_sdk.py")),
}


BOX_TASKS = {
    "android": {"instruction": "Open Settings.", "check": {"query": "current_app", "expected": "com.android.settings"}},
    "linux": {"instruction": "Save milk.", "check": {"query": f"file_text:{NOTE}", "expected": "milk"}},
}


def phone_tasks(num_tasks: int) -> list[Task]:
    sources = {"source_type": "demo_training", "tags": ["demo", "open_app"]}
    return load_tasks(sources, seed=0, split="train").batch(0, num_tasks)


def assert_trained(trained: Trained, num_groups: int) -> None:
    """One step on exactly what was sampled, with the images that the model saw."""
    rollouts = [rollout for group in trained.groups for rollout in group.rollouts]
    assert [rollout.error for rollout in rollouts] == [None] * (num_groups * GROUP_SIZE)
    assert sum(len(group.faulty) for group in trained.groups) == 0
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    assert all(turn.model.prompt_matches_renderer for turn in turns)
    assert all(turn.model.policy_version == trained.policy_version for turn in turns)
    assert all(turn.agent.before == (turn.model.prompt.images or (None,))[-1] for turn in turns)
    sampled = sum(len(turn.model.sampled_tokens) for turn in turns)
    assert sum(datum.num_trained_tokens for datum in trained.batch.datums) == sampled
    # every turn extends the one before: one datum a rollout, but where an answer is not as the tokenizer writes it
    num_forks = trained.batch.metrics.get("rollout/forks/answer_retokenised", 0.0)
    assert len(trained.batch.datums) == len(rollouts) + num_forks
    assert trained.batch.metrics["rollout/retokenised_tokens"] == 0
    assert trained.result.metrics["policy/parity_mean_abs"] <= PARITY_LIMIT
    assert trained.result.metrics["optim/grad_norm"] > 0


@pytest.mark.parametrize("name", AGENTS)
async def test_an_example_agent_trains_one_step_unchanged(name: str, engine: Engine, tmp_path: Path) -> None:
    program, *arguments = AGENTS[name]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed; scripts/install_system_packages.sh installs it")
    agent = ExternalAgent(AgentCommand(argv=(program, *arguments), log_folder=tmp_path))

    trained = await engine.train(agent, SimulatedPhones(), phone_tasks(2))

    assert_trained(trained, num_groups=2)
    actions = [turn.agent.action for group in trained.groups for rollout in group.rollouts for turn in rollout.turns]
    assert any(action is not None for action in actions)


async def test_the_example_harness_trains_one_step_in_its_own_world(engine: Engine, tmp_path: Path) -> None:
    folder = EXAMPLES.parent / "harnesses"
    source = {"source_type": "harness", "file_path": str(folder / "guess_the_app.jsonl")}
    command = AgentCommand(argv=(sys.executable, str(folder / "guess_the_app.py")), log_folder=tmp_path)
    tasks = load_tasks(source, seed=0, split="train", device=HarnessWorlds.abilities).batch(0, 2)

    trained = await engine.train(HarnessAgent(program=HarnessCommand(command)), HarnessWorlds(), tasks)

    assert_trained(trained, num_groups=2)
    validations = [rollout.validation for group in trained.groups for rollout in group.rollouts]
    assert all(validation is not None and validation.score is not None for validation in validations)
    assert all(
        validation is not None and {"guesses", "unreadable"} <= validation.metrics.keys() for validation in validations
    )


async def test_gbox_mini_agent_on_a_gym_trains_one_step_though_it_reports_one_output_only(engine: Engine) -> None:
    gym, mini = GymDouble(phone_tasks(2)), MiniAgentDouble(reports_one_output=True)
    async with (
        serve_app(gym.app(), "127.0.0.1", 0, grace_s=0) as gym_url,
        serve_app(mini.app(), "127.0.0.1", 0, grace_s=0) as mini_url,
    ):
        source = {"source_type": "gym", "gym_base_url": gym_url, "gym_id": "phones"}
        import asyncio

        loaded = await asyncio.to_thread(load_tasks, source, seed=0, split="train", device=GYM_ABILITIES)
        tasks = [template.make_task(0) for template in loaded.templates]
        agent = MiniAgent(base_url=mini_url, poll_s=0.1)
        async with GymExecutions(DeviceConfig()) as executions:
            trained = await engine.train(agent, executions, tasks)
        await mini.stop()

    assert_trained(trained, num_groups=2)
    assert gym.num_open == 0
    assert len(gym.executions) == 2 * GROUP_SIZE


@pytest.mark.parametrize("mode", ["direct", "gbox"])
@pytest.mark.parametrize("box_type", ["android", "linux"])
async def test_our_agent_on_boxes_trains_one_step(box_type: str, mode: str, engine: Engine, tmp_path: Path) -> None:
    async with serve_gbox() as gbox:
        boxes = gbox.backend(box_type, films=tmp_path)
        sources = {"source_type": "custom", "custom_tasks": [BOX_TASKS[box_type]]}
        tasks = load_tasks(sources, seed=0, split="train", device=boxes.abilities).batch(0, 2)
        finder = GboxCoordinateModel(gbox.connect().client)
        agent = GBoxAgent(grounder=finder if mode == "gbox" else None)
        async with boxes:
            trained = await engine.train(agent, boxes, tasks, max_turns=2)
        await finder.close()

        assert gbox.double.alive == []
    assert_trained(trained, num_groups=2)


async def test_our_agent_on_a_site_of_the_users_own_trains_one_step(engine: Engine) -> None:
    pytest.importorskip("playwright", reason="`make setup` installs Playwright")
    try:
        find_chromium()
    except ConfigError as error:
        pytest.skip(str(error))
    folder = EXAMPLES.parent / "sites" / "shopping_list"
    command = f"{sys.executable} server.py --port {{port}}"
    source = {"source_type": "page", "file_path": str(folder), "site_command": command, "reset": "POST /api/reset"}
    async with UserPages(parse_sources(source), scale=0.5) as pages:
        tasks = load_tasks(source, seed=0, split="train", device=PAGE_BROWSER).batch(0, 4)
        trained = await engine.train(GBoxAgent(), pages, tasks, max_turns=2)

    assert_trained(trained, num_groups=4)
    validations = [rollout.validation for group in trained.groups for rollout in group.rollouts]
    assert all(validation is not None and validation.query.startswith("verifiers/") for validation in validations)
    assert [process for process in psutil.process_iter() if _works_in(process, folder)] == []


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.cwd() == str(folder)
    except psutil.Error:
        return False
