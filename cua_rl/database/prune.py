"""Removes screenshots of rollouts, or rollouts as a whole, while runs write.

`rollout_images` says which rollouts show an image; a pruned rollout has no row there, and an image without a row loses
its bytes. Writers lock the images that a new turn shows until they commit. An image is removed under a lock that waits
for nobody and excludes theirs, after a second look: whoever shows it again meanwhile finds it missing and sends it.
"""

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Any, Literal

from sqlalchemy import Connection, Engine, Select, Text, any_, delete, exists, func, literal, or_, select, text, update
from sqlalchemy.dialects.postgresql import ARRAY

from cua_rl.database.models import Checkpoint, Eval, Group, Replay, RolloutImage, RolloutRow, Screenshot, Step, Training
from cua_rl.database.models import TurnRow as Turn
from cua_rl.database.monitor_models import NoteRow, RolloutOverride
from cua_rl.database.screenshots import SCREENSHOT_BYTES, require_store

Keep = Literal["failures", "successes", "none"]
Removed = tuple[int, int]
"""A number of screenshots, and of their bytes."""

_LOOKED_UP, _BATCH = 100_000, 500  # screenshots in memory by their hashes, and in a transaction
_IS_UNUSED = ~exists().where(RolloutImage.sha256 == Screenshot.sha256)
_IS_UNNAMED = ~or_(*(exists().where(column == Screenshot.sha256) for column in (Turn.before_sha256, Turn.after_sha256)))


def choose_rollouts(
    training_id: int, *, keep: Keep, ended_before: datetime | None, before_step: int | None, is_deleting: bool
) -> Select[int]:
    """The keys of a run's rollouts that may be pruned.

    Left out are running ones, those that a person has judged or noted, those that a resumed run may train on (it goes
    on from its newest checkpoint), and, of those that would be deleted, the ones that a later group replayed.
    """
    saved = select(func.max(Checkpoint.step)).where(Checkpoint.training_id == training_id).scalar_subquery()
    is_over = or_(Training.status == "completed", Training.image_token_id == 0, Eval.status == "completed")
    conditions = [
        RolloutRow.training_id == training_id,
        RolloutRow.status != "running",
        or_(is_over, Step.step <= saved),
        ~exists().where(RolloutOverride.rollout_pk == RolloutRow.id),
        ~exists().where(NoteRow.rollout_pk == RolloutRow.id),
        ~exists().where(Replay.rollout_pk == RolloutRow.id) if is_deleting else RolloutRow.pruned_at.is_(None),
    ]
    if keep != "none":
        conditions.append(RolloutRow.success.is_(True) if keep == "failures" else RolloutRow.success.is_not(True))
    if ended_before is not None:
        conditions.append(RolloutRow.ended_at < ended_before)
    if before_step is not None:
        conditions.append(func.coalesce(Step.step, Eval.step) < before_step)
    query = select(RolloutRow.id).join(Training, RolloutRow.training_id == Training.id)
    query = query.join(Group, RolloutRow.group_pk == Group.id).outerjoin(Step, Group.step_id == Step.id)
    return query.outerjoin(Eval, Group.eval_id == Eval.id).where(*conditions).order_by(RolloutRow.id)


def measure(connection: Connection, rollouts: Select[int]) -> Removed:
    """What pruning these rollouts would remove: the screenshots that no other rollout shows."""
    chosen = rollouts.cte("chosen")
    kept = select(RolloutImage.sha256).outerjoin(chosen, chosen.c.id == RolloutImage.rollout_pk)
    gone = select(Screenshot.sha256).where(Screenshot.removed_at.is_(None))
    gone = gone.except_(kept.where(chosen.c.id.is_(None))).subquery()
    total = select(func.count(), func.coalesce(func.sum(SCREENSHOT_BYTES), 0)).select_from(Screenshot)
    num_images, num_bytes = connection.execute(total.join(gone, gone.c.sha256 == Screenshot.sha256)).one()
    return num_images, num_bytes


