"""The service's HTTP surface, under /api/v1.

The key is checked before the body is read, and the body counted while it arrives and while it is decompressed.
"""

import asyncio
import importlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from importlib.util import find_spec
from io import BytesIO
from uuid import uuid4

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import insert
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cua_rl.database.tinker_models import TinkerSession
from cua_rl.host.request_limits import (
    BodyBudget,
    HeldBody,
    RequestRefused,
    bearer_key,
    parse_body,
    read_body,
)
from cua_rl.tinker_service.listings import Listings
from cua_rl.tinker_service.messages import Call, Fields, parse_message
from cua_rl.tinker_service.models import Models
from cua_rl.tinker_service.places import ModelRun
from cua_rl.tinker_service.requests import CHECKPOINT_PATH, MAX_SEQ, MODEL_ID
from cua_rl.tinker_service.sampling import SampleFailed, Samplers
from cua_rl.tinker_service.store import Store, key_hash

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 256 * 2**20
"""Limit for all open requests of a key together, before and after decompression."""
_PIECE_BYTES, _WINDOW_BYTES = 2**20, 2**23  # what every decoder of zstd shall support (RFC 8878)
_PROTOBUF = "application/x-protobuf"
_TAKES_ZSTD = find_spec("zstandard") is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the service says about its base model, and its limits."""

    name: str
    """Clients load its tokenizer from there, too."""
    max_tokens: int
    max_lora_rank: int


_Answer = Mapping[str, object] | Response
_Endpoint = Callable[[Call], Awaitable[_Answer]]


@dataclass(slots=True, kw_only=True)
class Service:
    """The endpoints."""

    served: ServedModel
    store: Store
    models: Models
    samplers: Samplers
    keys: Mapping[bytes, int]
    """Ids of keys by their hashes."""
    listings: Listings
    wait_s: float = 20.0
    """How long a client waits for an answer before it asks again; the SDK gives up a request after 45 s."""
    _bodies: dict[int, BodyBudget] = field(default_factory=dict[int, BodyBudget])

    def app(self) -> Starlette:
        """The ASGI app; what it does not expect is answered with 500, without saying what it was."""
        posts = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "telemetry": self.telemetry,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "sessions/{session_id}/finish": self.finish_session,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.model_request("optim_step"),
            "save_weights": self.model_request("save_weights"),
            "save_weights_for_sampler": self.model_request("save_weights_for_sampler"),
            "load_weights": self.load_weights,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.sample,
            "retrieve_future": self.retrieve_future,
            "cancel_future": self.cancel_future,
            "weights_info": self.listings.weights_info,
        }
        gets = {
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.get_sampler,
            "sessions": self.listings.sessions,
            "sessions/{session_id}": self.listings.session,
            "training_runs": self.listings.training_runs,
            "training_runs/{model_id}": self.listings.training_run,
            "training_runs/{model_id}/checkpoints": self.listings.checkpoints,
            "checkpoints": self.listings.checkpoints,
        }
        one = "training_runs/{model_id}/checkpoints/{kind}/{name}"
        others = (
            (one, "DELETE", self.listings.delete_checkpoint),
            (f"{one}/publish", "POST", self.listings.publish),
            (f"{one}/publish", "DELETE", self.listings.unpublish),
            (f"{one}/ttl", "PUT", self.listings.set_ttl),
        )
        endpoints = [
            *((path, "POST", endpoint) for path, endpoint in posts.items()),
            *((path, "GET", endpoint) for path, endpoint in gets.items()),
            *others,
        ]
        routes = [Route(f"/api/v1/{path}", self._guarded(each), methods=[method]) for path, method, each in endpoints]
        return Starlette(
            routes=[Route("/api/v1/healthz", _healthy), *routes],
            exception_handlers={HTTPStatus.NOT_FOUND: _unknown, HTTPStatus.METHOD_NOT_ALLOWED: _unknown, 500: _failed},
        )

    def _guarded(self, endpoint: _Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def admit(request: Request) -> Response:
            try:
                key = request.headers.get("x-api-key", "") or bearer_key(request)
                key_id = self.keys.get(key_hash(key))
                if key_id is None:
                    raise RequestRefused(401, "expected a key of this service in X-API-Key, got none or another")
                with self._bodies.setdefault(key_id, BodyBudget(MAX_BODY_BYTES)).hold() as held:
                    body = await plain_body(request, held)
                    answer = await endpoint(Call(request=request, key_id=key_id, body=body))
            except RequestRefused as refusal:
                return JSONResponse({"error": refusal.message}, refusal.status)
            return answer if isinstance(answer, Response) else JSONResponse(answer)

        return admit

    async def client_config(self, call: Call) -> _Answer:
        return {"parallel_fwdbwd_chunks": True, "proto_compress_fwdbwd": _TAKES_ZSTD, "pjwt_auth_enabled": False}

    async def dynamic_config(self, call: Call) -> _Answer:
        return {"sample_cancel_enabled": True}

    async def telemetry(self, call: Call) -> _Answer:
        return {"status": "accepted"}

    async def capabilities(self, call: Call) -> _Answer:
        model = {"model_name": self.served.name, "max_context_length": self.served.max_tokens}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    async def create_session(self, call: Call) -> _Answer:
        session_id, labels = uuid4().hex, call.fields().labels()
        row = insert(TinkerSession).values(id=session_id, key_id=call.key_id, user_metadata=labels)
        await self.store.write(row)
        told = "train_unembed=True is accepted, but the unembedding is not trained: adapters are on the decoder only"
        return {"type": "create_session", "session_id": session_id, "info_message": told}

    async def heartbeat(self, call: Call) -> _Answer:
        session_id = await self._session(call, call.fields().text("session_id"))
        await self.store.write(update(TinkerSession).where(TinkerSession.id == session_id).values(seen_at=func.now()))
        return {"type": "session_heartbeat"}

    async def finish_session(self, call: Call) -> _Answer:
        session_id = await self._session(call, call.path("session_id"))
        reason = call.fields().inner("reason").text("type", pattern="success|errored|interrupted")
        await self.models.end_session(session_id, reason)
        return {}

    async def _session(self, call: Call, session_id: str) -> str:
        """The id of an open session of the key; raises `RequestRefused`."""
        query = select(TinkerSession.ended_at).where(
            TinkerSession.id == session_id, TinkerSession.key_id == call.key_id
        )
        rows = await self.store.read(query)
        if not rows:
            raise RequestRefused(404, f"expected a session of this key, got {session_id[:100]!r}")
        if rows[0].ended_at is not None:
            raise RequestRefused(410, f"session {session_id} has ended; create another")
        return session_id

    async def create_model(self, call: Call) -> _Answer:
        fields = call.fields()
        session_id, number = await self._model_place(call, fields)
        self.samplers.require_base_model(fields)
        if fields.values.get("optimizer_config") is not None:
            fields.inner("optimizer_config").refuse_other("type", "adamw")
        lora = fields.inner("lora_config")
        for name in ("train_mlp", "train_attn"):
            lora.refuse_other(name, True)
        lora.yes("train_unembed", True)
        seed = lora.optional_whole("seed", -(2**63), 2**63 - 1)
        run = ModelRun(
            id=f"{session_id}:train:{number}",
            key_id=call.key_id,
            session_id=session_id,
            lora_rank=lora.whole("rank", 1, self.served.max_lora_rank),
            seed=secrets.randbits(31) if seed is None else seed % 2**63,
        )
        return await self._begin(call, run, fields, "create_model")

    async def load_weights(self, call: Call) -> _Answer:
        """Load into a model, or create one from a checkpoint, with its rank."""
        fields = call.fields()
        path = fields.text("path", pattern=CHECKPOINT_PATH)
        checkpoint = await self.store.find_checkpoint(path, call.key_id)
        if fields.values.get("session_id") is None:
            run = self.models.find(fields.text("model_id", pattern=MODEL_ID), call.key_id)
            if run.lora_rank != checkpoint.lora_rank:
                raise RequestRefused(
                    400, f"expected a checkpoint of rank {run.lora_rank}, the model's, got {checkpoint.lora_rank}"
                )
            return await self._submit(run, fields, "load_weights", call.body)
        session_id, number = await self._model_place(call, fields)
        if fields.values.get("base_model") is not None:
            self.samplers.require_base_model(fields)
        fields.refuse_other("optimizer_config", {"type": "adamw"})
        run = ModelRun(
            id=f"{session_id}:train:{number}",
            key_id=call.key_id,
            session_id=session_id,
            lora_rank=checkpoint.lora_rank,
            seed=0,
        )
        return await self._begin(call, run, fields, "load_weights")

    async def _model_place(self, call: Call, fields: Fields) -> tuple[str, int]:
        return await self._session(call, fields.text("session_id")), fields.whole("model_seq_id", 0, 999_999_999)

    async def _begin(self, call: Call, run: ModelRun, fields: Fields, kind: str) -> _Answer:
        request_id = await self.models.add(run, fields.labels(), kind, call.body)
        return {"request_id": request_id, "model_id": run.id}

    async def get_info(self, call: Call) -> _Answer:
        run = self.models.find(call.fields().text("model_id", pattern=MODEL_ID), call.key_id)
        data = {"arch": "vision-language", "model_name": self.served.name, "tokenizer_id": self.served.name}
        shown = {"model_id": run.id, "is_lora": True, "lora_rank": run.lora_rank, "model_name": self.served.name}
        return {"type": "get_info", "model_data": data, **shown}

    async def forward_backward(self, call: Call) -> _Answer:
        if call.request.headers.get("content-type", "").partition(";")[0].strip().lower() != _PROTOBUF:
            raise RequestRefused(
                415, f"expected {_PROTOBUF}, which tinker sends from version 0.25 on, got another type"
            )
        message = await asyncio.to_thread(parse_message, "ForwardBackwardRequest", call.body)
        run = self.models.find(message.model_id, call.key_id)
        return await self._submit(run, Fields({"seq_id": message.seq_id}), "forward_backward", call.body)

    def model_request(self, kind: str) -> _Endpoint:
        """The endpoint of a request in JSON to a model."""

        async def endpoint(call: Call) -> _Answer:
            fields = call.fields()
            run = self.models.find(fields.text("model_id", pattern=MODEL_ID), call.key_id)
            return await self._submit(run, fields, kind, call.body)

        return endpoint

    async def _submit(self, run: ModelRun, fields: Fields, kind: str, body: bytes) -> _Answer:
        request_id = await self.models.submit(run, fields.whole("seq_id", 1, MAX_SEQ), kind, body)
        return {"request_id": request_id, "model_id": run.id}

    async def create_sampling_session(self, call: Call) -> _Answer:
        fields = call.fields()
        session_id = await self._session(call, fields.text("session_id"))
        sampler_id = await self.samplers.create(fields, session_id, call.key_id)
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    async def get_sampler(self, call: Call) -> _Answer:
        sampler_id = call.path("sampler_id")
        _, path = await self.samplers.find(sampler_id, call.key_id)
        return {"sampler_id": sampler_id, "base_model": self.served.name, "model_path": path}

    async def sample(self, call: Call) -> _Answer:
        fields = Fields.of(await parse_body(call.body))
        request_id, sequence_ids = await self.samplers.submit(fields, call.key_id)
        return {"request_id": request_id, "sample_sequence_ids": sequence_ids}

    async def retrieve_future(self, call: Call) -> _Answer:
        request_id = call.fields().text("request_id")
        model_id, _, number = request_id.rpartition(":")
        waits: dict[str, object] = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        if ":train:" not in request_id:
            try:
                samples = await self.samplers.answer(request_id, call.key_id, self.wait_s)
            except SampleFailed as failure:
                return {"error": str(failure), "category": failure.category}
            return waits if samples is None else Response(samples, media_type=_PROTOBUF)
        if not number.isdecimal() or len(number) > 10 or int(number) > MAX_SEQ:
            raise RequestRefused(404, f"expected the id of a request, got {request_id[:100]!r}")
        answer = await self.models.answer(self.models.find(model_id, call.key_id), int(number), self.wait_s)
        if isinstance(answer, str):
            reason = "other models are in the trainer; server setting max_models" if answer != "active" else None
            return {**waits, "queue_state": answer, "queue_state_reason": reason}
        status, kind, content = answer
        is_pass = kind == "forward_backward" and status == "done"
        return Response(content, media_type=_PROTOBUF if is_pass else "application/json")

    async def cancel_future(self, call: Call) -> _Answer:
        self.samplers.cancel(call.fields().text("request_id"), call.key_id)
        return {}


async def plain_body(request: Request, held: HeldBody) -> bytes:
    """The body, decompressed; raises `RequestRefused`, also for one that would be too large."""
    body = await read_body(request, held)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        return body
    if encoding != "zstd" or not _TAKES_ZSTD:
        expected = "a body without Content-Encoding" + (", or zstd" if _TAKES_ZSTD else "; zstd needs zstandard here")
        raise RequestRefused(415, f"expected {expected}, got {encoding[:100]!r}")
    zstandard, plain = importlib.import_module("zstandard"), bytearray()
    reader = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(BytesIO(body))
    try:
        while piece := await asyncio.to_thread(reader.read, _PIECE_BYTES):
            held.add(len(piece))
            plain += piece
    except zstandard.ZstdError as error:
        raise RequestRefused(400, f"expected a body in zstd, got another ({error})") from None
    return bytes(plain)


async def _healthy(request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _unknown(request: Request, error: Exception) -> Response:
    status = HTTPStatus.METHOD_NOT_ALLOWED if "405" in str(error) else HTTPStatus.NOT_FOUND
    return JSONResponse(
        {"error": f"expected an endpoint of this service, got {request.method}; it has no other"}, status
    )


async def _failed(request: Request, error: Exception) -> Response:
    logger.error("a request failed: %s", request.url.path, exc_info=error)
    return JSONResponse({"error": "the service failed; its log says why"}, 500)
