"""A stranger's run folder: whoever opens it must run nothing of it, connect nowhere and write through no link."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx

from cua_rl.command_line.recipe import EXIT_CONFIG
from scripts.red_team.findings import Finding, Targets, check, skipped
from scripts.red_team.users import STRANGER_UID

MAKE = """
import asyncio, sys
from pathlib import Path
from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import TrainingStarted
async def main(folder):
    async with EmbeddedPostgres(folder / "postgres", folder / "logs" / "postgres.log") as server:
        await migrate(server.url)
        async with DatabaseRecorder(server.url, image_token_id=1) as recorder:
            await recorder.record(TrainingStarted(run_name="x", log_path="x", config={}, first_step=1, total_steps=1))
asyncio.run(main(Path(sys.argv[1])))
"""
OPEN = """
import asyncio, sys
from cua_rl.command_line.recipe import report_error
from cua_rl.types.errors import CuaError
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
async def main(way, folder):
    async with open_run_database(folder, {}) as (database, name):
        await find_training_id(database, name)
    print("opened")
try:
    asyncio.run(main(*sys.argv[1:]))
except CuaError as error:
    report_error(error)
"""
WAYS = ("run.recorded_run", "serve_monitor FOLDER", "serve_monitor of a folder of runs")


_LIMIT_S = 90.0


def make_witness(folder: Path) -> Path:
    """A path at which every user, such as that of a server, can make a file."""
    folder.mkdir()
    folder.chmod(0o1777)
    return folder / "witness"


def set_traps(data: Path, witness: Path) -> None:
    """Let a database folder start programs, load libraries, listen and admit everybody, if its own files decide."""
    program = f"'touch {witness}; false'"
    traps = "".join(f"{name} = {program}\n" for name in ("restore_command", "recovery_end_command"))
    traps += f"session_preload_libraries = '{witness}.so'\nlisten_addresses = '*'\nport = 5999\n"
    for name in ("postgresql.conf", "postgresql.auto.conf"):
        (data / name).write_text(traps)
    (data / "recovery.signal").touch()
    (data / "pg_ident.conf").write_text("controller /.* postgres\n")


class FalseServer:
    """Listens where a false `postmaster.pid` sends clients, and counts who comes."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.folder, self.num_clients = folder, 0
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / ".s.PGSQL.5432"))
        self._listener.listen()
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        with suppress(OSError):  # closed
            while True:
                self._listener.accept()[0].close()
                self.num_clients += 1

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def attack_run_folders(targets: Targets) -> Iterator[Finding]:
    """Row 16: all ways to open a folder of somebody else, with a trap of each kind."""
    place = targets.folder / "strangers"
    place.mkdir()
    made = place.with_name("made")
    subprocess.run([sys.executable, "-c", MAKE, str(made)], env=targets.environment(), check=True, timeout=300)
    server, witness = FalseServer(targets.folder / "false"), make_witness(targets.folder / "witnessed")
    try:
        for kind in ("settings", "a link as its log", "a false address", "another user"):
            attack = f"{kind} in a run's folder"
            if kind == "another user" and os.geteuid() != 0:
                yield skipped(16, attack, "needs root, which can make files of another user")
                continue
            folder = place / kind.replace(" ", "-")
            shutil.copytree(made, folder)
            _prepare(folder, kind, witness, server.folder)
            for way in WAYS:
                said = _open(targets, way, folder)
                found = ["a file was made"] if witness.exists() else []
                found += [f"{server.num_clients} clients elsewhere"] if server.num_clients else []
                witness.unlink(missing_ok=True)
                server.num_clients = 0
                # a folder that is not opened would be no proof for the first two
                is_harmless = kind in ("settings", "a false address")
                is_refused = "expected " in said or said == f"it ended with status {EXIT_CONFIG}"
                is_held = (said == "opened" if is_harmless else is_refused) and not found
                expected = "opened, runs nothing" if is_harmless else "refused"
                yield check(16, f"{way}: {attack}", expected, found or said, is_held)
            shutil.rmtree(folder)
    finally:
        server.close()


def _prepare(folder: Path, kind: str, witness: Path, elsewhere: Path) -> None:
    data = folder / "postgres"
    if kind == "settings":
        set_traps(data, witness)
    elif kind == "a link as its log":
        (folder / "logs" / "postgres.log").unlink(missing_ok=True)
        (folder / "logs" / "postgres.log").symlink_to(witness)
    elif kind == "a false address":
        (data / "postmaster.pid").write_text(f"{os.getpid()}\n{data}\n0\n5432\n{elsewhere}\n*\n\nready\n")
    else:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, STRANGER_UID, STRANGER_UID, follow_symlinks=False)


def _open(targets: Targets, way: str, folder: Path) -> str:
    """What whoever opens a folder in this way is told."""
    environment = targets.environment() | {"PGPASSWORD": "canary-of-the-database"}
    if way not in WAYS[2:]:
        command = [sys.executable, "-c", OPEN, way, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=200)
        return (done.stdout + done.stderr).strip()
    source = folder if way == WAYS[2] else folder.parent
    monitor = subprocess.Popen(
        [sys.executable, "-m", "cua_rl.recipes.serve_monitor", str(source), "port=0"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert monitor.stdout is not None
    limit = threading.Timer(_LIMIT_S, monitor.kill)
    limit.start()
    try:
        for line in monitor.stdout:
            if line.startswith("monitor: "):
                return _look(line.split()[1], monitor)
        return f"it ended with status {monitor.wait(timeout=60)}"
    finally:
        limit.cancel()
        monitor.send_signal(signal.SIGINT)
        monitor.communicate(timeout=60)


def _look(url: str, monitor: "subprocess.Popen[str]") -> str:
    """Open the run on the monitor's page."""
    with httpx.Client(base_url=url, trust_env=False, timeout=60) as client:
        try:
            while not (runs := client.get("/api/runs").json()["items"]):
                time.sleep(0.2)
            answer = client.get(f"/api/runs/{runs[0]['run_id']}")
        except httpx.TransportError:
            return f"it ended with status {monitor.wait(timeout=60)}"
    return "opened" if answer.is_success else answer.text
