"""The supervised training loop: draw, forward_backward, optim_step; now and then the held-out loss and a checkpoint."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cua_rl.config import LossConfig, OptimConfig
from cua_rl.metrics import mean_of
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.progress import ProgressDisplay
from cua_rl.run.log_directory import Checkpoint, LogDirectory
from cua_rl.run.sft_plan import SftPlan
from cua_rl.supervised.learning_rate import learning_rate_at
from cua_rl.training.client import TrainingClient
from cua_rl.types import Datum


@dataclass(frozen=True, slots=True, kw_only=True)
class SftLoop:
    """The parts of a run. Batches and learning rates depend on seed and step alone: a resumed run is the same run."""

    plan: SftPlan
    folder: LogDirectory
    trainer: TrainingClient
    log: MetricLog
    display: ProgressDisplay

    async def run(self, first_step: int) -> None:
        """Train from `first_step` (1 in a new run) to the end; the next batch is drawn while this one trains."""
        held_out = await self.plan.data.dataset.held_out()
        if first_step == 1:
            await self._evaluate(0, held_out)
        self.display.begin_steps()
        max_steps = self.plan.max_steps
        async with asyncio.TaskGroup() as tasks:
            drawing = tasks.create_task(self._draw(first_step))
            for step in range(first_step, max_steps + 1):
                started = time.monotonic()
                datums = await drawing
                waited_s = time.monotonic() - started
                if step < max_steps:
                    drawing = tasks.create_task(self._draw(step + 1))
                metrics = await self._train(step, datums) | {"time/wait_s": waited_s}
                self._log_step(step, metrics | {"time/step_s": time.monotonic() - started})
                await self._after_step(step, held_out)

    async def _draw(self, step: int) -> list[Datum]:
        if step > self.plan.max_steps:
            return []
        return await self.plan.data.dataset.batch(step - 1, self.plan.config.batch_size)

    async def _train(self, step: int, datums: Sequence[Datum]) -> dict[str, float]:
        config = self.plan.config
        learning_rate = learning_rate_at(
            step,
            highest=config.learning_rate,
            schedule=config.learning_rate_schedule,
            warmup_steps=config.warmup_steps,
            max_steps=self.plan.max_steps,
        )
        optim = OptimConfig(
            learning_rate=learning_rate, weight_decay=config.weight_decay, grad_clip_norm=config.grad_clip_norm
        )
        started = time.monotonic()
        output = await self.trainer.forward_backward(datums, LossConfig(name="cross_entropy"))
        taken = await self.trainer.optim_step(optim)
        return dict(output.metrics) | {
            "optim/grad_norm": taken.grad_norm,
            "optim/learning_rate": taken.learning_rate,
            "time/train_s": time.monotonic() - started,
        }

    def _log_step(self, step: int, metrics: dict[str, float]) -> None:
        progress = {"progress/step": float(step), "progress/done_frac": step / self.plan.max_steps}
        num_examples = self.plan.data.dataset.num_examples
        if num_examples is not None:
            progress["progress/epoch"] = float((step - 1) * self.plan.config.batch_size // num_examples)
        self.log.log(step, progress | metrics)
        self.display.step(step, metrics)

    async def _after_step(self, step: int, held_out: Sequence[Datum]) -> None:
        """Evaluate before saving: what a checkpoint covers is never measured again by a run that resumes from it."""
        config, is_last = self.plan.config, step == self.plan.max_steps
        if is_last or (config.eval_every and step % config.eval_every == 0):
            await self._evaluate(step, held_out)
        if is_last or (config.save_every and step % config.save_every == 0):
            await self._save(step, is_final=is_last)

    async def _evaluate(self, step: int, held_out: Sequence[Datum]) -> None:
        """The mean loss per token of held-out answers."""
        if not held_out:
            return
        started, losses = time.monotonic(), list[float]()
        size = self.plan.config.batch_size
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
        self.display.note(f"{label} held_out | Loss: {loss:.4f} ({len(held_out)} sequences, {len(losses)} tokens)")

    async def _save(self, step: int, *, is_final: bool) -> None:
        """Write checkpoint and sampler weights, complete and recorded when this returns."""
        state_path, sampler_path = self.folder.state_path(step), self.folder.sampler_path(step)
        await self.trainer.save_weights_for_sampler(sampler_path)
        await self.trainer.save_state(state_path)
        checkpoint = Checkpoint(step=step, state_path=state_path, sampler_path=sampler_path, is_final=is_final)
        await asyncio.to_thread(self.folder.record_checkpoint, checkpoint)
