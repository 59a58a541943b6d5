"""Sets of rollouts: one filter for lists and figures, in any order, over several runs and databases."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import Any

import httpx
import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.security import AccessRules
from tests.real.database.conftest import TEMPLATE, drop_database, run_sql, with_database
from tests.real.database.recorded import IMAGE_TOKEN, start
from tests.real.monitor.conftest import Monitor, Shown
from tests.real.monitor.test_run_figures import EASY, HARD, record, source_of, trained

SORTS = {
    "turns": "num_turns",
    "reward": "reward",
    "advantage": "advantage",
    "gap": "max_gap",
    "took": "duration_s",
    "tokens": "num_sampled_tokens",
}
by_session = pytest.mark.asyncio(loop_scope="session")


async def _list(shown: Shown | Monitor, **wanted: object) -> list[Any]:
    return (await shown.json("/api/rollouts", **{"run_id": "1", "limit": 200} | wanted))["items"]


@by_session
async def test_every_number_of_a_summary_is_the_size_of_the_set_that_it_names(shown: Shown) -> None:
    found = await shown.json("/api/rollouts/summary", run_id="1")
    everything = await _list(shown)
    assert found["num_rollouts"] == len(everything) == sum(one["count"] for one in found["verdicts"])

    named: list[tuple[int, dict[str, object]]] = []
    for field, name in (
        ("verdicts", "verdict"),
        ("stops", "stop_reason"),
        ("categories", "category"),
        ("faults", "fault"),
    ):
        named += [(one["count"], {name: one["name"]}) for one in found[field]]
    named += [(one["count"], {"cause": one["name"]}) for one in found["causes"]]
    named += [(one["num_rollouts"], {"task_id": one["task_id"]}) for one in found["tasks"]]
    for step in found["steps"]:
        place = {"phase": step["phase"], "step": step["step"]}
        named += [
            (step["num_successes"], place | {"verdict": "success"}),
            (step["num_faults"], place | {"verdict": "fault"}),
        ]
        named += [(num, place | {"verdict": "failure", "cause": cause}) for cause, num in step["causes"].items()]
    assert len(named) > 15
    for count, wanted in named:
        assert len(await _list(shown, **wanted)) == count, wanted
    for one in found["checks"]:
        wanted = {"check": one["query"], "expected": one["expected"], "actual": one["actual"]}
        verdict = "success" if one["success"] else "failure"
        assert len(await _list(shown, **wanted, verdict=verdict)) == one["count"] > 0
    assert await _list(shown, check="another check") == []
    judged = Counter(item["success"] for item in everything if item["status"] == "completed")
    assert (found["success"]["num_successes"], found["success"]["num_rollouts"]) == (judged[True], judged.total())


@by_session
async def test_ranges_words_and_phases_narrow_a_set(shown: Shown) -> None:
    everything = await _list(shown)
    for name, field in (("turns", "num_turns"), ("reward", "reward"), ("gap", "max_gap")):
        values = sorted(item[field] for item in everything if item[field] is not None)
        middle = values[len(values) // 2]
        low = await _list(shown, **{f"max_{name}": middle})
        high = await _list(shown, **{f"min_{name}": middle})
        assert [len(low), len(high)] == [sum(v <= middle for v in values), sum(v >= middle for v in values)], name
    assert len(await _list(shown, min_step=1, max_step=1)) == len(await _list(shown, step=1)) == 4
    assert len(await _list(shown, phase=["baseline", "step"], max_step=1)) == 8
    assert {item["phase"] for item in await _list(shown, phase=["baseline", "eval"])} == {"baseline"}

    answered = [item["rollout_id"] for item in everything if item["stop_reason"] == "finished"]
    assert [item["rollout_id"] for item in await _list(shown, search="DO-NE")] == answered  # they answered "done"
    assert len(await _list(shown, search="the set-tings")) == len(everything)  # of the instruction
    assert await _list(shown, search="settings nothing-has-this-word") == []
    for name in ("search", "cause", "fault", "failure_kind", "actual", "task_id", "group_id", "category", "worker"):
        assert await _list(shown, **{name: "no\x00text"}) == [], name  # what Postgres has no text for
    for cursor in ("W1t0cnVlLCAxXV0", "W1sxLCAyLCAzXV0", "W251bGwsIG51bGxd"):  # [[true, 1]], [[1, 2, 3]], [null, null]
        answer = await shown.client.get("/api/rollouts", params={"run_id": "1", "cursor": cursor})
        assert answer.status_code == 422, cursor


@by_session
@pytest.mark.parametrize("sort", ["started", *SORTS])
async def test_pages_in_every_order_join_to_the_whole_set_with_unknown_values_last(shown: Shown, sort: str) -> None:
    for sign in ("", "-"):
        whole = await _list(shown, sort=sign + sort)
        found: list[str] = []
        cursor: dict[str, str] = {}
        while True:
            page = await shown.json("/api/rollouts", run_id="1", limit=5, sort=sign + sort, **cursor)
            found += [item["rollout_id"] for item in page["items"]]
            if page["next_cursor"] is None:
                break
            cursor = {"cursor": page["next_cursor"]}
        assert found == [item["rollout_id"] for item in whole]
        if sort in SORTS:
            last = -inf if sign else inf
            keys = [last if item[SORTS[sort]] is None else item[SORTS[sort]] for item in whole]
            assert keys == sorted(keys, reverse=bool(sign))
            assert len(set(keys)) > 1


@by_session
async def test_the_extremes_that_a_rollout_keeps_are_those_of_its_tokens(shown: Shown) -> None:
    stored: list[Any] = run_sql(
        shown.url, "SELECT rollout_id, max_gap, max_log_ratio, min_logprob FROM rollouts WHERE training_id = 1"
    )
    assert sum(gap is not None for _, gap, *_ in stored) == 6  # the trained ones
    for rollout_id, gap, ratio, least in stored:
        rollout = await shown.json(f"/api/runs/1/rollouts/{rollout_id}")
        tokens = [
            await shown.json(f"/api/runs/1/rollouts/{rollout_id}/turns/{turn['turn_index']}/tokens")
            for turn in rollout["turns"]
            if turn["trained_at_step"] is not None
        ]
        pairs = [
            pair for one in tokens for pair in zip(one["training_logprobs"], one["sampling_logprobs"], strict=True)
        ]
        if pairs:
            differences = [trained - sampled for trained, sampled in pairs]
            assert gap == max(map(abs, differences))
            assert (ratio, least) == (max(differences), min(sampled for _, sampled in pairs))


async def test_a_set_of_runs_in_two_databases_is_merged_with_the_latest_first(
    monitor: Monitor, server_url: str
) -> None:
    run_sql(server_url, f"CREATE DATABASE second TEMPLATE {TEMPLATE}")
    other = with_database(server_url, "second")
    try:
        await record(monitor, *source_of("step", 1, (EASY, (True, False)), (HARD, (True, True))), trained(1))
        async with DatabaseRecorder(other, image_token_id=IMAGE_TOKEN) as recorder:
            for event in (start(), *source_of("step", 1, (EASY, (False, False, False))), trained(1)):
                await recorder.record(event)
        for url, hours in ((monitor.url, "id"), (other, "2 * id - 1.5")):  # 1 to 4; 0.5, 2.5 and 4.5
            run_sql(url, f"UPDATE rollouts SET started_at = timestamptz '2026-01-01' + ({hours}) * interval '1 hour'")
        rules = AccessRules(write_token="not used")
        app = make_app(Databases([open_database(monitor.url), open_database(other, "other")]), rules)
        transport = httpx.ASGITransport(app=guard(app, rules), raise_app_exceptions=False)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            runs = {"run_id": ["1", "other.1"]}
            found = (await client.get("/api/rollouts/summary", params=runs)).json()
            assert [one["run_id"] for one in found["runs"]] == ["1", "other.1"]
            # of two tasks: 1 of 5 and 2 of 2
            assert (found["num_rollouts"], found["success"]["rate"]) == (7, pytest.approx((1 / 5 + 2 / 2) / 2))
            items: list[Any] = []
            cursor: dict[str, str] = {}
            for _ in range(3):
                page = (await client.get("/api/rollouts", params=runs | {"limit": 3} | cursor)).json()
                items += page["items"]
                cursor = {"cursor": page["next_cursor"]}
            assert page["next_cursor"] is None
        assert len({(item["run_id"], item["rollout_id"]) for item in items}) == 7
        assert all(one["started_at"] >= two["started_at"] for one, two in pairwise(items))
        assert [item["run_id"] for item in items] == ["other.1", "1", "1", "other.1", "1", "1", "other.1"]
    finally:
        drop_database(server_url, "second")


async def test_tasks_whose_rollouts_go_on_are_not_lost_to_faults(monitor: Monitor) -> None:
    *events, _ = source_of("step", 1, (EASY, (True, False)), (HARD, (True, True)))
    await record(monitor, *events)  # the group of the hard task has not ended

    found = await monitor.json("/api/rollouts/summary", run_id="1")
    success = found["success"]
    assert (success["num_rollouts"], success["rate"], success["num_lost_tasks"]) == (2, 0.5, 0)
    done = await monitor.json("/api/rollouts/summary", run_id="1", status="completed")
    assert success == done["success"]
    tasks = {one["task_id"]: (one["num_rollouts"], one["success"]["rate"]) for one in found["tasks"]}
    assert tasks == {EASY.task_id: (2, 0.5), HARD.task_id: (2, None)}
    compared = await monitor.json("/api/rollouts/compare", first="run_id=1", second="run_id=1&verdict=open")
    assert (compared["difference"], compared["second"]["success"]["num_lost_tasks"]) == (None, 0)


async def test_a_validator_that_read_nothing_makes_a_set_of_its_own(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True, False)), (HARD, (False, False))), trained(1))
    run_sql(monitor.url, "UPDATE validations SET actual = '' WHERE id = (SELECT min(id) FROM validations)")

    items = await _list(monitor, actual="")
    assert len(items) == 1
    path = f"/api/runs/1/rollouts/{items[0]['rollout_id']}/place"
    assert (await monitor.json(path, of="run_id=1&actual="))["num_rollouts"] == 1
    found = await monitor.json("/api/rollouts/compare", first="run_id=1&actual=", second="run_id=1")
    assert found["first"]["success"]["num_rollouts"] == 1


async def test_sets_are_compared_by_task_instance_where_they_share_them(monitor: Monitor) -> None:
    tasks = [replace(EASY, seed=seed) for seed in range(1, 7)]
    first = [(task, (seed == 1, seed == 1)) for seed, task in enumerate(tasks, start=1)]  # 1 of 6
    second = [(task, (True, seed <= 4)) for seed, task in enumerate(tasks, start=1)]  # 4 whole, 2 half
    await record(monitor, *source_of("step", 1, *first), trained(1), *source_of("step", 2, *second), trained(2))

    found = await monitor.json("/api/rollouts/compare", first="run_id=1&step=1", second="run_id=1&step=2")
    # differences: 0, 1, 1, 1, 0.5, 0.5
    assert (found["paired_by"], found["num_pairs"]) == ("task instance", 6)
    assert (found["num_worse"], found["num_better"]) == (0, 5)
    assert found["difference"] == pytest.approx(4 / 6)
    assert found["p_value"] == 2 / 2**5  # of the signs of five, all alike, in either direction
    rates = [found[arm]["success"]["rate"] for arm in ("first", "second")]
    assert rates == pytest.approx([1 / 6, 5 / 6])
    (task,) = found["tasks"]
    assert (task["task_id"], task["first"]["num_rollouts"], task["second"]["num_successes"]) == (EASY.task_id, 12, 10)
    back = await monitor.json("/api/rollouts/compare", first="run_id=1&step=2", second="run_id=1&step=1")
    assert [back["low"], back["high"]] == pytest.approx([-found["high"], -found["low"]])
    assert found["low"] > 0 > back["high"]


async def test_sets_without_common_tasks_have_the_interval_of_two_rates_and_no_test(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True, False)), (HARD, (False, False))), trained(1))

    found = await monitor.json(
        "/api/rollouts/compare", first=f"run_id=1&task_id={EASY.task_id}", second=f"run_id=1&task_id={HARD.task_id}"
    )
    assert (found["paired_by"], found["num_pairs"], found["p_value"], found["test"]) == (None, 0, None, None)
    assert (found["difference"], found["low"] < -0.5 < found["high"]) == (-0.5, True)
    for text, told in (("phase=step", "run_id"), ("run_id=1&step=x", "integer"), ("run_id=1&verdict=odd", "success")):
        answer = await monitor.get("/api/rollouts/compare", first=text, second="run_id=1")
        assert answer.status_code == 422
        assert "expected the query of a set" in answer.json()["detail"]
        assert told in answer.json()["detail"]


async def test_seeds_of_a_run_are_one_arm_that_shows_each_of_them(monitor: Monitor) -> None:
    async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
        await recorder.record(replace(start(), run_name="control", log_path="/logs/control"))
        for event in (*source_of("eval", 1, (EASY, (False,)), (HARD, (False,))),):
            await recorder.record(event)
    for name, won in (("one", (True, False)), ("two", (True, True))):
        async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(replace(start(), run_name=name, log_path=f"/logs/{name}"))
            for event in source_of("eval", 1, (EASY, won[:1]), (HARD, won[1:])):
                await recorder.record(event)

    found = await monitor.json(
        "/api/rollouts/compare", first="run_id=1&phase=eval&step=1", second="run_id=2&run_id=3&phase=eval&step=1"
    )
    arm = found["second"]
    assert [(run["run_name"], run["success"]["rate"]) for run in arm["runs"]] == [("one", 0.5), ("two", 1.0)]
    assert (arm["success"]["rate"], found["difference"], found["num_pairs"]) == (0.75, 0.75, 2)
    by_task = {task["task_id"]: task["second"]["num_rollouts"] for task in found["tasks"]}
    assert by_task == {EASY.task_id: 2, HARD.task_id: 2}


@by_session
@pytest.mark.parametrize("by", ["gap", "ratio", "surprise"])
async def test_outlying_tokens_are_the_largest_of_all_tokens(shown: Shown, by: str) -> None:
    values: dict[str, float] = {}
    for item in await _list(shown):
        rollout = await shown.json(f"/api/runs/1/rollouts/{item['rollout_id']}")
        for turn in rollout["turns"]:
            tokens = await shown.json(f"/api/runs/1/rollouts/{item['rollout_id']}/turns/{turn['turn_index']}/tokens")
            pairs = zip(tokens["training_logprobs"] or (), tokens["sampling_logprobs"], strict=False)
            for place, (theirs, ours) in enumerate(pairs):
                value = {"gap": abs(theirs - ours), "ratio": theirs - ours, "surprise": -ours}[by]
                values[f"{item['rollout_id']}/{turn['turn_index']}/{place}"] = value
    found = await shown.json("/api/rollouts/tokens", run_id="1", by=by)
    places = [f"{one['rollout_id']}/{one['turn_index']}/{one['token_index']}" for one in found]
    assert len(set(places)) == len(places) == min(100, len(values))
    assert [values[place] for place in places] == [one["value"] for one in found]
    assert [one["value"] for one in found] == sorted(values.values(), reverse=True)[:100]


@by_session
async def test_first_actions_are_those_on_the_first_screen_that_most_rollouts_share(shown: Shown) -> None:
    found = await shown.json("/api/rollouts/first_actions", run_id="1")
    firsts: list[tuple[str, str, Any]] = []
    for item in await _list(shown):
        turn = (await shown.json(f"/api/runs/1/rollouts/{item['rollout_id']}"))["turns"][0]
        if turn["before"] is not None:
            firsts.append((turn["before"]["sha256"], item["rollout_id"], turn["action"]))
    screen = found["screen"]["sha256"]
    counts = Counter(sha256 for sha256, *_ in firsts)
    assert (counts[screen], found["num_rollouts"]) == (max(counts.values()), len(firsts))
    shared = {rollout_id: action for sha256, rollout_id, action in firsts if sha256 == screen}
    assert {one["rollout_id"]: one["action"] for one in found["actions"]} == shared
    nothing = await shown.json("/api/rollouts/first_actions", run_id="1", search="nothing-has-this-word")
    assert nothing == {"screen": None, "num_rollouts": 0, "actions": []}


async def test_the_change_of_a_step_is_the_sum_of_its_task_mix_and_of_what_changed_at_each_task(
    monitor: Monitor,
) -> None:
    new = replace(EASY, task_id="new")
    await record(
        monitor,
        *source_of("step", 1, (EASY, (True, True)), (HARD, (False, False))),  # 1/2
        trained(1),
        *source_of("step", 2, (EASY, (True, True)), (HARD, (True, False))),  # 3/4
        trained(2),
        *source_of(
            "step", 3, (EASY, (True, False)), (HARD, (False, False)), (HARD, (False, True)), (new, (True, True))
        ),
        trained(3),
    )

    found = await monitor.json("/api/runs/1/step/3/change")
    # before: 1 and 1/4, in equal parts; now 1/2, 0 and 1/2 (1/4 of half of the groups), and 1 at a new task
    assert (found["first_step"], found["last_step"], found["before"], found["now"]) == (1, 2, 0.625, 0.5)
    effects = {task["task_id"]: task["effect"] for task in found["tasks"]}
    assert effects == {EASY.task_id: (1 / 2 - 1) / 4, HARD.task_id: 0.0}
    assert found["task_mix"] == 0.0  # 1/4 + 2/4 * 1/4 + 1/4 for the weights of now, against 0.625
    assert found["task_mix"] + sum(effects.values()) == found["now"] - found["before"]
    only_last = await monitor.json("/api/runs/1/step/3/change", num_before=1)
    assert (only_last["first_step"], only_last["before"]) == (2, 0.75)
    first = await monitor.json("/api/runs/1/step/1/change")
    assert (first["first_step"], first["before"], first["now"], first["tasks"]) == (0, None, 0.5, [])
