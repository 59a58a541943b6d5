"""Supervised fine-tuning: starts the trainer, draws batches, trains; measures the held-out loss and saves at times."""

import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.plain_config import plain_config
from cua_rl.environments.config import DeviceConfig
from cua_rl.metrics import mean_of, merge_metrics
from cua_rl.reporting.json_lines import read_records, write_text
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.progress import ProgressDisplay, starting
from cua_rl.rl.stages import ends_epochs, epoch_metrics
from cua_rl.run.decisions import print_decisions, print_settings, sft_decisions
from cua_rl.run.devices import make_expert_backend
from cua_rl.run.prepared_sft import PreparedSft, log_path, prepare_sft, require_same_run
from cua_rl.run.reporting import open_run_log
from cua_rl.run.sft_config import SftConfig
from cua_rl.run.trainer_nodes import open_trainer
from cua_rl.run_folder.earlier_attempt import find_earlier_attempt, say_how_to_go_on
from cua_rl.run_folder.log_directory import Checkpoint, Decision, LogDirectory, choose_behavior, prepare_log_directory
from cua_rl.run_folder.model_folder import fetch_weights
from cua_rl.supervised.learning_rate import learning_rate_at
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig
from cua_rl.types.rollout import Datum


async def run_sft(config: SftConfig) -> None:
    """Check configuration and data, then train; returns when the run is complete and all its processes have ended."""
    path, behavior = log_path(config), config.behavior_if_log_dir_exists
    behavior = behavior if config.dry_run else choose_behavior(path, behavior)
    attempt = find_earlier_attempt(path, behavior, config.checkpoints.resume_step, "sft")
    config = attempt.complete(config) if attempt else config
    settings = DeviceConfig(screen_scale=config.screen_scale, browser_scale=config.browser_scale)
    async with make_expert_backend(config.tasks, settings) as devices:
        prepared = await prepare_sft(config, devices)
        settings = plain_config(config) | prepared.effective()
        if config.dry_run:
            print_decisions(sft_decisions(prepared))
        if attempt is not None:
            require_same_run(prepared, attempt)
            print("\n".join(attempt.describe(config, settings)), file=sys.stderr)
        if config.model_name is not None:  # the demo needs no memory estimate
            print(prepared.memory.table(), file=sys.stderr)
        if config.dry_run:
            print_settings(settings, prepared.config)
            return
        await asyncio.to_thread(fetch_weights, config.model_name, prepared.config.trainer.model_path)
        with prepare_log_directory(prepared.log_path, behavior) as folder:
            if folder.decision is Decision.SKIP:
                print(f"skipped: {folder.path} holds an earlier run")
                return
            folder.write_config(settings)
            with say_how_to_go_on(folder.path, "sft"):
                await _run(prepared, folder, attempt.checkpoint if attempt else None)
            _print_summary(prepared, folder)


async def _run(prepared: PreparedSft, folder: LogDirectory, checkpoint: Checkpoint | None) -> None:
    first_step = checkpoint.step + 1 if checkpoint else 1
    folder.truncate_after(checkpoint.step if checkpoint else -1)
    async with AsyncExitStack() as stack:
        open_run_log(stack, folder)
        eval_every = prepared.config.eval_every if prepared.data.num_held_out else None
        display = stack.enter_context(ProgressDisplay(prepared.max_steps, first_step=first_step, eval_every=eval_every))
        display.note(f"run {prepared.run_name} in {folder.path}")
        display.note(f"learns from {prepared.data.description}, {prepared.data.num_held_out} held out")
        log = stack.enter_context(
            MetricLog(
                folder.path,
                config=plain_config(prepared.config),
                first_step=first_step,
                wandb_project=prepared.config.wandb_project,
                wandb_name=prepared.config.wandb_name or prepared.run_name,
            )
        )
        async with starting("trainer", display.status):
            trainer = await _start_trainer(stack, prepared, folder, checkpoint)
        loop = SftLoop(prepared=prepared, folder=folder, trainer=trainer, log=log, display=display)
        await loop.run(first_step)


async def _start_trainer(
    stack: AsyncExitStack, prepared: PreparedSft, folder: LogDirectory, checkpoint: Checkpoint | None
) -> TrainingClient:
    """Start the trainer with the weights that the run begins with or resumes from; `lora_rank=0` trains them all."""
    config, log_path = prepared.config, folder.path / "logs" / "trainer.log"
    trainer = await stack.enter_async_context(await open_trainer(stack, config.trainer, config.model_name, log_path))
    if checkpoint is not None:
        await trainer.load_state(checkpoint.state_path)
    elif prepared.checkpoint_path is not None:
        await trainer.load_state(prepared.checkpoint_path, with_optimizer=False)
    return trainer


