"""How far up the ladder of demo tasks do models get? Success by level, a JSON line per model, seed and level.

    python -m benchmarks.ladder FOLDER [--model ladder_qwen3_vl] [--adapter RUN] [--seeds 0,1,2] [key=value ...]

Every demo task once per seed, on a phone that no training draws: the tiny model, one that `make_ladder_model` made, and
the same with the adapter of a run with preset=ladder. What is given as key=value goes to every evaluation; one that is
complete is read, not made again.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from benchmarks.claims import require
from cua_rl.environments.phone.demo.templates import TEMPLATES


def evaluate(folder: Path, seed: int, models: list[dict[str, str]], options: list[str]) -> list[dict[str, object]]:
    """Attempts of each model at every demo task."""
    command = [
        *(sys.executable, "-m", "cua_rl.recipes.evaluate", f"log_path={folder}", f"models={json.dumps(models)}"),
        *('tasks={"source_type": "demo_all"}', f"num_tasks={len(TEMPLATES)}", f"seed={seed}", "temperature=0.5"),
        *("max_tokens=64", "server.max_model_len=2048", "behavior_if_log_dir_exists=resume", *options),
    ]
    subprocess.run(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
    attempts = [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]
    require("attempts", num=(len(models) * len(TEMPLATES), len(attempts)))
    return attempts


def print_levels(attempts: list[dict[str, object]], seed: int) -> None:
    """Success by model and level; level 0 is of all tasks."""
    successes = defaultdict[tuple[str, int], list[bool]](list)
    for attempt in attempts:
        for level in (0, TEMPLATES[str(attempt["task_id"])].level):
            successes[str(attempt["model"]), level].append(attempt["success"] is True)
    for (model, level), values in sorted(successes.items()):
        share = sum(values) / len(values)
        print(json.dumps({"model": model, "seed": seed, "level": level, "num": len(values), "success": share}))


def main() -> None:
    """Evaluate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="ladder_qwen3_vl")
    parser.add_argument("--adapter")
    parser.add_argument("--seeds", default="0,1,2")
    arguments, options = parser.parse_known_args()
    models = [{"name": "tiny"}, {"name": "ladder", "model_name": arguments.model}]
    if arguments.adapter is not None:
        models.append({"name": "adapter", "model_name": arguments.model, "adapter": arguments.adapter})
    for seed in map(int, arguments.seeds.split(",")):
        folder = arguments.folder / f"seed{seed}"
        print_levels(evaluate(folder, seed, models, options), seed)


if __name__ == "__main__":
    main()
