"""Second opinions: where a judge or a person differs from what was recorded, and going through those rollouts."""

from typing import Any

import pytest

from tests.real.database.conftest import run_sql
from tests.real.database.recorded import make_group, source_events
from tests.real.monitor.conftest import Monitor
from tests.real.monitor.test_run_figures import EASY, HARD, record, source_of, trained
from tests.real.monitor.test_sets import SORTS

pytestmark = pytest.mark.asyncio


async def _list(monitor: Monitor, **wanted: object) -> list[Any]:
    return (await monitor.json("/api/rollouts", **{"run_id": "1", "limit": 200} | wanted))["items"]


async def _verdict(monitor: Monitor, rollout: Any, success: bool | None) -> None:
    path = f"/api/runs/{rollout['run_id']}/rollouts/{rollout['rollout_id']}/overrides"
    body = {"success": success, "reason": "looked at it", "actor": "a person"}
    answer = await monitor.client.post(path, json=body)
    assert answer.status_code == 201, answer.text


async def test_success_as_reviewed_counts_the_newest_verdicts_and_what_was_recorded_stays(monitor: Monitor) -> None:
    # 1 of 2 at the easy task, 0 of 2 at the hard one: (1/2 + 0) / 2
    await record(monitor, *source_of("step", 1, (EASY, (True, False)), (HARD, (False, False))), trained(1))
    won, lost = await _list(monitor, task_id=EASY.task_id, sort="started", status="completed")
    hard, _ = await _list(monitor, task_id=HARD.task_id, status="completed")
    assert (won["success"], lost["success"]) == (True, False)

    await _verdict(monitor, won, False)
    await _verdict(monitor, won, True)  # after a second look
    await _verdict(monitor, lost, True)
    await _verdict(monitor, hard, True)
    await _verdict(monitor, hard, None)  # withdrawn

    found = await monitor.json("/api/rollouts/summary", run_id=1, status="completed")
    assert found["success"]["rate"] == 0.25
    assert found["success_as_reviewed"]["rate"] == 0.5  # 2 of 2 and 0 of 2
    assert sorted((one["recorded"], one["success"], one["count"]) for one in found["reviews"]) == [
        ("failure", True, 1),
        ("success", True, 1),
    ]
    sets = {review: await _list(monitor, review=review) for review in ("none", "confirmed", "overturned")}
    assert [one["rollout_id"] for one in sets["confirmed"]] == [won["rollout_id"]]
    assert [one["rollout_id"] for one in sets["overturned"]] == [lost["rollout_id"]]
    every = {one["rollout_id"] for one in await _list(monitor)}
    assert {one["rollout_id"] for one in sets["none"]} == every - {won["rollout_id"], lost["rollout_id"]}


async def test_a_person_who_sees_no_success_confirms_a_rollout_of_which_none_was_recorded(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True, False))), trained(1))
    run_sql(monitor.url, "UPDATE rollouts SET success = NULL WHERE NOT success")  # as other systems send it
    (lost,) = await _list(monitor, verdict="failure")
    await _verdict(monitor, lost, False)

    found = await monitor.json("/api/rollouts/summary", run_id=1)
    assert found["reviews"] == [{"recorded": "failure", "success": False, "count": 1}]
    assert [len(await _list(monitor, review=review)) for review in ("confirmed", "overturned")] == [1, 0]


async def test_a_verdict_on_a_fault_changes_no_rate(monitor: Monitor) -> None:
    await record(monitor, *source_events(make_group(seed=3)))
    (fault,) = await _list(monitor, verdict="fault")
    before = (await monitor.json("/api/rollouts/summary", run_id=1))["success"]

    await _verdict(monitor, fault, True)
    found = await monitor.json("/api/rollouts/summary", run_id=1)
    assert found["success"] == found["success_as_reviewed"] == before
    assert found["reviews"] == [{"recorded": "fault", "success": True, "count": 1}]
    assert len(await _list(monitor, verdict="fault", review="overturned")) == 1


async def test_what_a_judge_beside_the_validator_disagrees_about_is_a_set(monitor: Monitor) -> None:
    events = [
        one for number in range(1, 6) for one in source_events(make_group(seed=number, group_id=f"g{number}"), number)
    ]
    await record(monitor, *events)
    found = await monitor.json("/api/rollouts/summary", run_id=1)
    wanted: dict[str, set[str]] = {"agrees": set(), "disagrees": set()}
    for item in await _list(monitor, status="completed"):
        said = (await monitor.json(f"/api/runs/1/rollouts/{item['rollout_id']}"))["judgement"]
        if said is not None and not said["decides"] and said["success"] is not None:
            wanted["agrees" if said["success"] == item["success"] else "disagrees"].add(item["rollout_id"])
    assert all(wanted.values())
    for judge, ids in wanted.items():
        assert {one["rollout_id"] for one in await _list(monitor, judge=judge)} == ids
        counted = [
            one
            for one in found["judgements"]
            if (one["success"] == (one["recorded"] == "success")) == (judge == "agrees")
        ]
        assert sum(one["count"] for one in counted) == len(ids)

    (first, *others) = await _list(monitor, judge="disagrees", review="none")
    await _verdict(monitor, first, not first["success"])
    left = await _list(monitor, judge="disagrees", review="none")
    assert [one["rollout_id"] for one in left] == [one["rollout_id"] for one in others]


@pytest.mark.parametrize("sort", ["started", *SORTS])
async def test_a_set_is_gone_through_in_the_order_of_its_table_from_end_to_end(monitor: Monitor, sort: str) -> None:
    events = [
        one for number in (1, 2, 3) for one in source_events(make_group(seed=number, group_id=f"g{number}"), number)
    ]
    await record(monitor, *events)
    # equal and unknown values, and equal times
    run_sql(monitor.url, "UPDATE rollouts SET reward = 0.25 WHERE id % 3 = 0")
    run_sql(monitor.url, "UPDATE rollouts SET started_at = '2026-01-01' WHERE id % 2 = 0")
    for sign in ("", "-"):
        query = "run_id=1&phase=step&max_step=2"
        whole = await _list(monitor, phase="step", max_step=2, sort=sign + sort)
        ids = [one["rollout_id"] for one in whole]
        places = [await monitor.json(f"/api/runs/1/rollouts/{one}/place", of=query, sort=sign + sort) for one in ids]
        assert sorted(place["num_before"] for place in places) == list(range(len(ids)))
        assert {(place["num_rollouts"], place["is_member"]) for place in places} == {(len(ids), True)}
        by_place = {place["num_before"]: name for place, name in zip(places, ids, strict=True)}
        for place in places:
            at = place["num_before"]
            assert (place["previous"] or {}).get("rollout_id") == by_place.get(at - 1)
            assert (place["next"] or {}).get("rollout_id") == by_place.get(at + 1)
        assert [by_place[at] for at in range(len(ids))] == ids


async def test_a_rollout_that_left_the_set_still_leads_to_the_next(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (False, False)), (HARD, (False, False))), trained(1))
    first, second, third, *_ = await _list(monitor, review="none", status="completed")
    await _verdict(monitor, second, True)

    path = f"/api/runs/1/rollouts/{second['rollout_id']}/place"
    place = await monitor.json(path, of="run_id=1&review=none&status=completed")
    assert (place["is_member"], place["num_before"], place["num_rollouts"]) == (False, 1, 3)
    assert (place["previous"]["rollout_id"], place["next"]["rollout_id"]) == (first["rollout_id"], third["rollout_id"])
    assert (await monitor.get(path, of="review=none")).status_code == 422  # no run
    assert (await monitor.get(path, of="run_id=1", sort="odd")).status_code == 422
