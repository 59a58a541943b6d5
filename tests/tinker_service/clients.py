"""What a client of the service sends, and stand-ins for trainer and model server behind the service's protocols."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from cua_rl.renderers.images import ImageSettings
from cua_rl.sampling.generation import Generated, GeneratedSequence, GenerateParams
from cua_rl.tinker_service.data import Reader
from cua_rl.tinker_service.messages import FLOAT32, INT64, new_message
from cua_rl.training.config import LossConfig, OptimConfig
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types.errors import DiskFullError, TrainerDeathError, TrainingError
from cua_rl.types.rollout import AdapterRef, Datum, ModelInput

IMAGE_TOKEN = 90
VOCABULARY = 100
MAX_TOKENS = 64
DEADLY = 999.0
"""Sum of the weights of a pass of which the trainer dies."""


def shown(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def make_reader() -> Reader:
    settings = ImageSettings(patch_size_px=16, merge_size=2, min_pixels=1024, max_pixels=65536)
    return Reader(
        image_settings=settings, image_token_id=IMAGE_TOKEN, vocab_size=VOCABULARY, max_tokens=MAX_TOKENS, decode=shown
    )


def png(width_px: int = 64, height_px: int = 32, kind: str = "PNG") -> bytes:
    """An image of 2 tokens."""
    encoded = BytesIO()
    Image.new("RGB", (width_px, height_px), (200, 30, 30)).save(encoded, kind)
    return encoded.getvalue()


@dataclass(kw_only=True)
class Picture:
    data: bytes = field(default_factory=png)
    format: str = "png"
    expected_tokens: int | None = 2


def add_datum(message: Any, chunks: Sequence[Sequence[int] | Picture], inputs: Mapping[str, Sequence[float]]) -> Any:
    """Add a datum as the SDK encodes it; returns its message."""
    datum = message.data.add()
    for chunk in chunks:
        if isinstance(chunk, Picture):
            image = datum.model_input.add().image
            image.data, image.format = chunk.data, chunk.format
            if chunk.expected_tokens is not None:
                image.expected_tokens = chunk.expected_tokens
        else:
            datum.model_input.add().encoded_text.tokens = array("i", chunk).tobytes()
    for name, values in inputs.items():
        tensor = datum.loss_fn_inputs[name]
        is_whole = name == "target_tokens"
        tensor.dense = array("q" if is_whole else "f", values).tobytes()  # type: ignore[arg-type]
        tensor.dtype, tensor.shape[:] = INT64 if is_whole else FLOAT32, [len(values)]
    return datum


def make_pass(model_id: str, seq_id: int, loss: str = "cross_entropy", *, forward_only: bool = False) -> Any:
    """A `forward_backward` request without data."""
    message = new_message("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn, message.forward_only = model_id, seq_id, loss, forward_only
    return message


def text_pass(model_id: str, seq_id: int, weight: float = 1.0, **how: bool) -> bytes:
    """One datum of three tokens, each with this weight."""
    message = make_pass(model_id, seq_id, **how)
    add_datum(message, [[1, 2, 3]], {"target_tokens": [2, 3, 4], "weights": [weight] * 3})
    body: bytes = message.SerializeToString()
    return body


@dataclass
class FakeModel:
    """Its weight moves by learning rate times summed advantages; it knows what was done to it."""

    seed: int
    done: list[str]
    weight: float = 0.0
    gradient: float | None = None
    num_steps: int = 0
    is_disk_full: bool = False

    async def forward_backward(
        self,
        datums: Sequence[Datum],
        loss: LossConfig,
        *,
        token_weights: Sequence[float] | None = None,
        ratio_masks: Sequence[tuple[bool, ...]] | None = None,
        with_gradient: bool = True,
    ) -> ForwardBackwardOutput:
        total = sum(sum(datum.advantages) for datum in datums)
        if with_gradient:
            self.done.append(f"forward_backward {total:g}")
            if total == 666.0:
                self.gradient = None
                raise TrainingError("expected a finite loss, got nan")
            if total == DEADLY:
                raise TrainerDeathError("status 137; its log ended with: Traceback")
            self.gradient = (self.gradient or 0.0) + total
        rows = tuple(tuple(self.weight if kept else 0.0 for kept in datum.loss_mask) for datum in datums)
        return ForwardBackwardOutput(training_logprobs=rows, metrics={"loss/total": total, "policy/entropy": 0.5})

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput:
        self.done.append(f"optim_step {optim.learning_rate:g}")
        if self.gradient is None:
            raise TrainingError("expected forward_backward before optim_step, got no gradient to step along")
        self.weight += optim.learning_rate * self.gradient
        gradient, self.gradient, self.num_steps = self.gradient, None, self.num_steps + 1
        return OptimStepOutput(
            policy_version=self.num_steps,
            grad_norm=abs(gradient),
            learning_rate=optim.learning_rate,
            num_trained_tokens=3,
        )

    async def save_state(self, path: Path) -> None:
        if self.is_disk_full:
            raise DiskFullError("expected room on the disk, got none")
        path.mkdir(parents=True, exist_ok=True)
        (path / "state.json").write_text(json.dumps([self.weight, self.num_steps]))

    async def load_state(self, path: Path, *, with_optimizer: bool = True) -> None:
        self.done.append("load_state")
        self.weight, num_steps = json.loads((path / "state.json").read_text())
        self.num_steps, self.gradient = num_steps if with_optimizer else 0, None

    async def save_weights_for_sampler(self, path: Path) -> AdapterRef:
        path.mkdir(parents=True, exist_ok=True)
        (path / "adapter.json").write_text(json.dumps(self.weight))
        return AdapterRef(path=path, policy_version=self.num_steps)


@dataclass
class FakeHost:
    """A trainer for several models; it knows which have been in it."""

    models: dict[str, FakeModel] = field(default_factory=dict[str, FakeModel])
    done: list[str] = field(default_factory=list[str])

    async def create_model(self, name: str, *, rank: int, seed: int) -> FakeModel:
        assert name not in self.models
        self.done.append(f"create {name}")
        self.models[name] = FakeModel(seed=seed, done=self.done)
        return self.models[name]

    async def drop_model(self, name: str) -> None:
        self.done.append(f"drop {name}")
        del self.models[name]

    async def revive(self) -> None:
        self.done.append("revive")


@dataclass
class FakeServer:
    """A model server that answers with the tokens 7 and 8, and its adapter's weight as their log-probability."""

    asked: list[tuple[ModelInput, GenerateParams, AdapterRef | None]] = field(
        default_factory=list[tuple[ModelInput, GenerateParams, AdapterRef | None]]
    )

    async def generate(
        self,
        prompt: ModelInput,
        params: GenerateParams,
        *,
        image_token_id: int,
        adapter: AdapterRef | None = None,
        sticky_key: str = "",
    ) -> Generated:
        self.asked.append((prompt, params, adapter))
        weight = 0.0 if adapter is None else json.loads((adapter.path / "adapter.json").read_text())
        one = GeneratedSequence(tokens=(7, 8), logprobs=(weight, weight), stop_reason="stop")
        scores = (None, *[-0.25] * (prompt.length - 1)) if params.prompt_logprobs else None
        return Generated(sequences=(one,) * params.n, prompt_logprobs=scores)
