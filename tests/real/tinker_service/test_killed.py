"""The recipe as a process with its own trainer, vLLM and Postgres: killed by SIGKILL, and started again."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.tinker_service.messages import numbers, parse_message
from tests.patience import patience
from tests.real.tinker_service.conftest import KEYS, Wire
from tests.tinker_service.clients import Picture, add_datum, make_pass, png


@asynccontextmanager
async def serving(folder: Path) -> AsyncGenerator[Wire]:
    """The service in a process, killed at the end of the block."""
    environment = {**os.environ, "TINKER_API_KEY": KEYS[0]}
    environment.pop("DATABASE_URL", None)
    settings = (f"log_path={folder}", "port=0", "lora_rank=8", "server.max_model_len=1024")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cua_rl.recipes.serve_tinker", *settings),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(patience(240)):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("TINKER_BASE_URL="), line
        address = line.strip().partition("=")[2]
        async with httpx.AsyncClient(base_url=address, timeout=60.0) as http:
            yield Wire(http=http, base_model=str(TINY_QWEN3_VL))
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()


def picture_pass(model_id: str, seq_id: int, start: int, *, forward_only: bool = False) -> bytes:
    """A text, which `start` tells from others, and a text with a picture."""
    message = make_pass(model_id, seq_id, forward_only=forward_only)
    text = [40 + (start + place) % 50 for place in range(8)]
    add_datum(message, [text[:-1]], {"target_tokens": text[1:]})
    chunks = [[50], Picture(data=png(64, 64), expected_tokens=None), [51, 52]]
    add_datum(message, chunks, {"target_tokens": [0, 0, 0, 0, 51, 52, 53], "weights": [0, 0, 0, 0, 1, 1, 1]})
    body: bytes = message.SerializeToString()
    return body


async def train(wire: Wire, model_id: str, steps: range) -> None:
    """Steps with the numbers 2 * step + 1 and 2 * step + 2."""
    for step in steps:
        await wire.train(picture_pass(model_id, 2 * step + 1, 7 * step))
        assert "error" not in (await wire.result(await wire.step(model_id, 2 * step + 2, 1e-2))).text


async def logprobs(wire: Wire, model_id: str, seq_id: int) -> list[float]:
    answer = await wire.result(await wire.train(picture_pass(model_id, seq_id, 3, forward_only=True)))
    output = parse_message("ForwardBackwardOutput", answer.content)
    return numbers(output.loss_fn_outputs[0].fields["logprobs"].data, "f")


async def sample(wire: Wire, sampler_id: str, seq_id: int) -> bytes:
    """The most likely tokens after a prompt."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [40, 41, 42]}]}
    params = {"max_tokens": 6, "temperature": 0.0, "stop": []}
    body = {"sampling_session_id": sampler_id, "seq_id": seq_id, "prompt": prompt, "sampling_params": params}
    answer = await wire.result(await wire.post("asample", body))
    tokens: bytes = parse_message("SampleResponse", answer.content).sequences[0].tokens
    return tokens


async def test_a_service_that_is_killed_goes_on_with_the_weights_that_it_had(tmp_path: Path) -> None:
    async with serving(tmp_path / "service") as wire:
        session_id = await wire.session()
        spared, killed = [await wire.create(session_id, number) for number in range(2)]
        await train(wire, spared, range(4))
        expected = await logprobs(wire, spared, 9)
        await train(wire, killed, range(3))
        waiting = await wire.step(killed, 8, 1e-2)  # the fourth step; its pass comes after the kill
    async with serving(tmp_path / "service") as wire:
        await wire.train(picture_pass(killed, 7, 21))
        assert "metrics" in (await wire.result(waiting)).json()
        assert await logprobs(wire, killed, 9) == expected
        answers: list[bytes] = []
        for number, model_id in enumerate((spared, killed)):
            body = {"model_id": model_id, "seq_id": 10, "sampling_session_seq_id": number}
            saved = await wire.result(await wire.post("save_weights_for_sampler", body))
            answers.append(await sample(wire, saved.json()["sampling_session_id"], 0))
        assert answers[0] == answers[1]
