"""Attacks on what carries messages between the parts of a run: pickles, and a Ray cluster."""

import asyncio
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.types.errors import CuaError
from scripts.listeners import list_listeners
from scripts.red_team.findings import Finding, Findings, Targets, check, check_all, skipped
from scripts.red_team.users import STRANGER_UID, as_user, inspect

_LENGTH = struct.Struct(">Q")
_START_S = 120.0
_CLUSTER = """
import asyncio, os, sys
from pathlib import Path
from cua_rl.cluster import open_cluster
async def main():
    async with open_cluster(Path(sys.argv[1]), num_cpus=1) as cluster:
        print(cluster.address, os.environ["RAY_AUTH_TOKEN"], flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""
_JOIN = "import ray, sys; ray.init(sys.argv[1], log_to_driver=False); print('inside')"


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


def attack_cluster(targets: Targets) -> Findings:
    """Row 3: the Ray cluster of a run with rollout workers, without its token and as another user."""
    clean = {name: value for name, value in targets.environment().items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", _CLUSTER, str(targets.folder)]
    with subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        address, _, right = owner.stdout.readline().strip().partition(" ")
        wrong, join = "guess" * 8, [sys.executable, "-c", _JOIN, address]
        for name, token in {"no": None, "a wrong": wrong, "its own": right}.items():
            access = (
                {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            )
            # without the first, Ray looks for the cluster at the machine's address
            driver = clean | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"} | access
            said = subprocess.run(
                join, env=driver, capture_output=True, text=True, check=False, timeout=300
            ).stdout.strip()
            wanted = "inside" if token == right else "refused"
            got = said or "refused"
            yield check(3, f"a driver with {name} token in a run's Ray cluster", wanted, got, got == wanted)
        found = list_listeners(owner.pid)
        wide = [f"{each.program[:40]} {each.address}" for each in found if not each.is_local]
        yield check_all(3, "listeners of a Ray cluster beyond loopback", found, wide)
        pages = [each.address for each in found if "dashboard" in each.program and each.address.endswith(":8265")]
        yield check_all(3, "dashboards of a Ray cluster", found, pages)
        if os.geteuid() == 0:
            below = psutil.Process(owner.pid).children(recursive=True)
            said = [as_user(STRANGER_UID, partial(inspect, each.pid)) for each in below]
            got = [one for one in said if not one.startswith("refused")]
            yield check_all(3, "processes of a Ray cluster that give a stranger their environment", below, got)
        else:
            yield skipped(3, "a Ray cluster as another user", "needs root, which can become another user")
        owner.stdin.close()


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
