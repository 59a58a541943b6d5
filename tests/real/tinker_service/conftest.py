"""A service on a real database, with stand-ins for trainer and model server, reached without a network."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from sqlalchemy.ext.asyncio import AsyncEngine

from cua_rl.database.session import make_engine
from cua_rl.tinker_service.app import ServedModel, Service
from cua_rl.tinker_service.listings import Listings
from cua_rl.tinker_service.models import Models
from cua_rl.tinker_service.sampling import Samplers
from cua_rl.tinker_service.store import Store
from tests.real.database.conftest import server_url, url
from tests.real.monitor.conftest import monitor
from tests.tinker_service.clients import MAX_TOKENS, FakeHost, FakeServer, make_reader

__all__ = ["monitor", "server_url", "url"]

BASE_MODEL = "org/tiny"
KEYS = ("tml-first-key-of-the-tests", "tml-second-key-of-the-tests")
PROTOBUF = {"Content-Type": "application/x-protobuf"}


@dataclass(kw_only=True)
class Wire:
    """Requests with a key; every method returns JSON unless it says otherwise."""

    http: httpx.AsyncClient
    key: str = KEYS[0]
    base_model: str = BASE_MODEL

    async def send(self, method: str, path: str, **what: Any) -> httpx.Response:
        headers = {"X-API-Key": self.key, **what.pop("headers", {})}
        return await self.http.request(method, f"/api/v1/{path}", headers=headers, **what)

    async def get(self, path: str) -> Any:
        answer = await self.send("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        answer = await self.send("POST", path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def result(self, future: Mapping[str, Any]) -> httpx.Response:
        """The answer to a request that was taken, once it is there."""
        while True:
            answer = await self.send("POST", "retrieve_future", json={"request_id": future["request_id"]})
            is_json = answer.headers["content-type"] == "application/json"
            if not is_json or answer.json().get("type") != "try_again":
                return answer

    async def session(self) -> str:
        return (await self.post("create_session", {"tags": [], "sdk_version": "0.38.0"}))["session_id"]

    async def create(self, session_id: str, number: int = 0, **fields: object) -> str:
        """A model; returns its id."""
        body = {"session_id": session_id, "model_seq_id": number, "base_model": self.base_model}
        body |= {"lora_config": {"rank": 8, "seed": 3}, **fields}
        answer = await self.result(await self.post("create_model", body))
        return answer.json()["model_id"]

    async def train(self, body: bytes) -> Any:
        answer = await self.send("POST", "forward_backward", content=body, headers=PROTOBUF)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def step(self, model_id: str, seq_id: int, learning_rate: float = 0.5) -> Any:
        body = {"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": learning_rate}}
        return await self.post("optim_step", body)


@dataclass(kw_only=True)
class Client(Wire):
    """The same of a service with stand-ins."""

    host: FakeHost
    server: FakeServer
    store: Store


@asynccontextmanager
async def running(
    url: str,
    folder: Path,
    *,
    max_models: int = 4,
    step_s: float = 60.0,
    wait_s: float = 20.0,
    room: int = 2**29,
    make_store: Callable[[AsyncEngine], Store] = Store,
) -> AsyncGenerator[Client]:
    """The service on a database and a folder, which may have been another one's before; left as if it were killed.

    What waits in memory has `room` bytes.
    """
    engine = make_engine(url, pool_size=4)
    store, host, server, reader = make_store(engine), FakeHost(), FakeServer(), make_reader()
    for number, key in enumerate(KEYS):
        await store.add_key(str(number), key)
    models = Models(
        host, store, reader, folder, base_model=BASE_MODEL, max_models=max_models, step_s=step_s, held_bytes=room
    )
    await models.load()
    samplers = Samplers(server, store, reader, BASE_MODEL, open_bytes=room)
    service = Service(
        served=ServedModel(name=BASE_MODEL, max_tokens=MAX_TOKENS, max_lora_rank=32),
        store=store,
        models=models,
        samplers=samplers,
        keys=await store.keys(),
        listings=Listings(store=store, base_model=BASE_MODEL),
        wait_s=wait_s,
    )
    working = asyncio.create_task(models.run())
    transport = httpx.ASGITransport(app=service.app(), raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
            await asyncio.sleep(0)  # the task begins
            yield Client(http=http, host=host, server=server, store=store)
    finally:
        assert not working.done() or working.cancelled(), working.exception()
        working.cancel()
        await asyncio.wait([working])
        await samplers.close()
        await engine.dispose()


@pytest_asyncio.fixture
async def client(url: str, tmp_path: Path) -> AsyncGenerator[Client]:
    async with running(url, tmp_path) as client:
        yield client


def shown(answer: httpx.Response) -> str:
    """Status and text of an answer."""
    return f"{answer.status_code} {json.dumps(answer.json())}"
