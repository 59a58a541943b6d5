"""Read API: people's own queries in SQL about a run's database."""

import asyncio

from fastapi import APIRouter, HTTPException, Request

from cua_rl.monitor import sql_queries
from cua_rl.monitor.answers import REFUSALS
from cua_rl.monitor.run_routes import AllDatabases, Id, OpenRun
from cua_rl.monitor.security import CanRead, ReadRoute
from cua_rl.monitor.sql_queries import SqlClosedError
from cua_rl.monitor.sql_schemas import SqlAnswer, SqlPage, SqlQuestion

router = APIRouter(
    prefix="/api/runs",
    tags=["sql"],
    dependencies=[CanRead],
    responses={**REFUSALS, 409: REFUSALS[404]},
    route_class=ReadRoute,
)


@router.get("/{run_id}/sql")
async def get_sql_page(run: OpenRun) -> SqlPage:
    """What a query about the run's database can read, and queries to begin with."""
    try:
        await sql_queries.open_reader(run.database)
        closed = None
    except SqlClosedError as error:
        closed = str(error)
    return SqlPage(
        closed=closed,
        tables=sql_queries.list_tables(),
        saved=sql_queries.saved_queries(run.training.id),
        max_rows=sql_queries.MAX_ROWS,
        time_limit_s=sql_queries.TIME_LIMIT_S,
    )


@router.post("/{run_id}/sql")
async def ask_in_sql(run_id: Id, databases: AllDatabases, question: SqlQuestion, request: Request) -> SqlAnswer:
    """The rows of one SELECT. A client that goes away ends its query."""
    async with databases.open_run(run_id) as run:
        database = run.database  # its session is not held meanwhile
    asked = asyncio.create_task(sql_queries.answer(await sql_queries.open_reader(database), question.sql))
    gone = asyncio.ensure_future(request.receive())  # after the body, the next message is that the client has gone
    try:
        await asyncio.wait((asked, gone), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            raise HTTPException(499, "the client has gone")
        return asked.result()
    finally:
        for task in (asked, gone):
            task.cancel()
        await asyncio.wait((asked, gone))
