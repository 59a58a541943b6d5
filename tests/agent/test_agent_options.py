import json
from pathlib import Path

import pytest

from cua_rl.command_line.parsing import make_config
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.gym.server import GymSource
from cua_rl.environments.table import find_environment
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.train import main as train
from cua_rl.run.devices import complete_sources, prepare_devices, split_sources
from cua_rl.run.rollout_config import AgentSettings
from cua_rl.run.rollouts import check_agent
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.errors import ConfigError
from tests.agent.gym_bench import demo_tasks
from tests.doubles.gym_server import GymDouble
from tests.evaluation.fake_endpoint import serve_in_thread

GYM: dict[str, object] = {"source_type": "gym"}
HARNESS: dict[str, object] = {"source_type": "harness", "file_path": "rows.jsonl"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"agent_url": "http://localhost:1"}, "agent.url: expected it only with agent=external"),
        ({"agent": "external"}, "got neither"),
        ({"agent": "external", "agent_url": "http://a", "agent_command": "node"}, "got both"),
        ({"agent": "external", "agent_command": "no-such-program --x"}, "program can be found"),
        ({"agent": "external", "agent_command": "node 'a"}, "close the quotes"),
        ({"agent": "external", "agent_url": "localhost:1"}, "agent.url: expected an address"),
        ({"gbox_mini_agent_base_url": "http://a"}, "only with agent=mini_agent"),
        ({"agent": "mini_agent"}, "set source_type to 'gym'"),
        (
            {"agent": "harness", "tasks": HARNESS},
            "harness_command or agent.harness_url with agent=harness, got neither",
        ),
        ({"harness_url": "http://a"}, "agent.harness_url: expected it only with agent=harness"),
        ({"agent": "harness", "harness_url": "a", "tasks": HARNESS}, "agent.harness_url: expected an address"),
        (
            {"agent": "harness", "harness_url": "http://h:8O", "tasks": HARNESS},
            "agent.harness_url: expected an address",
        ),
        (
            {"agent": "harness", "harness_url": "http://a"},
            "agent=harness with source_type 'harness', and with no other",
        ),
        ({"tasks": HARNESS}, "agent=harness with source_type 'harness', and with no other, got agent=gbox"),
        ({"gateway_public_url": "trainer:8100"}, "gateway.public_url: expected an address"),
        (
            {"agent": "external", "agent_url": "http://a", "agent.action_format": "holo3"},
            "agent.action_format: expected it only with agent=gbox .* got 'holo3' with external and direct",
        ),
        (
            {"agent.action_format": "ui_tars", "coordinate_mode": "gbox"},
            "agent.action_format: expected it only .* got 'ui_tars' with gbox and gbox",
        ),
    ],
)
def test_agents_that_cannot_work_are_refused_with_advice(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check(make_config(CLIConfig, options))


def check(config: CLIConfig) -> None:
    check_agent(config, find_environment(config.tasks, config.device))


def test_agents_that_can_work_are_taken() -> None:
    check(CLIConfig())
    check(CLIConfig(agent=AgentSettings(name="external", command="python3 agent.py --name 'a b'")))
    check(CLIConfig(agent=AgentSettings(name="mini_agent"), tasks=GYM))
    check(CLIConfig(agent=AgentSettings(name="harness", harness_command="python3 play.py"), tasks=HARNESS))


def test_a_harness_reports_the_reward_and_is_not_evaluated_on_what_it_trains_on() -> None:
    config = make_config(CLIConfig, {"tasks": HARNESS})

    assert (config.reward, config.eval_tasks) == ("score", None)


def test_devices_of_a_gym_are_operated_by_gbox_mini_agent_or_need_the_key_of_their_boxes() -> None:
    prepare_devices(CLIConfig(agent=AgentSettings(name="mini_agent"), tasks=GYM), Path("run"), {})
    prepare_devices(CLIConfig(tasks=GYM), Path("run"), {"GBOX_API_KEY": "key"})
    with pytest.raises(ConfigError, match="gbox_api_key: expected the key"):
        prepare_devices(CLIConfig(tasks=GYM), Path("run"), {})


def gym_sources(*sources: dict[str, object], settings: DeviceConfig) -> list[GymSource]:
    return [one for one in complete_sources(list(sources), settings) if isinstance(one, GymSource)]


def test_sources_take_the_configured_gym_unless_they_name_their_own() -> None:
    settings = DeviceConfig(gym_base_url="http://gym:1", gym_id="phones")
    (source,) = gym_sources({"source_type": "gym", "gym_id": "mine"}, settings=settings)

    assert (source.gym_base_url, source.gym_id) == ("http://gym:1", "mine")


@pytest.mark.parametrize(
    ("train", "held_out", "sides"),
    [
        ({}, {}, ("train", "eval")),
        ({}, {"gym_base_url": "http://gym:1/", "gym_id": "phones"}, ("train", "eval")),  # the same, written otherwise
        ({}, {"gym_id": "other"}, (None, None)),
        ({"split_type": "eval"}, {}, ("eval", "eval")),
    ],
)
def test_a_gym_that_training_and_evaluation_share_is_split_between_them_unless_told_otherwise(
    train: dict[str, object], held_out: dict[str, object], sides: tuple[str | None, str | None]
) -> None:
    settings = DeviceConfig(gym_base_url="http://gym:1", gym_id="phones")
    given = [gym_sources({"source_type": "gym", **keys}, settings=settings) for keys in (train, held_out)]

    split = split_sources(*given)

    assert tuple(source.split_type for side in split for source in side if isinstance(source, GymSource)) == sides


@pytest.mark.parametrize(
    "options", [["agent=mini_agent", "gbox_mini_agent_base_url={any_server}"], ["gbox_api_key=key"]]
)
@pytest.mark.parametrize("eval_tasks", [[], ["eval_tasks=None"]])
def test_the_documented_gym_command_finds_its_tasks(
    options: list[str], eval_tasks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve_in_thread(GymDouble(demo_tasks())) as address:
        url = address.removesuffix("/v1")
        source = json.dumps({"source_type": "gym", "gym_base_url": url, "gym_id": "phones"})
        small = [f"model_name={TINY_QWEN3_VL}", "max_model_len=4096", "max_tokens=64", "max_turns=2"]
        given = [option.format(any_server=url) for option in options]
        log_path = f"log_path={tmp_path / 'run'}"
        status = train(["dry_run=true", f"tasks={source}", *small, *given, *eval_tasks, log_path])

    said = capsys.readouterr()
    assert status == 0, said.err
    assert json.loads(said.out)["num_eval_tasks"] == (0 if eval_tasks else 64)
