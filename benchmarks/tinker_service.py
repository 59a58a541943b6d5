# pyright: reportUnknownMemberType=false
"""What the Tinker service adds to a training step and to sampling: one JSON line per figure.

    python -m benchmarks.tinker_service [--rounds 10]

The included tiny model, with one trainer and one vLLM server. In turns, and with the same data, the unmodified SDK asks
the service for a step, and this process asks the trainer; both models begin alike, so their losses must stay equal. The
same is done with samples. `smallest` is a step of two tokens: what a request costs whatever is in it.

`costs` is the processor time of what the service does with a token, a picture of 1080x2400 (1.5 MB) and a MB, and
`at_4b` adds it up for rollouts of ten turns that keep every screenshot, against the time that `recipes.plan` expects of
Qwen3-VL-4B on an H100. A step begins when all of its request has been read and stored. Of turns, one request is read
after the other, while the model server works at those before it.
"""

import argparse
import asyncio
import json
import os
import random
import struct
import tempfile
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

from PIL import Image
from sqlalchemy import select

from benchmarks.claims import require
from benchmarks.screens_per_turn import make_screenshot
from cua_rl.database.session import make_engine
from cua_rl.database.tinker_models import TinkerModel
from cua_rl.host.http_server import serve_app
from cua_rl.host.request_limits import parse_json
from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.planning.gpu_speed import GPU_KINDS, TurnTokens, server_speed, trained_token_s
from cua_rl.planning.plan_config import Assumptions
from cua_rl.recipes.serve_tinker import Opened, Prepared, ServeTinkerConfig, open_service, prepare
from cua_rl.run.recording import start_database
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.generation import GenerateParams
from cua_rl.tinker_service.data import Pass, Reader, json_chunk, read_optim
from cua_rl.tinker_service.messages import FLOAT32, INT64, Fields, encode_pass, encode_samples, new_message
from cua_rl.tinker_service.store import Store, make_key
from cua_rl.training.client import ModelClient
from cua_rl.training.config import LoraSpec, TrainerConfig
from cua_rl.types.rollout import ModelInput

ROOT = Path(__file__).parents[1]
SDK_PYTHON = ROOT / ".venv-tinker" / "bin" / "python"
CONFIGS = ROOT / "tests" / "machine" / "model_configs"
LEARNING_RATE = 1e-3
SAMPLES, SAMPLED_TOKENS = 4, 32
NUM_TURNS, NUM_ROLLOUTS, NUM_PARALLEL = 10, 64, 64
TURN = TurnTokens(screen=2550, text=60, sampled=150, context=15_000)  # of 1080x2400, as recipes.plan assumes
TARGET = 0.1
Chunks = list[list[int] | bytes]
Data = list[tuple[Chunks, list[int], list[float]]]
"""Sequences, with the targets and weights of their positions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A batch: sequences of text, with a picture in the middle if it has a size."""

    num_sequences: int
    num_text: int
    picture_px: tuple[int, int] | None = None


