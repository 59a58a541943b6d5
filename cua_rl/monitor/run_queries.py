"""Queries about runs: lists, figures, series. Each takes a few statements, whatever the size of the run."""

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ARRAY, BigInteger, Double, and_, any_, cast, func, literal, literal_column, or_, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from cua_rl.database.columns import escape_text
from cua_rl.database.models import (
    Checkpoint,
    Eval,
    Group,
    RolloutImage,
    RolloutRow,
    Screenshot,
    StatusChange,
    Step,
    TaskRow,
    Training,
    TurnRow,
)
from cua_rl.database.monitor_models import NoteRow
from cua_rl.database.screenshots import SCREENSHOT_BYTES
from cua_rl.evaluation.statistics import TaskSums
from cua_rl.host.masking import mask_secrets
from cua_rl.metrics import meaning
from cua_rl.monitor import schemas
from cua_rl.monitor.databases import AnySelect, Database, RunAccess
from cua_rl.monitor.figures import columns, fault_bounds, finite, finite_values, make_rate
from cua_rl.monitor.pages import decode_run_place, encode_cursor
from cua_rl.monitor.run_summaries import evaluation_success, group_sums, parse_sums, step_success, summarise
from cua_rl.types.json_values import is_array, is_object

_MEASURED = 40  # rollouts from which the size of a run is estimated
_SAMPLED: Sequence[Any] = [literal_column(text) for text in ("'$.\"rollout/sampled_tokens\".double()'", "'{}'", "true")]
"""The path to a number in metrics, no variables, and null for what is no number."""
_PLACE = (Training.is_pinned, Training.started_at, Training.id)


async def list_runs(
    session: AsyncSession, database: Database, *, search: str, status: str | None, cursor: str | None, limit: int
) -> tuple[int, list[schemas.RunSummary]]:
    """How many runs of one database fit, and some, pinned ones first, then by age; `search` is a part of a name."""
    query = select(Training)
    if search:
        pattern = "%" + escape_text(search).replace("\\", r"\\").replace("%", r"\%").replace("_", r"\_") + "%"
        model = func.coalesce(
            func.jsonb_extract_path_text(Training.config, literal_column("'model_name'")), literal_column("''")
        )
        tagged = select(NoteRow.training_id).where(NoteRow.rollout_pk.is_(None), NoteRow.tag.ilike(pattern))
        names = (Training.run_name, Training.alias, Training.log_path, model)
        query = query.where(or_(Training.id.in_(tagged), *(name.ilike(pattern) for name in names)))
    if status is not None:
        query = query.where(Training.status == status)
    count = await session.scalar(select(func.count()).select_from(query.subquery()))
    if cursor is not None:
        query = query.where(tuple_(*_PLACE) < tuple_(*decode_run_place(cursor)))
    query = query.order_by(*(key.desc() for key in _PLACE)).limit(limit)
    return count or 0, await summarise(session, database, list(await session.scalars(query)))


def select_runs(
    runs: Sequence[schemas.RunSummary], *, search: str, status: str | None, cursor: str | None
) -> tuple[int, list[schemas.RunSummary]]:
    """What `list_runs` would find among these runs."""
    before = None if cursor is None else decode_run_place(cursor)
    fitting = [
        run
        for run in runs
        if any(
            search.lower() in text.lower()
            for text in (run.run_name, run.alias or "", run.log_path, run.model_name or "")
        )
        and status in (None, run.status)
    ]
    return len(fitting), [run for run in fitting if before is None or _place(run) < before]


def first_page(runs: Sequence[schemas.RunSummary], limit: int, num_runs: int) -> schemas.RunList:
    """The first `limit` of these runs, and the cursor of the next page."""
    ordered = sorted(runs, key=_place, reverse=True)
    more = encode_cursor(*_place(ordered[limit - 1])) if len(ordered) > limit else None
    return schemas.RunList(items=ordered[:limit], next_cursor=more, num_runs=num_runs)


def _place(run: schemas.RunSummary) -> tuple[bool, datetime, int]:
    return run.is_pinned, run.started_at, int(run.run_id.rpartition(".")[2])


def shown_config(training: Training) -> dict[str, Any]:
    """The configuration without secrets."""
    return mask_secrets(training.config)


