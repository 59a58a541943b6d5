"""Attack a live run in the ways that docs/security.md promises to withstand, and print what came of each.

    python -m scripts.red_team                # starts a small run, two desktops and a browser, and attacks them
    python -m scripts.red_team rows=1,4,13    # these rows only

The exit status is 1 if an attack got through, or broke off so that nobody knows. Attacks of another user need root,
which can become one; without it, they are not tried.
"""

import gzip
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

import chz
import httpx
import psutil
import psycopg
import psycopg.conninfo
from psycopg.sql import SQL, Identifier
from rich.console import Console
from rich.table import Table

from cua_rl.command_line.parsing import parse_command_line
from cua_rl.command_line.recipe import report_error
from cua_rl.database.session import make_writer_engine
from cua_rl.errors import CuaError, boundary
from cua_rl.monitor.projects import create_project
from scripts.red_team_targets import (
    ALL_CANARIES,
    STRANGER_UID,
    WRITE_TOKEN,
    Devices,
    LiveRun,
    as_user,
    asked_meanwhile,
    command_line,
    listeners,
    peak_bytes,
    status_of,
)

Verdict = Literal["held", "OPEN", "not tried", "unclear"]
MAX_GROWTH_BYTES = 150 * 2**20
MAX_WAIT_S = 0.5
_WRONG: tuple[Any, ...] = (True, -1.5, "no \x00 text", [], [[1, None]], {"a": {"b": [1]}}, 10**30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What came of one attack."""

    row: int
    attack: str
    expected: str
    got: str
    verdict: Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What is attacked."""

    run: LiveRun
    devices: Devices | None


Findings = Iterator[Finding]


def check(row: int, attack: str, expected: str, got: object, is_held: bool) -> Finding:
    """A finding whose verdict is known."""
    text = " ".join(str(got).split())[:110]
    return Finding(row=row, attack=attack, expected=expected, got=text, verdict="held" if is_held else "OPEN")


def skipped(row: int, attack: str, reason: str) -> Finding:
    """An attack that cannot be tried here."""
    return Finding(row=row, attack=attack, expected="", got=f"not tried: {reason}", verdict="not tried")


def attack_database(targets: Targets) -> Findings:
    """Row 1: a program of a desktop, or a stranger, asks the embedded Postgres to run a command."""
    if os.geteuid() != 0:
        yield skipped(1, "Postgres as another user", "not root")
        return
    url = targets.run.database_url
    users = {"a stranger": STRANGER_UID} | {f"the user of {name}": uid for name, uid in _guest_users(targets).items()}
    for who, uid in users.items():
        for role in ("postgres", "cua_rl"):
            said = as_user(uid, partial(_copy_to_program, url, role))
            yield check(1, f"COPY TO PROGRAM as {role} by {who}", "refused", said, said.startswith("refused"))
    said = as_user(os.geteuid(), partial(_copy_to_program, url, None))
    yield check(1, "COPY TO PROGRAM with the role of the run", "refused", said, said.startswith("refused"))
    services = {process.uids().real for process in targets.run.find("/bin/postgres")}
    shared = services & set(_guest_users(targets).values())
    yield check(1, "users shared by desktops and database", "none", shared or "none", not shared)
    capable = [p.pid for p in targets.run.find("/bin/postgres") if p.uids().real != 0 and _capabilities(p.pid)]
    yield check(1, "capabilities of Postgres", "none", capable or "none", not capable)


def _guest_users(targets: Targets) -> dict[str, int]:
    """Users of what models and agents operate."""
    if targets.devices is None:
        return {}
    below = psutil.Process(targets.devices.process.pid).children(recursive=True)
    names = ("openbox", "Xvfb", "chrome", "chromium")
    return {p.name(): p.uids().real for p in below if any(name in p.name() for name in names) and p.uids().real != 0}


def _copy_to_program(url: str, role: str | None) -> str:
    address = url if role is None else psycopg.conninfo.make_conninfo(url, user=role)
    with psycopg.connect(address, connect_timeout=5) as connection:
        connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")
    return "Postgres ran a command"


def _capabilities(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)


def attack_browser(targets: Targets) -> Findings:
    """Row 2: DevTools without authentication, no sandbox as root, secrets in the browser's environment."""
    if targets.devices is None:
        yield skipped(2, "DevTools of Chromium", "no browser could be started")
        return
    below = psutil.Process(targets.devices.process.pid).children(recursive=True)
    browsers = [
        process for process in below if "chrom" in process.name() and "process_guard" not in command_line(process)
    ]
    ports = sorted({port for _, port, _ in listeners(browsers)})
    yield check(2, "TCP ports of Chromium", "none", ports or "none", not ports)
    bare = [process.pid for process in browsers if process.uids().real == 0]
    yield check(2, "Chromium as root", "never", f"{len(bare)} processes", not bare)
    found = sorted({canary for process in below for canary in _canaries_of(process)})
    yield check(2, "canaries in the environment of browser and desktops", "none", found or "none", not found)


def _canaries_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        text = json.dumps(process.environ())
        return [canary for canary in ALL_CANARIES if canary in text]
    return []


def attack_trainer(targets: Targets) -> Findings:
    """Row 3: an open rendezvous of the trainer's two ranks, and wildcard addresses of anything else."""
    every = listeners(targets.run.processes())
    wild = [
        f"{command_line(each)[-40:]} {ip}:{port}"
        for ip, port, each in every
        if ip in ("0.0.0.0", "::", "::ffff:0.0.0.0")
    ]
    yield check(3, "listeners on all addresses", "none", wild or "none", not wild)
    ranks = targets.run.find("cua_rl.training.worker", "torch.distributed")
    ports = [f"{ip}:{port}" for ip, port, _ in listeners(ranks)]
    yield check(3, "TCP listeners of two trainer ranks", "none on one machine", ports or "none", not ports)


def attack_model_server(targets: Targets) -> Findings:
    """Row 4: the model server without a key, and what its environment holds."""
    servers = targets.run.find("vllm")
    ports = sorted({port for _, port, _ in listeners(servers)})
    for port in ports:
        base = f"http://127.0.0.1:{port}"
        for method, path, body in (
            ("GET", "/v1/models", None),
            ("POST", "/v1/load_lora_adapter", {"lora_name": "red", "lora_path": "/tmp"}),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "red"}),
            ("POST", "/tokenize", {"prompt": "a"}),
        ):
            with suppress(httpx.TransportError):  # a port of another protocol
                status = status_of(method, base + path, json=body)
                yield check(4, f"{method} {path} of vLLM without a key", "401", status, status in (401, 403))
    if not ports:
        yield check(4, "TCP ports of vLLM", "none, or a key", "none", True)
    found = sorted({canary for process in servers for canary in _canaries_of(process)})
    yield check(4, "canaries in the environment of vLLM", "none", found or "none", not found)


