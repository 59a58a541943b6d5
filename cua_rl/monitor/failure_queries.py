"""Queries about failures: stop reasons of rollouts, unparseable answers, faults."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, case, func, literal_column, select

from cua_rl.database.models import Eval, Group, RolloutRow, Step, TurnRow
from cua_rl.monitor import schemas
from cua_rl.monitor.databases import RunAccess

_MAX_MESSAGES = 100
# a UUID, a hexadecimal id of six or more digits with a decimal one among them or of eight letters, a number
_HEX = "[0-9a-fA-F]"
_VARYING = (
    rf"'(?<![0-9A-Za-z])({_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
    rf"|0x{_HEX}+|(?=[a-fA-F]*[0-9]){_HEX}{{6,}}|[a-f]{{8,}})(?![0-9A-Za-z])|[0-9]+'"
)
_Counts = Mapping[tuple[int, str], int]  # by step and kind


def failure_kind() -> ColumnElement[str]:
    """Why a rollout failed: its stop reason, or `wrong_final_state` if it finished and the validator disagreed."""
    ended, judged = RolloutRow.stop_reason, RolloutRow.success.is_not(None)
    return case(
        (and_(ended == literal_column("'finished'"), judged), literal_column("'wrong_final_state'", Text())),
        else_=func.coalesce(ended, literal_column("'cancelled'")),
    )


async def load_failures(run: RunAccess) -> schemas.Failures:
    """Failures of training steps and evaluations, counted apart because the baseline fails differently."""
    # the most frequent fault messages; ids, addresses and times do not split them
    message = func.left(
        func.regexp_replace(
            func.left(RolloutRow.error, literal_column("1000")),
            literal_column(_VARYING),
            literal_column("'#'"),
            literal_column("'g'"),
        ),
        literal_column("300"),
    )
    query = (
        select(message, func.count(), func.max(RolloutRow.id), func.count().over())
        .where(RolloutRow.training_id == run.training.id, RolloutRow.error.is_not(None))
        .group_by(message)
        .order_by(func.count().desc())
        .limit(_MAX_MESSAGES)
    )
    rows = (await run.session.execute(query)).all()
    keys = [last for _, _, last, _ in rows]
    names = select(RolloutRow.id, RolloutRow.rollout_id).where(RolloutRow.id.in_(keys))
    ids = {row.id: row.rollout_id for row in await run.session.execute(names)}
    is_fault = RolloutRow.status == "failed"  # says nothing about the policy
    kind = case(
        (is_fault, literal_column("'fault'", Text())),
        (func.coalesce(RolloutRow.success, literal_column("false")), literal_column("'success'", Text())),
        else_=failure_kind(),
    )
    failed = and_(TurnRow.rollout_pk == RolloutRow.id, TurnRow.failure_kind.is_not(None))
    ended, unread = await _count(run, kind), await _count(run, TurnRow.failure_kind, (TurnRow, failed))
    return schemas.Failures(
        training=_failure_counts(_of_source(ended, 0), _of_source(unread, 0)),
        evaluations=_failure_counts(_of_source(ended, 1), _of_source(unread, 1)),
        errors=[
            schemas.ErrorCount(message=text, count=count, last_rollout_id=ids[last]) for text, count, last, _ in rows
        ],
        num_messages=rows[0][-1] if rows else 0,
    )


async def _count(run: RunAccess, kind: Any, *joins: tuple[Any, Any]) -> Sequence[Any]:
    """Step, evaluation's step, kind and number of ended rollouts, or of what is joined with them; one look for both."""
    counts = select(Group.step_id, Group.eval_id, kind.label("kind"), func.count().label("num"))
    counts = counts.select_from(RolloutRow).join(Group, RolloutRow.group_pk == Group.id)
    for table, condition in joins:
        counts = counts.join(table, condition)
    counts = counts.where(Group.training_id == run.training.id, RolloutRow.status.in_(("completed", "failed")))
    found = counts.group_by(Group.step_id, Group.eval_id, kind).subquery()
    query = select(Step.step, Eval.step, found.c.kind, found.c.num).select_from(found)
    query = query.outerjoin(Step, Step.id == found.c.step_id).outerjoin(Eval, Eval.id == found.c.eval_id)
    return (await run.session.execute(query)).all()


def _of_source(rows: Sequence[Any], place: int) -> _Counts:
    counts = Counter[tuple[int, str]]()
    for row in rows:
        if row[place] is not None:
            counts[row[place], row[2]] += row[3]
    return counts


def _failure_counts(ended: _Counts, unread: _Counts) -> schemas.FailureCounts:
    totals = Counter[int]()
    for (step, name), count in ended.items():
        totals[step] += count if name != "fault" else 0
    steps = sorted(totals)
    by_end = _by_kind(steps, ended)
    successes, faults = (by_end.pop(name, [0] * len(steps)) for name in ("success", "fault"))
    return schemas.FailureCounts(
        steps=steps,
        num_rollouts=[totals[step] for step in steps],
        num_successes=successes,
        num_faults=faults,
        kinds=by_end,
        turn_failures=_by_kind(steps, unread),
    )


def _by_kind(steps: Sequence[int], counts: _Counts) -> dict[str, list[int]]:
    return {kind: [counts.get((step, kind), 0) for step in steps] for kind in sorted({kind for _, kind in counts})}
