"""Attacks on database, trainer, model server and agents, on what a run writes, and on its end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import chz
import dotenv as dotenv  # read by recipes when they start, perhaps from where their user cannot
import httpx
import psutil
import psycopg
import psycopg.conninfo
from psycopg.sql import SQL, Identifier

from cua_rl.command_line.recipe import run_recipe
from cua_rl.host.sandbox import can_sandbox
from cua_rl.types.errors import CuaError, boundary
from scripts.red_team.findings import Finding, Findings, Targets, canaries_of, check, check_all, guest_users, skipped
from scripts.red_team.targets import ALL_CANARIES, SAID, command_line, listeners, status_of
from scripts.red_team.users import STRANGER_UID, allow_inspection, as_user, inspect

_KEPT = (0, 1, 2, 3, 14, 23, 24)
"""chown, dac_override, dac_read_search, fowner, ipc_lock, sys_nice, sys_resource of linux/capability.h."""
LOADS_CODE = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "BASH_ENV", "NODE_OPTIONS")


def attack_database(targets: Targets) -> Findings:
    """Row 1: a program of a desktop, a stranger, or the user of the run asks the embedded Postgres to run a command."""
    url = targets.run.database_url
    for who, uid in (_other_users(targets) | {"the user of the run": os.geteuid()}).items():
        for role in ("postgres", "cua_rl"):
            said = as_user(uid, partial(_copy_to_program, url, role))
            yield check(1, f"COPY TO PROGRAM as {role} by {who}", "refused", said, said.startswith("refused"))
    if os.geteuid() != 0:
        yield skipped(1, "Postgres as another user", "needs root, which can become another user")
        return
    services = [each for each in targets.run.find("/bin/postgres") if each.uids().real != 0]
    shared = {each.uids().real for each in services} & set(guest_users(targets).values())
    yield check_all(1, "users shared by desktops and database", services, shared)
    yield check_all(1, "capabilities of Postgres", services, [each.pid for each in services if _capabilities(each.pid)])


def _other_users(targets: Targets) -> dict[str, int]:
    """Users of programs that attack a run, none for whoever cannot become them."""
    if os.geteuid() != 0:
        return {}
    return {"a stranger": STRANGER_UID} | {f"the user of {name}": uid for name, uid in guest_users(targets).items()}


def _copy_to_program(url: str, role: str) -> str:
    with psycopg.connect(psycopg.conninfo.make_conninfo(url, user=role), connect_timeout=5) as connection:
        connection.execute("COPY (SELECT 1) TO PROGRAM 'true'")
    return "Postgres ran a command"


def _capabilities(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    words = [line.split() for line in lines if line.startswith(("CapPrm", "CapBnd"))]  # what it has, and could gain
    return int(words[0][1], 16) | int(words[1][1], 16)


def attack_trainer(targets: Targets) -> Findings:
    """Row 3: an open rendezvous of the trainer's two ranks, and wildcard addresses of anything else."""
    if os.geteuid() != 0:
        yield skipped(3, "listeners of the run", "needs root: its processes refuse inspection by their own user")
        return
    every = listeners(targets.run.processes())
    wild = [
        f"{command_line(each)[-40:]} {ip}:{port}"
        for ip, port, each in every
        if ip in ("0.0.0.0", "::", "::ffff:0.0.0.0")
    ]
    yield check_all(3, "listeners on all addresses", every, wild)
    ranks = targets.run.find("cua_rl.training.worker", "torch.distributed")
    ports = [f"{ip}:{port}" for ip, port, _ in listeners(ranks)]
    beyond = [port for port in ports if not port.startswith("127.")]
    yield check_all(3, "TCP listeners of two trainer ranks beyond loopback", ports, beyond)


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
        yield check_all(4, "TCP ports of vLLM", servers, ports)
    if os.geteuid() == 0:
        ranks = targets.run.find("cua_rl.training.worker")
        computing = {each for process in (*servers, *ranks) for each in (process, *process.children(recursive=True))}
        kept = sum(1 << number for number in _KEPT)
        strong = [command_line(each)[-40:] for each in computing if _capabilities(each.pid) & ~kept]
        yield check_all(4, "more capabilities of vLLM and ranks than seven", ranks and servers, strong)
    guarded = targets.run.guarded()
    found = {f"{canary} {command_line(each)[-30:]}" for each in guarded for canary in canaries_of(each)}
    yield check_all(4, "canaries in what the run started", guarded, sorted(found))


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
    attack, found = "an agent reads .env, .git and the run beside it", spied["beside"]
    if found and os.geteuid() != 0 and not can_sandbox():
        yield Finding(row=7, attack=attack, expected="", got=f"{found}, without a sandbox", verdict="not promised")
    else:
        yield check(7, attack, "none", found or "none", not found)


