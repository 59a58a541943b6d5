from collections.abc import Sequence
from dataclasses import replace
from math import copysign, fsum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cua_rl.rewards.evidence import Evidence, build_evidence
from cua_rl.rewards.load_reward import REWARDS
from cua_rl.rewards.reward import (
    as_reward,
    binary_reward,
    bound_parts,
    completion_reward,
    comprehensive_reward,
    efficiency_reward,
    shaped_reward,
)
from cua_rl.types.actions import Click, Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import AgentTurn, StopReason, Turn
from tests.builders import model_turn, prompt, text
from tests.builders import turn as build_turn

POLICY_STOPS = [reason for reason in StopReason if not reason.is_fault]


def evidence(success: bool = True, stop: StopReason = StopReason.FINISHED, **facts: int | None) -> Evidence:
    validation = Validation(query="q", expected="1", actual="1" if success else "0", success=success)
    defaults: dict[str, int | None] = {"num_turns": 5, "max_turns": 10, "num_actions": 4, "num_new_actions": 4}
    return Evidence(validation=validation, stop_reason=stop, **(defaults | facts))  # type: ignore[arg-type]


@st.composite
def any_evidence(draw: st.DrawFn, success: bool) -> Evidence:
    max_turns = draw(st.integers(1, 100))
    num_turns = draw(st.integers(0, max_turns))
    return evidence(
        success,
        draw(st.sampled_from(POLICY_STOPS)),
        max_turns=max_turns,
        num_turns=num_turns,
        num_actions=draw(st.integers(0, num_turns)),
        num_new_actions=draw(st.integers(0, num_turns)),
        num_parse_failures=draw(st.integers(0, num_turns)),
        num_rejected_actions=draw(st.integers(0, num_turns)),
        num_repeated_actions=draw(st.integers(0, num_turns)),
        first_success_turn=draw(st.none() | st.integers(1, max(1, num_turns))),
    )


@given(solved=any_evidence(success=True), unsolved=any_evidence(success=False))
def test_no_solved_task_scores_below_an_unsolved_one(solved: Evidence, unsolved: Evidence) -> None:
    for name, reward in REWARDS.items():
        assert reward(solved).total > reward(unsolved).total, name


MOVES = ("tap", "tap again", "wait", "refused", "unreadable")


def played(moves: Sequence[str], stop: StopReason, *, max_turns: int = 12, success_turn: int | None = None) -> Evidence:
    """What an unsolved rollout of these turns is known by."""
    turns: list[Turn] = []
    for index, move in enumerate(moves):
        place = 0 if move == "tap again" else index + 1
        before = EncodedImage(data=str(place).encode(), format="png", width_px=10, height_px=20)
        action = None if move == "unreadable" else Wait(duration_s=1.0) if move == "wait" else Click(x=place, y=1)
        error = "no" if move in ("refused", "unreadable") else None
        done = AgentTurn(response_id=str(index), before=before, action=action, action_error=error)
        turns.append(replace(build_turn(index, model_turn(prompt(text(1)))), agent=done))
    validation = Validation(query="q", expected="1", actual="0", success=False)
    return build_evidence(validation, stop, turns, max_turns=max_turns, first_success_turn=success_turn)


@given(st.data())
def test_going_on_never_costs_on_an_unsolved_task(data: st.DataObject) -> None:
    moves = data.draw(st.lists(st.sampled_from(MOVES), max_size=12))
    stopped_after = data.draw(st.integers(0, len(moves)))
    goal_held = data.draw(st.none() | st.integers(1, max(1, stopped_after)))

    gave_up = played(moves[:stopped_after], StopReason.FINISHED, success_turn=goal_held)
    went_on = played(moves, data.draw(st.sampled_from(POLICY_STOPS)), success_turn=goal_held)

    for name, reward in REWARDS.items():
        assert reward(gave_up).total <= reward(went_on).total, name


@given(st.lists(st.sampled_from(MOVES), max_size=11))
def test_no_cheap_rollout_gets_more_than_a_failed_try(rest: Sequence[str]) -> None:
    failed_try = played(["tap", *rest], StopReason.MAX_TURNS)
    at_once, one_tap = played([], StopReason.FINISHED), played(["tap"], StopReason.FINISHED)
    standing_still, looping = (played([move] * 12, StopReason.MAX_TURNS) for move in ("wait", "tap again"))

    for name, reward in REWARDS.items():
        for cheap in (at_once, one_tap, standing_still, looping):
            assert reward(cheap).total <= reward(failed_try).total, name


@given(facts=any_evidence(success=True) | any_evidence(success=False))
def test_the_parts_add_up_to_the_total(facts: Evidence) -> None:
    for name, reward in REWARDS.items():
        found = reward(facts)
        assert found.total == as_reward(fsum(found.parts.values())), name


