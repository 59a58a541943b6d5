"""Does a curriculum save rollouts? Steps and rollouts until 90 % success, arm by arm on equal seeds: a JSON line each.

    python -m benchmarks.curriculum FOLDER [--arms plain,refill] [--seeds 0,1] [--steps 32] [key=value ...]

Half of the tasks are already solved: a first run in FOLDER/prepared-seed<N> trains on the toggles alone; every arm
begins with its weights and trains on toggles and apps together, half and half. What is given as key=value goes to every
run. Success is the mean over all groups of the last 3 steps, as if tasks were drawn alike; in a step that refills, that
is more groups than in one that does not. `num_rollouts` counts all of them, the dropped ones too.
A folder that holds a complete run is read, not run again.
"""

import argparse
import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.claims import require

ARMS = {
    "plain": (),
    "refill": ("refill_groups=true",),
    "success_rate": ("task_sampling=success_rate",),
    "replay": ("replay_successes=true", "loss=ppo"),
    "all": ("refill_groups=true", "task_sampling=success_rate", "replay_successes=true", "loss=ppo"),
}
SOLVED = 'tasks={"source_type": "demo_training", "tags": ["demo", "toggle_setting"]}'
MIXED = 'tasks={"source_type": "demo_training", "tags": ["demo"]}'
TARGET = 0.9
WINDOW = 3  # steps; one step of 128 rollouts has a standard error of about 0.03


def run(folder: Path, num_steps: int, *options: str) -> list[dict[str, Any]]:
    """Train in `folder`, or continue what was begun there; the metrics of every step."""
    if len(read_steps(folder)) < num_steps:
        complete("train", folder, f"max_steps={num_steps}", "eval_tasks=none", "save_every=4", *options)
    return read_steps(folder)


def complete(recipe: str, folder: Path, *options: str) -> None:
    """Run a recipe in `folder`, or continue it, with its output beside the folder."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    common = (f"log_path={folder}", "behavior_if_log_dir_exists=resume")
    with folder.with_suffix(".out").open("ab") as output:
        command = [sys.executable, "-m", f"cua_rl.recipes.{recipe}", *common, *options]
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=True)


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The metrics of the trained steps of a run."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record for record in records if "reward/mean" in record]


def smoothed_success(steps: list[dict[str, Any]], num_steps: int) -> float:
    """Success over the groups of the last `WINDOW` of the first `num_steps` steps."""
    window = steps[max(0, num_steps - WINDOW) : num_steps]
    num_groups = [step["curriculum/num_sampled_groups"] for step in window]
    # with task_sampling=success_rate, that of the tasks which were drawn falls as others are solved
    rates = (step.get("reward/success_rate_uniform", step["reward/success_rate"]) for step in window)
    return sum(map(operator.mul, rates, num_groups)) / sum(num_groups)


def require_arm(arm: str, num_steps: int, steps: list[dict[str, Any]]) -> None:
    """Refuse figures of an arm that did not do what it is named for."""
    refills, replays = ("refill_groups=true" in ARMS[arm]), ("replay_successes=true" in ARMS[arm])
    require(
        f"the arm {arm}",
        steps=(num_steps, len(steps)),
        steps_have_rollouts=(True, all(step["rollout/num_rollouts"] > 0 for step in steps)),
        replays=(replays, any(step["replay/num_rollouts"] > 0 for step in steps)),
        # a batch that needs no refill anywhere in a run is one of a run in which all groups teach
        refills=(refills, len({step["curriculum/num_sampled_groups"] for step in steps}) > 1),
    )


def figure(arm: str, seed: int, steps: list[dict[str, Any]]) -> dict[str, object]:
    """What one arm needed; None where the target was not reached."""
    reached = next(
        (number for number in range(WINDOW, len(steps) + 1) if smoothed_success(steps, number) >= TARGET), None
    )
    rollouts = [int(step["rollout/num_rollouts"]) for step in steps]
    return {
        "figure": "curriculum",
        "arm": arm,
        "seed": seed,
        "target": TARGET,
        "steps_to_target": reached,
        "rollouts_to_target": None if reached is None else sum(rollouts[:reached]),
        "num_steps": len(steps),
        "num_rollouts": sum(rollouts),
        "first_success_rate": round(steps[0]["reward/success_rate"], 3),
        "last_success_rate": round(smoothed_success(steps, len(steps)), 3),
        "effective_group_frac": round(sum(step["curriculum/effective_group_frac"] for step in steps) / len(steps), 3),
        "batch_fill_frac": round(sum(step["curriculum/batch_fill_frac"] for step in steps) / len(steps), 3),
        "num_replayed": int(sum(step["replay/num_rollouts"] for step in steps)),
        "seconds": round(sum(step["time/step_s"] for step in steps)),
        "load": round(os.getloadavg()[0], 1),
    }


def main(arguments: argparse.Namespace) -> None:
    """Prepare, then run every arm, seed by seed."""
    folder: Path = arguments.folder.absolute()
    for seed in (int(word) for word in arguments.seeds.split(",")):
        common = (f"seed={seed}", *arguments.settings)
        prepared = folder / f"prepared-seed{seed}"
        steps = run(prepared, arguments.prepare_steps, SOLVED, *common)
        rate = smoothed_success(steps, len(steps))
        print(json.dumps({"figure": "prepared", "seed": seed, "success_rate": round(rate, 3)}), flush=True)
        weights = prepared / "weights" / f"{arguments.prepare_steps:06d}"
        for arm in arguments.arms.split(","):
            options = (MIXED, f"load_checkpoint_path={weights}", *ARMS[arm], *common)
            steps = run(folder / f"{arm}-seed{seed}", arguments.steps, *options)
            require_arm(arm, arguments.steps, steps)
            print(json.dumps(figure(arm, seed, steps)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default="plain,refill", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--prepare-steps", type=int, default=24)
    parser.add_argument("settings", nargs="*", help="key=value for every run")
    main(parser.parse_intermixed_args())
