from dataclasses import replace

from cua_rl.rewards.evidence import build_evidence
from cua_rl.types.actions import Click, Wait
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import AgentTurn, StopReason, Turn
from tests.builders import model_turn, prompt, text
from tests.builders import turn as build_turn

VALIDATION = Validation(query="q", expected="1", actual="0", success=False)
TAP, WAIT = Click(x=1, y=2), Wait(duration_s=1.0)


def turn(action: Click | Wait | None, screen: bytes = b"a", error: str | None = None) -> Turn:
    before = EncodedImage(data=screen, format="png", width_px=10, height_px=20)
    done = AgentTurn(response_id="resp", before=before, action=action, action_error=error)
    return replace(build_turn(0, model_turn(prompt(text(1)))), agent=done)


def test_turns_are_counted_by_what_became_of_them() -> None:
    turns = [turn(TAP), turn(TAP, b"b", error="refused"), turn(None, error="No tool call"), turn(None)]

    facts = build_evidence(VALIDATION, StopReason.FINISHED, turns, max_turns=9)

    assert (facts.num_turns, facts.max_turns, facts.num_actions) == (4, 9, 1)
    assert (facts.num_rejected_actions, facts.num_parse_failures, facts.num_errors) == (1, 1, 2)


def test_a_repeat_is_the_same_action_on_the_same_screen() -> None:
    turns = [turn(TAP), turn(TAP, b"b"), turn(TAP), turn(WAIT), turn(WAIT), turn(Click(x=9, y=9))]

    facts = build_evidence(VALIDATION, StopReason.FINISHED, turns, max_turns=9)

    assert facts.num_repeated_actions == 1
    assert (facts.num_new_actions, facts.tried_share) == (3, 3 / 9)  # one of them on two screens; waiting is not new
