"""Does credit per turn pay? Success at equal numbers of turns, arm by arm on equal seeds, and its cost: JSON lines.

    python -m benchmarks.credit FOLDER [--arms rollout,state_groups] [--seeds 0,1,2,3,4] [--steps 24] [key=value ...]

Every run trains the embedded demo's model on `--tasks` with one kind of advantages; what is given as key=value goes
to all. Turns are the steps of the environment. For each seed success is read where the arm that took the fewest turns
had taken all of its own, as the mean over the groups of the last 3 steps; a last line per arm has the mean over seeds
and its 95 % interval (Student). `companions` is the share of turns that saw a state which another rollout of the group
saw: without any, state groups are leave-one-out. `extra_ms` is the processor time that state groups add to a step, for
naming the states of its turns and comparing them, measured on the recorded groups of the run's first step.
A folder that holds a complete run is read, not run again.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.claims import require
from benchmarks.curriculum import run, smoothed_success
from cua_rl.database.rebuild import load_groups
from cua_rl.environments.phone.simulator.device import state_name
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.evaluation.statistics import student_quantile
from cua_rl.rl.advantages import score_group, state_of
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.types.rollout import RolloutGroup

MILESTONES = "credit.milestone_reward=0.3"
ARMS = {
    "rollout": ("advantages=leave_one_out",),
    "state_groups": ("advantages=state_groups",),
    "rollout_milestones": ("advantages=leave_one_out", MILESTONES),
    "state_groups_milestones": ("advantages=state_groups", MILESTONES),
    "turn_returns": ("advantages=turn_returns", MILESTONES),
    "branches": ("advantages=leave_one_out", "branching.num_siblings=1"),
}
TASKS = '{"source_type": "demo_training", "tags": ["settings_page"]}'
_REPEATS = 20


def num_turns(step: dict[str, Any]) -> float:
    return step["rollout/num_turns/mean"] * step["rollout/num_rollouts"]


def num_steps_within(steps: list[dict[str, Any]], turns: float) -> int:
    """The number of steps whose turns are at most this many."""
    return sum(total <= turns for total in accumulate(map(num_turns, steps)))


async def first_groups(folder: Path) -> list[RolloutGroup]:
    """The recorded groups of a run's first step."""
    async with open_run_database(str(folder), os.environ) as (database, name), database.sessions() as session:
        return await load_groups(session, await find_training_id(database, name), 1)


def companions(groups: list[RolloutGroup]) -> float:
    """The share of turns that saw a state which another rollout of the group saw too."""
    num_compared = num_all = 0
    for group in groups:
        seen = [[state_of(turn, moving_top=0.0) for turn in rollout.turns] for rollout in group.rollouts]
        for member, own in enumerate(seen):
            others = {state for place, other in enumerate(seen) if place != member for state in other}
            num_compared += sum(state in others for state in own)
            num_all += len(own)
    return num_compared / num_all


def seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one call, the shortest of several."""
    taken: list[float] = []
    for _ in range(_REPEATS):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def extra_seconds(groups: list[RolloutGroup]) -> float:
    """What state groups add to a step: names for the states of its turns, and their comparison."""
    naming = seconds(partial(state_name, make_phone_state(3)))
    num_turns = sum(len(rollout.turns) for group in groups for rollout in group.rollouts)
    return naming * num_turns + sum(
        seconds(partial(score_group, group, "state_groups")) - seconds(partial(score_group, group, "leave_one_out"))
        for group in groups
    )


def cost_figure(arm: str, seed: int, steps: list[dict[str, Any]], groups: list[RolloutGroup]) -> dict[str, object]:
    extra = extra_seconds(groups)
    return {
        "figure": "credit_cost",
        "arm": arm,
        "seed": seed,
        "companions": round(companions(groups), 3),
        "num_turns": sum(len(rollout.turns) for group in groups for rollout in group.rollouts),
        "extra_ms": round(1000 * extra, 2),
        "step_s": round(steps[0]["time/step_s"], 2),
        "share_of_step": round(extra / steps[0]["time/step_s"], 5),
        "load": round(os.getloadavg()[0], 1),
    }


def interval(values: list[float]) -> list[float] | None:
    """95 % interval of the mean over seeds; None for a single one."""
    if len(values) < 2:
        return None
    margin = student_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return [round(fmean(values) - margin, 3), round(fmean(values) + margin, 3)]


def main(arguments: argparse.Namespace) -> None:
    """Run every arm seed by seed, then print the table."""
    arms, seeds = arguments.arms.split(","), [int(word) for word in arguments.seeds.split(",")]
    rates: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in seeds:
        found: dict[str, list[dict[str, Any]]] = {}
        for arm in arms:
            options = (f"tasks={arguments.tasks}", f"seed={seed}", *ARMS[arm], *arguments.settings)
            folder = arguments.folder.absolute() / f"{arm}-seed{seed}"
            found[arm] = run(folder, arguments.steps, *options)
            require(f"the arm {arm}", steps=(arguments.steps, len(found[arm])))
            groups = asyncio.run(first_groups(folder))
            print(json.dumps(cost_figure(arm, seed, found[arm], groups)), flush=True)
        fewest = min(sum(map(num_turns, steps)) for steps in found.values())
        for arm, steps in found.items():
            within = num_steps_within(steps, fewest)
            rates[arm].append(smoothed_success(steps, within))
            line = {"figure": "credit", "arm": arm, "seed": seed, "num_turns": int(fewest), "num_steps": within}
            line |= {"first_success_rate": round(steps[0]["reward/success_rate"], 3)}
            line |= {"success_rate": round(rates[arm][-1], 3), "seconds": round(sum(s["time/step_s"] for s in steps))}
            print(json.dumps(line), flush=True)
    for arm, values in rates.items():
        line = {"figure": "credit_arm", "arm": arm, "num_seeds": len(values), "success_rate": round(fmean(values), 3)}
        print(json.dumps(line | {"interval": interval(values)}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default="rollout,state_groups", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("settings", nargs="*", help="key=value for every run")
    main(parser.parse_intermixed_args())
