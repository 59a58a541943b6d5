"""A local page on which a person takes over: click on the turn's screenshot, or type a line."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.resources import files

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel

from cua_rl.agent.tools import MOBILE_USE
from cua_rl.host.http_server import serve_app
from cua_rl.monitor.security import LOOPBACK_HOSTS, AccessRules, CanRead, Guard, Sessions, WriteRoute, make_token
from cua_rl.run.by_hand import Person


class ShownTurn(BaseModel):
    """What the page shows; `image` is a `data:` URL, empty if the client has `seen` it."""

    task: str
    turn: int
    seen: str
    image: str
    is_phone: bool
    said: list[str]


class GivenLines(BaseModel):
    """What a person says, in order."""

    lines: list[str]


def make_hand_app(person: Person, task: str, rules: AccessRules) -> FastAPI:
    """The application; everything but the page itself needs the token."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    app.state.rules, app.state.sessions = rules, Sessions()
    api = APIRouter(prefix="/api", route_class=WriteRoute)
    texts = {name: files("cua_rl.run").joinpath(f"hand_page.{name}").read_text("utf-8") for name in ("html", "js")}

    @app.get("/")
    async def get_page() -> Response:
        return HTMLResponse(texts["html"])

    @app.get("/page.js")
    async def get_script() -> Response:
        return Response(texts["js"], media_type="text/javascript")

    @api.get("/turn", dependencies=[CanRead])
    async def get_turn(seen: str = "") -> ShownTurn:
        now = person.seen
        return ShownTurn(
            task=task,
            turn=person.turn,
            seen="" if now is None else now.sha256,
            image="" if now is None or now.sha256 == seen else now.data_url(),
            is_phone=person.tool.name == MOBILE_USE.name,
            said=person.said,
        )

    @api.post("/lines")
    async def say(given: GivenLines) -> int:
        for line in given.lines:
            person.lines.put_nowait(line)
        return len(given.lines)

    app.include_router(api)
    return app


@asynccontextmanager
async def serve_page(person: Person, task: str) -> AsyncGenerator[str]:
    """Serve the page on the loopback address while the block runs; yields the link, with the token that it needs."""
    token = make_token()
    rules = AccessRules(write_token=token, read_token=token)
    async with serve_app(Guard(make_hand_app(person, task, rules), rules), LOOPBACK_HOSTS[0], 0, grace_s=1) as url:
        yield f"{url}/#{token}"
