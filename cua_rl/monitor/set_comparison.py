"""Two sets of rollouts side by side: is the difference of their success real, and at which tasks is it?"""

import asyncio
from collections.abc import Hashable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Literal
from urllib.parse import parse_qs

from pydantic import TypeAdapter, ValidationError

from cua_rl.database.models import RolloutRow
from cua_rl.evaluation.statistics import difference_interval, paired_interval, sign_flip_test
from cua_rl.monitor import set_schemas as schemas
from cua_rl.monitor.databases import Databases
from cua_rl.monitor.figures import columns
from cua_rl.monitor.rollout_sets import VERDICT, RolloutFilter, open_runs
from cua_rl.monitor.set_queries import Tally, count, find_rollouts, rate_of, tally_of
from cua_rl.types.errors import CuaError

_FILTERS = TypeAdapter(RolloutFilter)
_MOST_RUNS = 12
_p_value = lru_cache(maxsize=256)(sign_flip_test)
Rates = Mapping[Hashable, Fraction]


class SetError(CuaError, ValueError):
    """The text does not name a set."""


def parse_set(text: str) -> tuple[list[str], RolloutFilter]:
    """The runs and the filter in the query of a set's address; raises `SetError`."""
    try:
        given = parse_qs(text, keep_blank_values=True, max_num_fields=100)  # a validator may have read nothing
        run_ids = given.pop("run_id", [])
        if not 1 <= len(run_ids) <= _MOST_RUNS:
            raise ValueError(f"run_id is given {len(run_ids)} times")
        wanted = {name: values if name == "phase" else values[-1] for name, values in given.items()}
        return run_ids, _FILTERS.validate_python(wanted)
    except ValueError as error:  # of pydantic as well
        reasons = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise SetError(
            f"expected the query of a set's address, of at most {_MOST_RUNS} runs, got {text[:200]!r}: {reasons}; open "
            "the set at /rollouts and copy its query"
        ) from None


async def compare_sets(databases: Databases, first: str, second: str) -> schemas.SetComparison:
    """The difference of the second set's success to the first one's, paired as closely as they allow."""
    one, ours = await _load_arm(databases, first)
    two, theirs = await _load_arm(databases, second)
    paired_by, pairs = _pair(ours, theirs)
    difference, p_value, test = None, None, None
    low, high = difference_interval(
        *((arm.success.rate or 0.0, (arm.success.low, arm.success.high)) for arm in (one, two))
    )
    if one.success.rate is not None and two.success.rate is not None:
        difference = two.success.rate - one.success.rate
    if paired_by is not None:
        differences = tuple(sorted(theirs_rate - our_rate for our_rate, theirs_rate in pairs))
        difference, (low, high) = float(sum(differences)) / len(differences), paired_interval(differences)
        p_value = await asyncio.to_thread(_p_value, differences)
        is_single = all(rate in (0, 1) for pair in pairs for rate in pair)
        test = "McNemar's test, exact" if is_single else f"sign-flip permutation test over {paired_by}s"
    return schemas.SetComparison(
        first=one,
        second=two,
        paired_by=paired_by,
        num_pairs=len(pairs),
        num_worse=sum(theirs_rate < our_rate for our_rate, theirs_rate in pairs),
        num_better=sum(theirs_rate > our_rate for our_rate, theirs_rate in pairs),
        difference=difference,
        low=low,
        high=high,
        p_value=p_value,
        test=test,
        tasks=_by_task(ours, theirs),
    )


async def _load_arm(databases: Databases, text: str) -> tuple[schemas.SetArm, Tally]:
    run_ids, wanted = parse_set(text)
    async with open_runs(databases, run_ids) as (runs, named):
        keys = (RolloutRow.training_id, VERDICT, RolloutRow.task_id, RolloutRow.seed)
        found = [(one, await count(await find_rollouts([one], wanted), RolloutRow, *keys)) for one in runs]
    by_run = {
        one.database.run_id(key): tally_of(
            ((task, seed), verdict, num) for (run, verdict, task, seed), num in counts.items() if run == key
        )
        for one, counts in found
        for key in one.training_ids
    }
    every = tally_of(
        ((task, seed), verdict, num) for _, counts in found for (_, verdict, task, seed), num in counts.items()
    )
    runs_shown = [
        schemas.ArmRun(**columns(run, run_id=run_id, success=rate_of(by_run[run_id]))) for run_id, run in named
    ]
    return schemas.SetArm(runs=runs_shown, success=rate_of(every)), every


def _pair(
    first: Tally, second: Tally
) -> tuple[Literal["task instance", "task"] | None, list[tuple[Fraction, Fraction]]]:
    """Success rates of what both attempted: task instances, tasks if they share few of those, else nothing."""
    levels: tuple[tuple[Literal["task instance", "task"], Rates, Rates], ...] = (
        ("task instance", _instance_rates(first), _instance_rates(second)),
        ("task", _task_rates(first), _task_rates(second)),
    )
    for name, ours, theirs in levels:
        shared = ours.keys() & theirs.keys()
        if len(shared) >= 2 and 2 * len(shared) >= min(len(ours), len(theirs)):
            return name, [(ours[key], theirs[key]) for key in shared]
    return None, []


def _instance_rates(tally: Tally) -> dict[Hashable, Fraction]:
    return {
        (task, seed): Fraction(won, done)
        for task, seeds in tally.items()
        for seed, (won, done) in seeds.items()
        if done
    }


def _task_rates(tally: Tally) -> dict[Hashable, Fraction]:
    """The mean over a task's instances."""
    rates = {task: [Fraction(won, done) for won, done in seeds.values() if done] for task, seeds in tally.items()}
    return {task: sum(found, Fraction()) / len(found) for task, found in rates.items() if found}


def _by_task(first: Tally, second: Tally) -> list[schemas.TaskDifference]:
    """Tasks of either set, those that got worse most first; those of one set alone last."""
    found = [
        schemas.TaskDifference(
            task_id=task, first=rate_of({task: first.get(task, {})}), second=rate_of({task: second.get(task, {})})
        )
        for task in first.keys() | second.keys()
    ]
    return sorted(found, key=lambda one: (_change(one), one.task_id))


def _change(task: schemas.TaskDifference) -> float:
    return 2.0 if task.first.rate is None or task.second.rate is None else task.second.rate - task.first.rate
