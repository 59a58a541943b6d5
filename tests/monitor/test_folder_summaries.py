"""Runs whose database is not open, from the files of their folders."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cua_rl.monitor.databases import RunFolder
from cua_rl.monitor.folder_summaries import summarise_folders, write_mark
from cua_rl.monitor.run_summaries import model_name
from cua_rl.monitor.schemas import RunMark


def test_an_evaluation_is_completed_once_it_has_results(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "PG_VERSION").touch()
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "attempts.jsonl").write_text("{}\n")
    config = {"model_name": None, "models": [{"name": "base"}, {"name": "trained"}], "num_tasks": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))

    (before,) = summarise_folders([RunFolder(key="eval", path=tmp_path)])
    (tmp_path / "results.json").write_text("{}")
    (after,) = summarise_folders([RunFolder(key="eval", path=tmp_path)])

    assert (before.status, before.is_alive, before.progress, before.ended_at) == ("running", False, 0.0, None)
    assert (after.status, after.num_completed_steps, after.total_steps, after.progress) == ("completed", 0, 0, 1.0)
    assert after.ended_at is not None
    assert after.model_name == "base, trained"


def test_a_model_is_named_as_it_was_asked_for_or_by_its_folder() -> None:
    assert model_name({"model_name": "Qwen/Qwen3-VL-4B-Instruct@0123abc"}) == "Qwen/Qwen3-VL-4B-Instruct"
    assert model_name({"model_name": None, "model_path": "/models/tiny"}) == "tiny"
    assert model_name({}) is None


def test_a_mark_follows_no_link_of_a_folder_and_may_be_in_any_script(tmp_path: Path) -> None:
    others = tmp_path / "others.txt"
    others.write_text("mine")
    for name in ("mark.json", ".mark.json.partial"):
        (tmp_path / name).symlink_to(others)

    write_mark(tmp_path, RunMark(alias="运行 ü", is_pinned=True))

    assert others.read_text() == "mine"
    assert RunMark.model_validate_json((tmp_path / "mark.json").read_text(encoding="utf-8")).alias == "运行 ü"


def test_people_who_mark_a_run_at_the_same_moment_do_not_disturb_one_another(tmp_path: Path) -> None:
    aliases = [letter * 100 for letter in "abcd"]
    with ThreadPoolExecutor(len(aliases)) as threads:
        list(threads.map(lambda alias: write_mark(tmp_path, RunMark(alias=alias)), aliases * 3))

    assert RunMark.model_validate_json((tmp_path / "mark.json").read_text()).alias in aliases
    assert [path.name for path in tmp_path.iterdir()] == ["mark.json"]