def attack_gateway_bodies(targets: Targets) -> Findings:
    """Row 5: huge and deep bodies to a rollout that does not exist."""
    base, rollout, key = targets.run.gateway
    models = f"{base}/rollouts/{rollout}/v1/models"
    with asked_meanwhile(models, {"Authorization": f"Bearer {key}"}) as waits:
        growth, status = _growth_bytes(
            targets.run.process.pid,
            lambda: status_of("POST", f"{base}/rollouts/unknown/v1/responses", content=_arrays(120), headers=_JSON),
        )
    yield check(5, "120 MB to an unknown rollout: memory", "< 150 MiB", _mib(growth), growth < MAX_GROWTH_BYTES)
    yield check(5, "120 MB to an unknown rollout: others wait", "< 0.5 s", f"{waits[0]:.2f} s", waits[0] < MAX_WAIT_S)
    yield check(5, "120 MB to an unknown rollout: answer", "no 5xx", status, status < 500)
    deep = "[" * 100_000 + "]" * 100_000
    headers = _JSON | {"Authorization": f"Bearer {key}"}
    status = status_of("POST", f"{base}/rollouts/{rollout}/v1/responses", content=deep, headers=headers)
    yield check(5, "JSON of 100,000 levels", "no 5xx", status, status < 500)


