"""A replica: one model server, the adapters loaded on it, and the images in its cache."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from cua_rl.sampling.adapter_upload import ADAPTER_FILES, UPLOAD_PATH
from cua_rl.sampling.canary import Canary, canary_request, check_canary, parse_canary
from cua_rl.sampling.known_images import MISSING_DATA, KnownImages
from cua_rl.sampling.load import ServerLoad, parse_load
from cua_rl.sampling.progress import ServerStalled, wait_while_progressing
from cua_rl.sampling.server import ModelServer
from cua_rl.types.errors import AdapterError, ConfigError, SamplingError, boundary
from cua_rl.types.json_values import mapping, sequence
from cua_rl.types.rollout import AdapterRef

if TYPE_CHECKING:
    from cua_rl.sampling.http_client import HttpReply

logger = logging.getLogger(__name__)

_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 5.0
_SPEED_TOKENS = 32
_LOAD_PATH, _UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class RequestRejected(SamplingError):
    """The model server rejects this request; a retry would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the model server answered {status}: {message}")
        self.status = status
        self.message = message


class ReplicaLost(SamplingError):
    """The model server does not answer, and another replica can take its requests."""


class Replica:
    """One server and its adapters.

    Without siblings, a request waits while the server restarts, and is sent up to `max_attempts` times. With siblings,
    it fails with `ReplicaLost` at the second connection failure, because another replica can answer it.
    """

    def __init__(
        self, server: ModelServer, *, namespace: str, max_attempts: int, stall_timeout_s: float, has_siblings: bool
    ) -> None:
        from cua_rl.sampling.http_client import HttpClient  # aiohttp: 0.1 to 0.3 s that `--help` does not need

        self.server = server
        self.is_lost = False
        """Whether it is out of service and gets no requests."""
        self.failure: str | None = None
        """Why its server was given up."""
        self.num_requests = 0
        """Open requests."""
        self._namespace = namespace
        self._http = HttpClient(server.base_url, api_key=server.api_key)
        self._stall_timeout_s = stall_timeout_s
        self._max_attempts = max_attempts
        self._has_siblings = has_siblings
        self._loads: dict[AdapterRef, asyncio.Task[None]] = {}
        self._images = KnownImages()
        self._keeps_images = True
        server.on_restart(self._restore_all)

    def name_of(self, adapter: AdapterRef) -> str:
        return f"{adapter.name}-{self._namespace}"

    async def _load_body(self, adapter: AdapterRef) -> dict[str, object]:
        """The body of the request to load an adapter, after its files are uploaded if the server cannot read them."""
        name = self.name_of(adapter)
        if not self.server.model.takes_adapters:
            return {"lora_name": name, "lora_path": str(adapter.path)}
        reply = await self._find_upload(adapter)
        for file in () if reply.is_success else ADAPTER_FILES:
            path = adapter.path / file
            reply = await self._upload_request(partial(self._http.put, f"{UPLOAD_PATH}/{name}/{file}", path))
            if not reply.is_success:
                raise AdapterError(
                    f"expected {self.server.base_url} to take {path}, got {reply.status}: {reply.message}"
                )
        return {"lora_name": name, "lora_path": reply.json["path"]}  # changes when the server restarts

    async def _find_upload(self, adapter: AdapterRef) -> "HttpReply":
        """Ask for the files of an adapter; if this host has none, wait for its publisher to upload them again."""
        delays_s = iter(_delays_s(self._max_attempts))
        while True:
            reply = await self._upload_request(partial(self._http.get, f"{UPLOAD_PATH}/{self.name_of(adapter)}"))
            if reply.is_success or adapter.path.exists() or (delay_s := next(delays_s, None)) is None:
                return reply
            await asyncio.sleep(delay_s)

    async def _upload_request(self, send: Callable[[], Awaitable["HttpReply"]]) -> "HttpReply":
        delays_s = iter(() if self._has_siblings else _delays_s(self._max_attempts - 1))
        while True:
            try:
                return await send()
            except (ConnectionError, TimeoutError, FileNotFoundError) as error:
                is_gone = isinstance(error, FileNotFoundError)
                if is_gone or (delay_s := next(delays_s, None)) is None:
                    lost = ReplicaLost if self._has_siblings and not is_gone else SamplingError
                    raise lost(f"cannot send an adapter to {self.server.base_url}: {error}") from error
            await asyncio.sleep(delay_s)

    @property
    def loaded(self) -> tuple[AdapterRef, ...]:
        """Its adapters, oldest first."""
        return tuple(
            adapter
            for adapter, load in self._loads.items()
            if load.done() and not load.cancelled() and load.exception() is None
        )

    async def load(self, adapter: AdapterRef) -> None:
        """Load an adapter; concurrent calls share one request."""
        load = self._loads.get(adapter)
        if load is None:
            load = self._loads[adapter] = asyncio.create_task(self._load(adapter), name=f"load-{adapter.name}")
        try:
            await asyncio.shield(load)
        except (SamplingError, AdapterError, ConfigError):
            if self._loads.get(adapter) is load:  # no other caller has begun another one
                del self._loads[adapter]
            raise

    async def _load(self, adapter: AdapterRef) -> None:
        try:
            await self._post(_LOAD_PATH, await self._load_body(adapter), max_server_errors=2)
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
        """Unload an adapter; a failure is only logged, because a restarted server may not know the adapter."""
        if self._loads.pop(adapter, None) is None:
            return
        try:
            await self._post(_UNLOAD_PATH, {"lora_name": self.name_of(adapter)})
            if self.server.model.takes_adapters:
                await self._http.delete(f"{UPLOAD_PATH}/{self.name_of(adapter)}")
        except ReplicaLost:
            raise
        except (SamplingError, ConnectionError, TimeoutError) as error:
            logger.warning("cannot unload adapter=%s: %s", adapter.name, error)

    async def unload_all_but(self, needed: Collection[AdapterRef]) -> None:
        for unused in [adapter for adapter in self.loaded if adapter not in needed]:
            await self.unload(unused)

    def forget_all_but(self, needed: Collection[AdapterRef]) -> None:
        """Stop tracking the other adapters, which the process that published them unloads."""
        for adapter in [loaded for loaded in self.loaded if loaded not in needed]:
            del self._loads[adapter]

    async def rejoin(self, adapters: Iterable[AdapterRef]) -> None:
        """Load adapters again; others go at the next publication. Raises `SamplingError` or `AdapterError`."""
        needed = set(adapters)
        for adapter in needed:
            self._loads.pop(adapter, None)  # the server may have been restarted
        await asyncio.gather(*map(self.load, needed))

    async def disconnect(self) -> None:
        """Abort open requests, whose connections may be dead without an error."""
        await self._http.close()

    async def is_healthy(self) -> bool:
        """Whether the server answers its health check."""
        try:
            return (await self._http.get("/health")).is_success
        except (ConnectionError, TimeoutError):
            return False

    async def fetch_load(self) -> ServerLoad:
        with boundary(SamplingError, f"read the load of {self.server.base_url}"):
            reply = await self._http.get("/metrics")
            if not reply.is_success:
                raise SamplingError(f"it answered {reply.status}: {reply.message}")
            return parse_load(reply.text)

    async def close(self) -> None:
        """Drop connections; a later restart of the server restores no adapters."""
        self._loads.clear()
        await self._http.close()

    async def prove(self, adapter: AdapterRef, canary: Canary) -> tuple[float, float | None]:
        """Verify the adapter with `check_canary`; returns its values and raises its `AdapterError`."""
        path, request = canary_request(canary)
        base, served = await asyncio.gather(
            self.post_to(self.server.model.name, path, request), self.post_to(self.name_of(adapter), path, request)
        )
        change, difference = check_canary(
            adapter, canary, served=parse_canary(served, canary), base=parse_canary(base, canary)
        )
        logger.info("proved adapter=%s change_from_base=%.2e trainer_difference=%s", adapter.name, change, difference)
        return change, difference

    async def sample(self, model: str, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        """Post without the images in the cache; with all if one was evicted, and from then on if there is no cache."""
        if not (self.server.model.takes_image_names and self._keeps_images):
            return await self.post_to(model, path, payload)
        shortened = self._images.leave_out(payload)
        try:
            body = await self.post_to(model, path, shortened)
        except RequestRejected as rejected:
            if shortened is payload or rejected.status != HTTPStatus.BAD_REQUEST:
                raise
            self._images.forget(payload)
            body = await self.post_to(model, path, payload)  # raises if the images were not the reason
            if MISSING_DATA in rejected.message:
                logger.info("the model server at %s dropped a screenshot, sent all of a prompt", self.server.base_url)
            else:
                logger.warning("the model server at %s keeps no screenshots, sending all", self.server.base_url)
                self._keeps_images = False
        self._images.add(payload)
        return body

    async def post_to(self, model: str, path: str, payload: Mapping[str, object]) -> Mapping[str, object]:
        """Post a request to a model by name; an adapter missing on the server is loaded again, once."""
        try:
            return await self._post(path, {**payload, "model": model})
        except RequestRejected as rejected:
            lost = [adapter for adapter in self._loads if self.name_of(adapter) == model]
            if rejected.status != HTTPStatus.NOT_FOUND or not lost:
                raise
        logger.warning("the model server at %s lost model=%s, loading it again", self.server.base_url, model)
        await self._restore(lost[0])
        return await self._post(path, {**payload, "model": model})

    async def restore_lost(self) -> None:
        """Load adapters that a restarted server lacks, if their files are here; raises `SamplingError`."""
        known = self.loaded
        with boundary(SamplingError, f"read the models of {self.server.base_url}"):
            reply = await self._http.get("/v1/models")
            listed = {mapping(card)["id"] for card in sequence(reply.json["data"])}
        for adapter in known:
            if self.name_of(adapter) not in listed and adapter in self._loads and adapter.path.exists():
                await self._restore(adapter)

    async def _restore_all(self) -> None:
        """Load all adapters again after a restart; a lost replica loads those in use when it rejoins."""
        for adapter in () if self.is_lost else self.loaded:
            await self._restore(adapter)

    async def _restore(self, adapter: AdapterRef) -> None:
        """Load an adapter again on a server that no longer has it."""
        with boundary(SamplingError, f"load adapter {adapter.name!r} again on {self.server.base_url}"):
            reply = await self._http.post(_LOAD_PATH, await self._load_body(adapter))
        if not reply.is_success and not _is_loaded_already(reply.message):
            raise SamplingError(f"cannot load adapter {adapter.name!r} again: {reply.message}")

    async def measure_speed(self, tokens: Sequence[int]) -> float:
        """Tokens per second of one answer to a short prompt, from the base model."""
        body = {"prompt": list(tokens), "max_tokens": _SPEED_TOKENS, "ignore_eos": True, "temperature": 0.0}
        started = time.monotonic()
        await self.post_to(self.server.model.name, "/v1/completions", body)
        return _SPEED_TOKENS / (time.monotonic() - started)

    async def _answered(self, path: str, payload: Mapping[str, object]) -> "HttpReply":
        """The reply, waited for as long as the server makes progress; raises `ServerStalled`."""
        return await wait_while_progressing(
            self._http.post(path, payload),
            self._load_if_known,
            stall_timeout_s=self._stall_timeout_s,
            max_tokens=self.server.model.max_model_len,  # others may share the server, and ask for longer answers
        )

    async def _load_if_known(self) -> ServerLoad | None:
        try:
            return await self.fetch_load()
        except SamplingError:
            return None

    async def _post(
        self, path: str, payload: Mapping[str, object], *, max_server_errors: int | None = None
    ) -> Mapping[str, object]:
        """Post until the server accepts or rejects, across restarts; `max_server_errors` 5xx count as a rejection."""
        failure, num_server_errors = "", 0
        for delay_s in (0.0, *_delays_s(self._max_attempts - 1)):
            if delay_s:
                logger.info("retry path=%s after %s", path, failure)
                await asyncio.sleep(delay_s)
                if self._has_siblings and self.is_lost:  # it may still answer, with errors
                    raise ReplicaLost(f"the model server at {self.server.base_url} is lost: {failure}")
            if not self._has_siblings:
                await self.server.wait_until_ready()
            try:
                reply = await self._answered(path, payload)
            except ServerStalled as error:  # it would stall again: the rollout is tried again, here or on another one
                kind = ReplicaLost if self._has_siblings else SamplingError
                raise kind(f"the model server at {self.server.base_url} has stalled: {error}") from error
            except (ConnectionError, TimeoutError) as error:
                failure = str(error) or type(error).__name__
                if self._has_siblings and (delay_s or self.is_lost):
                    raise ReplicaLost(f"the model server at {self.server.base_url} is lost: {failure}") from error
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


def _delays_s(num: int) -> list[float]:
    return [min(_FIRST_DELAY_S * 2**index, _MAX_DELAY_S) for index in range(num)]


def _is_loaded_already(message: str) -> bool:
    return "already been loaded" in message
