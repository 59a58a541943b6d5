"""Write rollouts as one HTML file that opens anywhere, without a network:
`python -m cua_rl.recipes.export_rollout run=runs/demo step=3 out=step3.html`, or with `rollout_id=...`.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import chz
from sqlalchemy import select

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.models import Group, RolloutRow, Step
from cua_rl.monitor.databases import Databases, NotFoundError, RunAccess
from cua_rl.monitor.export import export_rollouts
from cua_rl.reporting.step_line import num_of
from cua_rl.run_folder.recorded_run import find_rollout_id, find_training_id, open_run_database
from cua_rl.types.errors import writing


@chz.chz
class ExportConfig:
    """Write rollouts as one HTML file."""

    run: str = chz.field(
        doc="folder of a run (folder@model of an evaluation), or name or number of a run in DATABASE_URL"
    )
    rollout_id: str | None = setting(None, "rollout to export; a prefix of its id is enough")
    step: int | None = setting(None, "export all rollouts of this training step")
    out: str = setting("rollouts.html", "file to write")

    @chz.validate
    def _says_what(self) -> None:
        if (self.rollout_id is None) == (self.step is None):
            raise ValueError(
                f"rollout_id, step: expected one of them, got rollout_id={self.rollout_id!r} and step={self.step!r}; "
                "name a rollout or a step"
            )


async def cli_main(config: ExportConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Read, render, write."""
    async with open_run_database(config.run, environ) as (database, name):
        training_id = await find_training_id(database, name)
        async with Databases([database]).open_run(str(training_id)) as run:
            ids = await _find_rollouts(run, config)
            page, num_images = await export_rollouts(run, ids)
    out = Path(config.out)
    with writing(out.parent):
        await asyncio.to_thread(_write, out, page)
    print(f"{num_of(len(ids), 'rollout')}, {num_of(num_images, 'screenshot')}, {len(page) / 1e6:.1f} MB in {out}")


def _write(path: Path, page: str) -> None:
    """Write the file readable by its owner only, because prompts and screenshots may be private."""
    with open(path, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        if path.is_file():  # not /dev/stdout; an earlier export may be open to all
            os.fchmod(file.fileno(), 0o600)
        file.write(page)


async def _find_rollouts(run: RunAccess, config: ExportConfig) -> list[str]:
    if config.rollout_id is not None:
        return [await find_rollout_id(run.session, run.training.id, config.rollout_id)]
    query = (
        select(RolloutRow.rollout_id)
        .join(Group, RolloutRow.group_pk == Group.id)
        .join(Step, Group.step_id == Step.id)
        .where(RolloutRow.training_id == run.training.id, Step.step == config.step)
        .order_by(RolloutRow.group_index, RolloutRow.member_index)
    )
    found = list(await run.session.scalars(query))
    if not found:
        raise NotFoundError(
            f"expected step {config.step} in run {run.training.run_name!r}, got none; the monitor lists them"
        )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(ExportConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
