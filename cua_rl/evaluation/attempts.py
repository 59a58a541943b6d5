"""Attempts of models at tasks, as lines of attempts.jsonl, and the run that makes missing ones."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from cua_rl.evaluation.evaluate import TaskOutcomes
from cua_rl.events import Event, RolloutSource
from cua_rl.rollout.group import run_member
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.tasks.task import Task
from cua_rl.types.errors import ConfigError, SamplingError
from cua_rl.types.rollout import SamplingParams

MAX_FAULTS_AT_START = 3  # attempts given up before the first success: the endpoint or the device does not work at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt of a model at a task instance; `success` is None if it was given up after repeated faults."""

    model: str
    position: int
    """Index of the instance in the task set."""
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
    """Tries that an infrastructure fault ended."""
    duration_s: float
    error: str | None = None
    judgement: Mapping[str, object] | None = None
    """The judge's verdict and votes if one was asked, with its prompt as a hash."""


KeepAttempt = Callable[[Attempt], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptJob:
    """The model, its tasks and the number of attempts at each."""

    model: str
    tasks: Sequence[Task]
    num_attempts: int
    params: SamplingParams


class NoRecorder:
    """Discards events: the attempts are the record."""

    async def record(self, event: Event) -> None:
        return

    async def flush(self) -> None:
        return


async def run_missing_attempts(
    runner: RolloutRunner, plan: AttemptJob, known: Sequence[Attempt], keep: KeepAttempt
) -> None:
    """Make the attempts missing in `known`, and pass each to `keep` as soon as it has ended.

    An attempt that was given up before keeps the count of its faults, so that it does not count as a first try. Raises
    `SamplingError` if the first attempts all ended with faults, so the others would, too.
    """
    faults_at_start: list[Attempt] = []
    has_worked = False
    earlier = {(item.position, item.attempt): item.num_faults for item in known if item.model == plan.model}

    async def run(position: int, number: int) -> None:
        nonlocal has_worked
        attempt = await _run_attempt(runner, plan, position, number)
        attempt = replace(attempt, num_faults=attempt.num_faults + earlier.get((position, number), 0))
        await keep(attempt)
        has_worked = has_worked or attempt.success is not None
        if not has_worked:
            faults_at_start.append(attempt)
            if len(faults_at_start) >= MAX_FAULTS_AT_START:
                raise SamplingError(
                    f"expected attempts of {plan.model!r} to end with a judgement, got nothing but faults in the first "
                    f"{len(faults_at_start)} ({attempt.error}); correct that and run the same command with "
                    "behavior_if_log_dir_exists=resume"
                )

    async with asyncio.TaskGroup() as running:
        for position, number in missing_attempts(plan, known):
            running.create_task(run(position, number), name=f"attempt-{position}-{number}")


def missing_attempts(plan: AttemptJob, known: Iterable[Attempt]) -> list[tuple[int, int]]:
    """(position, attempt) of missing attempts: the first attempt at every task, then the second, ..."""
    done = {(item.position, item.attempt) for item in known if item.model == plan.model and item.success is not None}
    wanted = [(position, number) for number in range(plan.num_attempts) for position in range(len(plan.tasks))]
    return [key for key in wanted if key not in done]


def parse_attempts(records: Iterable[Mapping[str, object]]) -> list[Attempt]:
    """Attempts from lines of attempts.jsonl, the last of each; raises `ConfigError` if a line is not an attempt."""
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
    return {**asdict(attempt)}


def outcomes_by_position(attempts: Iterable[Attempt], model: str) -> dict[int, TaskOutcomes]:
    """Outcomes of a model's attempts, by position in the task set; a later one replaces an earlier one."""
    latest = {(item.attempt, item.position): item for item in attempts if item.model == model}
    by_position: dict[int, list[Attempt]] = {}
    for _, attempt in sorted(latest.items(), key=lambda entry: entry[0]):
        by_position.setdefault(attempt.position, []).append(attempt)
    outcomes: dict[int, TaskOutcomes] = {}
    for position, of_task in sorted(by_position.items()):
        judged = [attempt for attempt in of_task if attempt.success is not None]
        outcomes[position] = TaskOutcomes(
            category=of_task[0].category,
            difficulty=of_task[0].difficulty,
            successes=tuple(attempt.success is True for attempt in judged),
            num_turns=tuple(attempt.num_turns for attempt in judged),
            rewards=tuple(attempt.reward or 0.0 for attempt in judged),
            num_faults=sum(attempt.num_faults for attempt in of_task),
            retried=tuple(attempt.success is True for attempt in judged if attempt.num_faults),
            num_given_up=len(of_task) - len(judged),
        )
    return outcomes


async def _run_attempt(runner: RolloutRunner, plan: AttemptJob, position: int, number: int) -> Attempt:
    task = plan.tasks[position]
    rollout_plan = RolloutJob(
        source=RolloutSource(phase="eval", step=0),
        group_id=f"{plan.model}-{position}",
        group_index=position,
        member_index=number,
        task=task,
        params=plan.params,
    )
    tries = await run_member(runner, rollout_plan)
    last = tries[-1]
    judgement: dict[str, object] | None = None
    if (said := last.judgement) is not None:
        judgement = {name: value for name, value in asdict(said).items() if name != "prompt"}
        judgement |= {"success": said.success, "agreement": said.agreement, "reason": said.reason}
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
        judgement=judgement,
    )