_JSON = {"Content-Type": "application/json"}


def _arrays(num_mb: int) -> Iterator[bytes]:
    yield b"["
    for _ in range(num_mb * 4):
        yield b"[]," * 83_333


def _growth_bytes(pid: int, attack: Callable[[], int]) -> tuple[int, int]:
    """How far the peak of a process's memory rose, and the answer's status, 0 if the server hung up."""
    before, status = peak_bytes(pid), 0
    with suppress(httpx.TransportError):
        status = attack()
    time.sleep(0.5)
    return peak_bytes(pid) - before, status


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


def attack_gateway_address(targets: Targets) -> Findings:
    """Row 6: the address of a rollout without its key."""
    base, rollout, key = targets.run.gateway
    url, body = f"{base}/rollouts/{rollout}/v1/responses", json.dumps({"model": "base", "input": []})
    bearer = {"Authorization": f"Bearer {key}"}
    for attack, headers in (
        ("no bearer", _JSON),
        ("a wrong bearer", _JSON | {"Authorization": "Bearer wrong"}),
        ("text/plain", bearer | {"Content-Type": "text/plain"}),
        ("a foreign Host", _JSON | bearer | {"Host": "evil.example"}),
    ):
        status = status_of("POST", url, content=body, headers=headers)
        yield check(6, f"POST to a rollout with {attack}", "refused", status, status in (401, 403, 415, 421))


def attack_agent(targets: Targets) -> Findings:
    """Row 7: what an agent finds in its environment and in those of its parents."""
    spied = targets.run.spied
    text = json.dumps(spied["environment"])
    found = [canary for canary in ALL_CANARIES if canary in text]
    yield check(7, "canaries in the environment of an agent", "none", found or "none", not found)
    own = spied.get("pid", "")
    seen = json.dumps({pid: variables for pid, variables in spied["seen"].items() if pid != own})
    found = [canary for canary in ALL_CANARIES if canary in seen]
    if os.geteuid() != 0 and found:
        yield skipped(7, "canaries in the environment of its parents", "not root: an agent of the same user reads it")
        return
    yield check(7, "canaries in the environment of its parents", "none", found or "none", not found)


def attack_files(targets: Targets) -> Findings:
    """Row 8: FIFOs, endless and sparse files on a desktop, read by its validator."""
    devices = targets.devices
    if devices is None:
        yield skipped(8, "files of a desktop", "no desktop could be started")
        return
    devices.tell(number=0, shell="mkfifo pipe; ln -s /dev/zero zero; truncate -s 1G sparse; echo mine > note")
    before = devices.tell(number=1, query="files")["peak_bytes"]
    for name, times in (("sparse", 1), ("zero", 1), ("pipe", 40)):  # what takes every thread comes last
        told = devices.tell(number=0, query=f"file:{name}", times=times)
        growth, before = told["peak_bytes"] - before, told["peak_bytes"]
        is_held = told["seconds"] < 10 and growth < MAX_GROWTH_BYTES
        got = f"{told['seconds']:.1f} s, {_mib(growth)}, {told['text'][:30]!r}"
        yield check(8, f"{times} reads of {name}", "< 10 s, < 150 MiB", got, is_held)
        other = devices.tell(number=1, query="files")["seconds"]
        yield check(8, f"another desktop after {name}", "< 0.5 s", f"{other:.2f} s", other < MAX_WAIT_S)


