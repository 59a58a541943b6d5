"""Shared by the commands that make tiny models: stages in separate processes, and imitation of an expert."""

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from cua_rl.host.processes import OwnedProcess
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import Datum

_WARM_UP_STEPS = 30
_REPORTED_STEPS = 25


async def run_stage(module: str, *arguments: object, scratch: Path) -> None:
    """Run a module that needs torch in a process of its own; raises `TrainingError` with its last lines if it fails."""
    started, command = time.monotonic(), [sys.executable, "-m", module, *map(str, arguments)]
    async with OwnedProcess(command, name=module, log_path=scratch / f"{module}.log") as process:
        if await process.wait() != 0:
            raise TrainingError(f"expected {module} to finish, got an error:\n{process.log_tail()}")
    steps = [line for line in process.log_tail().splitlines() if line.startswith("step=")]
    print(f"{module} {time.monotonic() - started:.0f}s {''.join(steps[-1:])}", flush=True)


async def imitate(
    start: Path,
    output_path: Path,
    *,
    seed: int,
    num_threads: int | None,
    num_steps: int,
    draw_batch: Callable[[int], Coroutine[Any, Any, list[Datum]]],
    learning_rate: Callable[[int], float],
    evaluate: Callable[[TrainingClient], Coroutine[Any, Any, str]],
    is_evaluated: Callable[[int], bool],
    lora_rank: int = 0,
) -> None:
    """Let the model in `start` imitate an expert, print progress, and save it to `output_path` at every evaluation.

    With a `lora_rank`, only the language model learns, and `output_path` gets its adapter. The next step's lessons are
    drawn while the trainer works on this one. `is_evaluated` gets the number of steps done; the last step is evaluated
    in any case.
    """
    trainer_config = TrainerConfig(
        model_path=start,
        lora_rank=lora_rank,
        lora_alpha=max(1, 2 * lora_rank),
        dtype="float32",
        seed=seed,
        num_threads=num_threads,
    )
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cua_rl_imitation_") as scratch:
        async with (
            TrainingClient(trainer_config, Path(scratch) / "trainer.log") as client,
            asyncio.TaskGroup() as tasks,
        ):
            drawing = tasks.create_task(draw_batch(0))
            for step in range(num_steps):
                batch, num_done = await drawing, step + 1
                if num_done < num_steps:
                    drawing = tasks.create_task(draw_batch(num_done))
                output = await client.forward_backward(batch, LossConfig(name="cross_entropy"))
                warm_up = min(1.0, (step + 1) / _WARM_UP_STEPS)
                await client.optim_step(
                    OptimConfig(learning_rate=learning_rate(step) * warm_up, beta2=0.98, weight_decay=0.01)
                )
                shares = await evaluate(client) if is_evaluated(num_done) or num_done == num_steps else ""
                if shares:
                    await client.save_weights_for_sampler(output_path)
                if shares or num_done % _REPORTED_STEPS == 0:
                    loss = output.metrics["loss/cross_entropy"]
                    print(f"step={num_done} loss={loss:.4f} {time.monotonic() - started:.0f}s {shares}", flush=True)
