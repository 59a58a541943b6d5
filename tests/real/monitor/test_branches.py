"""A tree of rollouts at the monitor: who went on from whom, where, and what became of them."""

from dataclasses import replace
from typing import Any

from cua_rl.database.recorder import DatabaseRecorder
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, source_events, start, step_end
from tests.real.database.test_branches import grown_group
from tests.real.monitor.conftest import Monitor
from tests.real.monitor.events import with_images


async def test_a_rollout_shows_its_tree_and_where_it_parted(monitor: Monitor) -> None:
    group = with_images(grown_group())
    async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in [start(), *source_events(group), step_end(group)]:
            await recorder.record(event)
        await recorder.flush()
    sibling, lost = group.rollouts[-1], group.faulty[0]
    parent_id, fork_turn = sibling.parent_id, sibling.fork_turn

    shown = await monitor.json(f"/api/runs/1/rollouts/{sibling.rollout_id}")

    assert (shown["parent_id"], shown["fork_turn"]) == (parent_id, fork_turn)
    assert fork_turn > 0
    members = {one["rollout_id"]: one for one in shown["siblings"]}
    assert len(members) == 5
    assert {name for name, one in members.items() if one["parent_id"] == parent_id} == {
        sibling.rollout_id,
        lost.rollout_id,
    }
    parent = next(one for one in group.rollouts if one.rollout_id == parent_id)
    assert parent.reward is not None
    seen = members[parent.rollout_id]
    assert (seen["reward"], seen["success"], seen["fork_turn"]) == (parent.reward.total, parent.success, 0)

    lane = await monitor.json(f"/api/runs/1/step/1/groups/{group.group_id}")
    assert {one["rollout_id"]: one["fork_turn"] for one in lane["rollouts"]} == {
        name: one["fork_turn"] for name, one in members.items()
    }
    branches = {sibling.rollout_id, lost.rollout_id}
    for branch, expected in (("yes", branches), ("no", {*members} - branches)):
        found = await monitor.json("/api/rollouts", run_id="1", branch=branch)
        assert {item["rollout_id"] for item in found["items"]} == expected


async def test_the_extremes_of_a_branch_are_not_those_of_the_turns_that_it_shares(monitor: Monitor) -> None:
    group = grown_group()
    sibling = group.rollouts[-1]
    least = min(value for turn in sibling.own_turns for value in turn.model.sampling_logprobs)
    first = sibling.turns[0]
    surprise = (*first.model.sampling_logprobs[:-1], 2 * least - 1)
    shared = replace(first, model=replace(first.model, sampling_logprobs=surprise))
    rollouts = tuple(
        replace(one, turns=(shared, *one.turns[1:])) if one.turns[0] == first else one for one in group.rollouts
    )
    group = replace(group, rollouts=rollouts)
    own = {
        one.rollout_id: tuple((turn.index, turn.model.sampling_logprobs) for turn in one.own_turns) for one in rollouts
    }
    async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in [start(), *source_events(group), replace(step_end(group), training_logprobs=own)]:
            await recorder.record(event)
        await recorder.flush()

    rows: list[Any] = run_sql(monitor.url, "SELECT rollout_id, min_logprob FROM rollouts")
    kept = dict(rows)
    assert (kept[sibling.parent_id], kept[sibling.rollout_id]) == (2 * least - 1, least)


async def test_turns_that_branches_share_count_once_in_figures_of_turns(monitor: Monitor) -> None:
    group = with_images(grown_group())
    async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in [start(), *source_events(group), step_end(group)]:
            await recorder.record(event)
        await recorder.flush()
    broken = "failure_kind = 'malformed_json', failure_message = 'it is none'"
    run_sql(monitor.url, "UPDATE turns SET failure_kind = NULL, failure_message = NULL")
    run_sql(monitor.url, f"UPDATE turns SET {broken} WHERE turn_index = 0")
    begun = [one for one in (*group.rollouts, *group.faulty) if one.parent_id is None]

    found = await monitor.json("/api/rollouts/summary", run_id="1")
    assert found["turn_failures"] == [{"name": "malformed_json", "count": len(begun)}]
    found = await monitor.json("/api/rollouts", run_id="1", failure_kind="malformed_json")
    assert {one["rollout_id"] for one in found["items"]} == {one.rollout_id for one in begun}
    found = await monitor.json("/api/runs/1/tasks/open_settings")
    assert found["turn_failures"] == [{"name": "malformed_json", "count": len(begun)}]
    found = await monitor.json("/api/rollouts/first_actions", run_id="1")
    assert found["num_rollouts"] == sum(one.turns[0].agent.before is not None for one in begun)
