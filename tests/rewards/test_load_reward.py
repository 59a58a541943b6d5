from pathlib import Path

import pytest

from cua_rl.rewards.load_reward import REWARDS, load_reward
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.advantages import group_advantages
from cua_rl.types.errors import ConfigError
from tests.rewards.test_rewards import evidence

OWN = """
from cua_rl.rewards.reward import sum_parts

def turns_left(evidence):
    return sum_parts({"success": float(evidence.success), "left": 0.01 * (evidence.max_turns - evidence.num_turns)})

def number(evidence):
    return 2 * evidence.success

def sums(evidence):
    return 1 - 0.62 if evidence.success else 0.1 + 0.2 + 0.08

def two_arguments(evidence, scale):
    return scale

def infinite(evidence):
    return float("inf")

def huge(evidence):
    return 1e160  # its square overflows

def words(evidence):
    return "well done"

def broken(evidence):
    return evidence.wishes

constant = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_rewards_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_our_rewards_are_known_by_name() -> None:
    assert list(REWARDS) == ["binary", "judge", "score", "completion", "efficiency", "shaped", "comprehensive"]
    assert load_reward("binary") is binary_reward


def test_a_users_own_function_is_imported(own_module: str) -> None:
    # 1 + 0.01 * (10 - 5)
    assert load_reward(f"{own_module}:turns_left")(evidence()).total == pytest.approx(1.05)


def test_a_users_number_becomes_a_reward_of_one_part(own_module: str) -> None:
    reward = load_reward(f"{own_module}:number")(evidence())

    assert (reward.total, reward.parts) == (2.0, {"reward": 2.0})


def test_rewards_are_bounded_on_request_and_say_by_how_much(own_module: str) -> None:
    reward = load_reward(f"{own_module}:number", 0.5)(evidence())

    assert (reward.total, reward.parts) == (0.5, {"reward": 2.0, "bound": -1.5})
    assert load_reward("binary", 0.5)(evidence(success=False)) == load_reward("binary")(evidence(success=False))
    with pytest.raises(ConfigError, match="did you mean"):
        load_reward("eficiency", 0.5)


def test_a_users_rewards_that_differ_in_the_last_bit_only_teach_nothing(own_module: str) -> None:
    reward = load_reward(f"{own_module}:sums")
    rewards = [reward(evidence()).total, *[reward(evidence(success=False)).total] * 7]

    assert 1 - 0.62 != 0.1 + 0.2 + 0.08  # mean_std would make an advantage of 1.07 of it
    assert group_advantages(rewards, "mean_std") == (0.0,) * 8


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("nowhere", "expected a function 'nowhere'"),
        ("turns_lft", "did you mean 'turns_left'"),
        ("constant", "got 3"),
        ("two_arguments", "take one argument"),
        ("infinite", "finite total"),
        ("huge", "of at most 1,000,000"),
        ("words", "a Reward or a number"),
        ("broken", "AttributeError"),
    ],
)
def test_a_function_that_cannot_work_is_refused_at_once(own_module: str, function: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(f"{own_module}:{function}")


def test_a_misspelt_name_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'efficiency'"):
        load_reward("eficiency")
    with pytest.raises(ConfigError, match="module:function"):
        load_reward("zzz")


def test_a_module_that_is_not_there_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        load_reward("no_such_module_here:reward")
