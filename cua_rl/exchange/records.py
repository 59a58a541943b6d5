"""A recorded run as plain data, read from the database: steps and evaluations, and a record per rollout."""

from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.columns import unescape_text
from cua_rl.database.models import Eval, Group, Replay, RolloutRow, Step, TaskRow, Training, TurnRow
from cua_rl.database.rebuild import load_groups_by_key
from cua_rl.events import Phase
from cua_rl.types.errors import DatabaseError
from cua_rl.types.rollout import Rollout

Logprobs = tuple[float, ...]
_IS_WHOLE = RolloutRow.pruned_at.is_(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """The definition of a task instance."""

    task_id: str
    seed: int
    instruction: str
    category: str
    difficulty: str
    max_turns: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRecord:
    """A rollout of an earlier step that a group was compared with."""

    group_id: str
    rollout_id: str
    advantage: float
    turn_advantages: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """A step or evaluation. Times are Unix seconds."""

    phase: Phase
    step: int
    status: str
    policy_version: int
    group_size: int
    tasks: tuple[TaskRecord, ...]
    started_at: float
    ended_at: float | None = None
    trained_policy_version: int | None = None
    datums_sha256: str | None = None
    """Fingerprint of what was trained; empty for trajectories that were never trained on here. None if some of it was
    pruned."""
    num_datums: int | None = None
    metrics: Mapping[str, float] | None = None
    replays: tuple[ReplayRecord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run without its rollouts."""

    run_name: str
    config: Mapping[str, object]
    image_token_id: int
    total_steps: int
    status: str
    error: str | None
    started_at: float
    ended_at: float | None
    sources: tuple[SourceRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRecord:
    """A rollout, where it belongs, and what training made of it."""

    phase: Phase
    step: int
    group_id: str
    task: TaskRecord
    rollout: Rollout
    advantage: float | None = None
    turn_advantages: tuple[float, ...] = ()
    """One per turn; empty if every turn has the rollout's."""
    training_logprobs: tuple[Logprobs | None, ...] = field(default=())
    """One entry per turn; None where the trainer did not see the turn."""

    @property
    def group(self) -> tuple[str, int, str]:
        """What the rollouts of a group have in common."""
        return self.phase, self.step, self.group_id


async def load_run(session: AsyncSession, training_id: int, *, step: int | None = None) -> RunRecord:
    """A run with all its steps and evaluations, or with one step; raises `DatabaseError` if there is none."""
    training = await session.get(Training, training_id)
    if training is None:
        raise DatabaseError(f"expected training {training_id} in the database, got no row")
    steps = select(Step).where(Step.training_id == training_id, Step.status != "cancelled")
    rows: list[Step | Eval] = list(await session.scalars(steps if step is None else steps.where(Step.step == step)))
    if step is None:
        rows += await session.scalars(select(Eval).where(Eval.training_id == training_id))
    sources = [await _load_source(session, row) for row in rows]
    return RunRecord(
        run_name=training.run_name,
        config=training.config,
        image_token_id=training.image_token_id,
        total_steps=training.total_steps,
        status=training.status,
        error=training.error,
        started_at=training.started_at.timestamp(),
        ended_at=_unix(training.ended_at),
        # an evaluation at step N follows the training of step N
        sources=tuple(sorted(sources, key=lambda source: (source.step, source.phase != "step"))),
    )


async def load_rollout_records(
    session: AsyncSession, training_id: int, source: SourceRecord
) -> AsyncGenerator[list[RolloutRecord]]:
    """The rollouts of each ended group of a step or evaluation, in order; those with a reward come first, and those
    whose screenshots, or their parent's, were pruned are left out: siblings alone would count as whole rollouts.
    """
    mine = Group.step_id == Step.id if source.phase == "step" else Group.eval_id == Eval.id
    table = Step if source.phase == "step" else Eval
    query = select(Group).join(table, mine).where(table.training_id == training_id, table.step == source.step)
    if source.phase != "step":
        query = query.where(Eval.phase == source.phase)
    rows = (await session.scalars(query.where(Group.status == "completed").order_by(Group.group_index, Group.id))).all()
    for row in rows:
        (group,) = await load_groups_by_key(session, [row], _IS_WHOLE)
        facts = {
            fact.rollout_id: fact
            for fact in await session.execute(
                select(RolloutRow.id, RolloutRow.rollout_id, RolloutRow.advantage, RolloutRow.turn_advantages).where(
                    RolloutRow.group_pk == row.id
                )
            )
        }
        pruned = facts.keys() - {rollout.rollout_id for rollout in (*group.rollouts, *group.faulty)}
        logprobs: dict[int, dict[int, Logprobs | None]] = defaultdict(dict)
        turns = select(TurnRow.rollout_pk, TurnRow.turn_index, TurnRow.training_logprobs)
        for key, index, values in await session.execute(
            turns.where(TurnRow.rollout_pk.in_([fact.id for fact in facts.values()]))
        ):
            logprobs[key][index] = None if values is None else tuple(values)
        task = await session.get(TaskRow, row.task_pk) if row.task_pk is not None else None
        records = [
            RolloutRecord(
                phase=source.phase,
                step=source.step,
                group_id=group.group_id,
                task=_unknown_task(rollout) if task is None else _task_record(task),
                rollout=rollout,
                advantage=facts[rollout.rollout_id].advantage,
                turn_advantages=tuple(facts[rollout.rollout_id].turn_advantages or ()),
                training_logprobs=tuple(logprobs[facts[rollout.rollout_id].id][turn.index] for turn in rollout.turns),
            )
            for rollout in (*group.rollouts, *group.faulty)
            if rollout.parent_id not in pruned
        ]
        session.expunge_all()  # what was written need not be kept
        yield records


async def _load_source(session: AsyncSession, row: Step | Eval) -> SourceRecord:
    is_step = isinstance(row, Step)
    tasks = {task.id: task for task in await session.scalars(select(TaskRow).where(TaskRow.id.in_(row.task_pks)))}
    replays: Sequence[ReplayRecord] = ()
    fingerprint: str | None = None
    if is_step:
        pruned = select(RolloutRow.id).join(Group, RolloutRow.group_pk == Group.id).where(~_IS_WHOLE)
        fingerprint = row.datums_sha256
        if await session.scalar(pruned.where(Group.step_id == row.id).limit(1)) is not None:
            fingerprint = None
        query = (
            select(Group.group_id, RolloutRow.rollout_id, Replay.advantage, Replay.turn_advantages)
            .join(Group, Replay.group_pk == Group.id)
            .join(RolloutRow, Replay.rollout_pk == RolloutRow.id)
            .where(Group.step_id == row.id, _IS_WHOLE)
            .order_by(Replay.group_pk, Replay.position)
        )
        replays = [
            ReplayRecord(
                group_id=group_id, rollout_id=rollout_id, advantage=advantage, turn_advantages=tuple(of_turns or ())
            )
            for group_id, rollout_id, advantage, of_turns in await session.execute(query)
        ]
    return SourceRecord(
        phase="step" if is_step else row.phase,
        step=row.step,
        status=row.status,
        policy_version=row.policy_version,
        group_size=row.group_size,
        tasks=tuple(_task_record(tasks[key]) for key in row.task_pks),
        started_at=row.started_at.timestamp(),
        ended_at=_unix(row.ended_at),
        trained_policy_version=row.trained_policy_version if is_step else None,
        datums_sha256=fingerprint,
        num_datums=row.num_datums if is_step else None,
        metrics=row.metrics,
        replays=tuple(replays),
    )


def _task_record(row: TaskRow) -> TaskRecord:
    return TaskRecord(
        task_id=row.task_id,
        seed=row.seed,
        instruction=row.instruction,
        category=row.category,
        difficulty=row.difficulty,
        max_turns=row.max_turns,
        tags=tuple(map(unescape_text, row.tags)),
    )


def _unknown_task(rollout: Rollout) -> TaskRecord:
    """A run of another program may have sent no definition of its tasks."""
    return TaskRecord(
        task_id=rollout.task_id,
        seed=rollout.seed,
        instruction=rollout.task_id,
        category="app",
        difficulty="medium",
        max_turns=max(1, len(rollout.turns)),
        tags=(),
    )


def _unix(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()
