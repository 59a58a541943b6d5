"""Train on two hosts, cut the cable between them and kill processes of one, and check the record that is left.

    python -m scripts.chaos_hosts folder=/tmp/hosts    # as root: the hosts are network namespaces of this machine

    host a                                       host b
    controller, database,           cable        trainer (two ranks),
    a rollout worker, a model server ───────── a rollout worker, a model server

The hosts are nodes of a Ray cluster, whose head is host a. They share no folder: each hides the other's from its
processes. Programs that end are started again, as systemd would do. One after the other, each after two more steps:

    cable:    is dead for `cut_s` seconds
    worker:   the rollout worker of host b gets SIGKILL
    server:   its model server gets SIGKILL
    rank:     rank 1 of the trainer gets SIGKILL
    node:     Ray itself gets SIGKILL on host b
    weights:  its model server comes back with another model, and must be refused, and then with its own

Then the run gets SIGTERM, is resumed, and takes two more steps. At the end, what `chaos_kill` demands must hold, and
held-out success must have risen by more than two standard errors. Prints what each disturbance took until the second
step after it, and a JSON line.
"""

import asyncio
import ctypes
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import chz
import psutil

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.environments.browser.site_relay import copy
from cua_rl.host.processes import OwnedProcess
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.sampling.address import API_KEY_VARIABLE
from scripts.chaos_record import ExpectedRun, find_faults, processes_of, read_steps, read_summary, wait_until

NUM_EVAL_ROLLOUTS = 64
_CLONE_NEWNET = 0x40000000
_CABLE = "cable"
PATIENT = {"RAY_health_check_timeout_ms": "60000"}  # docs/more_machines.md


@chz.chz
class ChaosHostsConfig:
    """Two hosts and what happens to them."""

    folder: Path = chz.field(doc="folder for the folders of the hosts and the database; must not exist")
    steps: int = chz.field(default=400, doc="training steps before which everything must have happened")
    group_size: int = chz.field(default=8, doc="rollouts per group")
    groups_per_batch: int = chz.field(default=8, doc="groups per step")
    max_lag: int = chz.field(default=1, doc="max_steps_off_policy of the run, 0 for synchronous training")
    what: str = chz.field(
        default="cable,worker,server,rank,node,weights", doc="what happens, in this order, as said above"
    )
    cut_s: float = chz.field(default=30.0, doc="how long the cable is dead, seconds")
    seed: int = chz.field(default=0, doc="seed of the moments of death")
    options: str = chz.field(default="", doc="more options of the training recipe, separated by blanks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A network namespace of this machine, and the folder of its processes."""

    name: str
    address: str
    folder: Path
    hidden: Path
    """The other host's folder, which is empty for processes of this one."""

    def program(self, name: str, module: str, *options: str, environment: Mapping[str, str]) -> OwnedProcess:
        """A recipe that runs on this host, in its folder."""
        enter = ["ip", "netns", "exec", self.name, "unshare", "--mount", "sh", "-c"]
        hide = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
        return OwnedProcess(
            [*enter, hide, str(self.hidden), sys.executable, "-m", module, *options],
            name=f"{name} of host {self.folder.name}",
            log_path=self.folder / f"{name}.log",
            environment={**os.environ, **environment, "HF_HUB_OFFLINE": "1", "TMPDIR": str(self.folder)},
            folder=self.folder,
        )


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"expected to be permitted `ip {' '.join(words)}`, got {done.stderr.strip()!r}; run as root")


@contextmanager
def connected_hosts(folder: Path) -> Generator[tuple[Host, Host]]:
    """Two hosts with a cable between them."""
    folders = {letter: folder / letter for letter in "ab"}
    first, second = (
        Host(
            name=f"cua{os.getpid()}{letter}",
            address=f"10.213.78.{number}",
            folder=folders[letter],
            hidden=folders[other],
        )
        for number, letter, other in ((1, "a", "b"), (2, "b", "a"))
    )
    try:
        for host in (first, second):
            host.folder.mkdir(parents=True)
            _ip("netns", "add", host.name)
        ends = ("netns", first.name, "type", "veth", "peer", "name", _CABLE, "netns", second.name)
        _ip("link", "add", _CABLE, *ends)
        for host in (first, second):
            _ip("-n", host.name, "address", "add", f"{host.address}/30", "dev", _CABLE)
            _ip("-n", host.name, "link", "set", _CABLE, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield first, second
    finally:
        for host in (first, second):
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, check=False)


def listen(host: Host, port: int) -> socket.socket:
    """A listening socket of a host, for this process, which stays where it is: a thread of its own enters."""

    def enter_and_listen() -> socket.socket:
        with Path(f"/run/netns/{host.name}").open() as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter {host.name}")
        return socket.create_server((host.address, port))

    with ThreadPoolExecutor(max_workers=1) as one:
        return one.submit(enter_and_listen).result()


