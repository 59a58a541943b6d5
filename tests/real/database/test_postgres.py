import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.errors import ConfigError, DatabaseError
from tests.real.database.conftest import run_sql

OWNER = """
import asyncio, sys
from pathlib import Path
from cua_rl.database.postgres import EmbeddedPostgres
async def main():
    async with EmbeddedPostgres(Path(sys.argv[1]) / "data", Path(sys.argv[1]) / "log") as postgres:
        print(postgres.url, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_dead(pids: list[int], timeout_s: float = 60.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_alive, pids))


def server_pids(data_dir: Path) -> list[int]:
    """The postmaster, then its children, then the guard above it."""
    postmaster = int((data_dir / "postmaster.pid").read_text().split()[0])
    children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
    guard = Path(f"/proc/{postmaster}/stat").read_text().rpartition(")")[2].split()[1]
    return [postmaster, *map(int, children), int(guard)]


def start_owner(folder: Path) -> tuple[subprocess.Popen[str], str]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, owner.stdout.readline().strip()


async def test_data_survives_a_restart_and_nothing_is_left_running(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        run_sql(postgres.url, "CREATE TABLE kept AS SELECT 7 AS number")
        pids = server_pids(tmp_path / "data")
        socket_dir = Path(postgres.url.split("host=")[1])
        assert running_postgres_url(tmp_path / "data") == postgres.url
        assert run_sql(postgres.url, "SHOW fsync") == [("on",)]

    assert not any(map(is_alive, pids))
    assert not await asyncio.to_thread(socket_dir.exists)
    assert running_postgres_url(tmp_path / "data") is None
    assert "database system is shut down" in (tmp_path / "log").read_text()
    with pytest.raises(RuntimeError, match="not running"):
        _ = postgres.url
    started = time.monotonic()
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        assert time.monotonic() - started < 20  # a second on an idle machine
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]


async def test_killing_the_owner_shuts_the_server_down_cleanly(tmp_path: Path) -> None:
    owner, url = start_owner(tmp_path)
    run_sql(url, "CREATE TABLE kept AS SELECT 7 AS number")
    pids = server_pids(tmp_path / "data")

    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()

    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:  # at once: it waits for the old one
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]
    assert wait_until_dead(pids)
    assert "was interrupted" not in (tmp_path / "log").read_text()


async def test_a_crashed_server_recovers_what_was_committed(tmp_path: Path) -> None:
    owner, url = start_owner(tmp_path)
    run_sql(url, "CREATE TABLE kept AS SELECT 7 AS number")
    pids = server_pids(tmp_path / "data")

    for pid in (pids[-1], *pids[:-1], owner.pid):  # the guard first: nobody may shut anything down in order
        with contextlib.suppress(ProcessLookupError):  # the server's processes follow one another at once
            os.kill(pid, signal.SIGKILL)
    owner.communicate()
    assert wait_until_dead(pids)
    pid_file = tmp_path / "data" / "postmaster.pid"
    lines = pid_file.read_text().split("\n")
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]))  # another process has the number by now

    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]
    assert "was not properly shut down" in (tmp_path / "log").read_text()


async def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as first:
        with pytest.raises(DatabaseError, match=r"expected the database folder .* to be free, but another run uses it"):
            await EmbeddedPostgres(tmp_path / "data", tmp_path / "log 2").__aenter__()

        assert run_sql(first.url, "SELECT 1") == [(1,)]


async def test_only_one_of_two_that_start_together_gets_a_new_folder(tmp_path: Path) -> None:
    servers = [EmbeddedPostgres(tmp_path / "data", tmp_path / f"log {number}") for number in range(2)]

    results = await asyncio.gather(*(server.__aenter__() for server in servers), return_exceptions=True)

    assert sorted(type(result) for result in results if isinstance(result, Exception)) == [DatabaseError]
    for result in results:
        if isinstance(result, EmbeddedPostgres):
            await result.__aexit__(None, None, None)


async def test_a_folder_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text("9\n")

    with pytest.raises(ConfigError, match=r"expected Postgres 9 for the database folder .*, got \[16, 18\]"):
        await EmbeddedPostgres(tmp_path / "data", tmp_path / "log").__aenter__()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log"):
        pass
    (tmp_path / "data" / "postgresql.conf").write_text("no_such_setting = 1\n")

    with pytest.raises(DatabaseError, match=r"(?s)to start, got exit status 1; read .*no_such_setting"):
        await EmbeddedPostgres(tmp_path / "data", tmp_path / "log").__aenter__()
