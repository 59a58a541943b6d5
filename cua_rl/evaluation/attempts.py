"""Attempts of models at tasks, as lines of attempts.jsonl, and the run that makes missing ones."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace

from cua_rl.rollout.group import GroupJob, Runner, run_group
from cua_rl.tasks.task import Task
from cua_rl.types.errors import ConfigError, SamplingError
from cua_rl.types.rollout import Rollout, RolloutGroup

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
    rollout_id: str | None = None
    """The last try in the database; None if an earlier version, which had none, made the attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOutcomes:
    """Outcomes of the attempts at a task instance; faults are counted, not judged."""

    category: str
    difficulty: str
    successes: tuple[bool, ...]
    num_turns: tuple[int, ...]
    rewards: tuple[float, ...] = ()
    num_faults: int = 0
    """Tries that an infrastructure fault ended."""
    retried: tuple[bool, ...] = ()
    """The entries of `successes` from retries after a fault."""
    num_given_up: int = 0
    """Attempts whose tries all ended with a fault."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The success rate of first tries if those that a fault ended had all failed, and if they had succeeded."""
        num_attempts, num_unknown = len(self.successes) + self.num_given_up, len(self.retried) + self.num_given_up
        num_successes = sum(self.successes) - sum(self.retried)
        return num_successes / num_attempts, (num_successes + num_unknown) / num_attempts


KeepAttempts = Callable[[RolloutGroup, Sequence[Attempt]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptJob:
    """The model, its tasks and the attempts at each."""

    model: str
    tasks: Sequence[Task]
    group: GroupJob
    """All attempts at a task."""

    def group_id(self, position: int) -> str:
        """The same for all attempts of the model at a task, whenever they are made."""
        return f"{self.model}-{position}"


async def run_missing_attempts(runner: Runner, job: AttemptJob, known: Sequence[Attempt], keep: KeepAttempts) -> None:
    """Make the attempts missing in `known`, and pass those at a task to `keep` as soon as the last has ended.

    An attempt that was given up before keeps the count of its faults, so that it does not count as a first try. Raises
    `SamplingError` if the first attempts all ended with faults, so the others would, too.
    """
    has_worked, num_given_up = False, 0
    earlier = {(item.position, item.attempt): item.num_faults for item in known if item.model == job.model}

    async def run_task(position: int, numbers: Sequence[int]) -> None:
        nonlocal has_worked, num_given_up
        task = job.tasks[position]
        group = await run_group(runner, task, position, job.group, group_id=job.group_id(position), members=numbers)
        made = attempts_of(group, task, job.model)
        faults = [item.num_faults + earlier.get((position, item.attempt), 0) for item in made]
        await keep(group, [replace(item, num_faults=num) for item, num in zip(made, faults, strict=True)])
        has_worked = has_worked or bool(group.rollouts)
        num_given_up += len(made) - len(group.rollouts)
        if not has_worked and num_given_up >= MAX_FAULTS_AT_START:
            raise SamplingError(
                f"expected attempts of {job.model!r} to end with a judgement, got nothing but faults in the first "
                f"{num_given_up} ({made[-1].error}); correct that and run the same command with "
                "behavior_if_log_dir_exists=resume"
            )

    async with asyncio.TaskGroup() as running:
        for position, numbers in missing_attempts(job, known).items():
            running.create_task(run_task(position, numbers), name=f"attempts-{position}")


def missing_attempts(job: AttemptJob, known: Iterable[Attempt]) -> dict[int, list[int]]:
    """Numbers of the missing attempts, by position of their task; tasks without a missing one are left out."""
    done = {(item.position, item.attempt) for item in known if item.model == job.model and item.success is not None}
    wanted = {
        position: [number for number in range(job.group.group_size) if (position, number) not in done]
        for position in range(len(job.tasks))
    }
    return {position: numbers for position, numbers in wanted.items() if numbers}


def parse_attempts(records: Iterable[Mapping[str, object]]) -> list[Attempt]:
    """Attempts from lines of attempts.jsonl, the last of each; raises `ConfigError` if a line is not an attempt."""
    names = {field.name for field in fields(Attempt)}
    attempts: dict[tuple[str, int, int], Attempt] = {}
    for record in records:
        if not names - {"judgement", "rollout_id"} <= set(record) <= names:
            raise ConfigError(
                f"expected lines of attempts.jsonl with the keys {sorted(names)!r}, got {sorted(record)!r}; "
                "it was edited or is of another version: start again with behavior_if_log_dir_exists=overwrite"
            )
        attempt = Attempt(**record)  # type: ignore[arg-type]
        attempts[attempt.model, attempt.position, attempt.attempt] = attempt
    return list(attempts.values())


def attempts_of(group: RolloutGroup, task: Task, model: str) -> list[Attempt]:
    """What the rollouts of a group say about each attempt, of which the last try counts."""
    tries: dict[int, list[Rollout]] = defaultdict(list)
    for rollout in (*group.faulty, *group.rollouts):
        tries[rollout.member_index].append(rollout)
    return [_attempt(rollouts, group.index, task, model) for _, rollouts in sorted(tries.items())]


def outcomes_by_position(attempts: Iterable[Attempt], model: str) -> dict[int, TaskOutcomes]:
    """Outcomes of a model's attempts, by position in the task set; a later one replaces an earlier one."""
    latest = {(item.attempt, item.position): item for item in attempts if item.model == model}
    by_position: dict[int, list[Attempt]] = {}
    for _, attempt in sorted(latest.items(), key=lambda entry: entry[0]):
        by_position.setdefault(attempt.position, []).append(attempt)
    return {position: task_outcomes(of_task) for position, of_task in sorted(by_position.items())}


def task_outcomes(attempts: Sequence[Attempt]) -> TaskOutcomes:
    """Outcomes of all attempts at a task."""
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


def _attempt(tries: Sequence[Rollout], position: int, task: Task, model: str) -> Attempt:
    last = tries[-1]
    judgement: dict[str, object] | None = None
    if (said := last.judgement) is not None:
        judgement = {name: value for name, value in asdict(said).items() if name != "prompt"}
        judgement |= {"success": said.success, "agreement": said.agreement, "reason": said.reason}
    return Attempt(
        model=model,
        position=position,
        task_id=task.task_id,
        seed=task.seed,
        attempt=last.member_index,
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
        rollout_id=last.rollout_id,
    )
