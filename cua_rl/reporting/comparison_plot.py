"""results.png: the success rate of every model with its interval, and its rate per category."""

from pathlib import Path
from typing import Any

from cua_rl.reporting.comparison import Comparison

COLOURS = ("#4c78a8", "#d95f02", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#555555")


def write_comparison_plot(image_path: Path, comparison: Comparison, *, title: str) -> None:
    """Draw the comparison; about half a second of work, so call it on a thread."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(name for model in comparison.models for name in model.success_rate_by_category))
    groups = ["all tasks", *(groups if len(groups) > 1 else [])]
    figure: Any = Figure(figsize=(max(5.0, 2.0 + 1.5 * len(groups)), 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    for index in range(len(comparison.models)):
        _draw_model(axes, comparison, index, groups)
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.set_ylim(0, 1.08)
    axes.set_ylabel("success rate (over all tasks with 95 % interval)")
    axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    partial = image_path.with_name(f".{image_path.name}.partial")
    figure.savefig(partial, format="png")
    partial.replace(image_path)


def _draw_model(axes: Any, comparison: Comparison, index: int, groups: list[str]) -> None:
    """One bar per group of tasks; the interval is that of all tasks."""
    model, width = comparison.models[index], 0.8 / len(comparison.models)
    rates = [model.success_rate, *(model.success_rate_by_category.get(name, 0.0) for name in groups[1:])]
    places = [place - 0.4 + width * (index + 0.5) for place in range(len(groups))]
    axes.bar(places, rates, 0.92 * width, color=COLOURS[index % len(COLOURS)], label=model.name)
    spread = [[model.success_rate - model.low], [model.high - model.success_rate]]
    axes.errorbar(places[:1], rates[:1], yerr=spread, fmt="none", ecolor="#333333", capsize=4, linewidth=1.4)
    for place, rate in zip(places, rates, strict=True):
        top = model.high if place == places[0] else rate
        axes.annotate(f"{100 * rate:.0f} %", (place, top + 0.01), ha="center", va="bottom", fontsize=8)
