"""Record what client libraries send to the gateway: `make record-clients`, or `python -m tests.sampling.clients.record
NAME ...` for recordings whose names begin with one of the names.

Each client gets an environment of its own below `build/clients` with the packages named here, and runs its program from
`programs/` against the gateway. A fake model server says what `ANSWERS` has, whatever the client sends.
"""

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.ignored_fields import Api
from cua_rl.sampling.openai_answers import Answer
from cua_rl.sampling.server import ExternalServer
from cua_rl.types.rollout import SamplingParams
from tests.renderers.model_folders import build_small_folder
from tests.sampling.clients.recording import FOLDER, RecordedTurn, Recording, save_recording
from tests.sampling.fake_vllm import FakeVllm

PROGRAMS = Path(__file__).with_name("programs")
ENVIRONMENTS = Path(__file__).parents[3] / "build" / "clients"

CHAT = ("chat", "chat_stream")
RESPONSES = ("responses", "responses_stream", "responses_previous")


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A library with the packages that it needs, and what to record of it."""

    packages: tuple[str, ...]
    program: str
    apis: tuple[str, ...]


CLIENTS: Mapping[str, Client] = {
    "openai_2": Client(packages=("openai==2.54.0",), program="openai_loop.py", apis=(*CHAT, *RESPONSES)),
    "openai_3": Client(packages=("openai==3.54.0",), program="openai_loop.py", apis=(*CHAT, *RESPONSES)),
    "langchain": Client(
        packages=("langchain==1.4.7", "langchain-openai==1.7.3", "openai==3.54.0"),
        program="langchain_agent.py",
        apis=(*CHAT, *RESPONSES),
    ),
    "litellm": Client(
        packages=("litellm==1.106.2", "mcp==2.3.0", "openai==2.54.0"),
        program="litellm_loop.py",
        apis=(*CHAT, *RESPONSES[:2], "messages"),
    ),
    "pydantic_ai": Client(
        packages=("pydantic-ai-slim[openai]==2.68.0", "openai==3.54.0"),
        program="pydantic_agent.py",
        apis=(*CHAT, *RESPONSES),
    ),
    "smolagents": Client(
        packages=("smolagents[openai]==1.26.0", "openai==3.54.0"),
        program="smolagents_agent.py",
        apis=("tools", "tools_stream", "code", "code_stream"),
    ),
    "vercel": Client(
        packages=("ai@7.0.173", "@ai-sdk/openai@4.0.118", "zod@4.6.7"),
        program="vercel_agent.mjs",
        apis=(*CHAT, *RESPONSES[:2], "responses_unstored"),
    ),
}

_THINKS = "<think>\n{}\n</think>\n\n"
_CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
_CLICK = _CALL % ("click", '{"x": 1, "y": 2}')
_WORK = (
    _THINKS.format("The icon is there.") + "I open it.\n" + _CALL % ("click", '{"y": 7, "x": 5.0}'),
    '<tool_call>\n{"arguments":{"text":"Zürich \\u2713 \\"quoted\\"\\n"},"name":"type_text"}\n</tool_call>',
    "  Two at once.\n\n" + _CLICK + "\n" + _CALL % ("type_text", '{"text": "a"}') + "  ",
    _THINKS.format("Let me look.") + _CALL % ("screenshot", "{}"),
    _CLICK,
    _THINKS.format("Again.") + '\n<tool_call>\n{"name":"click","arguments":{"x":1,"y":2}}\n</tool_call>',
)
ANSWERS: Mapping[str, Sequence[str]] = {
    # the user speaks after each answer without a call
    "any": (
        *_WORK[:4],
        'I tried <tool_call>\n{"name": "click", "arguments": {"x": 1',
        *_WORK[4:],
        _THINKS.format("I am done.") + "Done.",
        "Bye. ",
    ),
    # smolagents ends with a call
    "tools": (*_WORK, _THINKS.format("Done.") + _CALL % ("final_answer", '{"answer": "ok"}')),
    "code": (
        "Thought: I open it.\n<code>\nclick(y=7,  x=5.0)\n</code>",
        "  I type now.\n\n<code>\ntype_text('Zürich')\n\nclick(x=1, y=2)\n</code>\n",
        _THINKS.format("Let me look.") + "I look.\n<code>\nscreenshot()\n</code>",
        "No code at all.",
        "<code>\nclick(x=1, y=2)\n</code>",
        "<code>\nfinal_answer('done')\n</code>",
    ),
}


class _ListeningGateway(Gateway):
    """Keeps what the agent sent and what it got."""

    heard: list[tuple[Api, RecordedTurn]]

    async def answer(
        self,
        rollout_id: str,
        request: Mapping[str, Any],
        api: Api,
        *,
        is_trained: bool = True,
    ) -> Answer:
        """Answer as the gateway does."""
        answer = await super().answer(rollout_id, request, api, is_trained=is_trained)
        ids = (answer.turn.response_id, *(call.call_id for call in answer.parsed.tool_calls))
        self.heard.append((api, RecordedTurn(request=request, answer=answer.turn.text, ids=ids)))
        return answer


async def record(name: str, client: Client, api: str) -> None:
    """Run a client's program against the gateway and save what it sent."""
    with tempfile.TemporaryDirectory() as folder:
        renderer = load_qwen3_vl(build_small_folder(Path(folder)))
    fake = FakeVllm(renderer, max_model_len=100_000)
    answers = ANSWERS.get(api.partition("_")[0], ANSWERS["any"])
    fake.answers.extend(answers)
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url:
        async with ExternalServer(url) as server, SamplingClient(server, namespace="run", max_attempts=1) as sampling:
            gateway = _ListeningGateway(sampling, renderer, SamplingParams(max_tokens=400, temperature=1.0))
            gateway.heard = []
            gateway.open_rollout("r1")
            access = gateway.access("r1")
            assert access is not None
            async with gateway.serve() as root:
                address = {"OPENAI_BASE_URL": f"{root}/rollouts/r1/v1", "OPENAI_API_KEY": access.api_key}
                await _run(*_command(name, client), api, **address)
    if len(gateway.heard) != len(answers):
        raise RuntimeError(f"expected a request for each of {len(answers)} answers, got {len(gateway.heard)}")
    turns = tuple(turn for _, turn in gateway.heard)
    recording = Recording(packages=client.packages, api=gateway.heard[0][0], turns=turns)
    save_recording(recording, FOLDER / f"{name}_{api}.json")


