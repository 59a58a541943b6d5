"""How far up the ladder? Success on all demo tasks by level, before and after `preset=ladder`: JSON lines.

    python -m benchmarks.ladder FOLDER [--seeds 0,1,2] [key=value ...]

Trains a run for each seed, with what is given as key=value, and lets three models do every demo task once, on phones
that training never saw: the tiny model, the ladder's model before training, and with the run's adapter. A line for each
temperature, 1 as in training and 0, has the success of each model by level, and the minutes that training took.
A folder that holds a complete run or evaluation is read, not run again.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.claims import require
from benchmarks.curriculum import complete
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.machine.presets import MACHINE_PRESETS

NAMES = ("tiny", "cold_start", "adapter")


def main(arguments: list[str]) -> None:
    """Train, evaluate, print."""
    parser = argparse.ArgumentParser(description="Measure success by level before and after the ladder's preset.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("options", nargs="*", help="settings of training, as key=value")
    given = parser.parse_intermixed_args(arguments)
    for seed in map(int, given.seeds.split(",")):
        measure_seed(given.folder / f"seed-{seed}", seed, given.options)


def measure_seed(folder: Path, seed: int, options: list[str]) -> None:
    """One run and its evaluations."""
    run, took = folder / "run", folder / "minutes.json"
    if not (run / "summary.json").is_file():
        started = time.monotonic()
        complete("train", run, "preset=ladder", f"seed={seed}", "monitor=false", *options)
        took.write_text(json.dumps(round((time.monotonic() - started) / 60, 1)))
    for temperature in (1, 0):
        measure_levels(folder / f"temperature-{temperature}", run, seed, temperature, json.loads(took.read_text()))


def measure_levels(evaluation: Path, run: Path, seed: int, temperature: int, training_min: float) -> None:
    """The success of the three models on all tasks."""
    if not (evaluation / "results.json").is_file():
        preset = MACHINE_PRESETS["ladder"].settings
        ladder = {"model_name": preset["model_name"]}
        models = [{"name": "tiny"}, {"name": "cold_start"} | ladder, {"name": "adapter", "adapter": str(run)} | ladder]
        tasks = ('tasks={"source_type": "demo_all"}', f"num_tasks={len(TEMPLATES)}", f"seed={seed}")
        limits = (f"{name}={preset[name]}" for name in ("max_turns", "max_tokens", "server.max_model_len"))
        how = (f"temperature={temperature}", "max_concurrent_rollouts=32", *limits)
        complete("evaluate", evaluation, f"models={json.dumps(models)}", *tasks, *how)
    figure: dict[str, Any] = {"figure": "ladder", "seed": seed, "temperature": temperature}
    figure["training_min"] = training_min
    for name in NAMES:
        done = read_success(evaluation, name)
        require("the ladder", tasks=(set(TEMPLATES), set(done)), faults=(0, list(done.values()).count(None)))
        figure[name] = round(sum(done.values()) / len(done), 3)
        for level in sorted({template.level for template in TEMPLATES.values()}):
            of_level = [success for task_id, success in done.items() if TEMPLATES[task_id].level == level]
            figure[f"{name}_level_{level}"] = round(sum(of_level) / len(of_level), 3)
    print(json.dumps(figure), flush=True)


def read_success(evaluation: Path, name: str) -> dict[str, Any]:
    """By task, whether the model of this name did it; None after faults."""
    attempts = map(json.loads, (evaluation / "attempts.jsonl").read_text().splitlines())
    return {one["task_id"]: one["success"] for one in attempts if one["model"] == name}


if __name__ == "__main__":
    main(sys.argv[1:])
