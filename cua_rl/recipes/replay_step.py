"""Repeat a training step, bit for bit: `python -m cua_rl.recipes.replay_step log_path=runs/my-run step=12`.

Begins with the newest checkpoint before the step, or with the run's beginning, rebuilds the step's training data from
the database alone, trains, and compares adapter and optimizer with what the run saved after it. With `what_if`, the
same data are trained on with other settings, too: direction and size of the update, and what it does to the answers.
Writes `replays/000012.json`, and with `what_if` a plot beside it, in the run's folder; the monitor shows both on the
step's page.
"""

import asyncio
import json
import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.analysis_models import Analysis
from cua_rl.reporting.json_lines import write_text
from cua_rl.reporting.what_if import RolloutChange, Variant, print_variants, write_what_if_plot
from cua_rl.run.replay import Outcome, Replay, replay_step, what_if
from cua_rl.run_folder.checkpoints import find_damage
from cua_rl.run_folder.recorded_run import RecordedTraining, find_base, open_training
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.training.folders import ADAPTER_WEIGHTS, file_sha256
from cua_rl.types.errors import TrainingError

if TYPE_CHECKING:
    from cua_rl.training.updates import Difference


@chz.chz
class ReplayConfig:
    """Repeat a recorded training step, and compare it with the original."""

    log_path: Path = chz.field(doc="folder of a run of recipes.train")
    step: int = chz.field(doc="training step, counted from 1")
    what_if: list[dict[str, object]] = setting(
        doc="settings with which to repeat the step, one dictionary for each trial: those of loss and adam, and "
        "learning_rate, advantages, kl_penalty_coef, num_substeps",
        factory=list,
    )
    model_name: str | None = setting(None, "base model, a folder or hub id, if it is not where the run found it")


async def cli_main(config: ReplayConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Make the step again and say what is equal; raises `TrainingError` if the same kind of machine differs."""
    async with open_training(config.log_path, environ, "log_path") as run:
        model_path = await asyncio.to_thread(find_base, run, config.model_name)
        with TemporaryDirectory(prefix=".replay-", dir=run.folder) as scratch:
            folder = Path(scratch)

            def open_trainer(settings: TrainerConfig) -> TrainingClient:
                return TrainingClient(settings, folder / "trainer.log")

            replay = await replay_step(run, config.step, model_path, open_trainer, folder)
            found = await asyncio.to_thread(compare, run, replay)
            print("\n".join(describe(run, replay, found)), flush=True)
            outcomes = await what_if(run, replay, config.what_if, open_trainer, folder) if config.what_if else []
            variants = await asyncio.to_thread(measure, replay, outcomes)
        record = as_json(replay, found, variants)
        await asyncio.to_thread(_write, run, replay, record, variants)
        run.session.add(Analysis(training_id=run.key, kind="replay", step=replay.row.step, result=record))
        await run.session.commit()
    is_same = found["adapter"] is None or found["adapter"].is_equal
    if replay.trained_on == replay.row.trained_on and not is_same:
        raise TrainingError(
            f"expected the adapter of step {config.step} again, bit for bit, on the same kind of machine, got another "
            "one (see above)"
        )


def compare(run: RecordedTraining, replay: Replay) -> dict[str, "Difference | None"]:
    """Adapter and optimizer after the step beside those that the run saved; None for what it did not keep."""
    from cua_rl.training.updates import Difference, compare_adapters, compare_optimizers  # torch: see export_model

    state, adapter = (run.folder / kind / f"{replay.row.step:06d}" for kind in ("weights", "sampler_weights"))
    if find_damage(state) is None:
        return {
            "adapter": compare_adapters(state, replay.after),
            "optimizer": compare_optimizers(state, replay.after),
        }
    if find_damage(adapter) is None:
        return {"adapter": compare_adapters(adapter, replay.after), "optimizer": None}
    found = replay.row.adapter_sha256
    if found is None:
        return {"adapter": None, "optimizer": None}
    is_equal = found == file_sha256(replay.after / ADAPTER_WEIGHTS)
    return {"adapter": Difference(num=0, is_equal=is_equal, largest=None, scale=None), "optimizer": None}


def describe(run: RecordedTraining, replay: Replay, found: Mapping[str, "Difference | None"]) -> list[str]:
    """What was made again, from what, and how it compares, for a person."""
    start = f"weights/{replay.start:06d}" if replay.start else "the run's beginning"
    gap = "equal" if replay.logprob_gap == 0.0 else f"differ by up to {replay.logprob_gap:.3g} nats"
    lines = [
        f"step {replay.row.step}: {replay.row.num_datums} datums as trained, made again from {start}",
        f"  log-probabilities before the update: {gap}",
    ]
    for name, difference in found.items():
        match difference:
            case None:
                said = "not kept by the run"
            case _ if difference.is_equal:
                by = f"{difference.num:,} numbers" if difference.num else "by its sha256"
                said = f"equal, bit for bit ({by})"
            case _ if difference.num:
                said = f"differs by up to {difference.largest:.3g}, of numbers up to {difference.scale:.3g}"
            case _:
                said = "another one, by its sha256, which is all that the run kept"
        lines.append(f"  {name} after it: {said}")
    if replay.row.trained_on != replay.trained_on:
        before = replay.row.trained_on or "a machine not on record"
        lines.append(f"  trained on {before}, made again on {replay.trained_on}")
    return lines


def measure(replay: Replay, outcomes: list[Outcome]) -> list[Variant]:
    """The variants with the size of their updates and what they change for every rollout."""
    from cua_rl.training.updates import measure_update

    rollouts = {one.rollout_id: one for scored in replay.groups for one in scored.group.compared}
    advantages = defaultdict[str, float](float)  # of all groups: a success may be replayed in several
    for scored in replay.groups:
        for one, advantage, _ in scored.members():
            advantages[one.rollout_id] += advantage
    variants: list[Variant] = []
    for outcome in outcomes:
        update = measure_update(replay.before, replay.after, outcome.after, beta1=outcome.beta1)
        changes = [
            RolloutChange(
                rollout_id=name,
                task_id=rollouts[name].task_id,
                success=rollouts[name].success,
                advantage=advantages[name],
                change=change,
            )
            for name, change in outcome.changes.items()
        ]
        variants.append(Variant(settings=outcome.settings, rollouts=changes, **asdict(update)))
    return variants


def as_json(replay: Replay, found: Mapping[str, "Difference | None"], variants: Sequence[Variant]) -> dict[str, object]:
    """The replay as it is written and recorded."""
    return {
        "step": replay.row.step,
        "start": replay.start,
        "datums_sha256": replay.row.datums_sha256,
        "trained_on": replay.row.trained_on,
        "replayed_on": replay.trained_on,
        "logprob_gap": replay.logprob_gap,
        **{kind: difference and asdict(difference) for kind, difference in found.items()},
        "variants": [variant.as_json() for variant in variants],
    }


def _write(run: RecordedTraining, replay: Replay, record: Mapping[str, object], variants: Sequence[Variant]) -> None:
    folder, name = run.folder / "replays", f"{replay.row.step:06d}"
    folder.mkdir(exist_ok=True)
    write_text(folder / f"{name}.json", json.dumps(record, indent=2) + "\n")
    print(f"in {folder / name}.json", flush=True)
    if variants:
        print_variants(variants, step=replay.row.step)
        write_what_if_plot(folder / f"{name}.png", variants, title=f"step {replay.row.step} of {run.folder.name}")


def main(argv: list[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(ReplayConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
