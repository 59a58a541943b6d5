"""Reward functions for finished rollouts; infrastructure faults never reach them.

All of them read success from the device's state, and none rewards a solved task less than an unsolved one (`score` is
whatever a gym server reports). On an unsolved task none pays for stopping: going on never gets less, and
standing still or repeating gets no more than the first try. Otherwise giving up would beat trying until a policy solves
most of its tasks, which it then never learns.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import fsum
from operator import add

from cua_rl.rewards.evidence import Evidence
from cua_rl.types.rollout import Reward

RewardFunction = Callable[[Evidence], Reward]
"""Evidence of a finished rollout -> its reward."""

ATTEMPTED = 0.1  # for at least one executed action other than waiting
PERFECT = 3.0
FAILED = -2.0  # comprehensive: reward of an unsolved task on which nothing was tried; the floor of all rewards
SOLVED_FLOOR = 0.5  # above the maximum of an unsolved task: 0.15 for progress
_MOST_COUNTED = 5  # repeats or rejected actions; further ones cost nothing


def as_reward(value: float) -> float:
    """Round to ten digits, at most nine of them decimals.

    A group trains if its rewards differ, and dividing by their standard deviation magnifies the smallest difference.
    Therefore rewards that are equal on paper must be equal here: 0.1 + 0.2 + 0.08 is not quite 0.38 in floats.
    """
    return round(float(f"{value:.10g}"), 9) + 0.0  # + 0.0 turns -0.0 into 0.0


def sum_parts(parts: Mapping[str, float]) -> Reward:
    """The reward whose total is the sum of its parts, rounded by `as_reward`."""
    return Reward(total=as_reward(fsum(parts.values())), parts={name: value + 0.0 for name, value in parts.items()})


def bound_parts(parts: Mapping[str, float], *, low: float, high: float) -> Reward:
    """The sum of the parts, clamped to [low, high]; the correction becomes the part "bound"."""
    total = fsum(parts.values())
    bounded = min(max(as_reward(total), low), high)
    return replace(sum_parts({**parts, "bound": min(max(total, low), high) - total}), total=bounded)


def pay_milestones(function: RewardFunction, amount: float) -> RewardFunction:
    """The reward of `function`, and `amount` in equal shares for the milestones that the rollout itself reached.

    A share is paid once, to the turn that reached it first: reaching it again, or staying, earns nothing, and nothing
    is taken back. A solved task earns all of it, the rest with its last turn, however it was solved: no unsolved one
    gets more, and a way around the milestones costs nothing.
    """

    def reward(evidence: Evidence) -> Reward:
        given = function(evidence)
        reachable = [turn for turn in evidence.milestone_turns if turn != 0]
        if not reachable or not evidence.num_turns:
            return given
        reached = Counter(turn or evidence.num_turns for turn in reachable if turn is not None or evidence.success)
        shares = [amount * reached[index + 1] / len(reachable) for index in range(evidence.num_turns)]
        of_turns = tuple(map(add, given.of_turns, shares)) if given.of_turns else tuple(shares)
        return replace(sum_parts({**given.parts, "milestones": fsum(shares)}), of_turns=of_turns)

    return reward


def binary_reward(evidence: Evidence) -> Reward:
    """1 if the device's state shows the goal, else 0; the agent's claim does not count."""
    return sum_parts({"success": 1.0 if evidence.success else 0.0})


def score_reward(evidence: Evidence) -> Reward:
    """The validator's score from 0 to 1 if it has one, as gym servers do; else as `binary`."""
    score = evidence.validation.score
    return sum_parts({"score": score}) if score is not None else binary_reward(evidence)


def grade_reward(evidence: Evidence) -> Reward:
    """What a grader gave; 0 for a rollout that ended before its first turn, which has nothing to grade."""
    return sum_parts({"grade": evidence.grade or 0.0})


def completion_reward(evidence: Evidence) -> Reward:
    """1 for success; without it 0.1 if at least one action but waiting was executed, else 0."""
    is_attempt = not evidence.success and evidence.num_new_actions > 0
    return sum_parts({"success": 1.0 if evidence.success else 0.0, "attempted": ATTEMPTED if is_attempt else 0.0})


def efficiency_reward(evidence: Evidence) -> Reward:
    """Success (1), less 0.02 per turn and 0.1 per error, at least 0.2; without it -1 to -0.4 by what was tried."""
    if not evidence.success:
        return sum_parts({"unsolved": -1.0, "tried": 0.6 * evidence.tried_share})
    parts = {"success": 1.0, "turns": -0.02 * evidence.num_turns, "errors": -0.1 * evidence.num_errors}
    return bound_parts(parts, low=0.2, high=1.0)


def shaped_reward(evidence: Evidence) -> Reward:
    """0.1 for an action other than waiting, 0.5 for the goal, 0.4 more if the agent also ended the rollout itself."""
    return sum_parts(
        {
            "attempted": ATTEMPTED if evidence.num_new_actions > 0 else 0.0,
            "success": 0.5 if evidence.success else 0.0,
            "finished": 0.4 if evidence.success and evidence.is_finished else 0.0,
        }
    )


def comprehensive_reward(evidence: Evidence) -> Reward:
    """3 for a perfect rollout; else 0.5 to 2.15 for a solved task and -2 to 0.15 for an unsolved one.

    A perfect rollout solves the task in a fifth of the allowed turns without repeats or errors. On a solved task
    unparseable answers pull the reward towards -2 in proportion to their share of the turns, so that one slip in many
    turns costs little. An unsolved one gets more, the more of its turns tried something new.
    """
    progress = 0.0
    if evidence.first_success_turn is not None:  # the earlier the goal first held, the more
        progress = max(0.05, 0.15 * (1 - evidence.first_success_turn / evidence.max_turns))
    if not evidence.success:
        return sum_parts({"unsolved": FAILED, "tried": -FAILED * evidence.tried_share, "progress": progress})
    parts = {
        "success": 1.5,  # a reached goal counts in full even if the agent did not say so
        "validated": 0.3,
        "progress": progress,
        "speed": 0.2 * (1 - evidence.num_turns / evidence.max_turns),
        "repeats": -0.15 * min(evidence.num_repeated_actions, _MOST_COUNTED),
        "rejected": -0.08 * min(evidence.num_rejected_actions, _MOST_COUNTED),
        "unreadable": evidence.num_parse_failures / max(1, evidence.num_turns) * (FAILED - 1.8),
    }
    is_clean = not evidence.num_repeated_actions and not evidence.num_errors
    if is_clean and evidence.num_turns <= 0.2 * evidence.max_turns:
        return sum_parts({**parts, "perfect": PERFECT - sum(parts.values())})
    return bound_parts(parts, low=SOLVED_FLOOR, high=PERFECT)
