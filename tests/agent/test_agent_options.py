import pytest

from cua_rl.errors import ConfigError
from cua_rl.recipes.agents import check_agent
from cua_rl.recipes.gym_devices import make_gym_executions, name_gym
from cua_rl.recipes.train_config import CLIConfig

GYM = {"source_type": "gym"}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"agent_url": "http://localhost:1"}, "agent_url: expected it only with agent=external"),
        ({"agent": "external"}, "got neither"),
        ({"agent": "external", "agent_url": "http://a", "agent_command": "node"}, "got both"),
        ({"agent": "external", "agent_command": "no-such-program --x"}, "program can be found"),
        ({"agent": "external", "agent_command": "node 'a"}, "close the quotes"),
        ({"agent": "external", "agent_url": "localhost:1"}, "agent_url: expected an address"),
        ({"gbox_mini_agent_base_url": "http://a"}, "only with agent=mini_agent"),
        ({"agent": "mini_agent"}, "set source_type to 'gym'"),
        ({"gateway_public_url": "trainer:8100"}, "gateway_public_url: expected an address"),
    ],
)
def test_agents_that_cannot_work_are_refused_with_advice(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        check_agent(CLIConfig(**options))  # type: ignore[arg-type]


def test_agents_that_can_work_are_taken() -> None:
    check_agent(CLIConfig())
    check_agent(CLIConfig(agent="external", agent_command="python3 agent.py --name 'a b'"))
    check_agent(CLIConfig(agent="mini_agent", tasks=GYM))


def test_devices_of_a_gym_are_operated_by_gbox_mini_agent_or_need_the_key_of_their_boxes() -> None:
    make_gym_executions(CLIConfig(agent="mini_agent", tasks=GYM), {})
    make_gym_executions(CLIConfig(tasks=GYM), {"GBOX_API_KEY": "key"})
    with pytest.raises(ConfigError, match="gbox_api_key: expected the key"):
        make_gym_executions(CLIConfig(tasks=GYM), {})


def test_sources_take_the_configured_gym_unless_they_name_their_own() -> None:
    config = CLIConfig(gym_base_url="http://gym:1", gym_id="phones")
    own = {"source_type": "gym", "gym_id": "mine"}
    demo = {"source_type": "demo_training"}

    assert name_gym([own, demo], config) == [{**own, "gym_base_url": "http://gym:1"}, demo]
