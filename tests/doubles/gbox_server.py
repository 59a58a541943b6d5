"""A GBox server as gbox-sdk sees it: boxes that live, screens that react, and faults that can be switched on."""

import asyncio
from base64 import b64decode, b64encode
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import count
from random import Random
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.doubles.gbox_desktop import DesktopBox
from tests.doubles.gbox_phone import PhoneBox

KEY = "a-key-of-the-double"
MODEL = "gbox-handy-1"
WHEN = "2026-01-01T00:00:00Z"
FAILURES = (408, 429, 500, 502, 503)


@dataclass
class Faults:
    """What goes wrong, and when. Deques are used up from the left, one entry a request."""

    creations: deque[int] = field(default_factory=deque[int])
    """Statuses of the next creations; 0 goes well."""
    actions: deque[int] = field(default_factory=deque[int])
    """Statuses of the next actions; 404 loses the box for good, 0 goes well."""
    num_without_screenshot: int = 0
    """So many of the next actions show nothing."""
    num_expired: int = 0
    """So many of the next presigned addresses are of no use."""
    num_failed_terminations: int = 0
    rate: float = 0.0
    """Share of creations, actions and screenshots that fail by chance."""
    random: Random = field(default_factory=lambda: Random(0))
    create_delay_s: float = 0.0
    action_delay_s: float = 0.0

    def draw(self, queue: deque[int]) -> int:
        """The status of the next request."""
        if queue:
            return queue.popleft()
        return self.random.choice((*FAILURES, 404)) if self.random.random() < self.rate else 0


@dataclass
class Box:
    """A box and what is in it."""

    box_id: str
    kind: str
    config: dict[str, Any]
    inside: PhoneBox | DesktopBox
    status: str = "running"
    is_recording: bool = False
    num_actions: int = 0

    def as_json(self) -> dict[str, Any]:
        version = {"version": "15" if self.kind == "android" else "ubuntu-24.04"}
        config = {"cpu": 2, "memory": 4096, "storage": 16, "os": version, "envs": {}, "workingDir": "/", "labels": {}}
        return {
            "id": self.box_id,
            "type": self.kind,
            "status": self.status,
            "createdAt": WHEN,
            "updatedAt": WHEN,
            "config": config | self.config,
        }


