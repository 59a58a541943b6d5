"""Attacks on what carries messages between the parts of a run: pickles, and peers that say nothing."""

import asyncio
import hmac
import os
import pickle
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from cua_rl.host.processes import free_port
from cua_rl.training import wire
from cua_rl.training.link import TOKEN_VARIABLE, Address, ControllerLink
from cua_rl.types.errors import CuaError, boundary
from scripts.red_team.findings import Finding, Findings, Targets, check
from scripts.red_team.floods import NOTHING, hold_connections

_TOKEN = "0123456789abcdef" * 2
_LENGTH = struct.Struct(">Q")
_MAX_THREADS = 100
"""One for each of 64 peers that may still prove themselves, and those of the libraries."""
_START_S = 120.0


class Trap:
    """Makes a file where somebody loads its pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return (open, (str(self.path), "w"))


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
        is_loaded = trap.exists()
        trap.unlink(missing_ok=True)
        got = "loaded" if is_loaded else "not loaded" if was_met else "never received"
        return check(3, attack, "not loaded", got, got == "not loaded")

    with trainer_process() as trainer:
        send_frames(trainer.address, trap)
        yield verdict("pickles to a trainer without the token")
        with authenticated(trainer.address) as (connection, key):
            send_sealed(connection, key, pickle.dumps(Trap(trap)))
            connection.settimeout(30)
            with suppress(OSError):
                while connection.recv(1024):  # until it hangs up: it has read the frame then
                    pass
        yield verdict("a pickle to a trainer from a peer with the token")
    yield verdict("a pickle to the controller from a trainer with the token", asyncio.run(_answer_controller(trap)))


def attack_silence(targets: Targets) -> Findings:
    """Row 18: connections to a trainer that say nothing."""
    del targets
    with trainer_process() as trainer:
        before = _count(trainer.process)
        counts: list[int] = []

        def watch() -> None:
            counts.append(_count(trainer.process) - before)
            began = time.monotonic()
            with authenticated(trainer.address):
                counts.append(int(time.monotonic() - began))

        hold_connections(trainer.address, {NOTHING: 1500}, watch)
    threads, waited_s = counts
    got = f"{threads} threads and processes; {waited_s} s"
    yield check(18, "1,500 idle connections to a trainer", "< 100 more; the run gets in", got, threads < _MAX_THREADS)


def _count(process: psutil.Process) -> int:
    return sum(1 + each.num_threads() for each in (process, *process.children(recursive=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTrainer:
    """A trainer that waits for a run of another host."""

    address: tuple[str, int]
    process: psutil.Process


@contextmanager
def trainer_process() -> Generator[RunningTrainer]:
    """A trainer as `recipes.trainer_node` starts it, on the loopback address."""
    address = ("127.0.0.1", free_port())
    environment = {**os.environ, TOKEN_VARIABLE: _TOKEN}
    command = [sys.executable, "-m", "cua_rl.training.worker", f"{address[0]}:{address[1]}"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + _START_S
            while process.poll() is None and time.monotonic() < deadline:
                with suppress(OSError), socket.create_connection(address, timeout=10):
                    break
                time.sleep(0.2)
            yield RunningTrainer(address=address, process=psutil.Process(process.pid))
        finally:
            process.kill()


@contextmanager
def authenticated(address: tuple[str, int]) -> Generator[tuple[socket.socket, bytes]]:
    """A connection to a trainer by a peer that knows the token, and the key of its frames."""
    with socket.create_connection(address, timeout=60) as connection:
        own = secrets.token_bytes(32)
        nonces = _read(connection, 32) + own
        connection.sendall(own + _code(b"controller", nonces))
        if _read(connection, 32) != _code(b"trainer", nonces):
            raise CuaError("expected the trainer's proof, got another one; the handshake has changed")
        yield connection, _code(b"frames of the controller", nonces)


def send_sealed(connection: socket.socket, key: bytes, payload: bytes) -> None:
    """Send the first frame of a direction."""
    code = hmac.digest(key, struct.pack(">QQ", 0, len(payload)) + payload, "sha256")
    connection.sendall(_LENGTH.pack(len(payload)) + code + payload)


def _code(purpose: bytes, nonces: bytes) -> bytes:
    return hmac.digest(_TOKEN.encode(), purpose + nonces, "sha256")


def _read(connection: socket.socket, length: int) -> bytes:
    read = b""
    while len(read) < length and (more := connection.recv(length - len(read))):
        read += more
    return read


async def _answer_controller(trap: Path) -> bool:
    """Whether a controller that asks a trainer got a pickle as the answer."""
    is_sent: list[bool] = []

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            own = secrets.token_bytes(32)
            connection.sendall(own)
            nonces = own + _read(connection, 32)
            _read(connection, 32)
            connection.sendall(_code(b"trainer", nonces))
            (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
            _read(connection, 32 + length)  # unread, it would break the connection before the answer arrives
            send_sealed(connection, _code(b"frames of the trainer", nonces), pickle.dumps(Trap(trap)))
            is_sent.append(True)
            connection.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        link = await ControllerLink.connect(Address(host=host, port=port), _TOKEN)
        with suppress(CuaError), boundary(CuaError, "ask"):
            await link.ask(wire.TrainerMetrics())
        link.close()
    return bool(is_sent)
