"""Trains and samples on a Tinker service: Thinking Machines', or your own (`recipes.serve_tinker`).

The service has the model; this process has the tokens. The renderer writes prompts, the service's sampler answers the
gateway, and datums go to its trainer with their advantages. What a run keeps of weights are addresses: a folder
`weights/<step>` or `sampler_weights/<step>` holds the `tinker://` path under which the service stores them.

The package `tinker` is imported only here, and only by runs with training=tinker.
"""

import asyncio
import json
from bisect import bisect_left
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from importlib import import_module
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any

import httpx

from cua_rl.command_line.fields import walk_settings, with_values
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer
from cua_rl.rl.train_step import Rows
from cua_rl.run.preflight import QUESTION_TIMEOUT_S, ask
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import repository_of
from cua_rl.sampling.canary import Canary
from cua_rl.sampling.load import ServerLoad
from cua_rl.sampling.replica import RequestRejected
from cua_rl.sampling.sampler import Sampled, TurnRequest
from cua_rl.sampling.server import ServedModel
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.folders import write_files
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types.errors import ConfigError, SamplingError, TrainingError, boundary
from cua_rl.types.json_values import mapping, sequence
from cua_rl.types.rollout import AdapterRef, Datum, EncodedTextChunk, ImageChunk, ModelInput

_KEY, _ADDRESS = "TINKER_API_KEY", "TINKER_BASE_URL"
_POINTER = "tinker.json"
"""In a folder of the run: the service's path of what belongs there."""
_SAMPLER_TTL_S = 7 * 86400
"""Sampler weights are published at every step, and nothing here deletes them on the service."""
_CLIPPED_LOSSES = ("ppo", "cispo")
_LOSSES = ("importance_sampling", *_CLIPPED_LOSSES)
_FIXED = {
    *("loss.dual_clip", "loss.tis_cap", "loss.icepop_low", "loss.icepop_high", "loss.kl_loss_coef", "kl_penalty_coef"),
    *("temperature", "load_checkpoint_path", "rollout_workers"),
    *("trainer.lora_modules", "trainer.lora_alpha", "trainer.num_nodes"),
}
"""Settings that keep their defaults."""
_CLOSE_S = 10.0


