"""The controller's side of the trainer: sends it requests, and starts it again if it dies. Does not import torch."""

import asyncio
import logging
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from cua_rl.metrics import merge_metrics
from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.endpoints import Endpoint, LocalTrainer
from cua_rl.training.folders import link_folder, read_files, write_files
from cua_rl.training.recovery import Journal, TimeLimits, num_tokens, require_same
from cua_rl.types.codec import decode, encode
from cua_rl.types.errors import ConfigError, DiskFullError, TrainerDeathError, TrainingError
from cua_rl.types.rollout import AdapterRef, Datum

logger = logging.getLogger(__name__)

_R = TypeVar("_R", bound=wire.Reply)
_FAILURES = {"config": ConfigError, "disk": DiskFullError, "training": TrainingError}


class TrainingClient:
    """A trainer; an async context manager that starts it, loads the model, and stops it.

    Requests are carried out in order. Cancelling a caller does not disturb the worker: it completes the request, and
    the answer is discarded. Without an `endpoint` it runs on this machine, and its output goes to `log_path`.

    If a trainer process dies, all are started again, `config.max_restarts` times at most without an optimizer step in
    between, and restored to where they were (`recovery.py`); callers only see that a request takes longer.

    Raises (all methods):
        TrainingError: the worker refused or failed.
        TrainerDeathError: it died too often; the message ends with the log's last lines.
    """

    def __init__(
        self,
        config: TrainerConfig,
        log_path: Path,
        *,
        endpoint: Endpoint | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        self._config = config
        self._limits = limits or TimeLimits.of_model(config)
        self._endpoint: Endpoint = endpoint or LocalTrainer(config, log_path)
        self._lock = asyncio.Lock()
        self._exchanges: set[asyncio.Task[Any]] = set()
        self._journal = Journal()
        self._cuts = log_path.with_suffix(".cuts")
        self._num_cuts = 0
        self._num_failed_starts = 0
        """Deaths since the last optimizer step."""
        self.num_restarts = 0
        self.policy_version = 0
        """Completed optimizer steps as of the latest answer."""

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        """The policy's log-probabilities: per datum, aligned with its tokens, 0.0 off-mask."""
        return await self._forward(wire.Forward(datums=tuple(datums), temperature=temperature, weights="policy"))

    async def base_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        """The same under the base model, which is the trained model with its adapter disabled."""
        return await self._forward(wire.Forward(datums=tuple(datums), temperature=temperature, weights="base"))

    async def probe_logprobs(self, datums: Sequence[Datum], probe: wire.Probe) -> list[tuple[float, ...]]:
        """The same under a random adapter."""
        request = wire.Forward(datums=tuple(datums), temperature=1.0, weights="probe", probe=probe)
        return await self._forward(request)

    async def reference_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        """The same under the reference model: the adapter of `load_reference`, else the base model."""
        return await self._forward(wire.Forward(datums=tuple(datums), temperature=temperature, weights="reference"))

    async def _forward(self, request: wire.Forward) -> list[tuple[float, ...]]:
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
        output = await self._ask(wire.TrainerMetrics(), wire.TrainerMetricsOutput)
        return merge_metrics(output.metrics, {"trainer/restarts": float(self.num_restarts)})

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
            await asyncio.to_thread(shutil.rmtree, self._cuts, ignore_errors=True)
            await self._endpoint.open()
            started = await self._ask(wire.Start(config=self._config), wire.Started)
        except BaseException:
            await self._close()
            raise
        self._limits.has_gpu = started.device.startswith("cuda")
        logger.info("trainer device=%s trainable=%d", started.device, started.num_trainable_parameters)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._close()

    async def _close(self) -> None:
        for exchange in self._exchanges:
            exchange.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await self._endpoint.close()
        await asyncio.to_thread(shutil.rmtree, self._cuts, ignore_errors=True)

    async def _ask(self, request: wire.Request, expected: type[_R]) -> _R:
        exchange = asyncio.create_task(self._exchange(request), name=f"trainer-{type(request).__name__}")
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        reply = await asyncio.shield(exchange)
        if isinstance(reply, wire.Failed):
            raise _FAILURES[reply.kind](reply.message)
        if not isinstance(reply, expected):
            raise TrainingError(f"expected {expected.__name__} from the trainer, got {type(reply).__name__}")
        return reply

    async def _exchange(self, request: wire.Request) -> wire.Reply:
        """Carry out a request; it is never abandoned halfway, so that the connection is free for the next one."""
        async with self._lock:
            if isinstance(request, wire.SaveWeightsForSampler):  # what others have seen must not be computed again
                await self._cut()
            if isinstance(request, wire.SaveState) and (saved := self._journal.saved):  # it is on disk already
                await asyncio.to_thread(link_folder, saved, request.path)
                self._journal.begin_from(request.path)  # the other folder may be deleted from now on
                return wire.Done(policy_version=self.policy_version)
            reply = await self._carry_out(request)
            if self._config.max_restarts:
                self._journal.add(request, reply)
            if isinstance(reply, wire.OptimStepOutput):
                self._num_failed_starts = 0
                if self._journal.is_cut_due:
                    await self._cut()
            return reply

    async def _carry_out(self, request: wire.Request) -> wire.Reply:
        """The answer, if necessary of a restarted trainer."""
        while True:
            try:
                return await self._send(request)
            except TrainerDeathError as death:
                if not self._journal.entries:  # it has never been ready
                    raise
                await self._restart(death)

    async def _restart(self, death: TrainerDeathError) -> None:
        """Start the trainer again and bring it to where it was; raises the last death if that happens too often."""
        while True:
            if self._num_failed_starts >= self._config.max_restarts:
                raise death
            self._num_failed_starts += 1
            self.num_restarts += 1
            logger.warning(
                "the trainer died and is started again, time %d of %d since the last optimizer step: %s",
                self._num_failed_starts,
                self._config.max_restarts,
                death,
            )
            await self._endpoint.close()
            try:
                await self._endpoint.open()
                for earlier, expected in self._journal.entries:
                    require_same(earlier, expected, await self._send(earlier))
            except TrainerDeathError as again:
                death = again
            else:
                return

    async def _cut(self) -> None:
        """Save the trainer's state, so that a trainer that is started again begins from here."""
        if not self._journal.ends_in_step:
            return
        started, before = time.monotonic(), self._cuts / str(self._num_cuts)
        self._num_cuts += 1
        path = self._cuts / str(self._num_cuts)
        reply = await self._carry_out(wire.SaveState(path=path))
        if isinstance(reply, wire.Failed):
            raise _FAILURES[reply.kind](f"{reply.message}; trainer.max_restarts=0 writes nothing between checkpoints")
        self._journal.begin_from(path, time.monotonic() - started)
        await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    async def _send(self, request: wire.Request) -> wire.Reply:
        """Send a request and read its answer; folders travel along where the trainer does not see ours."""
        if self._endpoint.reads_our_files:
            return await self._answer(request)
        match request:
            case wire.LoadState(path=path) | wire.LoadReference(path=path):
                files = await asyncio.to_thread(read_files, path)
                output = await self._answer(wire.WithFiles(request=request, files=files))
            case wire.SaveState(path=path) | wire.SaveWeightsForSampler(path=path):
                output = await self._answer(wire.WithFiles(request=request, files={}))
                if isinstance(output, wire.FilesOutput):
                    await asyncio.to_thread(write_files, path, output.files)
            case _:
                output = await self._answer(request)
        return output.reply if isinstance(output, wire.FilesOutput) else output

    async def _answer(self, request: wire.Request) -> wire.Reply:
        """The answer; a trainer that takes far longer than it can need has died, too."""
        payload = await asyncio.to_thread(encode, request, wire.Request)
        started, limit_s = time.monotonic(), self._limits.limit_s(request)
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._endpoint.ask(payload)
        except TimeoutError as error:
            raise TrainerDeathError(
                f"expected the answer to {type(request).__name__} of {num_tokens(request)} tokens within "
                f"{limit_s:.0f} s, got none: the trainer hangs; its log says where"
            ) from error
        self._limits.note(request, time.monotonic() - started)
        return await asyncio.to_thread(decode, answer, wire.Reply)
