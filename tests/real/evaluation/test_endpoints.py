"""The whole evaluation of endpoints, from the command line to its files and its database."""

import asyncio
import json
import shutil
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.recipes.evaluate import EvaluateConfig, cli_main, main
from cua_rl.reporting.json_lines import read_records
from tests.doubles.judge_endpoint import KEY as JUDGE_KEY
from tests.doubles.judge_endpoint import MODEL, JudgeEndpoint, verdict
from tests.evaluation.fake_endpoint import KEY, TAP, FakeEndpoint, serve_in_thread
from tests.real.evaluation.shown import fetch_rollouts, fetch_runs, get, open_monitor


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeEndpoint:
    monkeypatch.setenv("FAKE_ENDPOINT_KEY", KEY)
    return FakeEndpoint()


@pytest.fixture
def url(fake: FakeEndpoint) -> Generator[str]:
    with serve_in_thread(fake) as address:
        yield address


def arguments(url: str, folder: Path, *more: str, apis: tuple[str, ...] = ("chat", "responses")) -> list[str]:
    models = [
        {"name": f"by {api}", "base_url": url, "model": "gpt", "api": api, "api_key_env": "FAKE_ENDPOINT_KEY"}
        for api in apis
    ]
    return [
        f"models={json.dumps(models)}",
        'tasks={"source_type": "demo_eval", "tags": ["demo"]}',
        f"log_path={folder}",
        "max_turns=2",
        *more,
    ]


