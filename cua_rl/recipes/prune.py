"""Make a database smaller: `python -m cua_rl.recipes.prune run=runs/demo dry_run=false`.

Removes the screenshots of rollouts, and those that no rollout shows any more; with `rollouts=delete` the rollouts as a
whole. Text, actions, answers, tokens, log-probabilities and rewards stay, and so do figures and charts. A run in
progress goes on meanwhile. Without `dry_run=false` it only says what it would remove.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from typing import Literal

import chz
from rich.progress import track
from sqlalchemy import Engine, Select, false, select

from cua_rl.command_line.fields import check_numbers, setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.models import RolloutRow, Training
from cua_rl.database.prune import Keep, choose_rollouts, measure, prune_rollouts, prune_unused, shrink
from cua_rl.database.session import find_database, make_writer_engine
from cua_rl.monitor.databases import Database
from cua_rl.monitor.run_summaries import is_alive
from cua_rl.reporting.step_line import num_of
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.types.errors import ConfigError, DatabaseError, boundary

_BATCH = 100  # rollouts of a transaction: with 300 KB a screenshot, 200 MB
_FATES = {"keep": "lose theirs", "delete": "deleted"}


@chz.chz
class PruneConfig:
    """Remove screenshots or rollouts from a database."""

    run: str | None = setting(
        None,
        "folder of a run (folder@model of an evaluation), or name or number of a run in DATABASE_URL; None removes "
        "only screenshots that no rollout shows, such as those of deleted runs",
    )
    keep: Keep = setting(
        "failures",
        "failures: failed rollouts keep their screenshots; successes: successful ones do, for recipes.sft; none: no "
        "rollout does",
    )
    older_than_days: float | None = setting(None, "prune only rollouts that ended longer ago", at_least=0.0)
    before_step: int | None = setting(
        None, "prune only rollouts of earlier training steps, and of evaluations before that step", at_least=0
    )
    rollouts: Literal["keep", "delete"] = setting(
        "keep", "keep: only screenshots are removed; delete: whole rollouts, with turns, tokens and rewards"
    )
    dry_run: bool = setting(True, "print what would be removed, and change nothing")
    shrink: bool = setting(
        False,
        "then return the space to the file system, instead of leaving it for new rows; needs as much free space as "
        "the remaining rows take, and no run may use the database meanwhile",
    )

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


async def cli_main(config: PruneConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Choose, say what, remove: a transaction after the other, so that what is removed stays so whenever this ends."""
    async with AsyncExitStack() as stack:
        chosen = select(RolloutRow.id).where(false())
        if config.run is None:
            url = await find_database(environ)
        else:
            database, name = await stack.enter_async_context(open_run_database(config.run, environ))
            url, chosen = database.url, await _choose(config, database, await find_training_id(database, name))
        if url is None:
            raise ConfigError("run: expected a run, or DATABASE_URL to be set, got neither; name the folder of a run")
        engine = make_writer_engine(url)
        stack.push_async_callback(asyncio.to_thread, engine.dispose)
        with boundary(DatabaseError, "cannot prune (an error about tables or columns: an earlier version made them)"):
            with engine.begin() as connection:
                keys = connection.scalars(chosen).all()
                num_images, num_bytes = measure(connection, chosen) if config.dry_run else (0, 0)
            if not config.dry_run:
                for start in track(range(0, len(keys), _BATCH), description="pruning"):
                    removed = await asyncio.to_thread(_prune_batch, engine, keys[start : start + _BATCH], config)
                    num_images, num_bytes = num_images + removed[0], num_bytes + removed[1]
                unused = prune_unused(engine)
                while removed := await asyncio.to_thread(next, unused, None):
                    num_images, num_bytes = num_images + removed[0], num_bytes + removed[1]
            print(
                f"{'would remove' if config.dry_run else 'removed'} {num_of(num_images, 'screenshot')} "
                f"({num_bytes / 1e6:,.1f} MB); {num_of(len(keys), 'rollout')} {_FATES[config.rollouts]}"
            )
            if config.dry_run:
                print("nothing was changed: dry_run=false does it")
            elif config.shrink:
                print(f"returned {await asyncio.to_thread(shrink, engine) / 1e6:,.1f} MB to the file system")
            else:
                print("the database uses the space for new rows; shrink=true returns it to the file system")


def _prune_batch(engine: Engine, keys: Sequence[int], config: PruneConfig) -> tuple[int, int]:
    with engine.begin() as connection:
        return prune_rollouts(connection, keys, is_deleting=config.rollouts == "delete")


async def _choose(config: PruneConfig, database: Database, training_id: int) -> Select[int]:
    is_deleting, days = config.rollouts == "delete", config.older_than_days
    async with database.sessions() as session:
        training = await session.get_one(Training, training_id)
    if is_deleting and is_alive(training):
        raise ConfigError(
            f"rollouts: expected a run that has ended, got {training.run_name!r}, which is in progress and may refer "
            "to its rollouts; wait for its end, or remove only screenshots (rollouts=keep)"
        )
    return choose_rollouts(
        training_id,
        keep=config.keep,
        ended_before=None if days is None else datetime.now(UTC) - timedelta(days=days),
        before_step=config.before_step,
        is_deleting=is_deleting,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(PruneConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
