"""The reward that looks at everything: goal, end, speed, repeats, refused actions and unreadable answers."""

from cua_rl.rewards.evidence import Evidence
from cua_rl.rewards.reward import bound_parts, sum_parts
from cua_rl.types import Reward, StopReason

PERFECT = 3.0
UNREADABLE = -2.0  # what a rollout is worth of which no answer could be read; the floor of all rewards
SOLVED_FLOOR = 0.5  # above the most that an unsolved task can get: 0.3 for ending it, 0.15 for having been there
_MOST_COUNTED = 5  # repeats, and refused actions, beyond which another one costs nothing


def comprehensive_reward(evidence: Evidence) -> Reward:
    """3 for a perfect rollout; else 0.5 to 2.15 for a solved task and -2 to 0.45 for an unsolved one.

    Perfect is: solved in a fifth of the turns allowed, with no repeat and no error. Answers that cannot be read pull
    the reward towards -2 by their share of the turns, so that one slip among many turns is a small loss.
    """
    outcome = _outcome_parts(evidence)
    parts = outcome | {
        "progress": _progress(evidence),
        "speed": 0.2 * (1 - evidence.num_turns / evidence.max_turns) if evidence.success else 0.0,
        "repeats": -0.15 * min(evidence.num_repeated_actions, _MOST_COUNTED),
        "rejected": -0.08 * min(evidence.num_rejected_actions, _MOST_COUNTED),
        "unreadable": _unreadable_share(evidence) * (UNREADABLE - sum(outcome.values())),
    }
    if _is_perfect(evidence):
        return sum_parts({**parts, "perfect": PERFECT - sum(parts.values())})
    if evidence.success:
        return bound_parts(parts, low=SOLVED_FLOOR, high=PERFECT)
    return bound_parts(parts, low=UNREADABLE, high=SOLVED_FLOOR)


def _outcome_parts(evidence: Evidence) -> dict[str, float]:
    """How it ended. A goal that was reached counts in full, whether or not the agent said so."""
    if evidence.success:
        return {"success": 1.5, "validated": 0.3}
    match evidence.stop_reason:
        case StopReason.FINISHED:
            return {"finished": 0.3}
        case StopReason.MAX_TURNS | StopReason.MAX_TIME as spent:
            effort = 0.1 if evidence.num_actions >= 3 else 0.0
            return {"out_of_turns" if spent is StopReason.MAX_TURNS else "out_of_time": -0.5, "effort": effort}
        case _:
            return {"broken_off": -1.0}


def _progress(evidence: Evidence) -> float:
    """For a goal that was seen to hold, more the earlier."""
    if evidence.first_success_turn is None:
        return 0.0
    return max(0.05, 0.15 * (1 - evidence.first_success_turn / evidence.max_turns))


def _unreadable_share(evidence: Evidence) -> float:
    return evidence.num_parse_failures / max(1, evidence.num_turns)


def _is_perfect(evidence: Evidence) -> bool:
    is_clean = evidence.num_repeated_actions == 0 and evidence.num_errors == 0
    return evidence.success and is_clean and evidence.num_turns <= 0.2 * evidence.max_turns
