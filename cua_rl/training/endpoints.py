"""Where the trainer's processes are: on this machine (`LocalTrainer`), or on nodes (`run/trainer_nodes.py`).

Does not import torch.
"""

import asyncio
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from cua_rl.host.processes import OwnedProcess
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import computing_environment, computing_prefix
from cua_rl.training.config import TrainerConfig
from cua_rl.training.link import exchange_frames
from cua_rl.types.errors import TrainerDeathError

_END_TIMEOUT_S = 10.0


class Endpoint(Protocol):
    """The trainer's processes, as the client sees them; after a death they are closed and opened again."""

    reads_our_files: bool
    """Whether a path means the same to them as to the controller."""

    async def open(self) -> None:
        """Start the processes; raises `TrainerDeathError` if that fails."""
        ...

    async def ask(self, payload: bytes) -> bytes:
        """Rank 0's answer to an encoded request; raises `TrainerDeathError` if the processes end before."""
        ...

    async def close(self) -> None:
        """End the processes."""
        ...


def rank_environment(num_processes: int, num_threads: int | None = None) -> dict[str, str]:
    """The environment of the trainer processes of one machine; no secret of ours."""
    # threads that spin while they wait take the cores from other processes, and from their own
    # rows differ in length: segments that grow leave no holes that only an equally long row could fill
    environment = {"OMP_WAIT_POLICY": "PASSIVE"} | computing_environment()
    if "PYTORCH_CUDA_ALLOC_CONF" not in environment:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if num_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_threads)
    elif num_processes > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


class LocalTrainer:
    """Trainer processes on this machine; rank 0 connects to a Unix socket in a folder that other users cannot enter.

    `among_nodes` are variables that place them among those of other machines.
    """

    reads_our_files = True

    def __init__(self, config: TrainerConfig, log_path: Path, *, among_nodes: Mapping[str, str] | None = None) -> None:
        self._num_processes = config.num_processes or 1
        self._log_path = log_path
        self._among_nodes = among_nodes
        self._environment = rank_environment(self._num_processes, config.num_threads) | dict(among_nodes or {})
        if config.gpu_names:
            self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpu_names)
        self._folder: Path | None = None
        self._process: OwnedProcess | None = None
        self._server: asyncio.Server | None = None
        self._rank_0: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] | None = None

    async def open(self) -> None:
        """Listen, and start the processes."""
        self._folder = folder = make_scratch_folder("trainer")
        socket_path = folder / "trainer.sock"
        module = ["cua_rl.training.worker"]
        if self._num_processes > 1 or self._among_nodes is not None:
            module = ["cua_rl.training.launch_ranks", str(self._num_processes)]
        words = (sys.executable, "-m", *module, str(socket_path))
        self._process = OwnedProcess(
            [*await asyncio.to_thread(computing_prefix), *words],
            name="trainer",
            log_path=self._log_path,
            environment=self._environment,
        )
        self._rank_0 = called = asyncio.get_running_loop().create_future()

        def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set_result((reader, writer))

        self._server = await asyncio.start_unix_server(answer, socket_path)
        await self._process.start()

    async def ask(self, payload: bytes) -> bytes:
        """Rank 0's answer, to the first request as soon as it connects."""
        assert self._rank_0 is not None
        ended = asyncio.create_task(self.ended(), name="trainer-ended")
        try:
            await asyncio.wait((self._rank_0, ended), return_when=asyncio.FIRST_COMPLETED)
            if not self._rank_0.done():
                raise ended.result()
            return await exchange_frames(*self._rank_0.result(), payload)
        except (OSError, EOFError) as error:
            await asyncio.wait((ended,), timeout=_END_TIMEOUT_S)
            if not ended.done():
                raise TrainerDeathError(
                    f"the trainer closed the connection but is still running; see {self._log_path}"
                ) from error
            raise ended.result() from error
        finally:
            ended.cancel()

    async def close(self) -> None:
        """End the processes."""
        if self._rank_0 is not None and self._rank_0.done():
            self._rank_0.result()[1].close()
        if self._server is not None:
            self._server.close()
        if self._process is not None:
            await self._process.stop()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def ended(self) -> TrainerDeathError:
        """Wait for the end of the processes; the error that says why."""
        assert self._process is not None
        status = await self._process.wait()
        tail = await asyncio.to_thread(self._process.log_tail)
        return TrainerDeathError(f"the trainer process ended with status {status}; its log ended with:\n{tail}")
