"""A trainer on nodes of a cluster: on each node, an actor owns the ranks, as the run does on its own machine.

Requests travel, encoded, to the actor of the first node and through its Unix socket to rank 0. The ranks find each
other at an address of that node, and prove themselves with a token that is new for each start. Does not import torch.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from cua_rl.cluster import (
    PACKAGE,
    Actor,
    ActorLost,
    Cluster,
    Node,
    digest_of,
    node_address,
    open_cluster,
    require_code,
)
from cua_rl.command_line.fields import with_values
from cua_rl.host.processes import free_port
from cua_rl.host.system import refuse_inspection
from cua_rl.run_folder.model_folder import absolute_if_folder, fetch_weights, find_model
from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.training.endpoints import LocalTrainer
from cua_rl.training.launch_ranks import MEETING_TOKEN_VARIABLE, MEETING_VARIABLE, MODEL_VARIABLE
from cua_rl.types.codec import decode, encode
from cua_rl.types.errors import ConfigError, TrainerDeathError

logger = logging.getLogger(__name__)

_PLACE_TIMEOUT_S = 600.0  # nodes are allocated, and lost ones come back


class ClusterTrainer:
    """The trainer's nodes, seen by the run."""

    reads_our_files = False

    def __init__(self, config: TrainerConfig, model_name: str | None, log_path: Path, cluster: Cluster) -> None:
        self._config = config
        self._model_name = absolute_if_folder(model_name)
        self._log_path = log_path
        self._cluster = cluster
        self._room: Mapping[str, float] = {}
        """What each node is asked for: once some have died, the others may not show it."""
        self._stack = AsyncExitStack()
        self._nodes: Sequence[Actor] = ()
        self._ends: list[asyncio.Task[Any]] = []

    async def open(self) -> None:
        """Reserve the nodes and start their ranks.

        Raises:
            ConfigError: for ten minutes there were too few nodes, or one lacks the model.
            TrainerDeathError: a node is lost.
        """
        num_nodes = self._config.num_nodes or 1
        self._room = self._room or find_room(self._cluster.nodes(), num_nodes, self._config.num_processes)
        logger.info("the trainer waits for nodes=%d room=%s", num_nodes, dict(self._room))
        placed = self._cluster.placed(TrainerNode, [self._room] * num_nodes, _PLACE_TIMEOUT_S)
        self._nodes = await self._stack.enter_async_context(placed)
        places = {
            "NUM_NODES": str(num_nodes),
            MEETING_VARIABLE: await self._call(self._nodes[0], "free_address"),
            MEETING_TOKEN_VARIABLE: secrets.token_hex(32),
        }
        config = with_values(self._config, num_processes=int(sum(self._room.values())))
        common = await asyncio.to_thread(digest_of, PACKAGE), self._model_name, encode(wire.Start(config=config))
        starts: list[Awaitable[str]] = []
        for index, node in enumerate(self._nodes):
            log_path = self._log_path.with_stem(f"trainer-{index + 1}")
            starts.append(self._call(node, "start", *common, log_path, places | {"NODE_RANK": str(index)}))
        logger.info("trainer nodes: %s", "; ".join(await asyncio.gather(*starts)))
        self._ends = [asyncio.create_task(node.call("ended"), name="trainer-node") for node in self._nodes]
        self._ends += [asyncio.create_task(node.stay_in_touch(), name="trainer-pulse") for node in self._nodes]

    async def ask(self, payload: bytes) -> bytes:
        """Rank 0's answer to an encoded request; raises `TrainerDeathError` as soon as anything of a node has died."""
        return await self._call(self._nodes[0], "ask", await self._cluster.put(payload))

    async def close(self) -> None:
        """End the ranks, at the latest with their actors."""
        for end in self._ends:
            end.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        await self._stack.aclose()
        self._nodes, self._ends = (), []

    async def _call(self, node: Actor, method: str, *arguments: object) -> Any:
        """What an actor returns; raises `TrainerDeathError` as soon as ranks end, or an actor or node is lost."""
        answer = asyncio.create_task(node.call(method, *arguments))
        try:
            done, _ = await asyncio.wait((answer, *self._ends), return_when=asyncio.FIRST_COMPLETED)
            return await (answer if answer in done else done.pop())
        except ActorLost as error:
            raise TrainerDeathError(f"a node of the trainer is lost: {error}") from error
        finally:
            answer.cancel()


class TrainerNode:
    """The ranks of a node, in an actor there. Its methods run side by side."""

    def __init__(self) -> None:
        refuse_inspection()
        self._ranks: LocalTrainer | None = None

    async def free_address(self) -> str:
        """An address of this node at which nothing listens."""
        host = node_address()
        return f"{host}:{free_port(host=host)}"

    async def start(
        self, code: str, model_name: str | None, request: bytes, log_path: Path, variables: Mapping[str, str]
    ) -> str:
        """Start the ranks that a `Start` describes; returns where they are."""
        await asyncio.to_thread(require_code, code)
        config: TrainerConfig = decode(request, wire.Start).config
        try:
            model_path = await asyncio.to_thread(find_model, model_name)
            await asyncio.to_thread(fetch_weights, model_name, model_path)
        except ConfigError as error:
            raise ConfigError(f"on the trainer's node {node_address()}: {error}") from error
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, which knows nothing of the ranks
        among_nodes = {**_interfaces(), **variables, MODEL_VARIABLE: str(model_path)}
        self._ranks = LocalTrainer(config, log_path, among_nodes=among_nodes)
        await self._ranks.open()
        return f"{config.num_processes} processes on {node_address()}, log {log_path}"

    async def ask(self, payload: bytes) -> bytes:
        """Rank 0's answer."""
        assert self._ranks is not None
        return await self._ranks.ask(payload)

    async def ended(self) -> None:
        """Wait for the end of the ranks, and raise it."""
        assert self._ranks is not None
        raise TrainerDeathError(f"on node {node_address()}: {await self._ranks.ended()}")

    async def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            await self._ranks.close()


async def open_trainer(
    stack: AsyncExitStack, config: TrainerConfig, model_name: str | None, log_path: Path
) -> TrainingClient:
    """A trainer, not started yet, on this machine or on nodes of a cluster, which is open as long as the stack."""
    nodes = None
    if config.num_nodes is not None:
        cluster = await stack.enter_async_context(open_cluster(log_path.parent, num_cpus=0))
        nodes = ClusterTrainer(config, model_name, log_path, cluster)
    return TrainingClient(config, log_path, endpoint=nodes)


def find_room(nodes: Sequence[Node], num_nodes: int, num_processes: int | None) -> dict[str, float]:
    """What to ask of each node: a GPU per process, as many as all chosen nodes have; CPUs in a cluster without GPUs."""
    gpus = sorted((int(node.num_gpus) for node in nodes if node.num_gpus >= 1), reverse=True)[:num_nodes]
    return {"GPU": num_processes or min(gpus)} if gpus else {"CPU": num_processes or 1}


def _interfaces() -> dict[str, str]:
    """Where the ranks talk: the interface of the node's address in the cluster, unless the node's environment says."""
    import psutil  # peft, which the ranks need, brings it

    own = node_address()
    names = psutil.net_if_addrs().items()
    found = next(name for name, addresses in names if any(each.address == own for each in addresses))
    return {name: os.environ.get(name, found) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