@asynccontextmanager
async def open_database(folder: Path, host: Host, port: int = 5432) -> AsyncGenerator[tuple[str, str]]:
    """A database on `host`; yields its address there and for other hosts.

    The embedded Postgres listens on a Unix socket alone; what other hosts reach is a relay to it.
    """

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        theirs, ours = await asyncio.open_unix_connection(f"{socket_folder}/.s.PGSQL.5432")
        await asyncio.gather(copy(reader, ours), copy(theirs, writer))

    async with EmbeddedPostgres(folder / "postgres", folder / "postgres.log") as postgres:
        socket_folder = postgres.url.partition("host=")[2]
        async with await asyncio.start_server(relay, sock=await asyncio.to_thread(listen, host, port)):
            yield postgres.url, postgres.url.replace("@/", f"@{host.address}:{port}/").partition("?")[0]


async def keep_running(program: OwnedProcess) -> None:
    """Start a program again whenever it fails."""
    while True:
        async with program:
            status = await program.wait()
        if status == 0:
            return
        print(f"  {program.name} ended with status {status} and is started again", flush=True)


async def cut(host: Host, seconds: float) -> None:
    """Pull the cable out of a host, and plug it in again."""
    _ip("-n", host.name, "link", "set", _CABLE, "down")
    await asyncio.sleep(seconds)
    _ip("-n", host.name, "link", "set", _CABLE, "up")


async def kill_rank(node: OwnedProcess, rank: int) -> None:
    """Kill one trainer process of a node."""

    def ranks() -> list[psutil.Process]:
        found = processes_of(node.command_pid(), "cua_rl.training.worker")
        return [process for process in found if process.environ().get("RANK") == str(rank)]

    await wait_until(ranks, f"for rank {rank}")
    ranks()[0].kill()


async def kill_in(program: OwnedProcess, word: str) -> None:
    """Kill the first process of a program with this word on its command line, once there is one."""
    await wait_until(lambda: processes_of(program.command_pid(), word), f"for {word!r} of {program.name}")
    processes_of(program.command_pid(), word)[0].kill()


def other_weights(weights: bytes) -> bytes:
    """A model of the same shape: in the file's header, the first two layers have changed places."""
    end = 8 + int.from_bytes(weights[:8], "little")
    first, second, none = b"layers.0.", b"layers.1.", b"layers.-."
    header = weights[:end].replace(first, none).replace(second, first).replace(none, second)
    return header + weights[end:]


async def return_with(weights: bytes, b: Host, server: OwnedProcess, run: OwnedProcess, said: str) -> None:
    """Let the model server of a host come back with these weights, and wait until the run says what it thinks of it."""
    await wait_until(lambda: bool(processes_of(server.command_pid(), "vllm")), "for the model server")
    num_before = _log(run).count(said)
    partial = b.folder / "weights"
    await asyncio.to_thread(partial.write_bytes, weights)
    partial.replace(b.folder / "model" / "model.safetensors")
    await kill_in(server, "vllm")
    await wait_until(lambda: _log(run).count(said) > num_before, f"for {said!r}")


async def return_with_others(b: Host, server: OwnedProcess, run: OwnedProcess) -> None:
    """Let the model server of a host come back with another model, and then with its own."""
    own = await asyncio.to_thread((TINY_QWEN3_VL / "model.safetensors").read_bytes)
    refused = "expected the server's base model to give the trainer's log-probabilities"
    await return_with(other_weights(own), b, server, run, refused)
    await return_with(own, b, server, run, " is back, in_service=2")


def run_options(config: ChaosHostsConfig, a: Host, b: Host) -> list[str]:
    """Options of the training recipe on host a."""
    off_policy = ("loss=ppo", "clip_low=0.5", "clip_high=1", f"max_steps_off_policy={config.max_lag}")
    return [
        *("log_path=run", f"base_url=http://{a.address}:8000,http://{b.address}:8000"),
        *("trainer.num_nodes=1", "trainer.num_processes=2", "rollout_workers=2"),
        *(f"group_size={config.group_size}", f"groups_per_batch={config.groups_per_batch}"),
        *("eval_every=0", f"num_eval_rollouts={NUM_EVAL_ROLLOUTS}", "monitor=false"),
        *(off_policy if config.max_lag else ()),
        *config.options.split(),
    ]


async def disturb(config: ChaosHostsConfig, b: Host, programs: Mapping[str, OwnedProcess], run_folder: Path) -> None:
    """Let everything happen, one thing after the other, and see the run go on each time."""
    server, node = programs["server"], programs["node"]
    disturbances: Mapping[str, Callable[[], Awaitable[None]]] = {
        "cable": lambda: cut(b, config.cut_s),
        "worker": lambda: kill_in(node, "RolloutWorker"),
        "server": lambda: kill_in(server, "vllm"),
        "rank": lambda: kill_rank(node, 1),
        "node": lambda: kill_in(node, "raylet/raylet"),
        "weights": lambda: return_with_others(b, server, programs["run"]),
    }
    rng, step = random.Random(config.seed), 2
    for what in config.what.split(","):
        await wait_until(lambda step=step: len(read_steps(run_folder)) >= step, f"for step {step}")
        await asyncio.sleep(rng.uniform(0.0, 2.0))
        before, began = len(read_steps(run_folder)), time.monotonic()
        await disturbances[what]()
        step = len(read_steps(run_folder)) + 2  # the first may have been over but for its line
        await wait_until(lambda step=step: len(read_steps(run_folder)) >= step, f"for step {step}")
        print(f"  {what} at step {before}, +2 steps after {time.monotonic() - began:.1f} s", flush=True)


