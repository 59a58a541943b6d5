"""The controller's side of the trainer: starts the worker process and sends it requests. Does not import torch."""

import asyncio
import logging
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from cua_rl.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.errors import ConfigError, TrainingError
from cua_rl.policy import AdapterRef
from cua_rl.processes import OwnedProcess
from cua_rl.scratch import make_scratch_folder
from cua_rl.system_users import computing_environment
from cua_rl.training import wire
from cua_rl.types import Datum

logger = logging.getLogger(__name__)

_R = TypeVar("_R", bound=wire.Reply)


class TrainingClient:
    """A trainer process; an async context manager that starts it, loads the model, and stops it.

    Requests are carried out in order. Cancelling a caller does not disturb the worker: it completes the request, and
    the answer is discarded. The worker's output goes to `log_path`.

    Raises (all methods):
        TrainingError: the worker refused, failed or died; after a death, the message ends with the log's last lines.
    """

    def __init__(self, config: TrainerConfig, log_path: Path, *, num_threads: int | None = None) -> None:
        self._config = config
        # threads that spin while they wait take the cores from other processes, and from their own
        environment = {"OMP_WAIT_POLICY": "PASSIVE"} | computing_environment()
        if num_threads is not None:
            environment["OMP_NUM_THREADS"] = str(num_threads)
        elif config.num_processes > 1:
            environment.setdefault("OMP_NUM_THREADS", "1")
        if config.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(config.gpus)
        self._folder = make_scratch_folder("trainer")  # no access for other users
        self._socket_path = self._folder / "trainer.sock"
        module = ["cua_rl.training.worker"]
        if config.num_processes > 1:
            module = ["cua_rl.training.launch_ranks", str(config.num_processes)]
        self._process = OwnedProcess(
            [sys.executable, "-m", *module, str(self._socket_path)],
            name="trainer",
            log_path=log_path,
            environment=environment,
        )
        self._lock = asyncio.Lock()
        self._exchanges: set[asyncio.Task[Any]] = set()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.policy_version = 0
        """Completed optimizer steps as of the latest answer."""

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        """The policy's log-probabilities: per datum, aligned with its tokens, 0.0 off-mask."""
        request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="policy")
        return list((await self._ask(request, wire.ForwardOutput)).training_logprobs)

    async def base_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        """The same under the base model, which is the trained model with its adapter disabled."""
        request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="base")
        return list((await self._ask(request, wire.ForwardOutput)).training_logprobs)

    async def probe_logprobs(self, datums: Sequence[Datum], probe: wire.Probe) -> list[tuple[float, ...]]:
        """The same under a random adapter."""
        request = wire.Forward(datums=tuple(datums), temperature=1.0, weights="probe", probe=probe)
        return list((await self._ask(request, wire.ForwardOutput)).training_logprobs)

    async def reference_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        """The same under the reference model: the adapter of `load_reference`, else the base model."""
        request = wire.Forward(datums=tuple(datums), temperature=temperature, weights="reference")
        return list((await self._ask(request, wire.ForwardOutput)).training_logprobs)

    async def forward_backward(
        self,
        datums: Sequence[Datum],
        loss: LossConfig,
        *,
        token_weights: Sequence[float] | None = None,
        proximal_logprobs: Sequence[tuple[float, ...]] | None = None,
        reference_logprobs: Sequence[tuple[float, ...]] | None = None,
    ) -> wire.ForwardBackwardOutput:
        """Add the gradient of the loss; several calls before one `optim_step` equal one call with all their datums.

        The keyword arguments have one entry per datum; `wire.ForwardBackward` says what they mean.
        """
        request = wire.ForwardBackward(
            datums=tuple(datums),
            loss=loss,
            token_weights=None if token_weights is None else tuple(token_weights),
            proximal_logprobs=None if proximal_logprobs is None else tuple(proximal_logprobs),
            reference_logprobs=None if reference_logprobs is None else tuple(reference_logprobs),
        )
        return await self._ask(request, wire.ForwardBackwardOutput)

    async def optim_step(self, optim: OptimConfig) -> wire.OptimStepOutput:
        """Step along the gradient since the last step; without `token_weights`, its mean per trained token."""
        output = await self._ask(wire.OptimStep(optim=optim), wire.OptimStepOutput)
        self.policy_version = output.policy_version
        return output

    async def trainer_metrics(self) -> dict[str, float]:
        """Work, speed and memory of the trainer since the last call, under metric names."""
        return dict((await self._ask(wire.TrainerMetrics(), wire.TrainerMetricsOutput)).metrics)

    async def save_state(self, path: Path) -> None:
        """Write a checkpoint folder: weights, optimizer, random state, step. Complete or absent, never half."""
        await self._ask(wire.SaveState(path=path), wire.Done)

    async def load_state(self, path: Path, *, with_optimizer: bool = True) -> None:
        """Restore a checkpoint; without the optimizer only the weights, as the start of a new run."""
        done = await self._ask(wire.LoadState(path=path, with_optimizer=with_optimizer), wire.Done)
        self.policy_version = done.policy_version

    async def save_probe(self, path: Path, probe: wire.Probe) -> None:
        """Write the adapter of `probe_logprobs` as the model server loads it; the policy does not change."""
        await self._ask(wire.SaveWeightsForSampler(path=path, probe=probe), wire.Done)

    async def load_reference(self, path: Path) -> None:
        """Let KL terms pull towards the adapter in a folder; a frozen copy of it is held beside the trained one."""
        await self._ask(wire.LoadReference(path=path), wire.Done)

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef:
        """Write the folder that the model server loads: a peft adapter, or a model folder if everything is trained."""
        done = await self._ask(wire.SaveWeightsForSampler(path=path), wire.Done)
        return AdapterRef(path=path, policy_version=done.policy_version)

    async def __aenter__(self) -> Self:
        try:
            self._streams = await self._connect()
            started = await self._ask(wire.Start(config=self._config), wire.Started)
        except BaseException:
            await self._close()
            raise
        logger.info("trainer device=%s trainable=%d", started.device, started.num_trainable_parameters)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Listen, start the worker, and wait until it connects or ends."""
        called: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )

        def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            called.set_result((reader, writer))

        server = await asyncio.start_unix_server(answer, self._socket_path)
        await self._process.start()
        ended = asyncio.create_task(self._process.wait(), name="trainer-ended")
        try:
            await asyncio.wait((called, ended), return_when=asyncio.FIRST_COMPLETED)
            if not called.done():
                raise await self._death()
            return called.result()
        finally:
            ended.cancel()
            server.close()

    async def _close(self) -> None:
        for exchange in self._exchanges:
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        if self._streams is not None:
            self._streams[1].close()
        await self._process.stop()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _ask(self, request: wire.Request, expected: type[_R]) -> _R:
        exchange = asyncio.create_task(self._exchange(request), name=f"trainer-{type(request).__name__}")
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        reply = await asyncio.shield(exchange)
        if isinstance(reply, wire.Failed):
            raise (ConfigError if reply.kind == "config" else TrainingError)(reply.message)
        if not isinstance(reply, expected):
            raise TrainingError(f"expected {expected.__name__} from the trainer, got {type(reply).__name__}")
        return reply

    async def _exchange(self, request: wire.Request) -> wire.Reply:
        """Send a request and read its answer; never abandoned halfway, so that the stream is free for the next one."""
        async with self._lock:
            if self._streams is None:
                raise TrainingError("expected a running trainer: use TrainingClient in an `async with` block")
            reader, writer = self._streams
            payload = await asyncio.to_thread(wire.encode, request)
            try:
                writer.write(wire.frame_header(payload))
                writer.write(payload)
                await writer.drain()
                length = wire.frame_length(await reader.readexactly(wire.HEADER_LENGTH))
                answer = await reader.readexactly(length)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise await self._death() from error
            return await asyncio.to_thread(wire.decode, answer)

    async def _death(self) -> TrainingError:
        """The error for a dead worker: its exit status and the end of its log."""
        with suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                status = await self._process.wait()
                tail = await asyncio.to_thread(self._process.log_tail)
                return TrainingError(f"the trainer process ended with status {status}; its log ended with:\n{tail}")
        return TrainingError(f"the trainer closed the connection but is still running; see {self._process.log_path}")
