"""Where other programs send their runs."""

import asyncio
from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from sqlalchemy import Engine

from cua_rl.monitor.ingest import UnknownToken, ingest
from cua_rl.monitor.ingest_schemas import IngestAnswer, IngestBatch
from cua_rl.monitor.run_routes import REFUSALS
from cua_rl.monitor.schemas import Problem
from cua_rl.monitor.security import Bearer

router = APIRouter(prefix="/api/ingest", tags=["ingest"])
_REFUSALS: dict[int | str, dict[str, Any]] = REFUSALS | {422: {"model": IngestAnswer | Problem}}


def ingest_engine(request: Request) -> Engine:
    return request.app.state.databases.writer_engine


@router.post("/batch", responses=_REFUSALS)
async def ingest_batch(
    batch: IngestBatch, bearer: Bearer, engine: Annotated[Engine, Depends(ingest_engine)], response: Response
) -> IngestAnswer:
    """Store what a project sends: runs, tasks, steps, rollouts, turns and what belongs to them.

    An item that was sent before, by its `client_id`, is updated. Items that cannot be stored are listed in `errors`,
    the others are stored; the status is 422 only if nothing was.
    """
    if bearer is None:
        raise HTTPException(401, "expected a project's token, got none", headers={"WWW-Authenticate": "Bearer"})
    try:
        answer = await asyncio.to_thread(ingest, engine, bearer.credentials, batch)
    except UnknownToken as error:
        raise HTTPException(401, str(error), headers={"WWW-Authenticate": "Bearer"}) from None
    num_sent = sum(len(items) for items in batch.model_dump(exclude={"training"}).values())
    num_sent += batch.training is not None
    if num_sent and len(answer.errors) == num_sent:
        response.status_code = 422
    return answer