class GboxDouble:
    """All boxes, and the requests that came; `alive` must be empty once everybody is done."""

    def __init__(self, *, seed: int = 0) -> None:
        self.faults = Faults()
        self.boxes: dict[str, Box] = {}
        self.requests: Counter[str] = Counter()
        self.bodies: list[tuple[str, Any]] = []
        self.most_alive = 0
        self.storage: dict[str, bytes] = {}
        self._expired: set[str] = set()
        self._seen: dict[str, Mapping[str, tuple[int, int]]] = {}
        """What can be seen on every screenshot handed out, by its sha256: the coordinate model looks it up."""
        self._numbers = count(seed)

    @property
    def alive(self) -> list[str]:
        return [box.box_id for box in self.boxes.values() if box.status in ("pending", "running")]

    def app(self) -> Starlette:
        box, do = "/api/v1/boxes/{box_id}", ["POST"]
        return Starlette(
            routes=[
                Route("/api/v1/boxes/{kind:str}", self._create, methods=do),
                Route("/api/v1/boxes", self._list),
                Route(box, self._show),
                Route(f"{box}/terminate", self._terminate, methods=do),
                Route(f"{box}/commands", self._command, methods=do),
                Route(f"{box}/storage/presigned-url", self._presign, methods=do),
                Route(f"{box}/actions/screenshot", self._screenshot, methods=do),
                Route(f"{box}/actions/recording/{{what}}", self._record, methods=do),
                Route(f"{box}/actions/{{action}}", self._act, methods=do),
                Route(f"{box}/android/apps", self._apps),
                Route(f"{box}/android/packages", self._install, methods=do),
                Route(f"{box}/android/packages/{{package}}/open", self._open, methods=do),
                Route("/api/v1/model", self._model, methods=do),
                Route("/storage/{key:path}", self._download),
            ],
            middleware=[Middleware(_KeyCheck, double=self)],
        )

    async def _create(self, request: Request) -> Response:
        body, kind = await request.json(), request.path_params["kind"]
        await asyncio.sleep(self.faults.create_delay_s)
        status = self.faults.draw(self.faults.creations)
        if status:
            return _refusal(429 if status == 404 else status)
        given = body.get("config", {})
        box = self.add_box(kind, given.get("labels", {}), given.get("expiresIn"))
        return JSONResponse(box.as_json())

    def add_box(self, kind: str, labels: Mapping[str, str], expires_in: str | None = None) -> Box:
        """A box as a creation makes it."""
        number = next(self._numbers)
        inside = PhoneBox(number) if kind == "android" else DesktopBox()
        box = Box(f"box-{number}", kind, {"labels": dict(labels), "expiresIn": expires_in}, inside)
        self.boxes[box.box_id] = box
        self.most_alive = max(self.most_alive, len(self.alive))
        return box

    async def _list(self, request: Request) -> Response:
        page, size = int(request.query_params.get("page", 1)), int(request.query_params.get("pageSize", 10))
        living = [box.as_json() for box in self.boxes.values() if box.status == "running"]
        part = living[(page - 1) * size : page * size]
        return JSONResponse({"data": part, "page": page, "pageSize": size, "total": len(living)})

    async def _show(self, request: Request) -> Response:
        return JSONResponse(self._box(request).as_json())

    async def _terminate(self, request: Request) -> Response:
        box = self._box(request)
        if self.faults.num_failed_terminations:
            self.faults.num_failed_terminations -= 1
            return _refusal(503)
        box.status = "terminated"
        return Response()

    async def _command(self, request: Request) -> Response:
        box = self._box(request)
        printed = await box.inside.shell((await request.json())["command"])
        return JSONResponse({"exitCode": 0, "stdout": printed, "stderr": ""})

    async def _act(self, request: Request) -> Response:
        box, name = self._box(request), request.path_params["action"]
        body = await request.json()
        self.bodies.append((name, body))
        await asyncio.sleep(self.faults.action_delay_s)
        if refusal := self._fault(box):
            return refusal
        if not box.inside.act(name, body):
            return JSONResponse({"message": "coordinates are outside the screen"}, 400)
        box.num_actions += 1
        answer: dict[str, Any] = {"actionId": f"action-{box.num_actions}", "message": "done"}
        wanted = body.get("options", {}).get("screenshot", {})
        if "after" in wanted.get("phases", []):
            answer["screenshot"] = {"after": self._shot(request, box, wanted.get("outputFormat", "base64"))}
        if self.faults.num_without_screenshot:
            self.faults.num_without_screenshot -= 1
            answer.pop("screenshot", None)
        return JSONResponse(answer)

    async def _screenshot(self, request: Request) -> Response:
        box, body = self._box(request), await request.json()
        return self._fault(box) or JSONResponse(self._shot(request, box, body.get("outputFormat", "base64")))

    def _fault(self, box: Box) -> Response | None:
        status = self.faults.draw(self.faults.actions)
        if status == 404:
            box.status = "terminated"
        return _refusal(status) if status else None

    def _shot(self, request: Request, box: Box, output: str) -> dict[str, str]:
        png = box.inside.draw()
        self._seen[sha256(png).hexdigest()] = box.inside.elements()
        if output == "base64":
            return {"uri": f"data:image/png;base64,{b64encode(png).decode()}"}
        key = self._store(png, "png")
        return {"uri": key, "presignedUrl": self._url(request, key)}

    async def _record(self, request: Request) -> Response:
        box = self._box(request)
        box.is_recording = request.path_params["what"] == "start"
        if box.is_recording:
            return Response()
        key = self._store(f"film of {box.num_actions} actions".encode(), "mp4")
        return JSONResponse({"storageKey": key, "presignedUrl": self._url(request, key)})

    async def _presign(self, request: Request) -> Response:
        self._box(request)
        return JSONResponse(self._url(request, (await request.json())["storageKey"]))

    def _store(self, data: bytes, suffix: str) -> str:
        key = f"shots/{len(self.storage)}.{suffix}"
        self.storage[key] = data
        return key

    def _url(self, request: Request, key: str) -> str:
        url = f"{request.base_url}storage/{key}?signed={len(self._expired)}-{self.requests.total()}"
        if self.faults.num_expired:
            self.faults.num_expired -= 1
            self._expired.add(url)
        return url

    async def _download(self, request: Request) -> Response:
        if str(request.url) in self._expired:
            return Response("Request has expired", 403)
        return Response(self.storage[request.path_params["key"]], media_type="image/png")

    async def _apps(self, request: Request) -> Response:
        packages = _phone(self._box(request)).packages()
        names = {"activityClassName": ".Main", "activityName": "Main"}
        return JSONResponse({"data": [names | {"packageName": package} for package in packages]})

    async def _install(self, request: Request) -> Response:
        phone = _phone(self._box(request))
        is_file = request.headers["content-type"].startswith("multipart/")
        apk: Any = (await request.form())["apk"] if is_file else (await request.json())["apk"]
        package = (apk if isinstance(apk, str) else apk.filename).rpartition("/")[2].removesuffix(".apk")
        phone.install(package)
        return JSONResponse({"packageName": package, "activities": [], "apkPath": "/a", "pkgType": "thirdParty"})

    async def _open(self, request: Request) -> Response:
        _phone(self._box(request)).open(request.path_params["package"])
        return Response()

    async def _model(self, request: Request) -> Response:
        """The coordinate model: finds what is on the very screenshot that it is shown, else answers -1."""
        body = await request.json()
        assert body["model"] == MODEL
        shown = sha256(b64decode(body["screenshot"].partition(",")[2])).hexdigest()
        answer = _locate(self._seen[shown], body["action"])
        return JSONResponse({"id": "m", "response": {"type": body["action"]["type"], "coordinates": answer}})

    def _box(self, request: Request) -> Box:
        box = self.boxes.get(request.path_params["box_id"])
        if box is None or box.status != "running":
            raise _Gone
        return box


