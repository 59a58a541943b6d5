# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Several trainer processes that act as one: each computes a share of a request's datums, all take the same step.

Every rank receives every request, so the assignment of datums and the number of trained tokens need no communication.
A single process is one rank and sends nothing.

The base model can be sharded over the ranks (PyTorch's FSDP2): the weights of a layer are gathered while it computes
and freed afterwards. If they are trained, each rank also holds its shard of their gradients and optimizer state;
adapters stay whole on every rank. Checkpoints are those of an unsharded model. Gathering involves all ranks, so all
make the same number of passes: a rank with less work adds passes of `empty_micro_batch` and blank images.
"""

import heapq
import hmac
import logging
import os
import secrets
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from cua_rl.training.context import ALONE, Context
from cua_rl.training.launch_ranks import MEETING_TOKEN_VARIABLE, MEETING_VARIABLE
from cua_rl.types.codec import Codec, Put, Take
from cua_rl.types.errors import ConfigError, TrainingError

T = TypeVar("T")

_IDLE_TIMEOUT = timedelta(days=365)
"""While a baseline is evaluated, ranks have nothing to do for hours; PyTorch gives up after 30 minutes."""

_MEETING_TIMEOUT = timedelta(minutes=10)
"""Nodes do not start at the same moment."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process among all ranks, and among those of its node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Read the variables that `launch_ranks` sets; without them, the process is the only rank."""
        return cls(
            rank=int(environ.get("RANK", 0)),
            size=int(environ.get("WORLD_SIZE", 1)),
            local_rank=int(environ.get("LOCAL_RANK", 0)),
            local_size=int(environ.get("LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE", 1))),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the ranks of several nodes find each other: a store that rank 0 serves."""

    host: str
    port: int
    token: str
    """Known to all ranks and nobody else."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self | None:
        """Read the variables that `run/trainer_nodes.py` sets; None on a single machine."""
        if MEETING_VARIABLE not in environ:
            return None
        host, _, port = environ[MEETING_VARIABLE].rpartition(":")
        return cls(host=host, port=int(port), token=environ[MEETING_TOKEN_VARIABLE])


class Ranks:
    """This process's place among the trainer processes."""

    def __init__(self, place: Place | None = None, requests: distributed.ProcessGroup | None = None) -> None:
        self.place = place or Place()
        self._requests = requests
        self._watcher: threading.Thread | None = None
        self._lifelines: distributed.ProcessGroup | None = None

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @classmethod
    def meet(cls, where: Path | Meeting | None, place: Place, timeout: timedelta | None = None) -> Self:
        """Join the other processes, if there are any.

        Those of a single machine meet through files in a folder that other users cannot enter. `timeout` limits how
        long ranks wait for each other within a request (None: PyTorch's default), not how long they wait for one.

        Raises:
            TrainingError: another program has taken the place of a rank.
        """
        if where is None or place.size == 1:
            return cls()
        if torch.cuda.is_available():
            if torch.cuda.device_count() < place.local_size:
                raise TrainingError(
                    f"expected a GPU for each of {place.local_size} trainer processes, got "
                    f"{torch.cuda.device_count()} that can be used; lower trainer.num_processes, or see what "
                    "nvidia-smi says"
                )
            torch.cuda.set_device(place.local_rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        if isinstance(where, Path):
            store: Any = distributed.FileStore(str(where / "ranks"), place.size)  # pyright: ignore[reportPrivateImportUsage]
        else:
            store = _open_store(where, place)
        distributed.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
        if isinstance(where, Path) and place.rank == 0:
            store.set("proof", secrets.token_hex(32))
        secret = store.get("proof") if isinstance(where, Path) else where.token.encode()
        requests = _new_group()
        for group in (None, requests):  # each has its own connections
            prove_ranks(secret, place.rank, place.size, group)
        ranks = cls(place, requests)
        ranks._watch_previous()
        return ranks

    def share_rows(self, size: int) -> Context:
        """Let each `size` neighbours share their rows; raises `ConfigError` if that leaves some over."""
        if self.size % size:
            raise ConfigError(
                f"trainer.context_parallel: expected a divisor of the {self.size} trainer processes, got {size}; "
                "change it, or the number of processes"
            )
        if size == 1:
            return ALONE
        group, _ = distributed.new_subgroups(size)  # pyright: ignore[reportPrivateImportUsage]
        assert isinstance(group, distributed.ProcessGroup)  # an int stands for no member
        return Context(rank=self.rank % size, size=size, group=group)

    def close(self) -> None:
        """Leave the process group, once all ranks do."""
        if self._watcher is not None:
            distributed.send(torch.zeros(1), (self.rank + 1) % self.size, self._lifelines)
            self._watcher.join()
            distributed.destroy_process_group()

    def _watch_previous(self) -> None:
        """End this process when the previous rank dies, and so all ranks, one after the other.

        Otherwise, a GPU that waits for a dead rank would give up after ten minutes only.
        """
        self._lifelines = _new_group()

        def wait_for_end() -> None:
            with self.together():
                distributed.recv(torch.zeros(1), (self.rank - 1) % self.size, self._lifelines)

        self._watcher = threading.Thread(target=wait_for_end, name="previous-rank", daemon=True)
        self._watcher.start()

    def next_request(self, payload: bytearray) -> bytearray:
        """Rank 0's bytes, on every rank; the others, which give none, wait for them however long it takes."""
        if self.size > 1:
            length = torch.tensor(len(payload))
            with self.together():
                distributed.broadcast(length, src=0, group=self._requests)
                payload.extend(bytes(int(length) - len(payload)))
                if payload:
                    distributed.broadcast(torch.frombuffer(payload, dtype=torch.uint8), src=0, group=self._requests)
        return payload

    def agreement(self, kind: Any) -> "Agreement":
        """A block that succeeds on all ranks or fails on all, and shares values of the type `kind`."""
        return Agreement(self, kind)

    def gather(self, value: T, kind: Any) -> list[T]:
        """Every rank's value, of the type `kind`, in the order of ranks."""
        if self.size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(_CODEC.encode(value, kind)), dtype=torch.uint8)
        lengths = [torch.tensor(0) for _ in range(self.size)]
        with self.together():
            distributed.all_gather(lengths, torch.tensor(len(payload)))
            longest = int(max(lengths))
            parts = [payload.new_empty(longest) for _ in lengths]
            distributed.all_gather(parts, nn.functional.pad(payload, (0, longest - len(payload))))
            pairs = zip(parts, lengths, strict=True)
            return [_CODEC.decode(part[: int(length)].numpy().data, kind) for part, length in pairs]

    def largest(self, count: int) -> int:
        """The maximum over all ranks."""
        if self.size == 1:
            return count
        counts = torch.tensor(count)
        with self.together():
            distributed.all_reduce(counts, distributed.ReduceOp.MAX)
        return int(counts)

    @contextmanager
    def together(self) -> Generator[None]:
        """A block in which ranks wait for each other: a failure there, such as a peer's death, ends this process.

        The others cannot be notified, because they wait for a message or a shard of a layer. When this process ends,
        their connections to it break, and they end too.
        """
        try:
            yield
        except Exception as error:
            logger.exception("rank %d failed", self.rank)
            # last, because the controller shows the end of the log
            logger.error("rank %d failed where the others wait for it: all trainer processes end: %r", self.rank, error)
            logging.shutdown()
            os._exit(1)  # an orderly exit would wait for the others

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """All-reduce the gradients in place, in one message; a rank without datums contributes zeros.

        Those of sharded parameters are summed already, by the backward pass.
        """
        parameters = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
        if self.size == 1 or not parameters:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        concatenated = torch.cat([gradient.flatten() for gradient in gradients])
        with self.together():
            distributed.all_reduce(concatenated)
        parts: Sequence[Tensor] = concatenated.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _write_tensor(tensor: Tensor, put: Put) -> object:
    return [str(tensor.dtype), list(tensor.shape), put(id(tensor), tensor.detach().cpu().numpy().tobytes)]


def _read_tensor(given: Any, take: Take) -> Tensor:
    name, shape, index = given
    dtype = {"torch.float32": np.float32, "torch.int64": np.int64, "torch.bool": np.bool_}[name]
    return take(index, (name, *shape), lambda data: torch.from_numpy(np.frombuffer(data, dtype).reshape(shape).copy()))


_CODEC = Codec({Tensor: (_write_tensor, _read_tensor)})


def _new_group() -> distributed.ProcessGroup:
    """Connections on which the ranks may be silent for long."""
    group = distributed.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
    assert isinstance(group, distributed.ProcessGroup)  # an int stands for no member
    return group


def _open_store(meeting: Meeting, place: Place) -> Any:
    """The store of a meeting; rank 0 serves it only on the meeting's address; PyTorch would listen on all."""
    listener = None
    if place.rank == 0:
        family = socket.AF_INET6 if ":" in meeting.host else socket.AF_INET
        listener = socket.create_server((meeting.host, meeting.port), family=family)
    return distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        meeting.host,
        meeting.port,
        place.size,
        place.rank == 0,
        timeout=_MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def prove_ranks(secret: bytes, rank: int, size: int, group: distributed.ProcessGroup | None = None) -> None:
    """Prove to every other rank that this one knows the secret, and check that they do; raises `TrainingError`.

    gloo's connections ask for no password: while the ranks meet, another program could take a rank's place. Each proof
    answers a random number of the peer, so a recorded one is of no use.
    """
    for one in range(size):
        for other in range(one + 1, size):
            if rank in (one, other):
                peer = one + other - rank
                ours = secrets.token_bytes(32)
                theirs = _exchange(ours, peer, group)
                answer = _exchange(_proof(secret, theirs, rank, peer), peer, group)
                if not hmac.compare_digest(answer, _proof(secret, ours, peer, rank)):
                    raise TrainingError(f"expected trainer process {peer} on its connection, got another program")


def _exchange(ours: bytes, peer: int, group: distributed.ProcessGroup | None) -> bytes:
    """Send bytes to a peer and receive as many."""
    outgoing = torch.frombuffer(bytearray(ours), dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    sending = distributed.isend(outgoing, peer, group)
    distributed.recv(incoming, peer, group)
    if sending is not None:
        sending.wait()
    return bytes(incoming.tolist())


def _proof(secret: bytes, nonce: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret, nonce + f"{sender} to {receiver}".encode(), "sha256")


class Agreement:
    """Makes a failure on one rank a failure on all, so that no rank waits for one that has given up.

    Inside the block, every rank that gets that far calls `share` once.
    """

    def __init__(self, ranks: Ranks, kind: Any) -> None:
        self._ranks = ranks
        self._kind: Any = tuple[kind | None, str | None]
        self._is_reached = False

    def share(self, value: T) -> list[T]:
        """Every rank's value; raises `TrainingError` if a rank failed earlier in the block."""
        self._is_reached = True
        told: list[tuple[T | None, str | None]] = self._ranks.gather((value, None), self._kind)
        failures = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(told) if error is not None]
        if failures:
            raise TrainingError("; ".join(failures))
        return [value for value, _ in told]  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and not self._is_reached:
            self._ranks.gather((None, str(error) or type(error).__name__), self._kind)


def share_out(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Datums per rank: the longest first, each to the rank with the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    return [sorted(share) for share in shares]


def combine_accounts(accounts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Trainer metrics of all ranks: work and speed add up, utilisation is a mean, all else is the largest value.

    Ranks retry together, so each has the same number of retries.
    """
    combined: dict[str, float] = {}
    for name in accounts[0]:
        values = [account[name] for account in accounts]
        if name.endswith(("_s", "_gib", "_retries")) and not name.endswith("_per_s"):
            combined[name] = max(values)
        elif name.endswith("_frac"):
            combined[name] = sum(values) / len(values)
        else:
            combined[name] = sum(values)
    return combined


def shard_weights(base: Any, device: torch.device, place: Place, *, is_hybrid: bool, computes_in: torch.dtype) -> None:
    """Keep only this rank's shard of decoder layers, vision blocks and mergers, on `device`.

    Hybrid: the ranks of a node hold all shards together, so layers are gathered over its fast links alone. Embeddings
    and head stay whole: they are read outside their modules and are often one tensor.

    Trained weights become float32 layer by layer, so that main memory holds one copy of the checkpoint, which the ranks
    share. They are gathered as `computes_in`; their gradients are summed in float32.
    """
    nodes, shards = "nodes", "shards"
    if is_hybrid:
        sizes = (place.size // place.local_size, place.local_size)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=(nodes, shards))
    else:
        mesh = init_device_mesh(device.type, (place.size,), mesh_dim_names=(shards,))
    precision = MixedPrecisionPolicy(param_dtype=computes_in, reduce_dtype=torch.float32, cast_forward_inputs=False)
    vision, language = base.model.visual, base.model.language_model
    for tower, layers in (
        (vision, [*vision.blocks, vision.merger, *dict(vision.named_children()).get("deepstack_merger_list", ())]),
        (language, list(language.layers)),
    ):
        for layer in layers:
            for one in layer.parameters():
                one.data = one.data.to(device).contiguous()  # experts may be transposed views of their file
            trained = {one for one in layer.parameters() if one.requires_grad}
            if len(trained) == len(list(layer.parameters())):
                fully_shard(layer.float(), mesh=mesh, mp_policy=precision)
                layer.set_gradient_divide_factor(1.0)  # the sum, not the mean over ranks
                layer.set_force_sum_reduction_for_comms(True)
            else:
                fully_shard(layer, mesh=mesh, ignored_params=trained)
        # the tower holds no weights of its own: as the root, it prefetches the next layer while one computes
        fully_shard(
            tower, mesh=mesh, ignored_params={one for one in tower.parameters() if not isinstance(one, DTensor)}
        )
