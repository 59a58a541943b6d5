"""The client of the model servers: publishes, verifies and unloads adapters; sends requests and retries them."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Self
from uuid import uuid4
from zlib import crc32

from cua_rl.errors import AdapterError, ConfigError, SamplingError, boundary
from cua_rl.policy import AdapterRef
from cua_rl.sampling.canary import Canary, canary_request, check_canary, parse_canary
from cua_rl.sampling.known_images import MISSING_DATA, KnownImages
from cua_rl.sampling.load import ServerLoad, fullest, parse_load
from cua_rl.sampling.server import ModelServer

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
_LOAD_PATH, _UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class RequestRejected(SamplingError):
    """The model server refuses this request; sending it again does not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the model server answered {status}: {message}")
        self.status = status
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerReply:
    """An answer of the server, and the adapter that produced it (None: the base model)."""

    body: Mapping[str, object]
    adapter: AdapterRef | None


class SamplingClient:
    """Requests to one or more replicas of the model server; an async context manager.

    A request that fails in transit is sent again, because sampling has no effect until the answer is recorded. On the
    servers, the name of an adapter ends with the client's `namespace`, so that runs which use a server at the same time
    or one after the other never share adapters or cached prompts.
    """

    def __init__(
        self,
        *servers: ModelServer,
        namespace: str | None = None,
        max_attempts: int = 10,
        request_timeout_s: float = 900.0,
    ) -> None:
        if not servers:
            raise ConfigError("expected at least one model server, got none")
        suffix = uuid4().hex[:8] if namespace is None else namespace
        self._replicas = [_Replica(server, suffix, max_attempts, request_timeout_s) for server in servers]
        self._uses: Counter[AdapterRef] = Counter()
        self._publishing = asyncio.Lock()
        self.current: AdapterRef | None = None
        """The announced adapter, which serves new requests; None, the base model, until one is published."""

    @property
    def max_model_len(self) -> int:
        """Maximum length of prompt plus answer on every replica, tokens."""
        return min(replica.server.model.max_model_len for replica in self._replicas)

    async def publish(self, adapter: AdapterRef, canary: Canary | None = None) -> None:
        """Load an adapter on every replica, verify it with the canary, announce it, and unload unused adapters.

        Raises:
            AdapterError: the server cannot load it, or the canary fails.
        """
        async with self._publishing:
            clock = time.monotonic()
            await asyncio.gather(*(replica.load(adapter) for replica in self._replicas))
            try:
                if canary is not None:
                    await asyncio.gather(*(replica.prove(adapter, canary) for replica in self._replicas))
            except BaseException:
                await asyncio.gather(*(replica.unload(adapter) for replica in self._replicas))
                raise
            self.current = adapter
            logger.info("published adapter=%s publish_s=%.3f", adapter.name, time.monotonic() - clock)
            needed = {adapter, *self._uses}
            for replica in self._replicas:
                for unused in [loaded for loaded in replica.loaded if loaded not in needed]:
                    await replica.unload(unused)

    async def probe(self, adapter: AdapterRef, canary: Canary) -> None:
        """Load an adapter that is never announced, verify it with the canary on every replica, and unload it.

        Raises:
            AdapterError: the server cannot load it, or the canary fails.
        """
        async with self._publishing:
            await asyncio.gather(*(replica.load(adapter) for replica in self._replicas))
            try:
                await asyncio.gather(*(replica.prove(adapter, canary) for replica in self._replicas))
            finally:
                await asyncio.gather(*(replica.unload(adapter) for replica in self._replicas))

    def pin(self, adapter: AdapterRef) -> None:
        """Keep an adapter until `unpin`; pins are counted."""
        self._uses[adapter] += 1

    def unpin(self, adapter: AdapterRef) -> None:
        """Undo one `pin`; the next publication unloads the adapter if it has no other use."""
        self._uses[adapter] -= 1
        if self._uses[adapter] <= 0:
            del self._uses[adapter]

    @asynccontextmanager
    async def pinned(self, adapter: AdapterRef) -> AsyncGenerator[AdapterRef]:
        """Keep an adapter loaded regardless of publications, for evaluations."""
        self.pin(adapter)
        try:
            await asyncio.gather(*(replica.load(adapter) for replica in self._replicas))
            yield adapter
        finally:
            self.unpin(adapter)

    async def respond(
        self, path: str, payload: Mapping[str, object], *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> ServerReply:
        """Post to a replica with the given or the current adapter as the model; equal keys reach the same replica.

        Raises:
            RequestRejected: the server refuses this request.
            SamplingError: no server answered in any attempt.
        """
        replica = self._replicas[crc32(sticky_key.encode()) % len(self._replicas)]
        used = adapter or self.current
        if used is None:
            return ServerReply(body=await replica.sample(replica.server.model.name, path, payload), adapter=None)
        self.pin(used)
        try:
            await replica.load(used)
            return ServerReply(body=await replica.sample(replica.name_of(used), path, payload), adapter=used)
        finally:
            self.unpin(used)

    async def fetch_load(self) -> ServerLoad:
        """Combined load of the replicas; raises `SamplingError` if one does not report it."""
        return fullest(await asyncio.gather(*(replica.fetch_load() for replica in self._replicas)))

    @property
    def loaded(self) -> tuple[AdapterRef, ...]:
        """The adapters on the first replica, oldest first."""
        return self._replicas[0].loaded

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for replica in self._replicas:
            await replica.close()


class _Replica:
    """One server and its adapters."""

    def __init__(self, server: ModelServer, namespace: str, max_attempts: int, request_timeout_s: float) -> None:
        from cua_rl.sampling.http_client import HttpClient  # aiohttp: 0.1 to 0.3 s that `--help` need not load

        self.server = server
        self._namespace = namespace
        self.http = HttpClient(server.base_url, timeout_s=request_timeout_s, api_key=server.api_key)
        self._max_attempts = max_attempts
        self._loads: dict[AdapterRef, asyncio.Task[None]] = {}
        self._images = KnownImages()
        server.on_restart(self._restore)

    def name_of(self, adapter: AdapterRef) -> str:
        """The adapter's name on the server."""
        return f"{adapter.name}-{self._namespace}"

    def _load_body(self, adapter: AdapterRef) -> dict[str, object]:
        return {"lora_name": self.name_of(adapter), "lora_path": str(adapter.path)}

    @property
    def loaded(self) -> tuple[AdapterRef, ...]:
        return tuple(
            adapter
            for adapter, load in self._loads.items()
            if load.done() and not load.cancelled() and load.exception() is None
        )

    async def load(self, adapter: AdapterRef) -> None:
        """Load an adapter once, however many callers ask for it."""
        load = self._loads.get(adapter)
        if load is None:
            load = self._loads[adapter] = asyncio.create_task(self._load(adapter), name=f"load-{adapter.name}")
        try:
            await asyncio.shield(load)
        except (SamplingError, AdapterError, ConfigError):
            self._loads.pop(adapter, None)
            raise

    async def _load(self, adapter: AdapterRef) -> None:
        try:
            await self._post(_LOAD_PATH, self._load_body(adapter), max_server_errors=2)
        except RequestRejected as rejected:
            if _is_loaded_already(rejected.message):  # by an earlier attempt, or after a restart
                return
            if rejected.status == HTTPStatus.NOT_FOUND and rejected.message == "Not Found":
                raise ConfigError(
                    "expected a server whose adapters can change while it runs, got none that knows "
                    f"{_LOAD_PATH}; start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                ) from rejected
            raise AdapterError(
                f"expected the model server to load adapter {adapter.name!r} from {adapter.path}, it answered "
                f"{rejected.status}: {rejected.message}"
            ) from rejected

    async def unload(self, adapter: AdapterRef) -> None:
        """Unload an adapter; it is no error if a restarted server does not know it."""
        if self._loads.pop(adapter, None) is None:
            return
        try:
            await self._post(_UNLOAD_PATH, {"lora_name": self.name_of(adapter)})
        except RequestRejected as rejected:
            logger.warning("cannot unload adapter=%s: %s", adapter.name, rejected)

    async def fetch_load(self) -> ServerLoad:
        """The server's load."""
        with boundary(SamplingError, f"read the load of {self.server.base_url}"):
            reply = await self.http.get("/metrics")
            if not reply.is_success:
                raise SamplingError(f"it answered {reply.status}: {reply.message}")
            return parse_load(reply.text)

    async def close(self) -> None:
        """Drop connections; a later restart of the server restores no adapters."""
        self._loads.clear()
        await self.http.close()

    async def prove(self, adapter: AdapterRef, canary: Canary) -> None:
        """Verify the adapter with the canary; raises `AdapterError` if it does not work."""
        path, request = canary_request(canary)
        base, served = await asyncio.gather(
            self.post_to(self.server.model.name, path, request),
            self.post_to(self.name_of(adapter), path, request),
        )
        change, difference = check_canary(
            adapter, canary, served=parse_canary(served, canary), base=parse_canary(base, canary)
        )
        logger.info("proved adapter=%s change_from_base=%.2e trainer_difference=%s", adapter.name, change, difference)

    async def sample(self, model: str, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        """Post a request without the images that the server has; all of them if it has dropped one."""
        if not self.server.model.takes_image_names:
            return await self.post_to(model, path, payload)
        shortened = self._images.leave_out(payload)
        try:
            body = await self.post_to(model, path, shortened)
        except RequestRejected as rejected:
            if shortened is payload or MISSING_DATA not in rejected.message:
                raise
            logger.info("the model server at %s dropped a screenshot, sending all of a prompt", self.server.base_url)
            self._images.forget(payload)
            body = await self.post_to(model, path, payload)
        self._images.add(payload)
        return body

    async def post_to(self, model: str, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        """Post a request to a model by name; an adapter that the server has lost is loaded again once."""
        try:
            return await self._post(path, {**payload, "model": model})
        except RequestRejected as rejected:
            if rejected.status != HTTPStatus.NOT_FOUND or model not in map(self.name_of, self._loads):
                raise
        logger.warning("the model server at %s lost model=%s, loading it again", self.server.base_url, model)
        await self._restore()
        return await self._post(path, {**payload, "model": model})

    async def _restore(self) -> None:
        """Load all adapters again on a server that has lost them."""
        for adapter in self.loaded:
            with boundary(SamplingError, f"load adapter {adapter.name!r} again on {self.server.base_url}"):
                reply = await self.http.post(_LOAD_PATH, self._load_body(adapter))
            if not reply.is_success and not _is_loaded_already(reply.message):
                raise SamplingError(f"cannot load adapter {adapter.name!r} again: {reply.message}")

    async def _post(
        self, path: str, payload: Mapping[str, object], *, max_server_errors: int | None = None
    ) -> Mapping[str, object]:
        """Post until the server answers or refuses, through restarts; `max_server_errors` 5xx count as a refusal."""
        delay_s, failure, num_server_errors = _FIRST_DELAY_S, "", 0
        for attempt in range(self._max_attempts):
            if attempt:
                logger.info("retry attempt=%d path=%s after %s", attempt, path, failure)
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _MAX_DELAY_S)
            await self.server.wait_until_ready()
            try:
                reply = await self.http.post(path, payload)
            except (ConnectionError, TimeoutError) as error:
                failure = str(error) or type(error).__name__
                continue
            if reply.is_success:
                return reply.json
            num_server_errors += not reply.is_client_error
            if reply.is_client_error or num_server_errors == max_server_errors:
                raise RequestRejected(reply.status, reply.message)
            failure = f"status {reply.status}: {reply.message}"
        raise SamplingError(
            f"expected an answer from {self.server.base_url}{path}, got none in {self._max_attempts} attempts; "
            f"the last one failed with {failure}"
        )


def _is_loaded_already(message: str) -> bool:
    return "already been loaded" in message
