"""Which devices rollouts can be branched on, and how much of their screenshots is compared."""

import pytest

from cua_rl.environments.adb.device import ANDROID_ABILITIES
from cua_rl.environments.browser.miniwob.templates import MINIWOB_BROWSER
from cua_rl.environments.browser.web.tasks import WEB_BROWSER
from cua_rl.environments.desktop.device import DESKTOP_ABILITIES
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.gbox.boxes import ABILITIES
from cua_rl.environments.gym.environment import GYM_ABILITIES
from cua_rl.environments.phone.demo.phone import SIMULATOR
from cua_rl.rl.config import CreditSettings
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.run.prepared_training import check_branching
from cua_rl.run.resolve import STATUS_BAR, moving_top
from cua_rl.run.rollout_config import AgentSettings
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.errors import ConfigError

BRANCHED = {"advantages": "leave_one_out", "branching": BranchingSettings(num_siblings=1)}
GYM = {"source_type": "gym", "gym_base_url": "http://localhost:5000"}
REPEATABLE = (SIMULATOR, *ABILITIES.values(), GYM_ABILITIES, DESKTOP_ABILITIES, MINIWOB_BROWSER)


@pytest.mark.parametrize("abilities", REPEATABLE, ids=lambda one: one.name)
def test_rollouts_are_branched_wherever_actions_can_be_repeated(abilities: DeviceAbilities) -> None:
    check_branching(CLIConfig(**BRANCHED), abilities)


@pytest.mark.parametrize("agent", ["external", "mini_agent"])
def test_agents_elsewhere_repeat_no_turns(agent: str) -> None:
    config = CLIConfig(**BRANCHED, agent=AgentSettings(name=agent))
    with pytest.raises(ConfigError, match=f"with the embedded simulator and agent={agent}; set it to 0"):
        check_branching(config, SIMULATOR)


@pytest.mark.parametrize("abilities", [WEB_BROWSER, ANDROID_ABILITIES], ids=lambda one: one.name)
def test_nothing_is_repeated_where_it_is_not_the_same_again(abilities: DeviceAbilities) -> None:
    with pytest.raises(ConfigError, match=f"with {abilities.name} and agent=gbox; set it to 0"):
        check_branching(CLIConfig(**BRANCHED), abilities)


@pytest.mark.parametrize("share", [-0.1, 0.6, 1.0])
def test_a_share_that_leaves_little_to_compare_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"credit.moving_top: expected a share from 0 to 0.5, got"):
        CreditSettings(moving_top=share)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({}, 0.0),
        ({"device": "adb"}, STATUS_BAR),
        ({"device": "gbox"}, STATUS_BAR),
        ({"device": "gbox", "box_type": "linux"}, 0.0),
        ({"tasks": GYM}, STATUS_BAR),
        ({"tasks": {"source_type": "miniwob"}}, 0.0),
        ({"device": "adb", "credit": CreditSettings(moving_top=0.1)}, 0.1),
        ({"device": "adb", "credit": CreditSettings(moving_top=0.0)}, 0.0),
    ],
)
def test_the_status_bar_of_real_android_devices_is_not_compared(settings: dict[str, object], share: float) -> None:
    assert moving_top(CLIConfig(**settings)) == share