def attack_secrets(targets: Targets) -> Findings:
    """Row 13: canaries and 140 shapes of secrets in everything that a run writes, shows and is started with."""
    run = targets.run
    with psycopg.connect(run.database_url) as connection:
        tables = [row[0] for row in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")]
        texts = [
            str(connection.execute(SQL("SELECT * FROM {}").format(Identifier(name))).fetchall()) for name in tables
        ]
    with httpx.Client(base_url=f"{run.monitor}/api/runs", trust_env=False, timeout=60) as client:
        rollouts = client.get("/1/rollouts", params={"limit": 200}).json()["items"]
        paths = ("", "/1", *(f"/1/rollouts/{rollout['rollout_id']}" for rollout in rollouts))
        pages = [client.get(path).text for path in paths]
    written = [path for path in run.run_folder.rglob("*") if path.is_file() and "postgres/" not in str(path)]
    agents = run.run_folder / "logs" / "agents"
    places = {
        "the run folder": [path.read_text(errors="replace") for path in written if agents not in path.parents],
        "the console": [run.output()],
        "the database": texts,
        "the API": pages,
        # the agent's command is what somebody wrote, and the agent's own
        "command lines": [command_line(each) for each in run.processes() if "spy.py" not in command_line(each)],
    }
    for place, said in places.items():
        found = [canary for canary in ALL_CANARIES if any(canary in text for text in said)]
        yield check(13, f"canaries in {place}", "none", found or "none", not found)
        if place == "command lines":
            continue
        found = [text for part, text in run.texts.items() if any(part in text for text in said)]
        # without their errors, what agents printed did not come here
        is_met = sum(text.count(SAID) for text in said) >= len(run.pieces)
        attack = f"{len(run.texts)} shapes and encodings of secrets in {place}"
        yield check(13, attack, "none", found or ("none" if is_met else "nor their errors"), is_met and not found)
    paths = [run.run_folder, *written]
    loose = [path.name for path in paths if path.stat().st_mode & 0o066]
    yield check(13, "what others may read of the run folder", "nothing", loose or "nothing", not loose)


def attack_inspection(targets: Targets) -> Findings:
    """Row 20: a program without privileges debugs the processes of a run, as another user and as the run's own."""
    own = os.geteuid()
    for who, uid in _other_users(targets).items():
        run = [each.pid for each in targets.run.processes() if each.uids().real != uid]
        got = {pid: as_user(uid, partial(inspect, pid)) for pid in run}
        bad = [f"{pid}: {said}" for pid, said in got.items() if not said.startswith("refused")]
        yield check_all(20, f"{who} debugs {len(got)} processes of the run", got, bad)
    if own != 0:
        yield skipped(20, "another user debugs processes of the run", "needs root, which can become another user")
        names = ("cua_rl.recipes", "cua_rl.training.worker", "process_guard")
        run = [each for each in targets.run.processes() if any(name in command_line(each) for name in names)]
        said = [f"{as_user(own, partial(inspect, each.pid))}: {command_line(each)[-50:]}" for each in run]
        bad = [one for one in said if not one.startswith("refused")]
        yield check_all(20, f"our user debugs {len(run)} processes of the run", run, bad)
    yield from attack_recipe()


def attack_recipe() -> Findings:
    """Row 20: a recipe that a user without privileges has started, and a debugger of the same user."""
    said = as_user(os.geteuid() or STRANGER_UID, _inspect_own_recipe)
    attack = "a debugger of the user who started a recipe"
    yield check(20, attack, "refused", said, said.startswith("refused"))


def _inspect_own_recipe() -> str:
    """What a program gets of a recipe; no exec, as in `as_user`. Before it is a recipe, it must give itself away."""
    ours, theirs = socket.socketpair()
    recipe = os.fork()
    if recipe == 0:
        ours.close()  # so that it ends when nobody is left to tell it to go on

        async def wait(config: _NoSettings) -> None:
            del config
            theirs.send(b"recipe")
            await asyncio.Event().wait()

        try:
            allow_inspection()  # as after exec
            theirs.send(b"program")
            if theirs.recv(9):
                run_recipe(_NoSettings, wait, [])
        finally:
            os._exit(1)
    theirs.close()
    try:
        ours.settimeout(60)
        ours.recv(9)
        with boundary(CuaError, "expected to debug a program of the same user, got nothing"):
            inspect(recipe)
        ours.send(b"go on")
        if not ours.recv(9):
            raise CuaError("expected a recipe to start, got its end")
        return inspect(recipe)
    finally:
        os.kill(recipe, signal.SIGKILL)
        os.waitpid(recipe, 0)


@chz.chz
class _NoSettings:
    """Settings of a recipe that only waits."""


def attack_environment_file(targets: Targets) -> Findings:
    """Row 14: `.env` of a parent folder, of another user, and with variables that load code."""
    url = "DATABASE_URL=postgresql://red-team@127.0.0.1:9/red\n"
    inner = targets.folder / "parent" / "inner"
    inner.mkdir(parents=True)
    (inner.parent / ".env").write_text(url)
    said = _read_environment_file(targets, inner)
    yield check(14, ".env of a parent folder", "not read", said, "127.0.0.1:9" not in said)
    (inner / ".env").write_text(url)
    if os.geteuid() == 0:
        for path in (inner, inner / ".env"):
            os.chown(path, STRANGER_UID, STRANGER_UID)
        said = _read_environment_file(targets, inner)
        is_ignored = "127.0.0.1:9" not in said and f"user {STRANGER_UID}" in said
        yield check(14, ".env of another user", "ignored, with a warning", said, is_ignored)
    else:
        yield skipped(14, ".env of another user", "needs root, which can make files of another user")
    (inner / ".env").chmod(0o666)
    said = _read_environment_file(targets, inner)
    yield check(14, ".env that everybody may write", "ignored", said, "127.0.0.1:9" not in said)
    mine = targets.folder / "mine"
    mine.mkdir()
    for name in LOADS_CODE:
        (mine / ".env").write_text(f"{url}{name}={mine}/theirs\n")
        said = _read_environment_file(targets, mine)
        is_held = "127.0.0.1:9" not in said and f"got {name}, which loads code" in said
        yield check(14, f"{name} in .env", "refused", said, is_held)


def _read_environment_file(targets: Targets, folder: Path) -> str:
    """What a program says that reads `.env` of this folder, and connects to the database that it names."""
    environment = {name: value for name, value in targets.environment().items() if not name.startswith("POSTGRES_")}
    command = [sys.executable, "-m", "cua_rl.rebuild_database", "--yes"]
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return done.stdout + done.stderr


def attack_ends(targets: Targets) -> Findings:
    """Row 14, last: kill -9 of the controller."""
    run = targets.run
    run.process.send_signal(signal.SIGSTOP)  # or it would start processes that are not on the list
    owned = run.processes()
    os.kill(run.process.pid, 9)
    run.process.wait()
    _, alive = psutil.wait_procs(owned, timeout=45)
    left = [command_line(process)[:60] for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    yield check(14, "processes after kill -9", "none in 45 s", left or "none", not left)
    program = "import cua_rl.host.processes as p, asyncio, pathlib, sys\n"
    program += "asyncio.run(p.OwnedProcess(['true'], name='x', log_path=pathlib.Path(sys.argv[1])).start())"
    later = [sys.executable, "-c", program, str(run.folder / "later.log")]
    subprocess.run(
        later, env={**run.environment, "TMPDIR": str(run.temporary)}, check=True, capture_output=True, timeout=120
    )
    folders = [path.name for path in run.temporary.glob("cua_rl*")]
    users = [
        command_line(each)[-60:]
        for each in psutil.process_iter()
        if any(name in command_line(each) for name in folders)
    ]
    got = (*folders, *users) or "none"
    yield check(14, "temporary folders after the next start", "none", got, not folders)
