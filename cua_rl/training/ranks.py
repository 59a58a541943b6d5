# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Several trainer processes that act as one: each computes a share of a request's datums, all take the same step.

Every rank receives every request, so the assignment of datums and the number of trained tokens need no communication.
A single process is one rank and sends nothing.

A frozen base model can be sharded over the ranks (PyTorch's FSDP2): the weights of a layer are gathered while it
computes and freed afterwards. Adapters stay whole on every rank, so gradients, optimizer and checkpoints are those of
an unsharded model. Gathering involves all ranks, so all make the same number of passes: a rank with less work adds
passes of `empty_micro_batch` and blank images.
"""

import heapq
import hmac
import logging
import os
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cua_rl.errors import TrainingError

T = TypeVar("T")

_IDLE_TIMEOUT = timedelta(days=365)
"""While a baseline is evaluated, ranks have nothing to do for hours; PyTorch gives up after 30 minutes."""

logger = logging.getLogger(__name__)


class Ranks:
    """This process's place among the trainer processes."""

    def __init__(self, rank: int = 0, size: int = 1, requests: distributed.ProcessGroup | None = None) -> None:
        self.rank = rank
        self.size = size
        self._requests = requests

    @classmethod
    def meet(cls, folder: Path, rank: int, size: int, timeout: timedelta | None = None) -> Self:
        """Join the other processes of this machine through files in a folder that other users cannot enter.

        `timeout` limits how long ranks wait for each other within a request (None: PyTorch's default), not how long
        they wait for one.

        Raises:
            TrainingError: somebody else has taken the place of a rank.
        """
        if size == 1:
            return cls()
        if torch.cuda.is_available():
            if torch.cuda.device_count() < size:
                raise TrainingError(
                    f"expected a GPU for each of {size} trainer processes, got {torch.cuda.device_count()} that can be "
                    "used; lower trainer.num_processes, or see what nvidia-smi says"
                )
            torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = distributed.FileStore(str(folder / "ranks"), size)  # pyright: ignore[reportPrivateImportUsage]
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        if rank == 0:
            store.set("proof", secrets.token_hex(32))
        requests = distributed.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
        assert isinstance(requests, distributed.ProcessGroup)  # an int stands for no member
        for group in (None, requests):  # each has connections of its own
            prove_ranks(store.get("proof"), rank, size, group)
        return cls(rank, size, requests)

    def close(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            distributed.destroy_process_group()

    def next_request(self, value: T | None) -> T:
        """Rank 0's value, on every rank; the others wait for it however long it takes."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        values = [value]
        distributed.broadcast_object_list(values, src=0, group=self._requests)
        return values[0]  # type: ignore[return-value]

    def agreement(self) -> "Agreement":
        """A block that succeeds on all ranks or fails on all."""
        return Agreement(self)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def largest(self, count: int) -> int:
        """The maximum over all ranks."""
        if self.size == 1:
            return count
        counts = torch.tensor(count)
        distributed.all_reduce(counts, distributed.ReduceOp.MAX)
        return int(counts)

    @contextmanager
    def in_step(self) -> Generator[None]:
        """A block in which ranks wait for each other inside the model: a failure there ends all processes.

        The other ranks cannot be notified: they wait for a shard of a layer, not for a message.
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
        """All-reduce the gradients in place, in one message; a rank without datums contributes zeros."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        together = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(together)
        parts: Sequence[Tensor] = together.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def prove_ranks(secret: bytes, rank: int, size: int, group: distributed.ProcessGroup | None = None) -> None:
    """Show every other rank that this one knows the secret, and see that they do; raises `TrainingError`.

    gloo's connections ask for no password: while the ranks meet, any program of this machine could take a rank's place,
    and what the ranks send each other afterwards is unpickled. Whoever knows the secret may enter the run's folder.
    """
    for one in range(size):
        for other in range(one + 1, size):
            if rank in (one, other):
                peer = one + other - rank
                ours = torch.frombuffer(bytearray(_proof(secret, rank, peer)), dtype=torch.uint8)
                theirs = torch.empty_like(ours)
                sending = distributed.isend(ours, peer, group)
                distributed.recv(theirs, peer, group)
                if sending is not None:
                    sending.wait()
                if not hmac.compare_digest(bytes(theirs.tolist()), _proof(secret, peer, rank)):
                    raise TrainingError(f"expected trainer process {peer} on its connection, got another program")


def _proof(secret: bytes, sender: int, receiver: int) -> bytes:
    return hmac.digest(secret, f"{sender} to {receiver}".encode(), "sha256")


class Agreement:
    """Makes a failure on one rank a failure on all, so that no rank waits for one that has given up.

    Inside the block, every rank that gets that far calls `share` once.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._is_reached = False

    def share(self, value: T) -> list[T]:
        """Every rank's value; raises `TrainingError` if a rank failed earlier in the block."""
        self._is_reached = True
        told: list[tuple[T | None, str | None]] = self._ranks.gather((value, None))
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
            self._ranks.gather((None, str(error) or type(error).__name__))


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
    """Trainer metrics of all ranks: work and speed add up, time and memory are maxima, utilisation is the mean."""
    combined: dict[str, float] = {}
    for name in accounts[0]:
        values = [account[name] for account in accounts]
        if name.endswith(("_s", "_gib")) and not name.endswith("_per_s"):
            combined[name] = max(values)
        elif name.endswith("_frac"):
            combined[name] = sum(values) / len(values)
        else:
            combined[name] = sum(values)
    return combined


def shard_frozen_weights(base: Any, device: torch.device, num_ranks: int) -> None:
    """Keep only this rank's shard of decoder layers, vision blocks and mergers, on `device`.

    Embeddings and head stay whole: they are read outside their modules and are often one tensor.
    """
    mesh = init_device_mesh(device.type, (num_ranks,))
    vision, language = base.model.visual, base.model.language_model
    for tower, layers in (
        (vision, [*vision.blocks, vision.merger, *dict(vision.named_children()).get("deepstack_merger_list", ())]),
        (language, list(language.layers)),
    ):
        trained = {parameter for parameter in tower.parameters() if parameter.requires_grad}
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=trained)
        # the tower holds no weights of its own: as the root, it prefetches the next layer while one computes
        fully_shard(
            tower, mesh=mesh, ignored_params={one for one in tower.parameters() if not isinstance(one, DTensor)}
        )
