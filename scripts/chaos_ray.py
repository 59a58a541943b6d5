"""Disturb a run on a Ray cluster in the middle of a step, and check the record that is left.

    python -m scripts.chaos_ray folder=/tmp/chaos-ray               # needs cua_rl[ray]
    python -m scripts.chaos_ray folder=/tmp/full-disk fault=disk    # as root

Starts a cluster of two nodes on this machine and a synchronous run with two rollout workers, one per node.
When most devices are in use after the first step, this happens:

    node:     the raylet of the second node gets SIGKILL, which ends the node and its actors
    zombie:   all of the second node is stopped, for longer than a worker may be silent, and then goes on
    devices:  the phones of the second node fail (`brittle_phones.py`)
    disk:     nothing fits on the disk of the run's folder any more. The run must end with status 1 and say so; then
              there is room again, and it is resumed

At the end, what `chaos_kill` demands must hold, and every lost rollout must have run again exactly once; a full disk
may cost one step. Prints a JSON line; its seconds count from the fault: until the last lost rollout had ended, and
until the first turn of a rollout that runs again, of the first and of the last one; or until the run had ended.
"""

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, LiteralString

import chz
import psutil
import psycopg
from psycopg.rows import namedtuple_row

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.run_folder.log_directory import newest_checkpoint
from scripts import brittle_phones
from scripts.chaos_record import ExpectedRun, find_faults, processes_of, read_steps, wait_until

_STARTED = "Ray runtime started"
_ACTING = """
    SELECT count(*) FROM rollouts r JOIN groups g ON g.id = r.group_pk JOIN steps s ON s.id = g.step_id
    WHERE s.step >= 2 AND r.status = 'running'
"""
_ATTEMPTS = """
    SELECT r.group_pk, r.member_index, r.worker, r.error, extract(epoch FROM r.ended_at)::float AS ended_at,
           (SELECT min(t.started_unix_s + t.duration_s) FROM turns t WHERE t.rollout_pk = r.id) AS first_turn_at
    FROM rollouts r JOIN groups g ON g.id = r.group_pk WHERE g.step_id IS NOT NULL
    ORDER BY r.group_pk, r.member_index, r.started_at, r.status = 'completed'
"""


@chz.chz
class ChaosRayConfig:
    """The run, and what happens to it."""

    folder: Path = chz.field(doc="folder for the run, its database and the logs of the nodes")
    fault: Literal["node", "zombie", "devices", "disk"] = chz.field(default="node", doc="what happens, as said above")
    steps: int = chz.field(default=3, doc="training steps of the run")
    group_size: int = chz.field(default=8, doc="rollouts per group")
    groups_per_batch: int = chz.field(default=32, doc="groups per step")
    slots: int = chz.field(default=16, doc="rollouts at a time on each node")
    stopped_s: float = chz.field(default=40.0, doc="how long a zombie is stopped, seconds")
    options: str = chz.field(default="", doc="more options of the training recipe, separated by blanks")


@asynccontextmanager
async def open_cluster(
    folder: Path, environment: Mapping[str, str], *others: Mapping[str, str]
) -> AsyncGenerator[tuple[str, list[OwnedProcess]]]:
    """Nodes on this machine, with a processor each: the head, and one for each of `others`, its own variables.

    Yields their address, and the nodes that are not the head.
    """
    address = f"127.0.0.1:{free_port()}"

    def node(name: str, *options: str, own: Mapping[str, str] = MappingProxyType({})) -> OwnedProcess:
        program = Path(sys.executable).with_name("ray")
        sizes = ("--num-cpus=1", "--object-store-memory=100000000", "--block")
        command = [str(program), "start", *options, *sizes]
        return OwnedProcess(command, name=name, log_path=folder / f"{name}.log", environment={**environment, **own})

    head = node("head", "--head", f"--port={address.rpartition(':')[2]}", "--include-dashboard=false")
    nodes = [node(f"node-{number}", f"--address={address}", own=own) for number, own in enumerate(others, start=2)]
    async with AsyncExitStack() as stack:
        for one in (head, *nodes):
            await stack.enter_async_context(one)
            await wait_until(lambda one=one: not one.is_running or _STARTED in one.log_tail(), f"for {one.name}")
            if not one.is_running:  # Ray gives a node 30 s, which is too little on a very busy machine
                raise SystemExit(f"expected the {one.name} of a cluster, got its end; read {one.log_path}")
        yield address, nodes


@contextmanager
def small_disk(folder: Path) -> Generator[None]:
    """A disk of 200 MB, in main memory."""
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"expected to be permitted {' '.join(mount)!r}, got {done.stderr.strip()!r}; run as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


def train(config: ChaosRayConfig, run_folder: Path, environment: Mapping[str, str]) -> OwnedProcess:
    """A run with a worker on each node, from its newest checkpoint on."""
    options = [
        *(f"log_path={run_folder}", "behavior_if_log_dir_exists=resume", "rollout_workers=2"),
        *(f"max_steps={config.steps}", f"group_size={config.group_size}"),
        *(f"groups_per_batch={config.groups_per_batch}", f"max_concurrent_rollouts={2 * config.slots}"),
        *("skip_baseline=true", "eval_every=0", "num_eval_rollouts=4", "monitor=false"),
        *(brittle_phones.OPTIONS if config.fault == "devices" else ()),
        *config.options.split(),
    ]
    return OwnedProcess(
        [sys.executable, "-m", "cua_rl.recipes.train", *options],
        name="train",
        log_path=config.folder / "train.log",
        environment=environment,
    )


