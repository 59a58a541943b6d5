"""Steps of asynchronous training as rows: which groups a step trains is known only when its batch is taken."""

from datetime import datetime

from sqlalchemy import Connection, select, update

from cua_rl.database.models import Group, Step
from cua_rl.database.rows import Scope, advance_status, require_source
from cua_rl.errors import DatabaseError
from cua_rl.events import BatchTaken, RolloutSource


def write_batch(connection: Connection, scope: Scope, event: BatchTaken, at: datetime) -> None:
    """Give the groups of a batch to the step that trains them."""
    step_id = require_source(connection, scope, RolloutSource(phase="step", step=event.step)).id
    mine = [Group.training_id == scope.require_training(), Group.group_id.in_(event.group_ids)]
    rows = connection.execute(
        select(Group.id, Group.task_pk).where(*mine, Group.step_id.is_not(None)).order_by(Group.group_index)
    ).all()
    if len(rows) != len(event.group_ids):
        raise DatabaseError(f"expected {len(event.group_ids)} recorded groups in step {event.step}, got {len(rows)}")
    connection.execute(update(Group).where(Group.id.in_([row.id for row in rows])).values(step_id=step_id))
    connection.execute(
        update(Step)
        .where(Step.id == step_id)
        .values(
            num_groups=len(rows),
            num_ended_groups=len(rows),
            task_pks=[row.task_pk for row in rows if row.task_pk is not None],
        )
    )
    advance_status(connection, Step, step_id, "training", at, rollouts_ended_at=at)


def begin_again(connection: Connection, scope: Scope, step_id: int) -> None:
    """Take back what an earlier attempt made of a step, except its groups."""
    connection.execute(
        update(Step)
        .where(Step.id == step_id)
        .values(
            attempt_id=scope.attempt_id,
            status="rollouts",
            trained_policy_version=None,
            task_pks=[],
            datums_sha256=None,
            num_datums=None,
            metrics=None,
            rollouts_ended_at=None,
            ended_at=None,
        )
    )