def test_binary_is_what_the_device_shows() -> None:
    assert binary_reward(evidence(True)).total == 1.0
    assert binary_reward(evidence(False)).total == 0.0


def test_completion_gives_a_tenth_for_an_attempt() -> None:
    assert completion_reward(evidence(True)).total == 1.0
    assert completion_reward(evidence(False)).total == 0.1
    assert completion_reward(evidence(False, num_new_actions=0)).total == 0.0


def test_efficiency_charges_turns_and_errors() -> None:
    # 1 - 5 * 0.02 - 2 * 0.1 = 0.7
    assert efficiency_reward(evidence(num_parse_failures=1, num_rejected_actions=1)).total == pytest.approx(0.7)
    # -1 + 0.6 * 4/10 = -0.76, however it ended
    assert efficiency_reward(evidence(False)).total == -0.76
    assert efficiency_reward(evidence(False, StopReason.MAX_TURNS, num_turns=10)).total == -0.76
    # 1 - 50 * 0.02 = 0, raised to 0.2
    long = efficiency_reward(evidence(num_turns=50, max_turns=60))
    assert (long.total, long.parts["bound"]) == (pytest.approx(0.2), pytest.approx(0.2))


def test_shaped_rewards_knowing_when_it_is_done() -> None:
    assert shaped_reward(evidence(True)).total == pytest.approx(1.0)
    assert shaped_reward(evidence(True, StopReason.MAX_TURNS)).total == pytest.approx(0.6)
    assert shaped_reward(evidence(False)).total == pytest.approx(0.1)


def test_a_perfect_rollout_gets_three() -> None:
    assert comprehensive_reward(evidence(num_turns=2)).total == pytest.approx(3.0)
    # one turn more: 1.5 + 0.3 + 0.2 * (1 - 3/10)
    assert comprehensive_reward(evidence(num_turns=3)).total == pytest.approx(1.94)


def test_one_unreadable_answer_is_a_small_loss_and_no_cliff() -> None:
    # 1.8 + 0.2 * (1 - 5/10) = 1.9, less a fifth of the way from 1.8 to -2: 0.76
    assert comprehensive_reward(evidence(num_parse_failures=1)).total == pytest.approx(1.14)
    assert comprehensive_reward(evidence(False, num_parse_failures=5, num_new_actions=0)).total == -2.0


def test_success_counts_in_full_without_the_agents_word() -> None:
    # 1.5 + 0.3, no speed at 10 of 10 turns
    assert comprehensive_reward(evidence(True, StopReason.MAX_TURNS, num_turns=10)).total == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("facts", "total"),
    [
        (evidence(False), -1.2),  # -2 + 2 * 4/10
        (evidence(False, StopReason.CONTEXT_OVERFLOW), -1.2),
        (evidence(False, StopReason.MAX_TURNS, num_turns=10, num_new_actions=10), 0.0),
        (evidence(False, num_new_actions=1, num_turns=2), -1.8),
        (evidence(False, first_success_turn=2), -1.08),  # 0.15 * (1 - 2/10) more
    ],
)
def test_unsolved_tasks_differ_by_what_was_tried(facts: Evidence, total: float) -> None:
    assert comprehensive_reward(facts).total == pytest.approx(total)


def test_parts_that_add_up_differently_in_the_last_bit_are_one_reward() -> None:
    # 1 - 3 * 0.02 - 3 * 0.1 is 0.6399999999999999 in floats, 1 - 18 * 0.02 is 0.64
    slow, wrong = evidence(num_turns=18, max_turns=20), evidence(num_turns=3, num_parse_failures=3)

    assert fsum([1.0, -0.02 * 3, -0.1 * 3]) != fsum([1.0, -0.02 * 18])
    assert efficiency_reward(slow).total == efficiency_reward(wrong).total == 0.64


def test_a_bound_is_met_exactly() -> None:
    for turns in range(1, 100):
        parts = {"success": 1.0, "turns": -0.02 * turns, "errors": -0.1 * turns}
        assert bound_parts(parts, low=1 / 3, high=1.0).total >= 1 / 3
        if turns > 6:  # 1 - 0.12 * 6 = 0.28
            assert bound_parts(parts, low=0.2, high=1.0).total == 0.2
            assert bound_parts(parts, low=1 / 3, high=1.0).total == 1 / 3


def test_rewards_are_equal_to_ten_digits_at_any_size_and_never_minus_zero() -> None:
    assert as_reward(1e8 + 1e-4) == as_reward(1e8)
    assert as_reward(0.1 + 0.2 - 0.3) == as_reward(0.0)
    assert as_reward(0.123456789) == 0.123456789
    assert copysign(1.0, as_reward(-1e-12)) == 1.0
