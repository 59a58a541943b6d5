"""A replica: one model server, the adapters loaded on it, and the images in its cache."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Collection, Mapping, Sequence
from contextlib import suppress
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


def advice_for(rejected: RequestRejected, *, has_adapter: bool) -> str | None:
    """What to change after a rejection that depends on the configuration; None if only this request is at fault."""
    # Such a rejection stops the run. As a fault of single rollouts it would bias the data towards short rollouts, which
    # never trigger it.
    if "may be provided in one prompt" in rejected.message:
        return (
            "start the server with a larger --limit-mm-per-prompt, such as '{\"image\": 64}', or let the model see "
            "fewer screenshots (history=block_drop, history_images, max_turns)"
        )
    match rejected.status:
        case HTTPStatus.NOT_FOUND if not has_adapter:  # an adapter may be lost in a restart
            return "check that the server still serves the model that the run began with"
        case HTTPStatus.UNAUTHORIZED | HTTPStatus.FORBIDDEN:
            return "check that the server answers without a key, or start one without"
        case _:
            return None


class ReplicaLost(SamplingError):
    """The model server does not answer, or was started again: another one takes its requests, or they wait."""


class Replica:
    """One server and its adapters.

    A request fails with `ReplicaLost` at the second connection failure (without siblings only if the server is not
    healthy), or if the server no longer has its adapter. Others that fail are sent `max_attempts` times in all.
    """

    def __init__(
        self, server: ModelServer, *, namespace: str, max_attempts: int, stall_timeout_s: float, has_siblings: bool
    ) -> None:
        from cua_rl.sampling.http_client import HttpClient  # aiohttp: 0.1 to 0.3 s that `--help` does not need

        self.server = server
        self.lost = asyncio.Event()
        """Set while it is out of service and gets no requests."""
        self.why_lost = ""
        self.is_given_up = False
        """Whether its server is not started again."""
        self.num_requests = 0
        """Open requests."""
        self.loads_adapters = True
        """False if another process of the run proves the server and loads adapters."""
        self._first_model = server.model
        self._namespace = namespace
        self._http = HttpClient(server.base_url, api_key=server.api_key)
        self._stall_timeout_s = stall_timeout_s
        self._max_attempts = max_attempts
        self._has_siblings = has_siblings
        self._loads: dict[AdapterRef, asyncio.Task[None]] = {}  # least recently used first
        self._changing = asyncio.Lock()  # one change at a time: an adapter may leave and come back at once
        self._images = KnownImages()
        self._keeps_images = True

    @property
    def is_lost(self) -> bool:
        """Whether it is out of service."""
        return self.lost.is_set()

    def name_of(self, adapter: AdapterRef) -> str:
        return f"{adapter.name}-{self._namespace}"

    async def _path_there(self, adapter: AdapterRef) -> str:
        """The path from which the server loads an adapter, after its files are uploaded if it cannot read ours."""
        if not self.server.model.takes_adapters:
            return str(adapter.path)
        name = self.name_of(adapter)
        reply = await self._upload_request(self._http.get(f"{UPLOAD_PATH}/{name}"))
        for file in () if reply.is_success else ADAPTER_FILES:
            path = adapter.path / file
            reply = await self._upload_request(self._http.put(f"{UPLOAD_PATH}/{name}/{file}", path))
            if not reply.is_success:
                raise AdapterError(
                    f"expected {self.server.base_url} to take {path}, got {reply.status}: {reply.message}"
                )
        return str(reply.json["path"])  # changes when the server restarts

    async def _upload_request(self, asked: Awaitable["HttpReply"]) -> "HttpReply":
        try:
            return await asked
        except (ConnectionError, TimeoutError, FileNotFoundError) as error:
            kind = SamplingError if isinstance(error, FileNotFoundError) else ReplicaLost
            raise kind(f"cannot send an adapter to {self.server.base_url}: {error}") from error

    @property
    def loaded(self) -> tuple[AdapterRef, ...]:
        """Its adapters, least recently used first."""
        return tuple(
            adapter
            for adapter, load in self._loads.items()
            if load.done() and not load.cancelled() and load.exception() is None
        )

    async def load(self, adapter: AdapterRef) -> None:
        """Load an adapter, unless another process does; concurrent calls share one request."""
        if not self.loads_adapters:
            return
        load = self._loads.pop(adapter, None)
        if load is None:
            loading = self._load(self.name_of(adapter), adapter)
            load = asyncio.create_task(loading, name=f"load-{adapter.name}")
        self._loads[adapter] = load
        try:
            await asyncio.shield(load)
        except (SamplingError, AdapterError, ConfigError):
            if self._loads.get(adapter) is load:  # no other caller has begun another one
                del self._loads[adapter]
            raise

    async def _load(self, name: str, adapter: AdapterRef) -> None:
        try:
            async with self._changing:
                body = {"lora_name": name, "lora_path": await self._path_there(adapter)}
                await self._post(_LOAD_PATH, body, max_server_errors=2)
        except RequestRejected as rejected:
            if "already been loaded" in rejected.message:  # by an earlier attempt
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
            async with self._changing:
                await self._post(_UNLOAD_PATH, {"lora_name": self.name_of(adapter)})
                if self.server.model.takes_adapters:
                    await self._http.delete(f"{UPLOAD_PATH}/{self.name_of(adapter)}")
        except ReplicaLost:
            raise
        except (SamplingError, ConnectionError, TimeoutError) as error:
            logger.warning("cannot unload adapter=%s: %s", adapter.name, error)

    async def unload_all_but(self, needed: Collection[AdapterRef], num_kept: int = 0) -> None:
        """Unload adapters that are not needed, least recently used first, while there are more than `num_kept`."""
        for adapter in self.loaded:
            if len(self._loads) > num_kept and adapter not in needed:
                await self.unload(adapter)

    async def rejoin(self, needed: Collection[AdapterRef], current: AdapterRef | None, canary: Canary | None) -> None:
        """Prove a server that was away, then load the needed adapters again; others come back with their next request.

        It may have been started with other weights, and then has no adapters. None gets its name there before the
        server has proven itself with the current one under another name: requests of other processes are refused.
        Raises `AdapterError` if it fails, `ConfigError` for another model if there are no numbers of a trainer.
        """
        if (canary is None or canary.training_logprobs is None) and self.server.model != self._first_model:
            raise ConfigError(
                f"expected {self._first_model} at {self.server.base_url} as before, got {self.server.model}; start the "
                "same again"
            )
        if current is not None and canary is not None:
            name = f"proof-of-{self.name_of(current)}"
            await self._load(name, current)
            try:
                await self.prove(current, canary, name)
            finally:
                with suppress(SamplingError):
                    await self._post(_UNLOAD_PATH, {"lora_name": name})
        await self.unload_all_but(needed)
        for adapter in needed:
            self._loads.pop(adapter, None)
        await asyncio.gather(*map(self.load, needed))

    async def disconnect(self) -> None:
        """Abort open requests, whose connections may be dead without an error."""
        await self._http.close()

    async def is_healthy(self, adapters: Collection[AdapterRef] = ()) -> bool:
        """Whether the server answers; raises `ReplicaLost` if it lacks adapters, because it was started again."""
        try:
            is_healthy = (await self._http.get("/health")).is_success
            if not adapters or not is_healthy:
                return is_healthy
            models = (await self._http.get("/v1/models")).json["data"]
        except (ConnectionError, TimeoutError, ValueError, KeyError):
            return False
        listed = {mapping(card).get("id") for card in sequence(models)}
        needed = [one for one in adapters if one in self._loads or not self.loads_adapters]  # not unloaded meanwhile
        if lacking := [name for name in map(self.name_of, needed) if name not in listed]:
            raise self._started_again(lacking)
        return True

    def _started_again(self, lacking: Sequence[str]) -> ReplicaLost:
        return ReplicaLost(
            f"expected {', '.join(lacking)} on the model server at {self.server.base_url}, got none: it was started "
            "again and has not passed the canary yet"
        )

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

    async def prove(self, adapter: AdapterRef, canary: Canary, name: str | None = None) -> tuple[float, float | None]:
        """Verify an adapter, loaded as `name`, with `check_canary`; returns its values, raises its `AdapterError`."""
        path, request = canary_request(canary)
        base, served = await asyncio.gather(
            self.post_to(self.server.model.name, path, request),
            self.post_to(name or self.name_of(adapter), path, request),
        )
        try:
            change, difference = check_canary(
                adapter, canary, served=parse_canary(served, canary), base=parse_canary(base, canary)
            )
        except AdapterError as error:
            raise AdapterError(f"model server at {self.server.base_url}: {error}") from error
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
        """Post a request to a model by name; raises `ReplicaLost` if it is an adapter that the server does not have."""
        try:
            return await self._post(path, {**payload, "model": model})
        except RequestRejected as rejected:
            if rejected.status != HTTPStatus.NOT_FOUND or model == self.server.model.name:
                raise
            raise self._started_again([model]) from rejected

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
        """Post until the server accepts or rejects; `max_server_errors` 5xx count as a rejection."""
        failure, num_server_errors = "", 0
        delays_s = (min(_FIRST_DELAY_S * 2**index, _MAX_DELAY_S) for index in range(self._max_attempts - 1))
        for delay_s in (0.0, *delays_s):
            if delay_s:
                logger.info("retry path=%s after %s", path, failure)
                await asyncio.sleep(delay_s)
                if self.is_lost:  # it may still answer, with errors
                    raise ReplicaLost(f"the model server at {self.server.base_url} is lost: {failure}")
            try:
                reply = await self._answered(path, payload)
            except ServerStalled as error:  # it would stall again: the rollout is tried again, here or on another one
                kind = SamplingError if not self._has_siblings and await self.is_healthy() else ReplicaLost
                raise kind(f"the model server at {self.server.base_url} has stalled: {error}") from error
            except (ConnectionError, TimeoutError) as error:
                failure = str(error) or type(error).__name__
                # the only server may drop single connections, as proxies do: others that it answers shall not end
                if self.is_lost or (delay_s and (self._has_siblings or not await self.is_healthy())):
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
