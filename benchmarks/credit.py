"""Does credit per turn pay? Success at equal numbers of turns, arm by arm on equal seeds, and its cost: JSON lines.

    python -m benchmarks.credit FOLDER [--arms rollout,state_groups] [--seeds 0,1,2,3,4] [--steps 24] [key=value ...]

Every run trains the embedded demo's model on `--tasks` with one kind of advantages; what is given as key=value goes
to all. Turns are the steps of the environment; those that siblings share with their parent count once. For each seed
success is read at equal turns, where the arm that took the fewest had taken all of its own, and likewise at equal
seconds, as the mean over the groups of the last 3 steps up to there. Seconds need a machine without other work. A last
line per arm has the means over seeds and, seed by seed against the first arm, the differences, with 95 % intervals
(Student). `companions` is the share of turns that saw a state which another rollout of the group saw: without any,
state groups are leave-one-out. `extra_ms` is the processor time that state groups add to a step, for naming the states
of its turns and comparing them, measured on the recorded groups of the run's first step.
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
from operator import sub
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.claims import require
from benchmarks.curriculum import run, smoothed_success
from cua_rl.database.rebuild import load_groups
from cua_rl.environments.phone.simulator.device import state_name
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.evaluation.statistics import student_quantile
from cua_rl.rl.advantages import score_group
from cua_rl.rollout.branches import state_of
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
    "first_disagreement": ("advantages=leave_one_out", "branching.num_siblings=1", "branching.at=first_disagreement"),
    "before_failure": ("advantages=leave_one_out", "branching.num_siblings=1", "branching.at=before_failure"),
}
TASKS = '{"source_type": "demo_training", "tags": ["settings_page"]}'
_REPEATS = 20


def num_turns(step: dict[str, Any]) -> float:
    """Turns that devices executed; those of a parent count once."""
    all_turns = step["rollout/num_turns/mean"] * step["rollout/num_rollouts"]
    return all_turns - step.get("rollout/shared_turns", 0.0)


def seconds(step: dict[str, Any]) -> float:
    return step["time/step_s"]


BUDGETS = {"turns": num_turns, "seconds": seconds}


def success_within(steps: list[dict[str, Any]], cost: Callable[[dict[str, Any]], float], budget: float) -> float:
    """Success over the groups of the last steps that are within the budget, together with all before them."""
    return smoothed_success(steps, sum(total <= budget for total in accumulate(map(cost, steps))))


async def first_groups(folder: Path) -> list[RolloutGroup]:
    """The recorded groups of a run's first step."""
    async with open_run_database(str(folder), os.environ) as (database, name), database.sessions() as session:
        return await load_groups(session, await find_training_id(database, name), 1)


def companions(groups: list[RolloutGroup]) -> float:
    """The share of turns that saw a state which another rollout of the group saw too."""
    num_compared = num_all = 0
    for group in groups:
        seen = [[state_of(turn, 0.0) for turn in rollout.turns] for rollout in group.rollouts]
        for member, own in enumerate(seen):
            others = {state for place, other in enumerate(seen) if place != member for state in other}
            num_compared += sum(state in others for state in own)
            num_all += len(own)
    return num_compared / num_all


def processor_seconds(work: Callable[[], object]) -> float:
    """Processor seconds of one call, the shortest of several."""
    taken: list[float] = []
    for _ in range(_REPEATS):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return min(taken)


def extra_seconds(groups: list[RolloutGroup]) -> float:
    """What state groups add to a step: names for the states of its turns, and their comparison."""
    naming = processor_seconds(partial(state_name, make_phone_state(3)))
    num_turns = sum(len(rollout.turns) for group in groups for rollout in group.rollouts)
    return naming * num_turns + sum(
        processor_seconds(partial(score_group, group, "state_groups"))
        - processor_seconds(partial(score_group, group, "leave_one_out"))
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


def require_arm(arm: str, num_steps: int, steps: list[dict[str, Any]], compared: float) -> None:
    """Refuse figures of an arm that did not do what it is named for; `compared` is its share of `companions`."""
    has_branches, has_milestones = "branching.num_siblings=1" in ARMS[arm], MILESTONES in ARMS[arm]
    require(
        f"the arm {arm}",
        steps=(num_steps, len(steps)),
        branches=(has_branches, any(step.get("rollout/shared_turns", 0.0) > 0 for step in steps)),
        milestones=(has_milestones, any(step.get("reward/parts/milestones", 0.0) > 0 for step in steps)),
        compares_states=(True, compared > 0 or "advantages=state_groups" not in ARMS[arm]),
    )


def interval(values: list[float]) -> list[float] | None:
    """95 % interval of the mean over seeds; None for a single one."""
    if len(values) < 2:
        return None
    margin = student_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))
    return [round(fmean(values) - margin, 3), round(fmean(values) + margin, 3)]


def against_first(arm: str, name: str, reached: dict[str, list[float]]) -> dict[str, object]:
    """The arm's mean of `name` over seeds, its interval, and what it differs by from the first arm."""
    first = next(iter(reached.values()))
    differences = list(map(sub, reached[arm], first))
    figure: dict[str, object] = {name: round(fmean(reached[arm]), 3), f"{name}_interval": interval(reached[arm])}
    return figure | {
        f"{name}_difference": round(fmean(differences), 3),
        f"{name}_difference_interval": interval(differences),
    }


def main(arguments: argparse.Namespace) -> None:
    """Run every arm seed by seed, then print the table."""
    arms, seeds = arguments.arms.split(","), [int(word) for word in arguments.seeds.split(",")]
    reached: dict[str, dict[str, list[float]]] = {budget: {arm: [] for arm in arms} for budget in BUDGETS}
    for seed in seeds:
        found: dict[str, list[dict[str, Any]]] = {}
        for arm in arms:
            options = (f"tasks={arguments.tasks}", f"seed={seed}", *ARMS[arm], *arguments.settings)
            folder = arguments.folder.absolute() / f"{arm}-seed{seed}"
            found[arm] = run(folder, arguments.steps, *options)
            groups = asyncio.run(first_groups(folder))
            require_arm(arm, arguments.steps, found[arm], companions(groups))
            if "advantages=state_groups" in ARMS[arm]:
                print(json.dumps(cost_figure(arm, seed, found[arm], groups)), flush=True)
        for arm, steps in found.items():
            line: dict[str, object] = {"figure": "credit", "arm": arm, "seed": seed}
            line["first_success_rate"] = round(steps[0]["reward/success_rate"], 3)
            for name, cost in BUDGETS.items():
                budget = min(sum(map(cost, steps)) for steps in found.values())
                reached[name][arm].append(success_within(steps, cost, budget))
                line |= {f"num_{name}": round(sum(map(cost, steps))), f"equal_{name}": round(reached[name][arm][-1], 3)}
            print(json.dumps(line), flush=True)
    for arm in arms:
        line = {"figure": "credit_arm", "arm": arm, "num_seeds": len(seeds)}
        for name, rates in reached.items():
            line |= against_first(arm, f"equal_{name}", rates)
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--arms", default="rollout,state_groups", help=f"some of {', '.join(ARMS)}")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("settings", nargs="*", help="key=value for every run")
    main(parser.parse_intermixed_args())
