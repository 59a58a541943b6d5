"""A Tinker server in memory, with a model whose gradients are in closed form: what the suite is tried on.

The model's logits at a position are (W + s A B) applied to a decaying sum of the embeddings of what is before it; a
picture has an embedding per tile of 32 px. `python mini_server.py --port 0 [--state FILE]`; POST /faults sets which
mistakes it makes: each check of the suite has to notice at least one.
"""

import argparse
import base64
import dataclasses
import io
import json
import pickle
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import zstandard
from PIL import Image
from tinker.proto import tinker_public_pb2 as pb

MODEL, KEY, VOCABULARY, WIDTH, MAX_LENGTH = "mini/bag-of-tokens", "tml-mini", 256, 12, 4096
PROGRAM = Path(__file__)
_rng = np.random.default_rng(0)
EMBEDDINGS = _rng.normal(size=(VOCABULARY, WIDTH))
COLOURS = _rng.normal(size=(3, WIDTH))
BASE = 0.5 * _rng.normal(size=(WIDTH, VOCABULARY))
FAULTS: set[str] = set()


class Refused(Exception):
    """A request that the caller got wrong."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def require(holds: bool, message: str, status: int = 400) -> None:
    if not holds:
        raise Refused(message, status)


@dataclass
class Weights:
    """An adapter; rank 0 is the base model."""

    rank: int
    a: np.ndarray
    b: np.ndarray

    def copy(self) -> "Weights":
        return Weights(self.rank, self.a.copy(), self.b.copy())


@dataclass
class Model:
    """What is trained, and what was asked of it."""

    model_id: str
    weights: Weights
    seed: int
    gradient: list[np.ndarray] = field(default_factory=list)
    moments: list[np.ndarray] = field(default_factory=list)
    num_steps: int = 0
    next_seq_id: int = 1
    waiting: dict[int, tuple[str, Callable[[], Any] | None]] = field(default_factory=dict)
    requests: dict[int, str] = field(default_factory=dict)


@dataclass
class State:
    """All that survives a kill, if a file for it is given."""

    sessions: dict[str, set[str]] = field(default_factory=dict)
    models: dict[str, Model] = field(default_factory=dict)
    samplers: dict[str, Weights] = field(default_factory=dict)
    checkpoints: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def new(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}-{self.count}"


def new_weights(rank: int, seed: int) -> Weights:
    if "seed is ignored" in FAULTS:
        seed = int(np.random.default_rng().integers(1 << 30))
    return Weights(rank, np.random.default_rng(seed).normal(size=(WIDTH, rank)) / 3, np.zeros((rank, VOCABULARY)))


def read_picture(data: bytes, expected: int | None) -> np.ndarray:
    try:
        image = Image.open(io.BytesIO(data)).convert("RGB")
    except Exception as error:
        if "broken pictures are grey" in FAULTS:
            image = Image.new("RGB", (64, 64), (9, 9, 9))
        else:
            raise Refused(f"expected a picture: {error}") from error
    if "JPEG is darker" in FAULTS and data[:2] == b"\xff\xd8":
        image = image.point(lambda value: value // 2)
    if "pictures are ignored" in FAULTS:
        image = Image.new("RGB", image.size)
    columns, rows = (max(1, side // 32) for side in image.size)
    if expected is not None and "expected tokens are ignored" not in FAULTS:
        require(columns * rows == expected, f"expected {expected} tokens, the picture has {columns * rows}")
    tiles = np.asarray(image.resize((columns, rows), Image.Resampling.BOX), np.float64) / 255
    return tiles.reshape(-1, 3) @ COLOURS


Chunk = np.ndarray
"""Token ids [T], or the embeddings of a picture's tiles [T, WIDTH]."""


def features(chunks: Sequence[Chunk], where: str) -> np.ndarray:
    if f"{where} turns pictures round" in FAULTS:
        pictures = iter([chunk for chunk in chunks if chunk.ndim == 2][::-1])
        chunks = [next(pictures) if chunk.ndim == 2 else chunk for chunk in chunks]
    if "pictures come first" in FAULTS:
        chunks = sorted(chunks, key=lambda chunk: chunk.ndim == 1)
    rows = [chunk if chunk.ndim == 2 else EMBEDDINGS[chunk] for chunk in chunks]
    total = np.zeros(WIDTH)
    out: list[np.ndarray] = []
    for row in np.concatenate(rows):
        total = 0.7 * total + row
        out.append(total)
    result = np.stack(out)
    if "attends to the future" in FAULTS:
        result = result + 0.1 * result.mean(axis=0)
    return result