def check_tinker(config: CLIConfig, environ: Mapping[str, str]) -> CLIConfig:
    """The configuration with the service's address; raises `ConfigError` for what a Tinker service cannot do."""
    address = config.base_url or environ.get(_ADDRESS)
    if not address:
        raise ConfigError(
            f"base_url: expected the address of a Tinker service with training=tinker, got none; set it, or {_ADDRESS}"
        )
    usual = {path: value for path, _, value in walk_settings(CLIConfig())}
    for path, _, value in walk_settings(config):
        expected = _LOSSES if path == "loss.name" else (usual[path],) if path in _FIXED else (value,)
        if value not in expected:
            raise ConfigError(
                f"{path}: expected {' or '.join(map(repr, expected))} with training=tinker, whose service cannot do "
                f"more, got {value!r}; change it, or train here (training=local)"
            )
    if find_spec("tinker") is None:
        raise ConfigError("training=tinker: expected the package tinker, got none; pip install 'cua_rl[tinker]'")
    # a state on the service is not deleted with its folder here: only checkpoints that stay are saved
    return with_values(config, base_url=address, trainer=with_values(config.trainer, max_restarts=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class TinkerService:
    """A service that has answered, and its model."""

    address: str
    api_key: str = field(repr=False)
    model: ServedModel


async def find_service(config: CLIConfig, environ: Mapping[str, str], max_model_len: int) -> TinkerService:
    """Ask the service at `config.base_url` what it offers; raises `ConfigError` unless it takes the key and has the
    model, with this context.
    """
    address, api_key = str(config.base_url).rstrip("/"), config.tinker_api_key or environ.get(_KEY)
    if not api_key:
        raise ConfigError(
            f"tinker_api_key: expected the key of the Tinker service at {address!r}, got none; set {_KEY}"
        )
    # not by the SDK, which asks an address without a service for minutes
    with boundary(ConfigError, f"base_url: expected a Tinker service at {address!r}"):
        async with httpx.AsyncClient(headers={"X-API-Key": api_key}, timeout=QUESTION_TIMEOUT_S) as client:
            status, body = await ask(client, "GET", f"{address}/api/v1/get_server_capabilities")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise ConfigError(
                f"tinker_api_key: expected one that {address!r} accepts, got status {status}; correct {_KEY}"
            )
        if status != HTTPStatus.OK:
            raise ValueError(f"status {status}")
        models = sequence(mapping(json.loads(body)).get("supported_models"))
        offered = {str(one["model_name"]): one for one in map(mapping, models)}
    wanted = repository_of(config.model_name or TINY_QWEN3_VL.name)
    # a folder has its own path there
    fitting = [name for name in offered if Path(name).name == Path(wanted).name]
    name = wanted if wanted in offered else fitting[0] if fitting else None
    model = offered.get(name or "", {})
    if name is None or model.get("trainable") is False or model.get("sampleable") is False:
        raise ConfigError(
            f"model_name: expected one of {repr(sorted(offered))[:2000]}, which {address!r} trains and samples, got "
            f"{wanted!r}; change it"
        )
    longest = model.get("max_context_length") or max_model_len
    if not isinstance(longest, int) or longest < max_model_len:
        raise ConfigError(
            f"max_model_len: expected at most {longest}, the context at {address!r}, got {max_model_len}; lower it"
        )
    served = ServedModel(name=name, max_model_len=max_model_len)
    return TinkerService(address=address, api_key=api_key, model=served)


@asynccontextmanager
async def open_tinker(
    service: TinkerService, config: TrainerConfig, renderer: Renderer
) -> AsyncGenerator[tuple["TinkerTrainer", "TinkerSampler"]]:
    """A session on the service, which ends with the block."""
    sdk: Any = await asyncio.to_thread(import_module, "tinker")
    session, outcome = sdk.ServiceClient(base_url=service.address, api_key=service.api_key), "errored"
    try:
        yield TinkerTrainer(service, sdk, session, config), TinkerSampler(service, sdk, session, renderer)
        outcome = "success"
    finally:
        with suppress(SamplingError, TimeoutError), boundary(SamplingError, "the service may be gone"):
            async with asyncio.timeout(_CLOSE_S):
                await session.close(outcome)


class TinkerTrainer:
    """A model on the service; `rl.train_step.Trainer` and `training.client.TrainingClient` say what the methods do.

    It is created with the first request, or from the checkpoint of a resumed run. Raises `TrainingError` if the service
    refuses or fails; what can be sent again, the SDK has then sent again.
    """

    def __init__(self, service: TinkerService, sdk: Any, session: Any, config: TrainerConfig) -> None:
        self._service, self._sdk, self._session = service, sdk, session
        self._config = config
        self._client: Any = None
        self.policy_version = 0
        """Optimizer steps so far."""

    async def begin_step(self) -> None:
        return

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        assert temperature == 1.0, "check_tinker has refused others"
        data = await asyncio.to_thread(self._data, datums, weights=[datum.loss_mask for datum in datums])
        return _rows(datums, await self._ask(lambda client: client.forward(data, "cross_entropy")))

    async def reference_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        raise ConfigError("expected no KL term with training=tinker: the service has no reference model")

    async def forward_backward(
        self,
        datums: Sequence[Datum],
        loss: LossConfig,
        *,
        token_weights: Sequence[float] | None = None,
        proximal_logprobs: Rows | None = None,
        reference_logprobs: Rows | None = None,
    ) -> ForwardBackwardOutput:
        """As by our own trainer: the service sums, so the weight of a datum's tokens goes into their advantages."""
        assert token_weights is not None
        assert proximal_logprobs is reference_logprobs is None, "check_tinker has refused losses that need them"
        weighted = [
            [advantage * weight for advantage in datum.advantages]
            for datum, weight in zip(datums, token_weights, strict=True)
        ]
        sampled = [datum.sampling_logprobs for datum in datums]
        data = await asyncio.to_thread(self._data, datums, logprobs=sampled, advantages=weighted)
        thresholds = {"clip_low_threshold": 1.0 - loss.clip_low, "clip_high_threshold": 1.0 + loss.clip_high}
        settings = thresholds if loss.name in _CLIPPED_LOSSES else None
        output = await self._ask(lambda client: client.forward_backward(data, loss.name, settings))
        num_tokens = sum(datum.num_trained_tokens for datum in datums)
        metrics = {"optim/num_datums": float(len(datums)), "optim/trained_tokens": float(num_tokens)}
        if "loss:sum" in output.metrics:
            metrics["loss/total"] = output.metrics["loss:sum"]
        return ForwardBackwardOutput(training_logprobs=tuple(_rows(datums, output)), metrics=metrics)

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput:
        params = self._sdk.AdamParams(
            learning_rate=optim.learning_rate,
            beta1=optim.beta1,
            beta2=optim.beta2,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            grad_clip_norm=optim.grad_clip_norm,
        )
        metrics: Mapping[str, float] = (await self._ask(lambda client: client.optim_step(params))).metrics or {}
        self.policy_version += 1
        norms = [value for name, value in metrics.items() if "grad_norm" in name]
        return OptimStepOutput(
            policy_version=self.policy_version,
            grad_norm=norms[0] if norms else 0.0,  # not every service tells
            learning_rate=optim.learning_rate,
            num_trained_tokens=0,
        )

    async def trainer_metrics(self) -> dict[str, float]:
        return {}

    async def save_state(self, path: Path) -> None:
        saved = await self._ask(lambda client: client.save_state(path.name))
        await self._point(path, saved.path)

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef:
        saved = await self._ask(lambda client: client.save_weights_for_sampler(path.name, ttl_seconds=_SAMPLER_TTL_S))
        await self._point(path, saved.path)
        return AdapterRef(path=path, policy_version=self.policy_version)

    async def load_state(self, path: Path) -> None:
        """Go on from a checkpoint of this or of an earlier session."""
        pointer = await asyncio.to_thread(_read_pointer, path)
        with boundary(TrainingError, f"load {pointer['path']} of {path}"):
            load = self._session.create_training_client_from_state_with_optimizer
            self._client = await (await asyncio.to_thread(load, pointer["path"]))
        self.policy_version = int(pointer["policy_version"])

    async def _point(self, path: Path, there: str) -> None:
        pointer = {"path": there, "policy_version": self.policy_version, "base_url": self._service.address}
        await asyncio.to_thread(write_files, path, {_POINTER: json.dumps(pointer).encode()})

    async def _ask(self, request: Callable[[Any], Awaitable[Any]]) -> Any:
        with boundary(TrainingError, f"the Tinker service at {self._service.address}"):
            if self._client is None:
                create, model = self._session.create_lora_training_client, self._service.model.name
                settings = {"rank": self._config.lora_rank, "seed": self._config.seed, "train_unembed": False}
                self._client = await (await asyncio.to_thread(create, model, **settings))
            return await request(self._client)

    def _data(self, datums: Sequence[Datum], **inputs: Sequence[Sequence[float]]) -> list[Any]:
        """The datums with tokens as targets of those before them; `inputs`, one value per token, move along."""
        data: list[Any] = []
        for index, datum in enumerate(datums):
            rows = {name: list(map(float, values[index][1:])) for name, values in inputs.items()}
            targets = datum.model_input.token_ids(0)[1:]  # of images none, whose values are all 0
            prompt = _sdk_prompt(self._sdk, datum.model_input, without_last=True)
            data.append(self._sdk.Datum(model_input=prompt, loss_fn_inputs={"target_tokens": targets, **rows}))
        return data


class TinkerSampler:
    """Answers turns on the service; `sampling.client.SamplingClient` says what the methods do."""

    def __init__(self, service: TinkerService, sdk: Any, session: Any, renderer: Renderer) -> None:
        self._service, self._sdk, self._session = service, sdk, session
        self._renderer = renderer
        self._clients: dict[Path | None, Any] = {}
        self.current: AdapterRef | None = None

    @property
    def replicas(self) -> tuple["TinkerSampler", ...]:
        """The service counts as one model server."""
        return (self,)

    @property
    def addresses(self) -> tuple[tuple[str, ServedModel], ...]:
        return ((self._service.address, self._service.model),)

    @property
    def max_model_len(self) -> int:
        return self._service.model.max_model_len

    async def publish(self, adapter: AdapterRef, canary: Canary | None = None) -> None:
        """Answer new turns with these weights; the parity gate of the next step shows whether the service does."""
        await self._client_of(adapter)
        self.current = adapter

    def pin(self, adapter: AdapterRef) -> None: ...

    def unpin(self, adapter: AdapterRef) -> None: ...

    def forget(self, sticky_key: str) -> None: ...

    async def fetch_load(self) -> ServerLoad:
        """None that it tells: requests wait there, and weights stay."""
        return ServerLoad(kv_cache_frac=0.0, num_waiting=0, num_running=0)

    async def sample_turn(
        self, turn: TurnRequest, *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> tuple[Sampled, AdapterRef | None]:
        """The answer to the prompt as the renderer writes it; raises `SamplingError`."""
        used, params = adapter or self.current, turn.params
        if params.grammar:
            what = (
                "expected no forced tool and no format of the text, which a Tinker service cannot sample; leave it out"
            )
            raise RequestRejected(HTTPStatus.BAD_REQUEST, what)
        settings = self._sdk.SamplingParams(
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            seed=params.seed,
            stop=list(self._renderer.stop_token_ids),
        )
        client = await self._client_of(used)
        with boundary(SamplingError, f"the Tinker service at {self._service.address}"):
            prompt = await asyncio.to_thread(_sdk_prompt, self._sdk, turn.prompt)
            answer = await client.sample(prompt, 1, settings)
            (sequence,) = answer.sequences
            if len(sequence.tokens) != len(sequence.logprobs):
                raise ValueError("expected a log-probability for each token, got fewer or more")
            _require_finite(sequence.logprobs)
            num_tokens, is_stopped = await asyncio.to_thread(self._length, sequence.tokens, params.stops)
            sampled = Sampled(
                prompt_ids=tuple(turn.prompt.token_ids(self._renderer.image_token_id)),
                tokens=tuple(sequence.tokens[:num_tokens]),
                logprobs=tuple(sequence.logprobs[:num_tokens]),
                is_complete=is_stopped or sequence.stop_reason == "stop",
                cached_tokens=answer.prompt_cache_hit_tokens,
            )
        return sampled, used

    def _length(self, tokens: Sequence[int], stops: Sequence[str]) -> tuple[int, bool]:
        """How many tokens an answer has that ends with the one that completes a stop, and whether there is one.

        The wire takes texts or tokens to stop at, and the end of turn is a token: the rest is left out here, which
        changes nothing of what is before it. Raises `ValueError` for what is no token.
        """

        def has_stop(length: int) -> bool:
            text = self._renderer.decode(tokens[:length])
            return any(stop in text for stop in stops)

        is_stopped = has_stop(len(tokens))
        lengths = range(len(tokens) + 1)
        return bisect_left(lengths, True, key=has_stop) if is_stopped else len(tokens), is_stopped

    async def _client_of(self, adapter: AdapterRef | None) -> Any:
        path = None if adapter is None else adapter.path
        if path not in self._clients:
            weights = {"base_model": self._service.model.name}
            if path is not None:
                weights = {"model_path": (await asyncio.to_thread(_read_pointer, path))["path"]}
            with boundary(SamplingError, f"the Tinker service at {self._service.address}"):
                created = await asyncio.to_thread(partial(self._session.create_sampling_client, **weights))
                self._clients[path] = await created
        return self._clients[path]


def _sdk_prompt(sdk: Any, prompt: ModelInput, *, without_last: bool = False) -> Any:
    """The prompt in the SDK's types; the last token, which is text, may be left out."""
    chunks = [
        sdk.types.ImageChunk(data=chunk.image.data, format=chunk.image.format, expected_tokens=chunk.expected_tokens)
        if isinstance(chunk, ImageChunk)
        else sdk.EncodedTextChunk(tokens=list(chunk.tokens))
        for chunk in prompt.chunks
    ]
    if without_last:
        last = prompt.chunks[-1]
        assert isinstance(last, EncodedTextChunk), "expected a sequence that ends with sampled tokens"
        chunks[-1:] = [sdk.EncodedTextChunk(tokens=list(last.tokens[:-1]))] if last.length > 1 else []
    return sdk.ModelInput(chunks=chunks)


def _rows(datums: Sequence[Datum], output: Any) -> list[tuple[float, ...]]:
    """The service's log-probabilities of targets, per datum and token, 0.0 off-mask; raises `TrainingError`."""
    with boundary(TrainingError, "expected a log-probability for each token from the Tinker service"):
        found = [one["logprobs"].data for one in output.loss_fn_outputs]
        for row in found:
            _require_finite(row)
        return [
            (0.0, *(value if on else 0.0 for value, on in zip(row, datum.loss_mask[1:], strict=True)))
            for datum, row in zip(datums, found, strict=True)
        ]


def _require_finite(logprobs: Sequence[float]) -> None:
    if not all(map(isfinite, logprobs)):
        raise ValueError("expected finite log-probabilities, got others")


def _read_pointer(path: Path) -> dict[str, Any]:
    """The service's path of what belongs in a folder of the run, and its policy version."""
    with boundary(ConfigError, f"expected {path / _POINTER}, which a run with training=tinker writes"):
        return json.loads((path / _POINTER).read_text(encoding="utf-8"))
