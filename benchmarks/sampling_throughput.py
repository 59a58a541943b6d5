"""Requests and sampled tokens per second through the gateway, over a vLLM server of its own: one JSON line per figure.

    python -m benchmarks.sampling_throughput MODEL_FOLDER [--concurrency 16,64,128] [--adapter FOLDER]

Every request has a 192x320 screenshot of its own and about 120 tokens of instructions, and samples up to 24 tokens.
`cpu_ms` is the time that gateway and server together computed per request, which a busy machine changes less.
"""

import argparse
import asyncio
import io
import json
import os
import random
import tempfile
import time
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from PIL import Image, ImageDraw

from benchmarks.claims import require
from cua_rl.renderers.renderer import make_renderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import VllmServer
from cua_rl.types.rollout import AdapterRef, ModelTurn, SamplingParams

INSTRUCTIONS = "You operate a phone. Open the settings, switch the wireless network off, report what you see. " * 4


def make_request(seed: int) -> list[Any]:
    """System instructions, and a question with a screenshot that no other request has."""
    rng = random.Random(seed)
    screen = Image.new("RGB", (192, 320), (rng.randrange(256),) * 3)
    draw = ImageDraw.Draw(screen)
    for _ in range(12):
        x, y = rng.randrange(168), rng.randrange(296)
        draw.rectangle((x, y, x + 24, y + 24), fill=(rng.randrange(256), rng.randrange(256), 90))
    encoded = io.BytesIO()
    screen.save(encoded, "PNG")
    url = f"data:image/png;base64,{b64encode(encoded.getvalue()).decode()}"
    question = [
        {"type": "input_text", "text": f"Task {seed}."},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]


async def ask(gateway: Gateway, rollout_id: str, request: list[Any], slots: asyncio.Semaphore) -> tuple[ModelTurn, ...]:
    """One rollout of one turn."""
    async with slots:
        gateway.open_rollout(rollout_id)
        await gateway.openai_client(rollout_id).responses.create(model="policy", input=request)
        return gateway.close_rollout(rollout_id)


def cpu_seconds() -> float:
    """What this process and everything below it has computed."""
    this = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in [this, *this.children(recursive=True)])


def require_answers(rollouts: Sequence[Sequence[ModelTurn]], num_turns: int, policy_version: int) -> None:
    """Refuse figures unless every rollout has sampled in every turn, with one more new screenshot in each prompt."""
    num_screens = [[len(turn.prompt.images) for turn in turns] for turns in rollouts]
    shown = [image.sha256 for turns in rollouts for image in (turns[-1].prompt.images if turns else ())]
    require(
        "sampled answers",
        screenshots_by_turn=([list(range(1, num_turns + 1))] * len(rollouts), num_screens),
        different_screenshots=(num_turns * len(rollouts), len(set(shown))),
        answers_without_tokens=(0, sum(not turn.sampled_tokens for turns in rollouts for turn in turns)),
        policy_versions=({policy_version}, {turn.policy_version for turns in rollouts for turn in turns}),
    )


async def measure(gateway: Gateway, concurrency: int, first_seed: int, policy_version: int) -> dict[str, object]:
    """Three rounds of `concurrency` requests."""
    requests = [make_request(first_seed + index) for index in range(3 * concurrency)]
    slots, clock, cpu = asyncio.Semaphore(concurrency), time.perf_counter(), cpu_seconds()
    rollouts = await asyncio.gather(
        *(ask(gateway, f"{first_seed + index}", request, slots) for index, request in enumerate(requests))
    )
    seconds = time.perf_counter() - clock
    require_answers(rollouts, 1, policy_version)
    turns = [turn for rollout in rollouts for turn in rollout]
    return {
        "figure": "sampling_throughput",
        "concurrency": concurrency,
        "requests_per_s": round(len(turns) / seconds, 1),
        "sampled_tokens_per_s": round(sum(len(turn.sampled_tokens) for turn in turns) / seconds),
        "prompt_tokens": turns[0].prompt.length,
        "sampled_tokens": round(sum(len(turn.sampled_tokens) for turn in turns) / len(turns), 1),
        "cpu_ms": round(1000 * (cpu_seconds() - cpu) / len(turns), 1),
        "load": round(os.getloadavg()[0], 1),
    }


async def main(arguments: argparse.Namespace) -> None:
    """Start a server, warm it up, measure."""
    config = ServerConfig(model_path=arguments.model, max_lora_rank=arguments.max_lora_rank)
    with tempfile.TemporaryDirectory() as logs:
        async with VllmServer(config, Path(logs) / "vllm.log") as server, SamplingClient(server) as client:
            version = 0 if arguments.adapter is None else 1
            if arguments.adapter is not None:
                await client.publish(AdapterRef(path=arguments.adapter, policy_version=1))
            params = SamplingParams(max_tokens=24, temperature=1.0)
            gateway = Gateway(client, make_renderer(arguments.model), params)
            await measure(gateway, 16, 0, version)
            for index, concurrency in enumerate(int(word) for word in arguments.concurrency.split(",")):
                print(json.dumps(await measure(gateway, concurrency, 10_000 * (index + 1), version)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--adapter", type=Path, default=None)
    parser.add_argument("--max-lora-rank", type=int, default=16)
    parser.add_argument("--concurrency", default="16,64,128")
    asyncio.run(main(parser.parse_args()))
