"""Turns this process into a Postgres server: `python postgres_launcher.py JSON`, with the fields of `Launch`.

Locks the data folder, creates the cluster if there is none, gives its tables to a role without superuser rights, makes
another one that may only read, and replaces itself with `postgres`. The lock is inherited, so it lasts exactly as long
as any process of that server. The server obeys files beside its socket; settings in the data folder, which may come
from elsewhere, have no effect.

Postgres refuses to run as root. Started by root, it gets a user without capabilities, which reaches a data folder
below, say, /root only through a descriptor that was opened before. Standard library only.
"""

import fcntl
import json
import os
import pwd
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

EXIT_IN_USE = 75
"""Another server holds the data folder."""
EXIT_REFUSED = 78
"""The data folder holds what we never put there."""
ROLE = "cua_rl"
"""The role of runs and monitors: owns the database, but can neither read files nor start programs."""
READER = "cua_rl_reader"
"""The role of people's own queries (`monitor/sql_queries.py`): may call no function that changes or holds anything."""
ASK = "public.cua_rl_ask"
"""Rows of a query; its error messages, which may quote values of hundreds of megabytes, are cut on the server."""
MEMORY_BYTES = 2 * 2**30
"""What each connection may hold besides the shared buffers: a query that asks for more fails, and nothing else does."""

_LOCK_WAIT_S = 3.0  # the server of a controller that was just killed needs a moment to shut down
_ACCESS = f"""\
# Only the user who started the server may connect, and only as roles without superuser rights.
local all {ROLE} peer map=controller
local postgres {READER} peer map=controller
"""
_INSTRUCTIONS = ("recovery.signal", "standby.signal", "postgresql.auto.conf", "backup_label", "tablespace_map")
"""Files of a data folder that the server obeys whatever its command line says."""
_MADE_IN_PUBLIC = (  # an earlier version made the tables as superuser; indexes and sequences of columns follow them
    "SELECT format('ALTER TABLE %s', oid::regclass) FROM pg_class "
    "WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm') "
    "UNION ALL SELECT format('ALTER ROUTINE %s', oid::regprocedure) FROM pg_proc "
    "WHERE pronamespace = 'public'::regnamespace"
)
_VOLATILE = (  # functions that change settings, take locks, wait, send or write: for the owner of the tables alone
    "SELECT oid::regprocedure FROM pg_proc WHERE pronamespace = 'pg_catalog'::regnamespace AND provolatile = 'v' "
    "AND proname <> 'random' AND has_function_privilege('public', oid, 'EXECUTE')"
)
_OWN_EVERYTHING = f"""\
DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{ROLE}') THEN CREATE ROLE {ROLE}; END IF; END $$
ALTER ROLE {ROLE} LOGIN CREATEDB
ALTER DATABASE postgres OWNER TO {ROLE}
ALTER SCHEMA public OWNER TO {ROLE}
DO $$ DECLARE made text; BEGIN FOR made IN {_MADE_IN_PUBLIC} LOOP EXECUTE made || ' OWNER TO {ROLE}'; END LOOP; END $$
DO $$ DECLARE f text; BEGIN FOR f IN {_VOLATILE} LOOP EXECUTE format('GRANT EXECUTE ON ROUTINE %s TO {ROLE}', f); \
EXECUTE format('REVOKE EXECUTE ON ROUTINE %s FROM PUBLIC', f); END LOOP; END $$
REVOKE TEMPORARY ON DATABASE postgres FROM PUBLIC
DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{READER}') THEN CREATE ROLE {READER}; END IF; END $$
ALTER ROLE {READER} LOGIN CONNECTION LIMIT 3
ALTER ROLE {READER} SET default_transaction_read_only = on
ALTER ROLE {READER} SET temp_file_limit = '256MB'
ALTER ROLE {READER} SET log_min_messages = 'panic'
ALTER ROLE {READER} SET log_min_error_statement = 'panic'
CREATE OR REPLACE FUNCTION {ASK}(query text) RETURNS SETOF text[] LANGUAGE plpgsql STABLE AS $$ BEGIN \
RETURN QUERY EXECUTE query; EXCEPTION WHEN OTHERS THEN \
RAISE EXCEPTION USING ERRCODE = SQLSTATE, MESSAGE = left(SQLERRM, 500); END $$
"""
"""What the superuser does once, one statement a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start; the prefixes make a command run as another user, and are empty where there is none."""

    bin_dir: str
    data_dir: str
    socket_dir: str
    settings: list[str]
    uid: int | None
    """Who owns the data; None for an ordinary user, who owns it anyway."""
    as_user: list[str]
    named_uid: int | None
    """A user with a name, without which initdb does not work."""
    as_named: list[str]