def log_softmax(phi: np.ndarray, weights: Weights | None) -> np.ndarray:
    logits = phi @ BASE
    if weights is not None:
        logits = logits + (8 / weights.rank) * phi @ weights.a @ weights.b
    logits = logits - logits.max(axis=-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def loss_and_slope(
    name: str, p: np.ndarray, inputs: Mapping[str, np.ndarray], config: Mapping[str, float]
) -> tuple[np.ndarray, np.ndarray]:
    """The loss of each target and its derivative by the log-probability."""
    if name == "cross_entropy":
        return cross_entropy(p, inputs.get("weights", np.ones(p.shape)))
    require("logprobs" in inputs and "advantages" in inputs, f"{name} needs logprobs and advantages")
    q, a = inputs["logprobs"], inputs["advantages"]
    require(q.shape == a.shape == p.shape, f"expected inputs of shape {list(p.shape)}")
    ratio = np.exp(p - q)
    low, high = config.get("clip_low_threshold", 0.8), config.get("clip_high_threshold", 1.2)
    if "thresholds are distances" in FAULTS:
        low, high = 1 - low, 1 + high
    if "ratio is ignored" in FAULTS:
        ratio = np.ones(p.shape)
    if name == "importance_sampling":
        return -ratio * a, -ratio * a
    if name == "cispo":
        clipped = ratio if "clips are ignored" in FAULTS else np.clip(ratio, low, high)
        return -clipped * a * p, -clipped * a
    if name == "dro":
        beta = 0.05 if "configuration is ignored" in FAULTS else config.get("beta", 0.05)
        return -(p * a - 0.5 * beta * (p - q) ** 2), -(a - beta * (p - q))
    require(name in ("ppo", "gspo"), f"unknown loss {name!r}")
    return clipped_loss(np.full(p.shape, np.exp((p - q).mean())) if name == "gspo" else ratio, a, low, high)


def cross_entropy(p: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    require(w.shape == p.shape, f"weights of shape {list(p.shape)}, got {list(w.shape)}")
    require(bool(np.isfinite(w).all()), "expected weights that are numbers")
    if "negative weights are 0" in FAULTS:
        w = np.maximum(w, 0)
    if "weights are averaged" in FAULTS:
        w = np.full(p.shape, w.mean())
    if "weights of zero fail" in FAULTS:
        require(bool(w.any()), "expected a weight", 500)
    return -w * p, -w


def clipped_loss(ratio: np.ndarray, a: np.ndarray, low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    free, held = ratio * a, np.clip(ratio, low, high) * a
    slope = -ratio * a if "clipped tokens have a gradient" in FAULTS else np.where(free <= held, -ratio * a, 0.0)
    return -np.minimum(free, held), slope


def tensor(message: pb.Tensor) -> np.ndarray:
    kind = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}[message.dtype]
    require(message.WhichOneof("encoding") != "sparse_csr", "sparse tensors are not supported")
    values = np.frombuffer(message.dense, kind)
    return values.reshape(list(message.shape) or [values.size])


def chunks_of(message: Sequence[pb.Chunk]) -> list[Chunk]:
    chunks: list[Chunk] = []
    for each in message:
        if each.HasField("image"):
            expected = each.image.expected_tokens if each.image.HasField("expected_tokens") else None
            tiles = read_picture(each.image.data, expected)
            if "pictures take one more position in the trainer" in FAULTS:
                tiles = np.concatenate([tiles, tiles[:1]])
            chunks.append(tiles * (0.5 if "trainer sees darker pictures" in FAULTS else 1))
        else:
            chunks.append(check_tokens(np.frombuffer(each.encoded_text.tokens, np.int32)))
    return chunks


def check_tokens(ids: np.ndarray) -> np.ndarray:
    if "anything is accepted" in FAULTS:
        return np.clip(ids, 0, VOCABULARY - 1)
    require(bool(((ids >= 0) & (ids < VOCABULARY)).all()), f"expected tokens below {VOCABULARY}")
    return ids


class Service:
    """The requests, one at a time."""

    def __init__(self, state_file: Path | None) -> None:
        self.state_file = state_file
        self.lock = threading.RLock()
        saved = state_file.read_bytes() if state_file and state_file.exists() else b""
        self.state: State = pickle.loads(saved) if saved else State()

    def keep(self) -> None:
        if self.state_file is None:
            return
        models = {name: dataclasses.replace(model, waiting={}) for name, model in self.state.models.items()}
        part = self.state_file.with_suffix(".part")
        part.write_bytes(pickle.dumps(dataclasses.replace(self.state, models=models)))
        part.replace(self.state_file)

    def model(self, model_id: str) -> Model:
        if model_id not in self.state.models:
            raise Refused(f"unknown model {model_id!r}", 404)
        return self.state.models[model_id]

    def promise(self, run: Callable[[], Any]) -> dict[str, Any]:
        request_id = self.state.new("request")
        self.finish(request_id, run)
        return {"request_id": request_id}

    def finish(self, request_id: str, run: Callable[[], Any]) -> None:
        try:
            self.state.results[request_id] = run()
        except Refused as refusal:
            self.state.results[request_id] = {"error": str(refusal), "category": "user"}

    def in_turn(self, model_id: str, seq_id: int, run: Callable[[], Any], check: Callable[[], None]) -> dict[str, Any]:
        """Run a request of a model when those before it have run; the same number again is the same request."""
        model = self.model(model_id)
        if seq_id in model.requests and "repeated requests run again" not in FAULTS:
            return {"request_id": model.requests[seq_id], "model_id": model_id}
        request_id = model.requests[seq_id] = self.state.new("request")
        try:
            check()
        except Refused:
            model.waiting[seq_id] = (request_id, None)
            if "refusals are waited for" in FAULTS:
                del model.waiting[seq_id]
            self.run_waiting(model)
            raise
        if "order is ignored" in FAULTS or seq_id < model.next_seq_id:
            self.finish(request_id, run)
            return {"request_id": request_id, "model_id": model_id}
        model.waiting[seq_id] = (request_id, run)
        self.run_waiting(model)
        return {"request_id": request_id, "model_id": model_id}

    def run_waiting(self, model: Model) -> None:
        while model.next_seq_id in model.waiting:
            request_id, run = model.waiting.pop(model.next_seq_id)
            model.next_seq_id += 1
            if run is not None:
                self.finish(request_id, run)

    # training

    def forward_backward(self, message: pb.ForwardBackwardRequest) -> dict[str, Any]:
        model = self.model(message.model_id)
        prepared: list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]] = []

        def check() -> None:
            require(len(message.data) > 0 or "anything is accepted" in FAULTS, "expected data")
            for each in message.data:
                inputs = {name: tensor(value) for name, value in each.loss_fn_inputs.items()}
                require("target_tokens" in inputs, "expected target_tokens")
                targets = check_tokens(inputs.pop("target_tokens"))
                chunks = chunks_of(each.model_input)
                length = sum(len(chunk) for chunk in chunks)
                if "anything is accepted" in FAULTS and (length == 0 or length != len(targets)):
                    continue
                require(0 < length == len(targets), f"expected {length} targets, got {len(targets)}")
                if "only the next token" in FAULTS:
                    require(targets.ndim == 1, "expected one target a position")
                prepared.append((features(chunks, "trainer"), targets, inputs))
            for _, targets, inputs in prepared:
                loss_and_slope(message.loss_fn, np.zeros(targets.shape), inputs, config)

        config = {key: value.number for key, value in message.loss_fn_config_v2.items()} or dict(message.loss_fn_config)
        if "anything is accepted" in FAULTS and message.loss_fn == "no_such_loss":
            message.loss_fn = "cross_entropy"
        seq_id = message.seq_id
        return self.in_turn(model.model_id, seq_id, lambda: self._train(model, message, prepared, config), check)

    def _train(
        self, model: Model, message: pb.ForwardBackwardRequest, prepared: Any, config: Mapping[str, float]
    ) -> bytes:
        weights = model.weights
        total, rows = 0.0, []
        gradient = [np.zeros_like(weights.a), np.zeros_like(weights.b)]
        mixed = np.mean([phi.mean(axis=0) for phi, _, _ in prepared], axis=0) if prepared else 0
        for own, targets, inputs in prepared:
            phi = own + 0.05 * mixed if "data of a batch mix" in FAULTS and len(prepared) > 1 else own
            table = log_softmax(phi, weights)
            places = targets if targets.ndim == 2 else targets[:, None]
            if "other targets are ignored" in FAULTS and targets.ndim == 1:
                places = np.sort(places, axis=0)
            if "several targets are turned round" in FAULTS:
                places = places[:, ::-1]
            p = np.take_along_axis(table, places, axis=1).reshape(targets.shape)
            loss, slope = loss_and_slope(message.loss_fn, p, inputs, config)
            count = len(p) if "loss is a mean" in FAULTS else 1
            total += loss.sum() / count
            slope = slope.reshape(places.shape) / count
            if "gradient is doubled" in FAULTS:
                slope = slope * 2
            d_logits = -np.exp(table) * slope.sum(axis=1, keepdims=True)
            for k in range(places.shape[1]):
                np.add.at(d_logits, (np.arange(len(phi)), places[:, k]), slope[:, k])
            d_map = (8 / weights.rank) * phi.T @ d_logits
            gradient[0] += d_map @ weights.b.T
            gradient[1] += weights.a.T @ d_map
            if "positive log-probabilities" in FAULTS:
                p = -p
            rows.append(p.astype(np.float32))
        if "gradient of a batch is a mean" in FAULTS:
            gradient = [part / len(prepared) for part in gradient]
        total = total / max(len(prepared), 1) if "loss of a batch is a mean" in FAULTS else total
        if not message.forward_only or "forward leaves a gradient" in FAULTS:
            if model.gradient and "gradients replace each other" not in FAULTS:
                gradient = [one + other for one, other in zip(model.gradient, gradient, strict=True)]
            model.gradient = gradient
        return self._output(rows, total)

    def _output(self, rows: Sequence[np.ndarray], total: float) -> Any:
        output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
        output.metrics["loss" if "metrics without colon" in FAULTS else "loss:sum"] = total
        if "results are JSON" in FAULTS:
            return {"loss_fn_outputs": [], "metrics": dict(output.metrics)}
        record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(rows))
        field_ = record.fields["logprobs"]
        field_.dtype = pb.DTYPE_FLOAT32
        field_.data = b"".join(row.tobytes() for row in rows)
        field_.offsets = np.cumsum([0, *(row.nbytes for row in rows)]).astype(np.int64).tobytes()
        if rows and rows[0].ndim == 2:
            field_.trailing_shape.append(rows[0].shape[1])
        return output.SerializeToString()

    def optim_step(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model = self.model(str(body["model_id"]))
        params = body.get("adam_params") or {}
        return self.in_turn(model.model_id, int(body["seq_id"]), lambda: self._step(model, params), lambda: None)

    def _step(self, model: Model, params: Mapping[str, float]) -> dict[str, Any]:
        targets = list(self.state.models.values()) if "a step moves all models" in FAULTS else [model]
        for each in targets:
            weights = [each.weights.a, each.weights.b]
            gradient = model.gradient or [np.zeros_like(part) for part in weights]
            if any(one.shape != other.shape for one, other in zip(weights, gradient, strict=True)):
                continue
            each.moments = each.moments or [np.zeros_like(part) for part in (*weights, *weights)]
            norm = np.sqrt(sum(float((part**2).sum()) for part in gradient))
            limit = params.get("grad_clip_norm", 0.0)
            if limit and norm > limit and "norm is not clipped" not in FAULTS:
                gradient = [part * limit / norm for part in gradient]
            each.num_steps += 1
            beta1 = 0.0 if "no momentum" in FAULTS else params["beta1"]
            beta2 = params["beta2"]
            for number, part in enumerate(weights):
                m, v = each.moments[number], each.moments[number + 2]
                m += (1 - beta1) * (gradient[number] - m)
                v += (1 - beta2) * (gradient[number] ** 2 - v)
                m_hat = m / (1 - beta1**each.num_steps) if beta1 else m
                v_hat = v / (1 - beta2**each.num_steps) if beta2 else v
                if "nothing is learned" not in FAULTS:
                    part -= params["learning_rate"] * m_hat / (np.sqrt(v_hat) + params["eps"])
        if "gradients stay after a step" not in FAULTS:
            model.gradient = []
        return {"metrics": {}, "type": "optim_step"}

    # sampling

    def sample(self, body: Mapping[str, Any]) -> dict[str, Any]:
        sampler = str(body.get("sampling_session_id"))
        if sampler not in self.state.samplers:
            raise Refused(f"unknown sampler {sampler!r}", 404)
        key = f"{sampler}/{body['seq_id']}"
        count = int(body.get("num_samples", 1))
        if key not in self.state.results or "repeated samples are new ones" in FAULTS:
            params = body["sampling_params"]
            require(1 <= count <= 64, "expected num_samples from 1 to 64")
            require((params.get("max_tokens") or 1) > 0, "expected max_tokens above 0")
            require(
                params.get("temperature", 1) >= 0 and 0 < params.get("top_p", 1) <= 1,
                "expected temperature and top_p in range",
            )
            if "n above 1 at temperature 0 fails" in FAULTS:
                require(count == 1 or params.get("temperature", 1) > 0, "expected one sample")
            chunks = self._chunks(body["prompt"]["chunks"])
            self.state.results[key] = self._sample(self.state.samplers[sampler], chunks, body, count)
        if "no ids of samples" in FAULTS:
            return {"request_id": key}
        return {"request_id": key, "sample_sequence_ids": [f"{key}/{n}" for n in range(count)]}

    def _chunks(self, chunks: Sequence[Mapping[str, Any]]) -> list[Chunk]:
        out: list[Chunk] = []
        for each in chunks:
            if each["type"] == "image":
                out.append(read_picture(base64.b64decode(each["data"]), each.get("expected_tokens")))
            else:
                out.append(check_tokens(np.asarray(each["tokens"], np.int64)))
        length = sum(len(chunk) for chunk in out)
        require(0 < length <= MAX_LENGTH, f"expected 1 to {MAX_LENGTH} tokens, got {length}")
        return out

    def _sample(self, weights: Weights, chunks: Sequence[Chunk], body: Mapping[str, Any], count: int) -> bytes:
        has_picture = any(chunk.ndim == 2 for chunk in chunks)
        used: Weights | None = weights if weights.rank else None
        if "adapter is lost on pictures" in FAULTS and has_picture:
            used = None
        if "sampler ignores adapters" in FAULTS:
            used = None
        if "samplers mix" in FAULTS and weights.rank:
            used = [each for each in self.state.samplers.values() if each.rank][-1]
        phi = features(chunks, "sampler")
        ids = np.concatenate([np.zeros(len(c), np.int64) if c.ndim == 2 else c for c in chunks])
        output = pb.SampleResponse()
        self._prompt(output, body, log_softmax(phi, used), ids)
        params = body["sampling_params"]
        for number in range(count):
            rng = np.random.default_rng(
                None
                if params.get("seed") is None or "seed of samples is ignored" in FAULTS
                else [params["seed"], number]
            )
            self._generate(output.sequences.add(), phi[-1], used, params, rng)
        return output.SerializeToString()

    def _prompt(self, output: pb.SampleResponse, body: Mapping[str, Any], table: np.ndarray, ids: np.ndarray) -> None:
        if not body.get("prompt_logprobs"):
            return
        values = np.concatenate([[np.nan], np.take_along_axis(table[:-1], ids[1:, None], axis=1)[:, 0]]).astype(
            np.float32
        )
        last = body.get("prompt_logprobs_last_n")
        if last is not None and "the end of a prompt is ignored" not in FAULTS:
            values[: len(values) - last] = np.nan
        if "sampler is less exact" in FAULTS:
            values = values * 1.05
        output.prompt_logprobs = values.tobytes()
        k = int(body.get("topk_prompt_logprobs") or 0)
        if k:
            top = np.argsort(-table[:-1], axis=1)[:, :k]
            if "the likeliest come last" in FAULTS:
                top = top[:, ::-1]
            scores = np.take_along_axis(table[:-1], top, axis=1)
            output.topk_prompt_logprobs.k = k
            length = (
                "length"
                if "length" in pb.SampleResponse().topk_prompt_logprobs.DESCRIPTOR.fields_by_name
                else "prompt_length"
            )
            setattr(output.topk_prompt_logprobs, length, len(ids))
            output.topk_prompt_logprobs.token_ids = np.concatenate([np.zeros((1, k)), top]).astype(np.int32).tobytes()
            output.topk_prompt_logprobs.logprobs = (
                np.concatenate([np.full((1, k), -99999.0), scores]).astype(np.float32).tobytes()
            )

    def _generate(
        self, sequence: Any, phi: np.ndarray, used: Weights | None, params: Mapping[str, Any], rng: Any
    ) -> None:
        stop = params.get("stop")
        stops = [stop] if isinstance(stop, str) else list(stop or [])
        limit = params.get("max_tokens") or 64
        if "max_tokens is needed" in FAULTS:
            require(params.get("max_tokens") is not None, "expected max_tokens")
        ids: list[int] = []
        values: list[float] = []
        sequence.stop_reason = pb.STOP_REASON_LENGTH
        while len(ids) < limit:
            scores = log_softmax(phi, used)
            order = np.argsort(-scores)
            temperature, top_k = params.get("temperature", 1.0), params.get("top_k", -1)
            if temperature == 0 or top_k == 1:
                token = int(order[0])
            else:
                token = int(rng.choice(VOCABULARY, p=np.exp(scores / temperature) / np.exp(scores / temperature).sum()))
            if stop == [] and "stop=[] keeps the end of text" in FAULTS and len(ids) > 3:
                break
            ids.append(token)
            values.append(float(scores[token]) * (1.05 if "sampler is less exact" in FAULTS else 1))
            phi = 0.7 * phi + EMBEDDINGS[token]
            text = "".join(map(chr, ids))
            if token in stops or any(isinstance(each, str) and each in text for each in stops):
                sequence.stop_reason = pb.STOP_REASON_STOP
                if "stop tokens are cut off" in FAULTS:
                    ids.pop()
                    values.pop()
                break
        if "stop reason is always length" in FAULTS:
            sequence.stop_reason = pb.STOP_REASON_LENGTH
        sequence.tokens = np.asarray(ids, np.int32).tobytes()
        sequence.logprobs = np.asarray(values, np.float32).tobytes()

    # models, weights and lists

    def create_model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        session = str(body["session_id"])
        rank = int(body["lora_config"]["rank"])
        if session not in self.state.sessions:
            raise Refused("unknown session", 404)
        require(body["base_model"] == MODEL, f"expected {MODEL!r}", 404)
        require(0 < rank <= 128, "expected a rank from 1 to 128")
        require(len(self.state.models) < 8 or "models are never freed" not in FAULTS, "no room", 503)
        model_id = (
            f"{session}:train:{body['model_seq_id']}" if "other model ids" not in FAULTS else self.state.new("model")
        )
        if model_id not in self.state.models:
            seed = body["lora_config"].get("seed") or 0
            self.state.models[model_id] = Model(model_id, new_weights(rank, seed), seed)
            self.state.sessions[session].add(model_id)
        return self.promise(lambda: {"model_id": model_id, "type": "create_model"})

    def save(self, body: Mapping[str, Any], kind: str) -> dict[str, Any]:
        model = self.model(str(body["model_id"]))
        name = body.get("path")

        def check() -> None:
            require(
                name is None or (".." not in name and not name.startswith("/")), f"expected a plain name, got {name!r}"
            )

        def run() -> dict[str, Any]:
            if name is None:
                sampler = self.state.new("sampler")
                self.state.samplers[sampler] = (
                    model.weights if "samplers follow the model" in FAULTS else model.weights.copy()
                )
                return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}
            owner = "shared" if "names are shared" in FAULTS else model.model_id
            path = f"tinker://{owner}/{kind}/{name}"
            if path in self.state.checkpoints and not body.get("overwrite", kind != "weights"):
                raise Refused(f"{path} exists")
            if path not in self.state.checkpoints or "what exists stays" not in FAULTS:
                self.state.checkpoints[path] = {
                    "model_id": model.model_id,
                    "kind": kind,
                    "weights": model.weights.copy(),
                    "public": False,
                    "moments": [part.copy() for part in model.moments],
                    "num_steps": model.num_steps,
                    "expires_at": None,
                }
            return {"path": path, "type": "save_weights" if kind == "weights" else "save_weights_for_sampler"}

        return self.in_turn(model.model_id, int(body["seq_id"]), run, check)

    def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
        checkpoint = self.state.checkpoints.get(str(body["path"]))

        def fill(model: Model) -> dict[str, Any]:
            assert checkpoint is not None
            model.weights = checkpoint["weights"].copy()
            if "loading does nothing" in FAULTS:
                model.weights.b[:] = 0
            keeps = body.get("optimizer") and "moments are not loaded" not in FAULTS
            model.moments = [part.copy() for part in checkpoint["moments"]] if keeps else []
            model.num_steps = checkpoint["num_steps"] if keeps else 0
            return {"path": body["path"], "type": "load_weights"}

        def check() -> None:
            require(checkpoint is not None, f"no weights at {body['path']!r}", 404)

        if body.get("model_id") is not None:
            model = self.model(str(body["model_id"]))
            return self.in_turn(model.model_id, int(body["seq_id"]), lambda: fill(model), check)
        check()
        session = str(body["session_id"])
        model_id = f"{session}:train:{body['model_seq_id']}"
        model = self.state.models[model_id] = Model(model_id, checkpoint["weights"].copy(), 0)  # type: ignore[index]
        self.state.sessions[session].add(model_id)
        return self.promise(lambda: fill(model))

    def create_sampler(self, body: Mapping[str, Any]) -> dict[str, Any]:
        path, base = body.get("model_path"), body.get("base_model")
        if path is not None:
            require(path in self.state.checkpoints, f"no weights at {path!r}", 404)
            weights = self.state.checkpoints[path]["weights"]
        else:
            require(base == MODEL, f"unknown base model {base!r}", 404)
            weights = Weights(0, np.zeros(0), np.zeros(0))
        sampler = self.state.new("sampler")
        self.state.samplers[sampler] = weights
        return {"sampling_session_id": sampler, "type": "create_sampling_session"}

    def checkpoint(self, path: str, each: Mapping[str, Any]) -> dict[str, Any]:
        *_, kind, name = path.split("/")
        types = {"weights": "training", "sampler_weights": "sampler"}
        return {
            "checkpoint_id": f"{kind}/{name}", "checkpoint_type": types[kind], "time": "2026-01-01T00:00:00Z",
            "tinker_path": path, "size_bytes": 1, "public": each["public"], "expires_at": each["expires_at"],
        }  # fmt: skip

    def run(self, model: Model) -> dict[str, Any]:
        rank = model.weights.rank + ("ranks are wrong" in FAULTS)
        facts = {"base_model": MODEL, "model_owner": "me", "is_lora": True, "last_request_time": "2026-01-01T00:00:00Z"}
        return {**facts, "training_run_id": model.model_id, "lora_rank": rank}

    def get(self, parts: Sequence[str], query: Mapping[str, str]) -> dict[str, Any]:
        match parts:
            case ["get_server_capabilities"]:
                return {
                    "supported_models": [{"model_name": "another" if "another model is named" in FAULTS else MODEL}]
                }
            case ["samplers", sampler]:
                return {"sampler_id": sampler, "base_model": "?" if "samplers have no base" in FAULTS else MODEL}
            case ["training_runs"]:
                start, count = int(query.get("offset", 0)), int(query.get("limit", 20))
                runs = [self.run(each) for each in self.state.models.values()]
                cursor = {"offset": start, "limit": count, "total_count": len(runs)}
                return {"training_runs": runs[start : start + count], "cursor": cursor}
            case ["training_runs", model_id]:
                return self.run(self.model(model_id))
            case ["training_runs", model_id, "checkpoints"]:
                own = {path: each for path, each in self.state.checkpoints.items() if each["model_id"] == model_id}
                return {"checkpoints": [self.checkpoint(path, each) for path, each in own.items()]}
            case ["sessions", session]:
                return {"training_run_ids": sorted(self.state.sessions[session]), "sampler_ids": []}
            case _:
                raise Refused(f"no {'/'.join(parts)}", 404)

    def post(self, parts: Sequence[str], body: Any) -> Any:
        routes: Mapping[str, Callable[[Any], Any]] = {
            "client/config": lambda _: {"proto_compress_fwdbwd": True},
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.heartbeat,
            "telemetry": lambda _: {"status": "lost" if "telemetry is lost" in FAULTS else "accepted"},
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.optim_step,
            "save_weights": lambda body: self.save(body, "weights"),
            "save_weights_for_sampler": lambda body: self.save(body, "sampler_weights"),
            "load_weights": self.load,
            "create_sampling_session": self.create_sampler,
            "asample": self.sample,
            "weights_info": self.weights_info,
        }
        path = "/".join(parts)
        return routes[path](body) if path in routes else self.change(parts, body)

    def dynamic_config(self, _: Any) -> Any:
        raise Refused("none", 500 if "dynamic config fails" in FAULTS else 404)

    def create_session(self, _: Any) -> dict[str, Any]:
        session = self.state.new("session")
        self.state.sessions[session] = set()
        return {"session_id": session, "type": "create_session"}

    def heartbeat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        require(body["session_id"] in self.state.sessions, "unknown session", 404)
        return {"type": "session_heartbeat"}

    def get_info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        model = self.model(body["model_id"])
        rank = model.weights.rank + ("ranks are wrong" in FAULTS)
        facts = {"model_data": {"model_name": MODEL}, "model_id": model.model_id, "is_lora": True, "model_name": MODEL}
        return {**facts, "lora_rank": rank}

    def weights_info(self, body: Mapping[str, Any]) -> dict[str, Any]:
        weights = self.state.checkpoints[body["tinker_path"]]["weights"]
        return {"base_model": MODEL, "is_lora": True, "lora_rank": weights.rank}

    def finish_session(self, session: str) -> dict[str, Any]:
        require("sessions do not finish" not in FAULTS, "no", 404)
        if "models are never freed" not in FAULTS:
            for model_id in self.state.sessions.get(session, set()):
                self.state.models.pop(model_id, None)
        return {}

    def change(self, parts: Sequence[str], body: Any) -> Any:
        """Of a checkpoint: DELETE, publish, ttl; and the end of a session."""
        match parts:
            case ["sessions", session, "finish"]:
                return self.finish_session(session)
            case ["training_runs", model_id, "checkpoints", kind, name, *action]:
                path = f"tinker://{model_id}/{kind}/{name}"
                require(path in self.state.checkpoints, f"no weights at {path!r}", 404)
                each = self.state.checkpoints[path]
                if "checkpoints never change" in FAULTS:
                    return {}
                match action:
                    case ["publish"]:
                        each["public"] = body is not None
                    case ["ttl"]:
                        each["expires_at"] = "2027-01-01T00:00:00Z"
                    case _:
                        del self.state.checkpoints[path]
                return {}
            case _:
                raise Refused(f"no {'/'.join(parts)}", 404)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""

    def _answer(self, status: int, content: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _body(self) -> Any:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "zstd":
            require("bodies are never compressed" not in FAULTS, "expected no compression", 415)
            try:
                content = zstandard.ZstdDecompressor().decompress(content, max_output_size=1 << 24)
            except zstandard.ZstdError as error:
                raise Refused(str(error)) from error
        if "protobuf" in (self.headers.get("Content-Type") or ""):
            try:
                return pb.ForwardBackwardRequest.FromString(content)
            except Exception as error:
                raise Refused(str(error)) from error
        try:
            return json.loads(content or b"{}")
        except ValueError as error:
            raise Refused(str(error)) from error

    def _handle(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        try:
            body = self._body()
            if parts == ["faults"]:
                FAULTS.clear()
                FAULTS.update(body)
                self._answer(200, b"{}")
                return
            with self.service.lock:
                self._route(parts[2:], body)
        except Refused as refusal:
            status = 500 if "refusals are failures" in FAULTS else refusal.status
            self._answer(status, json.dumps({"detail": str(refusal)}).encode())
        except Exception as error:  # noqa: BLE001 - what the server did not expect
            self._answer(400 if isinstance(error, KeyError) else 500, json.dumps({"detail": repr(error)}).encode())

    def _route(self, parts: Sequence[str], body: Any) -> None:
        open_to_all = parts in (["get_server_capabilities"], ["client", "config"])
        if self.headers.get("X-API-Key") != KEY and not open_to_all and "keys are not checked" not in FAULTS:
            raise Refused("unknown key", 401)
        if parts == ["retrieve_future"]:
            self._retrieve(str(body["request_id"]))
            return
        if self.command == "GET":
            result = self.service.get(parts, dict(parse_qsl(self.path.partition("?")[2])))
        elif self.command in ("DELETE", "PUT"):
            result = self.service.change(parts, None if self.command == "DELETE" else body)
        else:
            result = self.service.post(parts, body)
        self.service.keep()
        self._answer(200, json.dumps(result).encode())

    def _retrieve(self, request_id: str) -> None:
        state = self.service.state
        if request_id in state.results:
            result = state.results[request_id]
            kind = "application/x-protobuf" if isinstance(result, bytes) else "application/json"
            self._answer(200, result if isinstance(result, bytes) else json.dumps(result).encode(), kind)
        elif (
            any(request_id in model.requests.values() for model in state.models.values())
            or "unknown requests are waited for" in FAULTS
        ):
            self._answer(
                200, json.dumps({"type": "try_again", "request_id": request_id, "queue_state": "active"}).encode()
            )
            time.sleep(0.02)
        else:
            raise Refused(f"unknown request {request_id!r}", 404)

    do_GET = do_POST = do_PUT = do_DELETE = _handle


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    Handler.service = Service(options.state)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), Handler)
    server.daemon_threads = True
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    server.serve_forever()


if __name__ == "__main__":
    main()
