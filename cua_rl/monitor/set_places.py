"""Goes through a set rollout by rollout: the previous and the next one in the set's order."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, literal, select, tuple_

from cua_rl.database.models import RolloutRow
from cua_rl.monitor.databases import AnySelect, RunAccess
from cua_rl.monitor.rollout_queries import find_rollout, sort_number
from cua_rl.monitor.rollout_sets import RolloutFilter, RunsOfDatabase, conditions
from cua_rl.monitor.set_schemas import RolloutRef, SetPlace

_Found = tuple[Any, int, RolloutRef]  # what the set is sorted by, key in the database, which rollout


async def load_place(
    run: RunAccess, rollout_id: str, runs: Sequence[RunsOfDatabase], wanted: RolloutFilter, sort: str
) -> SetPlace:
    """The rollout's place in a set, from which a verdict may have taken it; raises `NotFoundError`."""
    row = await find_rollout(run, rollout_id)
    falls, by_time = sort.startswith("-"), sort.removeprefix("-") == "started"
    value = RolloutRow.started_at if by_time else sort_number(sort)
    mine = await run.session.scalar(select(value).where(RolloutRow.id == row.id))
    num_before, num_rollouts, is_member = 0, 0, False
    before: list[_Found] = []
    after: list[_Found] = []
    for one in runs:
        members, is_own = conditions(one, wanted), one.database is run.database
        # as in the table: what has begun in one database is in the order of its ids, which say nothing to another one
        keys, place = ((RolloutRow.id,), (row.id,)) if by_time and is_own else ((value, RolloutRow.id), (mine, row.id))
        at, here = tuple_(*keys), tuple_(*map(literal, place))
        is_before, is_after = (at > here, at < here) if falls else (at < here, at > here)
        is_self = func.count().filter(RolloutRow.id == row.id)
        counts = select(func.count().filter(is_before), func.count(), is_self).select_from(RolloutRow).where(*members)
        first, every, same = (await one.session.execute(counts)).one()
        num_before, num_rollouts = num_before + first, num_rollouts + every
        is_member = is_member or (is_own and same > 0)
        for found, side, rises in ((before, is_before, falls), (after, is_after, not falls)):
            query: AnySelect = select(value, RolloutRow.id, RolloutRow.training_id, RolloutRow.rollout_id)
            order = [part.asc() if rises else part.desc() for part in keys]
            for at_value, number, training_id, name in await one.session.execute(
                query.where(*members, side).order_by(*order).limit(1)
            ):
                ref = RolloutRef(run_id=one.database.run_id(training_id), rollout_id=name)
                found.append((at_value, number, ref))
    previous, following = (
        (min if rises else max)(found, key=lambda one: one[:2], default=None)
        for found, rises in ((before, falls), (after, not falls))
    )
    return SetPlace(
        num_before=num_before,
        num_rollouts=num_rollouts,
        is_member=is_member,
        previous=None if previous is None else previous[2],
        next=None if following is None else following[2],
    )
