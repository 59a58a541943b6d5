"""The controller's side of the trainer: sends it requests, and starts it again if it dies. Does not import torch."""

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

from cua_rl.metrics import merge_metrics
from cua_rl.training import wire
from cua_rl.training.config import LoraSpec, LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.endpoints import Endpoint, LocalTrainer
from cua_rl.training.folders import link_folder, read_files, write_files
from cua_rl.training.recovery import Journal, TimeLimits, num_tokens, require_same
from cua_rl.types.codec import decode, encode
from cua_rl.types.errors import ConfigError, DiskFullError, TrainerDeathError, TrainingError
from cua_rl.types.rollout import AdapterRef, Datum

logger = logging.getLogger(__name__)

_R = TypeVar("_R", bound=wire.Reply)
_FAILURES = {"config": ConfigError, "disk": DiskFullError, "training": TrainingError}
_Exchange = Callable[["ModelClient", wire.Request], Awaitable[wire.Reply]]


def require(reply: wire.Reply, expected: type[_R]) -> _R:
    """The reply, of the expected type; raises what a failure stands for."""
    if isinstance(reply, wire.Failed):
        raise _FAILURES[reply.kind](reply.message)
    if not isinstance(reply, expected):
        raise TrainingError(f"expected {expected.__name__} from the trainer, got {type(reply).__name__}")
    return reply


class ModelClient:
    """One of the models that a trainer trains; its requests are carried out in order.

    Cancelling a caller does not disturb the worker: it completes the request, and the answer is discarded.

    Raises (all methods):
        TrainingError: the worker refused or failed.
        TrainerDeathError: it died too often; the message ends with the log's last lines.
    """

    def __init__(self, name: str, exchange: _Exchange) -> None:
        self.name = name
        self.policy_version = 0
        """Completed optimizer steps as of the latest answer."""
        self.journal = Journal()
        self.cut: Path | None = None
        """The folder from which a trainer that is started again would begin."""
        self._exchange = exchange

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
        ratio_masks: Sequence[tuple[bool, ...]] | None = None,
        with_gradient: bool = True,
    ) -> wire.ForwardBackwardOutput:
        """Add the gradient of the loss; several calls before one `optim_step` equal one call with all their datums.

        The keyword arguments have one entry per datum; `wire.ForwardBackward` says what they mean. Without a gradient
        this only computes what the loss is.
        """
        request = wire.ForwardBackward(
            datums=tuple(datums),
            loss=loss,
            token_weights=None if token_weights is None else tuple(token_weights),
            proximal_logprobs=None if proximal_logprobs is None else tuple(proximal_logprobs),
            reference_logprobs=None if reference_logprobs is None else tuple(reference_logprobs),
            ratio_masks=None if ratio_masks is None else tuple(ratio_masks),
            with_gradient=with_gradient,
        )
        return await self._ask(request, wire.ForwardBackwardOutput)

    async def optim_step(self, optim: OptimConfig) -> wire.OptimStepOutput:
        """Step along the gradient since the last step; without `token_weights`, its mean per trained token."""
        output = await self._ask(wire.OptimStep(optim=optim), wire.OptimStepOutput)
        self.policy_version = output.policy_version
        return output

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

    async def _ask(self, request: wire.ModelRequest, expected: type[_R]) -> _R:
        return require(await self._exchange(self, request), expected)


