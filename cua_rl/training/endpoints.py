"""Where the controller finds rank 0: in processes that it starts on this machine, or at an address on another host.

Does not import torch.
"""

import asyncio
import logging
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from cua_rl.host.processes import OwnedProcess
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.host.users import computing_environment, computing_prefix
from cua_rl.training.config import TrainerConfig
from cua_rl.training.link import Address, ControllerLink
from cua_rl.types.errors import TrainerDeathError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 600.0  # nodes are allocated, and Python and torch loaded from a slow disk
_RETRY_S = 1.0


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
    """Trainer processes on this machine; rank 0 connects to a Unix socket in a folder that other users cannot enter."""

    reads_our_files = True

    def __init__(self, config: TrainerConfig, log_path: Path) -> None:
        self._num_processes = config.num_processes or 1
        self._log_path = log_path
        self._environment = rank_environment(self._num_processes, config.num_threads)
        if config.gpu_names:
            self._environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpu_names)
        self._folder: Path | None = None
        self._process: OwnedProcess | None = None

    async def open(self) -> ControllerLink:
        """Listen, start the processes, and wait until rank 0 connects; raises `TrainerDeathError` if it does not."""
        self._folder = folder = make_scratch_folder("trainer")
        socket_path = folder / "trainer.sock"
        module = ["cua_rl.training.worker", str(socket_path)]
        if self._num_processes > 1:
            module = ["cua_rl.training.launch_ranks", str(self._num_processes), str(socket_path)]
        self._process = OwnedProcess(
            [*await asyncio.to_thread(computing_prefix), sys.executable, "-m", *module],
            name="trainer",
            log_path=self._log_path,
            environment=self._environment,
        )
        called: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

        def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set_result((reader, writer))

        server = await asyncio.start_unix_server(answer, socket_path)
        await self._process.start()
        ended = asyncio.create_task(self._process.wait(), name="trainer-ended")
        try:
            await asyncio.wait((called, ended), timeout=_CONNECT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if called.done():
                return ControllerLink(*called.result())
            raise await self.death()
        finally:
            ended.cancel()
            server.close()

    async def close(self) -> None:
        """End the processes."""
        if self._process is not None:
            await self._process.stop()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def death(self) -> TrainerDeathError:
        """The error for a dead trainer: its exit status and the end of its log."""
        process = self._process
        assert process is not None
        with suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                status = await process.wait()
                tail = await asyncio.to_thread(process.log_tail)
                return TrainerDeathError(f"the trainer process ended with status {status}; its log ended with:\n{tail}")
        return TrainerDeathError(f"the trainer is running but does not answer; see {process.log_path}")


class RemoteTrainer:
    """Ranks that somebody starts on other hosts: `python -m cua_rl.recipes.trainer_node`."""

    reads_our_files = False

    def __init__(self, address: Address, token: str) -> None:
        self._address = address
        self._token = token

    async def open(self) -> ControllerLink:
        """Connect as soon as rank 0 listens; after a death, its node starts it again.

        Raises:
            ConfigError: the trainer there has another token.
            TrainerDeathError: nothing has listened for ten minutes.
        """
        deadline, is_first = time.monotonic() + _CONNECT_TIMEOUT_S, True
        while True:
            try:
                return await ControllerLink.connect(self._address, self._token)
            except OSError as error:
                if time.monotonic() > deadline:
                    raise TrainerDeathError(
                        f"expected a trainer at {self._address}, got {error} for {_CONNECT_TIMEOUT_S:.0f} s; start "
                        "python -m cua_rl.recipes.trainer_node there, or correct trainer.address"
                    ) from error
                if is_first:
                    logger.info("waiting for the trainer address=%s: %s", self._address, error)
                is_first = False
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """The ranks end with the connection."""

    async def death(self) -> TrainerDeathError:
        """The error for a connection that broke."""
        return TrainerDeathError(
            f"the trainer at {self._address} closed the connection; the output of its node says why"
        )
