"""Queries about runs: lists, figures, series. Each takes a few statements, whatever the size of the run."""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from sqlalchemy import and_, func, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.database.columns import escape_text
from cua_rl.database.models import Checkpoint, Eval, Group, RolloutRow, StatusChange, Step, TaskRow, Training
from cua_rl.masking import mask_secrets
from cua_rl.metrics import meaning
from cua_rl.monitor import schemas
from cua_rl.monitor.databases import AnySelect, Database, RunAccess
from cua_rl.monitor.figures import fault_bounds, finite, finite_values, make_rate
from cua_rl.monitor.pages import decode_time_and_number, encode_cursor
from cua_rl.monitor.run_summaries import evaluation_success, group_sums, step_success, summarise


async def list_runs(
    session: AsyncSession, database: Database, *, search: str, status: str | None, cursor: str | None, limit: int
) -> list[schemas.RunSummary]:
    """Runs of one database, newest first; `search` is a part of name, folder or model."""
    query = select(Training).order_by(Training.started_at.desc(), Training.id.desc()).limit(limit)
    if search:
        pattern = "%" + escape_text(search).replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_") + "%"
        model = func.coalesce(
            func.jsonb_extract_path_text(Training.config, literal_column("'model_name'")), literal_column("''")
        )
        query = query.where(
            or_(
                Training.run_name.ilike(pattern),
                Training.log_path.ilike(pattern),
                model.ilike(pattern),
            )
        )
    if status is not None:
        query = query.where(Training.status == status)
    if cursor is not None:
        started_at, training_id = decode_time_and_number(cursor)
        query = query.where(
            or_(Training.started_at < started_at, and_(Training.started_at == started_at, Training.id < training_id))
        )
    return await summarise(session, database, list(await session.scalars(query)))


def first_page(runs: Sequence[schemas.RunSummary], limit: int) -> schemas.Page[schemas.RunSummary]:
    """The newest `limit` of these runs, and the cursor of the next page."""
    ordered = sorted(runs, key=_age, reverse=True)
    more = encode_cursor(*_age(ordered[limit - 1])) if len(ordered) > limit else None
    return schemas.Page(items=ordered[:limit], next_cursor=more)


def _age(run: schemas.RunSummary) -> tuple[datetime, int]:
    return run.started_at, int(run.run_id.rpartition(".")[2])


def shown_config(training: Training) -> dict[str, Any]:
    """The configuration without secrets."""
    return mask_secrets(training.config)


async def load_run(run: RunAccess) -> schemas.Run:
    """A run with its configuration, metrics, evaluations, checkpoints and status history."""
    session, training = run.session, run.training
    (summary,) = await summarise(session, run.database, [training])
    checkpoints = await session.scalars(
        select(Checkpoint).where(Checkpoint.training_id == training.id).order_by(Checkpoint.step)
    )
    history = await session.scalars(
        select(StatusChange).where(StatusChange.training_id == training.id).order_by(StatusChange.id)
    )
    num_rollouts = await session.scalar(select(func.sum(Group.num_rollouts)).where(Group.training_id == training.id))
    num_running = await session.scalar(
        select(func.count())
        .select_from(RolloutRow)
        .join(Group, RolloutRow.group_pk == Group.id)
        .where(Group.training_id == training.id, Group.status == "running", RolloutRow.status == "running")
    )
    # metrics of the first and the latest trained step, with their latest values
    steps = select(Step.metrics).where(Step.training_id == training.id, Step.metrics.is_not(None)).limit(1)
    first = await session.scalar(steps.order_by(Step.step))
    last = await session.scalar(steps.order_by(Step.step.desc()))
    names: list[str] = sorted({*(first or {}), *(last or {})})
    return schemas.Run(
        **summary.model_dump(),
        config=shown_config(training),
        first_step=training.first_step,
        num_rollouts=num_rollouts or 0,
        num_running_rollouts=(num_running or 0) if summary.is_alive else 0,
        metrics=[
            schemas.MetricInfo(
                name=name, meaning=meaning(name), area=name.split("/", 1)[0], last=finite((last or {}).get(name))
            )
            for name in names
        ],
        evaluations=await list_evaluations(session, training.id),
        checkpoints=[schemas.CheckpointInfo.model_validate(row) for row in checkpoints],
        history=[schemas.StatusChange.model_validate(row) for row in history],
    )


async def list_evaluations(session: AsyncSession, training_id: int) -> list[schemas.Evaluation]:
    """All evaluations of a run, the baseline first, with figures of what has ended."""
    query = _with_sums(Eval, Group.eval_id, training_id).order_by(Eval.step, Eval.phase)
    categories = await _rates_by(session, training_id, TaskRow.category)
    difficulties = await _rates_by(session, training_id, TaskRow.difficulty)
    return [
        schemas.Evaluation(
            phase=row.phase,  # pyright: ignore[reportArgumentType] - the table allows nothing else
            step=row.step,
            status=row.status,  # pyright: ignore[reportArgumentType]
            policy_version=row.policy_version,
            group_size=row.group_size,
            num_groups=row.num_groups,
            num_ended_groups=row.num_ended_groups,
            success=make_rate(won, done),
            fault_bounds=fault_bounds(row.metrics),
            by_category=categories.get(row.id, {}),
            by_difficulty=difficulties.get(row.id, {}),
            reward_mean=finite(mean),
            metrics=finite_values(row.metrics),
            started_at=row.started_at,
            ended_at=row.ended_at,
        )
        for row, won, done, mean in await session.execute(query)
    ]


