"""Questions about what went wrong: stop reasons, answers that could not be understood, faults."""

from collections.abc import Mapping, Sequence

from sqlalchemy import and_, func, literal_column, select

from cua_rl.database.models import Group, RolloutRow, Step, TurnRow
from cua_rl.monitor import schemas
from cua_rl.monitor.databases import AnySelect, RunAccess

_MAX_MESSAGES = 20


def _of_steps(query: AnySelect, run: RunAccess) -> AnySelect:
    """Rollouts of training steps, with their step."""
    return (
        query.join(Group, RolloutRow.group_pk == Group.id)
        .join(Step, Group.step_id == Step.id)
        .where(Group.training_id == run.training.id)
    )


async def count_stop_reasons(run: RunAccess) -> dict[tuple[int, str], int]:
    """Rollouts by step and stop reason; those that ended without one count as "cancelled"."""
    reason = func.coalesce(RolloutRow.stop_reason, literal_column("'cancelled'"))
    query = _of_steps(select(Step.step, reason, func.count()).select_from(RolloutRow), run)
    query = query.where(RolloutRow.status != "running").group_by(Step.step, reason)
    return {(step, kind): count for step, kind, count in await run.session.execute(query)}


async def count_turn_failures(run: RunAccess) -> dict[tuple[int, str], int]:
    """Turns whose answer could not be understood, by step and kind."""
    query = _of_steps(select(Step.step, TurnRow.failure_kind, func.count()).select_from(RolloutRow), run)
    query = query.join(TurnRow, and_(TurnRow.rollout_pk == RolloutRow.id, TurnRow.failure_kind.is_not(None))).group_by(
        Step.step, TurnRow.failure_kind
    )
    return {(step, kind): count for step, kind, count in await run.session.execute(query)}


async def count_errors(run: RunAccess) -> list[schemas.ErrorCount]:
    """The most frequent fault messages; digits are taken out, so that addresses and times do not split them."""
    message = func.regexp_replace(
        func.left(RolloutRow.error, literal_column("300")),
        literal_column(r"'\d+'"),
        literal_column("'#'"),
        literal_column("'g'"),
    )
    query = (
        select(message, func.count(), func.max(RolloutRow.id))
        .where(RolloutRow.training_id == run.training.id, RolloutRow.error.is_not(None))
        .group_by(message)
        .order_by(func.count().desc())
        .limit(_MAX_MESSAGES)
    )
    rows = (await run.session.execute(query)).all()
    keys = [last for _, _, last in rows]
    names = select(RolloutRow.id, RolloutRow.rollout_id).where(RolloutRow.id.in_(keys))
    ids = {row.id: row.rollout_id for row in await run.session.execute(names)}
    return [schemas.ErrorCount(message=text, count=count, last_rollout_id=ids[last]) for text, count, last in rows]


async def load_failures(run: RunAccess) -> schemas.Failures:
    """Stop reasons and turn failures of training steps, per step."""
    reasons, turns = await count_stop_reasons(run), await count_turn_failures(run)
    steps = sorted({step for step, _ in reasons} | {step for step, _ in turns})
    return schemas.Failures(
        steps=steps,
        stop_reasons=_by_kind(steps, reasons),
        turn_failures=_by_kind(steps, turns),
        errors=await count_errors(run),
    )


def _by_kind(steps: Sequence[int], counts: Mapping[tuple[int, str], int]) -> dict[str, list[int]]:
    kinds = sorted({kind for _, kind in counts})
    return {kind: [counts.get((step, kind), 0) for step in steps] for kind in kinds}
