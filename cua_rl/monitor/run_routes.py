"""Read API: runs, their series, steps and evaluations."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request

from cua_rl.host.masking import mask_secrets
from cua_rl.monitor import (
    analysis_queries,
    analysis_schemas,
    cost_queries,
    group_queries,
    run_queries,
    run_summaries,
    schemas,
    set_schemas,
)
from cua_rl.monitor import rollout_schemas as rollouts
from cua_rl.monitor.answers import REFUSALS, SafeJson
from cua_rl.monitor.databases import Databases, NotFoundError, RunAccess
from cua_rl.monitor.folder_summaries import read_settings, summarise_folders
from cua_rl.monitor.security import CanRead
from cua_rl.monitor.step_change import load_step_change

LARGEST_INTEGER = 2**31 - 1
router = APIRouter(prefix="/api/runs", tags=["runs"], dependencies=[CanRead], responses=REFUSALS)

Search = Annotated[str, Query(max_length=200, description="part of a name")]
Cursor = Annotated[str | None, Query(max_length=300, description="next_cursor of the page before")]
Limit = Annotated[int, Query(ge=1, le=200)]
Number = Annotated[int, Path(ge=0, le=LARGEST_INTEGER)]
Id = Annotated[str, Path(max_length=300)]


def databases_of(request: Request) -> Databases:
    return request.app.state.databases


AllDatabases = Annotated[Databases, Depends(databases_of)]


async def open_run(run_id: Id, databases: AllDatabases) -> AsyncGenerator[RunAccess]:
    """The run of the path, with a session that lasts as long as the request."""
    async with databases.open_run(run_id) as run:
        yield run


OpenRun = Annotated[RunAccess, Depends(open_run)]


@router.get("")
async def list_runs(
    databases: AllDatabases,
    search: Search = "",
    status: schemas.RunStatus | None = None,
    cursor: Cursor = None,
    limit: Limit = 50,
) -> schemas.RunList:
    """Runs of all databases, newest first."""
    found: list[schemas.RunSummary] = []
    num_runs = 0
    for database in databases.all:
        async with database.sessions() as session:
            num, runs = await run_queries.list_runs(
                session, database, search=search, status=status, cursor=cursor, limit=limit + 1
            )
        num_runs, found = num_runs + num, found + runs
    closed = await asyncio.to_thread(summarise_folders, databases.closed)
    num, runs = run_queries.select_runs(closed, search=search, status=status, cursor=cursor)
    return run_queries.first_page(found + runs, limit, num_runs + num)


@router.get("/compare")
async def compare_runs(
    databases: AllDatabases,
    run_id: Annotated[list[str], Query(min_length=1, max_length=12, description="repeat it for each run")],
) -> schemas.RunComparison:
    """Summaries and settings of several runs side by side."""
    summaries: list[schemas.RunSummary] = []
    configs: list[dict[str, object]] = []
    unknown: list[str] = []
    for name in run_id:
        try:
            async with databases.open_run(name) as run:
                summaries += await run_summaries.summarise(run.session, run.database, [run.training])
                configs.append(run_queries.shown_config(run.training))
        except NotFoundError:
            if len(set(run_id)) == 1:
                raise
            unknown.append(name)
    return schemas.RunComparison(runs=summaries, config=run_queries.compare_configs(configs), unknown=unknown)


@router.get("/settings")
async def compare_settings(
    databases: AllDatabases,
    search: Search = "",
    status: schemas.RunStatus | None = None,
    limit: Annotated[int, Query(ge=2, le=200)] = 100,
) -> schemas.RunComparison:
    """The first runs of the list and the settings in which they differ; without opening a run's own database."""
    runs = (await list_runs(databases, search, status, None, limit)).items
    wanted = {run.run_id for run in runs}
    closed = [folder for folder in databases.closed if f"{folder.key}.0" in wanted]
    configs = await asyncio.to_thread(lambda: {f"{one.key}.0": mask_secrets(read_settings(one.path)) for one in closed})
    for database in databases.all:
        async with database.sessions() as session:
            configs |= await run_queries.load_configs(session, database, wanted)
    rows = await asyncio.to_thread(run_queries.compare_configs, [configs[run.run_id] for run in runs])
    return schemas.RunComparison(runs=runs, config=[row for row in rows if row.is_different], unknown=[])


