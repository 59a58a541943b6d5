"""Verify the record: rebuild the training data of each step from the database alone and compare it bit for bit.

`python -m cua_rl.recipes.rebuild_datums run=runs/... [step=3]`. With a KL penalty, what is compared are the datums
before the penalty changed their advantages. Replayed successes are rebuilt from the step that sampled them. Pruned
screenshots are compared by the hashes that are left of them.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import chz

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.models import Step
from cua_rl.reporting.step_line import num_of
from cua_rl.rl.datums import datums_sha256
from cua_rl.run_folder.recorded_run import RecordedTraining, count_pruned, open_training
from cua_rl.types.errors import DatabaseError


@chz.chz
class RebuildConfig:
    """Rebuild training data from the database and compare it with the data of the training."""

    run: Path = chz.field(doc="folder of the run")
    step: int | None = chz.field(default=None, doc="training step, counted from 1; None rebuilds all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Fingerprints of one step: as trained and as rebuilt."""

    step: int
    trained: str | None
    rebuilt: str
    num_datums: int
    num_replayed: int
    """Rollouts of earlier steps among them."""
    num_pruned: int = 0
    """Rollouts without their screenshots among them."""

    @property
    def is_equal(self) -> bool:
        return self.trained == self.rebuilt

    def line(self) -> str:
        verdict = "equal" if self.is_equal else f"DIFFERENT (trained {self.trained})"
        replayed = f" ({num_of(self.num_replayed, 'rollout')} replayed)" if self.num_replayed else ""
        pruned = f" ({num_of(self.num_pruned, 'rollout')} with pruned screenshots)" if self.num_pruned else ""
        return f"step {self.step}: {self.num_datums} datums{replayed}{pruned}, sha256 {self.rebuilt[:16]} {verdict}"


async def rebuild_step(run: RecordedTraining, step: Step) -> Comparison:
    """Rebuild the datums of one step and compare their fingerprint with the one recorded when they were trained."""
    groups = await run.load_groups(step.step)
    datums = run.build_batch(step.step, groups).datums
    return Comparison(
        step=step.step,
        trained=step.datums_sha256,
        rebuilt=datums_sha256(datums),
        num_datums=len(datums),
        num_replayed=sum(len(scored.group.replayed) for scored in groups),
        num_pruned=count_pruned(groups),
    )


async def cli_main(config: RebuildConfig) -> None:
    """Compare and print a line per step; raises `DatabaseError` if any step differs."""
    async with open_training(config.run, os.environ, "run") as run:
        steps = [step for step in run.steps if step.datums_sha256]
        wanted = [step for step in steps if config.step is None or step.step == config.step]
        for step in run.steps:
            if not step.datums_sha256:
                print(f"step {step.step}: nothing to compare, rollouts were pruned")
        if not wanted:
            raise DatabaseError(
                f"expected trained steps to rebuild, got none for step={config.step}; there are {len(steps)}"
            )
        comparisons = [await rebuild_step(run, step) for step in wanted]
    for comparison in comparisons:
        print(comparison.line())
    if not all(comparison.is_equal for comparison in comparisons):
        raise DatabaseError("expected the rebuilt datums to equal the trained ones, got a difference (see above)")


if __name__ == "__main__":
    sys.exit(run_recipe(RebuildConfig, cli_main))
