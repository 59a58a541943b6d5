"""Notes and tags of people on runs, rollouts and turns, and the sets that they make."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.security import AccessRules
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, start
from tests.real.monitor.conftest import WRITE_TOKEN, Monitor
from tests.real.monitor.test_run_figures import EASY, HARD, record, source_of, trained

pytestmark = pytest.mark.asyncio


async def _add(monitor: Monitor, **fields: object) -> Any:
    answer = await monitor.client.post("/api/runs/1/notes", json={"actor": "Ada"} | fields)
    assert answer.status_code == 201, answer.text
    return answer.json()


async def _ids(monitor: Monitor, **wanted: object) -> list[str]:
    found = await monitor.json("/api/rollouts", **{"run_id": 1, "status": "completed"} | wanted)
    return [one["rollout_id"] for one in found["items"]]


async def test_tags_and_notes_make_sets_whose_sizes_are_counted(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True, False)), (HARD, (False, False))), trained(1))
    first, second, third, fourth = await _ids(monitor)
    await _add(monitor, rollout_id=first, tag="wrong icon")
    await _add(monitor, rollout_id=first, tag="wrong icon")  # is there already
    await _add(monitor, rollout_id=first, text="It took 100 % of the turns.")
    await _add(monitor, rollout_id=second, tag="look again")
    await _add(monitor, rollout_id=third, tag="wrong icon", turn_index=0)
    notes = await _add(monitor, rollout_id=third, tag="wrong icon")  # the whole rollout as well

    assert [(one["tag"], one["turn_index"], one["actor"]) for one in notes] == [
        ("wrong icon", 0, "Ada"),
        ("wrong icon", None, "Ada"),
    ]
    assert await _ids(monitor, tag="wrong icon") == [first, third]
    assert await _ids(monitor, tag="wrong") == []
    assert await _ids(monitor, note="100 %") == [first]
    assert await _ids(monitor, note="100 _") == []  # no pattern
    assert await _ids(monitor, tag="a\x00b") == await _ids(monitor, note="a\x00b") == []
    found = await monitor.json("/api/rollouts/summary", run_id=1)
    assert {one["name"]: one["count"] for one in found["tags"]} == {"wrong icon": 2, "look again": 1}
    shown = {one["rollout_id"]: one["given_tags"] for one in (await monitor.json("/api/rollouts", run_id=1))["items"]}
    assert [shown[one] for one in (first, second, third, fourth)] == [
        ["wrong icon"],
        ["look again"],
        ["wrong icon"],
        [],
    ]


async def test_a_run_is_found_by_its_tags_which_are_not_those_of_its_rollouts(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True,))), trained(1))
    (rollout, *_) = await _ids(monitor)
    await _add(monitor, tag="baseline of the paper")
    await _add(monitor, rollout_id=rollout, tag="odd")

    (run,) = (await monitor.json("/api/runs", search="of the paper"))["items"]
    assert run["tags"] == ["baseline of the paper"]
    assert (await monitor.json("/api/runs", search="odd"))["items"] == []
    own = await monitor.json("/api/runs/1/notes")
    assert [one["tag"] for one in own] == ["baseline of the paper"]

    left = await monitor.client.delete(f"/api/runs/1/notes/{own[0]['note_id']}")
    assert (left.status_code, left.json()) == (200, [])
    assert (await monitor.client.delete(f"/api/runs/1/notes/{own[0]['note_id']}")).status_code == 404
    assert len(await monitor.json("/api/runs/1/notes", rollout_id=rollout)) == 1


async def test_only_writers_note_something_and_only_on_what_is_there(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True,))), trained(1))
    (rollout, *_) = await _ids(monitor)
    (note,) = await _add(monitor, text="mine")
    for stranger in (monitor.stranger, monitor.project):
        body = {"actor": "Eve", "tag": "theirs"}
        assert (await stranger.post("/api/runs/1/notes", json=body)).status_code == 401
        assert (await stranger.delete(f"/api/runs/1/notes/{note['note_id']}")).status_code == 401
    refused = {
        "neither": {},
        "both": {"tag": "a", "text": "b"},
        "a turn of a run": {"tag": "a", "turn_index": 0},
        "empty": {"text": ""},
        "spaces": {"tag": " a"},
        "long": {"tag": "a" * 61},
        "unknown": {"tag": "a", "colour": "red"},
    }
    for name, fields in refused.items():
        answer = await monitor.client.post("/api/runs/1/notes", json={"actor": "Ada"} | fields)
        assert answer.status_code == 422, name
    for fields in ({"rollout_id": "none"}, {"rollout_id": rollout, "turn_index": 99}):
        answer = await monitor.client.post("/api/runs/1/notes", json={"actor": "Ada", "tag": "a"} | fields)
        assert answer.status_code == 404
    assert (await monitor.get("/api/runs/1/notes", rollout_id="none")).status_code == 404
    assert len(await monitor.json("/api/runs/1/notes")) == 1


async def test_every_answer_that_names_a_run_names_its_alias(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True,))), trained(1))
    (rollout, *_) = await _ids(monitor)
    assert (await monitor.client.put("/api/runs/1/mark", json={"alias": "the good one"})).status_code == 200
    run, step = "/api/runs/1", await monitor.json("/api/runs/1/step/1")
    answers = [
        await monitor.json(run),
        step,
        await monitor.json(f"{run}/step/1/groups/{step['groups'][0]['group_id']}"),
        await monitor.json(f"{run}/rollouts/{rollout}"),
        await monitor.json(f"{run}/tasks/{EASY.task_id}"),
        (await monitor.json("/api/rollouts/summary", run_id=1))["runs"][0],
        (await monitor.json("/api/rollouts/compare", first="run_id=1", second="run_id=1"))["second"]["runs"][0],
    ]
    assert {(one["alias"], one["run_name"]) for one in answers} == {("the good one", step["run_name"])}
    assert "<title>the good one, " in (await monitor.get(f"{run}/rollouts/{rollout}/page")).text


async def test_a_folder_of_several_runs_is_not_called_like_one_of_them(monitor: Monitor, tmp_path: Path) -> None:
    rules = AccessRules(write_token=WRITE_TOKEN)
    app = make_app(Databases([open_database(monitor.url, folder=tmp_path)]), rules)
    transport = httpx.ASGITransport(app=guard(app, rules), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {WRITE_TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        await record(monitor, *source_of("step", 1, (EASY, (True,))), trained(1))
        await client.put("/api/runs/1/mark", json={"alias": "alone"})
        async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
            await recorder.record(replace(start(), run_name="another model"))
        await client.put("/api/runs/2/mark", json={"alias": "one of two"})
        found = await client.get("/api/runs")
    assert [run["alias"] for run in found.json()["items"]] == ["one of two", "alone"]
    assert json.loads((tmp_path / "mark.json").read_text())["alias"] == "alone"


async def test_notes_go_with_their_rollout(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True,))), trained(1))
    (rollout, *_) = await _ids(monitor)
    await _add(monitor, rollout_id=rollout, tag="gone soon")
    await _add(monitor, tag="stays")
    run_sql(monitor.url, "DELETE FROM rollouts")
    assert run_sql(monitor.url, "SELECT tag FROM notes") == [("stays",)]
