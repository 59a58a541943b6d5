"""Attacks on what carries messages between the parts of a run: pickles."""

import asyncio
import pickle
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx

from cua_rl.events import NoRecorder
from cua_rl.host.http_server import serve_app
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import CuaError, boundary
from cua_rl.types.rollout import AdapterRef
from cua_rl.workers.remote import RemoteRunner
from cua_rl.workers.worker import open_link
from cua_rl.workers.worker_app import make_worker_app
from cua_rl.workers.worker_wire import WorkerSetup
from scripts.red_team.findings import Finding, Findings, Targets, check

_LENGTH = struct.Struct(">Q")
_START_S = 120.0


class Trap:
    """Makes a file where somebody loads its pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (open, (str(self.path), "w"))


SETS_ATTRIBUTE = b"".join(
    [
        pickle.PROTO + b"\x02",
        pickle.GLOBAL + b"pathlib\nPosixPath\n",
        pickle.NONE + pickle.EMPTY_DICT,
        pickle.BINUNICODE + b"\x05\0\0\0owned" + pickle.NEWTRUE + pickle.SETITEM + pickle.TUPLE2,
        pickle.BUILD + pickle.STOP,
    ]
)
"""Loaded, it sets an attribute of all paths: it names nothing but a class that messages hold."""


def frames(trap: Path) -> Iterator[bytes]:
    """A pickle as the messages of all our protocols begin: alone, after its length, and after a proof that is none."""
    pickled = pickle.dumps(Trap(trap))
    for start in (b"", _LENGTH.pack(len(pickled)), bytes(64) + _LENGTH.pack(len(pickled))):
        yield start + pickled


def send_frames(address: tuple[str, int], trap: Path) -> None:
    """Send each, whatever comes of it."""
    for frame in frames(trap):
        with suppress(OSError), socket.create_connection(address, timeout=2) as connection:
            connection.sendall(frame)
            connection.recv(1024)


def attack_messages(targets: Targets) -> Findings:
    """Row 3: pickles from peers without and with the secret."""
    trap = targets.folder / "unpickled"

    def verdict(attack: str, was_met: bool = True) -> Finding:
        paths = type(trap)
        is_loaded = trap.exists() or "owned" in vars(paths)
        trap.unlink(missing_ok=True)
        if "owned" in vars(paths):
            delattr(paths, "owned")
        got = "loaded" if is_loaded else "not loaded" if was_met else "never received"
        return check(3, attack, "not loaded", got, got == "not loaded")

    yield verdict("a pickle to a trainer as a request", _ask_trainer(targets.folder, trap))
    yield verdict("a pickle to the controller as a trainer's answer", asyncio.run(_answer_controller(trap)))
    statuses = asyncio.run(_ask_worker_address(trap))
    yield verdict("pickles to the workers' address", {200, 204}.isdisjoint(statuses))
    yield check(
        3, "answers of the workers' address", "4xx", sorted(statuses), all(400 <= one < 500 for one in statuses)
    )
    yield verdict("a pickle to a rollout worker as the controller's answer", asyncio.run(_answer_worker(trap)))


def _ask_trainer(folder: Path, trap: Path) -> bool:
    """Whether a trainer, as a run starts it, has answered a pickle."""
    path, pickled = folder / "trainer.sock", pickle.dumps(Trap(trap))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(_START_S)
        command = [sys.executable, "-m", "cua_rl.training.worker", str(path)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as trainer:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(_START_S)
                    connection.sendall(_LENGTH.pack(len(pickled)) + pickled)
                    return bool(connection.recv(_LENGTH.size))
            finally:
                trainer.kill()
                path.unlink()


class _PickledAnswers:
    """A trainer that answers with a pickle."""

    reads_our_files = True

    def __init__(self, trap: Path) -> None:
        self.num_answers = 0
        self._trap = trap

    async def open(self) -> None:
        """There is nothing to start."""

    async def ask(self, payload: bytes) -> bytes:
        """A pickle, whatever the request."""
        del payload
        self.num_answers += 1
        return pickle.dumps(Trap(self._trap))

    async def close(self) -> None:
        """There is nothing to end."""


async def _answer_controller(trap: Path) -> bool:
    """Whether a controller that asks a trainer got a pickle as the answer."""
    trainer = _PickledAnswers(trap)
    with suppress(CuaError):
        async with TrainingClient(TrainerConfig(), trap.with_name("trainer.log"), endpoint=trainer):
            pass
    return trainer.num_answers == 1


class _NoAdapters:
    """The controller's view of adapters, of which there are none."""

    current: AdapterRef | None = None

    def pin(self, adapter: AdapterRef) -> None:
        raise AssertionError(adapter)

    unpin = pin


def _no_setup() -> WorkerSetup:
    raise AssertionError("nobody has registered")


async def _ask_worker_address(trap: Path) -> set[int]:
    """Statuses of the answers to pickles with no key, a wrong one, and the right one."""
    runner = RemoteRunner(_NoAdapters(), NoRecorder(), _no_setup)
    statuses: set[int] = set()
    async with serve_app(make_worker_app(runner, "token"), "127.0.0.1", 0) as url:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
            for key in ("", "wrong", "token"):
                for path in ("/workers", "/workers/a/orders", "/workers/a/rollouts/r"):
                    for content in (*frames(trap), SETS_ATTRIBUTE):
                        headers = {"Authorization": f"Bearer {key}"} if key else {}
                        statuses.add((await client.post(path, content=content, headers=headers)).status_code)
    return statuses


async def _answer_worker(trap: Path) -> bool:
    """Whether a worker that registers got a pickle as the answer."""
    is_sent: list[bool] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(SETS_ATTRIBUTE if is_sent else pickle.dumps(Trap(trap)))
            is_sent.append(True)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        async with open_link(f"http://127.0.0.1:{server.server_port}", "token", patience_s=5.0) as link:
            for _ in range(2):
                with suppress(CuaError), boundary(CuaError, "register"):
                    await link.register("a", 1)
        server.shutdown()
    return len(is_sent) == 2
