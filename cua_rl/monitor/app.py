"""The monitor's web server: read API, ingest, live events, and the built web app."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from fastapi import FastAPI, HTTPException
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from cua_rl.host.request_limits import BodyBudget
from cua_rl.monitor import benchmark_routes, ingest, live, notes, rollout_routes, run_routes, security, sql_routes
from cua_rl.monitor.answers import SafeJson, add_refusals
from cua_rl.monitor.databases import Databases
from cua_rl.monitor.live import LiveFeed, listening
from cua_rl.monitor.prices import Prices
from cua_rl.monitor.security import AccessRules, Guard

STATIC = Path(__file__).parent / "static"
_NOT_BUILT = """<!doctype html><html lang="en"><title>cua_rl monitor</title><h1>The web app is not built</h1>
<p>Run <code>npm ci</code> and <code>npm run build</code> in <code>training-monitor/</code>; the API is at
<a href="/api/runs">/api/runs</a>.</p></html>"""
_ASSET_SUFFIXES = (".js", ".css", ".svg", ".woff2", ".png", ".ico", ".json", ".webmanifest", ".txt")


def make_app(
    databases: Databases,
    rules: AccessRules,
    *,
    feed: LiveFeed | None = None,
    results_folder: Path | None = None,
    prices: Prices | None = None,
    static: Path = STATIC,
) -> FastAPI:
    """The application; its lifespan owns the databases. Benchmarks are read from `results_folder`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(databases.close)
            for database in databases.all:
                await stack.enter_async_context(listening(app.state.feed, database.url, database.run_id))
            yield

    app = FastAPI(
        title="cua_rl monitor",
        version=version("cua_rl"),
        description=__doc__ or "",
        default_response_class=SafeJson,
        lifespan=lifespan,
        openapi_url="/api/openapi.json",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.databases = databases
    app.state.rules = rules
    app.state.sessions = security.Sessions()
    app.state.ingest_budgets, app.state.ingest_turn = dict[int, BodyBudget](), asyncio.Lock()
    app.state.feed = feed or LiveFeed()
    app.state.results_folder = results_folder
    app.state.prices = prices or Prices()
    add_refusals(app)
    app.include_router(security.router)
    app.include_router(live.router)
    app.include_router(ingest.router)
    app.include_router(benchmark_routes.router)
    app.include_router(notes.router)
    app.include_router(rollout_routes.router)  # before those whose {phase} would take their addresses
    app.include_router(run_routes.router)
    app.include_router(sql_routes.router)
    _add_pages(app, static)
    return app


def guard(app: FastAPI, rules: AccessRules) -> ASGIApp:
    """The application behind its guard, as a server runs it."""
    return Guard(app, rules)


def _add_pages(app: FastAPI, static: Path) -> None:
    """Every other path serves the web app, which renders its pages in the browser."""
    root = static.resolve()

    @app.get("/{training_id:int}", include_in_schema=False)
    async def redirect_to_run(training_id: int) -> RedirectResponse:  # the address that ingest clients print
        return RedirectResponse(f"/runs/{training_id}")

    @app.get("/{path:path}", include_in_schema=False)
    async def get_page(path: str) -> Response:
        if path.startswith("api/"):
            raise HTTPException(404, "expected a route of the API, got none; see /api/openapi.json")
        if path.endswith(_ASSET_SUFFIXES):
            # a file of the built app, never one outside its folder
            try:
                found = (root / path).resolve()
                is_ours = found.is_relative_to(root) and found.is_file()
            except (OSError, ValueError):  # names that the file system cannot have
                found, is_ours = root, False
            if not is_ours:
                raise HTTPException(404, "expected a file of the web app, got none")
            is_hashed = path.startswith("assets/")
            caching = "public, max-age=31536000, immutable" if is_hashed else "no-cache"
            return FileResponse(found, headers={"Cache-Control": caching})
        index = root / "index.html"
        if not index.is_file():
            return HTMLResponse(_NOT_BUILT)
        return FileResponse(index, headers={"Cache-Control": "no-cache"})
