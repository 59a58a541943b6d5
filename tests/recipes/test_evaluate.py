"""The whole evaluation of endpoints, from the command line to its files; models of ours need a real server."""

import json
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from cua_rl.recipes.evaluate import main
from tests.doubles.judge_endpoint import KEY as JUDGE_KEY
from tests.doubles.judge_endpoint import MODEL, JudgeEndpoint, verdict
from tests.evaluation.fake_endpoint import KEY, TAP, FakeEndpoint, serve_in_thread


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
    written = "".join(path.read_text() for path in (tmp_path / "out").rglob("*.*") if path.suffix != ".png")
    assert KEY not in written


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
    for attempt in attempts(tmp_path / "out"):
        assert attempt["success"] == (attempt["task_id"] == "custom_open_mail")
        said = attempt["judgement"]
        assert (said["success"], said["agreement"], len(said["votes"])) == (attempt["success"], 1.0, 3)
    assert said["prompt_sha256"]
    assert "You decide whether" in (tmp_path / "out" / "judge_prompt.txt").read_text()
    assert JUDGE_KEY not in "".join(path.read_text() for path in (tmp_path / "out").rglob("*.json*"))
