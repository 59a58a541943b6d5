"""Tasks of a harness: rows from a file, a folder or a command, their filters and their split."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.task_loader import SEED_RANGES, TaskSet, load_tasks, require_disjoint
from cua_rl.types.errors import ConfigError

ROWS = [{"task_id": f"game/{i}", "payload": {"level": i}, "tags": ["even"] if i % 2 == 0 else []} for i in range(10)]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def load(**source: object) -> TaskSet:
    split = "eval" if source.get("split_type") == "eval" else "train"
    return load_tasks({"source_type": "harness", **source}, seed=0, split=split, device=HarnessWorlds.abilities)


def test_a_row_is_a_task_with_its_own_seed_or_one_that_the_run_draws(tmp_path: Path) -> None:
    row = {"task_id": "a", "seed": 7, "instruction": "Win.", "max_turns": 3}
    (fixed,) = load(file_path=write_rows(tmp_path / "a.jsonl", [row])).batch(0, 1)
    drawn = load(file_path=write_rows(tmp_path / "b.jsonl", [{"task_id": "b"}])).batch(0, 2)

    assert (fixed.task_id, fixed.seed, fixed.instruction, fixed.max_turns) == ("a", 7, "Win.", 3)
    assert drawn[0].seed != drawn[1].seed
    assert all(task.seed in SEED_RANGES["train"] and task.instruction == "b" for task in drawn)


def test_rows_come_from_a_folder_or_a_command_whose_other_output_is_skipped(tmp_path: Path) -> None:
    write_rows(tmp_path / "1.jsonl", ROWS[:4])
    write_rows(tmp_path / "2.jsonl", ROWS[4:])
    script = tmp_path / "list.py"
    script.write_text(f"import json; print('loading'); [print(json.dumps(row)) for row in {ROWS!r}]")

    from_folder = load(file_path=str(tmp_path))

    assert from_folder.task_ids == tuple(row["task_id"] for row in ROWS)
    assert load(list_command=f"{sys.executable} {script}") == from_folder


def test_a_row_may_hold_every_end_of_a_line_but_the_one_of_json_lines(tmp_path: Path) -> None:
    rows = [{"task_id": "a", "instruction": "one\u2028two\x85three"}, {"task_id": "b"}]
    text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text, encoding="utf-8")

    for source in ({"file_path": str(tmp_path / "rows.jsonl")}, {"list_command": f"cat {tmp_path / 'rows.jsonl'}"}):
        assert load(**source).batch(0, 1)[0].instruction == rows[0]["instruction"]


def test_rows_are_filtered_and_split_as_other_tasks(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)

    train, held_out = (load(file_path=path, split_type=side, train_ratio=0.5) for side in ("train", "eval"))

    assert len(load(file_path=path, tags=["even"]).templates) == 5
    assert load(file_path=path, task_names="game/3").task_ids == ("game/3",)
    assert sorted(train.task_ids + held_out.task_ids) == [row["task_id"] for row in ROWS]
    require_disjoint(train, held_out)
    with pytest.raises(ConfigError, match="different tasks"):
        require_disjoint(load(file_path=path), held_out)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"task_id": "a", "word": 1}', "key of line 1"),
        ('{"instruction": "Win."}', "expected a task_id in line 1"),
        ('{"task_id": "a"', "expected JSON in line 1"),
        ('{"task_id": "a", "payload": [1]}', "expected payload as an object"),
        (json.dumps({"task_id": "a", "payload": {"text": "x" * 100_000}}), "put what is larger into a file"),
        (json.dumps({"task_id": "a", "instruction": "x" * 100_001}), "expected instruction as text of at most"),
        (json.dumps({"task_id": "a", "instruction": "\0"}), "expected instruction as text of at most"),
        (json.dumps({"task_id": "\ud800"}), "expected task_id as text of at most"),
        ('{"task_id": "a"}\n{"task_id": "a", "seed": 2}', "one task per id"),
        ("", "got none"),
    ],
)
def test_rows_that_cannot_be_tasks_are_refused_with_advice(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(text)

    with pytest.raises(ConfigError, match=complaint):
        load(file_path=str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ({}, "either file_path or list_command"),
        ({"file_path": "rows.jsonl", "list_command": "ls"}, "either file_path or list_command"),
        ({"file_path": "no/such.jsonl"}, "check file_path"),
        ({"list_command": "no-such-program"}, "list_command: expected a command"),
        ({"list_command": "false"}, "list_command: expected a command"),
    ],
)
def test_sources_that_list_nothing_are_refused_with_advice(source: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(**source)
