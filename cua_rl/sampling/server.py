"""The model server: one that the run starts, monitors and restarts, or an external one."""

import asyncio
import logging
import os
import re
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self

import httpx

from cua_rl.host.masking import make_key
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import computing_prefix
from cua_rl.sampling.adapter_upload import UPLOAD_PATH
from cua_rl.sampling.address import API_KEY_VARIABLE, server_client, split_address
from cua_rl.sampling.config import START_TIMEOUT_S, ServerConfig
from cua_rl.sampling.known_images import takes_names
from cua_rl.sampling.vllm_command import vllm_command, vllm_environment
from cua_rl.types.errors import ConfigError, SamplingError

logger = logging.getLogger(__name__)

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server's base model."""

    name: str
    max_model_len: int
    """Maximum length of prompt plus answer, tokens."""
    root: str | None = None
    """Folder or hub id that it was loaded from, if the server says."""
    version: str | None = None
    """Of vLLM, if the server says."""
    takes_adapters: bool = False
    """Whether adapters are uploaded to it (`adapter_upload.py`); otherwise it reads them from our paths."""
    takes_image_names: bool = False
    """Whether requests may name cached images instead of sending them again."""


class VllmServer:
    """A vLLM server process owned by the run; an async context manager, ready when entered.

    It listens on a Unix socket in a folder that other users cannot enter, or on a loopback port if one is configured,
    and requires the key. If it dies, it is restarted at the same address, at most `max_restarts` times without having
    served for `steady_s` in between.
    """

    def __init__(
        self,
        config: ServerConfig,
        log_path: Path,
        *,
        make_command: Callable[[ServerConfig, str], Sequence[str]] = vllm_command,
        max_restarts: int = 5,
        backoff_s: float = 1.0,
        steady_s: float = 600.0,
    ) -> None:
        self._config = config
        self._log_path = log_path
        self._make_command = make_command
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._steady_s = steady_s
        self._num_deaths = 0
        """Without steady service in between."""
        self._folder = Path()
        self.base_url = ""
        self._process: OwnedProcess | None = None
        self._model: ServedModel | None = None
        self._ready = asyncio.Event()
        self._failure: str | None = None
        self._watch: asyncio.Task[None] | None = None
        self.num_restarts = 0
        self.api_key = os.environ.get(API_KEY_VARIABLE) or make_key()
        """From the environment, so that the user's other programs can use the server, else a random one."""

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise RuntimeError("the model server was not started")
        return self._model

    async def wait_until_ready(self) -> None:
        """Wait for the end of a restart; raises `SamplingError` if the server was given up."""
        await self._ready.wait()
        if self._failure is not None:
            raise SamplingError(self._failure)

    async def refresh(self) -> None:
        """Does nothing: a restarted server serves the same model."""

    async def __aenter__(self) -> Self:
        if self._config.port is not None:
            try:
                self.base_url = f"http://{self._config.host}:{free_port(self._config.port, self._config.host)}"
            except OSError as error:
                raise ConfigError(
                    f"expected a free port for the model server, got port {self._config.port} of "
                    f"{self._config.host} ({error.strerror}); "
                    "end what listens there, choose another port, or give none"
                ) from error
        self._folder = await asyncio.to_thread(make_scratch_folder, "vllm")  # other users cannot enter it
        self.base_url = self.base_url or f"unix:{self._folder / 'vllm.sock'}"
        try:
            await self._start()
        except BaseException:
            await self._close()
            raise
        self._ready.set()
        self._watch = asyncio.create_task(self._keep_alive(), name="watch-model-server")
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            with suppress(asyncio.CancelledError):
                await self._watch
        await self._close()

    async def _start(self) -> None:
        clock = time.monotonic()
        command = self._make_command(self._config, self.base_url)
        _, socket_path = split_address(self.base_url)
        if socket_path is not None:
            await asyncio.to_thread(Path(socket_path).unlink, missing_ok=True)  # left by a server that was killed
        environment = vllm_environment(self._config, self.api_key, self._folder)
        command = [*await asyncio.to_thread(computing_prefix), *command]
        self._process = OwnedProcess(command, name="vllm", log_path=self._log_path, environment=environment)
        await self._process.start()
        limit_s = self._config.start_timeout_s or START_TIMEOUT_S
        try:
            async with asyncio.timeout(limit_s):
                self._model = await self._first_answer(self._process)
        except TimeoutError as error:
            raise SamplingError(
                f"expected the model server to answer within {limit_s:.0f} s, it did not; "
                f"raise start_timeout_s or read {self._log_path}, which ends:\n{self._process.log_tail()}"
            ) from error
        logger.info("model server ready url=%s start_s=%.1f", self.base_url, time.monotonic() - clock)

    async def _first_answer(self, process: OwnedProcess) -> ServedModel:
        async with server_client(self.base_url, self.api_key) as client:
            while True:
                if not process.is_running:
                    status = await process.wait()
                    log = process.log_tail(200)
                    # the first exception is the cause; later ones mostly come from processes that lost their peer
                    found = re.search(r"\b\w+(?:Error|Exception): \S.*", log)
                    cause = found.group() if found else "no exception in its log"
                    raise SamplingError(
                        f"the model server ended with status {status} before it answered: {cause}; "
                        f"{self._log_path} ends:\n{log[-2000:]}"
                    )
                with suppress(httpx.TransportError):
                    if (await client.get("/health")).status_code == HTTPStatus.OK:
                        return await fetch_model(client)
                await asyncio.sleep(_POLL_S)

    async def _stop(self) -> None:
        if self._process is not None:
            await self._process.stop()

    async def _close(self) -> None:
        await self._stop()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _keep_alive(self) -> None:
        while self._failure is None:
            assert self._process is not None
            began = time.monotonic()
            status = await self._process.wait()
            self._ready.clear()
            if time.monotonic() - began >= self._steady_s:
                self._num_deaths = 0
            logger.error("model server ended status=%d; the log ends:\n%s", status, self._process.log_tail(10))
            await self._stop()
            try:
                await self._restart(status)
            except SamplingError as error:
                self._failure = str(error)
            self._ready.set()

    async def _restart(self, status: int) -> None:
        """Start again; a failed start counts as another crash."""
        while True:
            self._num_deaths += 1
            if self._num_deaths > self._max_restarts:
                raise SamplingError(
                    f"the model server died {self._num_deaths} times, the last time with status {status}, "
                    f"and is given up; read {self._log_path}"
                )
            await asyncio.sleep(self._backoff_s * 2 ** (self._num_deaths - 1))
            self.num_restarts += 1
            try:
                await self._start()
            except (SamplingError, httpx.HTTPError, OSError) as error:  # the machine may be short of descriptors
                logger.error("restart of the model server failed num_restarts=%d %s", self.num_restarts, error)
                await self._stop()
                continue
            logger.warning("model server restarted num_restarts=%d", self.num_restarts)
            return


