"""Queries about failures: stop reasons of rollouts, unparseable answers, faults."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, Text, and_, case, func, literal_column, select

from cua_rl.database.models import Eval, Group, RolloutRow, Step, TurnRow
from cua_rl.monitor import schemas
from cua_rl.monitor.databases import AnySelect, RunAccess

_MAX_MESSAGES = 100
# a UUID, a hexadecimal id of six or more digits with a decimal one among them or of eight letters, a number
_HEX = "[0-9a-fA-F]"
_VARYING = (
    rf"'(?<![0-9A-Za-z])({_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"
    rf"|0x{_HEX}+|(?=[a-fA-F]*[0-9]){_HEX}{{6,}}|[a-f]{{8,}})(?![0-9A-Za-z])|[0-9]+'"
)
_Counts = Sequence[tuple[int, str, int]]  # step, kind, count


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
    return schemas.Failures(
        training=await _count_failures(run, Step, Group.step_id),
        evaluations=await _count_failures(run, Eval, Group.eval_id),
        errors=[
            schemas.ErrorCount(message=text, count=count, last_rollout_id=ids[last]) for text, count, last, _ in rows
        ],
        num_messages=rows[0][-1] if rows else 0,
    )


async def _count_failures(run: RunAccess, table: type[Step] | type[Eval], parent: Any) -> schemas.FailureCounts:
    """Counts by the `table` that groups belong to."""

    def of_source(query: AnySelect) -> AnySelect:
        joined = query.join(Group, RolloutRow.group_pk == Group.id).join(table, parent == table.id)
        return joined.where(Group.training_id == run.training.id, RolloutRow.status.in_(("completed", "failed")))

    is_success = func.coalesce(RolloutRow.success, literal_column("false"))
    is_fault = RolloutRow.status == "failed"  # says nothing about the policy
    kind = case(
        (is_fault, literal_column("'fault'", Text())),
        (is_success, literal_column("'success'", Text())),
        else_=failure_kind(),
    ).label("kind")
    ends = of_source(select(table.step, kind, func.count()).select_from(RolloutRow)).group_by(table.step, kind)
    failed = and_(TurnRow.rollout_pk == RolloutRow.id, TurnRow.failure_kind.is_not(None))
    turns = of_source(select(table.step, TurnRow.failure_kind, func.count()).select_from(RolloutRow))
    turns = turns.join(TurnRow, failed).group_by(table.step, TurnRow.failure_kind)
    ended: _Counts = [(step, name, count) for step, name, count in await run.session.execute(ends)]
    unread: _Counts = [(step, name, count) for step, name, count in await run.session.execute(turns)]
    totals = Counter[int]()
    for step, name, count in ended:
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
    known = {(step, kind): count for step, kind, count in counts}
    return {kind: [known.get((step, kind), 0) for step in steps] for kind in sorted({kind for _, kind in known})}
