"""Steps per hour of the embedded demo, predicted by recipes.plan and measured: one JSON line per setting.

    python -m benchmarks.planned_against_measured [--rollouts 1024] [--folder DIR]

The planner is calibrated with two runs, the demo as it is and with few phones, and predicts all. They differ in
concurrency, batch, policy lag or the phones' latency, which is given to the planner as it is to the phones. A run has
as many steps as make `--rollouts` rollouts, so that all runs learn as much. Runs that `--folder` has already are not
repeated. Measured is the time from the end of the first step to the end of the last; predicted is the same of the
simulated run. The machine should be idle: what else it does is in the measured times.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.claims import require
from cua_rl.command_line.fields import with_values
from cua_rl.command_line.parsing import parse_command_line
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.planning.calibration import RecordedRun, load_recorded_run
from cua_rl.planning.fleet import DeviceTime, Scenario, Spread
from cua_rl.planning.scenario import recorded_scenario
from cua_rl.planning.simulation import simulate, summarise
from cua_rl.run.training import run_training
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database

OFF_POLICY = ("max_steps_off_policy=2", "loss=ppo", "clip_low=0.5", "clip_high=1")
SETTINGS: Mapping[str, tuple[float, Sequence[str]]] = {
    "demo": (0.0, ()),
    "concurrency": (0.0, ("max_concurrent_rollouts=16",)),
    "group_size": (0.0, ("group_size=4", "groups_per_batch=8")),
    "policy_lag": (0.0, OFF_POLICY),
    "workers": (0.0, ("rollout_workers=2",)),
    "latency": (0.5, ("max_concurrent_rollouts=32",)),
    "latency_and_policy_lag": (0.5, ("max_concurrent_rollouts=32", *OFF_POLICY)),
}
"""Seconds that every operation of a phone waits, and settings of the run."""
REFERENCES = ("demo", "concurrency")


def run_demo(folder: Path, latency_s: float, config: CLIConfig) -> None:
    """Train in `folder`, unless an earlier call has."""
    if (folder / "summary.json").exists():
        return
    waits: dict[str, Any] = SimulatedPhones.__init__.__kwdefaults__
    waits["latency_s"] = latency_s
    with redirect_stdout(sys.stderr):
        asyncio.run(run_training(config))


async def load_run(folder: Path) -> RecordedRun:
    """What was recorded of a run."""
    async with open_run_database(str(folder), os.environ) as (database, name):
        return await load_recorded_run(database, await find_training_id(database, name), str(folder))


def require_run(run: RecordedRun, config: CLIConfig) -> None:
    """Refuse figures of a run that did not take its steps, with all their rollouts, or whose devices showed nothing."""
    num_steps, num_rollouts = len(run.steps), config.max_steps * config.group_size * config.groups_per_batch
    require(
        "a run",
        steps=(config.max_steps, num_steps),
        rollouts_that_ended_well=(True, len(run.rollouts) >= 0.99 * num_rollouts),
        shows_screenshots=(True, run.screen_kb > 0),
        trains_in_most_steps=(
            True,
            2 * sum(step.metrics.get("time/train_s", 0.0) > 0 for step in run.steps) > num_steps,
        ),
    )


def with_latency(scenario: Scenario, latency_s: float) -> Scenario:
    """A phone is looked at first, acts and is looked at after each turn, and is asked by the validator at the end."""

    def waiting(time: DeviceTime, num_operations: int) -> DeviceTime:
        return replace(time, own=Spread(mean=time.own.mean + num_operations * latency_s))

    work = scenario.workload
    work = replace(work, start=waiting(work.start, 1), turn=waiting(work.turn, 2), end=waiting(work.end, 3))
    return replace(scenario, workload=work)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo at every setting, then compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=1024)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args(argv)
    parent = options.folder or Path(tempfile.mkdtemp(prefix="planned_against_measured_"))
    configs: dict[str, CLIConfig] = {}
    for name, (latency_s, settings) in SETTINGS.items():
        common = (f"log_path={parent / name}", "save_every=0", "monitor=false", "eval_tasks=None")
        config = parse_command_line(CLIConfig, [*common, *settings])
        num_steps = options.rollouts // (config.group_size * config.groups_per_batch)
        configs[name] = with_values(config, max_steps=num_steps)
        run_demo(parent / name, latency_s, configs[name])
    recorded = {name: asyncio.run(load_run(parent / name)) for name in SETTINGS}
    for name, (latency_s, settings) in SETTINGS.items():
        references = [recorded[reference] for reference in REFERENCES]
        scenario = with_latency(recorded_scenario(configs[name], references), latency_s)
        ends = simulate(scenario, configs[name].max_steps)
        steps = recorded[name].steps
        require_run(recorded[name], configs[name])
        measured = 3600 * (len(steps) - 1) / (steps[-1].ended_at - steps[0].ended_at).total_seconds()
        predicted = summarise(scenario, ends, first=0, last=len(ends) - 1).steps_per_hour
        figure = {
            "figure": "planned_against_measured",
            "setting": name,
            "settings": " ".join([*settings, *([f"latency_s={latency_s}"] if latency_s else [])]),
            "is_reference": name in REFERENCES,
            "measured_steps_per_hour": round(measured),
            "predicted_steps_per_hour": round(predicted),
            "error_frac": round(predicted / measured - 1, 3),
        }
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