class ExternalServer:
    """An external server at `base_url` (with or without `/v1`), which the run never starts or stops.

    Its key is `api_key`, or that of the environment. If `model` is given, the server may be down when entered.
    """

    def __init__(
        self,
        base_url: str,
        environ: Mapping[str, str] = os.environ,
        *,
        api_key: str | None = None,
        model: ServedModel | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key or environ.get(API_KEY_VARIABLE) or None
        self._model = model

    @property
    def model(self) -> ServedModel:
        if self._model is None:
            raise RuntimeError("the model server was not asked yet")
        return self._model

    async def wait_until_ready(self) -> None:
        """An external server is assumed to be ready."""

    async def refresh(self) -> None:
        """Fetch what it serves now; raises `ConfigError` if there is no vLLM server at the address."""
        async with ask_model_server(self.base_url, self.api_key) as (_, model):
            self._model = model

    async def __aenter__(self) -> Self:
        """Raises `ConfigError` if there is no vLLM server at the address, unless `model` was given."""
        if self._model is None:
            await self.refresh()
        return self

    async def __aexit__(self, *error: object) -> None:
        return None


ModelServer = VllmServer | ExternalServer
"""A vLLM server, as the sampling client sees it."""


def require_one_version(servers: Sequence[ModelServer]) -> None:
    """Raise `ConfigError` for servers of several versions of vLLM: their log-probabilities would differ."""
    versions = {server.base_url: server.model.version for server in servers}
    if len(set(versions.values())) > 1:
        raise ConfigError(
            f"expected model servers of one version of vLLM, got {versions!r}; install the same version on all"
        )


@asynccontextmanager
async def ask_model_server(
    base_url: str, api_key: str | None, timeout_s: float = 10.0
) -> AsyncGenerator[tuple[httpx.AsyncClient, ServedModel]]:
    """A client of the vLLM server there, and the model that it serves; raises `ConfigError` if none answers."""
    try:
        async with server_client(base_url, api_key, timeout_s) as client:
            yield client, await fetch_model(client)
    # other servers answer with JSON of any form
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"base_url: expected a vLLM server at {base_url!r}, got {type(error).__name__}: {error}; start one "
            f"there, set {API_KEY_VARIABLE} to its key, or leave base_url out"
        ) from error


async def fetch_model(client: httpx.AsyncClient) -> ServedModel:
    """Fetch a server's base model: the one that is not an adapter of another."""
    response = await client.get("/v1/models")
    response.raise_for_status()
    cards: list[Mapping[str, Any]] = response.json()["data"]
    # other model servers have neither of these
    said, takes = await client.get("/version"), await client.get(UPLOAD_PATH)
    version = str(said.json().get("version")) if said.is_success else None
    for card in cards:
        if card.get("parent") is None:
            return ServedModel(
                name=str(card["id"]),
                max_model_len=int(card["max_model_len"]),
                root=card.get("root") or None,
                version=version,
                takes_adapters=takes.is_success,
                takes_image_names=version is not None and takes_names(version),
            )
    raise ValueError(f"expected a base model among {[card.get('id') for card in cards]!r}")
