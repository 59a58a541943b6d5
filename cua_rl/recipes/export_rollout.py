"""Write rollouts as one HTML file that opens anywhere, without a network:
`python -m cua_rl.recipes.export_rollout run=runs/demo step=3 out=step3.html`, or with `rollout_id=...`.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import chz
from sqlalchemy import select

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.migrations import migrate
from cua_rl.database.models import Group, RolloutRow, Screenshot, Step, Training
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.database.session import check_connection, database_url
from cua_rl.errors import ConfigError
from cua_rl.monitor.databases import Database, Databases, NotFoundError, RunAccess, open_database
from cua_rl.monitor.export import Images, image_hashes, render_rollouts
from cua_rl.monitor.rollout_queries import load_rollout
from cua_rl.monitor.run_folders import has_database
from cua_rl.monitor.token_texts import load_rollout_tokens


@chz.chz
class ExportConfig:
    """Write rollouts as one HTML file."""

    run: str = chz.field(doc="folder of a run with its own database, or name or number of a run in DATABASE_URL")
    rollout_id: str | None = chz.field(default=None, doc="rollout to export; a prefix of its id is enough")
    step: int | None = chz.field(default=None, doc="export all rollouts of this training step")
    out: str = chz.field(default="rollouts.html", doc="file to write")

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
        training_id = await find_training(database, name)
        async with Databases([database]).open_run(str(training_id)) as run:
            ids = await _find_rollouts(run, config)
            rollouts = [await load_rollout(run, rollout_id) for rollout_id in ids]
            tokens = {
                (rollout.rollout_id, turn.turn_index): turn
                for rollout in rollouts
                for turn in await load_rollout_tokens(run, rollout.rollout_id)
            }
            images = await _load_images(run, image_hashes(rollouts))
    page = render_rollouts(rollouts, tokens, images)
    out = Path(config.out)
    await asyncio.to_thread(out.write_text, page, encoding="utf-8")
    print(f"{len(rollouts)} rollouts, {len(images)} screenshots, {len(page) / 1e6:.1f} MB in {out}")


@asynccontextmanager
async def open_run_database(run: str, environ: Mapping[str, str]) -> AsyncGenerator[tuple[Database, str | None]]:
    """The run's database, and its name if the database may hold others."""
    folder = Path(run)
    if has_database(folder):
        url = running_postgres_url(folder / "postgres")
        if url is not None:
            async with _opened(url) as database:
                yield database, None
            return
        async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as postgres:
            await migrate(postgres.url)
            async with _opened(postgres.url) as database:
                yield database, None
        return
    url = database_url(environ)
    if url is None:
        raise ConfigError(
            f"run: expected the folder of a run with its own database, or DATABASE_URL to be set, got {run!r}; "
            "name such a folder"
        )
    await check_connection(url)
    async with _opened(url) as database:
        yield database, run


@asynccontextmanager
async def _opened(url: str) -> AsyncGenerator[Database]:
    database = open_database(url)
    try:
        yield database
    finally:
        await database.engine.dispose()


async def find_training(database: Database, name: str | None) -> int:
    """The key of the run of this name or number, the latest one without a name; raises `ConfigError`."""
    query = select(Training.id).order_by(Training.started_at.desc()).limit(1)
    if name is not None:
        is_number = name.isascii() and name.isdecimal() and len(name) < 18
        query = query.where(Training.id == int(name) if is_number else Training.run_name == name)
    async with database.sessions() as session:
        found = await session.scalar(query)
    if found is None:
        raise ConfigError(f"run: expected the name of a run in the database, got {name!r}; the monitor lists them")
    return found


async def _find_rollouts(run: RunAccess, config: ExportConfig) -> list[str]:
    query = select(RolloutRow.rollout_id).where(RolloutRow.training_id == run.training.id)
    if config.rollout_id is not None:
        query = query.where(RolloutRow.rollout_id.startswith(config.rollout_id, autoescape=True)).limit(1)
    else:
        query = query.join(Group, RolloutRow.group_pk == Group.id).join(Step, Group.step_id == Step.id)
        query = query.where(Step.step == config.step).order_by(RolloutRow.group_index, RolloutRow.member_index)
    found = list(await run.session.scalars(query))
    if not found:
        wanted = f"rollout {config.rollout_id!r}" if config.rollout_id is not None else f"step {config.step}"
        raise NotFoundError(f"expected {wanted} in run {run.training.run_name!r}, got none; the monitor lists them")
    return found


async def _load_images(run: RunAccess, hashes: set[str]) -> Images:
    query = select(Screenshot.sha256, Screenshot.data, Screenshot.format).where(Screenshot.sha256.in_(hashes))
    return {row.sha256: (row.data, row.format) for row in await run.session.execute(query)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(ExportConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
