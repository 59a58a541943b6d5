"""Supervised fine-tuning: starts the trainer, draws batches, trains, evaluates the held-out loss, saves checkpoints."""

import asyncio
import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.plain_config import plain_config
from cua_rl.environments.config import DeviceConfig
from cua_rl.metrics import mean_of, merge_metrics
from cua_rl.reporting.json_lines import read_records, write_text
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.progress import ProgressDisplay, starting
from cua_rl.reporting.step_line import num_of
from cua_rl.rl.stages import ends_epochs, epoch_metrics
from cua_rl.run.decisions import print_decisions, print_settings, sft_decisions
from cua_rl.run.devices import make_expert_backend
from cua_rl.run.prepared_sft import PreparedSft, log_path, prepare_sft, require_same_run
from cua_rl.run.reporting import open_run_log
from cua_rl.run.rollouts import make_servers, start_engines
from cua_rl.run.sft_config import SftConfig
from cua_rl.run.trainer_nodes import open_trainer
from cua_rl.run_folder.earlier_attempt import find_earlier_attempt, say_how_to_go_on
from cua_rl.run_folder.log_directory import Checkpoint, Decision, LogDirectory, choose_behavior, prepare_log_directory
from cua_rl.run_folder.model_folder import fetch_weights
from cua_rl.sampling.canary import Canary, canary_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ModelServer
from cua_rl.supervised.action_accuracy import ACTION_ACCURACY, ActionExam, HeldOutStep, held_out_steps
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
        held_out = await prepared.data.dataset.held_out()
        steps = list(
            islice(held_out_steps(held_out, prepared.renderer, prepared.data.boxes), prepared.config.num_eval_actions)
        )
        if prepared.server is not None:
            boxes = num_of(sum(bool(step.target_box) for step in steps), "box", "boxes")
            display.note(f"compares the actions of {num_of(len(steps), 'held-out step')}, {boxes} of elements known")
        async with starting("trainer and model server" if steps else "trainer", display.status):
            trainer, exam = await _start(stack, prepared, folder, checkpoint, steps)
        loop = SftLoop(prepared=prepared, folder=folder, trainer=trainer, exam=exam, log=log, display=display)
        await loop.run(first_step, held_out)


async def _start(
    stack: AsyncExitStack,
    prepared: PreparedSft,
    folder: LogDirectory,
    checkpoint: Checkpoint | None,
    steps: Sequence[HeldOutStep],
) -> tuple[TrainingClient, ActionExam | None]:
    """Start the trainer with the weights that the run begins with or resumes from; `lora_rank=0` trains them all.

    Beside it, a model server for the actions of held-out steps, if there are any.
    """
    config, logs, servers = prepared.config, folder.path / "logs", list[ModelServer]()
    if prepared.server is not None and steps:
        most_images = max(len(step.prompt.images) for step in steps)
        servers += make_servers(None, with_values(prepared.server, max_images=most_images), logs)
    trainer = await open_trainer(stack, config.trainer, config.model_name, logs / "trainer.log")
    await start_engines(stack, servers, trainer, is_shared=prepared.memory.gpus.is_shared)
    exam = None
    if servers:
        sampler = await stack.enter_async_context(SamplingClient(*servers))
        exam = ActionExam(steps=steps, renderer=prepared.renderer, sampler=sampler)
    if checkpoint is not None:
        await trainer.load_state(checkpoint.state_path)
    elif prepared.checkpoint_path is not None:
        await trainer.load_state(prepared.checkpoint_path, with_optimizer=False)
    return trainer, exam


def _print_summary(prepared: PreparedSft, folder: LogDirectory) -> None:
    """Write summary.json, and print the results and the command that continues with reinforcement learning."""
    records = read_records(folder.metrics_path)
    losses = [loss for record in records if (loss := record.get("eval/held_out/cross_entropy")) is not None]
    accuracies = [share for record in records if (share := record.get(ACTION_ACCURACY)) is not None]
    last = folder.checkpoints()[-1]
    summary = {
        "run_name": prepared.run_name,
        "log_path": str(folder.path),
        "num_steps": prepared.max_steps,
        "first_held_out_loss": losses[0] if losses else None,
        "last_held_out_loss": losses[-1] if losses else None,
        "first_action_accuracy": accuracies[0] if accuracies else None,
        "last_action_accuracy": accuracies[-1] if accuracies else None,
        "state_path": str(last.state_path),
        "sampler_path": str(last.sampler_path),
    }
    write_text(folder.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    if losses:
        print(f"held-out loss {losses[0]:.4f} -> {losses[-1]:.4f} nats per token")
    if accuracies:
        print(f"action accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f} on held-out steps")
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
    exam: ActionExam | None
    log: MetricLog
    display: ProgressDisplay

    async def run(self, first_step: int, held_out: Sequence[Datum]) -> None:
        """Train from `first_step` (1 in a new run) to the end; the next batch is drawn while this one trains."""
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
        optim = with_values(config.adam, learning_rate=config.learning_rate_at(step, self.prepared.max_steps))
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
        """The mean loss per token of held-out answers, and how often a greedy one does what was recorded."""
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
        loss, accuracies = mean_of(losses).value, dict[str, float]()
        if self.exam is not None:
            path = self.folder.path / "evaluated" / f"{step:06d}"
            adapter = await self.trainer.save_weights_for_sampler(path)
            canary = Canary(tokens=canary_tokens(self.prepared.renderer), changes_model=step > 0)
            await self.exam.sampler.publish(adapter, canary)
            accuracies = await self.exam.take()
            for earlier in set(path.parent.iterdir()) - {path}:  # the server may need this one again
                await asyncio.to_thread(shutil.rmtree, earlier)
        time_s = time.monotonic() - started
        self.log.log(step, {"eval/held_out/cross_entropy": loss, **accuracies, "eval/held_out/time_s": time_s})
        label = "Baseline" if step == 0 else "Eval"
        self.display.evaluation_ended(time_s)
        actions = "".join(f" | Actions: {accuracies[name]:.3f}" for name in accuracies if name == ACTION_ACCURACY)
        said = f"Loss: {loss:.4f}{actions} ({len(held_out)} sequences, {len(losses)} tokens)"
        self.display.note(f"{label} held_out | {said}")

    async def _save(self, step: int, *, is_final: bool) -> None:
        """Write checkpoint and sampler weights, complete and recorded when this returns."""
        state_path, sampler_path = self.folder.state_path(step), self.folder.sampler_path(step)
        await self.trainer.save_weights_for_sampler(sampler_path)
        await self.trainer.save_state(state_path)
        checkpoint = Checkpoint(step=step, state_path=state_path, sampler_path=sampler_path, is_final=is_final)
        await asyncio.to_thread(self.folder.record_checkpoint, checkpoint)
        kept = self.prepared.config.checkpoints
        await asyncio.to_thread(self.folder.prune_checkpoints, kept.keep_checkpoints, kept.keep_every)
