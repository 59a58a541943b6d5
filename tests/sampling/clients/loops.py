"""Record vendors' computer-use loops on real devices: `python -m tests.sampling.clients.loops [--clicks] NAME ...`.

Each loop (`LOOPS`) runs unmodified in an environment of its own, which is made in `build/clients/NAME`, against the
gateway, on the simulated phone, a page and a desktop, while a fake model server gives `ANSWERS`. What it sends is
recorded. With `--clicks`, the policy clicks a hundred random targets, and those are counted that the device executes
inside their target.

Two of the loops are no packages: `OPENAI_CUA_SAMPLE_APP` and `ANTHROPIC_QUICKSTARTS` name checkouts of
github.com/openai/openai-cua-sample-app and github.com/anthropics/anthropic-quickstarts.
"""

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from cua_rl.agent.agent import AgentTask
from cua_rl.agent.external import AgentService, ExternalAgent
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.environments.browser.page_tasks import UserPages
from cua_rl.environments.desktop.desktops import LinuxDesktops
from cua_rl.environments.device import Device
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import DeviceBackend
from cua_rl.environments.table import parse_sources
from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.task_loader import load_tasks
from cua_rl.types.actions import Click
from cua_rl.types.rollout import AgentTurn, SamplingParams
from tests.renderers.model_folders import build_small_folder
from tests.sampling.clients.record import ENVIRONMENTS, PROGRAMS, make_environment
from tests.sampling.clients.recording import FOLDER, RecordedTurn, Recording, save_recording
from tests.sampling.clients.targets import NUM_TARGETS, SIZES, DeviceName, call, click_in, is_inside, make_targets
from tests.sampling.fake_vllm import FakeVllm

PAGE = "<body style='background:#dde;height:3000px'><h1>Shop</h1><input></body>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """A vendor's loop: its program, its packages, and the path of the API that it uses."""

    program: str
    packages: tuple[str, ...]
    api: Literal["responses", "messages"]
    checkout: str | None = None
    """The variable that names a checkout of its repository, if it is no package."""


LOOPS: Mapping[str, Loop] = {
    "agents_sdk": Loop(program="agents_sdk.py", packages=("openai-agents==0.24.0",), api="responses"),
    "openai_cua": Loop(
        program="openai_cua.py",
        packages=("requests==2.34.2", "python-dotenv==1.2.4", "pillow==13.0.0"),
        api="responses",
        checkout="OPENAI_CUA_SAMPLE_APP",
    ),
    "anthropic_demo": Loop(
        program="anthropic_demo.py",
        packages=("anthropic==2.11.0", "httpx==0.28.1"),
        api="messages",
        checkout="ANTHROPIC_QUICKSTARTS",
    ),
    "langgraph_cua": Loop(program="langgraph_agent.py", packages=("langgraph-cua==0.0.1",), api="responses"),
}


ANSWERS = (
    "I look first.\n" + call(action="screenshot"),
    "<think>\nThe field is there.\n</think>\n\n" + call(action="left_click", coordinate=[250, 130]),
    call(action="type", text="Zürich ✓"),
    '<tool_call>\n{"arguments": {"keys": ["enter"],  "action": "key"}, "name": "computer_use"}\n</tool_call>',
    call(action="left_click", coordinate=[2000, 1]),  # malformed: the loop is asked for a screenshot
    call(action="mouse_move", coordinate=[500, 500]),
    "  Down.\n\n" + call(action="scroll", pixels=-100) + "  ",
    call(action="left_click_drag", coordinate=[600, 700]),
    call(action="double_click", coordinate=[10, 990]),
    "Done.",
)


def device_backend(name: DeviceName, folder: Path) -> tuple[DeviceBackend, dict[str, Any]]:
    """The backend of a device of `SIZES`, and a source of tasks for it."""
    if name == "phone":
        return SimulatedPhones(), {"source_type": "demo_training", "tags": ["demo", "open_app"]}
    if name == "desktop":
        return LinuxDesktops(width_px=SIZES[name][0], height_px=SIZES[name][1]), {"source_type": "desktop"}
    folder.chmod(0o755)  # browsers have users of their own
    (folder / "page.html").write_text(PAGE)
    check = {"query": "title", "expected": "a"}
    page = {"url": (folder / "page.html").as_uri(), "instruction": "Search.", "check": check}
    sources = {"source_type": "page", "pages": [page]}
    return UserPages(parse_sources(sources), scale=0.5), sources


@asynccontextmanager
async def open_device(name: DeviceName, folder: Path) -> AsyncGenerator[Device]:
    """A device of `SIZES`, ready for its task."""
    backend, sources = device_backend(name, folder)
    task = load_tasks(sources, seed=0, split="train", device=backend.abilities).batch(0, 1)[0]
    async with backend:
        device = await backend.make(task.device_request())
        try:
            if task.prepare is not None:
                await task.prepare(device)
            yield device
        finally:
            await device.close()


