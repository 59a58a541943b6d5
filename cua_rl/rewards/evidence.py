"""The input of reward functions: facts about a finished rollout. Infrastructure faults never become evidence."""

from collections.abc import Sequence
from dataclasses import dataclass

from cua_rl.types.actions import Wait
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import StopReason, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Facts about a rollout that ended without a fault; `validation` is about the device's state, not a claim."""

    validation: Validation
    stop_reason: StopReason
    num_turns: int
    max_turns: int
    num_actions: int = 0
    """Actions that the device executed."""
    num_new_actions: int = 0
    """Executed actions other than waiting, each counted once per screen that it was tried on."""
    num_parse_failures: int = 0
    """Turns whose answer was neither an action nor the end of the rollout."""
    num_rejected_actions: int = 0
    """Turns whose action the device rejected."""
    num_repeated_actions: int = 0
    """Actions already tried on an identical screen, except waiting: the first try had no effect or led back here."""
    first_success_turn: int | None = None
    """Turns taken when the goal first held; None if it never did, or was not checked."""
    milestone_turns: tuple[int | None, ...] = ()
    """The same of each milestone of the task, where they were checked; 0 if it held before the first turn."""
    grade: float | None = None
    """What a grader gave (docs/rft_graders.md); None if it was not asked, or nothing was done."""

    @property
    def success(self) -> bool:
        return self.validation.success

    @property
    def is_finished(self) -> bool:
        """True if the agent ended the rollout itself."""
        return self.stop_reason == StopReason.FINISHED

    @property
    def tried_share(self) -> float:
        """Share of the allowed turns that tried something new, 0 to 1: it never falls while a rollout continues."""
        return min(1.0, self.num_new_actions / max(1, self.max_turns))

    @property
    def num_errors(self) -> int:
        """Turns without effect because of an invalid answer or action."""
        return self.num_parse_failures + self.num_rejected_actions


def build_evidence(
    validation: Validation,
    stop_reason: StopReason,
    turns: Sequence[Turn],
    *,
    max_turns: int,
    first_success_turn: int | None = None,
    grade: float | None = None,
    milestone_turns: tuple[int | None, ...] = (),
) -> Evidence:
    done = [turn.agent for turn in turns]
    executed = [turn for turn in done if turn.action is not None and turn.action_error is None]
    moved = [turn for turn in executed if not isinstance(turn.action, Wait)]
    tried = [
        (turn.before.sha256, turn.action)
        for turn in done
        if turn.before is not None and not isinstance(turn.action, Wait | None)
    ]
    return Evidence(
        validation=validation,
        stop_reason=stop_reason,
        num_turns=len(turns),
        max_turns=max_turns,
        num_actions=len(executed),
        num_new_actions=len(
            {(turn.response_id if turn.before is None else turn.before.sha256, turn.action) for turn in moved}
        ),
        num_parse_failures=sum(turn.action is None and turn.action_error is not None for turn in done),
        num_rejected_actions=sum(turn.action is not None and turn.action_error is not None for turn in done),
        num_repeated_actions=len(tried) - len(set(tried)),
        first_success_turn=first_success_turn,
        grade=grade,
        milestone_turns=milestone_turns,
    )
