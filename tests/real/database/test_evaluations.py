"""An evaluation that goes on keeps the groups that it names, and adds further attempts to them."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.models import Eval, Group, RolloutRow, Training
from cua_rl.database.rebuild import load_groups
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import EvaluationEnded, Event, GroupEnded, RolloutSource, SourceStarted, TrainingEnded, TurnTaken
from cua_rl.types.rollout import RolloutGroup
from tests.real.database.recorded import IMAGE_TOKEN, make_group, make_task, rollout_start, start

SOURCE = RolloutSource(phase="eval", step=24)
FIRST, SECOND = make_group(seed=1, group_id="m-0"), make_group(seed=2, group_id="m-1")
MORE = make_group(seed=3, group_id="m-0", num_rollouts=2)


async def record(url: str, *events: Event) -> None:
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in events:
            await recorder.record(event)


def begin(*kept: str, group_size: int = 3) -> list[Event]:
    started = replace(start(first_step=0), total_steps=0, kept_group_ids=kept)
    source = SourceStarted(
        source=SOURCE, tasks=(make_task(), make_task(8)), group_size=group_size, policy_version=SOURCE.step
    )
    return [started, source]


def rollouts(group: RolloutGroup, *, has_ended: bool = True) -> list[Event]:
    """All rollouts of a group, up to its end."""
    events: list[Event] = []
    for rollout in (*group.rollouts, *group.faulty):
        events.append(rollout_start(SOURCE, group, rollout))
        events += [TurnTaken(rollout_id=rollout.rollout_id, turn=turn) for turn in rollout.turns]
    return [*events, GroupEnded(source=SOURCE, group=group, advantages=None)] if has_ended else events


def statuses(rows: Sequence[RolloutRow]) -> list[str]:
    return sorted(row.status for row in rows)


async def test_an_evaluation_that_was_killed_keeps_what_had_ended_and_makes_the_rest_anew(
    url: str, session: AsyncSession
) -> None:
    await record(url, *begin(), *rollouts(FIRST), *rollouts(SECOND, has_ended=False))
    again = make_group(seed=4, group_id="m-1")

    await record(
        url,
        *begin("m-0"),
        *rollouts(again),
        EvaluationEnded(source=SOURCE, metrics={"eval/held_out/success_rate": 0.5}),
        TrainingEnded(status="completed"),
    )

    training = (await session.scalars(select(Training))).one()
    evaluation = (await session.scalars(select(Eval))).one()
    assert (training.status, training.num_attempts, evaluation.status) == ("completed", 2, "completed")
    assert (evaluation.num_groups, evaluation.num_ended_groups, len(evaluation.task_pks)) == (2, 2, 2)
    assert evaluation.attempt_id == training.attempt_id
    assert evaluation.metrics == {"eval/held_out/success_rate": 0.5}
    assert await load_groups(session, training.id, SOURCE.step, phase="eval") == [FIRST, again]
    assert statuses((await session.scalars(select(RolloutRow))).all()) == 6 * ["completed"] + 2 * ["failed"]


async def test_further_attempts_at_a_task_count_in_its_group(url: str, session: AsyncSession) -> None:
    await record(url, *begin(), *rollouts(FIRST), *rollouts(SECOND), TrainingEnded(status="completed"))

    await record(url, *begin("m-0", "m-1", group_size=5), *rollouts(MORE))

    group = (await session.scalars(select(Group).where(Group.group_id == "m-0"))).one()
    both = (*FIRST.rollouts, *MORE.rollouts)
    rewards = [rollout.reward.total for rollout in both if rollout.reward]
    assert (group.status, group.num_rollouts, group.num_faulty) == ("completed", 5, 2)
    assert group.num_successes == sum(rollout.success for rollout in both)
    assert group.reward_mean == fmean(rewards)
    evaluation = (await session.scalars(select(Eval))).one()
    assert (evaluation.status, evaluation.group_size, evaluation.num_ended_groups) == ("running", 5, 2)
    (rebuilt, _) = await load_groups(session, group.training_id, SOURCE.step, phase="eval")
    assert {rollout.rollout_id for rollout in rebuilt.rollouts} == {rollout.rollout_id for rollout in both}


async def test_what_ran_in_a_kept_group_is_cancelled_when_the_evaluation_goes_on(
    url: str, session: AsyncSession
) -> None:
    await record(url, *begin(), *rollouts(FIRST), *rollouts(SECOND), TrainingEnded(status="completed"))
    await record(url, *begin("m-0", "m-1", group_size=5), *rollouts(MORE, has_ended=False))  # killed

    await record(url, *begin("m-0", "m-1", group_size=5))

    lost = [rollout.rollout_id for rollout in (*MORE.rollouts, *MORE.faulty)]
    rows = (await session.scalars(select(RolloutRow).where(RolloutRow.rollout_id.in_(lost)))).all()
    assert statuses(rows) == 3 * ["cancelled"]
    group = (await session.scalars(select(Group).where(Group.group_id == "m-0"))).one()
    assert (group.status, group.num_rollouts) == ("completed", 3)