class _Gone(Exception):
    """The box of a request does not live."""


class _KeyCheck:
    def __init__(self, app: ASGIApp, double: GboxDouble) -> None:
        self._app = app
        self._double = double

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        parts = [part for part in path.split("/") if not part.startswith("box-")]
        self._double.requests[f"{scope['method']} {'/'.join(parts[3:])}"] += 1
        key = dict(scope["headers"]).get(b"authorization")
        if path.startswith("/api/") and key != f"Bearer {KEY}".encode():
            await _refusal(401)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except _Gone:
            await _refusal(404)(scope, receive, send)


def _refusal(status: int) -> Response:
    headers = {"retry-after": "0"} if status == 429 else {}
    return JSONResponse({"message": f"refused with {status}"}, status, headers=headers)


def _phone(box: Box) -> PhoneBox:
    assert isinstance(box.inside, PhoneBox)
    return box.inside


def _locate(elements: Mapping[str, tuple[int, int]], action: Mapping[str, Any]) -> dict[str, Any]:
    match action["type"]:
        case "click":
            return _point(elements, action["target"])
        case "drag":
            return {name: _point(elements, action[name]) for name in ("target", "destination")}
        case _:
            sign = {"up": 1, "left": 1, "down": -1, "right": -1}[action["direction"]]
            is_vertical = action["direction"] in ("up", "down")
            amounts = {"scrollX": 0 if is_vertical else 90 * sign, "scrollY": 90 * sign if is_vertical else 0}
            return _point(elements, action["location"]) | amounts


def _point(elements: Mapping[str, tuple[int, int]], description: str) -> dict[str, int]:
    """The element that the description names; the longest name wins."""
    named = [name for name in elements if name and name in description.lower()]
    x, y = elements[max(named, key=len)] if named else (-1, -1)
    return {"x": x, "y": y}
