"""Make random steps of three runs again and compare every bit: `python -m scripts.replay_runs folder=/tmp/replayed`.

Trains the embedded demo in small steps, synchronously, asynchronously, and with a KL term, advantages by the batch's
deviation and two optimizer steps each; a run that is complete is not trained again. Prints how many adapters and
optimizers came out equal, and writes `replayed.json` there.
"""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import chz

from cua_rl.command_line.recipe import run_recipe
from cua_rl.recipes.replay_step import compare
from cua_rl.run.replay import replay_step
from cua_rl.run_folder.recorded_run import open_training
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import TrainingError

SMALL = (
    *("group_size=4", "groups_per_batch=4", "eval_every=0", "num_eval_rollouts=4", "skip_baseline=true"),
    *("save_every=1", "keep_checkpoints=0", "monitor=false"),
)
RUNS = {
    "sync": (),
    "async": ("max_steps_off_policy=2", "loss=ppo"),
    "divergence": ("loss=ppo", "kl_loss_coef=0.05", "advantages=batch_std", "num_substeps=2"),
}


@chz.chz
class ReplayRunsConfig:
    """Make random steps of three runs again."""

    folder: Path = chz.field(doc="where the runs are, or will be")
    steps: int = chz.field(default=40, doc="training steps of each run")
    replays: int = chz.field(default=100, doc="steps to make again, of all runs together")
    seed: int = chz.field(default=0, doc="of the choice of steps")
    train_only: str | None = chz.field(
        default=None, doc="train this run and stop; None trains what is missing, and goes on"
    )


async def cli_main(config: ReplayRunsConfig) -> None:
    """Train, replay, compare; raises `TrainingError` if a bit differs."""
    for name, options in RUNS.items():
        folder = config.folder / name
        if not (folder / "summary.json").is_file() and config.train_only in (None, name):
            words = [f"log_path={folder}", f"max_steps={config.steps}", "behavior_if_log_dir_exists=resume"]
            command = [sys.executable, "-m", "cua_rl.recipes.train", *words, *SMALL, *options]
            await asyncio.to_thread(subprocess.run, command, check=True)
    if config.train_only is not None:
        return
    rng, found = random.Random(config.seed), list[dict[str, Any]]()
    places = [(name, step) for name in RUNS for step in await trained_steps(config.folder / name)]
    if len(places) < config.replays:
        raise TrainingError(f"expected {config.replays} steps that trained, got {len(places)}; raise steps")
    chosen = sorted(rng.sample(places, config.replays))
    for name in RUNS:
        found += await replay_run(config.folder / name, [step for run, step in chosen if run == name])
    (config.folder / "replayed.json").write_text(json.dumps(found, indent=2) + "\n")
    equal = {kind: sum(one[kind] for one in found) for kind in ("logprobs", "adapter", "optimizer")}
    print(f"of {len(found)} steps: " + ", ".join(f"{kind} equal in {num}" for kind, num in equal.items()), flush=True)
    if min(equal.values()) < len(found):
        raise TrainingError("expected every step to come out equal, got differences (see above)")


async def trained_steps(folder: Path) -> list[int]:
    """The steps of a run that trained something: some groups had different rewards."""
    async with open_training(folder, {}, "folder") as run:
        return [row.step for row in run.steps if row.num_datums]


async def replay_run(folder: Path, steps: list[int]) -> list[dict[str, Any]]:
    """Replay these steps of a run with one trainer, which loads a checkpoint for each."""
    found: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(open_training(folder, {}, "folder"))
        trainers: dict[str, TrainingClient] = {}

        @asynccontextmanager
        async def open_trainer(config: TrainerConfig) -> AsyncGenerator[TrainingClient]:
            if str(config) not in trainers:
                client = TrainingClient(config, folder / "logs" / "replays.log")
                trainers[str(config)] = await stack.enter_async_context(client)
            yield trainers[str(config)]

        for step in steps:
            with TemporaryDirectory() as scratch:
                path = Path(str(run.settings["model_path"]))
                replay = await replay_step(run, step, path, open_trainer, Path(scratch))
                compared = await asyncio.to_thread(compare, run, replay)
            equal = {kind: each is not None and each.is_equal for kind, each in compared.items()}
            found.append({"run": folder.name, "step": step, "logprobs": replay.logprob_gap == 0.0, **equal})
            print(json.dumps(found[-1]), flush=True)
    return found


if __name__ == "__main__":
    sys.exit(run_recipe(ReplayRunsConfig, cli_main))