def attack_other_desktop(targets: Targets) -> Findings:
    """Row 9: one desktop writes another one's files, and draws on its screen."""
    devices = targets.devices
    if devices is None:
        yield skipped(9, "another desktop", "no desktop could be started")
        return
    _, other = devices.facts["desktops"]
    devices.tell(number=1, shell="echo right > answer.txt")
    devices.tell(number=0, shell=f"echo wrong > {other['home']}/answer.txt; ls {other['home']}")
    text = devices.tell(number=1, query="file:answer.txt")["text"]
    if os.geteuid() != 0 and text.strip() != "right":
        yield skipped(9, "a desktop overwrites another one's file", "not root: all desktops share a user")
    else:
        yield check(9, "a desktop overwrites another one's file", "right", text, text.strip() == "right")
    answer = _open_display(other["display"])
    yield check(9, "an X display without its cookie", "refused", answer, answer != "opened")


def _open_display(display: str) -> str:
    """What an X server says to a client without authorization: 1 is success (X protocol, connection setup)."""
    path = f"/tmp/.X11-unix/X{display.removeprefix(':')}"
    for address in (path, f"\0{path}"):
        with suppress(OSError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(5)
            client.connect(address)
            client.sendall(b"l\0\x0b\0\0\0\0\0\0\0\0\0")
            return "opened" if client.recv(1) == b"\x01" else "refused"
    return "no socket that can be reached"


def attack_monitor_bodies(targets: Targets) -> Findings:
    """Row 10: a large body without a token, and half-open connections."""
    base = targets.run.monitor
    port = int(base.rpartition(":")[2])
    (server, *_) = [process for _, each, process in listeners(targets.run.processes()) if each == port]
    with asked_meanwhile(f"{base}/api/runs", {}) as waits:
        growth, status = _growth_bytes(
            server.pid, lambda: status_of("POST", f"{base}/api/ingest/batch", content=_arrays(60), headers=_JSON)
        )
    yield check(10, "60 MB without a token: memory", "< 150 MiB", _mib(growth), growth < MAX_GROWTH_BYTES)
    yield check(10, "60 MB without a token: answer", "401, 413 or hung up", status, status in (0, 401, 403, 413))
    yield check(10, "60 MB without a token: others wait", "< 0.5 s", f"{waits[0]:.2f} s", waits[0] < MAX_WAIT_S)
    with ExitStack() as stack:
        for _ in range(300):
            half = stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            half.sendall(b"POST /api/ingest/batch HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n[")
        with asked_meanwhile(f"{base}/api/runs", {}) as waits:
            time.sleep(3)
    yield check(10, "300 half-open requests: others wait", "< 0.5 s", f"{waits[0]:.2f} s", waits[0] < MAX_WAIT_S)


def attack_ingest(targets: Targets) -> Findings:
    """Row 11: items whose fields have wrong types; they are refused, or their pages stay whole."""
    base, engine = targets.run.monitor, make_writer_engine(targets.run.database_url)
    try:
        _, token = create_project(engine, "red-team")
    finally:
        engine.dispose()
    headers = {"Authorization": f"Bearer {token}"}
    kinds = ("tasks", "environments", "steps", "evals", "rollouts", "turns", "actions", "validations")
    fields = ("client_id", "rollout_id", "step", "turn_index", "status", "task_id", "reward", "start_time", "cua_rl")
    worst = 0
    for kind in kinds:
        for value in _WRONG:
            item = dict.fromkeys(fields, value)
            body = {"training": {"run_name": "red", "cua_rl": value}, kind: [item]}
            worst = max(worst, status_of("POST", f"{base}/api/ingest/batch", json=body, headers=headers))
    yield check(11, "items with fields of wrong types", "no 5xx", worst, worst < 500)
    runs = [run["run_id"] for run in httpx.get(f"{base}/api/runs", trust_env=False, timeout=60).json()["items"]]
    pages = ("", "/rollouts", "/timeline", "/tasks", "/metrics", "/failures")
    broken = [page for run in runs for page in pages if status_of("GET", f"{base}/api/runs/{run}{page}") >= 500]
    yield check(11, "pages after them", "whole", broken or "whole", not broken)


def attack_session(targets: Targets) -> Findings:
    """Row 12: the cookie of a session."""
    answer = httpx.post(f"{targets.run.monitor}/api/session", json={"token": WRITE_TOKEN}, trust_env=False, timeout=60)
    cookie = answer.headers.get("set-cookie", "")
    is_whole = answer.is_success and bool(cookie)
    yield check(
        12, "the token itself in the cookie", "another value", cookie[:40], is_whole and WRITE_TOKEN not in cookie
    )
    marks = [mark for mark in ("HttpOnly", "SameSite=strict") if mark.lower() not in cookie.lower()]
    yield check(12, "marks of the cookie", "HttpOnly, SameSite=strict", marks or "both", is_whole and not marks)


def attack_secrets(targets: Targets) -> Findings:
    """Row 13: canaries in everything that a run writes, shows and is started with."""
    run = targets.run
    with psycopg.connect(run.database_url) as connection:
        tables = [row[0] for row in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
        texts = [
            str(connection.execute(SQL("SELECT * FROM {}").format(Identifier(name))).fetchall()) for name in tables
        ]
    pages = [httpx.get(f"{run.monitor}/api/runs{path}", trust_env=False, timeout=60).text for path in ("", "/1")]
    written = [path for path in run.run_folder.rglob("*") if path.is_file() and "postgres/" not in str(path)]
    places = {
        "the run folder": [path.read_text(errors="replace") for path in written],
        "the console": [run.output()],
        "the database": texts,
        "the API": pages,
        # the agent's command is what somebody wrote, and the agent's own
        "command lines": [command_line(each) for each in run.processes() if "spy.py" not in command_line(each)],
    }
    for place, said in places.items():
        found = [canary for canary in ALL_CANARIES if any(canary in text for text in said)]
        yield check(13, f"canaries in {place}", "none", found or "none", not found)
    paths = [run.run_folder, *written]
    loose = [path.name for path in paths if path.stat().st_mode & 0o066]
    yield check(13, "what others may read of the run folder", "nothing", loose or "nothing", not loose)


def attack_image(targets: Targets) -> Findings:
    """Row 14: a doubly compressed image from an allowed host."""
    bomb = gzip.compress(gzip.compress(bytes(2**29)))

    class Bomb(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Encoding", "gzip, gzip")
            self.end_headers()
            with suppress(OSError):
                self.wfile.write(bomb)

    base, rollout, key = targets.run.gateway
    with ThreadingHTTPServer(("127.0.0.1", 0), Bomb) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        part = {"type": "input_image", "image_url": f"http://127.0.0.1:{server.server_port}/a.png"}
        body = {"model": "base", "input": [{"role": "user", "content": [part]}]}
        headers = {"Authorization": f"Bearer {key}"}
        url = f"{base}/rollouts/{rollout}/v1/responses"
        growth, status = _growth_bytes(
            targets.run.process.pid, lambda: status_of("POST", url, json=body, headers=headers)
        )
        server.shutdown()
    is_held = growth < MAX_GROWTH_BYTES and 400 <= status < 500
    yield check(14, "an image of 512 MiB in 1 KiB", "4xx, < 150 MiB", f"{status}, {_mib(growth)}", is_held)


def attack_environment_file(targets: Targets) -> Findings:
    """Row 14: `.env` of a parent folder."""
    inner = targets.run.folder / "parent" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / ".env").write_text("DATABASE_URL=postgresql://red-team@127.0.0.1:9/red\n")
    environment = {name: value for name, value in targets.run.environment().items() if not name.startswith("POSTGRES_")}
    command = [sys.executable, "-m", "cua_rl.rebuild_database", "--yes"]
    done = subprocess.run(command, cwd=inner, env=environment, capture_output=True, text=True, check=False, timeout=120)
    said = done.stdout + done.stderr
    yield check(14, ".env of a parent folder", "not read", said[:80], "127.0.0.1:9" not in said)


def attack_ends(targets: Targets) -> Findings:
    """Row 14, last: kill -9 of the controller."""
    run = targets.run
    owned = run.processes()
    os.kill(run.process.pid, 9)
    run.process.wait()
    _, alive = psutil.wait_procs(owned, timeout=45)
    left = [command_line(process)[:60] for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    yield check(14, "processes after kill -9", "none in 45 s", left or "none", not left)
    program = "import cua_rl.processes as p, asyncio, pathlib, sys\n"
    program += "asyncio.run(p.OwnedProcess(['true'], name='x', log_path=pathlib.Path(sys.argv[1])).start())"
    later = [sys.executable, "-c", program, str(run.folder / "later.log")]
    subprocess.run(later, env=run.environment(), check=True, capture_output=True, timeout=120)
    folders = [path.name for path in run.temporary.glob("cua_rl*")]
    yield check(14, "temporary folders after the next start", "none", folders or "none", not folders)


ATTACKS: tuple[tuple[int, Callable[[Targets], Findings]], ...] = (
    (1, attack_database),
    (2, attack_browser),
    (3, attack_trainer),
    (4, attack_model_server),
    (6, attack_gateway_address),
    (7, attack_agent),
    (9, attack_other_desktop),
    (8, attack_files),
    (11, attack_ingest),
    (12, attack_session),
    (13, attack_secrets),
    (5, attack_gateway_bodies),
    (10, attack_monitor_bodies),
    (14, attack_image),
    (14, attack_environment_file),
    (14, attack_ends),
)
"""In this order: what only looks comes first, and what ends the run comes last."""


@chz.chz
class RedTeamConfig:
    """Which attacks are tried."""

    rows: list[int] = chz.field(default_factory=lambda: list(range(1, 15)), doc="rows of the table in docs/security.md")
    folder: str | None = chz.field(default=None, doc="folder that keeps the run; None is one that is removed")


def try_attacks(targets: Targets, rows: list[int]) -> list[Finding]:
    """All findings; an attack that breaks off is unclear, never held."""
    findings: list[Finding] = []
    for row, attack in ATTACKS:
        if row not in rows:
            continue
        print(f"{attack.__name__} ...", file=sys.stderr, flush=True)
        try:
            with boundary(CuaError, attack.__name__):
                findings.extend(attack(targets))
        except CuaError as error:
            got = " ".join(str(error).split())[:110]
            findings.append(Finding(row=row, attack=attack.__name__, expected="", got=got, verdict="unclear"))
    return findings


def print_findings(findings: list[Finding]) -> None:
    """The table, in the order of rows."""
    table = Table(title=f"{'root' if os.geteuid() == 0 else 'ordinary user'}, {len(findings)} attacks")
    for heading in ("row", "attack", "expected", "got", "verdict"):
        table.add_column(heading)
    for each in sorted(findings, key=lambda each: each.row):
        table.add_row(str(each.row), each.attack, each.expected, each.got, each.verdict)
    Console(width=None if sys.stdout.isatty() else 200).print(table, markup=False)


def attack_live_run(config: RedTeamConfig) -> list[Finding]:
    """Start the targets, attack them, and end them."""
    folder = Path(config.folder or tempfile.mkdtemp(prefix="red_team_")).absolute()
    folder.mkdir(exist_ok=True)
    run, devices = LiveRun(folder), None
    try:
        run.start()
        if {1, 2, 8, 9} & set(config.rows):
            try:
                devices = Devices(folder, run.environment())
            except CuaError as error:
                print(f"no desktops or browser: {error}", flush=True)
        return try_attacks(Targets(run=run, devices=devices), config.rows)
    finally:
        if devices is not None:
            devices.stop()
        run.stop()
        if config.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Attack and report; 1 if anything got through."""
    # no event loop: attacks of other users fork
    try:
        config = parse_command_line(RedTeamConfig, sys.argv[1:])
    except CuaError as error:
        return report_error(error)
    findings = attack_live_run(config)
    print_findings(findings)
    return int(any(each.verdict in ("OPEN", "unclear") for each in findings))


if __name__ == "__main__":
    sys.exit(main())
