"""Queries of the results that recipes have recorded about a run; the newest result of a step or turn counts."""

from math import fsum
from pathlib import PurePath
from typing import Any

from sqlalchemy import and_, or_, select

from cua_rl.database.analysis_models import Analysis
from cua_rl.database.models import RolloutRow, Training
from cua_rl.monitor import analysis_schemas as schemas
from cua_rl.monitor.databases import RunAccess
from cua_rl.monitor.rollout_queries import find_rollout
from cua_rl.types.json_values import JsonDict

_MOST = 200


async def list_analyses(run: RunAccess) -> list[schemas.AnalysisPlace]:
    """What of the run was analysed, newest first."""
    models = select(Training.id).where(Training.log_path == run.training.log_path)
    of_suite = and_(Analysis.kind == "suite", Analysis.training_id.in_(models))
    query = select(Analysis.kind, Analysis.step, RolloutRow.rollout_id, Analysis.turn_index)
    query = query.outerjoin(RolloutRow, Analysis.rollout_pk == RolloutRow.id).order_by(Analysis.id.desc()).limit(_MOST)
    found = await run.session.execute(query.where(or_(Analysis.training_id == run.training.id, of_suite)))
    return [schemas.AnalysisPlace.model_validate(row) for row in dict.fromkeys(found)]


async def load_suite(run: RunAccess) -> schemas.Suite | None:
    """The suite of which the run is a model; None if nothing was compared."""
    query = select(Training.run_name, Training.id).where(Training.log_path == run.training.log_path)
    folder = PurePath(run.training.log_path).name
    keys = {name.removeprefix(f"{folder}@"): key for name, key in await run.session.execute(query)}
    found = select(Analysis).where(Analysis.kind == "suite", Analysis.training_id.in_(keys.values()))
    rows = list(await run.session.scalars(found.order_by(Analysis.id.desc()).limit(_MOST)))
    if not rows:
        return None

    def model(name: str) -> schemas.SuiteModel:
        run_id = run.database.run_id(keys[name]) if name in keys else None
        return schemas.SuiteModel(name=name, run_id=run_id)

    def comparison(row: Analysis) -> schemas.SuiteComparison:
        first, second, accepted = row.result["pair"]["first"], row.result["pair"]["second"], row.result["accepted"]
        models = {"accepted": model(first), "candidate": model(second), "is_accepted": accepted == second}
        return schemas.SuiteComparison.model_validate(row.result | models | {"at": row.created_at})

    return schemas.Suite(
        name=folder,
        accepted=model(rows[0].result["accepted"]),
        comparisons=[comparison(row) for row in rows],
    )


async def load_replay(run: RunAccess, step: int) -> schemas.StepReplay | None:
    """The newest replay of a step, by variant and, side by side, by task and rollout; None without one."""
    query = select(Analysis).where(
        Analysis.training_id == run.training.id, Analysis.kind == "replay", Analysis.step == step
    )
    row = await run.session.scalar(query.order_by(Analysis.id.desc()).limit(1))
    if row is None:
        return None
    variants: list[JsonDict] = row.result["variants"]
    rollouts = [
        each[0] | {"changes": [one["change"] for one in each]}
        for each in zip(*(one["rollouts"] for one in variants), strict=True)
    ]
    tasks = [
        {"task_id": each[0]["task_id"], "effects": each}
        for each in zip(*(one["tasks"] for one in variants), strict=True)
    ]
    places = {"at": row.created_at, "is_same_machine": row.result["trained_on"] == row.result["replayed_on"]}
    return schemas.StepReplay.model_validate(row.result | places | {"rollouts": rollouts, "tasks": tasks})


async def list_asked(run: RunAccess, rollout_id: str) -> list[schemas.AskedTurn]:
    """The turns of a rollout that checkpoints were asked about."""
    rollout = await find_rollout(run, rollout_id)
    query = select(Analysis).where(Analysis.rollout_pk == rollout.id, Analysis.kind == "answers")
    newest = {row.turn_index or 0: row for row in await run.session.scalars(query.order_by(Analysis.id))}
    return [_asked(newest[turn]) for turn in sorted(newest)]


def _asked(row: Analysis) -> schemas.AskedTurn:
    recorded: JsonDict = row.result["recorded"]
    checkpoints = [
        one
        | {
            "logprob": fsum(one["logprobs"]),
            "num_same": sum(sample["done"] == recorded["done"] for sample in one["samples"]),
        }
        for one in row.result["checkpoints"]
    ]
    known: dict[str, Any] = {"at": row.created_at, "turn_index": row.turn_index, "checkpoints": checkpoints}
    sums = {"logprob": fsum(recorded["logprobs"]), "num_tokens": len(recorded["logprobs"])}
    return schemas.AskedTurn.model_validate(row.result | known | sums)
