"""A web shop on a socket of this process that is never the same twice: what a recording has to hold.

Every visitor has a session with a basket, its own colours and one-time tokens; pages show the server's time and how
often they were seen, draw from the page's own clock and random numbers, load prices late, and try a WebSocket.
"""

import asyncio
import itertools
import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

_STYLE = "body { font: 16px Arial } .at { position: absolute; left: 20px; width: 300px; height: 30px }"
_HOME = """<!doctype html><title>Shop</title><style>{style} h1 {{ color: #{colour} }}</style><h1>{greeting}</h1>
<form class=at style="top:90px" method=post action=/basket>
 <input name=item id=item><input type=hidden name=token value={token}><button>Add</button></form>
<a class=at style="top:130px" href=/item/1>Tea</a> <a class=at style="top:160px" href=/old>Coffee, an old address</a>
<button class=at style="top:190px" id=vote>Vote</button> <a class=at style="top:220px" href=http://127.0.0.9:9/>Away</a>
<a class=at style="top:250px" href=/search?q=milk>Milk</a>
<img class=at style="top:290px" src=/badge.svg?for={colour}><p class=at style="top:330px" id=price>no price yet</p>
<p class=at style="top:360px" id=drawn></p><p class=at style="top:390px" id=votes></p>
<p class=at style="top:420px" id=live></p>
<div style="position:absolute;left:500px;top:90px">Basket {number}: {basket}<br>It is {now:.6f}.</div>
<script>
 fetch('/price?at=' + Date.now()).then(answer => answer.json()).then(told => {{ price.textContent = told.price; }});
 drawn.textContent = [new Date().toISOString(), Math.random(), crypto.randomUUID()].join(' ');
 vote.onclick = () => {{
   const form = new FormData();
   form.append('voice', new Blob(['yes']), 'voice.txt');
   form.append('id', crypto.randomUUID());
   fetch('/vote', {{ method: 'POST', body: form }}).then(answer => answer.text())
     .then(told => {{ votes.textContent = told; }});
 }};
 const socket = new WebSocket('ws://' + location.host + '/live');
 socket.onmessage = event => {{ live.textContent = event.data; }};
 socket.onclose = () => {{ live.textContent = 'no news'; }};
</script>"""


@dataclass
class _Session:
    colour: str = field(default_factory=lambda: secrets.token_hex(3))
    basket: list[str] = field(default_factory=list[str])
    seen: Counter[str] = field(default_factory=Counter[str])
    token: str = ""
    votes: int = 0


@dataclass
class ChangingShop:
    """The shop; `robots` is its robots.txt, and `refusals` are answers of paths that turn browsers away."""

    robots: str = ""
    refusals: Mapping[str, Response] = field(default_factory=dict[str, Response])
    delay_s: float = 0.15
    """How late the price is: longer than a page takes to be quiet."""
    asked: list[str] = field(default_factory=list[str])
    """The path of each request."""
    _sessions: dict[str, _Session] = field(default_factory=dict[str, _Session])
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/robots.txt", self._robots),
                Route("/basket", self._add, methods=["POST"]),
                Route("/vote", self._vote, methods=["POST"]),
                WebSocketRoute("/live", self._live),
                Route("/{path:path}", self._show),
            ]
        )

    async def _robots(self, request: Request) -> Response:
        return PlainTextResponse(self.robots)

    async def _live(self, socket: WebSocket) -> None:
        await socket.accept()
        await socket.send_text(f"news at {time.time()}")
        await socket.close()

    async def _add(self, request: Request) -> Response:
        self.asked.append(request.url.path)
        session, form = self._sessions[request.cookies["sid"]], await request.form()
        if form["token"] != session.token:
            return HTMLResponse("<h1>An old form</h1>", status_code=400)
        session.basket.append(str(form["item"]))
        return RedirectResponse("/", status_code=303)

    async def _vote(self, request: Request) -> Response:
        self.asked.append(request.url.path)
        session = self._sessions[request.cookies["sid"]]
        session.votes += 1
        await asyncio.sleep(self.delay_s)
        return PlainTextResponse(f"{session.votes} votes, the last one at {time.time()}")

    async def _show(self, request: Request) -> Response:
        path = request.url.path
        self.asked.append(path)
        refusal = self.refusals.get(path)
        if refusal is not None:
            return refusal
        sid = request.cookies.get("sid") or secrets.token_hex(8)
        session = self._sessions.setdefault(sid, _Session())
        session.seen[path] += 1
        response = await self._page(path, session, request)
        response.set_cookie("sid", sid)
        response.set_cookie("last", path.replace("/", "_"))
        return response

    async def _page(self, path: str, session: _Session, request: Request) -> Response:
        times = session.seen[path]
        match path:
            case "/":
                session.token = secrets.token_hex(8)
                return HTMLResponse(
                    _HOME.format(
                        style=_STYLE,
                        colour=session.colour,
                        greeting=f"Welcome, for the {times}. time",
                        token=session.token,
                        number=next(self._numbers),
                        basket=", ".join(session.basket) or "nothing",
                        now=time.time(),
                    )
                )
            case "/price":
                await asyncio.sleep(self.delay_s)
                return JSONResponse({"price": f"{secrets.randbelow(10**6)} euros"})
            case "/badge.svg":
                circle = f'<circle cx="15" cy="15" r="{5 + times}" fill="#{session.colour}"/>'
                image = f'<svg xmlns="http://www.w3.org/2000/svg" width="30" height="30">{circle}</svg>'
                return Response(image, media_type="image/svg+xml")
            case "/old":
                return RedirectResponse("/older")
            case "/older":
                return RedirectResponse("/item/2", status_code=301)
            case "/search":
                found = json.dumps(request.query_params["q"])
                return HTMLResponse(f"<title>Search</title><h1>Nothing for {found}, {secrets.token_hex(4)}</h1>")
            case _:
                return HTMLResponse(
                    f"<title>{path}</title><style>{_STYLE}</style><h1>{path}, seen {times} times at {time.time()}</h1>"
                    '<p id=cookie></p><a class=at style="top:130px" href=/>Home</a>'
                    '<a class=at style="top:160px" href=/private/a>Private</a>'
                    "<script>cookie.textContent = document.cookie</script>"
                )
