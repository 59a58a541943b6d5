"""How long a new policy takes from the trainer to the sampler: one JSON line per figure.

    python -m benchmarks.publish_latency [--publications 8] [--base-url http://127.0.0.1:8000]

Real trainer, real vLLM (one of its own, or the one at `--base-url`), the package's tiny model, rank 16. `save` is
writing the adapter; `canary` is what the trainer says of the canary; `serve` is loading it, proving it on the server,
announcing it and unloading the oldest. `vllm_load` is the server's own time for the same folder under another name: the
limit, which nothing around it can beat.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.claims import require
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rl.served_policy import ServedPolicy, make_canary
from cua_rl.sampling.address import server_client
from cua_rl.sampling.canary import Canary, text_canary
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import ExternalServer, VllmServer
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.types.rollout import AdapterRef


async def load_bare(server: VllmServer | ExternalServer, path: Path, name: str) -> float:
    """Seconds that vLLM itself takes to load a folder; unloaded again."""
    async with server_client(server.base_url, server.api_key, timeout_s=60.0) as client:
        clock = time.perf_counter()
        body = {"lora_name": name, "lora_path": str(path)}
        (await client.post("/v1/load_lora_adapter", json=body)).raise_for_status()
        seconds = time.perf_counter() - clock
        (await client.post("/v1/unload_lora_adapter", json={"lora_name": name})).raise_for_status()
        return seconds


async def main(options: argparse.Namespace) -> None:
    """Publish again and again, print medians and the worst."""
    folder = Path(tempfile.mkdtemp(prefix="publish_latency_"))
    times: dict[str, list[float]] = {"save": [], "canary": [], "serve": [], "vllm_load": []}
    async with AsyncExitStack() as stack:
        server = _make_server(options, folder)
        await stack.enter_async_context(server)
        config = TrainerConfig(model_path=TINY_QWEN3_VL, lora_rank=16, lora_alpha=16)
        trainer = await stack.enter_async_context(TrainingClient(config, folder / "trainer.log"))
        sampler = await stack.enter_async_context(SamplingClient(server))
        prompt = text_canary(make_renderer(TINY_QWEN3_VL))

        async def canary() -> Canary:
            clock = time.perf_counter()
            made = await make_canary(trainer, prompt, limit=0.02)
            times["canary"].append(time.perf_counter() - clock)
            return made

        async def serve(adapter: AdapterRef, canary: Canary | None) -> None:
            # every publication has to be a new version, though nothing was trained in between
            await sampler.publish(replace(adapter, policy_version=len(times["serve"])), canary)

        policy = ServedPolicy(
            trainer=trainer,
            make_canary=canary,
            load_and_prove=serve,
            state_path=lambda step: folder / "weights" / f"{step:06d}",
            sampler_path=lambda step: folder / "sampler_weights" / f"{step:06d}",
            record_checkpoint=lambda step, state, adapter, is_interim: None,
        )
        for step in range(options.publications):
            clock = time.perf_counter()
            saved = await policy.save(step)
            times["save"].append(time.perf_counter() - clock - times["canary"][-1])
            times["vllm_load"].append(await load_bare(server, saved.adapter.path, f"bare-{step}-{os.getpid()}"))
            clock = time.perf_counter()
            await policy.serve(saved)
            times["serve"].append(time.perf_counter() - clock)
            assert sampler.current is not None
            require(
                "a publication",
                current_version=(step, sampler.current.policy_version),
                is_loaded=(True, all(sampler.current in replica.loaded for replica in sampler.replicas)),
                was_proven=(1 + step, len(times["canary"])),
            )
    report(times)


def _make_server(options: argparse.Namespace, folder: Path) -> VllmServer | ExternalServer:
    if options.base_url is not None:
        return ExternalServer(options.base_url)
    return VllmServer(ServerConfig(model_path=TINY_QWEN3_VL, max_lora_rank=16, max_model_len=2048), folder / "vllm.log")


def report(times: dict[str, list[float]]) -> None:
    """The first publication pays for warming up and is left out."""
    warm = {name: values[1:] for name, values in times.items()}
    beyond = [
        canary + serve - load
        for canary, serve, load in zip(warm["canary"], warm["serve"], warm["vllm_load"], strict=True)
    ]
    figure = {
        "figure": "publish_latency",
        **{f"{name}_ms": round(1000 * median(values), 1) for name, values in warm.items()},
        "announced_beyond_vllm_load_ms": round(1000 * median(beyond), 1),
        "worst_beyond_vllm_load_ms": round(1000 * max(beyond), 1),
        "num_publications": len(beyond),
        "load": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(figure))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--publications", type=int, default=8)
    parser.add_argument("--base-url")
    asyncio.run(main(parser.parse_args()))
