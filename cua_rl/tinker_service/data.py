"""The SDK's data as ours: datums, losses, optimizer settings, prompts; refuses what the trainer cannot express.

A datum of the SDK has N input tokens and, at every position, the target that it predicts; ours is the sequence of N + 1
tokens, inputs and last target, with what belongs to a target at the target's own position.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import isfinite
from typing import Any, TypeVar, cast

from PIL import Image
from pybase64 import b64decode

from cua_rl.command_line.fields import with_values
from cua_rl.host.request_limits import RequestRefused
from cua_rl.renderers.images import ImageSettings, image_size, num_image_tokens
from cua_rl.renderers.request_error import RequestError
from cua_rl.tinker_service.messages import FLOAT32, INT64, Fields, numbers, parse_message
from cua_rl.training.config import LossConfig, LossName, OptimConfig
from cua_rl.types.conversation import EncodedImage, ImageFormat
from cua_rl.types.rollout import Chunk, Datum, EncodedTextChunk, ImageChunk, ModelInput

T = TypeVar("T")

MAX_DATUMS = 16_384  # of a request; the SDK sends 1,024
_MAX_CHUNKS = 4_096
_MOST_KNOWN = 65_536
_FORMATS: dict[str, ImageFormat] = {"png": "png", "jpeg": "jpeg"}
_CLIPPED = ("clip_low_threshold", "clip_high_threshold")
_LOSSES: dict[str, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": (),
    "ppo": _CLIPPED,
    "cispo": _CLIPPED,
    "gspo": _CLIPPED,
    "dro": ("beta",),
}
"""Losses of the SDK, and the settings that they may come with."""
_RATIO_MASK = "sequence_ratio_mask"
_POLICY_INPUTS = ("target_tokens", "logprobs", "advantages")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What a `forward_backward` request asks for."""

    model_id: str
    seq_id: int
    datums: tuple[Datum, ...]
    loss: LossConfig
    is_forward_only: bool
    ratio_masks: tuple[tuple[bool, ...], ...] | None = None
    """Tokens over which the ratio of a sequence is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    """An image as it was sent."""

    data: bytes
    format: ImageFormat
    expected_tokens: int | None


@dataclass(slots=True, kw_only=True)
class Reader:
    """Reads what clients send for one base model."""

    image_settings: ImageSettings
    image_token_id: int
    vocab_size: int
    max_tokens: int
    """Of a sequence."""
    decode: Callable[[Sequence[int]], str]
    """The text of tokens."""
    _known_images: set[str] = field(default_factory=set[str])
    """Hashes of images that have been decoded without an error."""
    _turns: dict[int, asyncio.Semaphore] = field(default_factory=dict[int, asyncio.Semaphore])

    async def in_turn(self, key_id: int, read: Callable[..., T], *given: object) -> T:
        """What `read` makes of a body, in a thread: two for a key at a time, as others need threads, too."""
        async with self._turns.setdefault(key_id, asyncio.Semaphore(2)):
            return await asyncio.to_thread(read, *given)

    def read_pass(self, body: bytes) -> Pass:
        """A `forward_backward` request; raises `RequestRefused` for what cannot be trained as it says."""
        message = parse_message("ForwardBackwardRequest", body)
        if not 1 <= len(message.data) <= MAX_DATUMS:
            raise RequestRefused(400, f"expected 1 to {MAX_DATUMS} data, got {len(message.data)}")
        loss = _loss(message)
        read = [self._datum(index, datum, message.loss_fn) for index, datum in enumerate(message.data)]
        datums = tuple(datum for datum, _ in read)
        return Pass(
            model_id=message.model_id,
            seq_id=message.seq_id,
            datums=datums,
            loss=loss,
            is_forward_only=message.forward_only,
            ratio_masks=tuple(mask for _, mask in read) if loss.name == "gspo" else None,
        )

    def _datum(self, index: int, message: Any, loss: str) -> tuple[Datum, tuple[bool, ...]]:
        """A datum, and the tokens over which the ratio of its sequence is taken: without a mask, those to train."""
        where = f"data[{index}]"
        chunks = (_proto_chunk(chunk, where, self.max_tokens) for chunk in message.model_input)
        prompt = self.prompt(chunks, where, room=1)
        allowed = ("target_tokens", "weights") if loss == "cross_entropy" else _POLICY_INPUTS
        allowed = (*allowed, _RATIO_MASK) if loss == "gspo" else allowed
        other = sorted(set(message.loss_fn_inputs) - set(allowed))
        if other:
            raise RequestRefused(400, f"expected only {allowed} in {where}.loss_fn_inputs for {loss}, got {other[:5]}")
        rows: dict[str, Sequence[Any]] = {
            name: _row(message.loss_fn_inputs, name, prompt.length, where)
            for name in allowed
            if name not in ("weights", _RATIO_MASK) or name in message.loss_fn_inputs
        }
        targets, weights = rows["target_tokens"], rows.get("weights") or rows.get("advantages")
        weights = [1.0] * prompt.length if weights is None else weights
        is_text = [isinstance(chunk, EncodedTextChunk) for chunk in prompt.chunks for _ in range(chunk.length)]
        predicts_text = [*is_text[1:], True]
        self._check_targets(prompt, targets, weights, predicts_text, where)
        datum = Datum(
            rollout_id=str(index),
            model_input=_with_token(prompt, targets[-1]),
            loss_mask=(False, *predicts_text),
            advantages=_shifted(weights, predicts_text),
            sampling_logprobs=_shifted(rows.get("logprobs", [0.0] * prompt.length), predicts_text),
            policy_versions=(),
        )
        in_ratio = tuple(map(bool, _shifted(rows.get(_RATIO_MASK, weights), predicts_text)))
        return datum, in_ratio if any(in_ratio) else datum.loss_mask

    def _check_targets(
        self,
        prompt: ModelInput,
        targets: Sequence[int],
        weights: Sequence[float],
        predicts_text: Sequence[bool],
        where: str,
    ) -> None:
        """Raise `RequestRefused` for targets that are not the tokens that follow."""
        if not 0 <= targets[-1] < self.vocab_size:
            raise RequestRefused(400, f"expected target tokens below {self.vocab_size} in {where}, got {targets[-1]}")
        ids = [*prompt.token_ids(-1)[1:], targets[-1]]
        for place, (target, token, is_text) in enumerate(zip(targets, ids, predicts_text, strict=True)):
            if is_text and target != token:
                raise RequestRefused(
                    400,
                    f"expected {where}.target_tokens[{place}] to be the next token of model_input, {token}, got "
                    f"{target}: other targets cannot be trained here",
                )
            if not is_text and weights[place]:
                raise RequestRefused(
                    400, f"expected weight 0 at position {place} of {where}, whose next token is of an image"
                )

    def prompt(self, chunks: Iterable[EncodedTextChunk | _Picture], where: str, *, room: int) -> ModelInput:
        """Text and images of a prompt that leaves room for more tokens; raises `RequestRefused`."""
        read: list[Chunk] = []
        length = 0
        for chunk in chunks:
            if isinstance(chunk, EncodedTextChunk) and not chunk.tokens:
                continue
            if isinstance(chunk, _Picture):
                read.append(self._image(chunk, where))
            elif 0 <= min(chunk.tokens) <= max(chunk.tokens) < self.vocab_size:
                read.append(chunk)
            else:
                raise RequestRefused(400, f"expected tokens from 0 to {self.vocab_size - 1} in {where}, got others")
            length += read[-1].length
            if length > self.max_tokens - room or len(read) > _MAX_CHUNKS:
                break  # before the next image is decoded
        if not 1 <= length <= self.max_tokens - room or len(read) > _MAX_CHUNKS:
            raise RequestRefused(
                400,
                f"expected 1 to {self.max_tokens - room} tokens in at most {_MAX_CHUNKS} chunks of {where}, got "
                f"{length} or more; the service's server.max_model_len sets the limit",
            )
        return ModelInput(chunks=tuple(read))

    def _image(self, picture: _Picture, where: str) -> ImageChunk:
        try:
            width_px, height_px = image_size(picture.data)
            num_tokens = num_image_tokens(width_px, height_px, self.image_settings)
        except RequestError as error:
            raise RequestRefused(400, f"{where}: {error}") from None
        image = EncodedImage(data=picture.data, format=picture.format, width_px=width_px, height_px=height_px)
        if image.sha256 not in self._known_images:
            try:
                with Image.open(BytesIO(picture.data), formats=(picture.format.upper(),)) as opened:
                    opened.load()
            except (OSError, SyntaxError, ValueError) as error:
                raise RequestRefused(400, f"expected a whole {picture.format} image in {where}, got {error}") from None
            if len(self._known_images) >= _MOST_KNOWN:
                self._known_images.clear()
            self._known_images.add(image.sha256)
        if picture.expected_tokens not in (None, num_tokens):
            raise RequestRefused(
                400,
                f"expected {num_tokens} expected_tokens for an image of {width_px}x{height_px} pixels in {where}, got "
                f"{picture.expected_tokens}",
            )
        return ImageChunk(image=image, expected_tokens=num_tokens)


def _proto_chunk(chunk: Any, where: str, most: int) -> EncodedTextChunk | _Picture:
    match chunk.WhichOneof("chunk"):
        case "encoded_text":
            return EncodedTextChunk(tokens=tuple(numbers(chunk.encoded_text.tokens, "i", most)))
        case "image" if chunk.image.format in _FORMATS and not chunk.image.HasField("override_dimensions"):
            image = chunk.image
            expected = image.expected_tokens if image.HasField("expected_tokens") else None
            return _Picture(data=image.data, format=_FORMATS[image.format], expected_tokens=expected)
        case other:
            raise RequestRefused(
                400, f"expected text, PNG or JPEG images as they are in {where}.model_input, got {other or 'nothing'}"
            )


def json_chunk(value: object) -> EncodedTextChunk | _Picture:
    """A chunk of a prompt in JSON; raises `RequestRefused`."""
    chunk = Fields.of(value, "a chunk")
    kind = chunk.text("type", pattern="encoded_text|image")
    if kind == "encoded_text":
        given = chunk.items("tokens")
        tokens = tuple(token for token in given if isinstance(token, int) and not isinstance(token, bool))
        if len(tokens) < len(given):
            raise RequestRefused(400, "expected whole numbers as tokens, got others")
        return EncodedTextChunk(tokens=tokens)
    encoded = chunk.values.get("data")
    try:
        data = b64decode(encoded if isinstance(encoded, str) else "*", validate=True)
    except ValueError:
        raise RequestRefused(400, "expected an image as base64, got something else") from None
    expected = chunk.optional_whole("expected_tokens", 0, 2**31)
    return _Picture(data=data, format=_FORMATS[chunk.text("format", pattern="png|jpeg")], expected_tokens=expected)


def _row(inputs: Any, name: str, length: int, where: str) -> Sequence[Any]:
    """A row with one value per position; raises `RequestRefused` for other shapes, types or numbers."""
    where = f"{where}.loss_fn_inputs[{name!r}]"
    if name not in inputs:
        raise RequestRefused(400, f"expected {where}, got none")
    tensor = inputs[name]
    is_whole = name == "target_tokens" or (name == _RATIO_MASK and tensor.dtype == INT64)
    dtype, kind = (INT64, "q") if is_whole else (FLOAT32, "f")
    if tensor.WhichOneof("encoding") != "dense" or list(tensor.shape) not in ([], [length]) or tensor.dtype != dtype:
        raise RequestRefused(
            400,
            f"expected {where} as a dense {'int64' if kind == 'q' else 'float32'} tensor of shape [{length}], one "
            f"value per token of model_input, got shape {list(tensor.shape)[:4]}",
        )
    values = numbers(tensor.dense, kind, length)
    if len(values) != length or not (kind == "q" or all(map(isfinite, values))):
        raise RequestRefused(400, f"expected {length} finite values in {where}, got {len(values)}, or others")
    return values


def _with_token(prompt: ModelInput, token: int) -> ModelInput:
    """The prompt and one more token, in its last chunk if that is text."""
    *before, last = prompt.chunks
    if isinstance(last, EncodedTextChunk):
        return ModelInput(chunks=(*before, EncodedTextChunk(tokens=(*last.tokens, token))))
    return ModelInput(chunks=(*prompt.chunks, EncodedTextChunk(tokens=(token,))))


def _shifted(values: Sequence[float], is_kept: Sequence[bool]) -> tuple[float, ...]:
    """Values of predicting positions at those of their targets, 0 where nothing is predicted."""
    return (0.0, *(value if kept else 0.0 for value, kept in zip(values, is_kept, strict=True)))


def _loss(message: Any) -> LossConfig:
    """The loss, with absolute thresholds of the ratio (0.8, 1.2) as distances from 1; raises `RequestRefused`."""
    if message.loss_fn not in _LOSSES:
        raise RequestRefused(400, f"expected loss_fn among {sorted(_LOSSES)}, got {message.loss_fn[:100]!r}")
    name, known = cast("LossName", message.loss_fn), _LOSSES[message.loss_fn]
    given: dict[str, object] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        given[key] = value.text if value.WhichOneof("value") == "text" else value.number
    other = sorted(set(given) - set(known))
    if other:
        raise RequestRefused(400, f"expected loss_fn_config of {name} with {list(known)}, got {other[:5]}")
    settings = Fields(given)
    low, high = settings.number(_CLIPPED[0], 0.0, 1.0, 0.8), settings.number(_CLIPPED[1], 1.0, 11.0, 1.2)
    clips = {"clip_low": round(1.0 - low, 9), "clip_high": round(high - 1.0, 9)} if known is _CLIPPED else {}
    return with_values(LossConfig(name=name), dro_beta=settings.number("beta", 0.0, 1e6, 0.05), **clips)


def read_optim(fields: Fields) -> OptimConfig:
    """The optimizer step of a request; raises `RequestRefused` for other optimizers than AdamW."""
    fields.refuse_other("optimizer_params")
    params = fields.inner("adam_params")
    return OptimConfig(
        learning_rate=params.number("learning_rate", 0.0, 1e12, 1e-4),
        beta1=params.number("beta1", 0.0, 1 - 1e-9, 0.9),
        beta2=params.number("beta2", 0.0, 1 - 1e-9, 0.95),
        eps=params.number("eps", 0.0, 1e12, 1e-12),
        weight_decay=params.number("weight_decay", 0.0, 1e12, 0.0),
        grad_clip_norm=params.number("grad_clip_norm", 0.0, 1e12, 0.0),
    )
