"""A run that is disturbed on purpose, seen from outside: its processes, its steps, and what its record must show."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.models import Eval, Group, RolloutRow, Step, TurnRow
from cua_rl.database.queries import find_training, load_steps
from cua_rl.database.session import open_sessions
from cua_rl.recipes.rebuild_datums import rebuild_step
from cua_rl.reporting.json_lines import read_records
from cua_rl.run_folder.recorded_run import RecordedTraining

TIMEOUT_S = 600.0  # for the slowest step, or the start of a model server
POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedRun:
    """The run that the record must show."""

    run_folder: Path
    num_steps: int
    group_size: int
    groups_per_batch: int
    max_lag: int
    kept_ids: Collection[str] = field(default_factory=frozenset[str])
    """Groups that were on record as ended and untrained when a run was killed."""
    evaluated: Sequence[int] | None = None
    """The steps after which it evaluates; None does not look."""
    num_eval_rollouts: int = 0


def read_steps(run_folder: Path) -> list[dict[str, Any]]:
    """Metrics of the completed steps so far."""
    return [record for record in read_records(run_folder / "metrics.jsonl") if "reward/mean" in record]


def read_summary(run_folder: Path) -> dict[str, Any]:
    """The summary that a run leaves at its end; empty if it did not get there."""
    path = run_folder / "summary.json"
    return json.loads(path.read_text()) if path.exists() else {}


async def wait_until(condition: Callable[[], object], what: str) -> None:
    """Poll until `condition` holds."""
    deadline = time.monotonic() + TIMEOUT_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {TIMEOUT_S:.0f} s {what}; read the logs")
        await asyncio.sleep(POLL_S)


def processes_of(owner: int, word: str) -> list[psutil.Process]:
    """The processes that `owner` started with this word on their command line, without their guards."""
    found: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        for process in psutil.Process(owner).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                line = " ".join(process.cmdline())
                if word in line and "process_guard" not in line:
                    found.append(process)
    return found


async def find_faults(database_url: str, expected: ExpectedRun) -> list[str]:
    """Compare the record with that of an undisturbed run; returns everything that is wrong."""
    async with open_sessions(database_url) as sessions, sessions() as session:
        return await _find_faults(session, expected)


async def _find_faults(session: AsyncSession, expected: ExpectedRun) -> list[str]:
    training = await find_training(session, expected.run_folder.name)
    if training is None or training.status != "completed":
        return [f"expected a completed run, got {training}"]
    steps = await load_steps(session, training.id)
    rows = (
        await session.execute(
            select(Step.step, Group.group_id, Group.group_index, Group.num_rollouts, Group.status)
            .join(Step, Group.step_id == Step.id)
            .where(Step.training_id == training.id)
        )
    ).all()
    faults = [f"step {step.step} is {step.status}" for step in steps if step.status != "completed"]
    if [step.step for step in steps] != list(range(1, expected.num_steps + 1)):
        faults.append(f"expected steps 1 to {expected.num_steps}, got {[step.step for step in steps]}")
    faults += [f"group {row.group_id} is {row.status}" for row in rows if row.status != "completed"]
    wrong_sizes = [row for row in rows if row.num_rollouts != expected.group_size]
    faults += [f"group {row.group_id} has {row.num_rollouts}" for row in wrong_sizes]
    faults += _wrong_counts(expected, [(row.step, row.group_index) for row in rows])
    lost = set(expected.kept_ids) - {row.group_id for row in rows}
    faults += [f"group {group_id} was on record and is gone" for group_id in sorted(lost)]
    faults += await _doubled(session, training.id)
    faults += await _running(session, training.id)
    if expected.evaluated is not None:
        faults += await _wrong_evaluations(session, training.id, expected.evaluated, expected.num_eval_rollouts)
    faults += await _too_old(session, training.id, expected.max_lag)
    run = RecordedTraining(
        folder=Path(training.log_path),
        settings={},
        session=session,
        key=training.id,
        steps=steps,
        image_token_id=training.image_token_id,
    )
    for step in steps:
        if step.datums_sha256 and not (await rebuild_step(run, step)).is_equal:
            faults.append(f"step {step.step} was trained on other datums than the record has")
    return faults


def _wrong_counts(expected: ExpectedRun, places: Sequence[tuple[int, int]]) -> list[str]:
    """Task instances that were not trained exactly once, and batches of another size."""
    batch_size, per_step = expected.groups_per_batch, Counter(step for step, _ in places)
    faults = [f"step {step} trained {n} groups" for step, n in sorted(per_step.items()) if n != batch_size]
    if expected.max_lag:
        times = Counter(index for _, index in places)
        wanted = range(expected.num_steps * batch_size)
        faults += [f"task instance {index} was trained {times[index]} times" for index in wanted if times[index] != 1]
    return faults


async def _doubled(session: AsyncSession, training_id: int) -> list[str]:
    """Places in groups that have more than one rollout without a fault."""
    place = (RolloutRow.group_pk, RolloutRow.member_index)
    completed = (RolloutRow.training_id == training_id) & (RolloutRow.status == "completed")
    query = select(*place).where(completed).group_by(*place).having(func.count() > 1)
    return [f"member {row.member_index} of group {row.group_pk} counts twice" for row in await session.execute(query)]


async def _running(session: AsyncSession, training_id: int) -> list[str]:
    query = select(func.count()).select_from(RolloutRow)
    count = await session.scalar(query.where(RolloutRow.training_id == training_id, RolloutRow.status == "running"))
    evals = await session.scalar(
        select(func.count()).select_from(Eval).where(Eval.training_id == training_id, Eval.status != "completed")
    )
    return [f"{count} rollouts and {evals} evaluations still run"] if count or evals else []


async def _wrong_evaluations(
    session: AsyncSession, training_id: int, steps: Sequence[int], num_rollouts: int
) -> list[str]:
    """Evaluations that were not due, are missing, or have another number of rollouts."""
    query = (
        select(Eval.step, func.count())
        .join(Group, Group.eval_id == Eval.id)
        .join(RolloutRow, RolloutRow.group_pk == Group.id)
        .where(Eval.training_id == training_id, RolloutRow.status == "completed")
        .group_by(Eval.id)
        .order_by(Eval.step)
    )
    found = [(step, count) for step, count in await session.execute(query)]
    wanted = [(step, num_rollouts) for step in steps]
    return [] if found == wanted else [f"expected evaluations (step, rollouts) {wanted}, got {found}"]


async def _too_old(session: AsyncSession, training_id: int, max_lag: int) -> list[str]:
    """Turns that were trained more steps after their policy than allowed."""
    steps = (
        await session.execute(
            select(Step.step, Step.trained_policy_version).where(Step.training_id == training_id).order_by(Step.step)
        )
    ).all()
    newest: Mapping[int, int] = {0: 0} | {row.trained_policy_version: row.step for row in steps}
    turns = (
        await session.execute(
            select(Step.step, TurnRow.policy_version)
            .join(Group, Group.step_id == Step.id)
            .join(RolloutRow, RolloutRow.group_pk == Group.id)
            .join(TurnRow, TurnRow.rollout_pk == RolloutRow.id)
            .where(Step.training_id == training_id)
            .distinct()
        )
    ).all()
    lags = [max(0, row.step - 1 - newest[row.policy_version]) for row in turns]
    print(f"largest lag {max(lags)} steps")
    return [f"a turn was {max(lags)} steps old"] if max(lags) > max_lag else []
