"""Supervised fine-tuning, the cold start before reinforcement learning: `python -m cua_rl.recipes.sft key=value ...`.

It imitates scripted experts, the recorded successes of an earlier run, or conversations from a file; only what the
assistant says is trained on. With no arguments, the tiny model imitates the experts of the phone simulator.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

from cua_rl.command_line.plain_config import plain_config
from cua_rl.command_line.recipe import run_recipe
from cua_rl.config import LoraConfig, TrainerConfig
from cua_rl.devices.pool import DeviceBackend
from cua_rl.reporting.json_lines import read_records, write_text
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.progress import ProgressDisplay
from cua_rl.run.device_backends import make_backend
from cua_rl.run.log_directory import Checkpoint, Decision, LogDirectory, check_log_directory, prepare_log_directory
from cua_rl.run.model_folder import fetch_weights, max_positions
from cua_rl.run.reporting import open_run_log
from cua_rl.run.sft_config import TINY_MODEL, SftConfig
from cua_rl.run.sft_loop import SftLoop
from cua_rl.run.sft_plan import SftPlan, plan_sft, require_same_run
from cua_rl.run.train_config import CLIConfig
from cua_rl.training.client import TrainingClient

__all__ = ["SftConfig", "cli_main"]


async def cli_main(config: SftConfig) -> None:
    """Check configuration and data, then train; returns when the run is complete and everything it owned is gone."""
    async with make_backend(config) as devices:
        await _plan_and_run(config, devices)


async def _plan_and_run(config: SftConfig, devices: DeviceBackend) -> None:
    plan = await plan_sft(config, devices)
    settings = plain_config(config) | plan.effective()
    if config.dry_run:
        check_log_directory(plan.log_path, config.behavior_if_log_dir_exists)
        print(json.dumps(settings, indent=2))
        return
    await asyncio.to_thread(fetch_weights, config.model_name, plan.model_path)
    with prepare_log_directory(plan.log_path, config.behavior_if_log_dir_exists) as folder:
        if folder.decision is Decision.SKIP:
            print(f"skipped: {folder.path} holds an earlier run")
            return
        if folder.decision is Decision.RESUME:
            require_same_run(plan, folder)
        folder.write_config(settings)
        await _run(plan, folder)
        _print_summary(plan, folder)


async def _run(plan: SftPlan, folder: LogDirectory) -> None:
    checkpoint = folder.latest_checkpoint() if folder.decision is Decision.RESUME else None
    first_step = checkpoint.step + 1 if checkpoint else 1
    folder.truncate_after(checkpoint.step if checkpoint else -1)
    async with AsyncExitStack() as stack:
        open_run_log(stack, folder)
        display = stack.enter_context(ProgressDisplay(plan.max_steps, first_step=first_step))
        display.note(f"run {plan.run_name} in {folder.path}")
        display.note(f"learns from {plan.data.description}, {plan.data.num_held_out} held out")
        log = stack.enter_context(_open_metrics(plan, folder, first_step))
        display.status("starting the trainer")
        trainer = await _start_trainer(stack, plan, folder, checkpoint)
        loop = SftLoop(plan=plan, folder=folder, trainer=trainer, log=log, display=display)
        await loop.run(first_step)


def _open_metrics(plan: SftPlan, folder: LogDirectory, first_step: int) -> MetricLog:
    return MetricLog(
        folder.path,
        config=plain_config(plan.config),
        first_step=first_step,
        wandb_project=plan.config.wandb_project,
        wandb_name=plan.config.wandb_name or plan.run_name,
    )


async def _start_trainer(
    stack: AsyncExitStack, plan: SftPlan, folder: LogDirectory, checkpoint: Checkpoint | None
) -> TrainingClient:
    """Start the trainer with the weights that the run begins with or goes on from."""
    client = TrainingClient(
        _trainer_config(plan), folder.path / "logs" / "trainer.log", num_threads=plan.config.num_threads
    )
    trainer = await stack.enter_async_context(client)
    if checkpoint is not None:
        await trainer.load_state(checkpoint.state_path)
    elif plan.checkpoint_path is not None:
        await trainer.load_state(plan.checkpoint_path, with_optimizer=False)
    return trainer


def _trainer_config(plan: SftPlan) -> TrainerConfig:
    """An adapter of the rank that was asked for, or all weights."""
    config = plan.config
    return TrainerConfig(
        model_path=plan.model_path,
        lora=LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha, seed=config.seed) if config.lora_rank else None,
        dtype=config.trainer_dtype,
        micro_batch_tokens=config.micro_batch_tokens,
        gradient_checkpointing=config.gradient_checkpointing,
        seed=config.seed,
    )


def _print_summary(plan: SftPlan, folder: LogDirectory) -> None:
    """Write summary.json and say what came out and what it is good for."""
    records = read_records(folder.metrics_path)
    losses = [loss for record in records if (loss := record.get("eval/held_out/cross_entropy")) is not None]
    last = folder.checkpoints()[-1]
    summary = {
        "run_name": plan.run_name,
        "log_path": str(folder.path),
        "num_steps": plan.max_steps,
        "first_held_out_loss": losses[0] if losses else None,
        "last_held_out_loss": losses[-1] if losses else None,
        "state_path": str(last.state_path),
        "sampler_path": str(last.sampler_path),
    }
    write_text(folder.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    if losses:
        print(f"held-out loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per token")
    config = plan.config
    if not config.lora_rank:
        print(f"model: {last.sampler_path}")
        model, positions = str(last.sampler_path), max_positions(plan.model_path)
        room = f" max_model_len={positions}" if positions < CLIConfig(model_name=model).max_model_len else ""
        print(f"go on: python -m cua_rl.recipes.train model_name={model}{room}")
        return
    model = "" if config.model_name is None else f"model_name={config.model_name} "
    print(f"adapter: {last.sampler_path}")
    print(
        f"go on: python -m cua_rl.recipes.train {model}lora_rank={config.lora_rank} lora_alpha={config.lora_alpha} "
        f"load_checkpoint_path={last.state_path}"
    )


SHOWN_PRESETS = {"Without model_name, the tiny model presets": TINY_MODEL}
"""What replaces defaults, for --help and docs/settings.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(SftConfig, cli_main, argv, SHOWN_PRESETS)


if __name__ == "__main__":
    sys.exit(main())
