"""Write the rollouts of a run as a data set: `python -m cua_rl.recipes.export_trajectories run=runs/demo out=data`.

`format=huggingface` makes Parquet files, `format=atif` JSON files with images; `recipes.import_trajectories` reads both
back without loss.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import chz

from cua_rl.command_line.fields import setting
from cua_rl.command_line.recipe import run_recipe
from cua_rl.exchange.atif import AtifWriter
from cua_rl.exchange.parquet import ParquetWriter, require_pyarrow
from cua_rl.exchange.records import RolloutRecord, load_rollout_records, load_run
from cua_rl.exchange.rows import encode_record, encode_run
from cua_rl.reporting.step_line import num_of
from cua_rl.run_folder.log_directory import new_folder
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.types.errors import ConfigError, writing


@chz.chz
class ExportTrajectoriesConfig:
    """Write the rollouts of a run as a data set."""

    run: str = chz.field(
        doc="folder of a run (folder@model of an evaluation), or name or number of a run in DATABASE_URL"
    )
    out: str = setting("trajectories", "folder to write; it must be empty or not exist")
    format: Literal["huggingface", "atif"] = setting(
        "huggingface", "huggingface: Parquet files that `datasets` reads; atif: a JSON file per rollout, and images"
    )
    step: int | None = setting(None, "export only this training step; None is the whole run, with its evaluations")


async def cli_main(config: ExportTrajectoriesConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Read group by group, and write."""
    if config.format == "huggingface":
        require_pyarrow()
    out = new_folder("out", config.out)
    async with open_run_database(config.run, environ) as (database, name), database.sessions() as session:
        training_id = await find_training_id(database, name)
        run = await load_run(session, training_id, step=config.step)
        if not run.sources:
            raise ConfigError(
                f"step: expected a step of run {run.run_name!r}, got {config.step!r}; the monitor lists them"
            )
        out.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts and screenshots may be private
        make_writer = ParquetWriter if config.format == "huggingface" else AtifWriter
        writer = make_writer(out, encode_run(run))
        num_rollouts = 0
        with writing(out), writer:
            for source in run.sources:
                async for records in load_rollout_records(session, training_id, source):
                    await asyncio.to_thread(_write, writer, records, run.image_token_id)
                    num_rollouts += len(records)
    size_mb = sum(file.stat().st_size for file in out.rglob("*") if file.is_file()) / 1e6
    print(f"{num_of(num_rollouts, 'rollout')} of {len(run.sources)} steps and evaluations, {size_mb:.1f} MB in {out}")


def _write(writer: ParquetWriter | AtifWriter, records: Sequence[RolloutRecord], image_token_id: int) -> None:
    for record in records:
        encoded = encode_record(record, image_token_id)
        if isinstance(writer, AtifWriter):
            writer.write(record, encoded)
        else:
            writer.write(encoded)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(ExportTrajectoriesConfig, cli_main, argv)


if __name__ == "__main__":
    sys.exit(main())
