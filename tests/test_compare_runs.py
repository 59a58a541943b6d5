import json
from pathlib import Path

import pytest

from scripts.compare_runs import main


def write_run(folder: Path, *steps: dict[str, float]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return folder


def test_runs_that_differ_in_durations_only_are_equal(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", {"step": 1, "optim/grad_norm": 0.5, "time/step_s": 3.0})
    other = write_run(tmp_path / "other", {"step": 1, "optim/grad_norm": 0.5 + 1e-8, "time/step_s": 9.0})

    assert main([str(one), str(other)]) == 0


def test_a_difference_is_named_with_its_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [{"step": step, "reward/mean": 0.25 * step} for step in (1, 2, 3)]
    one = write_run(tmp_path / "one", *steps)
    other = write_run(tmp_path / "other", steps[0], {"step": 2, "reward/mean": 0.75, "loss/total": 1.0})

    assert main([str(one), str(other)]) == 1

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "reward/mean: from step 2, largest difference inf"  # the other run has no step 3
    assert lines[1] == "loss/total: from step 2, largest difference inf"
    assert lines[2] == "3 steps, 2 metrics differ by more than 1e-06"
