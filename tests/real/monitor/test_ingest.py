"""Payloads as other programs send them: one item a request, relations by the ids that came back."""

import json
from base64 import b64decode, b64encode
from dataclasses import asdict
from hashlib import sha256
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from tests.real.database.conftest import run_sql
from tests.real.database.recorded import make_judgement
from tests.real.monitor.conftest import Monitor

ROLLOUT = "5f1d2c3b4a5968778695a4b3c2d1e0f0"


def screenshot(color: str) -> str:
    buffer = BytesIO()
    Image.new("RGB", (32, 48), color).save(buffer, "PNG")
    return "data:image/png;base64," + b64encode(buffer.getvalue()).decode()


async def send(monitor: Monitor, **body: Any) -> dict[str, Any]:
    answer = await monitor.project.post("/api/ingest/batch", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["errors"] == []
    return answer.json()


async def send_one(monitor: Monitor, kind: str, item: dict[str, Any]) -> int:
    answer = await send(monitor, **{kind: [item]})
    assert answer[kind][0]["client_id"] == item.get("client_id")
    return answer[kind][0]["id"]


TRAINING = {
    "run_name": "exp_trial_20261121-120000",
    "status": "running",
    "current_phase": "rollout",
    "experiment_name": "exp",
    "trial_name": "trial",
    "api_key": "sk-very-secret-value",
}
TASK = {
    "client_id": "task-019",
    "task_id": "task-019",
    "name": "019_check_recent",
    "instruction": "Check the flight.",
    "description": "flight",
    "difficulty": "medium",
    "category": "app",
    "max_steps": 20,
    "validation_type": "genv_graphql",
    "tags": '["gym", "hard"]',
    "prerequisites": "[]",
    "source_type": "gym",
    "created_at": "2026-11-21T12:00:00",
}
STEP = {"step": 3, "batch": 0, "status": "running", "current_phase": "rollout", "start_time": "2026-11-21T12:00:01"}
DEVICE = {"client_id": f"{ROLLOUT}:env", "gbox_id": "run-77"}
CREATED = {"env_type": "gbox", "status": "created", "box_type": "android", "creation_time": "2026-11-21T12:00:02"}
STARTED = {
    "is_eval": False,
    "batch": 0,
    "group_num": 2,
    "env_index": 1,
    "group_id": None,
    "max_turns": 20,
    "status": "running",
    "current_phase": "env_creation",
    "start_time": "2026-11-21T12:00:03",
}
TURN = {
    "client_id": f"{ROLLOUT}:turn:1",
    "turn": 1,
    "start_time": "2026-11-21T12:00:04",
    "end_time": "2026-11-21T12:00:06.500",
    "turn_time": 2.5,
    "episode_done": False,
    "model_response": "I tap.",
    "thinking": "The button is red.",
    "metrics_json": json.dumps({"stage_timings": {"model_inference": 1.5, "action_exec": 0.25}}),
    "action_json": json.dumps({"action": "click", "x": 3, "y": 4}),
    "screen_before": screenshot("red"),
    "screen_after": screenshot("blue"),
}
ACTION = {"action_type": "click", "action_name": "click", "tokens": [1, 2], "logprobs": [-0.5, -1]}
VALIDATION = {
    "validator_id": None,
    "validation_query": "flight",
    "expected_result": "C919",
    "actual_result": "C919",
    "success": True,
    "execution_time": 0.1,
    "details_json": json.dumps({"genv_evaluation": {"score": 1}}),
}


async def send_rollout(monitor: Monitor) -> int:
    """A rollout from its start to its reward, in the order in which a trainer reports it; gives the training's id."""
    training_id: int = (await send(monitor, training=TRAINING))["training_id"]
    parents = {"client_id": ROLLOUT, "rollout_id": ROLLOUT, "source_type": "step", "model_path": "/models/qwen"}
    parents |= {"eval_id": None, "baseline_id": None, "task_id": await send_one(monitor, "tasks", TASK)}
    step = STEP | {"client_id": f"step-{training_id}-3-0", "training_id": training_id}
    parents["step_id"] = await send_one(monitor, "steps", step)
    parents["env_id"] = await send_one(monitor, "environments", DEVICE | CREATED)
    rollout = await send_one(monitor, "rollouts", parents | STARTED)
    await send_turn(monitor, rollout)
    await send_one(monitor, "environments", DEVICE | {"status": "terminated"})
    ended = {"status": "completed", "reward": 1.0, "task_success": True, "num_turns": 1}
    await send_one(monitor, "rollouts", parents | ended)
    await send(monitor, validations=[VALIDATION | {"rollout_id": rollout}])
    return training_id


async def send_turn(monitor: Monitor, rollout: int) -> None:
    """A turn with its action and what the model saw."""
    turn = await send_one(monitor, "turns", TURN | {"rollout_id": rollout})
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": screenshot("red")}}]}]
    seen = {"obs_type": "screenshot_before", "screenshot_uri": screenshot("red")}
    read = {"obs_type": "model_input", "model_input_json": {"messages": messages, "meta": {"turn": 1}}}
    observations = [one | {"turn_id": turn} for one in (seen, read)]
    await send(monitor, actions=[ACTION | {"turn_id": turn}], observations=observations)


async def test_a_rollout_that_another_trainer_sends_is_shown_like_our_own(monitor: Monitor) -> None:
    training_id = await send_rollout(monitor)

    rollout = await monitor.json(f"/api/runs/{training_id}/rollouts/{ROLLOUT}")
    (turn,) = rollout["turns"]
    assert (rollout["success"], rollout["reward"], rollout["status"]) == (True, 1.0, "completed")
    assert (rollout["task_id"], rollout["instruction"], rollout["step"]) == ("task-019", "Check the flight.", 3)
    assert rollout["device"]["device_id"] == "run-77"
    assert rollout["device"]["status"] == "released"
    assert rollout["validation"]["expected"] == "C919"
    assert (turn["thinking"], turn["answer"]) == ("The button is red.", "I tap.")
    assert turn["action"] == {"type": "click", "action": "click", "x": 3, "y": 4} or turn["action"]["type"] == "click"
    assert turn["durations_s"] == {"respond": 1.5, "execute": 0.25}
    assert (turn["before"]["width_px"], turn["before"]["height_px"]) == (32, 48)
    image = turn["request"]["messages"][0]["content"][0]["image_url"]["url"]
    assert image == f"sha256:{turn['before']['sha256']}"
    tokens = await monitor.json(f"/api/runs/{training_id}/rollouts/{ROLLOUT}/turns/0/tokens")
    assert tokens["sampling_logprobs"] == [-0.5, -1.0]
    run = await monitor.json(f"/api/runs/{training_id}")
    assert (run["project"], run["config"]["experiment_name"], run["config"]["api_key"]) == ("tests", "exp", "***")


async def test_images_of_a_received_rollout_belong_to_it(monitor: Monitor) -> None:
    """Those before and after its turns, and those that only the model was shown."""
    await send_rollout(monitor)
    seen = [{"type": "image_url", "image_url": {"url": screenshot("green")}}]
    (turn,) = run_sql(monitor.url, "SELECT id FROM ingest_items WHERE kind = 'turns'")
    read = {"obs_type": "model_input", "model_input_json": {"messages": [{"role": "user", "content": seen}]}}
    await send(monitor, observations=[read | {"turn_id": turn[0]}])

    digests = {sha256(b64decode(screenshot(color).partition(",")[2])).hexdigest() for color in ("red", "blue", "green")}
    assert {sha for (sha,) in run_sql(monitor.url, "SELECT sha256 FROM rollout_images")} == digests


async def test_what_is_sent_twice_is_stored_once(monitor: Monitor) -> None:
    first = await send_rollout(monitor)
    second = await send_rollout(monitor)

    assert first == second
    counts = "SELECT (SELECT count(*) FROM {}) FROM trainings"
    for table, count in {
        "rollouts": 1,
        "turns": 1,
        "steps": 1,
        "screenshots": 2,
        "validations": 1,
        "groups": 1,
    }.items():
        assert run_sql(monitor.url, counts.format(table)) == [(count,)], table
    assert run_sql(monitor.url, "SELECT count(*) FROM ingest_items") == [(9,)]


async def test_settings_do_not_grow_without_end_piece_by_piece(monitor: Monitor) -> None:
    pieces = [{"run_name": "r", "config_json": {name: "x" * 600_000}} for name in ("a", "b")]
    await send(monitor, training=pieces[0])

    answer = await monitor.project.post("/api/ingest/batch", json={"training": pieces[1]})

    assert answer.status_code == 422
    assert "at most 1048576 characters" in answer.json()["errors"][0]["error"]


async def test_a_run_is_not_named_by_what_would_break_a_line_of_a_log(monitor: Monitor) -> None:
    for name in ("r\nalert run=other", "r\x1b[2J", "r\u2028"):
        answer = await monitor.project.post("/api/ingest/batch", json={"training": {"run_name": name}})
        assert answer.status_code == 422
        assert "expected a run_name of one line" in answer.json()["errors"][0]["error"]
    assert (await monitor.json("/api/runs"))["items"] == []


async def test_one_bad_item_does_not_spoil_its_batch(monitor: Monitor) -> None:
    training_id = (await send(monitor, training={"run_name": "r"}))["training_id"]
    steps = [
        {"client_id": "good", "training_id": training_id, "step": 0, "status": "completed", "reward_mean": 0.5},
        {"client_id": "no-number", "training_id": training_id, "step": "many"},
        {"client_id": "not-mine", "training_id": training_id + 1000, "step": 1},
        {"client_id": "unknown-status", "training_id": training_id, "step": 2, "status": "fine"},
    ]

    answer = await monitor.project.post("/api/ingest/batch", json={"steps": steps})

    assert answer.status_code == 200
    assert [mapped["client_id"] for mapped in answer.json()["steps"]] == ["good"]
    assert [(error["index"], error["client_id"]) for error in answer.json()["errors"]] == [
        (1, "no-number"),
        (2, "not-mine"),
        (3, "unknown-status"),
    ]
    assert (await monitor.json(f"/api/runs/{training_id}"))["num_completed_steps"] == 1
    refused = await monitor.project.post("/api/ingest/batch", json={"steps": steps[1:]})
    assert refused.status_code == 422


@pytest.mark.parametrize(
    "judgement",
    [
        {"votes": []},
        {**asdict(make_judgement(is_reached=True)), "duration_s": "long"},
        {**asdict(make_judgement(is_reached=True)), "prompt": "Another one."},
    ],
)
async def test_a_judgement_that_is_none_or_not_of_its_prompt_is_refused(monitor: Monitor, judgement: object) -> None:
    training_id: int = (await send(monitor, training=TRAINING))["training_id"]
    step = await send_one(monitor, "steps", STEP | {"client_id": "s", "training_id": training_id})
    rollout = {"client_id": "r", "rollout_id": "r", "source_type": "step", "step_id": step, **STARTED}

    body = json.dumps({"rollouts": [rollout | {"cua_rl": {"judgement": judgement}}]})
    headers = {"Content-Type": "application/json"}
    answer = await monitor.project.post("/api/ingest/batch", content=body, headers=headers)

    assert answer.status_code == 422
    assert "judgement" in answer.text
    assert run_sql(monitor.url, "SELECT count(*) FROM judgements") == [(0,)]


async def test_a_run_is_ended_by_its_training_id(monitor: Monitor) -> None:
    training_id = (await send(monitor, training={"run_name": "r", "status": "running"}))["training_id"]

    await send(monitor, training={"status": "completed", "training_id": training_id})

    run = await monitor.json(f"/api/runs/{training_id}")
    assert (run["status"], run["run_name"]) == ("completed", "r")
    assert [change["new_status"] for change in run["history"]] == ["running", "completed"]


async def test_ingest_needs_a_project_token_and_stays_in_its_project(monitor: Monitor) -> None:
    training_id = (await send(monitor, training={"run_name": "r"}))["training_id"]
    run_sql(monitor.url, "INSERT INTO projects (name, token_sha256) VALUES ('other', sha256('other-token'))")
    body = {"training": {"training_id": training_id, "status": "failed"}}

    for client, headers in (
        (monitor.stranger, {}),
        (monitor.client, {}),
        (monitor.stranger, {"Authorization": "Bearer x"}),
    ):
        assert (await client.post("/api/ingest/batch", json=body, headers=headers)).status_code == 401
    other = {"Authorization": "Bearer other-token"}
    assert (await monitor.stranger.post("/api/ingest/batch", json=body, headers=other)).status_code == 422
    assert (await monitor.json(f"/api/runs/{training_id}"))["status"] == "running"
    assert run_sql(
        monitor.url, "SELECT count(*) FROM projects WHERE token_sha256 = '" + monitor.project_token + "'"
    ) == [(0,)]
