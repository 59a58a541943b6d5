"""Every field that can be sent, with values of types that it does not have: the answer and all pages stay whole."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from sqlalchemy import update

from cua_rl.database.models import RolloutRow, TurnRow
from cua_rl.database.session import make_writer_engine
from cua_rl.monitor.ingest_schemas import ITEM_CLASSES, Ours, SentTraining
from tests.real.database.conftest import run_sql
from tests.real.monitor.conftest import Monitor
from tests.real.monitor.test_ingest import ACTION, DEVICE, ROLLOUT, STEP, TASK, TURN, VALIDATION, send, send_rollout

WRONG: tuple[Any, ...] = (
    True,
    -1.5,
    10**400,
    "no \x00 \ud800 text",
    [],
    [[1, None], "a"],
    {"a": {"b": [1]}, "stage_timings": [], "task_success": 3},
    "[" * 300 + "]" * 300,
)


def fields_of(item_class: Any) -> list[tuple[str, ...]]:
    """Names of fields, and of those in `cua_rl`."""
    inner = item_class.model_fields.get("cua_rl")
    ours = inner.annotation.model_fields if inner and issubclass(inner.annotation, Ours) else {}
    return [(name,) for name in item_class.model_fields] + [("cua_rl", name) for name in ours]


def changed(item: dict[str, Any], field: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(field) == 1:
        return item | {field[0]: value}
    return item | {"cua_rl": {**item.get("cua_rl", {}), field[1]: value}}


PAGES = (
    "/rollouts/{rollout}",
    "/rollouts/{rollout}/turns/0/tokens",
    "/step/3/groups/group-2",
    "/step/3",
    "/timeline",
    "/tasks",
)
"""Those that read what items say."""
MORE_PAGES = (
    *("", "/metrics", "/evaluations", "/rollouts", "/rollouts/{rollout}/download"),
    *("/tasks/task-019", "/baseline/0", "/eval/3"),
)


async def require_whole(monitor: Monitor, training_id: int, pages: Sequence[str]) -> None:
    for page in pages:
        answer = await monitor.get(f"/api/runs/{training_id}{page.format(rollout=ROLLOUT)}")
        assert answer.status_code == 200, (page, answer.status_code, answer.text[:500])


async def test_no_value_of_a_wrong_type_fails_the_server_or_breaks_a_page(monitor: Monitor) -> None:
    training_id = await send_rollout(monitor)
    rows: list[Any] = run_sql(monitor.url, "SELECT kind, min(id) FROM ingest_items GROUP BY kind")
    ids: dict[str, int] = dict(rows)
    of_run, of_turn = {"training_id": training_id}, {"turn_id": ids["turns"]}
    valid: dict[str, dict[str, Any]] = {
        "tasks": TASK,
        "validators": {"name": "v"},
        "environments": DEVICE,
        "steps": STEP | of_run,
        "baselines": of_run,
        "evals": STEP | of_run,
        "rollouts": {"rollout_id": ROLLOUT, "source_type": "step", "step_id": ids["steps"], "status": "completed"},
        "turns": TURN | {"rollout_id": ids["rollouts"]},
        "actions": ACTION | of_turn,
        "observations": {"obs_type": "model_input", "model_input_json": {"a": 1}} | of_turn,
        "validations": VALIDATION | {"rollout_id": ids["rollouts"]},
    }
    num_refused = num_stored = 0
    for field in fields_of(SentTraining):
        for value in WRONG:
            body = json.dumps({"training": changed(of_run, field, value)})
            headers = {"Content-Type": "application/json"}
            answer = await monitor.project.post("/api/ingest/batch", content=body, headers=headers)
            assert answer.status_code in (200, 422), (field, value, answer.text)
    for kind, item_class in ITEM_CLASSES.items():
        for field in fields_of(item_class):
            items = [
                changed(valid[kind] | {"client_id": f"{kind}{field}{index}"}, field, value)
                for index, value in enumerate(WRONG)
            ]
            answer = await monitor.project.post(
                "/api/ingest/batch", content=json.dumps({kind: items}), headers={"Content-Type": "application/json"}
            )
            assert answer.status_code in (200, 422), (kind, field, answer.text)
            found = answer.json()
            num_refused += len(found["errors"])
            num_stored += len(found[kind])
            if found[kind]:
                await require_whole(monitor, training_id, PAGES)
        await require_whole(monitor, training_id, MORE_PAGES[:-2])
    await require_whole(monitor, training_id, MORE_PAGES)
    assert num_refused > 3 * num_stored > 0


@pytest.mark.parametrize(
    "value", [5, "text", [1], {"a": {"b": "c"}}, {"image": 3, "tokens": "x"}, [{"text": "x"}], [[]]]
)
async def test_rows_that_an_earlier_version_stored_with_wrong_types_are_shown(monitor: Monitor, value: Any) -> None:
    training_id = await send_rollout(monitor)
    engine = make_writer_engine(monitor.url)
    with engine.begin() as connection:
        columns = ("request", "durations_s", "action", "prompt_chunks")
        connection.execute(update(TurnRow).values(dict.fromkeys(columns, value) | {"started_unix_s": 1e308}))
        connection.execute(update(RolloutRow).values(reward_parts=value, started_unix_s=float("nan")))
    engine.dispose()

    await require_whole(monitor, training_id, PAGES + MORE_PAGES[:-2])


async def test_a_batch_that_is_too_large_is_refused_whether_its_length_is_told_or_not(monitor: Monitor) -> None:
    async def chunks() -> Any:
        for _ in range(65):
            yield b" " * 2**20

    headers = {"Content-Type": "application/json"}
    told = await monitor.project.post(
        "/api/ingest/batch", content=b"{}", headers=headers | {"Content-Length": str(64 * 2**20 + 1)}
    )
    untold = await monitor.project.post("/api/ingest/batch", content=chunks(), headers=headers)
    many = await monitor.project.post("/api/ingest/batch", content=b'{"tasks":[' + b"[]," * 10**6, headers=headers)
    deep = await monitor.project.post("/api/ingest/batch", content=b'{"tasks":' + b"[" * 10**5, headers=headers)

    assert (told.status_code, untold.status_code, many.status_code, deep.status_code) == (413, 413, 413, 400)
    await send(monitor, training={"run_name": "still stored"})