def prune_rollouts(connection: Connection, keys: Sequence[int], *, is_deleting: bool) -> Removed:
    """Remove the screenshots of rollouts, or the rollouts with them; the caller commits."""
    mine = literal(list(keys), ARRAY(RolloutRow.id.type))
    images = delete(RolloutImage).where(RolloutImage.rollout_pk == any_(mine)).returning(RolloutImage.sha256)
    noted = update(RolloutRow).values(pruned_at=func.now(), updated_at=RolloutRow.updated_at)
    shown = set(connection.scalars(images))
    if is_deleting:  # what is left of a step is not what it was trained on
        incomplete = select(Group.step_id).join(RolloutRow, RolloutRow.group_pk == Group.id)
        incomplete = incomplete.where(RolloutRow.id == any_(mine))
        are_whole = (Step.id.in_(incomplete), Step.datums_sha256.is_not(None))
        connection.execute(update(Step).where(*are_whole).values(datums_sha256=None))
    connection.execute((delete(RolloutRow) if is_deleting else noted).where(RolloutRow.id == any_(mine)))
    return _remove_unused(connection, shown)


def prune_unused(engine: Engine) -> Iterator[Removed]:
    """Remove screenshots that no rollout shows, a short transaction for each step of the iteration.

    Those of the last hour stay: another system may have sent one before the turn that shows it.
    """
    is_old = Screenshot.created_at < func.now() - text("interval '1 hour'")
    is_wanted = (is_old, _IS_UNUSED, or_(Screenshot.removed_at.is_(None), _IS_UNNAMED))
    query = select(Screenshot.sha256).where(*is_wanted).order_by(Screenshot.sha256).limit(_LOOKED_UP)
    found: Sequence[str] = [""]
    while found:
        with engine.begin() as connection:  # this looks at all of them, however few are found
            found = connection.scalars(query.where(Screenshot.sha256 > found[-1])).all()
        for start in range(0, len(found), _BATCH):
            with engine.begin() as connection:
                removed = _remove_unused(connection, found[start : start + _BATCH])
            yield removed
        if len(found) < _LOOKED_UP:
            return


def _remove_unused(connection: Connection, hashes: Collection[str]) -> Removed:
    """Remove the bytes of those of these images that no rollout shows; of those that no turn names, the row."""
    are_these = Screenshot.sha256 == any_(literal(list(hashes), ARRAY(Text())))
    query = select(Screenshot.sha256, Screenshot.data.is_(None)).where(are_these, _IS_UNUSED)
    rows = connection.execute(query.order_by(Screenshot.sha256).with_for_update(of=Screenshot, skip_locked=True))
    is_outside = {digest: outside for digest, outside in rows}  # noqa: C416 - a row is no pair to pyright
    # a turn that shows one may have been committed between the first look and the lock
    are_locked = Screenshot.sha256 == any_(literal(list(is_outside), ARRAY(Text())))
    is_whole = Screenshot.removed_at.is_(None)
    delete_rows = delete(Screenshot).where(are_locked, _IS_UNUSED, _IS_UNNAMED)
    removed: list[Any] = [*connection.execute(delete_rows.returning(Screenshot.sha256, SCREENSHOT_BYTES, is_whole))]
    if left := is_outside.keys() - {row.sha256 for row in removed}:
        without = {"data": None, "size_bytes": SCREENSHOT_BYTES, "removed_at": func.now()}
        are_left = Screenshot.sha256 == any_(literal(list(left), ARRAY(Text())))
        empty_rows = update(Screenshot).where(are_left, _IS_UNUSED, is_whole).values(without)
        removed += connection.execute(empty_rows.returning(Screenshot.sha256, Screenshot.size_bytes, literal(True)))
    sizes: dict[str, int] = {digest: size or 0 for digest, size, had_bytes in removed if had_bytes}
    # before the commit: whoever waits for the lock writes the file again
    if outside := [digest for digest in sizes if is_outside[digest]]:
        require_store().remove(outside)
    return len(sizes), sum(sizes.values())


def shrink(engine: Engine) -> int:
    """Return free space to the file system; returns how many bytes. Gives up after 5 s if others use the tables."""
    size = text("SELECT pg_database_size(current_database())")
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        before = connection.execute(size).scalar_one()
        tables = ("screenshots", "rollout_images", "turns", "rollouts")
        vacuum = [f"VACUUM (FULL, ANALYZE) {table}" for table in tables]
        for statement in ("SET statement_timeout = 0", "SET lock_timeout = '5s'", *vacuum):
            connection.execute(text(statement))
        return before - connection.execute(size).scalar_one()