async def strike(config: ChaosRayConfig, node: OwnedProcess, run_folder: Path) -> None:
    """Let it happen."""
    match config.fault:
        case "node":
            next(one for one in processes_of(node.command_pid(), "raylet") if one.name() == "raylet").kill()
        case "zombie":
            stopped = psutil.Process(node.command_pid()).children(recursive=True)
            for process in stopped:
                process.suspend()
            await asyncio.sleep(config.stopped_s)
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()
        case "devices":
            (config.folder / "broken").touch()
        case "disk":
            with ballast(run_folder).open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(2**16))


def ballast(run_folder: Path) -> Path:
    """What fills the disk of the run's folder."""
    return run_folder.with_name("ballast")


def judge_full_disk(run: OwnedProcess, run_folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What a run has lost that ended with a full disk, and what is wrong with its end."""
    checkpoint = newest_checkpoint(run_folder)
    lost = len(read_steps(run_folder)) - (0 if checkpoint is None else checkpoint.step)
    faults = [f"a full disk cost {lost} steps"] if lost > 1 else []
    said = f"disk full: expected room in '{run_folder}"
    if run.exit_status != 1 or said not in run.log_path.read_text():
        faults.append(f"expected status 1 and {said!r}, got {run.exit_status} and {run.log_tail()}")
    return {"steps_lost": lost}, faults


def query(url: str, statement: LiteralString) -> list[Any]:
    """The rows of a statement."""
    with psycopg.connect(url, autocommit=True, row_factory=namedtuple_row) as connection:
        return connection.execute(statement).fetchall()


def measure(rows: list[Any], began_at: float) -> tuple[dict[str, Any], list[str]]:
    """The figures, and the rollouts that did not run again exactly once."""
    attempts: dict[tuple[int, int], list[Any]] = {}
    for row in rows:
        attempts.setdefault((row.group_pk, row.member_index), []).append(row)
    repeated = {place: tried for place, tried in attempts.items() if tried[0].error is not None}
    faults = [f"{place} has {len(tried)} attempts: {tried}" for place, tried in repeated.items() if len(tried) != 2]
    if not repeated:
        return {}, ["no rollout was lost"]
    workers = {tried[0].worker for tried in repeated.values()}
    if len(workers) > 1:
        faults.append(f"expected one worker to lose rollouts, got {workers}")
    again = sorted(tried[-1].first_turn_at - began_at for tried in repeated.values())
    figures = {
        "rollouts_lost": len(repeated),
        "last_lost_after_s": round(max(tried[0].ended_at for tried in repeated.values()) - began_at, 1),
        "first_turn_again_after_s": round(again[0], 1),
        "last_first_turn_again_after_s": round(again[-1], 1),
    }
    return figures, faults


async def cli_main(config: ChaosRayConfig) -> None:
    """Train, disturb, judge; ends with status 1 if anything is wrong."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {**os.environ, **token, "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = brittle_phones.install(config.folder / "packages", environment)
    run_folder = config.folder / config.fault / "run"
    async with AsyncExitStack() as stack:
        if config.fault == "disk":
            stack.enter_context(small_disk(run_folder.parent))
        database = EmbeddedPostgres(config.folder / "postgres", config.folder / "postgres.log")
        url = (await stack.enter_async_context(database)).url
        own = {brittle_phones.VARIABLE: str(config.folder / "broken")}
        address, (node,) = await stack.enter_async_context(open_cluster(config.folder, environment, own))
        environment |= {"RAY_ADDRESS": address, "DATABASE_URL": url}
        run = await stack.enter_async_context(train(config, run_folder, environment))
        await wait_until(lambda: not run.is_running or len(read_steps(run_folder)) >= 1, "for step 1")
        enough = 2 * config.slots * 3 // 4
        await wait_until(lambda: not run.is_running or query(url, _ACTING)[0].count >= enough, "for rollouts")
        if not run.is_running:
            raise SystemExit(f"the run ended before anything had happened; see {run.log_path}")
        began_at, load = time.time(), os.getloadavg()[0]
        await strike(config, node, run_folder)
        status = await run.wait()
        if config.fault == "disk":
            figures, faults = judge_full_disk(run, run_folder)
            figures["run_ended_after_s"] = round(time.time() - began_at, 1)
            ballast(run_folder).unlink()
            async with train(config, run_folder, environment) as resumed:
                status = await resumed.wait()
        else:
            figures, faults = measure(await asyncio.to_thread(query, url, _ATTEMPTS), began_at)
        expected = ExpectedRun(
            run_folder=run_folder,
            num_steps=config.steps,
            group_size=config.group_size,
            groups_per_batch=config.groups_per_batch,
            max_lag=0,
        )
        faults += await find_faults(url, expected)
    print(json.dumps({"fault": config.fault, **figures, "exit_status": status, "load": load, "faults": faults}))
    if faults or status:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(run_recipe(ChaosRayConfig, cli_main))