class _Tap:
    """The gateway's HTTP application, and the bodies of requests to the model."""

    def __init__(self, app: Any) -> None:
        self.app, self.bodies = app, list[dict[str, Any]]()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not scope["path"].endswith(("/responses", "/messages")):
            await self.app(scope, receive, send)
            return
        body, is_whole = b"", False
        while not is_whole:
            event = await receive()
            body, is_whole = body + event.get("body", b""), not event.get("more_body")
        self.bodies.append(json.loads(body))
        parts = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Any:
            return next(parts, None) or await receive()

        await self.app(scope, again, send)


async def play(
    name: str, device_name: DeviceName, answers: Sequence[str]
) -> tuple[list[RecordedTurn], list[AgentTurn]]:
    """Run a loop with these answers: what it sent, and what its device did."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        renderer = load_qwen3_vl(build_small_folder(folder / "model"))
        fake = FakeVllm(renderer, max_model_len=10_000_000)
        fake.answers.extend(answers)
        turns: list[AgentTurn] = []

        async def keep(turn: AgentTurn) -> None:
            turns.append(turn)

        async with (
            serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url,
            ExternalServer(url) as server,
            SamplingClient(server, namespace="run", max_attempts=1) as sampling,
            serve_program(name) as program_url,
            open_device(device_name, folder) as device,
        ):
            gateway = Gateway(sampling, renderer, SamplingParams(max_tokens=400, temperature=1.0))
            gateway.app = tap = _Tap(gateway.app)
            gateway.open_rollout("r1")
            task = AgentTask(rollout_id="r1", instruction="Open mail.", max_turns=len(answers))
            async with gateway.serve():
                agent = ExternalAgent(AgentService(url=program_url))
                await agent.run(task, device, gateway, clock=RolloutClock(), on_turn=keep)
            assert gateway.prompt_mismatches == 0, "expected the server's prompts, got others"
            earlier = gateway._open("r1").answers
            sampled = [
                RecordedTurn(
                    request=body,
                    answer=turn.text,
                    ids=(turn.response_id, *(call.call_id for call in answer.parsed.tool_calls)),
                )
                for body, turn, answer in zip(tap.bodies, gateway.turns("r1"), earlier, strict=True)
            ]
    return sampled, turns


@asynccontextmanager
async def serve_program(name: str) -> AsyncGenerator[str]:
    """The address of an agent service that runs a loop's program for each rollout."""

    async def work(request: Request) -> JSONResponse:
        await _run_program(name, await request.json())
        return JSONResponse({})

    routes = [Route("/", work, methods=["POST"])]
    async with serve_app(Starlette(routes=routes), "127.0.0.1", 0, grace_s=0) as url:
        yield url


async def _run_program(name: str, told: Mapping[str, str]) -> None:
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = (str(ENVIRONMENTS / name / "bin" / "python"), str(PROGRAMS / LOOPS[name].program))
    process = await asyncio.create_subprocess_exec(*command, env={**inherited, **told})
    if await process.wait():
        raise RuntimeError(f"expected status 0, got {process.returncode} from {' '.join(command)}")


async def count_hits(name: str, device_name: DeviceName) -> int:
    """How many clicks on random targets the device executes inside them."""
    targets = make_targets(device_name, seed=1)
    clicks = [click_in(target, SIZES[device_name]) for target in targets]
    _, turns = await play(name, device_name, [call(action="screenshot"), *clicks, "Done."])
    done = [turn.action for turn in turns[1:-1]]
    return sum(
        isinstance(action, Click) and is_inside(action.x, action.y, target)
        for action, target in zip(done, targets, strict=True)
    )


async def main(names: Sequence[str], *, clicks: bool) -> None:
    """Record the loops whose names begin with one of the names, or let each click its targets."""
    devices: tuple[DeviceName, ...] = ("phone", "page", "desktop")
    for name, loop in LOOPS.items():
        chosen = [device for device in devices if not names or f"{name}_{device}".startswith(tuple(names))]
        if chosen:
            await make_environment(name, loop.packages)
        for device_name in chosen:
            if clicks:
                hits = await count_hits(name, device_name)
                sys.stdout.write(f"{name} {device_name}: {hits} of {NUM_TARGETS} targets hit\n")
                continue
            turns, _ = await play(name, device_name, ANSWERS)
            recording = Recording(packages=loop.packages, api=loop.api, turns=tuple(turns))
            save_recording(recording, FOLDER / "loops" / f"{name}_{device_name}.json")
            sys.stdout.write(f"{name} {device_name}: {len(turns)} turns\n")


if __name__ == "__main__":
    wanted = sys.argv[1:]
    asyncio.run(main([name for name in wanted if name != "--clicks"], clicks="--clicks" in wanted))
