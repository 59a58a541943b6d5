"""Predict a training run before it costs anything: `python -m cua_rl.recipes.plan preset=h100-4b gpus=8xh100`.

Takes the settings of recipes.train. The training loop itself runs in virtual time, on devices, a model server and a
trainer that only consume virtual time: as much as assumed (`--help assume`), or as in recorded runs (`from_run=`).
"""

import asyncio
import os
import sys
from collections.abc import Sequence

from rich.console import Console

from cua_rl.command_line.recipe import run_recipe
from cua_rl.planning.plan_config import PLAN_SECTIONS, PlanConfig
from cua_rl.run.training_config import TRAIN_PRESETS
from cua_rl.types.errors import ConfigError, boundary


async def cli_main(config: PlanConfig) -> None:
    """Simulate the run and its variations; print tables, and write plot and figures."""
    # after the command line is parsed: see recipes/train.py
    from cua_rl.planning.calibration import RecordedRun, load_recorded_run
    from cua_rl.planning.report import make_plan, show_plan, write_plan_json, write_plan_plot
    from cua_rl.planning.scenario import find_prices, planned_scenario
    from cua_rl.run_folder.recorded_run import find_training_id, open_run_database

    runs: list[RecordedRun] = []
    for run in config.from_run or ():
        async with open_run_database(run, os.environ, "from_run") as (database, name):
            training_id = await find_training_id(database, name, "from_run")
            runs.append(await load_recorded_run(database, training_id, run))
    scenario = planned_scenario(config, runs)
    plan = await asyncio.to_thread(make_plan, scenario, find_prices(config))
    show_plan(plan, Console(width=None if sys.stdout.isatty() else 120))
    if config.plot is not None:
        title = f"{config.gpus or 'as recorded'}, {scenario.schedule.groups_per_batch} groups of "
        title += f"{scenario.schedule.group_size} per step, policy lag {scenario.schedule.max_lag}"
        with boundary(ConfigError, f"plot: expected a file to write, got {str(config.plot)!r}; choose another"):
            await asyncio.to_thread(write_plan_plot, config.plot, plan, title=title)
        print(f"plot in {config.plot}")
    if config.json is not None:
        with boundary(ConfigError, f"json: expected a file to write, got {str(config.json)!r}; choose another"):
            write_plan_json(config.json, plan)
        print(f"figures in {config.json}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line."""
    return run_recipe(PlanConfig, cli_main, argv, TRAIN_PRESETS, PLAN_SECTIONS)


if __name__ == "__main__":
    sys.exit(main())