@router.get("/{run_id}")
async def get_run(run: OpenRun) -> schemas.Run:
    """A run with its configuration, metrics, evaluations and checkpoints."""
    return await run_queries.load_run(run)


@router.get("/{run_id}/metrics", response_model=schemas.MetricSeries)
async def get_metrics(
    run: OpenRun,
    name: Annotated[list[str] | None, Query(max_length=200, description="repeat it; all metrics if left out")] = None,
    from_step: Annotated[int, Query(ge=0, le=LARGEST_INTEGER)] = 0,
    max_points: Annotated[int, Query(ge=2, le=10_000, description="long series are thinned evenly")] = 1000,
) -> SafeJson:
    """Series of metrics over training steps, with success intervals."""
    series = await run_queries.load_series(run, names=name or [], from_step=from_step, max_points=max_points)
    return SafeJson(series.model_dump(mode="json"))


@router.get("/{run_id}/timeline", response_model=list[schemas.TimelineItem])
async def get_timeline(run: OpenRun) -> SafeJson:
    """Baseline, steps and evaluations in the order of training."""
    return SafeJson([item.model_dump(mode="json") for item in await run_queries.load_timeline(run)])


@router.get("/{run_id}/evaluations")
async def list_evaluations(run: OpenRun) -> list[schemas.Evaluation]:
    """The baseline and all evaluations, in order."""
    return await run_queries.list_evaluations(run.session, run.training.id)


@router.get("/{run_id}/analyses")
async def list_analyses(run: OpenRun) -> list[analysis_schemas.AnalysisPlace]:
    """What recipes found out about the run, newest first: steps made again, turns asked about, its suite."""
    return await analysis_queries.list_analyses(run)


@router.get("/{run_id}/suite")
async def get_suite(run: OpenRun) -> analysis_schemas.Suite | None:
    """The regression suite in which the run is a model, null if it is in none."""
    return await analysis_queries.load_suite(run)


@router.get("/{run_id}/cost")
async def get_run_cost(request: Request, run: OpenRun) -> set_schemas.RunCost:
    """What the run used, in all and until each of its checkpoints."""
    return await cost_queries.cost_run(run, request.app.state.prices)


@router.get("/{run_id}/{phase}/{step}", response_model=rollouts.SourceDetail)
async def get_step(run: OpenRun, phase: Literal["baseline", "step", "eval"], step: Number) -> SafeJson:
    """A step or an evaluation with its groups x rollouts grid."""
    return SafeJson((await group_queries.load_source(run, phase, step)).model_dump(mode="json"))


@router.get("/{run_id}/step/{step}/change")
async def get_step_change(
    run: OpenRun, step: Number, num_before: Annotated[int, Query(ge=1, le=1000)] = 10
) -> set_schemas.StepChange:
    """Why the step's success differs from that of the steps before it."""
    return await load_step_change(run, step, num_before)


@router.get("/{run_id}/step/{step}/replay", response_model=analysis_schemas.StepReplay | None)
async def get_replay(run: OpenRun, step: Number) -> SafeJson:
    """The step made again, and what other settings would have done; null if it was not."""
    found = await analysis_queries.load_replay(run, step)
    return SafeJson(found and found.model_dump(mode="json"))


@router.get("/{run_id}/{phase}/{step}/groups/{group_id}")
async def get_group(
    run: OpenRun, phase: Literal["baseline", "step", "eval"], step: Number, group_id: Id
) -> rollouts.GroupDetail:
    """A group's rollouts with their turns on a common time axis."""
    return await group_queries.load_group(run, phase, step, group_id)