async def _rates_by(session: AsyncSession, training_id: int, name: Any) -> dict[int, dict[str, schemas.Rate]]:
    """Success in each evaluation, by key, of the tasks with one category, or with one difficulty."""
    successes, rollouts, _ = group_sums()
    query = (
        select(Eval.id, name, successes, rollouts)
        .select_from(Group)
        .join(TaskRow, Group.task_pk == TaskRow.id)
        .join(Eval, Group.eval_id == Eval.id)
        .where(Group.training_id == training_id, Group.status == "completed", name != "")
        .group_by(Eval.id, name)
        .order_by(name)
    )
    found: dict[int, dict[str, schemas.Rate]] = defaultdict(dict)
    for eval_id, value, won, done in await session.execute(query):
        found[eval_id][value] = make_rate(won, done)
    return found


async def load_series(run: RunAccess, *, names: Sequence[str], from_step: int, max_points: int) -> schemas.MetricSeries:
    """Metrics of all steps from `from_step` on, thinned evenly to about `max_points` steps."""
    session, training_id = run.session, run.training.id
    mine = and_(Step.training_id == training_id, Step.step >= from_step, Step.metrics.is_not(None))
    total = (await session.execute(select(func.count()).select_from(Step).where(mine))).scalar_one()
    query = select(Step.step, Step.ended_at, Step.metrics).where(mine).order_by(Step.step)
    if total > max_points:
        every = -(-total // max_points)
        place = func.row_number().over(order_by=Step.step.desc()) - 1
        kept = select(Step.id, place.label("place")).where(mine).subquery()
        query = query.join(kept, kept.c.id == Step.id).where(kept.c.place % every == 0)
    rows = [(step, ended_at, metrics or {}) for step, ended_at, metrics in await session.execute(query)]
    wanted = list(names) or sorted({name for _, _, metrics in rows for name in metrics})
    success = (await step_success(session, [training_id])).get(training_id, [])
    evaluations = (await evaluation_success(session, [training_id])).get(training_id, [])
    return schemas.MetricSeries(
        run_id=run.run_id,
        steps=[step for step, _, _ in rows],
        ended_at=[ended_at for _, ended_at, _ in rows],
        series={name: [finite(metrics.get(name)) for _, _, metrics in rows] for name in wanted},
        success=[_success_point("step", step, won, done) for step, won, done, _ in success if step >= from_step],
        evaluations=[_success_point(phase, step, won, done) for phase, step, won, done in evaluations],
    )


def _success_point(phase: Any, step: int, won: int, done: int) -> schemas.SuccessPoint:
    return schemas.SuccessPoint(phase=phase, step=step, **make_rate(won, done).model_dump())


async def load_timeline(run: RunAccess) -> list[schemas.TimelineItem]:
    """Baseline, steps and evaluations in the order of training, whenever each of them began."""
    steps = _with_sums(Step, Group.step_id, run.training.id)
    evaluations = _with_sums(Eval, Group.eval_id, run.training.id)
    items = [_timeline_item("step", *row) for row in await run.session.execute(steps)]
    items += [_timeline_item(row[0].phase, *row) for row in await run.session.execute(evaluations)]
    # in the order of training: an evaluation after n steps follows step n
    return sorted(items, key=lambda item: (item.step, ("baseline", "step", "eval").index(item.phase)))


def _with_sums(table: type[Step] | type[Eval], parent: Any, training_id: int) -> AnySelect:
    """Steps or evaluations with the successes, rollouts and mean reward of their ended groups."""
    successes, rollouts, reward = group_sums()
    sums = (
        select(parent.label("parent"), successes.label("successes"), rollouts.label("rollouts"), reward.label("reward"))
        .where(Group.training_id == training_id, parent.is_not(None), Group.status == "completed")
        .group_by(parent)
        .subquery()
    )
    return (
        select(table, sums.c.successes, sums.c.rollouts, sums.c.reward)
        .outerjoin(sums, sums.c.parent == table.id)
        .where(table.training_id == training_id)
    )


def _timeline_item(phase: Any, row: Step | Eval, won: Any, done: Any, mean: Any) -> schemas.TimelineItem:
    ended = row.ended_at
    return schemas.TimelineItem(
        phase=phase,
        step=row.step,
        status=row.status,  # pyright: ignore[reportArgumentType] - the table allows nothing else
        policy_version=row.policy_version,
        progress=1.0 if row.status == "completed" else min(1.0, row.num_ended_groups / max(1, row.num_groups)),
        num_groups=row.num_groups,
        num_ended_groups=row.num_ended_groups,
        success=make_rate(won, done),
        reward_mean=finite(mean),
        started_at=row.started_at,
        rollouts_ended_at=row.rollouts_ended_at if isinstance(row, Step) else row.ended_at,
        ended_at=ended,
        duration_s=None if ended is None else (ended - row.started_at).total_seconds(),
    )


def compare_configs(configs: Sequence[Mapping[str, object]]) -> list[schemas.ConfigRow]:
    """One row per setting of any configuration, nested settings with dots; differing settings come first."""
    flat = [_flatten(config) for config in configs]
    rows: list[schemas.ConfigRow] = []
    for key in sorted({key for config in flat for key in config}):
        values = [config.get(key) for config in flat]
        is_different = len({json.dumps(value, sort_keys=True, default=str) for value in values}) > 1
        rows.append(schemas.ConfigRow(key=key, values=values, is_different=is_different))
    return sorted(rows, key=lambda row: (not row.is_different, row.key))


def _flatten(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """{"lora": {"rank": 8}} as {"lora.rank": 8}; lists stay whole."""
    flat: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flatten(cast("Mapping[str, object]", value), f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
