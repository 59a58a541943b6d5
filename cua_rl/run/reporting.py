"""Reports of a training run: progress display and log, then a table, reward.png and summary.json."""

import asyncio
import logging
import sys
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from cua_rl.command_line.plain_config import plain_config
from cua_rl.host.masking import MaskingFormatter
from cua_rl.reporting.alerts import AlertLog
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.plots import write_reward_plot
from cua_rl.reporting.progress import ProgressDisplay
from cua_rl.reporting.run_report import RunReport
from cua_rl.reporting.summary import RunSummary, print_summary, write_summary
from cua_rl.run.prepared_training import PreparedTraining
from cua_rl.run_folder.earlier_attempt import Curve
from cua_rl.run_folder.log_directory import LogDirectory
from cua_rl.types.errors import is_disk_full

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


class LogFile(logging.FileHandler):
    """A masked log; it says once on stderr that its disk is full, instead of a traceback for every line."""

    is_full = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.setFormatter(MaskingFormatter(LOG_FORMAT))

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if error is None or not is_disk_full(error):
            super().handleError(record)
        elif not self.is_full:
            self.is_full = True
            print(f"disk full: {self.baseFilename!r} misses lines; free space there", file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(OSError):  # lines that do not fit have been reported
            super().close()


def open_run_log(stack: AsyncExitStack, folder: LogDirectory) -> None:
    """Log to logs/run.log, and warnings also to stderr."""
    (folder.path / "logs").mkdir(exist_ok=True)
    story = LogFile(folder.path / "logs" / "run.log")
    alarm = logging.StreamHandler()
    alarm.setFormatter(MaskingFormatter())
    alarm.setLevel(logging.WARNING)
    ours = logging.getLogger("cua_rl")
    ours.setLevel(logging.INFO)
    for handler in (story, alarm):
        ours.addHandler(handler)
        stack.callback(handler.close)
        stack.callback(ours.removeHandler, handler)


def open_report(
    stack: AsyncExitStack, prepared: PreparedTraining, folder: LogDirectory, first_step: int, curve: Curve
) -> RunReport:
    config = prepared.config
    display = stack.enter_context(
        ProgressDisplay(
            config.max_steps, first_step=first_step, eval_every=config.eval_every if prepared.eval_tasks else None
        )
    )
    if config.model_name is None:
        devices = prepared.devices.environment.name
        display.note(f"embedded demo: tiny Qwen3-VL ({devices}), real vLLM (name a model with model_name=...)")
    display.note(f"run {prepared.run_name} in {folder.path}")
    metric_log = stack.enter_context(
        MetricLog(
            folder.path,
            config=plain_config(config),
            first_step=first_step,
            wandb_project=config.wandb_project,
            wandb_name=config.wandb_name or prepared.run_name,
        )
    )
    return RunReport(
        metric_log=metric_log,
        display=display,
        total_steps=config.max_steps,
        curve=curve.number,
        baseline_step=curve.after_step,
        alerts=AlertLog(plain_config(config)),
    )


async def finish_report(
    report: RunReport, prepared: PreparedTraining, folder: LogDirectory, *, setup_time_s: float, train_time_s: float
) -> None:
    """Write summary.json and reward.png and print the table that ends the run."""
    summary = RunSummary(
        run_name=prepared.run_name,
        log_path=str(folder.path),
        baseline_success_rate=report.baseline_success_rate,
        final_success_rate=report.final_success_rate,
        num_eval_rollouts=report.num_eval_rollouts,
        baseline_step=report.baseline_step,
        num_steps=prepared.config.max_steps,
        setup_time_s=setup_time_s,
        train_time_s=train_time_s,
        parity_mean_abs=report.parity_mean_abs,
        retokenised_tokens=report.retokenised_tokens,
    )
    write_summary(folder.path / "summary.json", summary)
    await asyncio.to_thread(
        write_reward_plot, folder.metrics_path, folder.path / "reward.png", title=f"Success of {prepared.run_name}"
    )
    print_summary(summary)
