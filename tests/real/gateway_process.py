"""A gateway in a process of its own: `python -m tests.real.gateway_process` prints the address and key of a rollout."""

import asyncio
import sys
import tempfile
from pathlib import Path

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.rollout import SamplingParams
from tests.renderers.model_folders import build_small_folder
from tests.sampling.fake_vllm import FakeVllm


async def main() -> None:
    """Serve until killed, over a fake model server."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = load_qwen3_vl(build_small_folder(Path(folder)))
    async with serve_app(FakeVllm(renderer).app(), "127.0.0.1", 0, grace_s=0) as model_url:
        async with ExternalServer(model_url) as server, SamplingClient(server, namespace="run") as client:
            gateway = Gateway(client, renderer, SamplingParams(max_tokens=8, temperature=1.0))
            async with gateway.serve() as url:
                gateway.open_rollout("r")
                sys.stdout.write(f"{url} {gateway.openai_client('r').api_key}\n")
                sys.stdout.flush()
                await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
