"""Small data: tokens that any vocabulary has, pictures, the SDK's datums and its losses as formulas.

Axes: T targets of a datum.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import tinker
from PIL import Image
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto

from tinker_conformance.expect import Numbers
from tinker_conformance.server import wait

Chunk = Sequence[int] | types.ImageChunk
Floats = Sequence[float] | Numbers
LossConfig = Mapping[str, float]
Batch = tuple[Sequence[types.Datum], str | Callable[..., Any], LossConfig | None]
"""Data, the loss, by name or as a function of log-probabilities, and its configuration."""

LOWEST_TOKEN, HIGHEST_TOKEN = 33, 120
"""Byte-level vocabularies, and tiny ones, have text here, and no control tokens."""


def tokens(seed: int, count: int) -> list[int]:
    """Random token ids, the same for the same seed."""
    return np.random.default_rng(seed).integers(LOWEST_TOKEN, HIGHEST_TOKEN, count).tolist()


def picture(seed: int, *, side_px: int = 64, file_format: str = "png") -> types.ImageChunk:
    """A square picture of sixteen random tiles; the negative of `seed` gives a plain grey, which JPEG keeps exactly."""
    if seed < 0:
        image = Image.new("RGB", (side_px, side_px), (-seed, -seed, -seed))
    else:
        tiles = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        image = Image.fromarray(tiles).resize((side_px, side_px), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, format=file_format)
    return types.ImageChunk(data=file.getvalue(), format="png" if file_format == "png" else "jpeg")


def prompt(*chunks: Chunk) -> types.ModelInput:
    """What a model reads."""
    return types.ModelInput(
        chunks=[c if isinstance(c, types.ImageChunk) else types.EncodedTextChunk(tokens=list(c)) for c in chunks]
    )


def tensor(values: npt.ArrayLike) -> types.TensorData:
    """Whole numbers as int64, others as float32."""
    array = np.asarray(values)
    return types.TensorData.from_numpy(array.astype(np.int64 if array.dtype.kind == "i" else np.float32))


def datum(*chunks: Chunk, targets: npt.ArrayLike, **inputs: npt.ArrayLike) -> types.Datum:
    """One sequence and what its loss needs; every input has one number per target."""
    named = {"target_tokens": np.asarray(targets, np.int64), **inputs}
    return types.Datum(model_input=prompt(*chunks), loss_fn_inputs={k: tensor(v) for k, v in named.items()})


def text(seed: int, count: int = 10, weights: Floats | None = None) -> types.Datum:
    """`count` random tokens of which all but the first are targets, weighted 1."""
    ids = tokens(seed, count + 1)
    return datum(ids[:-1], targets=ids[1:], weights=np.ones(count) if weights is None else weights)


def weighted(of: types.Datum, weights: Floats) -> types.Datum:
    """The same sequence with other weights of its targets."""
    return with_inputs(of, weights=weights)


def with_inputs(of: types.Datum, **inputs: Floats) -> types.Datum:
    """The same sequence with other inputs of a loss."""
    named = {"target_tokens": of.loss_fn_inputs["target_tokens"], **{k: tensor(v) for k, v in inputs.items()}}
    return types.Datum(model_input=of.model_input, loss_fn_inputs=named)


def request(model_id: str, seq_id: int, data: Sequence[types.Datum], **options: object) -> pb.ForwardBackwardRequest:
    """The message that the SDK sends for these data."""
    inputs = types.ForwardBackwardInput(data=list(data), loss_fn="cross_entropy", loss_fn_config=None)
    message = forward_backward_request_to_proto(
        types.ForwardBackwardRequest(forward_backward_input=inputs, model_id=model_id, seq_id=seq_id)
    )
    message.forward_only = bool(options.get("forward_only", False))
    message.loss_fn = str(options.get("loss_fn", "cross_entropy"))
    return message


def adam(eta: float, *, grad_clip_norm: float = 0.0) -> types.AdamParams:
    """AdamW's step without memory, and with an epsilon so large that it moves by `eta` times the gradient.

    With beta1 = beta2 = 0, the step is lr g / (|g| + eps); for |g| much smaller than eps that is (lr / eps) g.
    """
    epsilon = 1e4
    return types.AdamParams(
        learning_rate=eta * epsilon, beta1=0.0, beta2=0.0, eps=epsilon, weight_decay=0.0, grad_clip_norm=grad_clip_norm
    )


def submit(client: tinker.TrainingClient, batch: Batch) -> tinker.APIFuture[types.ForwardBackwardOutput]:
    """Send one forward_backward."""
    data, loss, config = batch
    if not isinstance(loss, str):
        return client.forward_backward_custom(list(data), loss)
    return client.forward_backward(list(data), loss, dict(config) if config else None)  # type: ignore[arg-type]


def step(client: tinker.TrainingClient, *batches: Batch, eta: float, grad_clip_norm: float = 0.0) -> None:
    """Add the gradients of all batches and move by `eta` times their sum."""
    futures = [submit(client, batch) for batch in batches]
    optim = client.optim_step(adam(eta, grad_clip_norm=grad_clip_norm))
    for future in futures:
        wait(future)
    wait(optim)


def supervised(*data: types.Datum) -> Batch:
    """A batch for the cross entropy."""
    return (data, "cross_entropy", None)


def logprobs(client: tinker.TrainingClient, *data: types.Datum) -> list[Numbers]:
    """The trainer's log-probability of every target, per datum [T]."""
    output = wait(client.forward(list(data), "cross_entropy"))
    return [np.asarray(each["logprobs"].data, np.float64) for each in output.loss_fn_outputs]