async def load_configs(
    session: AsyncSession, database: Database, run_ids: Collection[str]
) -> dict[str, dict[str, Any]]:
    """The configurations of those of the runs that the database has, without secrets."""
    ids = [int(number) for key, _, number in (one.rpartition(".") for one in run_ids) if key == database.key]
    found = await session.scalars(select(Training).where(Training.id.in_(ids)))
    return {database.run_id(training.id): shown_config(training) for training in found}


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
    num_rollouts, rows_bytes, screenshots_bytes = await _sizes(session, training.id)
    return schemas.Run(
        **summary.model_dump(),
        config=shown_config(training),
        settings=compare_configs([shown_config(training)]),
        first_step=training.first_step,
        num_rollouts=num_rollouts,
        num_running_rollouts=(num_running or 0) if summary.is_alive else 0,
        rows_bytes=rows_bytes,
        screenshots_bytes=screenshots_bytes,
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


async def _sizes(session: AsyncSession, training_id: int) -> tuple[int, int, int]:
    """A run's rollouts, and bytes of them and of their screenshots; of many, estimated from about forty."""
    mine = RolloutRow.training_id == training_id
    total = await session.scalar(select(func.count()).select_from(RolloutRow).where(mine)) or 0
    sampled = select(RolloutRow.id).where(mine, func.hashint8(RolloutRow.id) % max(1, total // _MEASURED) == 0)
    keys = (await session.scalars(sampled)).all()
    chosen = any_(literal(keys, ARRAY(BigInteger)))  # one parameter
    rows_bytes: int = 0
    for table, key in ((RolloutRow, RolloutRow.id), (TurnRow, TurnRow.rollout_pk)):
        size = cast(func.sum(func.pg_column_size(literal_column(table.__tablename__))), BigInteger())
        rows_bytes += await session.scalar(select(size).where(key == chosen)) or 0
    # an image that many rollouts show counts in parts; from five hundred on the part does not matter
    shown = select(RolloutImage.sha256, func.count().label("num")).where(RolloutImage.rollout_pk == chosen)
    shown = shown.group_by(RolloutImage.sha256).subquery()
    users = select(literal(1)).where(RolloutImage.sha256 == shown.c.sha256).limit(500).correlate(shown).subquery()
    num_users = select(func.count()).select_from(users).correlate(shown).scalar_subquery()
    part = cast(shown.c.num, Double) / func.greatest(num_users, shown.c.num)
    images = select(cast(func.sum(part * SCREENSHOT_BYTES), Double[float]())).join_from(
        shown, Screenshot, Screenshot.sha256 == shown.c.sha256
    )
    screenshots_bytes = float(await session.scalar(images) or 0.0)
    scale = total / max(1, len(keys))
    return total, round(scale * rows_bytes), round(scale * screenshots_bytes)


async def list_evaluations(session: AsyncSession, training_id: int) -> list[schemas.Evaluation]:
    """All evaluations of a run, the baseline first, with figures of what has ended."""
    query = _with_sums(Eval, Group.eval_id, training_id).order_by(Eval.step, Eval.phase)
    categories = await _rates_by(session, training_id, TaskRow.category)
    difficulties = await _rates_by(session, training_id, TaskRow.difficulty)
    return [
        schemas.Evaluation(
            **columns(row, metrics=finite_values(row.metrics)),
            success=make_rate(parse_sums(sums)),
            fault_bounds=fault_bounds(row.metrics),
            by_category=categories.get(row.id, {}),
            by_difficulty=difficulties.get(row.id, {}),
            reward_mean=finite(mean),
        )
        for row, sums, mean in await session.execute(query)
    ]


async def _rates_by(session: AsyncSession, training_id: int, name: Any) -> dict[int, dict[str, schemas.Rate]]:
    """Success in each evaluation, by key, of the tasks with one category, or with one difficulty."""
    query = (
        select(Eval.id, name, group_sums()[0])
        .select_from(Group)
        .join(TaskRow, Group.task_pk == TaskRow.id)
        .join(Eval, Group.eval_id == Eval.id)
        .where(Group.training_id == training_id, Group.status == "completed", name != "")
        .group_by(Eval.id, name)
        .order_by(name)
    )
    found: dict[int, dict[str, schemas.Rate]] = defaultdict(dict)
    for eval_id, value, sums in await session.execute(query):
        found[eval_id][value] = make_rate(parse_sums(sums))
    return found


async def load_series(run: RunAccess, *, names: Sequence[str], from_step: int, max_points: int) -> schemas.MetricSeries:
    """Metrics of all steps from `from_step` on, thinned evenly to about `max_points` steps."""
    session, training_id = run.session, run.training.id
    place = func.row_number().over(order_by=Step.step.desc()) - 1
    tokens = func.sum(cast(func.jsonb_path_query_first(Step.metrics, *_SAMPLED), Double)).over(order_by=Step.step)
    measured = select(Step.id, Step.step, place.label("place"), tokens.label("tokens"))
    measured = measured.where(Step.training_id == training_id, Step.metrics.is_not(None)).subquery()
    is_wanted = measured.c.step >= from_step
    total = await session.scalar(select(func.count()).select_from(measured).where(is_wanted)) or 0
    is_drawn = and_(is_wanted, measured.c.place % max(1, -(-total // max_points)) == 0)
    query = select(Step.step, Step.ended_at, Step.metrics, measured.c.tokens)
    query = query.join(measured, measured.c.id == Step.id).where(is_drawn).order_by(Step.step)
    rows = [(step, ended_at, metrics or {}, until) for step, ended_at, metrics, until in await session.execute(query)]
    wanted = list(names) or sorted({name for _, _, metrics, _ in rows for name in metrics})
    success = (await step_success(session, [training_id])).get(training_id, [])
    evaluations = (await evaluation_success(session, [training_id])).get(training_id, [])
    return schemas.MetricSeries(
        run_id=run.run_id,
        steps=[step for step, *_ in rows],
        num_steps=total,
        ended_at=[ended_at for _, ended_at, *_ in rows],
        tokens=[finite(until) for *_, until in rows],
        series={name: [finite(metrics.get(name)) for _, _, metrics, _ in rows] for name in wanted},
        success=[_success_point("step", step, sums) for step, sums, _ in success if step >= from_step],
        evaluations=[_success_point(phase, step, sums) for phase, step, sums in evaluations],
    )


def _success_point(phase: Any, step: int, sums: TaskSums) -> schemas.SuccessPoint:
    return schemas.SuccessPoint(phase=phase, step=step, **make_rate(sums).model_dump())


async def load_timeline(run: RunAccess) -> list[schemas.TimelineItem]:
    """Baseline, steps and evaluations in the order of training, whenever each of them began."""
    steps = _with_sums(Step, Group.step_id, run.training.id)
    evaluations = _with_sums(Eval, Group.eval_id, run.training.id)
    light = (defer(Step.metrics), defer(Step.task_pks)), (defer(Eval.metrics), defer(Eval.task_pks))
    items = [_timeline_item("step", *row) for row in await run.session.execute(steps.options(*light[0]))]
    items += [_timeline_item(row[0].phase, *row) for row in await run.session.execute(evaluations.options(*light[1]))]
    # in the order of training: an evaluation after n steps follows step n
    return sorted(items, key=lambda item: (item.step, ("baseline", "step", "eval").index(item.phase)))


def _with_sums(table: type[Step] | type[Eval], parent: Any, training_id: int) -> AnySelect:
    """Steps or evaluations with the success and mean reward of their ended groups."""
    success, reward = group_sums()
    sums = (
        select(parent.label("parent"), success.label("success"), reward.label("reward"))
        .where(Group.training_id == training_id, parent.is_not(None), Group.status == "completed")
        .group_by(parent)
        .subquery()
    )
    return (
        select(table, sums.c.success, sums.c.reward)
        .outerjoin(sums, sums.c.parent == table.id)
        .where(table.training_id == training_id)
    )


def _timeline_item(phase: Any, row: Step | Eval, sums: Any, mean: Any) -> schemas.TimelineItem:
    ended = row.ended_at
    ends: dict[str, Any] = {"rollouts_ended_at": ended}  # a step has its own
    return schemas.TimelineItem(
        **ends | columns(row, phase=phase),
        progress=1.0 if row.status == "completed" else min(1.0, row.num_ended_groups / max(1, row.num_groups)),
        success=make_rate(parse_sums(sums)),
        reward_mean=finite(mean),
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


def _flatten(value: object, name: str = "") -> dict[str, object]:
    """{"lora": {"rank": 8}, "tasks": [{"id": 1}]} as {"lora.rank": 8, "tasks[0].id": 1}; plain lists stay whole."""
    parts: dict[str, object] = {}
    if is_object(value):
        parts = {f"{name}.{key}" if name else key: one for key, one in value.items()}
    elif is_array(value) and any(isinstance(one, Mapping | list) for one in value):
        parts = {f"{name}[{index}]": one for index, one in enumerate(value)}
    if not parts:
        return {name: value} if name else {}
    return {key: one for part, inside in parts.items() for key, one in _flatten(inside, part).items()}
