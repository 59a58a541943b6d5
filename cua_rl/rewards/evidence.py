"""What a reward is based on: the facts of one finished rollout. Infrastructure faults never become evidence."""

from collections.abc import Sequence
from dataclasses import dataclass

from cua_rl.actions import Action, Wait
from cua_rl.types import AgentTurn, StopReason, Turn, Validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The facts of one rollout that ended without a fault; `validation` is the device's state, never a claim."""

    validation: Validation
    stop_reason: StopReason
    num_turns: int
    max_turns: int
    num_actions: int = 0
    """Actions that the device did."""
    num_parse_failures: int = 0
    """Turns whose answer made no action and did not end the rollout."""
    num_rejected_actions: int = 0
    """Turns whose action the device refused."""
    num_repeated_actions: int = 0
    """Actions done before on the very same screen, waiting aside: they had led back here, or nowhere."""
    first_success_turn: int | None = None
    """Turns taken when the goal first held; None if it never did, or nobody looked."""

    @property
    def success(self) -> bool:
        return self.validation.success

    @property
    def is_finished(self) -> bool:
        """True if the agent ended the rollout itself."""
        return self.stop_reason == StopReason.FINISHED

    @property
    def is_out_of_budget(self) -> bool:
        """True if the agent went on until its turns or its time were used up."""
        return self.stop_reason in (StopReason.MAX_TURNS, StopReason.MAX_TIME)

    @property
    def num_errors(self) -> int:
        """Turns that did nothing because the model got its answer or its action wrong."""
        return self.num_parse_failures + self.num_rejected_actions


def build_evidence(
    validation: Validation,
    stop_reason: StopReason,
    turns: Sequence[Turn],
    *,
    max_turns: int,
    first_success_turn: int | None = None,
) -> Evidence:
    """Collect the facts of a rollout from its turns."""
    done = [turn.agent for turn in turns]
    return Evidence(
        validation=validation,
        stop_reason=stop_reason,
        num_turns=len(turns),
        max_turns=max_turns,
        num_actions=sum(turn.action is not None and turn.action_error is None for turn in done),
        num_parse_failures=sum(turn.action is None and turn.action_error is not None for turn in done),
        num_rejected_actions=sum(turn.action is not None and turn.action_error is not None for turn in done),
        num_repeated_actions=_count_repeats(done),
        first_success_turn=first_success_turn,
    )


def _count_repeats(turns: Sequence[AgentTurn]) -> int:
    done: set[tuple[str, Action]] = set()
    num_repeats = 0
    for turn in turns:
        if turn.action is None or isinstance(turn.action, Wait):
            continue
        key = (turn.before.sha256, turn.action)
        num_repeats += key in done
        done.add(key)
    return num_repeats
