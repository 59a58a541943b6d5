"""Progress of a run, from the database: what a resumed run keeps and what it repeats."""

from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.models import Eval, Group, Replay, RolloutRow, Step, TurnRow
from cua_rl.database.rebuild import load_groups_by_key
from cua_rl.types.rollout import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The recorded progress of a run as of a checkpoint."""

    done_indices: tuple[int, ...]
    """`group_index` of every group that those steps trained."""
    untrained: tuple[tuple[RolloutGroup, int], ...]
    """Ended groups that no step before the resumed one has trained, each with the last step that may."""
    newest_steps: Mapping[int, int]
    """For each policy version, the last step after which it was the newest."""
    evaluated: frozenset[tuple[str, int]]
    """Phase and step of every completed evaluation."""


async def load_progress(session: AsyncSession, training_id: int, num_steps: int) -> Progress:
    """Progress after `num_steps` steps; groups sampled by later policies are left out."""
    steps = (
        await session.execute(
            select(Step.step, Step.trained_policy_version)
            .where(Step.training_id == training_id, Step.step <= num_steps, Step.status == "completed")
            .order_by(Step.step)
        )
    ).all()
    newest_steps = {0: 0} | {row.trained_policy_version: row.step for row in steps}
    done = await session.scalars(
        select(Group.group_index)
        .join(Step, Group.step_id == Step.id)
        .where(Step.training_id == training_id, Step.step <= num_steps)
    )
    evaluated = await session.execute(
        select(Eval.phase, Eval.step).where(Eval.training_id == training_id, Eval.status == "completed")
    )
    # ended groups of later steps, without those with replays, which refer to rollouts of other steps
    unknown_turn = (
        exists()
        .where(TurnRow.rollout_pk == RolloutRow.id, RolloutRow.group_pk == Group.id)
        .where(TurnRow.policy_version.not_in(list(newest_steps)))
    )
    query = (
        select(Group, Step.step)
        .join(Step, Group.step_id == Step.id)
        .where(Step.training_id == training_id, Step.step > num_steps, Group.status == "completed")
        .where(~unknown_turn, ~exists().where(Replay.group_pk == Group.id))
        .order_by(Group.ended_at, Group.group_index)
    )
    rows = (await session.execute(query)).all()
    groups = await load_groups_by_key(session, [group for group, _ in rows])
    return Progress(
        done_indices=tuple(done),
        untrained=tuple((group, last_step) for group, (_, last_step) in zip(groups, rows, strict=True)),
        newest_steps=newest_steps,
        evaluated=frozenset((row.phase, row.step) for row in evaluated),
    )
