"""Which trust region pays? Success of the embedded demo, loss by loss on equal seeds: JSON lines.

    python -m benchmarks.trust_regions FOLDER [--arms ppo,dppo] [--seeds 0,1,2,3,4] [--steps 12] [key=value ...]

Where sampler and trainer agree, all these losses have the same gradient; what is given as key=value makes them differ:
`num_substeps=4`, so that the last optimizer step of a step trains on data of a policy three steps older, or
`max_steps_off_policy=2`. The first line of an arm and seed has success after the last step, as the mean over the groups
of its last 3 steps, and success over all steps, which says how fast it came. A last line per arm has the means over
seeds and, seed by seed against the first arm, the difference with its 95 % interval (Student).
A folder that holds a complete run is read, not run again.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.claims import require
from benchmarks.credit import against_first
from benchmarks.curriculum import run, smoothed_success

ARMS = {
    "ppo": ("loss=ppo",),
    "clip_higher": ("loss=ppo", "clip_high=0.28"),
    "clip_wide": ("loss=ppo", "clip_low=0.5", "clip_high=1"),
    "cispo": ("loss=cispo",),
    "gspo": ("loss=gspo",),
    "dppo": ("loss=dppo",),
    "stable_reinforce": ("loss=stable_reinforce", "force_untruncated=true"),
    "tis": ("loss=ppo", "tis_cap=2"),
    "none": ("loss=importance_sampling", "force_untruncated=true"),
}


def success(steps: list[dict[str, Any]]) -> dict[str, float]:
    """After the last step and over all of them."""
    rates = [step["reward/success_rate"] for step in steps]
    return {"last": smoothed_success(steps, len(steps)), "all": fmean(rates)}


def figure(arm: str, seed: int, steps: list[dict[str, Any]]) -> dict[str, object]:
    """What one run reached, and how far off-policy the steps were that trained something."""
    trained = [step for step in steps if "policy/ratio_p99" in step]
    return {
        "figure": "trust_region",
        "arm": arm,
        "seed": seed,
        **{name: round(rate, 3) for name, rate in success(steps).items()},
        "clip_frac": round(fmean(step.get("policy/clip_frac", 0.0) for step in trained), 4),
        "ratio_p99": round(fmean(step["policy/ratio_p99"] for step in trained), 3),
        "ess_frac": round(min(step["policy/ess_frac"] for step in trained), 3),
        "entropy": round(trained[-1]["policy/entropy"], 3),
        "parse_failure_frac": round(max(step["rollout/parse_failure_frac"] for step in steps), 3),
        "seconds": round(sum(step["time/step_s"] for step in steps)),
    }


def require_arm(arm: str, num_steps: int, steps: list[dict[str, Any]]) -> None:
    """Refuse figures of a run whose data was on-policy throughout: all losses are the same there."""
    off_policy = any(step.get("policy/ratio_p99", 1.0) > 1.01 for step in steps)
    require(f"the arm {arm}", steps=(num_steps, len(steps)), off_policy=(True, off_policy))


def main(arguments: argparse.Namespace) -> None:
    """Run every arm seed by seed, then print the table."""
    arms, seeds = arguments.arms.split(","), [int(word) for word in arguments.seeds.split(",")]
    reached: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for seed in seeds:
        for arm in arms:
            folder = arguments.folder.absolute() / f"{arm}-seed{seed}"
            steps = run(folder, arguments.steps, f"seed={seed}", *ARMS[arm], *arguments.settings)
            require_arm(arm, arguments.steps, steps)
            reached[arm].append(success(steps))
            print(json.dumps(figure(arm, seed, steps)), flush=True)
    for arm in arms:
        line: dict[str, object] = {"figure": "trust_region_arm", "arm": arm, "num_seeds": len(seeds)}
        for name in ("last", "all"):
            line |= against_first(arm, name, {other: [one[name] for one in rates] for other, rates in reached.items()})
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("settings", nargs="*", help="key=value for every run")
    main(parser.parse_intermixed_args())
