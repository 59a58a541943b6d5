"""Model servers for runs on other hosts: one on this host, or several on nodes of a Ray cluster.

Runs know each server by its address. So one whose node is lost waits for that node, and is not started elsewhere.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import chz

from cua_rl.cluster import (
    PACKAGE,
    ActorLost,
    Cluster,
    ClusterLost,
    check_address,
    digest_of,
    node_address,
    open_cluster,
    require_code,
)
from cua_rl.command_line.fields import Given, check_numbers, setting, with_presets, with_values
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.host.processes import free_port
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.system import refuse_inspection
from cua_rl.machine.gpus import plan_gpus, visible_gpus
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.run.preflight import require_vllm_args
from cua_rl.run_folder.model_folder import fetch_weights, find_max_model_len, find_model, start_limit_s
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.config import ServerConfig, max_lora_rank
from cua_rl.sampling.server import VllmServer
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import ConfigError, CuaError, boundary

logger = logging.getLogger(__name__)

_PLACE_TIMEOUT_S = 600.0  # nodes are allocated
_PAUSE_S = 5.0  # before a server that has ended is started again


FOR_OTHER_HOSTS: dict[str, object] = {"server.port": 8000}
SERVE_PRESETS = {"In every server for other hosts": FOR_OTHER_HOSTS}
"""What replaces defaults, for `--help` and docs/settings.md."""


def serve_presets(_: Given) -> Given:
    """A server for other hosts has a port."""
    return FOR_OTHER_HOSTS


@with_presets(serve_presets, explain_field, accept_value)
@chz.chz
class ServeModelConfig:
    """Serve a model to runs on other hosts."""

    model_name: str | None = setting(None, "folder or hub id of the model; None uses the included tiny model")
    host: str = setting("127.0.0.1", "address of this host to listen on; choose one in the network of the runs")
    lora_rank: int = setting(32, "largest lora_rank of the runs", at_least=1)
    num_replicas: int | None = setting(
        None,
        "servers on nodes of the Ray cluster at RAY_ADDRESS, each with server.tensor_parallel GPUs and its own port, "
        "from server.port on; None serves on this host",
        at_least=1,
    )
    server: ServerConfig = chz.field(default_factory=ServerConfig)
    log_file: Path = setting(Path("vllm.log"), "file for the server's output")

    @chz.validate
    def _numbers_make_sense(self) -> None:
        check_numbers(self)


@asynccontextmanager
async def open_server(wanted: ServeModelConfig, environ: Mapping[str, str]) -> AsyncGenerator[VllmServer]:
    """A server on this host, started again whenever it dies; raises `ConfigError` for settings that cannot work."""
    server, log_path = wanted.server, wanted.log_file
    assert server.port is not None, "a preset ensures that"
    with boundary(
        ConfigError, f"host, port: expected a free port, got {server.port} of {wanted.host!r}; choose another"
    ):
        free_port(server.port, wanted.host)
    await require_vllm_args(server.vllm_args, "server.vllm_args")
    with boundary(ConfigError, f"log_file: expected a file to write, got {str(log_path)!r}; choose another"):
        await asyncio.to_thread(log_path.parent.mkdir, parents=True, exist_ok=True)
        (await asyncio.to_thread(log_path.open, "ab")).close()
    model_path = await asyncio.to_thread(find_model, wanted.model_name)
    await asyncio.to_thread(fetch_weights, wanted.model_name, model_path)
    gpus = plan_gpus(
        [gpu.name for gpu in visible_gpus(environ)],
        server,
        TrainerConfig(),
        load_model_sizes(model_path).num_heads,
        has_trainer=False,
    )
    served = with_values(
        server,
        model_path=model_path,
        max_lora_rank=max_lora_rank(wanted.lora_rank),
        max_model_len=find_max_model_len(model_path, server.max_model_len, max_tokens=1),
        gpu_names=gpus.server_gpus,
        host=wanted.host,
        adapter_folder=await asyncio.to_thread(make_scratch_folder, "adapters"),
        start_timeout_s=server.start_timeout_s or start_limit_s(model_path),
    )
    async with VllmServer(served, log_path) as opened:
        yield opened


async def keep_serving(server: VllmServer) -> None:
    """Return never; raises `SamplingError` if the server is given up."""
    while True:  # it is started again if it dies
        await server.wait_until_ready()
        await asyncio.sleep(1)


def announce(address: str) -> None:
    """Say where runs find a server."""
    print(f"model server: {address}, which asks for {API_KEY_VARIABLE}; nothing is encrypted", flush=True)


class Replica:
    """A model server on a node, in an actor there. Its methods run side by side."""

    def __init__(self) -> None:
        refuse_inspection()
        self._stack = AsyncExitStack()
        self._opening: asyncio.Task[VllmServer] | None = None

    async def open(self, code: str, key: str, wanted: ServeModelConfig) -> tuple[str, str]:
        """Start it; returns the addresses of the node and of the server."""
        await asyncio.to_thread(require_code, code)
        os.environ[API_KEY_VARIABLE] = key
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, which knows nothing of vLLM
        wanted = with_values(wanted, host=node_address())
        self._opening = asyncio.create_task(self._stack.enter_async_context(open_server(wanted, os.environ)))
        try:
            return wanted.host, (await self._opening).base_url
        except ConfigError as error:
            raise ConfigError(f"on node {wanted.host}: {error}") from error

    async def serve(self) -> None:
        """Return never; raises `SamplingError` if the server is given up."""
        assert self._opening is not None
        await keep_serving(await self._opening)

    async def close(self) -> None:
        """End it, also while it starts."""
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.gather(self._opening, return_exceptions=True)
        await self._stack.aclose()


async def keep_replicas(wanted: ServeModelConfig, num_replicas: int, key: str, environ: Mapping[str, str]) -> None:
    """Keep servers on nodes, each at a port of its own, until cancelled, and say where they are.

    Raises `CuaError` if one cannot be started for the first time.
    """
    assert wanted.server.port is not None, "a preset ensures that"
    check_address("num_replicas", "server", wanted.server.gpus, environ)
    async with (
        open_cluster(wanted.log_file.parent, num_cpus=0, environ=environ) as cluster,
        asyncio.TaskGroup() as kept,
    ):
        for index in range(num_replicas):
            server = with_values(wanted.server, port=wanted.server.port + index)
            log_file = wanted.log_file.with_stem(f"{wanted.log_file.stem}-{index + 1}")
            replica = _keep_replica(cluster, with_values(wanted, server=server, log_file=log_file), key)
            kept.create_task(replica, name=f"replica-{index + 1}")


async def _keep_replica(cluster: Cluster, wanted: ServeModelConfig, key: str) -> None:
    """Keep a server on a node, always the same one."""
    code = await asyncio.to_thread(digest_of, PACKAGE)
    kind = "GPU" if any(node.num_gpus for node in cluster.nodes()) else "CPU"
    room, own_node = {kind: float(wanted.server.tensor_parallel or 1)}, dict[str, float]()
    while True:
        try:
            async with cluster.placed(Replica, [room | own_node], _PLACE_TIMEOUT_S) as (replica,):
                address, url = await replica.call("open", code, key, wanted)
                own_node = {f"node:{address}": 0.001}  # Ray gives each node a resource of this name
                announce(url)
                await replica.call("serve")
        except ClusterLost:
            raise
        except CuaError as error:
            if not own_node and not isinstance(error, ActorLost):
                raise
            logger.warning("the model server of port %s ended, and is started again: %s", wanted.server.port, error)
        await asyncio.sleep(_PAUSE_S)
