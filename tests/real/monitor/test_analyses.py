"""What recipes found out about a run, as the API shows it: suites, steps made again, checkpoints asked."""

from dataclasses import replace

import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.types.actions import Click
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, start
from tests.real.monitor.analyses import asked_result, replay_result, save, suite_result
from tests.real.monitor.conftest import Monitor, Shown
from tests.real.monitor.events import make_step_events
from tests.real.monitor.test_run_figures import EASY, record, source_of


@pytest.mark.asyncio(loop_scope="session")
async def test_a_run_that_nobody_looked_at_again_has_no_analyses(shown: Shown) -> None:
    for path, nothing in {"suite": None, "step/1/replay": None, "analyses": []}.items():
        assert await shown.json(f"/api/runs/1/{path}") == nothing
    (rollout, *_) = (await shown.json("/api/rollouts", run_id="1"))["items"]
    assert await shown.json(f"/api/runs/1/rollouts/{rollout['rollout_id']}/asked") == []
    assert (await shown.client.get("/api/runs/1/rollouts/nothing/asked")).status_code == 404


async def test_every_model_of_a_suite_has_its_comparisons_the_newest_first(monitor: Monitor) -> None:
    for name in ("a", "b", "c"):
        began = replace(start(), run_name=f"suite@{name}", log_path="/suites/suite", total_steps=0)
        async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(began)
            await recorder.flush()
    before = [True] * 20 + [False] * 10
    worse, better = [False] * 8 + [True] * 12 + [False] * 10, [True] * 21 + [False] * 9
    save(monitor.url, "2", suite_result(before, worse, accepted="a", first="a", second="b"), kind="suite")
    save(monitor.url, "3", suite_result(before, better, accepted="c", first="a", second="c"), kind="suite")

    found = [await monitor.json(f"/api/runs/{run}/suite") for run in (1, 2, 3)]

    assert found[0] == found[1] == found[2]
    assert (found[0]["name"], found[0]["accepted"]) == ("suite", {"name": "c", "run_id": "3"})
    taken, refused = found[0]["comparisons"]
    assert (refused["candidate"], refused["accepted"]) == (
        {"name": "b", "run_id": "2"},
        {"name": "a", "run_id": "1"},
    )
    pair = refused["pair"]
    assert (pair["num_tasks"], pair["num_only_first"], pair["num_only_second"]) == (30, 8, 0)
    assert refused["p_value"] == 0.5**8  # eight of eight tasks that differ, by chance
    assert (refused["is_regression"], refused["is_accepted"]) == (True, False)
    assert pair["difference"] == pytest.approx(-8 / 30)
    assert pair["low"] < pair["difference"] < pair["high"] < 0
    assert (taken["is_regression"], taken["is_accepted"], taken["p_value"]) == (False, True, 1.0)
    assert [one["kind"] for one in await monitor.json("/api/runs/1/analyses")] == ["suite"]
    run_sql(monitor.url, "DELETE FROM trainings WHERE run_name = 'suite@a'")
    found = await monitor.json("/api/runs/3/suite")
    assert found["comparisons"][0]["accepted"] == {"name": "a", "run_id": None}


async def test_models_of_a_suite_may_have_names_with_an_at_sign(monitor: Monitor) -> None:
    for name in ("runs/x@24", "runs/y@24"):
        began = replace(start(), run_name=f"suite@{name}", log_path="/suites/suite", total_steps=0)
        async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(began)
            await recorder.flush()
    found = suite_result([True] * 9, [True] * 9, accepted="runs/x@24", first="runs/x@24", second="runs/y@24")
    save(monitor.url, "2", found, kind="suite")

    suite = await monitor.json("/api/runs/1/suite")

    (compared,) = suite["comparisons"]
    shown = (suite["accepted"], compared["accepted"], compared["candidate"])
    assert [one["run_id"] for one in shown] == ["1", "1", "2"]