class TrainingClient(ModelClient):
    """A trainer; an async context manager that starts it, loads the model, and stops it.

    It is a client of the model that the trainer begins with; `create_model` adds others on the same base model. Without
    an `endpoint` it runs on this machine, and its output goes to `log_path`.

    If a trainer process dies, all are started again and restored to where they were (`recovery.py`); callers only see
    that a request takes longer. One at which that happens more than `config.max_restarts` times fails, without a trace;
    the next one finds a trainer that is started again once more.
    """

    def __init__(
        self,
        config: TrainerConfig,
        log_path: Path,
        *,
        endpoint: Endpoint | None = None,
        limits: TimeLimits | None = None,
    ) -> None:
        super().__init__("", self._exchange_undisturbed)
        self._config = config
        self._limits = limits or TimeLimits.of_model(config)
        self._endpoint: Endpoint = endpoint or LocalTrainer(config, log_path)
        self._lock = asyncio.Lock()
        self._exchanges: set[asyncio.Task[Any]] = set()
        self._models: dict[str, ModelClient] = {"": self}
        self._cuts = log_path.with_suffix(".cuts")
        self._num_cuts = 0
        self._death: TrainerDeathError | None = None
        """Of the trainer, until it is started again."""
        self.num_restarts = 0

    async def trainer_metrics(self) -> dict[str, float]:
        """Work, speed and memory of the trainer since the last call, under metric names."""
        reply = await self._exchange_undisturbed(self, wire.TrainerMetrics())
        return merge_metrics(
            require(reply, wire.TrainerMetricsOutput).metrics, {"trainer/restarts": float(self.num_restarts)}
        )

    async def begin_step(self) -> None:
        """Let what follows depend on weights and datums alone, to the last bit."""
        require(await self._exchange_undisturbed(self, wire.BeginStep()), wire.Done)

    async def create_model(self, name: str, spec: LoraSpec) -> ModelClient:
        """Train another adapter beside the others; raises `ConfigError` if memory or the settings do not allow it."""
        model = ModelClient(name, self._exchange_undisturbed)
        try:
            require(await self._exchange_undisturbed(model, wire.CreateModel(model=name, spec=spec)), wire.Done)
        except asyncio.CancelledError:  # nobody knows the model, which will be there
            self._begin_exchange(model, wire.DropModel(model=name))
            raise
        return model

    async def drop_model(self, name: str) -> None:
        """Free the memory of a model that `create_model` added; its folders stay."""
        model = self.model(name)
        require(await self._exchange_undisturbed(model, wire.DropModel(model=name)), wire.Done)
        if model.cut is not None:
            await asyncio.to_thread(shutil.rmtree, model.cut, ignore_errors=True)

    def model(self, name: str) -> ModelClient:
        """A model by its name; raises `TrainingError` if there is none."""
        if name not in self._models:
            raise TrainingError(f"expected a model among {sorted(self._models)}, got {name!r}; create it first")
        return self._models[name]

    async def __aenter__(self) -> Self:
        try:
            await asyncio.to_thread(shutil.rmtree, self._cuts, ignore_errors=True)
            await self._endpoint.open()
            reply = await self._exchange_undisturbed(self, wire.Start(config=self._config))
            started = require(reply, wire.Started)
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

    async def _exchange_undisturbed(self, model: ModelClient, request: wire.Request) -> wire.Reply:
        return await asyncio.shield(self._begin_exchange(model, request))

    def _begin_exchange(self, model: ModelClient, request: wire.Request) -> asyncio.Task[wire.Reply]:
        exchange = asyncio.create_task(self._exchange_in_turn(model, request), name=f"trainer-{type(request).__name__}")
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        return exchange

    async def _exchange_in_turn(self, model: ModelClient, request: wire.Request) -> wire.Reply:
        """Carry out a request; it is never abandoned halfway, so that the connection is free for the next one."""
        async with self._lock:
            journal = model.journal
            # what others have seen must not be computed again, and earlier checkpoints may be deleted after a new one
            if isinstance(request, wire.SaveWeightsForSampler | wire.SaveState):
                await self._cut(model)
            if isinstance(request, wire.SaveState) and (saved := journal.saved):  # it is on disk already
                await asyncio.to_thread(link_folder, saved, request.path)
                journal.begin_from(request.path)  # the other folder may be deleted from now on
                return wire.Done(policy_version=model.policy_version)
            reply = await self._carry_out(model, request)
            if self._config.max_restarts:
                journal.add(request, reply)
                if isinstance(request, wire.SaveState) and isinstance(reply, wire.Done):
                    journal.begin_from(request.path)  # what was loaded before may be deleted from now on
            match request, reply:
                case wire.CreateModel(model=name), wire.Done():
                    self._models[name] = model
                case wire.DropModel(model=name), wire.Done():
                    del self._models[name]
                case _:
                    pass
            if isinstance(reply, wire.OptimStepOutput) and journal.is_cut_due:
                await self._cut(model)
            return reply

    async def _carry_out(self, model: ModelClient, request: wire.Request) -> wire.Reply:
        """The answer, if necessary of a restarted trainer; raises the last death if there are too many."""
        # one that has never been ready, or whose requests were not noted, is not what it was
        num_deaths, most = 0, self._config.max_restarts if self.journal.entries else 0
        while True:
            try:
                if self._death is not None:
                    await self._bring_back(self._death, most)
                return await self._send(model, request)
            except TrainerDeathError as death:
                self._death, num_deaths = death, num_deaths + 1
                if num_deaths > most:
                    raise
                logger.warning("the trainer died, time %d of at most %d at one request: %s", num_deaths, most, death)

    async def _bring_back(self, death: TrainerDeathError, most: int) -> None:
        """Start the trainer again and bring it to where it was."""
        if not most:
            raise death
        self.num_restarts += 1
        await self._endpoint.close()
        await self._endpoint.open()
        for model in list(self._models.values()):
            for earlier, expected in model.journal.entries:
                require_same(earlier, expected, await self._send(model, earlier))
        self._death = None

    async def _cut(self, model: ModelClient) -> None:
        """Save a model's state, so that a trainer that is started again begins from here."""
        if not model.journal.ends_in_step:
            return
        started, before = time.monotonic(), model.cut
        self._num_cuts += 1
        path = self._cuts / str(self._num_cuts)
        require(await self._carry_out(model, wire.SaveState(path=path)), wire.Done)
        model.cut = path
        model.journal.begin_from(path, (time.monotonic() - started) * len(self._models))  # their cuts share the time
        if before is not None:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)

    async def _send(self, model: ModelClient, request: wire.Request) -> wire.Reply:
        """Send a request and read its answer; folders travel along where the trainer does not see ours."""
        travels = isinstance(request, wire.SaveState | wire.LoadState | wire.LoadReference | wire.SaveWeightsForSampler)
        if not travels or self._endpoint.reads_our_files:
            return await self._answer(model, request)
        is_read = isinstance(request, wire.LoadState | wire.LoadReference)
        files = await asyncio.to_thread(read_files, request.path) if is_read else {}
        output = await self._answer(model, wire.WithFiles(request=request, files=files))
        if not isinstance(output, wire.FilesOutput):
            return output
        if not is_read:
            await asyncio.to_thread(write_files, request.path, output.files)
        return output.reply

    async def _answer(self, model: ModelClient, request: wire.Request) -> wire.Reply:
        """The answer; a trainer that takes far longer than it can need has died, too."""
        if model.name and isinstance(request, wire.ModelRequest):
            request = wire.ForModel(model=model.name, request=request)
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
