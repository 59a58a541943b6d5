"""Results of a run: summary.json and a table."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cua_rl.reporting.json_lines import write_text
from cua_rl.reporting.step_line import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The results of a run; None for what it did not measure."""

    run_name: str
    log_path: str
    baseline_success_rate: float | None
    final_success_rate: float | None
    num_eval_rollouts: int
    """Rollouts of one evaluation."""
    baseline_step: int = 0
    """The step after which the baseline was measured: above 0 if the run was resumed with other tasks."""
    num_steps: int
    """Completed optimizer steps, earlier attempts of a resumed run included."""
    setup_time_s: float
    train_time_s: float
    parity_mean_abs: float | None
    """Mean absolute difference of sampler and trainer log-probabilities over the run."""
    retokenised_tokens: int
    """Trained tokens that are not literally the sampled ones; anything but 0 is a defect."""


def write_summary(path: Path, summary: RunSummary) -> None:
    """Write summary.json atomically."""
    write_text(path, json.dumps(asdict(summary), indent=2) + "\n")


def print_summary(summary: RunSummary, console: Console | None = None) -> None:
    table = Table(title=f"Run {summary.run_name}", show_header=False, title_justify="left")
    for label, value in summary_rows(summary):
        table.add_row(label, value)
    (console or Console(markup=False)).print(table)


def summary_rows(summary: RunSummary) -> list[tuple[str, str]]:
    parity = "not measured" if summary.parity_mean_abs is None else f"{summary.parity_mean_abs:.1e} nats"
    start = f"after step {summary.baseline_step}, resumed with changes" if summary.baseline_step else "before training"
    return [
        (f"held-out success {start}", _rate(summary.baseline_success_rate)),
        ("held-out success after training", _rate(summary.final_success_rate)),
        ("rollouts per evaluation", str(summary.num_eval_rollouts)),
        ("training steps", str(summary.num_steps)),
        ("set-up time", format_duration(summary.setup_time_s)),
        ("training time", format_duration(summary.train_time_s)),
        ("sampler-trainer parity, mean abs", parity),
        ("re-tokenised tokens", str(summary.retokenised_tokens)),
        ("folder", summary.log_path),
    ]


def _rate(rate: float | None) -> str:
    return "not measured" if rate is None else f"{100 * rate:.1f} %"
