"""Recorded successes of a run: selects rollouts to imitate and loads them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    rollout_id: str
    task_id: str
    content_sha256: str


async def load_successes(
    session: AsyncSession, training_id: int, *, num_steps: int | None, max_per_task: int | None, seed: int
) -> RecordedSuccesses:
    """Successes of a run's first steps (None: of all), without repeats; raises `ConfigError` if there are none.

    Of each task template at most `max_per_task`, chosen by `seed` (None: all). Evaluations stay held out.
    """
    image_token_id = await session.scalar(select(Training.image_token_id).where(Training.id == training_id))
    if image_token_id is None:
        raise DatabaseError(f"expected training {training_id} in the database, got no row")
    successes: list[_Candidate] = []
    steps = await session.scalars(select(Step.step).where(Step.training_id == training_id).order_by(Step.step))
    for step in steps.all():
        if num_steps is None or step <= num_steps:
            successes += await _successes(session, training_id, step)
    distinct = {candidate.content_sha256: candidate for candidate in reversed(successes)}
    chosen = _at_most_per_task(list(reversed(distinct.values())), max_per_task, seed)
    if not chosen:
        raise ConfigError(
            f"from_run: expected at least one successful rollout of a training step, got none in the run "
            f"(run_steps={num_steps}); take more steps, or another run"
        )
    ids = [candidate.rollout_id for candidate in chosen]
    rollouts: list[Rollout] = []
    for start in range(0, len(ids), _NUM_AT_A_TIME):  # keeps statements short, and drops rows that are rollouts now
        rollouts += await load_rollouts(session, training_id, ids[start : start + _NUM_AT_A_TIME])
        session.expunge_all()
    return RecordedSuccesses(
        rollouts=tuple(rollouts),
        image_token_id=image_token_id,
        num_successes=len(successes),
        num_repeats=len(successes) - len(distinct),
    )


def _at_most_per_task(candidates: Sequence[_Candidate], max_per_task: int | None, seed: int) -> list[_Candidate]:
    if max_per_task is None:
        return list(candidates)
    order = list(candidates)
    Random(f"rollouts-{seed}").shuffle(order)
    taken: dict[str, list[_Candidate]] = defaultdict(list)
    for candidate in order:
        if len(taken[candidate.task_id]) < max_per_task:
            taken[candidate.task_id].append(candidate)
    kept = {candidate.rollout_id for candidates in taken.values() for candidate in candidates}
    return [candidate for candidate in candidates if candidate.rollout_id in kept]


async def _successes(session: AsyncSession, training_id: int, step: int) -> list[_Candidate]:
    """Successful rollouts of a step's completed groups, by group and member; those without an answer are left out."""
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
    return [
        _Candidate(rollout_id=rollout_id, task_id=task_id, content_sha256=contents[key])
        for key, rollout_id, task_id in rows
        if key in contents
    ]