def _print_summary(prepared: PreparedSft, folder: LogDirectory) -> None:
    """Write summary.json, and print the results and the command that continues with reinforcement learning."""
    records = read_records(folder.metrics_path)
    losses = [loss for record in records if (loss := record.get("eval/held_out/cross_entropy")) is not None]
    last = folder.checkpoints()[-1]
    summary = {
        "run_name": prepared.run_name,
        "log_path": str(folder.path),
        "num_steps": prepared.max_steps,
        "first_held_out_loss": losses[0] if losses else None,
        "last_held_out_loss": losses[-1] if losses else None,
        "state_path": str(last.state_path),
        "sampler_path": str(last.sampler_path),
    }
    write_text(folder.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    if losses:
        print(f"held-out loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per token")
    config = prepared.config
    print(f"{'adapter' if config.lora_rank else 'model'}: {last.sampler_path}")
    adapted = {
        "model_name": config.model_name,
        "lora_rank": config.lora_rank,
        "lora_alpha": config.trainer.lora_alpha,
        "load_checkpoint_path": last.state_path,
    }
    model = adapted if config.lora_rank else {"model_name": last.sampler_path}
    # the policy must see what it was trained on
    seen = {"renderer_name": config.renderer_name, "server.max_pixels": config.max_pixels}
    arguments = [f"{name}={value}" for name, value in (model | seen).items() if value is not None]
    print(f"continue with: python -m cua_rl.recipes.train {shlex.join(arguments)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SftLoop:
    """A run. Batches and learning rates depend only on seed and step, so a resumed run is identical."""

    prepared: PreparedSft
    folder: LogDirectory
    trainer: TrainingClient
    log: MetricLog
    display: ProgressDisplay

    async def run(self, first_step: int) -> None:
        """Train from `first_step` (1 in a new run) to the end; the next batch is drawn while this one trains."""
        held_out = await self.prepared.data.dataset.held_out()
        if first_step == 1:
            await self._evaluate(0, held_out)
        self.display.begin_steps()
        max_steps = self.prepared.max_steps
        async with asyncio.TaskGroup() as tasks:
            drawing = tasks.create_task(self._draw(first_step))
            for step in range(first_step, max_steps + 1):
                started = time.monotonic()
                datums = await drawing
                waited_s = time.monotonic() - started
                if step < max_steps:
                    drawing = tasks.create_task(self._draw(step + 1))
                trained = await self._train(step, datums)
                metrics = merge_metrics(trained, {"time/wait_s": waited_s, "time/step_s": time.monotonic() - started})
                config, is_last = self.prepared.config, step == self.prepared.max_steps
                num_examples = self.prepared.data.dataset.num_examples
                metrics = merge_metrics(metrics, epoch_metrics(step, config.batch_size, num_examples))
                progress = {"progress/step": float(step), "progress/done_frac": step / self.prepared.max_steps}
                self.log.log(step, merge_metrics(progress, metrics))
                self.display.step(step, metrics)
                # evaluate before saving: a run that resumes from a checkpoint never measures again what it covers
                if is_last or (config.eval_every and step % config.eval_every == 0):
                    await self._evaluate(step, held_out)
                is_due = config.save_every and step % config.save_every == 0
                if (
                    is_last
                    or is_due
                    or ends_epochs(step, config.batch_size, num_examples, config.checkpoints.save_every_epochs)
                ):
                    await self._save(step, is_final=is_last)

    async def _draw(self, step: int) -> list[Datum]:
        if step > self.prepared.max_steps:
            return []
        return await self.prepared.data.dataset.batch(step - 1, self.prepared.config.batch_size)

    async def _train(self, step: int, datums: Sequence[Datum]) -> dict[str, float]:
        config = self.prepared.config
        optim = with_values(config.adam, learning_rate=learning_rate_at(step, config, self.prepared.max_steps))
        started = time.monotonic()
        output = await self.trainer.forward_backward(datums, LossConfig(name="cross_entropy"))
        taken = await self.trainer.optim_step(optim)
        step_metrics = {
            "optim/grad_norm": taken.grad_norm,
            "optim/learning_rate": taken.learning_rate,
            "time/train_s": time.monotonic() - started,
        }
        return merge_metrics(output.metrics, step_metrics)

    async def _evaluate(self, step: int, held_out: Sequence[Datum]) -> None:
        """The mean loss per token of held-out answers."""
        if not held_out:
            return
        started, losses = time.monotonic(), list[float]()
        size = self.prepared.config.batch_size
        for part in (held_out[start : start + size] for start in range(0, len(held_out), size)):
            rows = await self.trainer.forward(part)
            losses += [
                -logprob
                for datum, row in zip(part, rows, strict=True)
                for logprob, is_trained in zip(row, datum.loss_mask, strict=True)
                if is_trained
            ]
        loss = mean_of(losses).value
        metrics = {"eval/held_out/cross_entropy": loss, "eval/held_out/time_s": time.monotonic() - started}
        self.log.log(step, metrics)
        label = "Baseline" if step == 0 else "Eval"
        self.display.evaluation_ended(metrics["eval/held_out/time_s"])
        self.display.note(f"{label} held_out | Loss: {loss:.4f} ({len(held_out)} sequences, {len(losses)} tokens)")

    async def _save(self, step: int, *, is_final: bool) -> None:
        """Write checkpoint and sampler weights, complete and recorded when this returns."""
        state_path, sampler_path = self.folder.state_path(step), self.folder.sampler_path(step)
        await self.trainer.save_weights_for_sampler(sampler_path)
        await self.trainer.save_state(state_path)
        checkpoint = Checkpoint(step=step, state_path=state_path, sampler_path=sampler_path, is_final=is_final)
        await asyncio.to_thread(self.folder.record_checkpoint, checkpoint)
        kept = self.prepared.config.checkpoints
        await asyncio.to_thread(self.folder.prune_checkpoints, kept.keep_checkpoints, kept.keep_every)
