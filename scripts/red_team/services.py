"""Attacks on database, trainer, model server and agents, on what a run writes, and on its end."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import psycopg
import psycopg.conninfo
from psycopg.sql import SQL, Identifier

from scripts.red_team.findings import Findings, Targets, canaries_of, check, guest_users, skipped
from scripts.red_team.targets import ALL_CANARIES, STRANGER_UID, as_user, command_line, listeners, status_of

_SYS_ADMIN = 1 << 21  # linux/capability.h


def attack_database(targets: Targets) -> Findings:
    """Row 1: a program of a desktop, or a stranger, asks the embedded Postgres to run a command."""
    if os.geteuid() != 0:
        yield skipped(1, "Postgres as another user", "not root")
        return
    url = targets.run.database_url
    users = {"a stranger": STRANGER_UID} | {f"the user of {name}": uid for name, uid in guest_users(targets).items()}
    for who, uid in users.items():
        for role in ("postgres", "cua_rl"):
            said = as_user(uid, partial(_copy_to_program, url, role))
            yield check(1, f"COPY TO PROGRAM as {role} by {who}", "refused", said, said.startswith("refused"))
    said = as_user(os.geteuid(), partial(_copy_to_program, url, None))
    yield check(1, "COPY TO PROGRAM with the role of the run", "refused", said, said.startswith("refused"))
    services = {process.uids().real for process in targets.run.find("/bin/postgres")}
    shared = services & set(guest_users(targets).values())
    yield check(1, "users shared by desktops and database", "none", shared or "none", not shared)
    capable = [p.pid for p in targets.run.find("/bin/postgres") if p.uids().real != 0 and _capabilities(p.pid)]
    yield check(1, "capabilities of Postgres", "none", capable or "none", not capable)


def _copy_to_program(url: str, role: str | None) -> str:
    address = url if role is None else psycopg.conninfo.make_conninfo(url, user=role)
    with psycopg.connect(address, connect_timeout=5) as connection:
        connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")
    return "Postgres ran a command"


def _capabilities(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("CapEff")).split()[1], 16)


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
    is_held = all(port.startswith("127.") for port in ports)
    yield check(3, "TCP listeners of two trainer ranks", "on loopback", ports or "none", is_held)


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
    if os.geteuid() == 0:
        ranks = targets.run.find("cua_rl.training.worker")
        states = {each.pid: Path(f"/proc/{each.pid}/status").read_text() for each in [*servers, *ranks]}
        strong = [pid for pid, state in states.items() if int(state.split("CapEff:")[1].split()[0], 16) & _SYS_ADMIN]
        yield check(4, "vLLM and ranks with the capabilities of root", "none", strong or "none", not strong)
    found = sorted(
        {f"{canary} {command_line(each)[-30:]}" for each in targets.run.guarded() for canary in canaries_of(each)}
    )
    yield check(4, "canaries in what the run started", "none", found or "none", not found)


def attack_agent(targets: Targets) -> Findings:
    """Row 7: what an agent finds in its environment and in those of its parents."""
    spied = targets.run.spied
    text = json.dumps(spied["environment"])
    found = [canary for canary in ALL_CANARIES if canary in text]
    yield check(7, "canaries in the environment of an agent", "none", found or "none", not found)
    own = spied.get("pid", "")
    seen = json.dumps({pid: variables for pid, variables in spied["seen"].items() if pid != own})
    found = [canary for canary in ALL_CANARIES if canary in seen]
    yield check(7, "canaries in the environment of other processes", "none", found or "none", not found)
    found = spied["beside"]
    yield check(7, "an agent reads .env, .git and the run beside it", "none", found or "none", not found)


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
