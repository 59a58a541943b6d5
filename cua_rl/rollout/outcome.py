"""The outcome of a rollout: its stop reason, and the verdict of validator or judge."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cua_rl.agent.agent import AgentOutcome
from cua_rl.environments.device import AgentReport, Device, ReportedDevice
from cua_rl.host.masking import mask_known
from cua_rl.judge.request import Case
from cua_rl.rewards.evidence import Evidence, build_evidence
from cua_rl.tasks.task import Task
from cua_rl.types.errors import CuaError, DeviceError, JudgeError, SamplingError, TaskError
from cua_rl.types.judgement import Judgement, Validation
from cua_rl.types.rollout import AgentTurn, ModelTurn, StopReason, Turn
from cua_rl.types.snapshot import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a rollout ended, before it is scored."""

    stop_reason: StopReason
    device_id: str | None = None
    instruction: str = ""
    answer: str | None = None
    validation: Validation | None = None
    judgement: Judgement | None = None
    first_success_turn: int | None = None
    milestone_turns: tuple[int | None, ...] = ()
    moments: tuple[Moment | None, ...] = ()
    error: str | None = None

    @classmethod
    def of_fault(cls, error: CuaError | TimeoutError) -> "Outcome":
        """The outcome of a rollout that an infrastructure fault ended; raises `error` if it is not such a fault."""
        match error:
            case TimeoutError():
                return cls(stop_reason=StopReason.TIME_LIMIT, error=mask_known(str(error)) or "a stage ran out of time")
            case DeviceError():
                stop_reason = StopReason.DEVICE_ERROR
            case SamplingError():
                stop_reason = StopReason.SAMPLING_ERROR
            case TaskError():
                stop_reason = StopReason.TASK_ERROR
            case _:
                raise error
        return cls(stop_reason=stop_reason, error=mask_known(str(error)))

    def evidence(self, turns: Sequence[Turn], max_turns: int) -> Evidence | None:
        """The input of the reward function; None if a fault ended the rollout."""
        if self.validation is None:
            return None
        return build_evidence(
            self.validation,
            self.stop_reason,
            turns,
            max_turns=max_turns,
            first_success_turn=self.first_success_turn,
            grade=None if self.judgement is None else self.judgement.score,
            milestone_turns=self.milestone_turns,
        )


class Judge(Protocol):
    """Decides from the record of an attempt whether the task was done."""

    async def judge(self, case: Case, *, decides: bool) -> Judgement: ...


async def ask_judge(
    judge: Judge | None, task: Task, outcome: Outcome, turns: Sequence[Turn], *, always: bool
) -> Outcome:
    """The outcome with the judge's verdict, if one is needed; with `always`, also if a validator decides.

    If nothing else validates the task, a missing verdict is a fault of the task, unless all votes arrived and are
    divided, or some malformed: the policy produced what the judge saw, and no majority calls it a success.

    A rollout that ended before its first turn, for instance because its first prompt did not fit, has failed and needs
    no verdict.
    """
    is_validated = outcome.validation is not None
    if is_validated and not (judge is not None and always and turns):
        return outcome
    if judge is None:
        raise JudgeError(
            f"expected a judge for task {task.task_id!r}, which has no validator; set judge.base_url and judge.model"
        )
    if not turns:
        nothing_done = Validation(query="turns", expected="at least 1", actual="0", success=False)
        return replace(outcome, validation=nothing_done)
    case = Case(
        instruction=outcome.instruction,
        turns=turns,
        answer=outcome.answer,
        stop_reason=outcome.stop_reason,
        item={"task_id": task.task_id, "seed": task.seed, "instruction": outcome.instruction, **task.item},
    )
    judgement = await judge.judge(case, decides=not is_validated)
    judged = replace(outcome, judgement=judgement)
    if is_validated:
        return judged
    is_answered = all(vote.success is not None or vote.is_malformed for vote in judgement.votes)
    if judgement.success is None and not (is_answered and any(vote.success is not None for vote in judgement.votes)):
        error = f"expected a majority verdict on {task.task_id!r}, got none: {judgement.reason}"
        return replace(judged, stop_reason=StopReason.TASK_ERROR, error=error)
    return replace(judged, validation=validation_of(judgement))


def take_turn(index: int, done: AgentTurn, recorded: Sequence[ModelTurn]) -> Turn:
    """What an agent did, with the gateway's record of the answer on which it acted; raises `SamplingError`."""
    model = next((turn for turn in reversed(recorded) if turn.response_id == done.response_id), None)
    if model is None:
        raise SamplingError(
            f"expected the gateway to know response {done.response_id!r}, it has {len(recorded)} others"
        )
    return Turn(index=index, model=model, agent=done, state="" if done.before is None else done.before.state)


def report_end(device: Device, done: AgentOutcome, turns: Sequence[Turn], *, max_turns: int) -> None:
    """Report to a device whose service evaluates the task how the agent's work ended."""
    if isinstance(device, ReportedDevice):
        report = AgentReport(
            answer=done.answer,
            success_claimed=done.success_claimed,
            num_turns=len(turns),
            max_turns=max_turns,
            errors=tuple(turn.agent.action_error for turn in turns if turn.agent.action_error),
        )
        device.report(report)


def validation_of(judgement: Judgement) -> Validation:
    """A verdict as the validation of a task that has no validator."""
    num_agreeing = sum(vote.success is judgement.success for vote in judgement.votes)
    return Validation(
        query=f"judge {judgement.model}",
        expected="success",
        actual=f"{'success' if judgement.success else 'no success'}, {num_agreeing} of {len(judgement.votes)} votes",
        success=judgement.success is True,
        duration_s=judgement.duration_s,
        score=judgement.score,
    )