SHAPES = {
    "smallest": Shape(num_sequences=1, num_text=2),
    "text": Shape(num_sequences=16, num_text=512),
    "pictures": Shape(num_sequences=8, num_text=128, picture_px=(512, 288)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """The service with its engines, and an SDK that talks to it."""

    opened: Opened
    prepared: Prepared
    store: Store
    sdk: asyncio.subprocess.Process

    def reader(self, max_tokens: int = 1_000_000) -> Reader:
        """A reader that has seen no picture yet."""
        renderer, server = self.prepared.renderer, self.prepared.config.server
        assert renderer.image_settings is not None, "the model takes pictures"
        return Reader(
            image_settings=renderer.image_settings,
            image_token_id=renderer.image_token_id,
            vocab_size=load_model_sizes(server.model_path).vocabulary,
            max_tokens=max_tokens,
            decode=renderer.decode,
        )

    async def tell_sdk(self, command: dict[str, Any]) -> dict[str, Any]:
        """Let the SDK carry out a command."""
        assert self.sdk.stdin is not None
        assert self.sdk.stdout is not None
        self.sdk.stdin.write(json.dumps(command, default=lambda data: b64encode(data).decode()).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self.sdk.stdout.readline())
        return answer

    async def num_steps(self) -> int:
        """Optimizer steps of the SDK's model, which it may still be making, as the service has recorded them."""
        return sum(num_steps for (num_steps,) in await self.store.read(select(TinkerModel.num_steps)))


def make_sequence(shape: Shape, seed: int) -> Chunks:
    """Random text and a random picture."""
    rng = random.Random(seed)
    text = [rng.randrange(40, 100) for _ in range(shape.num_text)]
    if shape.picture_px is None:
        return [text]
    width_px, height_px = shape.picture_px
    tiles = Image.frombytes("RGB", (16, 9), rng.randbytes(3 * 16 * 9))
    encoded = BytesIO()
    tiles.resize((width_px, height_px), Image.Resampling.NEAREST).save(encoded, "PNG")
    return [text[: shape.num_text // 2], encoded.getvalue(), text[shape.num_text // 2 :]]


def with_targets(chunks: Chunks, num_picture_tokens: int) -> tuple[Chunks, list[int], list[float]]:
    """A sequence as the SDK takes it: without its last token, next tokens as targets, no weight in a picture."""
    *before, last = chunks
    assert not isinstance(last, bytes), "a sequence ends with text"
    rows = [[-1] * num_picture_tokens if isinstance(chunk, bytes) else chunk for chunk in chunks]
    targets = [token for row in rows for token in row][1:]
    return [*before, last[:-1]], [max(token, 0) for token in targets], [float(token >= 0) for token in targets]


def make_body(data: Data) -> bytes:
    """The request for a pass, as the SDK would send it."""
    message = new_message("ForwardBackwardRequest")
    message.model_id, message.seq_id, message.loss_fn = "benchmark", 1, "cross_entropy"
    for chunks, targets, weights in data:
        datum = message.data.add()
        for chunk in chunks:
            if isinstance(chunk, bytes):
                image = datum.model_input.add().image
                image.data, image.format = chunk, "png"
            else:
                datum.model_input.add().encoded_text.tokens = b"".join(token.to_bytes(4, "little") for token in chunk)
        for name, kind, values in (("target_tokens", "q", targets), ("weights", "f", weights)):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense = struct.pack(f"<{len(values)}{kind}", *values)
            tensor.dtype, tensor.shape[:] = INT64 if kind == "q" else FLOAT32, [len(values)]
    body: bytes = message.SerializeToString()
    return body


async def train_in_turns(bench: Bench, model: ModelClient, name: str, rounds: int) -> dict[str, Any]:
    """Steps by the service and by the trainer alone, on the same data."""
    shape, reader = SHAPES[name], bench.reader()
    picture_tokens = 0
    if shape.picture_px is not None:
        picture_tokens = read_prompt(reader, [make_sequence(shape, 0)[1]]).length
    optim = read_optim(Fields({"adam_params": {"learning_rate": LEARNING_RATE}}))  # defaults as the service has them
    before = model.policy_version, await bench.num_steps()
    times: dict[str, list[float]] = {"service": [], "alone": []}
    losses: dict[str, list[float]] = {"service": [], "alone": []}

    async def by_service(data: Data, asked: Pass) -> tuple[float, float]:
        answer = await bench.tell_sdk({"data": data, "learning_rate": LEARNING_RATE})
        return answer["seconds"], answer["loss"]

    async def alone(data: Data, asked: Pass) -> tuple[float, float]:
        began = time.perf_counter()
        output = await model.forward_backward(asked.datums, asked.loss, token_weights=(1.0,) * len(asked.datums))
        await model.optim_step(optim)
        return time.perf_counter() - began, output.metrics["loss/total"]

    ways = {"service": by_service, "alone": alone}
    for number in range(rounds + 1):
        data = [
            with_targets(make_sequence(shape, 1000 * number + place), picture_tokens)
            for place in range(shape.num_sequences)
        ]
        asked = reader.read_pass(make_body(data))
        for way in sorted(ways, reverse=bool(number % 2)):
            seconds, value = await ways[way](data, asked)
            times[way].append(seconds)
            losses[way].append(round(value, 2))
    steps = model.policy_version - before[0], await bench.num_steps() - before[1]
    require(f"steps of {name}", losses=(losses["alone"], losses["service"]), steps=((rounds + 1,) * 2, steps))
    return compared(f"tinker_step_{name}", times) | {
        "num_tokens": sum(datum.model_input.length for datum in asked.datums),
        "num_pictures": shape.num_sequences if shape.picture_px else 0,
    }


async def sample_in_turns(bench: Bench, name: str, rounds: int) -> dict[str, Any]:
    """Samples of the base model by the service and by the sampling client alone; each has prompts of its own."""
    shape, reader = SHAPES[name], bench.reader()
    times: dict[str, list[float]] = {"service": [], "alone": []}
    num_tokens: dict[str, list[int]] = {"service": [], "alone": []}

    async def by_service(prompts: Sequence[Chunks], seed: int) -> tuple[float, int]:
        command = {"prompts": prompts, "n": SAMPLES, "max_tokens": SAMPLED_TOKENS, "seed": seed}
        answer = await bench.tell_sdk(command)
        return answer["seconds"], answer["num_tokens"]

    async def alone(prompts: Sequence[Chunks], seed: int) -> tuple[float, int]:
        inputs = [read_prompt(reader, each) for each in prompts]
        params = GenerateParams(max_tokens=SAMPLED_TOKENS, n=SAMPLES, seed=seed, ignores_end_of_turn=True)
        began = time.perf_counter()
        all_generated = await asyncio.gather(*(generate(bench, each, params) for each in inputs))
        seconds = time.perf_counter() - began
        return seconds, sum(len(one.tokens) for generated in all_generated for one in generated.sequences)

    ways: dict[str, Callable[[Sequence[Chunks], int], Awaitable[tuple[float, int]]]]
    ways = {"service": by_service, "alone": alone}
    for number in range(rounds + 1):
        for place, way in enumerate(sorted(ways, reverse=bool(number % 2))):
            first = 1_000_000 + 10_000 * number + 100 * place
            prompts = [make_sequence(shape, first + index) for index in range(shape.num_sequences)]
            seconds, count = await ways[way](prompts, number)
            times[way].append(seconds)
            num_tokens[way].append(count)
    expected = [shape.num_sequences * SAMPLES * SAMPLED_TOKENS] * (rounds + 1)
    require(f"samples of {name}", by_service=(expected, num_tokens["service"]), alone=(expected, num_tokens["alone"]))
    return compared(f"tinker_sampling_{name}", times) | {"num_prompts": shape.num_sequences, "num_samples": SAMPLES}


async def generate(bench: Bench, prompt: ModelInput, params: GenerateParams) -> Any:
    return await bench.opened.sampler.generate(prompt, params, image_token_id=bench.prepared.renderer.image_token_id)


def read_prompt(reader: Reader, chunks: Chunks) -> ModelInput:
    """A prompt as the service reads it."""
    return reader.prompt([json_chunk(_as_json(chunk)) for chunk in chunks], "prompt", room=1)


def read_request(reader: Reader, body: bytes) -> int:
    """Read the prompt of a request as the service does, which compares repeated ones by a hash."""
    read = Fields.of(parse_json(body)).items("chunks")
    return hash(reader.prompt([json_chunk(chunk) for chunk in read], "prompt", room=1))


def _as_json(chunk: list[int] | bytes) -> dict[str, object]:
    if isinstance(chunk, bytes):
        return {"type": "image", "format": "png", "data": b64encode(chunk).decode()}
    return {"type": "encoded_text", "tokens": chunk}


def compared(figure: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians without the first round, and how much longer the service takes."""
    service_s, alone_s = (median(times[way][1:]) for way in ("service", "alone"))
    ratios = [one / other for one, other in zip(times["service"][1:], times["alone"][1:], strict=True)]
    return {
        "figure": figure,
        "alone_ms": round(1000 * alone_s, 1),
        "service_ms": round(1000 * service_s, 1),
        "overhead_frac": round(median(ratios) - 1, 3),
        "load": round(os.getloadavg()[0], 1),
    }


def cpu_s(work: Callable[[], object], times: int = 5) -> float:
    """Processor time of this thread for a piece of work."""
    taken: list[float] = []
    for _ in range(times):
        began = time.thread_time()
        work()
        taken.append(time.thread_time() - began)
    return median(taken)


async def measure_costs(bench: Bench) -> dict[str, Any]:
    """What the service does with tokens, pictures and bytes."""
    text = [with_targets(make_sequence(Shape(num_sequences=1, num_text=2048), seed), 0) for seed in range(16)]
    body, num_tokens = make_body(text), 16 * 2048
    read_s = cpu_s(lambda: bench.reader().read_pass(body)) / num_tokens
    rows = [[-1.0 - 1e-3 * place for place in range(2048)] for _ in range(16)]
    answer_s = cpu_s(lambda: encode_pass(rows, {"loss:sum": 1.0})) / num_tokens
    screens = [b64decode(make_screenshot(seed, 1080, 2400).partition(",")[2]) for seed in range(8)]
    shown, words = (
        json.dumps({"chunks": [_as_json(each) for each in chunks]}).encode()
        for chunks in (screens, [list(range(40, 100)) * 32])
    )
    known = bench.reader()
    new_s = cpu_s(lambda: read_request(bench.reader(), shown)) / len(screens)
    read_request(known, shown)
    known_s = cpu_s(lambda: read_request(known, shown)) / len(screens)
    prompt_s = cpu_s(lambda: read_request(known, words)) / (60 * 32)
    prompt = read_prompt(known, make_sequence(SHAPES["text"], 7))
    generated = await generate(bench, prompt, GenerateParams(max_tokens=64, ignores_end_of_turn=True))
    sampled_s = cpu_s(lambda: encode_samples(generated, None), 50) / len(generated.sequences[0].tokens)
    ((model_id,),) = await bench.store.read(select(TinkerModel.id))
    taken: list[float] = []
    for number in range(8):
        big = random.Random(number).randbytes(5_000_000)
        row = {"model_id": model_id, "seq_id": 1_000_000 + number, "kind": "forward_backward", "status": "waiting"}
        began = time.perf_counter()
        await bench.store.add_request({**row, "body_sha256": big[:32], "body": big})
        taken.append(time.perf_counter() - began)
    return {
        "figure": "tinker_costs",
        "read_us_per_token": round(1e6 * read_s, 2),
        "prompt_us_per_token": round(1e6 * prompt_s, 2),
        "answer_us_per_token": round(1e6 * answer_s, 2),
        "sampled_us_per_token": round(1e6 * sampled_s, 2),
        "new_picture_ms": round(1e3 * new_s, 1),
        "known_picture_ms": round(1e3 * known_s, 1),
        "mb_per_picture": round(sum(map(len, screens)) / len(screens) / 1e6, 2),
        "store_ms_per_mb": round(1e3 * median(taken) / 5, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def at_4b(costs: dict[str, Any], request_ms: float) -> list[dict[str, Any]]:
    """The costs against the time of a step, and of turns, of Qwen3-VL-4B on an H100."""
    model, gpu, assume = load_model_sizes(CONFIGS / "Qwen3-VL-4B-Instruct"), GPU_KINDS["h100"], Assumptions()
    tokens = NUM_ROLLOUTS * (assume.prompt_tokens + NUM_TURNS * TURN.total)
    pictures = NUM_ROLLOUTS * NUM_TURNS
    token_s = trained_token_s(model, gpu, TURN, assume, num_turns=NUM_TURNS, lora_rank=32, recomputes=False)
    megabytes = pictures * costs["mb_per_picture"] + tokens * 16 / 1e6  # of a token: id, target, weight
    # the pictures of a trained sequence have been in its prompts, so that the service knows them
    step_s = (
        request_ms + pictures * costs["known_picture_ms"] + megabytes * costs["store_ms_per_mb"]
    ) / 1e3 + tokens * (costs["read_us_per_token"] + costs["answer_us_per_token"]) / 1e6
    speed = server_speed(model, gpu, 1, TURN, assume)
    turn_s = (
        costs["new_picture_ms"]
        + (NUM_TURNS - 1) / 2 * costs["known_picture_ms"]
        + (TURN.context * costs["prompt_us_per_token"] + TURN.sampled * costs["sampled_us_per_token"]) / 1e3
    ) / 1e3
    shape = {
        "num_rollouts": NUM_ROLLOUTS,
        "num_turns": NUM_TURNS,
        "num_tokens": round(tokens),
        "num_pictures": pictures,
    }
    sampling_s = speed.request_s(NUM_PARALLEL)
    return [
        {
            "figure": "tinker_step_at_4b",
            **shape,
            "megabytes": round(megabytes),
            "expected_step_s": round(tokens * token_s, 1),
            "service_s": round(step_s, 1),
            "overhead_frac": round(step_s / (tokens * token_s), 3),
            "target_overhead_frac": TARGET,
        },
        {
            "figure": "tinker_sampling_at_4b",
            "turns_at_a_time": NUM_PARALLEL,
            "expected_turns_s": round(sampling_s, 1),
            "service_s": round(NUM_PARALLEL * turn_s, 2),
            "overhead_frac": round((turn_s + max(NUM_PARALLEL * turn_s, sampling_s)) / sampling_s - 1, 3),
            "target_overhead_frac": TARGET,
        },
    ]


async def open_bench(stack: AsyncExitStack, folder: Path) -> Bench:
    """Start everything."""
    server = ServerConfig(max_model_len=2048)
    # without a cache of features: the second of two equal steps would find those of the first
    trainer = TrainerConfig(vision_cache_gib=0.0)
    prepared = await prepare(ServeTinkerConfig(lora_rank=8, server=server, trainer=trainer), {})
    engine = make_engine(await start_database(stack, None, folder), pool_size=10)
    stack.push_async_callback(engine.dispose)
    store, key = Store(engine), make_key()
    await store.add_key("benchmark", key)
    opened = await open_service(stack, prepared, folder, store)
    address = await stack.enter_async_context(serve_app(opened.service.app(), "127.0.0.1", 0, grace_s=1))
    pipe = asyncio.subprocess.PIPE
    sdk = await asyncio.create_subprocess_exec(
        *(SDK_PYTHON, "-m", "benchmarks.tinker_sdk", address, key), cwd=ROOT, stdin=pipe, stdout=pipe, limit=2**20
    )
    stack.push_async_callback(sdk.wait)
    assert sdk.stdin is not None
    stack.callback(sdk.stdin.close)
    return Bench(opened=opened, prepared=prepared, store=store, sdk=sdk)


async def main(rounds: int) -> None:
    """Print every figure."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tinker_service_")))
        bench = await open_bench(stack, folder)
        lora = LoraSpec(rank=8, alpha=bench.prepared.config.trainer.lora_alpha, seed=1)
        model = await bench.opened.trainer.create_model("alone", lora)
        request_ms = 0.0
        for name in SHAPES:
            figure = await train_in_turns(bench, model, name, rounds)
            print(json.dumps(figure), flush=True)
            if name == "smallest":
                request_ms = figure["service_ms"] - figure["alone_ms"]
        for name in ("text", "pictures"):
            print(json.dumps(await sample_in_turns(bench, name, rounds)), flush=True)
        costs = await measure_costs(bench)
        for figure in (costs, *at_4b(costs, request_ms)):
            print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    asyncio.run(main(parser.parse_args().rounds))
