"""What the read API answers about a run: lists with filters and pages, figures, images, and what is not there."""

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.real.database.conftest import run_sql
from tests.real.monitor.conftest import Shown

pytestmark = pytest.mark.asyncio(loop_scope="session")
RUN = "/api/runs/1"
FILTERS: dict[str, Callable[[Any], Any]] = {
    name: lambda item, name=name: item[name]
    for name in ("phase", "step", "task_id", "seed", "status", "stop_reason", "device_id")
}


async def _rollouts(shown: Shown, **wanted: object) -> list[Any]:
    return (await shown.json(f"{RUN}/rollouts", limit=200, **wanted))["items"]


async def test_rollouts_are_narrowed_by_everything_that_the_page_offers(shown: Shown) -> None:
    everything = await _rollouts(shown)
    assert len(everything) == 12  # a baseline and two steps, each of three rollouts and one that lost its device

    for name, value_of in FILTERS.items():
        values = {value_of(item) for item in everything} - {None}
        assert values, name
        for value in values:
            expected = [item["rollout_id"] for item in everything if value_of(item) == value]
            found = await _rollouts(shown, **{name: str(value).lower() if isinstance(value, bool) else value})
            assert [item["rollout_id"] for item in found] == expected, (name, value)
    one = everything[3]["rollout_id"]
    assert [item["rollout_id"] for item in await _rollouts(shown, search=one[:9])] == [one]
    assert len(await _rollouts(shown, search="OPEN_set")) == 12
    assert await _rollouts(shown, search="%") == []
    unread = await _rollouts(shown, failure_kind="json")
    counted = run_sql(
        shown.url,
        "SELECT count(DISTINCT rollout_pk) FROM turns WHERE failure_kind = 'json' AND rollout_pk IN (SELECT id FROM"
        " rollouts WHERE training_id = 1)",
    )
    assert len(unread) == counted[0][0] > 0


async def test_pages_of_a_list_join_to_the_whole_list(shown: Shown) -> None:
    everything = [item["rollout_id"] for item in await _rollouts(shown)]
    found: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        page = await shown.json(f"{RUN}/rollouts", limit=5, **cursor)
        found += [item["rollout_id"] for item in page["items"]]
        if page["next_cursor"] is None:
            break
        cursor = {"cursor": page["next_cursor"]}
    assert found == everything
    for bad in ("x", "W10", "WyJhIl0", "WzFlNDAwXQ"):  # not ours; []; ["a"]; [1e400]
        answer = await shown.client.get(f"{RUN}/rollouts", params={"cursor": bad})
        assert answer.status_code == 422, bad
        assert "expected the next_cursor" in answer.json()["detail"]


async def test_what_is_not_there_is_404_with_what_was_expected(shown: Shown) -> None:
    (rollout, *_) = await _rollouts(shown, phase="step")
    missing = [
        *("/api/runs/99", "/api/runs/x.1", "/api/runs/" + "9" * 40, f"/api/screenshots/{'0' * 64}", "/api/nothing"),
        *(f"{RUN}/rollouts/none", f"{RUN}/rollouts/none/overrides", f"{RUN}/rollouts/none/download"),
        *(f"{RUN}/step/77", f"{RUN}/eval/0", f"{RUN}/step/1/groups/none", f"{RUN}/tasks/none"),
        *(f"{RUN}/rollouts/{rollout['rollout_id']}/turns/99/tokens", "/api/runs/compare?run_id=99"),
        *(f"/api/runs/99/{part}" for part in ("metrics", "timeline", "evaluations", "tasks", "rollouts")),
        *(f"/api/rollouts{part}?run_id=1&run_id=99" for part in ("", "/summary")),
    ]
    for path in missing:
        answer = await shown.client.get(path)
        assert (answer.status_code, "expected" in answer.json()["detail"]) == (404, True), path


