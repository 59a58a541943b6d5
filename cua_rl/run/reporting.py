"""Reports of a training run: progress display and log, then a table, reward.png and summary.json."""

import asyncio
import logging
from contextlib import AsyncExitStack

from cua_rl.command_line.plain_config import plain_config
from cua_rl.host.masking import MaskingFormatter
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.plots import write_reward_plot
from cua_rl.reporting.progress import ProgressDisplay
from cua_rl.reporting.run_report import RunReport
from cua_rl.reporting.summary import RunSummary, print_summary, write_summary
from cua_rl.run.training_plan import PreparedTraining
from cua_rl.run_folder.earlier_attempt import Curve
from cua_rl.run_folder.log_directory import LogDirectory

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s %(message)s"


def open_run_log(stack: AsyncExitStack, folder: LogDirectory) -> None:
    """Log to logs/run.log, and warnings also to stderr."""
    (folder.path / "logs").mkdir(exist_ok=True)
    story = logging.FileHandler(folder.path / "logs" / "run.log")
    story.setFormatter(MaskingFormatter(LOG_FORMAT))
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
    stack: AsyncExitStack, plan: PreparedTraining, folder: LogDirectory, first_step: int, curve: Curve
) -> RunReport:
    config = plan.config
    display = stack.enter_context(
        ProgressDisplay(
            config.max_steps, first_step=first_step, eval_every=config.eval_every if plan.eval_tasks else None
        )
    )
    if config.model_name is None:
        devices = plan.devices.environment.name
        display.note(f"embedded demo: tiny Qwen3-VL ({devices}), real vLLM (name a model with model_name=...)")
    display.note(f"run {plan.run_name} in {folder.path}")
    metric_log = stack.enter_context(
        MetricLog(
            folder.path,
            config=plain_config(config),
            first_step=first_step,
            wandb_project=config.wandb_project,
            wandb_name=config.wandb_name or plan.run_name,
        )
    )
    return RunReport(
        metric_log=metric_log,
        display=display,
        total_steps=config.max_steps,
        curve=curve.number,
        baseline_step=curve.after_step,
    )


async def finish_report(
    report: RunReport, plan: PreparedTraining, folder: LogDirectory, *, setup_time_s: float, train_time_s: float
) -> None:
    """Write summary.json and reward.png and print the table that ends the run."""
    summary = RunSummary(
        run_name=plan.run_name,
        log_path=str(folder.path),
        baseline_success_rate=report.baseline_success_rate,
        final_success_rate=report.final_success_rate,
        num_eval_rollouts=report.num_eval_rollouts,
        baseline_step=report.baseline_step,
        num_steps=plan.config.max_steps,
        setup_time_s=setup_time_s,
        train_time_s=train_time_s,
        parity_mean_abs=report.parity_mean_abs,
        retokenised_tokens=report.retokenised_tokens,
    )
    write_summary(folder.path / "summary.json", summary)
    await asyncio.to_thread(
        write_reward_plot, folder.metrics_path, folder.path / "reward.png", title=f"Success of {plan.run_name}"
    )
    print_summary(summary)
