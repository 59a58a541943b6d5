"""What the monitor says about the size of runs, and shows of pruned ones."""

from dataclasses import replace
from pathlib import Path

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import TrainingEnded
from cua_rl.recipes.export_rollout import ExportConfig
from cua_rl.recipes.export_rollout import cli_main as export
from cua_rl.recipes.prune import PruneConfig, cli_main
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, source_events, start, step_end
from tests.real.monitor.conftest import Monitor


async def record_run(url: str, name: str = "run") -> None:
    group = make_group(1)
    begin = replace(start(), run_name=name, log_path=f"/logs/{name}")
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in (begin, *source_events(group), step_end(group), TrainingEnded(status="completed")):
            await recorder.record(event)


async def test_a_pruned_screenshot_is_a_box_of_its_size_that_says_so(monitor: Monitor, tmp_path: Path) -> None:
    await record_run(monitor.url)
    before = (await monitor.json("/api/runs/1/rollouts"))["items"]
    await cli_main(PruneConfig(run="run", keep="none", dry_run=False), {"DATABASE_URL": monitor.url})

    assert (await monitor.json("/api/runs/1/rollouts"))["items"] == before
    rollout = await monitor.json(f"/api/runs/1/rollouts/{before[0]['rollout_id']}")
    assert rollout["pruned_at"] > rollout["started_at"]  # of those in prompts alone, the page says so by this
    shown = rollout["turns"][0]["before"]
    answer = await monitor.get(f"/api/screenshots/{shown['sha256']}")
    assert answer.headers["content-type"] == "image/svg+xml"
    assert answer.headers["cache-control"] == "no-store"
    assert f'width="{shown["width_px"]}" height="{shown["height_px"]}"' in answer.text
    assert ">pruned</text>" in answer.text

    out = tmp_path / "rollout.html"
    await export(ExportConfig(run="run", step=1, out=str(out)), {"DATABASE_URL": monitor.url})
    assert "data:image/svg+xml;base64," in out.read_text()


async def test_a_rollout_names_its_worker_and_is_found_by_it(monitor: Monitor) -> None:
    await record_run(monitor.url)
    run_sql(monitor.url, "UPDATE rollouts SET worker = 'worker-2' WHERE id = (SELECT max(id) FROM rollouts)")

    listed = [
        (await monitor.json("/api/runs/1/rollouts", **wanted))["items"] for wanted in ({}, {"worker": "worker-2"})
    ]

    assert listed[1] == listed[0][:1]
    shown = [await monitor.json(f"/api/runs/1/rollouts/{item['rollout_id']}") for item in listed[0][:2]]
    assert [(one["worker"], one["pruned_at"]) for one in shown] == [("worker-2", None), (None, None)]


async def test_the_size_of_a_run_is_that_of_its_rows_and_images(monitor: Monitor) -> None:
    await record_run(monitor.url)
    stored = "SELECT sum(octet_length(data)) FROM screenshots"
    ((num_bytes,),) = run_sql(monitor.url, stored)

    run = await monitor.json("/api/runs/1")
    assert run["screenshots_bytes"] == num_bytes
    assert run["rows_bytes"] > 1000

    await record_run(monitor.url, "same")  # it shows the same images: each run counts half of them
    halves = [(await monitor.json(f"/api/runs/{number}"))["screenshots_bytes"] for number in (1, 2)]
    assert [abs(2 * half - int(str(num_bytes))) <= 1 for half in halves] == [True, True]

    for name in ("run", "same"):
        await cli_main(PruneConfig(run=name, dry_run=False), {"DATABASE_URL": monitor.url})
    ((left,),) = run_sql(monitor.url, stored)
    assert 0 < int(str(left)) < int(str(num_bytes))
    pruned = await monitor.json("/api/runs/1")
    assert abs(2 * pruned["screenshots_bytes"] - int(str(left))) <= 1
    assert pruned["rows_bytes"] >= run["rows_bytes"]


async def test_the_size_of_a_large_run_is_estimated(monitor: Monitor) -> None:
    await record_run(monitor.url)
    members = "SELECT id FROM rollouts ORDER BY id LIMIT 1"
    run_sql(
        monitor.url,
        "INSERT INTO rollouts (training_id, group_pk, rollout_id, task_id, seed, group_index, member_index, status, "
        "num_turns, started_at) SELECT 1, 1, 'more ' || n, 'task', 1, 0, n, 'completed', 1, now() "
        "FROM generate_series(1, 5000) n",
    )
    run_sql(
        monitor.url,
        "INSERT INTO screenshots (sha256, size_bytes, format, width_px, height_px) SELECT 'image ' || id, "
        f"900 + id % 200, 'png', 1, 1 FROM rollouts WHERE id NOT IN ({members})",
    )
    run_sql(
        monitor.url,
        "INSERT INTO rollout_images (rollout_pk, sha256) SELECT split_part(sha256, ' ', 2)::bigint, sha256 "
        "FROM screenshots WHERE sha256 LIKE 'image %'",
    )

    ((expected,),) = run_sql(monitor.url, "SELECT sum(coalesce(size_bytes, octet_length(data))) FROM screenshots")
    run = await monitor.json("/api/runs/1")
    assert 0.8 * int(str(expected)) < run["screenshots_bytes"] < 1.25 * int(str(expected))
