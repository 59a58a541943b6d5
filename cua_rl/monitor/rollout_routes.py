"""Read API: rollouts, turns, tokens, tasks, screenshots; and verdicts, which people may write."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Query, Request, Response

from cua_rl.database.monitor_models import RolloutOverride
from cua_rl.database.screenshots import load_images
from cua_rl.monitor import (
    analysis_queries,
    analysis_schemas,
    cost_queries,
    rollout_queries,
    set_comparison,
    set_queries,
    set_schemas,
    set_turns,
    task_queries,
    token_texts,
)
from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.answers import REFUSALS, SafeJson
from cua_rl.monitor.databases import NotFoundError
from cua_rl.monitor.export import export_rollouts, image_hashes, shown_bytes
from cua_rl.monitor.film import FilmKind, make_film
from cua_rl.monitor.rollout_queries import Paging, Sort
from cua_rl.monitor.rollout_sets import RolloutFilter, open_runs, runs_of
from cua_rl.monitor.run_routes import AllDatabases, Id, Number, OpenRun
from cua_rl.monitor.schemas import OverrideRequest, Page
from cua_rl.monitor.security import CanRead, CanWrite, WriteRoute
from cua_rl.monitor.set_places import load_place

router = APIRouter(prefix="/api", tags=["rollouts"], dependencies=[CanRead], responses=REFUSALS, route_class=WriteRoute)
_FOREVER = "private, max-age=31536000, immutable"
_NOT_KEPT = {"Cache-Control": "no-store"}  # another run may record the same image again


RunIds = Annotated[list[str], Query(min_length=1, max_length=12, description="repeat it for each run")]
Wanted = Annotated[RolloutFilter, Depends()]
SetQuery = Annotated[str, Query(max_length=4000, description="the query of a set's address: run_id=1&phase=eval")]


@router.get("/rollouts")
async def list_set(
    databases: AllDatabases, run_id: RunIds, wanted: Wanted, paging: Annotated[Paging, Depends()]
) -> Page[schemas.RolloutItem]:
    """Rollouts of some runs, newest first."""
    async with open_runs(databases, run_id) as (runs, _):
        return await rollout_queries.list_rollouts(runs, wanted, paging)


@router.get("/rollouts/summary")
async def get_set(databases: AllDatabases, run_id: RunIds, wanted: Wanted) -> set_schemas.SetSummary:
    """What the rollouts have in common: verdicts, causes, tasks, checks and steps, counted."""
    async with open_runs(databases, run_id) as (runs, named):
        return await set_queries.summarise_set(runs, named, wanted)


@router.get("/rollouts/cost")
async def get_cost(request: Request, databases: AllDatabases, run_id: RunIds, wanted: Wanted) -> set_schemas.SetCost:
    """What the rollouts used, by task and by step, and its money where there are prices."""
    async with open_runs(databases, run_id) as (runs, named):
        return await cost_queries.cost_set(runs, named, wanted, request.app.state.prices)


@router.get("/rollouts/tokens")
async def list_tokens(
    databases: AllDatabases, run_id: RunIds, wanted: Wanted, by: set_turns.TokenOrder = "gap"
) -> list[set_schemas.OutlyingToken]:
    """The hundred trained tokens with the largest gap, ratio or surprise."""
    async with open_runs(databases, run_id) as (runs, named):
        return await set_turns.list_outliers(runs, named, wanted, by)


@router.get("/rollouts/first_actions")
async def get_first_actions(databases: AllDatabases, run_id: RunIds, wanted: Wanted) -> set_schemas.FirstActions:
    """Where rollouts acted on the first screen that most of them share."""
    async with open_runs(databases, run_id) as (runs, _):
        return await set_turns.load_first_actions(runs, wanted)


@router.get("/rollouts/compare")
async def compare_sets(databases: AllDatabases, first: SetQuery, second: SetQuery) -> set_schemas.SetComparison:
    """The difference of the second set's success to the first one's, with its interval and test."""
    return await set_comparison.compare_sets(databases, first, second)


@router.get("/runs/{run_id}/rollouts")
async def list_rollouts(
    run: OpenRun, wanted: Wanted, paging: Annotated[Paging, Depends()]
) -> Page[schemas.RolloutItem]:
    """Rollouts of a run, newest first."""
    return await rollout_queries.list_rollouts([runs_of(run)], wanted, paging)


@router.get("/runs/{run_id}/rollouts/{rollout_id}", response_model=schemas.Rollout)
async def get_rollout(run: OpenRun, rollout_id: Id) -> SafeJson:
    """A rollout with all its turns."""
    return SafeJson((await rollout_queries.load_rollout(run, rollout_id)).model_dump(mode="json"))


@router.get("/runs/{run_id}/rollouts/{rollout_id}/download")
async def download_rollout(run: OpenRun, rollout_id: Id) -> SafeJson:
    """A rollout with turns and tokens as a file."""
    rollout = await rollout_queries.load_rollout(run, rollout_id)
    tokens = await token_texts.load_rollout_tokens(run, rollout_id)
    content = {"rollout": rollout.model_dump(mode="json"), "tokens": [item.model_dump(mode="json") for item in tokens]}
    return SafeJson(content, headers=_as_file(rollout_id, "json"))


@router.get(
    "/runs/{run_id}/rollouts/{rollout_id}/page",
    response_class=Response,
    responses={200: {"content": {"text/html": {}}}},
)
async def download_page(run: OpenRun, rollout_id: Id) -> Response:
    """A rollout as a file of HTML that opens without a network."""
    page, _ = await export_rollouts(run, [rollout_id])
    return Response(page, media_type="text/html", headers=_as_file(rollout_id, "html"))


@router.get(
    "/runs/{run_id}/rollouts/{rollout_id}/film",
    response_class=Response,
    responses={200: {"content": {"image/gif": {}, "image/webp": {}}}},
)
async def download_film(run: OpenRun, rollout_id: Id, kind: FilmKind = "gif") -> Response:
    """A rollout as an animated picture, its actions drawn on the screenshots."""
    rollout = await rollout_queries.load_rollout(run, rollout_id)
    images = await load_images(run.session, image_hashes([rollout]))
    film = await asyncio.to_thread(make_film, rollout, images, kind)
    return Response(film, media_type=f"image/{kind}", headers=_as_file(rollout_id, kind))


def _as_file(rollout_id: str, kind: str) -> dict[str, str]:
    name = "".join(letter for letter in rollout_id if letter.isascii() and letter.isalnum())[:64] or "rollout"
    return {"Content-Disposition": f'attachment; filename="rollout-{name}.{kind}"'}


@router.get("/runs/{run_id}/rollouts/{rollout_id}/place")
async def get_place(
    run: OpenRun, rollout_id: Id, databases: AllDatabases, of: SetQuery, sort: Sort = "-started"
) -> set_schemas.SetPlace:
    """What comes before and after a rollout in a set, in the order of its table."""
    run_ids, wanted = set_comparison.parse_set(of)
    async with open_runs(databases, run_ids) as (runs, _):
        return await load_place(run, rollout_id, runs, wanted, sort)


@router.get("/runs/{run_id}/rollouts/{rollout_id}/turns/{turn_index}/tokens", response_model=schemas.TurnTokens)
async def get_tokens(run: OpenRun, rollout_id: Id, turn_index: Number) -> SafeJson:
    """A turn's tokens with log-probabilities, and its prompt."""
    return SafeJson((await token_texts.load_turn_tokens(run, rollout_id, turn_index)).model_dump(mode="json"))


