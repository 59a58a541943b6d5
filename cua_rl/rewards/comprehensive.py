"""The comprehensive reward: goal, ending, speed, repeats, rejected actions and unparseable answers."""

from cua_rl.rewards.evidence import Evidence
from cua_rl.rewards.reward import bound_parts, sum_parts
from cua_rl.types import Reward, StopReason

PERFECT = 3.0
UNREADABLE = -2.0  # reward of a rollout without any parseable answer; the floor of all rewards
SOLVED_FLOOR = 0.5  # above the maximum of an unsolved task: 0.3 for ending it, 0.15 for progress
_MOST_COUNTED = 5  # repeats or rejected actions; further ones cost nothing


def comprehensive_reward(evidence: Evidence) -> Reward:
    """3 for a perfect rollout; else 0.5 to 2.15 for a solved task and -2 to 0.45 for an unsolved one.

    A perfect rollout solves the task in a fifth of the allowed turns without repeats or errors. Unparseable answers
    pull the reward towards -2 in proportion to their share of the turns, so that one slip in many turns costs little.
    """
    outcome = _outcome_parts(evidence)
    progress = 0.0
    if evidence.first_success_turn is not None:  # the earlier the goal first held, the more
        progress = max(0.05, 0.15 * (1 - evidence.first_success_turn / evidence.max_turns))
    unreadable_frac = evidence.num_parse_failures / max(1, evidence.num_turns)
    parts = outcome | {
        "progress": progress,
        "speed": 0.2 * (1 - evidence.num_turns / evidence.max_turns) if evidence.success else 0.0,
        "repeats": -0.15 * min(evidence.num_repeated_actions, _MOST_COUNTED),
        "rejected": -0.08 * min(evidence.num_rejected_actions, _MOST_COUNTED),
        "unreadable": unreadable_frac * (UNREADABLE - sum(outcome.values())),
    }
    is_clean = evidence.num_repeated_actions == 0 and evidence.num_errors == 0
    if evidence.success and is_clean and evidence.num_turns <= 0.2 * evidence.max_turns:
        return sum_parts({**parts, "perfect": PERFECT - sum(parts.values())})
    if evidence.success:
        return bound_parts(parts, low=SOLVED_FLOOR, high=PERFECT)
    return bound_parts(parts, low=UNREADABLE, high=SOLVED_FLOOR)


def _outcome_parts(evidence: Evidence) -> dict[str, float]:
    """Parts for the ending; a reached goal counts in full even if the agent did not say so."""
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
