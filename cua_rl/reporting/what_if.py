"""A training step compared with the same step under other settings: table, plot and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import fsum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cua_rl.reporting.plots import EVALUATION_COLOUR, TRAINING_COLOUR, make_axes, save_figure

_SUCCESS_COLOUR, _FAILURE_COLOUR = "#54a24b", "#e45756"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutChange:
    """How a step changed the log-probability of all answers of a rollout, nats."""

    rollout_id: str
    task_id: str
    success: bool
    advantage: float
    change: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way of taking the step; the first of several is the one taken."""

    settings: Mapping[str, object]
    """Those that differ from the run's."""
    norm: float
    """Of the change of the trained weights."""
    relative_norm: float | None
    """As a share of that of the step taken."""
    cosine: float | None
    """With the update taken; None if one of them is 0."""
    gradient_cosine: float | None
    """With the gradient of the step taken, as AdamW's first moment tells it; None with several optimizer steps."""
    rollouts: Sequence[RolloutChange]

    @property
    def name(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.settings.items()) or "as taken"

    def mean_change(self, *, success: bool, task_id: str | None = None) -> float | None:
        """Mean over successes, or over failures, of all tasks or one; None without any."""
        found = [one.change for one in self.rollouts if one.success is success and task_id in (None, one.task_id)]
        return fsum(found) / len(found) if found else None

    def as_json(self) -> dict[str, Any]:
        """All of it, with the effect on all tasks and on each."""
        tasks = [
            {
                "task_id": task_id,
                "successes": self.mean_change(success=True, task_id=task_id),
                "failures": self.mean_change(success=False, task_id=task_id),
            }
            for task_id in task_ids(self)
        ]
        means = {"successes": self.mean_change(success=True), "failures": self.mean_change(success=False)}
        return {"name": self.name, **asdict(self), **means, "tasks": tasks}


def task_ids(variant: Variant) -> list[str]:
    """The tasks of a step."""
    return sorted({one.task_id for one in variant.rollouts})


def print_variants(variants: Sequence[Variant], *, step: int) -> None:
    """Print how the updates differ, and what each does to the answers to each task."""
    console = Console(width=max(100, Console().width), markup=False)
    header = ("", "norm", "of that taken", "cosine", "cosine of gradients", "successes, nats", "failures, nats")
    table = Table(*header, title=f"Step {step}, and what if", title_justify="left")
    for one in variants:
        figures = [one.norm, one.relative_norm, one.cosine, one.gradient_cosine]
        changes = [one.mean_change(success=success) for success in (True, False)]
        table.add_row(one.name, *(_shown(each, ".4g") for each in figures), *(_shown(each, "+.3g") for each in changes))
    console.print(table)
    tasks = Table("task", *(one.name for one in variants), title="Successes / failures, nats", title_justify="left")
    for task_id in task_ids(variants[0]):
        pairs = [[one.mean_change(success=success, task_id=task_id) for success in (True, False)] for one in variants]
        tasks.add_row(task_id, *(" / ".join(_shown(value, "+.3g") for value in pair) for pair in pairs))
    console.print(tasks)


def write_what_if_plot(image_path: Path, variants: Sequence[Variant], *, title: str) -> None:
    """Plot direction and size of each update, and the change of each task's answers; takes about half a second."""
    height = max(3.5, 1.5 + 0.7 * len(variants))
    figure, (sizes, changes) = make_axes(12, height, (title, "change of the log-probability of answers, nats"), (2, 3))
    places = range(len(variants))
    for offset, colour, label, values in (
        (-0.2, TRAINING_COLOUR, "cosine", [one.cosine for one in variants]),
        (0.2, EVALUATION_COLOUR, "norm, of that taken", [one.relative_norm for one in variants]),
    ):
        heights = [place + offset for place in places]
        sizes.barh(heights, [value or 0.0 for value in values], 0.36, color=colour, label=label)
    for success, offset, colour in ((True, -0.2, _SUCCESS_COLOUR), (False, 0.2, _FAILURE_COLOUR)):
        label = f"{'successes' if success else 'failures'}, a task each; line: mean"
        for place, one in enumerate(variants):
            found = [one.mean_change(success=success, task_id=task_id) for task_id in task_ids(one)]
            known = [value for value in found if value is not None]
            dots = changes.plot(known, [place + offset] * len(known), "o", color=colour, alpha=0.5)
            dots[0].set_label(label if place == 0 else None)
            if (mean := one.mean_change(success=success)) is not None:
                changes.plot([mean], [place + offset], "|", color=colour, markersize=18)
    sizes.set_yticks(places, [one.name for one in variants])
    changes.set_yticks(places, [])
    changes.axvline(0.0, color="#888888", linewidth=1)
    for axes in (sizes, changes):
        axes.invert_yaxis()
        axes.grid(visible=True, axis="x", color="#e6e6e6", linewidth=0.8)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.1), ncols=2, frameon=False, fontsize=8)
    save_figure(figure, image_path)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
