"""What rollout workers write, also those that were given up and write late."""

from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.queries import find_training
from cua_rl.database.rebuild import load_groups
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.rows import Scope
from cua_rl.database.writer import require_attempt, write_worker_events
from cua_rl.events import BatchTaken, Event, GroupEnded, RolloutSource, SourceStarted, TurnTaken
from cua_rl.types.errors import ConfigError, DatabaseError
from cua_rl.types.rollout import Rollout, RolloutGroup, StopReason
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, advantages_of, make_group, rollout_start, start, step_end
from tests.real.database.test_recorder import record

LATER = RolloutSource(phase="step", step=2)


def scope_of(url: str) -> Scope:
    ((training_id, attempt_id),) = run_sql(url, "SELECT id, attempt_id FROM trainings")
    return Scope(image_token_id=IMAGE_TOKEN, attempt_id=UUID(str(attempt_id)), training_id=int(str(training_id)))


async def record_as_worker(url: str, scope: Scope, *events: Event) -> None:
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN, scope=scope, write=write_worker_events) as recorder:
        for event in events:
            await recorder.record(event)


def lost(rollout: Rollout) -> Rollout:
    """As the controller records it when its worker is given up."""
    return replace(
        rollout,
        turns=(),
        stop_reason=StopReason.DEVICE_ERROR,
        device_id=None,
        reward=None,
        validation=None,
        judgement=None,
        answer=None,
        error="rollout worker 'a' was given up",
    )


def group_with_lost() -> tuple[RolloutGroup, Rollout, Rollout]:
    """A group, and two of its faulty members as a worker knows them: it had begun one of them when it was lost."""
    group, other = make_group(1), make_group(3, num_rollouts=4)
    began, waited = (
        replace(rollout, rollout_id=f"lost {index}", member_index=index)
        for index, rollout in enumerate(other.rollouts[:2])
    )
    return replace(group, faulty=(lost(began), lost(waited))), began, waited


@pytest.mark.parametrize("is_moved", [False, True], ids=["group ended", "group moved to the step that trains it"])
async def test_what_a_worker_writes_of_ended_rollouts_is_left_out(
    url: str, session: AsyncSession, is_moved: bool
) -> None:
    group, began, waited = group_with_lost()
    tasks = [SourceStarted(source=RolloutSource(phase="step", step=step), tasks=(), num_groups=1, group_size=3,
                           policy_version=0) for step in (1, 2)]  # fmt: skip
    members: list[Event] = []
    for rollout in group.rollouts:
        members.append(rollout_start(LATER, group, rollout))
        members += [TurnTaken(rollout_id=rollout.rollout_id, turn=turn) for turn in rollout.turns]
    first, *others = [TurnTaken(rollout_id=began.rollout_id, turn=turn) for turn in began.turns]
    await record(url, start(), *tasks)
    scope = scope_of(url)
    await record_as_worker(url, scope, *members, rollout_start(LATER, group, began), first)
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN, scope=scope) as recorder:  # the controller's
        await recorder.record(GroupEnded(source=LATER, group=group, advantages=advantages_of(group)))
        if is_moved:
            await recorder.record(BatchTaken(step=1, group_ids=(group.group_id,)))
            await recorder.record(step_end(group))

    late = [TurnTaken(rollout_id=waited.rollout_id, turn=turn) for turn in waited.turns]
    await record_as_worker(url, scope, *others, rollout_start(LATER, group, waited), *late)
    await record_as_worker(url, scope, *late)  # its start was left out before

    rows = run_sql(url, "SELECT rollout_id, status, num_turns FROM rollouts WHERE status <> 'completed' ORDER BY 1")
    assert rows == [("lost 0", "failed", 1), ("lost 1", "failed", 0)]
    assert run_sql(url, "SELECT count(*) FROM environments WHERE status = 'running'") == [(0,)]
    assert run_sql(url, "SELECT count(*) FROM groups") == [(1,)]
    training = await find_training(session, "run")
    assert training is not None
    (rebuilt,) = await load_groups(session, training.id, 1 if is_moved else 2)
    assert rebuilt.rollouts == group.rollouts


async def test_the_record_names_the_worker_of_each_rollout(url: str, session: AsyncSession) -> None:
    group = make_group(1)
    named = replace(group, rollouts=tuple(replace(one, worker=f"worker-{one.member_index}") for one in group.rollouts))
    await record(url, start(), SourceStarted(source=LATER, tasks=(), num_groups=1, group_size=3, policy_version=0))
    first, *_ = named.rollouts  # only its start is known before the end
    await record_as_worker(url, scope_of(url), replace(rollout_start(LATER, named, first), worker=first.worker))
    assert run_sql(url, "SELECT worker FROM rollouts") == [(first.worker,)]
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN, scope=scope_of(url)) as recorder:
        await recorder.record(GroupEnded(source=LATER, group=named, advantages=advantages_of(named)))

    training = await find_training(session, "run")
    assert training is not None
    (rebuilt,) = await load_groups(session, training.id, 2)
    assert rebuilt.rollouts == named.rollouts


async def test_a_worker_whose_database_is_not_the_runs_is_told_so(url: str) -> None:
    await record(url, start())
    assert abs(require_attempt(url, scope_of(url))) < 60.0  # both read the same clock
    for other in (replace(scope_of(url), attempt_id=uuid4()), replace(scope_of(url), training_id=4711)):
        with pytest.raises(ConfigError, match=r"expected the run's database, got .* where this attempt does not run"):
            require_attempt(url, other)


async def test_a_worker_of_an_earlier_attempt_writes_nothing(url: str) -> None:
    group, began, _ = group_with_lost()
    await record(url, start(), SourceStarted(source=LATER, tasks=(), num_groups=1, group_size=3, policy_version=0))
    earlier = replace(scope_of(url), attempt_id=uuid4())
    with pytest.raises(DatabaseError, match="another one has taken over"):
        await record_as_worker(url, earlier, rollout_start(LATER, group, began))
    assert run_sql(url, "SELECT count(*) FROM rollouts") == [(0,)]