def main(arguments: list[str]) -> int:
    """Lock, prepare and exec; returns only if the folder is in use or the cluster cannot be prepared."""
    launch = Launch(**json.loads(arguments[0]))
    data_dir = Path(launch.data_dir)
    if not _take_lock(data_dir.with_name(data_dir.name + ".lock")):
        sys.stderr.write(f"another Postgres server is using {data_dir}\n")
        return EXIT_IN_USE
    if not (data_dir / "PG_VERSION").exists():
        status = _create_cluster(launch, data_dir)
        if status != 0:
            return status
    if (found := _find_link(data_dir)) is not None:
        sys.stderr.write(f"expected only files and folders in the database folder {data_dir}, got {found}; remove it\n")
        return EXIT_REFUSED
    for name in _INSTRUCTIONS:
        (data_dir / name).unlink(missing_ok=True)
    _remove_stale_pid_file(data_dir / "postmaster.pid")
    configuration = _write_configuration(Path(launch.socket_dir))
    status = _restrict_access(launch, data_dir, configuration[0])
    if status != 0:
        return status
    for path in (data_dir, Path(launch.socket_dir)):
        _give(path, launch.uid)
    folder, name = _open_folder(data_dir)
    os.set_inheritable(folder, True)
    settings = [*configuration, *(f"--{setting}" for setting in launch.settings)]
    command = [*launch.as_user, f"{launch.bin_dir}/postgres", "-D", name, "-k", launch.socket_dir, *settings]
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    os.execvp(command[0], command)


def _take_lock(path: Path) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    os.set_inheritable(descriptor, True)
    deadline = time.monotonic() + _LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _open_folder(path: Path) -> tuple[int, str]:
    """A descriptor, and a name for the folder that leads past its parents, for processes that inherit it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    return descriptor, f"/proc/self/fd/{descriptor}" if sys.platform == "linux" else str(path)


def _create_cluster(launch: Launch, data_dir: Path) -> int:
    """Run initdb beside the data folder, then rename, so that an interrupted initdb never looks complete."""
    aside = data_dir.with_name(data_dir.name + ".new")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(mode=0o700)
    _give(aside, launch.named_uid)
    done = _run_named(launch, aside, "initdb", "-U", "postgres", "--auth=reject", "--encoding=UTF8", "--no-locale")
    if done == 0:
        aside.rename(data_dir)
    return done


def _find_link(data_dir: Path) -> Path | None:
    """Something in the data folder that leads out of it: a link, or anything that is neither file nor folder."""
    for parent, folders, files, descriptor in os.fwalk(data_dir):
        for name in (*folders, *files):
            mode = os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                return Path(parent, name)
    return None


def _write_configuration(folder: Path) -> tuple[str, ...]:
    """Write all files that configure the server, and return its options that name them."""
    user = pwd.getpwuid(os.geteuid()).pw_name
    users = "".join(f'controller "{user}" {role}\n' for role in (ROLE, READER))
    texts = {"config_file": "", "hba_file": _ACCESS, "ident_file": users}
    for name, text in texts.items():
        (folder / name).write_text(text)
    return tuple(f"--{name}={folder / name}" for name in texts)


def _restrict_access(launch: Launch, data_dir: Path, configuration: str) -> int:
    """Make `ROLE` the owner of the tables. Our text in pg_hba.conf, written last, says that this was done."""
    done = data_dir / "pg_hba.conf"
    if done.read_text() == _ACCESS:
        return 0
    for path in (data_dir, Path(launch.socket_dir)):
        _give(path, launch.named_uid)
    options = (configuration, "-c", "exit_on_error=on")
    status = _run_named(launch, data_dir, "postgres", "--single", *options, stdin=_OWN_EVERYTHING, database="postgres")
    if status == 0:
        _write(done, _ACCESS)
    return status


def _run_named(
    launch: Launch, data_dir: Path, program: str, *options: str, stdin: str = "", database: str | None = None
) -> int:
    """Run initdb, or the server on its own standard input: both insist on a user with a name."""
    folder, name = _open_folder(data_dir)
    command = [*launch.as_named, f"{launch.bin_dir}/{program}", *options, "-D", name]
    if database is not None:
        command.append(database)
    done = subprocess.run(command, input=stdin, text=True, stdout=sys.stderr, check=False, cwd="/", pass_fds=(folder,))
    os.close(folder)
    return done.returncode


def _write(path: Path, text: str) -> None:
    """Replace a file of the server at once; through no link that the server may have put there."""
    if path.read_text() == text:
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        if os.geteuid() == 0:
            owner = path.parent.stat()
            os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
    os.replace(file.name, path)


def _give(folder: Path, uid: int | None) -> None:
    """Let a folder and all in it belong to a user; links are not followed."""
    if uid is None or folder.stat().st_uid == uid:
        return
    for _, folders, files, descriptor in os.fwalk(folder):
        for name in (*folders, *files):
            os.chown(name, uid, uid, dir_fd=descriptor, follow_symlinks=False)
    os.chown(folder, uid, uid)  # last: a folder that was left half done has its old owner


def _remove_stale_pid_file(path: Path) -> None:
    """Remove the pid file of a crashed server, whose pid another process may have by now. We hold the lock."""
    if path.exists():
        pid = path.read_text().split("\n", 1)[0]
        comm = Path(f"/proc/{pid}/comm")
        if not (comm.exists() and comm.read_text().strip() == "postgres"):
            path.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