async def test_a_run_is_found_by_name_and_status_and_shows_its_figures(shown: Shown) -> None:
    (run,) = (await shown.json("/api/runs", search="RU", status="running"))["items"]
    assert (run["run_id"], run["num_completed_steps"], run["total_steps"]) == ("1", 2, 4)
    assert (await shown.json("/api/runs", search="no such run"))["items"] == []
    assert (await shown.json("/api/runs", status="failed"))["items"] == []

    series = await shown.json(f"{RUN}/metrics", name=["loss/policy", "odd"])
    assert series["series"] == {"loss/policy": [0.1 + 0.2] * 2, "odd": [None, None]}  # infinity has no JSON
    assert (await shown.json(f"{RUN}/metrics", from_step=2))["steps"] == [2]
    assert [point["phase"] for point in series["evaluations"]] == ["baseline"]
    timeline = await shown.json(f"{RUN}/timeline")
    assert [(item["phase"], item["step"]) for item in timeline] == [("baseline", 0), ("step", 1), ("step", 2)]
    (task,) = await shown.json(f"{RUN}/tasks")
    assert task["success"]["num_rollouts"] == sum(point["num_rollouts"] for point in series["success"]) == 6
    history = (await shown.json(f"{RUN}/tasks/{task['task_id']}"))["history"]
    assert [(point["phase"], point["step"]) for point in history] == [("step", 1), ("step", 2), ("baseline", 0)]


async def test_a_token_leads_to_its_screenshot_request_adapter_and_reward(shown: Shown) -> None:
    step = await shown.json(f"{RUN}/step/1")
    cell = next(cell for cell in step["groups"][0]["rollouts"] if cell["status"] == "completed")
    rollout = await shown.json(f"{RUN}/rollouts/{cell['rollout_id']}")
    tokens = await shown.json(f"{RUN}/rollouts/{cell['rollout_id']}/turns/0/tokens")
    turn = rollout["turns"][0]
    assert rollout["reward"] == cell["reward"]
    assert turn["request"]["temperature"] == 1.0
    assert turn["trained_at_step"] == 1
    assert len(tokens["tokens"]) == len(tokens["sampling_logprobs"]) == len(tokens["training_logprobs"])
    image = await shown.client.get(f"/api/screenshots/{turn['before']['sha256']}")
    assert hashlib.sha256(image.content).hexdigest() == turn["before"]["sha256"]
    assert (image.headers["content-type"], image.content[:4]) == ("image/png", b"\x89PNG")
    again = await shown.client.get(image.url, headers={"If-None-Match": image.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


async def test_a_verdict_is_shown_beside_what_was_trained_on(shown: Shown) -> None:
    (rollout, *_) = await _rollouts(shown, phase="step", step=1, stop_reason="finished")
    path = f"{RUN}/rollouts/{rollout['rollout_id']}"
    for success in (True, False):
        verdict = {"success": success, "reason": "seen by a person", "actor": "Ada"}
        assert (await shown.client.post(f"{path}/overrides", json=verdict)).status_code == 201
    told = await shown.json(path)
    assert (told["success"], told["reward"]) == (rollout["success"], rollout["reward"])
    assert told["override_success"] is False  # the newest
    assert [one["success"] for one in told["overrides"]] == [True, False]
    stored = run_sql(shown.url, f"SELECT success FROM rollouts WHERE rollout_id = '{rollout['rollout_id']}'")
    assert stored == [(rollout["success"],)]
    for bad in ({}, {"success": True, "reason": "", "actor": "a"}, {"reward": 1e9, "reason": "r", "actor": "a"}):
        assert (await shown.client.post(f"{path}/overrides", json=bad)).status_code == 422


async def test_a_rollout_shows_what_the_judge_said_with_its_votes_prompt_and_cost(shown: Shown) -> None:
    rollouts = [await shown.json(f"{RUN}/rollouts/{item['rollout_id']}") for item in await _rollouts(shown, step=1)]
    by_member = {rollout["member_index"]: rollout["judgement"] for rollout in rollouts if rollout["reward"] is not None}
    (lost,) = (rollout["judgement"] for rollout in rollouts if rollout["reward"] is None)

    assert by_member[0] is None
    said = by_member[2]
    assert (said["model"], said["success"], said["decides"], said["score"]) == ("judge-1", True, False, 0.5)
    assert said["prompt"] == "Decide.\x00"
    assert (said["agreement"], said["num_prompt_tokens"], said["cost_usd"]) == (2 / 3, 2000, 0.1 + 0.2)
    assert [vote["success"] for vote in said["votes"]] == [True, True, None]
    assert said["votes"][2]["error"] == "503"
    assert (lost["success"], lost["decides"], lost["reason"], lost["cost_usd"]) == (None, True, "503", None)
