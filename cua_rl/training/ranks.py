# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Several trainer processes that act as one: each computes a share of a request's datums, all take the same step.

Every rank gets every request, so what can be known without computing (who has which datum, how many tokens are trained)
needs no message. One process is the case of one rank, and sends nothing.
"""

import heapq
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, distributed, nn

from cua_rl.errors import TrainingError

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Ranks:
    """This process's place among the trainer processes."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def from_environment(cls) -> Self:
        """As torchrun says; joins the other processes. Alone if torchrun did not start this process."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(distributed.get_rank(), size)

    def close(self) -> None:
        """Leave the other processes."""
        if self.size > 1:
            distributed.destroy_process_group()

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value  # type: ignore[return-value]
        values = [value]
        distributed.broadcast_object_list(values, src=0)
        return values[0]  # type: ignore[return-value]

    def agreement(self) -> "Agreement":
        """A block after which all ranks have gone on, or all have failed."""
        return Agreement(self)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in the order of ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def largest(self, count: int) -> int:
        """The largest of all ranks' counts."""
        if self.size == 1:
            return count
        counts = torch.tensor(count)
        distributed.all_reduce(counts, distributed.ReduceOp.MAX)
        return int(counts)

    @contextmanager
    def in_step(self) -> Generator[None]:
        """A block in which ranks wait for each other inside the model: if one fails there, all processes end.

        The others could not be told: they wait for a share of a layer, not for a message.
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
        """Add up all ranks' gradients, in place and in one message; a rank without datums has zeros."""
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


class Agreement:
    """Makes a failure on one rank a failure on all, so that nobody waits for a rank that has given up.

    Inside the block, `share` is called once, by every rank that gets there.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._is_reached = False

    def share(self, value: T) -> list[T]:
        """Every rank's value; `TrainingError` if a rank failed on its way here."""
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
    """Which datums each rank computes: the longest first, each to whoever has the fewest tokens so far."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (load + lengths[index], rank))
    return [sorted(share) for share in shares]


def combine_accounts(accounts: Sequence[dict[str, float]]) -> dict[str, float]:
    """All ranks' accounts as one: work and speed add up, time and memory are the largest, utilisation is the mean."""
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
