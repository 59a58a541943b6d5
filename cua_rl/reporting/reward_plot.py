"""reward.png: training success per step, with the evaluations and their uncertainty, drawn from metrics.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

from cua_rl.reporting.json_lines import read_records

TRAINING_COLOUR = "#4c78a8"
EVALUATION_COLOUR = "#d95f02"
SMOOTHING_STEPS = 3.0  # width of the Gaussian: about a tenth of a short run, so that trends stay and noise goes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluation:
    step: int
    rate: float
    low: float
    high: float


def write_reward_plot(metrics_path: Path, image_path: Path, *, title: str, suite: str = "held_out") -> None:
    """Draw the run that metrics.jsonl tells; about half a second of work, so call it on a thread."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_records(metrics_path)
    figure: Any = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    num_steps = max((int(_number(record["step"])) for record in records), default=0)
    _draw_training(axes, records)
    evaluations = _read_evaluations(records, suite)
    if evaluations:
        _draw_evaluations(axes, evaluations)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("training step")
    axes.set_ylabel("success rate")
    axes.set_xlim(-0.03 * max(1, num_steps), 1.03 * max(1, num_steps))
    axes.set_ylim(-0.02, 1.02)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    partial = image_path.with_name(f".{image_path.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(image_path)


def smooth(steps: Sequence[float], values: Sequence[float], width: float = SMOOTHING_STEPS) -> list[float]:
    """Gaussian-weighted mean of the neighbours of each step: unevenly spaced steps are fine, ends are not padded."""
    smoothed: list[float] = []
    for centre in steps:
        weights = [exp(-0.5 * ((step - centre) / width) ** 2) for step in steps]
        smoothed.append(sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights))
    return smoothed


def _draw_training(axes: Any, records: Sequence[Mapping[str, object]]) -> None:
    points = [
        (_number(record["step"]), _number(record["reward/success_rate"]))
        for record in records
        if record.get("reward/success_rate") is not None
    ]
    if not points:
        return
    steps, rates = [step for step, _ in points], [rate for _, rate in points]
    axes.plot(steps, rates, ".", color=TRAINING_COLOUR, alpha=0.45, markersize=5, label="training rollouts, each step")
    if len(points) > 2:
        axes.plot(steps, smooth(steps, rates), color=TRAINING_COLOUR, linewidth=2, label="training rollouts, smoothed")


def _draw_evaluations(axes: Any, evaluations: Sequence[_Evaluation]) -> None:
    steps, rates = [point.step for point in evaluations], [point.rate for point in evaluations]
    spreads = [[point.rate - point.low for point in evaluations], [point.high - point.rate for point in evaluations]]
    axes.errorbar(
        steps,
        rates,
        yerr=spreads,
        fmt="D",
        color=EVALUATION_COLOUR,
        markersize=6,
        capsize=3,
        linewidth=1.4,
        label="held-out tasks, 95 % Wilson interval",
    )
    if steps[0] == 0:
        axes.axhline(rates[0], color=EVALUATION_COLOUR, linewidth=1, linestyle=":", label="before training")
    for point in (evaluations[0], evaluations[-1])[: len(evaluations)]:
        is_low = point.low < 0.08  # no room for the label below the interval
        axes.annotate(
            f"{100 * point.rate:.0f} %",
            (point.step, point.high if is_low else point.low),
            xytext=(0, 5 if is_low else -5),
            textcoords="offset points",
            ha="center",
            va="bottom" if is_low else "top",
            color=EVALUATION_COLOUR,
            fontweight="bold",
        )


def _read_evaluations(records: Sequence[Mapping[str, object]], suite: str) -> list[_Evaluation]:
    prefix = f"eval/{suite}/success_rate"
    evaluations = {
        int(_number(record["step"])): _Evaluation(
            step=int(_number(record["step"])),
            rate=_number(record[prefix]),
            low=_number(record.get(f"{prefix}_low", record[prefix])),
            high=_number(record.get(f"{prefix}_high", record[prefix])),
        )
        for record in records
        if record.get(prefix) is not None
    }
    return [evaluations[step] for step in sorted(evaluations)]


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number in metrics.jsonl, got {value!r}; was the file edited?")
    return float(value)
