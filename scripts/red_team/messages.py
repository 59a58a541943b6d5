"""Attacks on what carries messages between the parts of a run: pickles."""

import asyncio
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import CuaError
from scripts.red_team.findings import Finding, Findings, Targets, check

_LENGTH = struct.Struct(">Q")
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

    yield verdict("a pickle to a trainer as a request", _ask_trainer(targets.folder, trap))
    yield verdict("a pickle to the controller as a trainer's answer", asyncio.run(_answer_controller(trap)))


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
