"""Verify the record: rebuild the training data of each step from the database alone and compare it bit for bit.

`python -m cua_rl.recipes.rebuild_datums run=runs/... [step=3]`. With a KL penalty, what is compared are the datums
before the penalty changed their advantages. Replayed successes are rebuilt from the step that sampled them. Pruned
screenshots are compared by the hashes that are left of them.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chz
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.command_line.plain_config import stored_setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.models import Step, Training
from cua_rl.database.queries import find_training, latest_trainings, load_steps
from cua_rl.database.rebuild import load_advantages, load_groups
from cua_rl.renderers.renderer import make_renderer
from cua_rl.reporting.step_line import num_of
from cua_rl.rl.advantages import ScoredGroup
from cua_rl.rl.datums import build_batch, datums_sha256
from cua_rl.run_folder.earlier_attempt import settings_at
from cua_rl.run_folder.log_directory import load_settings
from cua_rl.run_folder.recorded_run import open_run_database
from cua_rl.types.errors import ConfigError, DatabaseError


@chz.chz
class RebuildConfig:
    """Rebuild training data from the database and compare it with what was trained."""

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


async def rebuild_step(
    session: AsyncSession, training: Training, step: Step, image_token_id: int, settings: Mapping[str, Any]
) -> Comparison:
    """Rebuild the datums of one step and compare their fingerprint with the one recorded when they were trained.

    `settings` are those of the run, which say with the advantages which groups produce datums.
    """
    settings = settings_at(settings, step.step)  # a run may have been resumed with others
    keeps_constant = bool(settings.get("kl_penalty_coef") or stored_setting(settings, "loss.kl_loss_coef"))
    min_group_size = stored_setting(settings, "sampling.min_group_size") or 1
    recorded = await load_groups(session, training.id, step.step)
    advantages = await load_advantages(session, training.id, step.step)
    groups = [
        ScoredGroup(
            group=replace(group, is_incomplete=len(group.rollouts) < min_group_size),
            advantages=values.advantages,
            turn_advantages=values.turn_advantages,
        )
        for group, values in zip(recorded, advantages, strict=True)
    ]
    pruned = [
        rollout
        for group in recorded
        for rollout in group.compared
        if any(not image.data for turn in rollout.turns for image in turn.model.prompt.images)
    ]
    datums = build_batch(groups, image_token_id, keeps_constant=keeps_constant).datums
    return Comparison(
        step=step.step,
        trained=step.datums_sha256,
        rebuilt=datums_sha256(datums),
        num_datums=len(datums),
        num_replayed=sum(len(group.replayed) for group in recorded),
        num_pruned=len(pruned),
    )


async def cli_main(config: RebuildConfig) -> None:
    """Compare and print a line per step; raises `DatabaseError` if any step differs."""
    is_run = (config.run / "config.json").is_file()
    settings = load_settings(config.run, "run") if is_run else {}
    if "model_path" not in settings:  # an evaluation has several models
        raise ConfigError(
            f"run: expected the folder of a training run, got {str(config.run)!r} without its config.json; "
            "name the folder that the run printed"
        )
    image_token_id = make_renderer(Path(settings["model_path"])).image_token_id
    async with open_run_database(str(config.run), os.environ) as (database, name), database.sessions() as session:
        if name is None:  # the run's own database holds no other run, and the folder may have been moved
            training = next(iter(await latest_trainings(session, limit=1)), None)
        else:
            training = await find_training(session, str(settings["run_name"]), str(settings["log_path"]))
        if training is None:
            raise DatabaseError(f"expected a run in {config.run} in the database, got none; check run")
        trained = [step for step in await load_steps(session, training.id) if step.trained_policy_version is not None]
        steps = [step for step in trained if step.datums_sha256]
        wanted = [step for step in steps if config.step is None or step.step == config.step]
        for step in trained:
            if not step.datums_sha256:
                print(f"step {step.step}: nothing to compare, rollouts were pruned")
        if not wanted:
            raise DatabaseError(
                f"expected trained steps to rebuild, got none for step={config.step}; there are {len(steps)}"
            )
        comparisons = [await rebuild_step(session, training, step, image_token_id, settings) for step in wanted]
    for comparison in comparisons:
        print(comparison.line())
    if not all(comparison.is_equal for comparison in comparisons):
        raise DatabaseError("expected the rebuilt datums to equal the trained ones, got a difference (see above)")


if __name__ == "__main__":
    sys.exit(run_recipe(RebuildConfig, cli_main))
