"""Attempts of models at tasks as they are kept in attempts.jsonl, and the run that makes those still missing."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from cua_rl.errors import ConfigError, SamplingError
from cua_rl.evaluation.evaluate import TaskOutcomes
from cua_rl.events import Event, Source
from cua_rl.judgement import Judgement
from cua_rl.rollout.group import MAX_ATTEMPTS
from cua_rl.rollout.run import RolloutPlan, RolloutRunner
from cua_rl.tasks.task import Task
from cua_rl.types import Rollout, SamplingParams

MAX_FAULTS_AT_START = 3  # attempts given up before any went well: the endpoint or the device does not work at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt of one model at one task instance. `success` is None if it was given up after repeated faults."""

    model: str
    position: int
    """Place of the instance in the task set, 0-based."""
    task_id: str
    seed: int
    attempt: int
    """0-based."""
    category: str
    difficulty: str
    success: bool | None
    reward: float | None
    num_turns: int
    stop_reason: str
    num_faults: int
    """Tries that infrastructure ended."""
    duration_s: float
    error: str | None = None
    judgement: Mapping[str, object] | None = None
    """What a judge said, if one was asked, its prompt by hash."""


KeepAttempt = Callable[[Attempt], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """Which model is to attempt which tasks, how often."""

    model: str
    tasks: Sequence[Task]
    num_attempts: int
    params: SamplingParams


class NoRecorder:
    """Keeps no events: the attempts are the record."""

    async def record(self, event: Event) -> None:
        return

    async def flush(self) -> None:
        return


async def run_missing_attempts(
    runner: RolloutRunner, plan: AttemptPlan, known: Iterable[Attempt], keep: KeepAttempt
) -> None:
    """Make the attempts that `known` does not hold; each goes to `keep` as soon as it has ended.

    Raises:
        SamplingError: the first attempts all failed by faults, so that the rest would too.
    """
    faults_at_start: list[Attempt] = []
    has_worked = False

    async def run(position: int, number: int) -> None:
        nonlocal has_worked
        attempt = await _run_attempt(runner, plan, position, number)
        await keep(attempt)
        has_worked = has_worked or attempt.success is not None
        if not has_worked:
            faults_at_start.append(attempt)
            _require_working(plan.model, faults_at_start)

    async with asyncio.TaskGroup() as running:
        for position, number in missing_attempts(plan, known):
            running.create_task(run(position, number), name=f"attempt-{position}-{number}")


def missing_attempts(plan: AttemptPlan, known: Iterable[Attempt]) -> list[tuple[int, int]]:
    """(position, attempt) of what was not judged yet: the first attempt at every task, then the second, ..."""
    done = {(item.position, item.attempt) for item in known if item.model == plan.model and item.success is not None}
    wanted = [(position, number) for number in range(plan.num_attempts) for position in range(len(plan.tasks))]
    return [key for key in wanted if key not in done]


def parse_attempts(records: Iterable[Mapping[str, object]]) -> list[Attempt]:
    """Attempts from the lines of attempts.jsonl; a later attempt at the same place replaces an earlier one.

    Raises:
        ConfigError: a line is no attempt.
    """
    names = {field.name for field in fields(Attempt)}
    attempts: dict[tuple[str, int, int], Attempt] = {}
    for record in records:
        if not names - {"judgement"} <= set(record) <= names:
            raise ConfigError(
                f"expected lines of attempts.jsonl with the keys {sorted(names)!r}, got {sorted(record)!r}; "
                "it was edited or is of another version: start again with behavior_if_log_dir_exists=overwrite"
            )
        attempt = Attempt(**record)  # type: ignore[arg-type]
        attempts[attempt.model, attempt.position, attempt.attempt] = attempt
    return list(attempts.values())


def attempt_record(attempt: Attempt) -> dict[str, object]:
    """An attempt as a line of attempts.jsonl."""
    return {**asdict(attempt)}


def outcomes_by_position(attempts: Iterable[Attempt], model: str) -> dict[int, TaskOutcomes]:
    """What became of a model's attempts, per place in the task set."""
    by_position: dict[int, list[Attempt]] = {}
    for attempt in sorted((item for item in attempts if item.model == model), key=lambda item: item.attempt):
        by_position.setdefault(attempt.position, []).append(attempt)
    return {position: _outcomes(by_position[position]) for position in sorted(by_position)}


def _outcomes(attempts: Sequence[Attempt]) -> TaskOutcomes:
    judged = [attempt for attempt in attempts if attempt.success is not None]
    return TaskOutcomes(
        category=attempts[0].category,
        difficulty=attempts[0].difficulty,
        successes=tuple(attempt.success is True for attempt in judged),
        num_turns=tuple(attempt.num_turns for attempt in judged),
        rewards=tuple(attempt.reward or 0.0 for attempt in judged),
        num_faults=sum(attempt.num_faults for attempt in attempts),
        retried=tuple(attempt.success is True for attempt in judged if attempt.num_faults),
        num_given_up=len(attempts) - len(judged),
    )


async def _run_attempt(runner: RolloutRunner, plan: AttemptPlan, position: int, number: int) -> Attempt:
    """Try until no fault ends it, at most `MAX_ATTEMPTS` times."""
    task = plan.tasks[position]
    rollout_plan = RolloutPlan(
        source=Source(phase="eval", step=0),
        group_id=f"{plan.model}-{position}",
        group_index=position,
        member_index=number,
        task=task,
        params=plan.params,
    )
    tries: list[Rollout] = []
    while len(tries) < MAX_ATTEMPTS and (not tries or tries[-1].reward is None):
        tries.append(await runner.run(rollout_plan))
    last = tries[-1]
    return Attempt(
        model=plan.model,
        position=position,
        task_id=task.task_id,
        seed=task.seed,
        attempt=number,
        category=task.category,
        difficulty=task.difficulty,
        success=None if last.reward is None else last.success,
        reward=None if last.reward is None else last.reward.total,
        num_turns=len(last.turns),
        stop_reason=str(last.stop_reason),
        num_faults=sum(rollout.reward is None for rollout in tries),
        duration_s=last.duration_s,
        error=last.error,
        judgement=None if last.judgement is None else _judgement_record(last.judgement),
    )


def _judgement_record(judgement: Judgement) -> dict[str, object]:
    said: dict[str, object] = {name: value for name, value in asdict(judgement).items() if name != "prompt"}
    return said | {"success": judgement.success, "agreement": judgement.agreement, "reason": judgement.reason}


def _require_working(model: str, faults: Sequence[Attempt]) -> None:
    if len(faults) >= MAX_FAULTS_AT_START:
        raise SamplingError(
            f"expected attempts of {model!r} to end with a judgement, got nothing but faults in the first "
            f"{len(faults)} ({faults[-1].error}); correct that and run the same command with "
            "behavior_if_log_dir_exists=resume"
        )