@router.get("/runs/{run_id}/rollouts/{rollout_id}/asked", response_model=list[analysis_schemas.AskedTurn])
async def list_asked(run: OpenRun, rollout_id: Id) -> SafeJson:
    """The turns that checkpoints were asked about, with their answers."""
    return SafeJson([one.model_dump(mode="json") for one in await analysis_queries.list_asked(run, rollout_id)])


@router.get("/runs/{run_id}/rollouts/{rollout_id}/overrides")
async def list_overrides(run: OpenRun, rollout_id: Id) -> list[schemas.Override]:
    """All verdicts of people on a rollout, oldest first."""
    return await rollout_queries.list_overrides(run, (await rollout_queries.find_rollout(run, rollout_id)).id)


@router.post("/runs/{run_id}/rollouts/{rollout_id}/overrides", status_code=201, dependencies=[CanWrite])
async def add_override(run: OpenRun, rollout_id: Id, request: OverrideRequest) -> list[schemas.Override]:
    """Add a verdict; returns all of them. Training data do not change."""
    row = await rollout_queries.find_rollout(run, rollout_id)
    run.session.add(RolloutOverride(rollout_pk=row.id, **request.model_dump()))
    await run.session.commit()
    return await rollout_queries.list_overrides(run, row.id)


@router.get("/runs/{run_id}/verdicts")
async def list_verdicts(run: OpenRun) -> list[schemas.Verdict]:
    """All verdicts of people on rollouts of the run, newest first."""
    return await rollout_queries.list_verdicts(run)


@router.get("/runs/{run_id}/tasks")
async def list_tasks(run: OpenRun) -> list[schemas.TaskStats]:
    """Trained tasks, hardest first, then tasks that are only evaluated."""
    return await task_queries.list_tasks(run)


@router.get("/runs/{run_id}/tasks/{task_id:path}")
async def get_task(
    run: OpenRun, task_id: Id, limit: Annotated[int, Query(ge=1, le=10_000, description="rows of each list")] = 100
) -> schemas.TaskDetail:
    """One task over time, and its failures."""
    return await task_queries.load_task(run, task_id, limit)


@router.get(
    "/screenshots/{sha256}",
    response_class=Response,
    responses={
        200: {"content": {"image/png": {}, "image/jpeg": {}, "image/svg+xml": {}}},
        304: {"description": "unchanged"},
    },
)
async def get_screenshot(
    request: Request, databases: AllDatabases, sha256: Annotated[str, Path(pattern="^[0-9a-f]{64}$")]
) -> Response:
    """An image by the hash of its bytes; it never changes. Of a pruned one, a drawing of its size says so."""
    headers = {"ETag": f'"{sha256}"', "Cache-Control": _FOREVER}
    if f'"{sha256}"' in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    for database in databases.all:
        async with database.sessions() as session:
            image = (await load_images(session, [sha256])).get(sha256)
        if image is not None:
            data, kind = shown_bytes(image)
            return Response(data, media_type=f"image/{kind}", headers=headers if image.data else _NOT_KEPT)
    raise NotFoundError(f"expected the sha256 of a stored screenshot, got {sha256!r}; rollouts name theirs")
