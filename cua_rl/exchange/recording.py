"""Writes records into a database as a run would have, with the recorded times."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from cua_rl.database.rows import Scope
from cua_rl.database.session import make_writer_engine
from cua_rl.database.writer import TimedEvent, write_events
from cua_rl.events import (
    EvaluationEnded,
    Event,
    GroupEnded,
    RolloutSource,
    RolloutStarted,
    SourceStarted,
    StepTrained,
    TrainingEnded,
    TrainingStarted,
)
from cua_rl.exchange.records import RolloutRecord, RunRecord, SourceRecord, TaskRecord
from cua_rl.tasks.task import Category, Difficulty, Task
from cua_rl.types.errors import ConfigError, DatabaseError, boundary
from cua_rl.types.rollout import Rollout, RolloutGroup

TrainingLogprobs = tuple[tuple[int, tuple[float, ...]], ...]
"""(turn, the trainer's log-probabilities of its sampled tokens)."""


class RunWriter:
    """Writes a run into a database, step by step; a context manager. Blocking."""

    def __init__(self, url: str, run: RunRecord, log_path: Path) -> None:
        self._engine = make_writer_engine(url)
        self._scope = Scope(image_token_id=run.image_token_id)
        self._run = run
        self._log_path = log_path
        self._replayed = {replay.rollout_id for source in run.sources for replay in source.replays}
        self._kept: dict[str, Rollout] = {}
        self.num_rollouts = 0
        self.num_turns = 0

    def write(self, source: SourceRecord, records: Iterable[RolloutRecord]) -> None:
        """Add a step or evaluation, whose rollouts come group by group; raises `DatabaseError`."""
        self._write([_at(source.started_at, _source_started(source))])
        logprobs: dict[str, TrainingLogprobs] = {}
        for _, group in groupby(records, key=lambda record: record.group_id):
            members = list(group)
            for member in members:
                rollout = member.rollout
                if rollout.rollout_id in self._replayed:
                    self._kept[rollout.rollout_id] = rollout
                if any(values is not None for values in member.training_logprobs):
                    logprobs[rollout.rollout_id] = _training_logprobs(member)
                self.num_rollouts += 1
                self.num_turns += len(rollout.turns)
            self._write(_group_events(source, members, self._kept))
        if source.status == "completed":
            self._write([_at(source.ended_at or source.started_at, _source_ended(source, logprobs))])

    def __enter__(self) -> Self:
        started = TrainingStarted(
            run_name=self._run.run_name,
            log_path=str(self._log_path),
            config=self._run.config,
            first_step=1,
            total_steps=self._run.total_steps,
        )
        self._write([_at(self._run.started_at, started)])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                status = self._run.status if self._run.status in ("failed", "cancelled") else "completed"
                ended = TrainingEnded(status=status, error=self._run.error)
                self._write([_at(self._run.ended_at or self._run.started_at, ended)])
        finally:
            self._engine.dispose()

    def _write(self, events: list[TimedEvent]) -> None:
        with boundary(DatabaseError, "write imported rollouts"), self._engine.begin() as connection:
            self._scope = write_events(connection, self._scope, events)


def write_run(url: str, run: RunRecord, log_path: Path, records: Iterable[RolloutRecord]) -> RunWriter:
    """Write a run; raises `ConfigError` unless the rollouts come in the order of its sources."""
    stream = groupby(records, key=lambda record: (record.phase, record.step))
    current = next(stream, None)
    with RunWriter(url, run, log_path) as writer:
        for source in run.sources:
            if current is not None and current[0] == (source.phase, source.step):
                writer.write(source, current[1])
                current = next(stream, None)
            else:
                writer.write(source, ())
        if current is not None:
            raise ConfigError(
                f"expected rollouts of the steps in run.json, in their order, got {current[0]!r}; export the run again"
            )
    return writer


def _at(unix_s: float, event: Event) -> TimedEvent:
    return TimedEvent(event=event, at=datetime.fromtimestamp(unix_s, UTC))


def _source_of(source: SourceRecord) -> RolloutSource:
    return RolloutSource(phase=source.phase, step=source.step)


def _source_started(source: SourceRecord) -> SourceStarted:
    return SourceStarted(
        source=_source_of(source),
        tasks=tuple(map(make_task, source.tasks)),
        group_size=source.group_size,
        policy_version=source.policy_version,
    )


def _source_ended(source: SourceRecord, logprobs: Mapping[str, TrainingLogprobs]) -> Event:
    if source.phase != "step":
        return EvaluationEnded(source=_source_of(source), metrics=source.metrics or {})
    return StepTrained(
        step=source.step,
        policy_version=source.trained_policy_version or 0,
        datums_sha256=source.datums_sha256 or "",
        num_datums=source.num_datums or 0,
        training_logprobs=logprobs,
        metrics=source.metrics or {},
    )


def _training_logprobs(member: RolloutRecord) -> TrainingLogprobs:
    turns = zip(member.rollout.turns, member.training_logprobs, strict=True)
    return tuple((turn.index, values) for turn, values in turns if values is not None)


def _group_events(
    source: SourceRecord, members: Sequence[RolloutRecord], kept: Mapping[str, Rollout]
) -> list[TimedEvent]:
    first = members[0]
    group_id, task = first.group_id, make_task(first.task)
    replays = [replay for replay in source.replays if replay.group_id == group_id]
    missing = [replay.rollout_id for replay in replays if replay.rollout_id not in kept]
    if missing:
        raise ConfigError(
            f"expected the rollouts {missing[:3]!r}, which step {source.step} replays, among earlier ones, got none; "
            "export all steps of the run"
        )
    scored = [member for member in members if member.rollout.reward is not None]
    advantages = [member.advantage for member in scored if member.advantage is not None]
    group = RolloutGroup(
        group_id=group_id,
        index=first.rollout.group_index,
        task_id=first.rollout.task_id,
        seed=first.rollout.seed,
        rollouts=tuple(member.rollout for member in scored),
        faulty=tuple(member.rollout for member in members if member.rollout.reward is None),
        replayed=tuple(kept[replay.rollout_id] for replay in replays),
        category=first.task.category,
    )
    has_advantages = 0 < len(advantages) == len(scored)
    of_all = (*advantages, *(replay.advantage for replay in replays))
    of_turns = (*(member.turn_advantages for member in scored), *(replay.turn_advantages for replay in replays))
    ended = GroupEnded(
        source=_source_of(source), group=group, advantages=of_all if has_advantages else None, turn_advantages=of_turns
    )
    starts = [_rollout_started(source, member, task) for member in members if member.rollout.device_id is not None]
    end = max(member.rollout.started_at + member.rollout.duration_s for member in members)
    return [*starts, _at(end, ended)]


def _rollout_started(source: SourceRecord, member: RolloutRecord, task: Task) -> TimedEvent:
    rollout = member.rollout
    started = RolloutStarted(
        source=_source_of(source),
        rollout_id=rollout.rollout_id,
        group_id=member.group_id,
        group_index=rollout.group_index,
        member_index=rollout.member_index,
        task=task,
        device_id=rollout.device_id or "",
        max_turns=rollout.max_turns or task.max_turns,
        parent_id=rollout.parent_id,
        fork_turn=rollout.fork_turn,
    )
    return _at(rollout.started_at, started)


def make_task(record: TaskRecord) -> Task:
    """The task instance, without set-up and validation."""
    return Task(
        task_id=record.task_id,
        seed=record.seed,
        instruction=record.instruction,
        category=cast("Category", record.category),
        difficulty=cast("Difficulty", record.difficulty),
        max_turns=record.max_turns,
        tags=record.tags,
        validate=None,
    )