def attempts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def test_endpoints_are_compared_on_the_same_tasks(fake: FakeEndpoint, url: str, tmp_path: Path) -> None:
    fake.arguments = deque([TAP])

    assert main(arguments(url, tmp_path / "out", "num_tasks=3", "num_attempts=2")) == 0

    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(model["name"], model["num_rollouts"], model["num_tasks"]) for model in results["models"]] == [
        ("by chat", 6, 3),
        ("by responses", 6, 3),
    ]
    assert set(results["models"][0]["pass_at"]) == {"1", "2"}
    assert results["pairs"][0]["num_tasks"] == 3
    by_model = [[(item["task_id"], item["seed"]) for item in attempts(tmp_path / "out")[at : at + 6]] for at in (0, 6)]
    assert sorted(by_model[0]) == sorted(by_model[1])
    assert (tmp_path / "out" / "results.png").read_bytes().startswith(b"\x89PNG")
    written = b"".join(path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert KEY.encode() not in written
    asyncio.run(assert_recorded(tmp_path / "out", "by chat", "by responses"))


async def assert_recorded(folder: Path, *models: str) -> None:
    """Every line of attempts.jsonl names a rollout of its model in the database, which says the same."""
    lines: list[dict[str, Any]] = read_records(folder / "attempts.jsonl")
    async with open_monitor(folder) as client:
        runs = await fetch_runs(client)
        assert set(runs) == {f"{folder.name}@{model}" for model in models}
        for model in models:
            run, mine = runs[f"{folder.name}@{model}"], [line for line in lines if line["model"] == model]
            assert (run["status"], run["log_path"], run["model_name"]) == ("completed", str(folder), "gpt")
            assert (run["last_eval"]["num_rollouts"], run["last_eval_step"], run["progress"]) == (len(mine), 0, 1.0)
            rollouts = {item["rollout_id"]: item for item in await fetch_rollouts(client, run["run_id"])}
            ended = [item for item in rollouts.values() if item["status"] == "completed"]
            assert len(ended) == len(mine)
            for line in mine:
                item = rollouts[line["rollout_id"]]
                assert (item["task_id"], item["member_index"]) == (line["task_id"], line["attempt"])
                assert (item["success"], item["reward"], item["num_turns"], item["stop_reason"]) == (
                    line["success"],
                    line["reward"],
                    line["num_turns"],
                    line["stop_reason"],
                )
                place = (item["task_id"], item["group_id"], item["member_index"])
                tries = [one for one in rollouts.values() if place == tuple(one[name] for name in PLACE)]
                assert sum(one["status"] == "failed" for one in tries) == line["num_faults"]


PLACE = ("task_id", "group_id", "member_index")


def test_a_broken_off_evaluation_makes_only_what_is_missing(fake: FakeEndpoint, url: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert main(arguments(url, folder, "num_tasks=4", apis=("chat",))) == 0
    lines = (folder / "attempts.jsonl").read_text().splitlines(keepends=True)
    (folder / "attempts.jsonl").write_text("".join(lines[:2]) + lines[2][:20])
    fake.requests.clear()

    status = main(arguments(url, folder, "num_tasks=4", "behavior_if_log_dir_exists=resume", apis=("chat",)))

    assert status == 0
    assert len(fake.requests) == 2
    assert json.loads((folder / "results.json").read_text())["models"][0]["num_rollouts"] == 4
    asyncio.run(assert_recorded(folder, "by chat"))


def test_a_name_means_the_same_model_however_many_were_added_since(
    fake: FakeEndpoint, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, resume = tmp_path / "out", "behavior_if_log_dir_exists=resume"
    assert main(arguments(url, folder, "num_tasks=2", apis=("chat",))) == 0
    assert main(arguments(url, folder, "num_tasks=2", resume, apis=("responses",))) == 0

    assert main(arguments(f"{url}/other", folder, "num_tasks=2", resume, apis=("chat",))) == 2
    assert "got other models (by chat)" in capsys.readouterr().err


def test_attempts_that_a_fault_ended_are_in_the_database_with_their_faults(
    fake: FakeEndpoint, url: str, tmp_path: Path
) -> None:
    fake.failures = deque([(403, "forbidden")])

    assert main(arguments(url, tmp_path / "out", "num_tasks=2", "max_concurrent_rollouts=1", apis=("chat",))) == 0

    assert sorted(line["num_faults"] for line in attempts(tmp_path / "out")) == [0, 1]
    asyncio.run(assert_recorded(tmp_path / "out", "by chat"))


async def assert_judged(folder: Path) -> None:
    """Each rollout has the judge's votes."""
    async with open_monitor(folder) as client:
        (run,) = (await fetch_runs(client)).values()
        for item in await fetch_rollouts(client, run["run_id"]):
            rollout = await get(client, f"/api/runs/{run['run_id']}/rollouts/{item['rollout_id']}")
            said = rollout["judgement"]
            assert (said["success"], said["model"], len(said["votes"])) == (item["success"], MODEL, 3)


def test_an_evaluation_of_a_version_without_a_database_goes_on(fake: FakeEndpoint, url: str, tmp_path: Path) -> None:
    folder, resume = tmp_path / "out", "behavior_if_log_dir_exists=resume"
    assert main(arguments(url, folder, "num_tasks=2", apis=("chat",))) == 0
    shutil.rmtree(folder / "postgres")
    lines = [{name: value for name, value in line.items() if name != "rollout_id"} for line in attempts(folder)]
    (folder / "attempts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    fake.requests.clear()

    assert main(arguments(url, folder, "num_tasks=3", resume, apis=("chat",))) == 0

    assert len(fake.requests) == 1
    assert json.loads((folder / "results.json").read_text())["models"][0]["num_rollouts"] == 3
    asyncio.run(assert_number_of_rollouts(folder, 1))


async def assert_number_of_rollouts(folder: Path, number: int) -> None:
    async with open_monitor(folder) as client:
        (run,) = (await fetch_runs(client)).values()
        assert (run["run_name"], run["log_path"]) == (f"{folder.name}@by chat", str(folder))
        assert len(await fetch_rollouts(client, run["run_id"])) == number


def test_an_evaluation_whose_folder_was_moved_goes_on_in_its_database(
    fake: FakeEndpoint, url: str, tmp_path: Path
) -> None:
    assert main(arguments(url, tmp_path / "before", "num_tasks=2")) == 0
    (tmp_path / "before").rename(tmp_path / "after")

    resume = "behavior_if_log_dir_exists=resume"
    assert main(arguments(url, tmp_path / "after", "num_tasks=2", "num_attempts=3", resume, apis=("chat",))) == 0

    assert len(attempts(tmp_path / "after")) == 6 + 2
    asyncio.run(assert_recorded(tmp_path / "after", "by chat", "by responses"))


async def test_evaluations_share_the_database_of_the_environment(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: dict[str, object] = {"name": "m", "base_url": url, "model": "gpt", "api_key_env": "FAKE_ENDPOINT_KEY"}
    async with EmbeddedPostgres(tmp_path / "shared" / "postgres", tmp_path / "postgres.log") as postgres:
        monkeypatch.setenv("DATABASE_URL", postgres.url)
        for name in ("first", "second"):
            tasks = {"source_type": "demo_eval", "tags": ["demo"]}
            await cli_main(EvaluateConfig(models=[model], tasks=tasks, num_tasks=2, log_path=str(tmp_path / name)))
            assert not (tmp_path / name / "postgres").exists()
    async with open_monitor(tmp_path / "shared") as client:
        runs = await fetch_runs(client)
        assert set(runs) == {"first@m", "second@m"}
        assert [len(await fetch_rollouts(client, run["run_id"])) for run in runs.values()] == [2, 2]


def test_a_database_that_does_not_answer_is_named_before_anything_starts(
    fake: FakeEndpoint, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://somebody:secret@127.0.0.1:9/nowhere")

    assert main(arguments(url, tmp_path / "out", "num_tasks=2", apis=("chat",))) == 2

    stderr = capsys.readouterr().err
    assert "expected a Postgres server at 'postgresql+psycopg://somebody:***@127.0.0.1:9/nowhere'" in stderr
    assert not (tmp_path / "out").exists()
    assert fake.requests == []


def test_more_tasks_may_be_added_but_no_other_ones(
    fake: FakeEndpoint, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, resume = tmp_path / "out", "behavior_if_log_dir_exists=resume"
    assert main(arguments(url, folder, "num_tasks=2", apis=("chat",))) == 0
    fake.requests.clear()

    assert main(arguments(url, folder, "num_tasks=3", resume, apis=("chat",))) == 0
    assert len(fake.requests) == 1
    assert main(arguments(url, folder, "num_tasks=3", "seed=1", "temperature=1", resume, apis=("chat",))) == 2
    assert "other seed, temperature" in capsys.readouterr().err
    assert main(arguments(url, folder, "num_tasks=3", "seed=1", "dry_run=true", resume, apis=("chat",))) == 2
    assert "other seed" in capsys.readouterr().err


def test_an_endpoint_that_refuses_everything_ends_the_evaluation(
    fake: FakeEndpoint, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.failures = deque([(403, "forbidden")] * 1000)

    assert main(arguments(url, tmp_path / "out", "num_tasks=32", apis=("chat",))) == 1

    stderr = capsys.readouterr().err
    assert "nothing but faults" in stderr
    assert "403" in stderr
    assert "Traceback" not in stderr


def test_attempts_at_tasks_without_a_validator_are_judged_and_keep_what_the_judge_said(
    fake: FakeEndpoint,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", JUDGE_KEY)
    monkeypatch.chdir(tmp_path)
    fake.arguments = deque([TAP])
    endpoint = JudgeEndpoint(lambda asked: verdict("Mail" in asked.record["task"], "by the task"))
    tasks = json.dumps({"source_type": "custom", "custom_tasks": ["Open Mail.", "Open Clock."]})
    with serve_in_thread(endpoint) as judge_url:
        judge = (f"judge_base_url={judge_url}", f"judge_model={MODEL}", "judge_votes=3", "reward=judge")
        given = arguments(url, tmp_path / "out", "num_tasks=4", *judge, apis=("chat",))
        status = main([*given, f"tasks={tasks}"])

    assert status == 0
    assert "expected a calibration of judge" in caplog.text
    lines = attempts(tmp_path / "out")
    assert len(lines) == 4
    for attempt in lines:
        assert attempt["success"] == (attempt["task_id"] == "custom_open_mail")
        said = attempt["judgement"]
        assert (said["success"], said["agreement"], len(said["votes"])) == (attempt["success"], 1.0, 3)
        assert said["prompt_sha256"]
    asyncio.run(assert_judged(tmp_path / "out"))
    assert "You decide whether" in (tmp_path / "out" / "judge_prompt.txt").read_text()
    assert JUDGE_KEY not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.json*"))
