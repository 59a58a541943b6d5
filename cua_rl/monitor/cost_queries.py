"""Queries of the cost of rollouts, tasks, steps and checkpoints: sums of what each rollout used."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Double, Text, cast, func, literal_column, null, select

from cua_rl.database.columns import AnyJson
from cua_rl.database.judge_models import JudgementRow
from cua_rl.database.models import Checkpoint, Eval, RolloutRow, Step, Training
from cua_rl.monitor import set_schemas as schemas
from cua_rl.monitor.databases import AnySelect, RunAccess
from cua_rl.monitor.figures import finite, make_rate
from cua_rl.monitor.prices import Prices, judge_cost, make_cost
from cua_rl.monitor.rollout_sets import RolloutFilter, RunsOfDatabase, conditions, runs_of
from cua_rl.monitor.run_summaries import evaluation_success
from cua_rl.monitor.schemas import Phase
from cua_rl.monitor.set_queries import PHASE, SOURCES, STEP
from cua_rl.types.json_values import mapping, sequence

Key = TypeVar("Key")
_MOST_TASKS, _MOST_STEPS = 200, 1000
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What the rollouts of one task used in one step or evaluation."""

    source: Source
    task_id: str
    amounts: _Amounts


async def cost_set(
    runs: Sequence[RunsOfDatabase], named: Sequence[tuple[str, Training]], wanted: RolloutFilter, prices: Prices
) -> schemas.SetCost:
    """The cost of a set, with that of each of its tasks, steps and evaluations."""
    parts = await _list_parts(runs, wanted, prices, RolloutRow.task_id)
    for one in runs:
        gpu_s = await _gpu_seconds(one, dict(named))
        whole = await _sampling_seconds(one) if gpu_s else {}
        for part in parts:
            if part.source in gpu_s and (whole_s := whole.get(part.source)):
                part.amounts["gpu_s"] = gpu_s[part.source] * part.amounts["sampling_s"] / whole_s
    tasks = [(task, make_cost(prices, used)) for task, used in _sum_by(parts, lambda part: part.task_id).items()]
    tasks.sort(key=lambda task: (-(task[1].total_usd or 0), -task[1].sampling_s, task[0]))
    sources = _sum_by(parts, lambda part: (part.source.phase != "step", part.source.step, part.source.phase))
    total = _Amounts()
    for used in sources.values():
        _add(total, used)
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
    every = await _list_parts([runs_of(run)], RolloutFilter(), prices, literal_column("''::text"))
    used = _sum_by(every, lambda part: part.source)
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


async def _list_parts(runs: Sequence[RunsOfDatabase], wanted: RolloutFilter, prices: Prices, task: Any) -> list[Part]:
    found: list[Part] = []
    for one in runs:
        keys = (RolloutRow.training_id, PHASE.label("phase"), STEP.label("step"), task)
        sums = [cast(func.sum(column), Double[float]()).label(name) for name, column in _SUMMED.items()]
        num_open = func.count().filter(RolloutRow.sampling_s.is_(None)).label("num_open")
        query: AnySelect = select(*keys, func.count().label("num_rollouts"), num_open, *sums).select_from(SOURCES)
        by_place: dict[tuple[int, Phase, int, str], _Amounts] = {}
        for row in await one.session.execute(query.where(*conditions(one, wanted)).group_by(*keys)):
            values = dict(zip(("num_rollouts", "num_open", *_SUMMED), row[len(keys) :], strict=True))
            by_place[tuple(row[: len(keys)])] = {name: finite(value) or 0.0 for name, value in values.items()}
        for place, judged in await _judged(one, wanted, keys, prices):
            _add(by_place.get(place, {}), judged)  # one that has come in meanwhile is left out
        found += [
            Part(source=Source(one.database.run_id(training), phase, step), task_id=task, amounts=amounts)
            for (training, phase, step, task), amounts in by_place.items()
        ]
    return found


async def _judged(
    runs: RunsOfDatabase, wanted: RolloutFilter, keys: Sequence[Any], prices: Prices
) -> list[tuple[Any, _Amounts]]:
    """Tokens and money of the judge, by the same keys; what a run recorded as its cost counts, whatever the prices."""
    prompt, answer, unpriced = JudgementRow.num_prompt_tokens, JudgementRow.num_answer_tokens, JudgementRow.cost_usd
    without = [func.sum(column).filter(unpriced.is_(None)) for column in (prompt, answer)]
    query: AnySelect = (
        select(*keys, JudgementRow.model, func.sum(prompt), func.sum(answer), func.sum(JudgementRow.cost_usd))
        .add_columns(*without, func.count().filter(unpriced.is_(None)))
        .select_from(SOURCES.join(JudgementRow, JudgementRow.rollout_pk == RolloutRow.id))
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


async def _sampling_seconds(runs: RunsOfDatabase) -> dict[Source, float]:
    """Of all requests of each step and evaluation."""
    keys = (RolloutRow.training_id, PHASE, STEP)
    query: AnySelect = select(*keys, func.sum(RolloutRow.sampling_s)).select_from(SOURCES).group_by(*keys)
    rows = await runs.session.execute(query.where(RolloutRow.training_id.in_(runs.training_ids)))
    found = {Source(runs.database.run_id(training), phase, step): finite(took) for training, phase, step, took in rows}
    return {source: took_s for source, took_s in found.items() if took_s is not None}


async def _gpu_seconds(runs: RunsOfDatabase, trainings: Mapping[str, Training]) -> dict[Source, float]:
    """Of each step and evaluation that has ended, on all GPUs: its time that is not an earlier ended one's."""
    rows: list[Any] = []
    took = func.jsonb_extract_path(Step.metrics, literal_column("'time/step_s'"), type_=AnyJson())
    for table, phase, took_s in ((Step, literal_column("'step'", Text()), took), (Eval, Eval.phase, null())):
        query: AnySelect = select(table.training_id, phase, table.step, table.started_at, table.ended_at, took_s)
        mine = (table.training_id.in_(runs.training_ids), table.ended_at.is_not(None))
        rows += (await runs.session.execute(query.where(*mine))).all()
    found: dict[Source, float] = {}
    until: dict[int, datetime] = {}
    for training_id, phase, step, started_at, ended_at, took_s in sorted(rows, key=lambda row: row[4]):
        run_id = runs.database.run_id(training_id)
        num_gpus = _num_gpus(trainings[run_id].config)
        if num_gpus is None:
            continue
        alone_s = (ended_at - max(started_at, until.get(training_id, started_at))).total_seconds()
        # a step that was kept when its run resumed has the time in between in its own
        alone_s = min(alone_s, alone_s if (own_s := finite(took_s)) is None else own_s)
        found[Source(run_id, phase, step)] = num_gpus * max(0.0, alone_s)
        until[training_id] = ended_at
    return found


def _num_gpus(config: Mapping[str, object]) -> int | None:
    """Of model server and trainer; None if it is not recorded, as for a trainer on other machines."""
    plan = mapping(config.get("gpu_plan"))
    if not plan or mapping(config.get("trainer")).get("num_nodes") is not None:
        return None
    return len({str(gpu) for part in ("server", "trainer") for gpu in sequence(mapping(plan.get(part)).get("gpus"))})


def _sum_by(parts: Iterable[Part], key: Callable[[Part], Key]) -> defaultdict[Key, _Amounts]:
    found: defaultdict[Key, _Amounts] = defaultdict(dict)
    for part in parts:
        _add(found[key(part)], part.amounts)
    return found


def _add(total: _Amounts, more: Mapping[str, float]) -> None:
    for name, amount in more.items():
        total[name] = total.get(name, 0) + amount