def _command(name: str, client: Client) -> tuple[str, str]:
    """An interpreter and a program; node looks for packages where the program is."""
    if not client.program.endswith(".mjs"):
        return str(ENVIRONMENTS / name / "bin" / "python"), str(PROGRAMS / client.program)
    for file in (client.program, "world.json"):
        shutil.copy(PROGRAMS / file, ENVIRONMENTS / name)
    return "node", str(ENVIRONMENTS / name / client.program)


async def _install(name: str, client: Client) -> None:
    if not client.program.endswith(".mjs"):
        await make_environment(name, client.packages)
        return
    folder = ENVIRONMENTS / name
    folder.mkdir(parents=True, exist_ok=True)
    await _run("npm", "install", "--silent", "--no-save", "--prefix", str(folder), *client.packages)


async def make_environment(name: str, packages: Sequence[str]) -> None:
    """A Python environment with these packages; one that is there is brought up to date."""
    folder = ENVIRONMENTS / name
    if not folder.exists():
        await _run(sys.executable, "-m", "venv", str(folder))
    await _run(str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages)


async def _run(*command: str, **more: str) -> None:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = await asyncio.create_subprocess_exec(*command, env={**inherited, **more})
    if await process.wait():
        raise RuntimeError(f"expected status 0, got {process.returncode} from {' '.join(command)}")


async def main(names: Sequence[str]) -> None:
    """Record every client, or those named."""
    for name, client in CLIENTS.items():
        apis = [api for api in client.apis if not names or f"{name}_{api}".startswith(tuple(names))]
        if apis:
            await _install(name, client)
        for api in apis:
            sys.stdout.write(f"{name} {api}\n")
            await record(name, client, api)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
