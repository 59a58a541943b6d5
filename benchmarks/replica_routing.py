"""What it saves to send all turns of a rollout to one of several vLLM servers: one JSON line per way of routing.

    python -m benchmarks.replica_routing [--servers 2] [--rollouts 16] [--turns 6]

Servers of the embedded model answer rollouts whose history grows by a 192x320 screenshot, a sentence and an answer of
up to 24 tokens per turn, all rollouts side by side. "sticky" is the sampling client as it is; "round_robin" sends every
request to the next server, as a load balancer in front of them would. Both show screenshots that no server has seen.
`cpu_ms_per_turn` is what gateway and servers together computed, which a busy machine changes less than `seconds`.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

from benchmarks.claims import require
from benchmarks.sampling_throughput import cpu_seconds, make_request, require_answers
from cua_rl.renderers.renderer import make_renderer
from cua_rl.run_folder.model_folder import find_model
from cua_rl.sampling.address import server_client
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import VllmServer
from cua_rl.types.rollout import AdapterRef, ModelTurn, SamplingParams


class RoundRobinClient(SamplingClient):
    """Takes every request for one of a new rollout, and these go to the servers in turn."""

    async def respond(
        self, path: str, payload: Mapping[str, object], *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> tuple[Mapping[str, object], AdapterRef | None]:
        return await super().respond(path, payload, adapter=adapter, sticky_key=uuid4().hex)


async def run_rollout(gateway: Gateway, rollout_id: str, first_seed: int, num_turns: int) -> tuple[ModelTurn, ...]:
    """A conversation in which every turn shows a screenshot and repeats all turns before."""
    gateway.open_rollout(rollout_id)
    agent = gateway.openai_client(rollout_id)
    items: list[Any] = []
    for turn in range(num_turns):
        instructions, question = make_request(first_seed + turn)
        items += [question] if items else [instructions, question]
        response = await agent.responses.create(model="policy", input=items)
        items += [item.to_dict() for item in response.output]
    return gateway.close_rollout(rollout_id)


async def num_answers(server: VllmServer) -> float:
    """Requests that the server has completed, as it counts them."""
    async with server_client(server.base_url, server.api_key, timeout_s=60.0) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def require_spread(answers: Sequence[float], arguments: argparse.Namespace) -> None:
    """Refuse figures unless every server has answered its share of the turns, give or take a rollout."""
    require(
        "turns on several servers",
        answers=(arguments.rollouts * arguments.turns, sum(answers)),
        are_spread=(True, max(answers) - min(answers) <= arguments.turns),
    )


async def measure(gateway: Gateway, first_seed: int, arguments: argparse.Namespace) -> dict[str, object]:
    """All rollouts side by side."""
    clock, cpu = time.perf_counter(), cpu_seconds()
    rollouts = await asyncio.gather(
        *(
            run_rollout(gateway, f"{first_seed}-{index}", first_seed + index * arguments.turns, arguments.turns)
            for index in range(arguments.rollouts)
        )
    )
    seconds, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
    require_answers(rollouts, arguments.turns, 0)
    turns = [turn for rollout in rollouts for turn in rollout]
    prompt_tokens = sum(turn.prompt.length for turn in turns)
    return {
        "num_turns": len(turns),
        "prompt_tokens": prompt_tokens,
        "cached_prompt_frac": round(sum(turn.cached_tokens for turn in turns) / prompt_tokens, 3),
        "cpu_ms_per_turn": round(1000 * cpu / len(turns), 1),
        "seconds": round(seconds, 1),
        "load": round(os.getloadavg()[0], 1),
    }


async def main(arguments: argparse.Namespace) -> None:
    """Start the servers, warm them up, measure both ways."""
    model = find_model(None)
    config = ServerConfig(model_path=model, max_lora_rank=16)
    params = SamplingParams(max_tokens=24, temperature=1.0)
    async with AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = [
            await stack.enter_async_context(VllmServer(config, logs / f"vllm-{index}.log"))
            for index in range(arguments.servers)
        ]
        ways = {"warm_up": SamplingClient, "sticky": SamplingClient, "round_robin": RoundRobinClient}
        for index, (name, kind) in enumerate(ways.items()):
            async with kind(*servers) as client:
                before = [await num_answers(server) for server in servers]
                figure = await measure(Gateway(client, make_renderer(model), params), 100_000 * index, arguments)
                answers = [await num_answers(server) - earlier for server, earlier in zip(servers, before, strict=True)]
            require_spread(answers, arguments)
            if name != "warm_up":
                labels = {"figure": "replica_routing", "routing": name, "num_servers": arguments.servers}
                print(json.dumps(labels | figure), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--turns", type=int, default=6)
    asyncio.run(main(parser.parse_args()))
