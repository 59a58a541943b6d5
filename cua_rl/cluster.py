"""Ray, which starts processes on the nodes of a cluster: the run's own on this machine, or yours.

A cluster runs whatever it is sent, so all of them ask for a token. With RAY_ADDRESS a run uses that cluster, whose
token and TLS are set by Ray's own variables (RAY_AUTH_*, RAY_USE_TLS, RAY_TLS_*). Without, it starts one: a token of
its own, every port on loopback, everything in a temporary folder, no secret of the run in the environment of its
processes, and none that outlives the run.

The only module that knows Ray, which is imported when a cluster is opened.
"""

import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cua_rl.host.masking import make_key, remember_secrets
from cua_rl.host.processes import OwnedProcess
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import computing_environment
from cua_rl.types.errors import ConfigError, CuaError, boundary

_MODE, _TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"
# what Ray does on macOS: nodes on loopback alone, whatever the address of the machine
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
PACKAGE = Path(__file__).parent
_START_S, _POLL_S = 300.0, 0.1
_RESERVE_POLL_S = 1.0
_PULSE_S = 5.0
_CLOSE_S = 15.0  # longer than what actors own gets to end
_WHY_CHARACTERS = 200  # the last line says why, at length
_OBJECT_STORE_BYTES = 2**30  # at most; what is larger than 100 kB goes through it
# Ray ends a process whose cluster is gone for a minute; ours ends by itself, after what a step has to save
_PATIENCE = {"RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}
# an answer that cannot be delivered for 20 s would be dropped, and who asked would learn of it five minutes later
_ACTOR_OPTIONS: Mapping[str, object] = {
    "max_restarts": 0,
    "runtime_env": {"env_vars": {"RAY_grpc_keepalive_timeout_ms": "120000"}},
}


class ActorLost(CuaError):
    """An actor has ended, or cannot be reached."""


class ClusterLost(CuaError):
    """This machine's node of the cluster has ended: from here, nothing is placed or answered any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    node_id: str
    address: str
    num_cpus: float
    num_gpus: float


class Actor:
    """An object in a process of its own, somewhere in the cluster."""

    def __init__(self, ray: Any, cluster: "Cluster", handle: Any) -> None:
        self._ray = ray
        self._cluster = cluster
        self._handle = handle

    async def call(self, method: str, *arguments: object) -> Any:
        """What a method returns. Calls arrive in their order; those of `async` methods run side by side.

        Raises `ActorLost`, `ClusterLost`, or `CuaError` for what the method raises.
        """
        self._cluster.require()
        try:
            return await self._cluster.outlive(getattr(self._handle, method).remote(*arguments))
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, CuaError):
                raise error.cause from None
            raise CuaError(f"{method} failed: {type(error.cause).__name__}: {error.cause}") from error
        except self._ray.exceptions.RayError as error:
            why = str(error).strip() or type(error).__name__
            raise ActorLost(why.splitlines()[-1][:_WHY_CHARACTERS]) from error

    async def stay_in_touch(self) -> None:
        """Ask every few seconds until cancelled; raises what `call` does.

        A connection on which nothing is sent notices neither that it works again nor that the other side has left it.
        """
        while True:
            await asyncio.sleep(_PULSE_S)
            await self.call("__ray_ready__")

    async def end(self) -> None:
        """Let it `close`, and end its process, at the latest after 15 s."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.call("close")
                with suppress(ActorLost):  # its answer; it removes its folder, which a kill would leave
                    await self.call("__ray_terminate__")
        except (CuaError, TimeoutError):
            self.kill()

    def kill(self) -> None:
        """End its process, also one that does not answer."""
        if not self._cluster.is_lost:
            self._ray.kill(self._handle)


class Cluster:
    """An open cluster; `node` ends with this machine's node, after which Ray itself would wait without a word."""

    def __init__(self, ray: Any, node: asyncio.Task[bytes], address: str, *, is_local: bool, advice: str) -> None:
        self._ray = ray
        self._node = node
        self._advice = advice
        self.address = address
        self.is_local = is_local

    @property
    def is_lost(self) -> bool:
        return self._node.done()

    def require(self) -> None:
        """Raise `ClusterLost` if it is lost."""
        if self.is_lost:
            raise ClusterLost(
                f"expected this machine's node of the Ray cluster to outlast the run, but it ended; {self._advice}"
            )

    async def outlive(self, answer: Awaitable[Any]) -> Any:
        """An answer; raises `ClusterLost` as soon as none can come."""
        waiting = asyncio.ensure_future(answer)
        try:
            await asyncio.wait((waiting, self._node), return_when=asyncio.FIRST_COMPLETED)
            self.require()
            return waiting.result()
        finally:
            waiting.cancel()

    def nodes(self) -> list[Node]:
        """The machines that are alive."""
        self.require()
        return [
            Node(
                node_id=node["NodeID"],
                address=node["NodeManagerAddress"],
                num_cpus=node["Resources"].get("CPU", 0.0),
                num_gpus=node["Resources"].get("GPU", 0.0),
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def start(
        self, kind: Callable[..., object], *arguments: object, num_cpus: float = 1, max_concurrency: int = 1000
    ) -> Actor:
        """Make an object of this class in a process of its own, as soon as a node has room; it is never started again.

        Actors are spread over the nodes.
        """
        self.require()
        options = {"num_cpus": num_cpus, "max_concurrency": max_concurrency, **_ACTOR_OPTIONS}
        made = self._ray.remote(kind).options(scheduling_strategy="SPREAD", **options)
        return Actor(self._ray, self, made.remote(*arguments))

    @asynccontextmanager
    async def placed(
        self, kind: Callable[[], object], rooms: Sequence[Mapping[str, float]], timeout_s: float
    ) -> AsyncGenerator[Sequence[Actor]]:
        """Actors of this class on different nodes, each in one of these rooms, such as `{"GPU": 4}`; see `Actor.end`.

        Raises `ConfigError` if there is no room.
        """
        strategies: Any = import_module("ray.util.scheduling_strategies")
        group = await self._reserve(rooms, timeout_s)
        actors: list[Actor] = []
        try:
            for index, room in enumerate(rooms):
                options = {"num_cpus": room.get("CPU", 0), "num_gpus": room.get("GPU", 0), **_ACTOR_OPTIONS}
                place = strategies.PlacementGroupSchedulingStrategy(group, index)
                made = self._ray.remote(kind).options(scheduling_strategy=place, **options)
                actors.append(Actor(self._ray, self, made.remote()))
            yield actors
        finally:
            await asyncio.gather(*(actor.end() for actor in actors))
            if not self.is_lost:
                self._ray.util.remove_placement_group(group)

    async def _reserve(self, rooms: Sequence[Mapping[str, float]], timeout_s: float) -> Any:
        self.require()
        group = self._ray.util.placement_group([dict(room) for room in rooms], strategy="STRICT_SPREAD")
        try:
            async with asyncio.timeout(timeout_s):
                while not await asyncio.to_thread(group.wait, _RESERVE_POLL_S):
                    self.require()
        except TimeoutError:
            self._ray.util.remove_placement_group(group)
            there = ", ".join(f"{one.address}: {one.num_cpus:g} CPUs, {one.num_gpus:g} GPUs" for one in self.nodes())
            raise ConfigError(
                f"expected a Ray cluster with room for {list(rooms)} on different nodes within {timeout_s:g} s, got "
                f"{there}; add nodes, or request less"
            ) from None
        return group

    async def put(self, payload: bytes) -> object:
        """Bytes as an argument of calls: large ones are copied here, and not on the event loop."""
        self.require()
        return await asyncio.to_thread(self._ray.put, payload)


def node_address() -> str:
    """In an actor: the address of its node."""
    ray: Any = import_module("ray")
    return str(ray.util.get_node_ip_address())


def digest_of(*paths: Path) -> str:
    """Changes with the content of files, or with the files of folders: members of a cluster compare what they have."""
    total = sha256()
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                total.update(file.relative_to(path).as_posix().encode() + sha256(file.read_bytes()).digest())
    return total.hexdigest()


def require_code(digest: str) -> None:
    """In an actor: raise `ConfigError` unless the code of this package is the caller's."""
    if digest_of(PACKAGE) != digest:
        raise ConfigError(f"expected the run's code of cua_rl on {node_address()}, got another; install the same")


def check_address(setting: str, of: str, gpus: object, environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` unless RAY_ADDRESS names a cluster that asks for a token, and there is no choice of GPUs."""
    address = environ.get("RAY_ADDRESS")
    if not address or gpus is not None:
        raise ConfigError(
            f"{setting}: expected the address of a Ray cluster in RAY_ADDRESS, and no {of}.gpus, as Ray assigns them, "
            f"got {address!r} and {gpus!r}; start a cluster (docs/more_machines.md)"
        )
    check_cluster(setting, environ)


def check_cluster(setting: str, environ: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` unless Ray is installed, and the cluster at RAY_ADDRESS asks for a token."""
    if find_spec("ray") is None:
        raise ConfigError(
            f"{setting}: expected the package ray, got none; install it on all nodes (pip install 'cua_rl[ray]')"
        )
    mode = environ.get(_MODE, "")
    # nodes of a cluster listen on the network and run whatever they are sent, without a token by anyone
    if environ.get("RAY_ADDRESS") and mode not in ("token", "k8s"):
        raise ConfigError(
            f"{setting}: expected a Ray cluster that requires a token, got {_MODE}={mode!r} with RAY_ADDRESS; set it "
            "to token on all nodes before `ray start`, and here (docs/more_machines.md)"
        )


@asynccontextmanager
async def open_cluster(
    log_folder: Path, *, num_cpus: int, num_gpus: int = 0, environ: Mapping[str, str] = os.environ
) -> AsyncGenerator[Cluster]:
    """The cluster at RAY_ADDRESS, or one of this machine with this room; its actors end with the outermost block.

    Raises `ConfigError` if it cannot be reached.
    """
    async with AsyncExitStack() as stack:
        address, log_path = environ.get("RAY_ADDRESS", ""), log_folder / "ray.log"
        variables, advice = _PATIENCE, "read the logs of `ray start` there"
        if not address:
            address, own = await _start_cluster(stack, log_path, num_cpus, num_gpus, environ)
            variables, advice = {**own, **_PATIENCE}, f"read {log_path}"
        os.environ.update(variables)  # Ray reads them; nobody else needs them
        stack.callback(_forget, variables)
        ray: Any = await asyncio.to_thread(import_module, "ray")
        if not ray.is_initialized():  # several parts of a run may use the same cluster
            await asyncio.to_thread(_connect, ray, address)
            stack.push_async_callback(asyncio.to_thread, ray.shutdown)
        # ends with this machine's node: a connection to its socket, on which nothing is ever said
        own: Any = import_module("ray._private.worker")
        reader, writer = await asyncio.open_unix_connection(own.global_worker.node.raylet_socket_name)
        stack.callback(writer.close)
        node = asyncio.create_task(reader.read(), name="node-of-ray")
        stack.callback(node.cancel)
        yield Cluster(ray, node, address, is_local=not environ.get("RAY_ADDRESS"), advice=advice)


def shape_node(parameters: Any, is_head: bool) -> None:
    """Called by `ray start`, which has no options for this: no server of Ray's client, short names of sockets, and no
    limit of 30 s for the node, which a busy machine exceeds every time: who starts the cluster has one.
    """
    services: Any = import_module("ray._private.services")
    get_node = services.get_node

    def get_node_once_there(*arguments: object) -> object:
        while True:
            with suppress(RuntimeError):
                return get_node(*arguments)
            time.sleep(_POLL_S)

    services.get_node = get_node_once_there
    parameters.ray_client_server_port = None
    parameters.plasma_store_socket_name = f"{parameters.temp_dir}/store"
    parameters.raylet_socket_name = f"{parameters.temp_dir}/raylet"


async def _start_cluster(
    stack: AsyncExitStack, log_path: Path, num_cpus: int, num_gpus: int, environ: Mapping[str, str]
) -> tuple[str, dict[str, str]]:
    """Start a cluster; returns its address, and the variables of processes that use it."""
    token = make_key()
    remember_secrets({_TOKEN: token})
    variables = {_MODE: "token", _TOKEN: token, _LOOPBACK: "0", "RAY_USAGE_STATS_ENABLED": "0"}
    folder = await asyncio.to_thread(make_scratch_folder, "ray")
    # without what needs memory and serves nobody here: the client's server, autoscaler, log monitor, and pages
    program = OwnedProcess(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0"),
            *("--node-ip-address=127.0.0.1", f"--temp-dir={folder}", f"--object-store-memory={_OBJECT_STORE_BYTES}"),
            *(f"--num-cpus={num_cpus}", f"--num-gpus={num_gpus}", "--disable-usage-stats", "--no-monitor"),
            *("--include-dashboard=false", "--include-log-monitor=false"),
        ],
        name="ray",
        log_path=log_path,
        # the machine's memory is not the cluster's alone: it ends no worker because others need much; and what a run
        # starts in its cluster has the run's priority, where Ray would let everybody else go first (niceness 15)
        environment={
            **computing_environment(environ),
            **variables,
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_worker_niceness": "0",
            "RAY_START_HOOK": f"{__name__}.{shape_node.__name__}",
        },
    )
    await stack.enter_async_context(program)
    written = folder / "ray_current_cluster"
    try:
        async with asyncio.timeout(_START_S):
            while not (written.exists() and written.read_text()):
                if not program.is_running:
                    raise TimeoutError
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise CuaError(
            f"expected a Ray cluster of this machine within {_START_S:g} s, got none; {log_path} ends:\n"
            f"{program.log_tail()}"
        ) from None
    return written.read_text().strip(), variables


def _forget(variables: Collection[str]) -> None:
    for name in variables:
        os.environ.pop(name, None)


def _connect(ray: Any, address: str) -> None:
    """Connect this process; in a thread, because in the main thread Ray would take SIGTERM for itself."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Ray keeps what it read when it was imported, or for an earlier cluster of this process
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = os.environ.get(_LOOPBACK) != "0"
    ray._raylet.Config.initialize("")
    ray._raylet.AuthenticationTokenLoader.instance().reset_cache()
    with boundary(
        ConfigError, f"expected a Ray cluster with this token at {address}, whose node is on this machine too"
    ):
        ray.init(address=address, log_to_driver=False, configure_logging=False, namespace="cua_rl")
