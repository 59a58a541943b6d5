"""The reward function of `reward=...`: a built-in one by name, or a user's own as "module:function"."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from math import fsum, isclose

from cua_rl.rewards.evidence import Evidence
from cua_rl.rewards.reward import (
    RewardFunction,
    as_reward,
    binary_reward,
    bound_parts,
    completion_reward,
    comprehensive_reward,
    efficiency_reward,
    grade_reward,
    pay_milestones,
    score_reward,
    shaped_reward,
)
from cua_rl.types.errors import ConfigError, boundary
from cua_rl.types.judgement import MAX_REWARD, Validation
from cua_rl.types.rollout import Reward, StopReason

REWARDS: Mapping[str, RewardFunction] = {
    "binary": binary_reward,
    "judge": binary_reward,  # a judge decides on success where tasks have no validator
    "score": score_reward,
    "completion": completion_reward,
    "efficiency": efficiency_reward,
    "shaped": shaped_reward,
    "comprehensive": comprehensive_reward,
}

RFT_GRADER = "rft_grader:"
"""Before the name of a grader's file."""


def load_reward(name: str, clip: float | None = None, milestones: float = 0.0) -> RewardFunction:
    """The reward function with this name, its rewards from -`clip` to `clip`; the rest becomes the part "bound".

    With `milestones` it also pays this much for a task's milestones (`pay_milestones`).
    A user's function takes `Evidence` and returns a `Reward` or a number; it is called with a solved and an unsolved
    example, so that mistakes show before training. Raises `ConfigError` if there is no such function, or it does not
    work like this.
    """
    if milestones:
        return pay_milestones(load_reward(name, clip), milestones)
    if clip is not None:
        return _clipped(load_reward(name), clip)
    if name in REWARDS:
        return REWARDS[name]
    if name.startswith(RFT_GRADER):
        return grade_reward
    if ":" not in name:
        near = difflib.get_close_matches(name, REWARDS, n=1)
        advice = (
            f"did you mean {near[0]!r}?"
            if near
            else "a function of your own is written module:function, a grader rft_grader:file.json"
        )
        raise ConfigError(f"reward: expected one of {', '.join(REWARDS)}, got {name!r}; {advice}")
    reward = _checked(name, _import_function(name))
    for evidence in _EXAMPLES:
        with boundary(ConfigError, f"reward: trying {name!r} on an example"):
            reward(evidence)
    return reward


def _clipped(function: RewardFunction, clip: float) -> RewardFunction:
    def reward(evidence: Evidence) -> Reward:
        given = function(evidence)
        return given if abs(given.total) <= clip else bound_parts(given.parts, low=-clip, high=clip)

    return reward


def _import_function(name: str) -> Callable[..., object]:
    module_name, _, function_name = name.partition(":")
    with boundary(ConfigError, f"reward: importing the module of {name!r}"):
        try:
            members = vars(import_module(module_name))
        except ImportError as error:
            raise ConfigError(
                f"reward: expected a module that can be imported for {name!r}, got {type(error).__name__}: {error}; "
                "put its folder on PYTHONPATH"
            ) from error
    function: object = members.get(function_name)
    if not callable(function):
        near = difflib.get_close_matches(function_name, [key for key in members if callable(members[key])], n=1)
        advice = f"did you mean {near[0]!r}?" if near else "define it there"
        raise ConfigError(
            f"reward: expected a function {function_name!r} in module {module_name!r}, got {function!r}; {advice}"
        )
    try:
        inspect.signature(function).bind(_EXAMPLES[0])
    except TypeError as error:
        raise ConfigError(
            f"reward: expected {name!r} to take one argument (Evidence), got {inspect.signature(function)} ({error}); "
            "change its parameters"
        ) from None
    return function


def _checked(name: str, function: Callable[..., object]) -> RewardFunction:
    """Check the result of a user's function at every call: the policy would learn a wrong reward silently."""

    def reward(evidence: Evidence) -> Reward:
        given = function(evidence)
        match given:
            case Reward():
                result = given
            case bool() | int() | float():
                result = Reward(total=float(given), parts={"reward": float(given)})
            case _:
                raise ConfigError(f"reward: expected {name!r} to return a Reward or a number, got {given!r}; change it")
        if not abs(result.total) <= MAX_REWARD or not isclose(fsum(result.parts.values()), result.total, abs_tol=1e-6):
            raise ConfigError(
                f"reward: expected {name!r} to return a finite total of at most {MAX_REWARD:,.0f} that is the sum of "
                f"its parts, got {result!r}; use cua_rl.rewards.reward.sum_parts"
            )
        return replace(result, total=as_reward(result.total))

    return reward


def _example(success: bool, stop_reason: StopReason) -> Evidence:
    validation = Validation(query="wifi", expected="on", actual="on" if success else "off", success=success)
    return Evidence(validation=validation, stop_reason=stop_reason, num_turns=4, max_turns=10, num_actions=3)


_EXAMPLES = (_example(True, StopReason.FINISHED), _example(False, StopReason.MAX_TURNS))
