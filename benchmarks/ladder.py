"""How far up the ladder? Success on all demo tasks by level, before and after `preset=ladder`: JSON lines.

    python -m benchmarks.ladder FOLDER [--seeds 0,1,2] [key=value ...]

Trains a run for each seed, with what is given as key=value, and lets three models do every demo task once, on phones
that training never saw: the tiny model, the ladder's model before training, and with the run's adapter. A line for each
temperature, 1 as in training and 0, has the success of each model by level, and the minutes that training took.
A folder that holds a complete run or evaluation is read, not run again.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.claims import require
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.models import LADDER_QWEN3_VL

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
        command("train", run, "preset=ladder", f"seed={seed}", "monitor=false", *options)
        took.write_text(json.dumps(round((time.monotonic() - started) / 60, 1)))
    for temperature in (1, 0):
        measure_levels(folder / f"temperature-{temperature}", run, seed, temperature, json.loads(took.read_text()))


def measure_levels(evaluation: Path, run: Path, seed: int, temperature: int, training_min: float) -> None:
    """The success of the three models on all tasks."""
    if not (evaluation / "results.json").is_file():
        folders = {"cold_start": {}, "adapter": {"adapter": str(run)}}
        models = [{"name": "tiny"}]
        models += [{"name": name, "model_name": str(LADDER_QWEN3_VL)} | more for name, more in folders.items()]
        tasks = (
            'tasks={"source_type": "demo_all"}',
            f"num_tasks={len(TEMPLATES)}",
            f"seed={seed}",
            f"temperature={temperature}",
        )
        limits = ("max_turns=15", "max_tokens=96", "server.max_model_len=3072", "max_concurrent_rollouts=32")
        command("evaluate", evaluation, f"models={json.dumps(models)}", *tasks, *limits)
    figure: dict[str, Any] = {"figure": "ladder", "seed": seed, "temperature": temperature}
    figure["training_min"] = training_min
    for name in NAMES:
        done = read_success(evaluation, name)
        require("the ladder", tasks=(set(TEMPLATES), set(done)))
        figure[name] = round(sum(done.values()) / len(done), 3)
        for level in sorted({template.level for template in TEMPLATES.values()}):
            of_level = [success for task_id, success in done.items() if TEMPLATES[task_id].level == level]
            figure[f"{name}_level_{level}"] = round(sum(of_level) / len(of_level), 3)
    print(json.dumps(figure), flush=True)


def command(recipe: str, folder: Path, *options: str) -> None:
    """Run a recipe, or continue it, with its output beside the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    common = (f"log_path={folder}", "behavior_if_log_dir_exists=resume")
    with folder.with_suffix(".out").open("ab") as output:
        words = [sys.executable, "-m", f"cua_rl.recipes.{recipe}", *common, *options]
        subprocess.run(words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True)


def read_success(evaluation: Path, name: str) -> dict[str, bool]:
    """By task, whether the model of this name did it."""
    attempts = map(json.loads, (evaluation / "attempts.jsonl").read_text().splitlines())
    return {one["task_id"]: bool(one["success"]) for one in attempts if one["model"] == name}


if __name__ == "__main__":
    main(sys.argv[1:])
