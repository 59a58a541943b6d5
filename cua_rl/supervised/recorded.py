"""Recorded successes of a run: selects rollouts to imitate and loads them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from random import Random

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.models import Group, RolloutRow, Step, Training, TurnRow
from cua_rl.database.rebuild import load_rollouts
from cua_rl.types.errors import ConfigError, DatabaseError
from cua_rl.types.rollout import Rollout

_NUM_AT_A_TIME = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSuccesses:
    """The selected rollouts in the order of recording, and counts of what was left out."""

    rollouts: tuple[Rollout, ...]
    image_token_id: int
    """Image token of the recorded model."""
    num_successes: int
    num_repeats: int
    """Successes identical to an earlier one, token for token and pixel for pixel."""


async def load_successes(
    session: AsyncSession, training_id: int, *, num_steps: int | None, max_per_task: int | None, seed: int
) -> RecordedSuccesses:
    """Successes of a run's first steps (None: of all), without repeats; raises `ConfigError` if there are none that
    have their screenshots.

    Of each task template at most `max_per_task`, chosen by `seed` (None: all). Evaluations stay held out.
    """
    image_token_id = await session.scalar(select(Training.image_token_id).where(Training.id == training_id))
    if image_token_id is None:
        raise DatabaseError(f"expected training {training_id} in the database, got no row")
    successes: list[tuple[str, str, str]] = []
    steps = await session.scalars(select(Step.step).where(Step.training_id == training_id).order_by(Step.step))
    for step in steps.all():
        if num_steps is None or step <= num_steps:
            successes += await _successes(session, training_id, step)
    distinct = {content: (rollout_id, task_id) for content, rollout_id, task_id in reversed(successes)}
    ids = _at_most_per_task(list(reversed(distinct.values())), max_per_task, seed)
    if not ids:
        raise ConfigError(
            f"from_run: expected at least one successful rollout of a training step that is not pruned, got none in "
            f"the run (run_steps={num_steps}); take more steps, or another run"
        )
    rollouts: list[Rollout] = []
    for start in range(0, len(ids), _NUM_AT_A_TIME):  # keeps statements short, and drops rows that are rollouts now
        rollouts += await load_rollouts(session, training_id, ids[start : start + _NUM_AT_A_TIME])
        session.expunge_all()
    return RecordedSuccesses(
        rollouts=tuple(await _with_shared_turns(session, training_id, rollouts)),
        image_token_id=image_token_id,
        num_successes=len(successes),
        num_repeats=len(successes) - len(distinct),
    )


async def _with_shared_turns(session: AsyncSession, training_id: int, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The rollouts. If a parent of the same run is not among them, one of its siblings teaches the turns they share."""
    parents = {one.parent_id for one in rollouts if one.parent_id} - {one.rollout_id for one in rollouts}
    recorded = RolloutRow.training_id == training_id, RolloutRow.rollout_id.in_(parents)
    untaught = set(await session.scalars(select(RolloutRow.rollout_id).where(*recorded)))
    first = {one.parent_id: one.rollout_id for one in reversed(rollouts) if one.parent_id in untaught}
    return [replace(one, fork_turn=0) if one.rollout_id in first.values() else one for one in rollouts]


def _at_most_per_task(rollouts: Sequence[tuple[str, str]], max_per_task: int | None, seed: int) -> list[str]:
    """Ids of the chosen ones, in their order, out of ids of rollouts with those of their tasks."""
    order = list(rollouts)
    if max_per_task is not None:
        Random(f"rollouts-{seed}").shuffle(order)
    taken: dict[str, set[str]] = defaultdict(set)
    for rollout_id, task_id in order:
        if max_per_task is None or len(taken[task_id]) < max_per_task:
            taken[task_id].add(rollout_id)
    return [rollout_id for rollout_id, task_id in rollouts if rollout_id in taken[task_id]]


async def _successes(session: AsyncSession, training_id: int, step: int) -> list[tuple[str, str, str]]:
    """A hash of the content, the id and the task's id of each successful rollout of a step's completed groups, by group
    and member; those without an answer are left out.
    """
    query = (
        select(RolloutRow.id, RolloutRow.rollout_id, RolloutRow.task_id)
        .join(Group, RolloutRow.group_pk == Group.id)
        .join(Step, Group.step_id == Step.id)
        .where(
            Step.training_id == training_id,
            Step.step == step,
            Group.status == "completed",
            RolloutRow.status == "completed",
            RolloutRow.success.is_(True),
            RolloutRow.pruned_at.is_(None),
        )
        .order_by(Group.group_index, Group.id, RolloutRow.position)
    )
    rows = [(key, rollout_id, task_id) for key, rollout_id, task_id in await session.execute(query)]
    turns = (
        select(TurnRow.rollout_pk, TurnRow.prompt_token_ids, TurnRow.prompt_chunks, TurnRow.sampled_tokens)
        .where(TurnRow.rollout_pk.in_([key for key, _, _ in rows]), func.cardinality(TurnRow.sampled_tokens) > 0)
        .order_by(TurnRow.rollout_pk, TurnRow.turn_index)
    )
    # a hash over all that the model read and wrote in the rollout
    contents: dict[int, str] = {}
    for key, prompt, chunks, sampled in await session.execute(turns):
        turn = repr((contents.get(key), prompt, chunks, sampled))
        contents[key] = sha256(turn.encode()).hexdigest()
    return [(contents[key], rollout_id, task_id) for key, rollout_id, task_id in rows if key in contents]
