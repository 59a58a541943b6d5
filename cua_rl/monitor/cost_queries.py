"""Queries of the cost of rollouts, tasks, steps and checkpoints: sums of what each rollout used."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from sqlalchemy import Double, Text, cast, func, literal_column, null, select
from sqlalchemy.orm import join

from cua_rl.database.columns import AnyJson
from cua_rl.database.judge_models import JudgementRow
from cua_rl.database.models import Checkpoint, Eval, Group, RolloutRow, Step, Training
from cua_rl.monitor import set_schemas as schemas
from cua_rl.monitor.databases import AnySelect, RunAccess
from cua_rl.monitor.figures import finite, make_rate
from cua_rl.monitor.prices import Prices, judge_cost, make_cost
from cua_rl.monitor.rollout_sets import RolloutFilter, RunsOfDatabase, conditions, runs_of
from cua_rl.monitor.run_summaries import evaluation_success
from cua_rl.monitor.schemas import Phase
from cua_rl.monitor.set_queries import PHASE, STEP
from cua_rl.types.json_values import mapping, sequence

_MOST_TASKS, _MOST_STEPS = 200, 1000
_SOURCES = (
    join(RolloutRow, Group, RolloutRow.group_pk == Group.id)
    .outerjoin(Step, Group.step_id == Step.id)
    .outerjoin(Eval, Group.eval_id == Eval.id)
)
_Amounts = dict[str, float]
_SUMMED: Mapping[str, Any] = {
    "prompt_tokens": RolloutRow.num_prompt_tokens,
    "cached_tokens": RolloutRow.num_cached_tokens,
    "sampled_tokens": RolloutRow.num_sampled_tokens,
    "trained_tokens": RolloutRow.num_trained_tokens,
    "sampling_s": RolloutRow.sampling_s,
    "device_s": RolloutRow.device_s,
}


class Source(NamedTuple):
    """A step or evaluation of a run."""

    run_id: str
    phase: Phase
    step: int


async def cost_set(
    runs: Sequence[RunsOfDatabase], named: Sequence[tuple[str, Training]], wanted: RolloutFilter, prices: Prices
) -> schemas.SetCost:
    """The cost of a set, with that of each of its tasks, steps and evaluations."""
    by_task: defaultdict[str, _Amounts] = defaultdict(dict)
    sources: defaultdict[tuple[bool, int, Phase], _Amounts] = defaultdict(dict)
    total = _Amounts()
    for one in runs:
        shares = await _gpu_shares(one, dict(named))
        for source, amounts in (await _sum_sources(one, wanted, prices)).items():
            if source in shares:
                amounts["gpu_s"] = shares[source] * amounts["sampling_s"]
            _add(sources[source.phase != "step", source.step, source.phase], amounts)
            _add(total, amounts)
        for (task_id,), amounts in (await _sum_by(one, wanted, prices, RolloutRow, (RolloutRow.task_id,))).items():
            _add(by_task[task_id], amounts)
        of_tasks = await _sampling_seconds(one, wanted, RolloutRow.task_id) if shares else {}
        for (source, task_id), took_s in of_tasks.items():
            if source in shares:
                _add(by_task[task_id], {"gpu_s": shares[source] * took_s})
    tasks = [(task_id, make_cost(prices, amounts)) for task_id, amounts in by_task.items()]
    tasks.sort(key=lambda task: (-(task[1].total_usd or 0), -task[1].sampling_s, task[0]))
    return schemas.SetCost(
        cost=make_cost(prices, total),
        tasks=[schemas.TaskCost(task_id=task, cost=cost) for task, cost in tasks[:_MOST_TASKS]],
        num_tasks=len(tasks),
        steps=[
            schemas.StepCost(phase=phase, step=step, cost=make_cost(prices, sources[is_other, step, phase]))
            for is_other, step, phase in sorted(sources)[-_MOST_STEPS:]
        ],
        num_steps=len(sources),
    )


async def cost_run(run: RunAccess, prices: Prices) -> schemas.RunCost:
    """The cost of a run, and what it had used when it had made each of its checkpoints."""
    training_id, session = run.training.id, run.session
    used = defaultdict(_Amounts, await _sum_sources(runs_of(run), RolloutFilter(), prices))
    for source, seconds in (await _gpu_seconds(runs_of(run), {run.run_id: run.training})).items():
        _add(used[source], {"gpu_s": seconds})  # all of it, also of steps that train without rollouts
    made = select(Step.step, Step.trained_policy_version).where(
        Step.training_id == training_id, Step.trained_policy_version.is_not(None)
    )
    versions = {0: 0} | {row.step: row.trained_policy_version for row in await session.execute(made)}
    saved = set(await session.scalars(select(Checkpoint.step).where(Checkpoint.training_id == training_id)))
    successes = (await evaluation_success(session, [training_id])).get(training_id, [])
    evaluated = {step: make_rate(sums) for _, step, sums in successes}
    of_steps, of_evaluations, so_far = _Amounts(), _Amounts(), _Amounts()
    rows: list[schemas.VersionCost] = []
    for step in sorted({*versions, *(source.step for source in used)}):
        for total in (of_steps, so_far):
            _add(total, used[Source(run.run_id, "step", step)])
        if step in versions and (step in saved or step in evaluated or step == max(versions)):
            rows.append(
                schemas.VersionCost(
                    step=step,
                    policy_version=versions[step],
                    is_checkpoint=step in saved,
                    success=evaluated.get(step),
                    cost=make_cost(prices, so_far),
                )
            )
        for total in (of_evaluations, so_far):
            _add(total, used[Source(run.run_id, "baseline", step)])
            _add(total, used[Source(run.run_id, "eval", step)])
    return schemas.RunCost(
        training=make_cost(prices, of_steps), evaluations=make_cost(prices, of_evaluations), versions=rows
    )


async def _sum_sources(runs: RunsOfDatabase, wanted: RolloutFilter, prices: Prices) -> dict[Source, _Amounts]:
    """What the rollouts of each step and evaluation used."""
    found = await _sum_by(runs, wanted, prices, _SOURCES, (RolloutRow.training_id, PHASE, STEP))
    return {_source(runs, place): amounts for place, amounts in found.items()}


async def _sum_by(
    runs: RunsOfDatabase, wanted: RolloutFilter, prices: Prices, rows: Any, keys: Sequence[Any]
) -> dict[tuple[Any, ...], _Amounts]:
    sums = [cast(func.sum(column), Double[float]()) for column in _SUMMED.values()]
    num_open = func.count().filter(RolloutRow.sampling_s.is_(None))
    query: AnySelect = select(*keys, func.count(), num_open, *sums).select_from(rows)
    found: dict[tuple[Any, ...], _Amounts] = {}
    for row in await runs.session.execute(query.where(*conditions(runs, wanted)).group_by(*keys)):
        values = zip(("num_rollouts", "num_open", *_SUMMED), row[len(keys) :], strict=True)
        found[tuple(row[: len(keys)])] = {name: finite(value) or 0.0 for name, value in values}
    for place, judged in await _judged(runs, wanted, rows, keys, prices):
        _add(found.get(place, {}), judged)  # one that has come in meanwhile is left out
    return found


async def _judged(
    runs: RunsOfDatabase, wanted: RolloutFilter, rows: Any, keys: Sequence[Any], prices: Prices
) -> list[tuple[Any, _Amounts]]:
    """Tokens and money of the judge, by the same keys; what a run recorded as its cost counts, whatever the prices."""
    prompt, answer, unpriced = JudgementRow.num_prompt_tokens, JudgementRow.num_answer_tokens, JudgementRow.cost_usd
    without = [func.sum(column).filter(unpriced.is_(None)) for column in (prompt, answer)]
    query: AnySelect = (
        select(*keys, JudgementRow.model, func.sum(prompt), func.sum(answer), func.sum(JudgementRow.cost_usd))
        .add_columns(*without, func.count().filter(unpriced.is_(None)))
        .select_from(join(rows, JudgementRow, JudgementRow.rollout_pk == RolloutRow.id))
        .where(*conditions(runs, wanted))
        .group_by(*keys, JudgementRow.model)
    )
    found: list[tuple[Any, _Amounts]] = []
    for row in await runs.session.execute(query):
        model, num_prompt, num_answer, recorded, open_prompt, open_answer, num_open = row[len(keys) :]
        amounts: _Amounts = {"judge_prompt_tokens": num_prompt, "judge_answer_tokens": num_answer}
        charged = judge_cost(prices, model, open_prompt or 0, open_answer or 0) if num_open else 0.0
        amounts["num_unpriced_judgements"] = num_open if charged is None else 0
        if recorded is not None or (num_open and charged is not None):
            amounts["judge_usd"] = (recorded or 0.0) + (charged or 0.0)
        found.append((tuple(row[: len(keys)]), amounts))
    return found


async def _gpu_shares(runs: RunsOfDatabase, trainings: Mapping[str, Training]) -> dict[Source, float]:
    """GPU seconds of a step or evaluation for each second of its requests, where both are known."""
    gpu_s = await _gpu_seconds(runs, trainings)
    whole = await _sampling_seconds(runs, RolloutFilter()) if gpu_s else {}
    return {source: gpu_s[source] / took_s for (source,), took_s in whole.items() if took_s and source in gpu_s}


async def _sampling_seconds(runs: RunsOfDatabase, wanted: RolloutFilter, *more: Any) -> dict[tuple[Any, ...], float]:
    """Of the requests of each step and evaluation, for each value of these columns; the keys begin with the source."""
    keys = (RolloutRow.training_id, PHASE, STEP, *more)
    query: AnySelect = select(*keys, func.sum(RolloutRow.sampling_s)).select_from(_SOURCES).group_by(*keys)
    rows = await runs.session.execute(query.where(*conditions(runs, wanted)))
    return {(_source(runs, row), *row[3:-1]): finite(row[-1]) or 0.0 for row in rows}


def _source(runs: RunsOfDatabase, place: Sequence[Any]) -> Source:
    training_id, phase, step, *_ = place
    return Source(runs.database.run_id(training_id), phase, step)


async def _gpu_seconds(runs: RunsOfDatabase, trainings: Mapping[str, Training]) -> dict[Source, float]:
    """Of each step and evaluation that has ended, on all GPUs: its time that is not an earlier ended one's."""
    rows: list[Any] = []
    took = func.jsonb_extract_path(Step.metrics, literal_column("'time/step_s'"), type_=AnyJson())
    for table, phase, took_s in ((Step, literal_column("'step'", Text()), took), (Eval, Eval.phase, null())):
        query: AnySelect = select(table.training_id, phase, table.step, table.started_at, table.ended_at, took_s)
        mine = (table.training_id.in_(runs.training_ids), table.ended_at.is_not(None))
        rows += (await runs.session.execute(query.where(*mine))).all()
    found: dict[Source, float] = {}
    busy: defaultdict[int, list[tuple[datetime, datetime]]] = defaultdict(list)
    for training_id, phase, step, started_at, ended_at, took_s in sorted(rows, key=lambda row: row[4]):
        run_id = runs.database.run_id(training_id)
        num_gpus = _num_gpus(trainings[run_id].config)
        if num_gpus is None:
            continue
        alone_s, begin, spans = (ended_at - started_at).total_seconds(), started_at, busy[training_id]
        while spans and spans[-1][1] > started_at:
            earlier, later = spans.pop()
            alone_s -= (later - max(earlier, started_at)).total_seconds()
            begin = min(begin, earlier)
        spans.append((begin, ended_at))
        # a step that was kept when its run resumed has the time in between in its own
        alone_s = min(alone_s, alone_s if (own_s := finite(took_s)) is None else own_s)
        found[Source(run_id, phase, step)] = num_gpus * max(0.0, alone_s)
    return found


def _num_gpus(config: Mapping[str, object]) -> int | None:
    """Of model server and trainer; None if it is not recorded, as for a trainer on other machines."""
    plan = mapping(config.get("gpu_plan"))
    if not plan or mapping(config.get("trainer")).get("num_nodes") is not None:
        return None
    return len({str(gpu) for part in ("server", "trainer") for gpu in sequence(mapping(plan.get(part)).get("gpus"))})


def _add(total: _Amounts, more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount
