"""reward.png is drawn from metrics.jsonl alone."""

from pathlib import Path

import pytest
from PIL import Image

from cua_rl.reporting.json_lines import append_record
from cua_rl.reporting.plots import smooth, write_reward_plot


def write_metrics(path: Path, num_steps: int) -> None:
    evaluation = {"success_rate": 0.4, "success_rate_low": 0.29, "success_rate_high": 0.53}
    append_record(path, {"step": 0} | {f"eval/held_out/{name}": value for name, value in evaluation.items()})
    for step in range(1, num_steps + 1):
        append_record(path, {"step": step, "reward/success_rate": step / num_steps, "reward/mean": None})


@pytest.mark.parametrize("num_steps", [0, 1, 20])
def test_runs_of_any_length_are_drawn(tmp_path: Path, num_steps: int) -> None:
    write_metrics(tmp_path / "metrics.jsonl", num_steps)

    write_reward_plot(tmp_path / "metrics.jsonl", tmp_path / "reward.png", title="demo")

    with Image.open(tmp_path / "reward.png") as image:
        assert image.size == (1200, 675)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "reward.png"]


def test_smoothing_keeps_constants_and_straight_lines_to_their_ends() -> None:
    steps = [float(step) for step in range(10)]

    assert smooth(steps, [0.5] * 10) == pytest.approx([0.5] * 10)
    assert smooth(steps, steps, width=1.0) == pytest.approx(steps)
    assert smooth([0.0, 1000.0], [0.25, 0.75]) == [0.25, 0.75]