async def test_a_step_made_again_has_its_variants_side_by_side_and_the_newest_replay_counts(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True, False, True))))
    rollouts = [
        {**one, "advantage": 2.0 * one["success"] - 1}
        for one in (await monitor.json("/api/rollouts", run_id="1", step=1))["items"]
    ]
    assert len(rollouts) == 3
    save(monitor.url, "1", replay_result(rollouts, {}, is_equal=False), kind="replay", step=1)
    bare = await monitor.json("/api/runs/1/step/1/replay")
    assert (bare["variants"], bare["rollouts"], bare["adapter"]["is_equal"]) == ([], [], False)
    save(
        monitor.url, "1", replay_result(rollouts, {"": 1, "loss=ppo": -2, "learning_rate=0": 0}), kind="replay", step=1
    )

    found = await monitor.json("/api/runs/1/step/1/replay")

    assert [one["name"] for one in found["variants"]] == ["as taken", "loss=ppo", "learning_rate=0"]
    assert [one["cosine"] for one in found["variants"]] == [1.0, -1.0, None]
    assert [(one["successes"], one["failures"]) for one in found["variants"]] == [(1, -1), (-2, 2), (0, 0)]
    assert [(one["rollout_id"], one["changes"]) for one in found["rollouts"]] == [
        (one["rollout_id"], [one["advantage"], -2 * one["advantage"], 0]) for one in rollouts
    ]
    ((task_id, effects),) = [(one["task_id"], one["effects"]) for one in found["tasks"]]
    assert task_id == EASY.task_id
    assert [each["successes"] for each in effects] == [1, -2, 0]
    assert (found["is_same_machine"], found["adapter"]["num"]) == (True, 1376)
    assert await monitor.json("/api/runs/1/step/2/replay") is None
    assert await monitor.json("/api/runs/1/analyses") == [
        {"kind": "replay", "step": 1, "rollout_id": None, "turn_index": None}
    ]


async def test_turns_that_were_asked_about_have_the_answers_and_go_with_their_rollout(monitor: Monitor) -> None:
    await record(monitor, *make_step_events(1))
    (rollout, *_) = (await monitor.json("/api/rollouts", run_id="1", verdict="success"))["items"]
    name, here = rollout["rollout_id"], Click(x=3, y=4)
    old, new = ({"base": [Click(x=1, y=1)]}, {"base": [here, Click(x=9, y=9)], "step 1": [here, here]})
    for turn, clicks in ((2, old), (1, old), (1, new)):
        place = {"rollout_id": name, "turn_index": turn - 1}
        save(monitor.url, "1", asked_result(name, turn, here, clicks), kind="answers", **place)

    first, second = await monitor.json(f"/api/runs/1/rollouts/{name}/asked")

    assert (first["turn_index"], second["turn_index"], len(second["checkpoints"])) == (0, 1, 1)
    assert (first["logprob"], first["num_tokens"]) == (-1.5, 2)
    assert [one["name"] for one in first["checkpoints"]] == ["base", "step 1"]
    assert [one["logprob"] for one in first["checkpoints"]] == [-4.5, -3.5]
    assert [(one["num_same"], len(one["samples"])) for one in first["checkpoints"]] == [(1, 3), (2, 3)]
    assert [one["is_own"] for one in first["checkpoints"]] == [False, True]
    assert first["checkpoints"][0]["samples"][1]["actions"] == [{"type": "Click", "x": 9, "y": 9}]
    assert first["checkpoints"][0]["samples"][2]["actions"] == [{"type": "TypeText", "text": "\x00 no click"}]
    places = [(one["rollout_id"], one["turn_index"]) for one in await monitor.json("/api/runs/1/analyses")]
    assert places == [(name, 0), (name, 1)]
    run_sql(monitor.url, "DELETE FROM rollouts")
    assert run_sql(monitor.url, "SELECT count(*) FROM analyses") == [(0,)]
