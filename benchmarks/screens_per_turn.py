"""Processor time of vLLM's API process for each turn of rollouts whose prompts keep every screenshot: JSON lines.

    python -m benchmarks.screens_per_turn [--turns 8] [--rollouts 4] [--size 1080x2400] [--image-cache-gib 4]

The whole path of a run: gateway, sampling client, and a vLLM server of its own with the package's tiny model, whose
context is made longer. Every turn adds a screenshot, so turn 8 has eight in its prompt, seven of them known. `api` is
the server's HTTP process, which reads requests and prepares images; `engine` is the process that computes;
`controller` is this one. A first rollout warms everything up and is not counted.
"""

import argparse
import asyncio
import io
import json
import os
import random
import shutil
import tempfile
import time
from base64 import b64encode
from pathlib import Path
from typing import Any

import psutil
from PIL import Image, ImageDraw

from benchmarks.sampling_throughput import require_answers
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import VllmServer
from cua_rl.types.rollout import ModelTurn, SamplingParams

CONTEXT = 65536
ANSWER_TOKENS = 8


def make_screenshot(seed: int, width_px: int, height_px: int) -> str:
    """A screen with icons, lines of text and a photograph, as a `data:` URL: about 1 MB at 1080x2400."""
    rng = random.Random(seed)
    screen = Image.new("RGB", (width_px, height_px), (250, 250, 250))
    draw = ImageDraw.Draw(screen)
    for _ in range(400):
        x, y = rng.randrange(width_px), rng.randrange(height_px)
        draw.rectangle((x, y, x + 90, y + 24), fill=(rng.randrange(256), rng.randrange(256), 90))
        draw.text((x, y + 30), f"Line {rng.randrange(10**6)} of a list", fill=(20, 20, 20))
    photograph = Image.effect_noise((width_px // 2, height_px // 4), 60).convert("RGB")
    screen.paste(photograph, (rng.randrange(width_px // 2), rng.randrange(height_px // 2)))
    encoded = io.BytesIO()
    screen.save(encoded, "PNG")
    return f"data:image/png;base64,{b64encode(encoded.getvalue()).decode()}"


def with_long_context(folder: Path) -> Path:
    """The tiny model, told that it has positions for a whole rollout, and that it takes images of any size."""
    shutil.copytree(TINY_QWEN3_VL, folder)
    for name in ("config.json", "preprocessor_config.json"):
        settings = json.loads((folder / name).read_text())
        if name == "config.json":
            settings["text_config"]["max_position_embeddings"] = CONTEXT
        else:
            settings["size"]["longest_edge"] = 16777216  # as published for Qwen3-VL
        (folder / name).write_text(json.dumps(settings))
    return folder


def server_processes() -> dict[str, psutil.Process]:
    """The server's HTTP process and its engine, a child of the former."""
    this = psutil.Process()
    api = next(process for process in this.children(recursive=True) if "--served-model-name" in process.cmdline())
    guarded = [child for child in api.children() if "--served-model-name" in child.cmdline()]
    api = guarded[0] if guarded else api
    engine = max(api.children(recursive=True), key=lambda process: process.memory_info().rss)
    return {"api": api, "engine": engine, "controller": this}


async def run_rollout(gateway: Gateway, name: str, screenshots: list[str]) -> tuple[ModelTurn, ...]:
    """As many turns as there are screenshots, each with all screenshots so far."""
    gateway.open_rollout(name)
    agent = gateway.openai_client(name)
    history: list[Any] = [{"role": "system", "content": f"You operate a phone, rollout {name}."}]
    for turn, url in enumerate(screenshots):
        content = [{"type": "input_text", "text": f"Turn {turn}."}]
        history.append({"role": "user", "content": [*content, {"type": "input_image", "image_url": url}]})
        answer = await agent.responses.create(model="policy", input=history)
        history += [item.model_dump(exclude_none=True) for item in answer.output]
    return gateway.close_rollout(name)


async def measure(gateway: Gateway, options: argparse.Namespace) -> dict[str, object]:
    """Processor time of each process, divided by the number of turns."""
    width, height = map(int, options.size.split("x"))
    seeds = iter(range(10**6))
    rollouts = [
        [make_screenshot(next(seeds), width, height) for _ in range(options.turns)] for _ in range(1 + options.rollouts)
    ]
    await run_rollout(gateway, "warm-up", rollouts.pop())
    processes = server_processes()
    before = {name: sum(process.cpu_times()[:2]) for name, process in processes.items()}
    clock = time.perf_counter()
    done = await asyncio.gather(*(run_rollout(gateway, str(index), urls) for index, urls in enumerate(rollouts)))
    num_turns = options.turns * options.rollouts
    seconds = time.perf_counter() - clock
    require_answers(done, options.turns, 0)
    spent = {name: sum(process.cpu_times()[:2]) - before[name] for name, process in processes.items()}
    return {
        "figure": "screens_per_turn",
        "screenshot": f"{options.size}, {len(rollouts[0][0]) / 2**20:.1f} MiB as a URL",
        "turns": options.turns,
        "rollouts_at_once": options.rollouts,
        "image_cache_gib": options.image_cache_gib,
        **{f"{name}_cpu_ms_per_turn": round(1000 * value / num_turns) for name, value in spent.items()},
        "turns_per_s": round(num_turns / seconds, 2),
        "prompt_mismatches": gateway.prompt_mismatches,
        "engine_gib": round(processes["engine"].memory_info().rss / 2**30, 2),
        "load": round(os.getloadavg()[0], 1),
    }


async def main(options: argparse.Namespace) -> None:
    """Start a server, measure, print."""
    with tempfile.TemporaryDirectory() as folder:
        model = with_long_context(Path(folder) / "model")
        config = ServerConfig(
            model_path=model,
            max_lora_rank=8,
            max_model_len=CONTEXT,
            max_images=options.turns,
            image_cache_gib=options.image_cache_gib,
        )
        async with VllmServer(config, Path(folder) / "vllm.log") as server, SamplingClient(server) as client:
            params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=1.0)
            print(json.dumps(await measure(Gateway(client, make_renderer(model), params), options)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=4)
    parser.add_argument("--size", default="1080x2400")
    parser.add_argument("--image-cache-gib", type=float, default=4.0)
    asyncio.run(main(parser.parse_args()))