async def train_and_disturb(config: ChaosHostsConfig, a: Host, b: Host, database_url: str) -> tuple[int, int]:
    """The run and what happens to it; returns its exit status, and the steps that it must have."""
    secret = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        API_KEY_VARIABLE: secrets.token_urlsafe(32),
    }
    served = ("cua_rl.recipes.serve_model", "lora_rank=16", "max_model_len=2048", "port=8000")
    server = a.program("server", *served, f"host={a.address}", environment=secret)
    cluster = f"{a.address}:6379"
    told = {"DATABASE_URL": database_url, "RAY_ADDRESS": cluster} | secret
    train = ("cua_rl.recipes.train", *run_options(config, a, b))
    run = a.program("train", *train, f"max_steps={config.steps}", environment=told)
    # room for a rollout worker on each host, and for the trainer on host b
    ray = ("ray.scripts.scripts", "start", "--block", "--object-store-memory=200000000")
    first = (*ray, "--head", "--port=6379", "--include-dashboard=false", "--num-cpus=1")
    head = a.program("node", *first, f"--node-ip-address={a.address}", environment=secret | PATIENT)
    other = (*ray, f"--address={cluster}", "--num-cpus=3", f"--node-ip-address={b.address}")
    programs = {
        "server": b.program("server", *served, f"host={b.address}", "model_name=model", environment=secret),
        "node": b.program("node", *other, environment=secret),
        "run": run,
    }
    await asyncio.to_thread(shutil.copytree, TINY_QWEN3_VL, b.folder / "model")
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(head)
        await wait_until(lambda: "Ray runtime started" in _log(head), "for the head of the cluster")
        kept = [asyncio.create_task(keep_running(one)) for one in (server, programs["server"], programs["node"])]
        stack.push_async_callback(_end, kept)
        servers = (server, programs["server"])
        await wait_until(lambda: all("model server:" in _log(one) for one in servers), "for the model servers")
        await wait_until(lambda: "Ray runtime started" in _log(programs["node"]), "for the second node")
        await stack.enter_async_context(run)
        disturbing = asyncio.create_task(disturb(config, b, programs, a.folder / "run"))
        stack.push_async_callback(_end, [disturbing])
        ended = asyncio.create_task(run.wait())
        await asyncio.wait((disturbing, ended), return_when=asyncio.FIRST_COMPLETED)
        if not disturbing.done():
            raise SystemExit(f"the run ended with status {await ended} before all had happened; see {run.log_path}")
        await disturbing
        os.kill(run.command_pid(), signal.SIGTERM)
        if await ended != 128 + signal.SIGTERM:
            raise SystemExit(f"expected the run to end with status 143, got {await ended}; see {run.log_path}")
        num_steps = len(read_steps(a.folder / "run")) + 2
        go_on = ("behavior_if_log_dir_exists=resume", f"max_steps={num_steps}")
        async with a.program("resumed", *train, *go_on, environment=told) as resumed:
            return await resumed.wait(), num_steps


def _log(program: OwnedProcess) -> str:
    return program.log_path.read_text() if program.log_path.exists() else ""


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def cli_main(config: ChaosHostsConfig) -> None:
    """Train, disturb, judge; ends with status 1 if anything is wrong."""
    with connected_hosts(config.folder.absolute()) as (a, b):
        run_folder = a.folder / "run"
        async with open_database(config.folder, a) as urls:
            status, num_steps = await train_and_disturb(config, a, b, urls[1])
            expected = ExpectedRun(
                run_folder=run_folder,
                num_steps=num_steps,
                group_size=config.group_size,
                groups_per_batch=config.groups_per_batch,
                max_lag=config.max_lag,
            )
            faults = await find_faults(urls[0], expected)
    steps, summary = read_steps(run_folder), read_summary(run_folder)
    before, after = (summary.get(f"{name}_success_rate") or 0.0 for name in ("baseline", "final"))
    error = (0.5 / NUM_EVAL_ROLLOUTS) ** 0.5  # of the difference between two rates near one half
    if after - before <= 2 * error:
        faults.append(f"expected success to rise by more than {2 * error:.2f}, got {before:.3f} and then {after:.3f}")
    result = {
        "steps": len(steps),
        "exit_status": status,
        "success": [before, after],
        "workers_lost": sum(step["device/num_workers_lost"] for step in steps),
        "trainer_restarts": steps[-1]["trainer/restarts"],
        "fewest_model_servers": min(step["rollout/num_model_servers"] for step in steps),
        "faults": faults,
    }
    print(json.dumps(result))
    if faults or status:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(run_recipe(ChaosHostsConfig, cli_main))
