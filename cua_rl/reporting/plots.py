"""Plots: reward.png, a run's success per step with its evaluations; results.png, the comparison of models."""

from collections.abc import Mapping, Sequence
from math import exp
from pathlib import Path
from typing import Any

from cua_rl.reporting.comparison import Comparison
from cua_rl.reporting.json_lines import read_records

TRAINING_COLOUR = "#4c78a8"
EVALUATION_COLOUR = "#d95f02"
MODEL_COLOURS = ("#4c78a8", "#d95f02", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#555555")
SMOOTHING_STEPS = 3.0  # width of the Gaussian: about a tenth of a short run, so that trends stay and noise goes


def write_reward_plot(metrics_path: Path, image_path: Path, *, title: str, suite: str = "held_out") -> None:
    """Plot the run in metrics.jsonl; takes about half a second, so call it on a thread."""
    records = read_records(metrics_path)
    figure, (axes,) = make_axes(8, 4.5, (title,))
    num_steps = max((int(_number(record["step"])) for record in records), default=0)
    by_curve: dict[float, list[Mapping[str, object]]] = {}
    for record in records:  # resumed with other tasks, a run continues in another curve
        by_curve.setdefault(_number(record.get("progress/curve", 1.0)), []).append(record)
    for curve in by_curve.values():
        _draw_curve(axes, curve, f"eval/{suite}/success_rate")
        if len(by_curve) > 1:
            axes.axvline(min(_number(record["step"]) for record in curve), color="#888888", linewidth=1, linestyle="--")
    axes.set_xlabel("training step")
    axes.set_ylabel("success rate")
    axes.set_xlim(-0.03 * max(1, num_steps), 1.03 * max(1, num_steps))
    axes.set_ylim(-0.02, 1.02)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.8)
    labels = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    axes.legend(labels.values(), labels, loc="lower right", frameon=True, framealpha=0.9, edgecolor="none", fontsize=9)
    save_figure(figure, image_path)


def write_comparison_plot(image_path: Path, comparison: Comparison, *, title: str) -> None:
    """Plot every model's success rate with its interval, and by category; takes about half a second."""
    groups = list(dict.fromkeys(name for model in comparison.models for name in model.success_rate_by_category))
    groups = ["all tasks", *(groups if len(groups) > 1 else [])]
    figure, (axes,) = make_axes(max(5.0, 2.0 + 1.5 * len(groups)), 4.5, (title,))
    for index in range(len(comparison.models)):
        # one bar per group of tasks; the interval is that of all tasks
        model, width = comparison.models[index], 0.8 / len(comparison.models)
        rates = [model.success_rate, *(model.success_rate_by_category.get(name, 0.0) for name in groups[1:])]
        places = [place - 0.4 + width * (index + 0.5) for place in range(len(groups))]
        axes.bar(places, rates, 0.92 * width, color=MODEL_COLOURS[index % len(MODEL_COLOURS)], label=model.name)
        spread = [[model.success_rate - model.low], [model.high - model.success_rate]]
        axes.errorbar(places[:1], rates[:1], yerr=spread, fmt="none", ecolor="#333333", capsize=4, linewidth=1.4)
        for place, rate in zip(places, rates, strict=True):
            top = model.high if place == places[0] else rate
            axes.annotate(f"{100 * rate:.0f} %", (place, top + 0.01), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(0, 1.08)
    axes.set_ylabel("success rate (over all tasks with 95 % interval)")
    axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save_figure(figure, image_path)


def make_axes(
    width: float, height: float, titles: Sequence[str], width_ratios: Sequence[float] | None = None
) -> tuple[Any, Sequence[Any]]:
    """An empty figure, and its axes side by side; matplotlib loads here, because it takes a while."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    row = figure.subplots(1, len(titles), squeeze=False, width_ratios=width_ratios)[0]
    for axes, title in zip(row, titles, strict=True):
        axes.set_title(title, loc="left", fontsize=11)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, row


def save_figure(figure: Any, image_path: Path) -> None:
    """Write the figure atomically."""
    partial = image_path.with_name(f".{image_path.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(image_path)


def smooth(steps: Sequence[float], values: Sequence[float], width: float = SMOOTHING_STEPS) -> list[float]:
    """Local linear regression with Gaussian weights; steps may be unevenly spaced.

    Unlike a weighted mean it has no bias at the ends of a rising curve.
    """
    smoothed: list[float] = []
    for centre in steps:
        offsets = [step - centre for step in steps]
        weights = [exp(-0.5 * (offset / width) ** 2) for offset in offsets]
        total, first, second = (sum(w * o**power for w, o in zip(weights, offsets, strict=True)) for power in range(3))
        level, tilt = (
            sum(w * v * o**power for w, v, o in zip(weights, values, offsets, strict=True)) for power in range(2)
        )
        spread = total * second - first**2
        # a step far from all others has no slope
        smoothed.append((second * level - first * tilt) / spread if spread > 1e-9 else level / total)
    return smoothed


def _draw_curve(axes: Any, records: Sequence[Mapping[str, object]], prefix: str) -> None:
    points = [
        (_number(record["step"]), _number(record["reward/success_rate"]))
        for record in records
        if record.get("reward/success_rate") is not None
    ]
    steps, rates = [step for step, _ in points], [rate for _, rate in points]
    if points:
        each = "training tasks, each step"
        axes.plot(steps, rates, ".", color=TRAINING_COLOUR, alpha=0.45, markersize=5, label=each)
    if len(points) > 2:
        axes.plot(steps, smooth(steps, rates), color=TRAINING_COLOUR, linewidth=2, label="training tasks, smoothed")
    evaluations = {
        int(_number(record["step"])): [
            _number(record.get(name, record[prefix])) for name in (prefix, f"{prefix}_low", f"{prefix}_high")
        ]
        for record in records
        if record.get(prefix) is not None
    }
    if evaluations:
        _draw_evaluations(axes, sorted(evaluations.items()))


def _draw_evaluations(axes: Any, evaluations: Sequence[tuple[int, list[float]]]) -> None:
    """Rates of success with their intervals, by step."""
    steps, rates = [step for step, _ in evaluations], [rate for _, (rate, _, _) in evaluations]
    spreads = [[rate - low for _, (rate, low, _) in evaluations], [high - rate for _, (rate, _, high) in evaluations]]
    axes.errorbar(
        steps,
        rates,
        yerr=spreads,
        fmt="D",
        color=EVALUATION_COLOUR,
        markersize=6,
        capsize=3,
        linewidth=1.4,
        label="held-out tasks, 95 % interval",
    )
    if steps[0] == 0:
        end = steps[-1]
        axes.hlines(rates[0], 0, end, color=EVALUATION_COLOUR, linewidth=1, linestyle=":", label="before training")
    for step, (rate, low, high) in (evaluations[0], evaluations[-1])[: len(evaluations)]:
        is_low = low < 0.08  # no room for the label below the interval
        axes.annotate(
            f"{100 * rate:.0f} %",
            (step, high if is_low else low),
            xytext=(0, 5 if is_low else -5),
            textcoords="offset points",
            ha="center",
            va="bottom" if is_low else "top",
            color=EVALUATION_COLOUR,
            fontweight="bold",
        )


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"expected a number in metrics.jsonl, got {value!r}; was the file edited?")
    return float(value)
