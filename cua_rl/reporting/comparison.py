"""Models compared on the same tasks: as JSON, as a Markdown page and as a table on the terminal."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cua_rl.host.masking import mask_known
from cua_rl.metrics import merge_metrics
from cua_rl.reporting.json_lines import write_text
from cua_rl.reporting.step_line import num_of


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """What an evaluation of a model measured.

    Success on held-out tasks, each with the same weight; `low` and `high` are the 95 % interval.
    """

    success_rate: float
    low: float
    high: float
    num_rollouts: int
    num_faults: int
    num_turns_mean: float
    success_rate_by_category: Mapping[str, float]
    success_rate_by_difficulty: Mapping[str, float] = field(default_factory=dict[str, float])
    pass_at: Mapping[int, float] = field(default_factory=dict[int, float])
    """pass@k for 1, 2, 4, ... and all attempts, over all tasks."""
    num_short_tasks: Mapping[int, int] = field(default_factory=dict[int, int])
    """By k, the tasks with fewer than k attempts: pass@k is then left out, as it would be of other tasks."""
    num_tasks: int = 0
    """Tasks with at least one attempt without a fault."""
    num_successes: int = 0
    reward_mean: float = 0.0
    worst: float = 0.0
    """The success rate of first tries if those that a fault ended had all failed, mean over tasks."""
    best: float = 0.0
    """The same if they had succeeded."""
    name: str
    """Of the model."""

    def metrics(self, suite: str) -> dict[str, float]:
        """The result as metrics, `eval/<suite>/...`."""
        values = {
            "success_rate": self.success_rate,
            "success_rate_low": self.low,
            "success_rate_high": self.high,
            "num_rollouts": float(self.num_rollouts),
            "num_successes": float(self.num_successes),
            "num_faults": float(self.num_faults),
            "num_turns/mean": self.num_turns_mean,
            "reward/mean": self.reward_mean,
        }
        merged = merge_metrics(
            values,
            {"success_rate_worst": self.worst, "success_rate_best": self.best} if self.num_faults else {},
            {f"pass_at_{k}": rate for k, rate in self.pass_at.items()},
            {f"short_tasks/{k}": float(num) for k, num in self.num_short_tasks.items()},
            {f"success_rate/{name}": rate for name, rate in self.success_rate_by_category.items()},
            {f"success_rate/{name}": rate for name, rate in self.success_rate_by_difficulty.items()},
        )
        return {f"eval/{suite}/{name}": value for name, value in merged.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Comparison of a model with the first one on the tasks that both attempted: second minus first."""

    first: str
    second: str
    num_tasks: int
    difference: float
    low: float
    high: float
    """95 % interval of the difference."""
    p_value: float
    test: str
    num_only_first: int
    """Tasks at which the first succeeded more often."""
    num_only_second: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All models, and the comparison of each with the first."""

    models: tuple[EvalResult, ...]
    pairs: tuple[PairRow, ...]


def write_comparison(folder: Path, comparison: Comparison, *, title: str, settings: Mapping[str, object]) -> None:
    """Write results.json and results.md, each in one step."""
    write_text(folder / "results.json", json.dumps({"settings": settings} | asdict(comparison), indent=2) + "\n")
    write_text(folder / "results.md", format_markdown(comparison, title=title))


def print_comparison(comparison: Comparison, *, title: str, console: Console | None = None) -> None:
    """Print the table that ends an evaluation, and what the tests say."""
    console = console or Console(width=max(100, Console().width), markup=False)  # narrower, the table cannot be read
    header, *rows = model_table(comparison.models)
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(mask_known, row))
    console.print(table)
    for sentence in (*left_out_sentences(comparison.models), *map(pair_sentence, comparison.pairs)):
        console.print(mask_known(sentence), markup=False, highlight=False)


def format_markdown(comparison: Comparison, *, title: str) -> str:
    """The page: all tasks, then by category and difficulty where there are several, then the tests."""
    parts = [f"# {title}", _markdown_table(model_table(comparison.models)), *left_out_sentences(comparison.models)]
    for heading, rates in (
        ("category", [model.success_rate_by_category for model in comparison.models]),
        ("difficulty", [model.success_rate_by_difficulty for model in comparison.models]),
    ):
        names = list(dict.fromkeys(name for rate in rates for name in rate))
        if len(names) > 1:
            rows = [
                [model.name, *(_percent(rate.get(name)) for name in names)]
                for model, rate in zip(comparison.models, rates, strict=True)
            ]
            parts += [f"## Success by {heading}", _markdown_table([["model", *names], *rows])]
    if comparison.pairs:
        parts += ["## Paired tests", "\n".join(f"- {pair_sentence(pair)}" for pair in comparison.pairs)]
    return "\n\n".join(parts) + "\n"


def model_table(models: Sequence[EvalResult]) -> list[list[str]]:
    """Header and one row per model, as text; pass@1 is the success rate and is left out."""
    counts = sorted({k for model in models for k in (*model.pass_at, *model.num_short_tasks) if k > 1})
    passes = [f"pass@{k}" for k in counts]
    bounds = ["if faults failed / succeeded"] if any(model.num_faults for model in models) else []
    header = ["model", "success", "95 % interval", *bounds, *passes, "tasks", "attempts", "faults", "turns"]
    return [
        header,
        *(
            [
                model.name,
                _percent(model.success_rate),
                f"{_percent(model.low)} to {_percent(model.high)}",
                *([f"{_percent(model.worst)} / {_percent(model.best)}"] if bool(bounds) else []),
                *(_percent(model.pass_at.get(k)) for k in counts),
                str(model.num_tasks),
                str(model.num_rollouts),
                str(model.num_faults),
                f"{model.num_turns_mean:.1f}",
            ]
            for model in models
        ),
    ]


def left_out_sentences(models: Sequence[EvalResult]) -> list[str]:
    """Why a model's pass@k is left out: over the other tasks only, it would describe easier or harder ones."""
    return [
        f"pass@{k} of {model.name} is left out: faults left fewer than {k} attempts at {num} of its tasks"
        if k > 1
        else f"{num} tasks of {model.name} are lost to faults: failed at the interval's lower end, solved at its upper"
        for model in models
        for k, num in model.num_short_tasks.items()
    ]


def pair_sentence(pair: PairRow) -> str:
    """What the paired test says, in words."""
    return (
        f"{pair.second} against {pair.first} on {num_of(pair.num_tasks, 'task')}: {_points(pair.difference)} points "
        f"(95 % interval {_points(pair.low)} to {_points(pair.high)}), better at "
        f"{num_of(pair.num_only_second, 'task')}, worse at {pair.num_only_first}, p = {pair.p_value:.2g} ({pair.test})"
    )


def _markdown_table(rows: Sequence[Sequence[str]]) -> str:
    header, *body = rows
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *body]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _points(difference: float) -> str:
    return f"{100 * difference:+z.1f}"