def move(
    client: tinker.TrainingClient, *batches: Batch, eta: float, on: types.Datum, grad_clip_norm: float = 0.0
) -> float:
    """By how much a step lowers the cross entropy of `on`."""
    weights = np.asarray(on.loss_fn_inputs["weights"].data)
    before = logprobs(client, on)[0]
    step(client, *batches, eta=eta, grad_clip_norm=grad_clip_norm)
    return float((weights * (logprobs(client, on)[0] - before)).sum())


def find_eta(client: tinker.TrainingClient, on: types.Datum, per_target: float = 0.01) -> float:
    """A step of which the log-probability of each target of `on` changes by about `per_target` when trained on it.

    Small enough for the change to be linear in the gradient, large enough to be seen.
    """
    num_targets = np.abs(on.loss_fn_inputs["weights"].data).sum()
    eta = 1e-4
    for _ in range(12):
        change = abs(move(client, supervised(on), eta=eta, on=on)) / num_targets
        if change < 1e-5:
            eta *= 30
        elif 0.3 * per_target < change < 3 * per_target:
            return eta * per_target / change
        else:
            eta *= min(max(per_target / change, 1e-3), 100)
    return eta


Formula = Callable[[Numbers, Numbers, Numbers], tuple[Numbers, Numbers]]
"""From log-probabilities p, those at sampling time q and advantages a, each [T], the loss of each target and minus its
derivative by p: the weights with which the cross entropy has the same gradient."""


def importance_sampling(p: Numbers, q: Numbers, a: Numbers) -> tuple[Numbers, Numbers]:
    """-(ratio a), whose derivative is -(ratio a)."""
    return -np.exp(p - q) * a, np.exp(p - q) * a


def ppo(low: float, high: float) -> Formula:
    """-min(ratio a, clip(ratio, low, high) a); no gradient where the clipped term is smaller."""

    def formula(p: Numbers, q: Numbers, a: Numbers) -> tuple[Numbers, Numbers]:
        return _clipped(np.exp(p - q), a, low, high)

    return formula


def cispo(low: float, high: float) -> Formula:
    """-(clip(ratio, low, high), held constant) a p."""

    def formula(p: Numbers, q: Numbers, a: Numbers) -> tuple[Numbers, Numbers]:
        clipped = np.clip(np.exp(p - q), low, high)
        return -clipped * a * p, clipped * a

    return formula


def dro(beta: float) -> Formula:
    """-(p a - beta/2 (p - q)^2)."""

    def formula(p: Numbers, q: Numbers, a: Numbers) -> tuple[Numbers, Numbers]:
        return -(p * a - 0.5 * beta * (p - q) ** 2), a - beta * (p - q)

    return formula


def gspo(low: float, high: float) -> Formula:
    """PPO's loss with the geometric mean of a sequence's ratios, each token with its own derivative."""

    def formula(p: Numbers, q: Numbers, a: Numbers) -> tuple[Numbers, Numbers]:
        return _clipped(np.full(p.shape, np.exp((p - q).mean())), a, low, high)

    return formula


def _clipped(ratio: Numbers, a: Numbers, low: float, high: float) -> tuple[Numbers, Numbers]:
    free, held = ratio * a, np.clip(ratio, low, high) * a
    return -np.minimum(free, held), np.where(free <= held, ratio * a, 0.0)
