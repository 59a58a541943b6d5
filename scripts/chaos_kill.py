"""Kill a training run at random points, resume it each time, and check the record that is left.

    python -m scripts.chaos_kill folder=/tmp/chaos kills=20 steps=30 base_url=http://127.0.0.1:8000

Kills are SIGKILL; with `preemptions=0.5`, half of them are SIGTERM, after which the run must end by itself, as a
scheduler expects it, with status 143. With `stages=true` all are SIGTERM, in the rollouts of a step, in its training,
while it is saved, and in an evaluation, one after the other.

Without `base_url` the script starts one vLLM server that outlives all attempts, so that a restart costs seconds. The
database is an embedded Postgres of the script's own, for the same reason. `max_lag=0` kills a synchronous run. With
`workers=2` and `replicas=2`, most attempts also lose a rollout worker and a model server, one after the other, and take
a step without them before the run itself is killed.

What must hold at the end: the run is complete; every task instance was trained exactly once; every group that was on
record as ended and untrained when the run was killed has been trained; no attempt loses more than one step, although no
checkpoint is due before the end; no place in a group has two rollouts; no turn was too old; nothing is left running;
every evaluation that was due is there, with each of its rollouts once; and every step's training data can be rebuilt
from the database, bit for bit. With `compare=true`, final success must also be within three standard errors of a run
that nobody killed; for a synchronous run, whose sampling is seeded, the line says in how many steps the rewards are
equal and how far the gradient norms are apart (all, and by rounding, as far as vLLM's kernels do not depend on the
batch).
"""

import asyncio
import json
import math
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import chz
import psutil
from sqlalchemy import text

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.progress import load_progress
from cua_rl.database.queries import find_training
from cua_rl.database.session import open_sessions
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.reporting.pace import evaluations_due
from cua_rl.run_folder.log_directory import newest_checkpoint, prepare_log_directory
from cua_rl.sampling.address import API_KEY_VARIABLE
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from scripts.chaos_record import ExpectedRun, find_faults, processes_of, read_steps, read_summary
from scripts.run_stages import STAGES, Stage, WatchedRun

GRACE_S = 60.0  # what schedulers give: Kubernetes 30 s unless told otherwise, deploy/ 120 and 300 s
SHARE_IN_SET_UP = 0.2  # of the kills hit an attempt that has not trained anything yet
POLL_S = 0.1


@chz.chz
class ChaosConfig:
    """What is killed, how often."""

    folder: Path = chz.field(doc="folder for the run, its database and the server's log")
    kills: int = chz.field(default=20, doc="kills before the run may end by itself")
    preemptions: float = chz.field(default=0.0, doc="share of the kills that are SIGTERM")
    stages: bool = chz.field(default=False, doc="SIGTERM in each stage in turn, with an evaluation every two steps")
    steps: int = chz.field(default=30, doc="training steps of the run")
    group_size: int = chz.field(default=4, doc="rollouts per group")
    groups_per_batch: int = chz.field(default=4, doc="groups per step")
    num_eval_rollouts: int = chz.field(default=64, doc="rollouts of each evaluation")
    max_lag: int = chz.field(default=2, doc="max_steps_off_policy of the run, 0 for synchronous training")
    base_url: str | None = chz.field(default=None, doc="a vLLM server that runs already; None starts one")
    replicas: int = chz.field(default=1, doc="vLLM servers to start; one of several is killed in each attempt")
    workers: int = chz.field(default=0, doc="rollout workers of the run; one is killed in each attempt")
    seed: int = chz.field(default=0, doc="seed of the moments of death")
    timeout_s: float = chz.field(default=600.0, doc="longest wait for one step of one attempt, seconds")
    compare: bool = chz.field(default=False, doc="also train the same run without a kill, and compare the two")
    options: str = chz.field(default="", doc="more options of the training recipe, separated by blanks")


@dataclass
class Chaos:
    """One run, its attempts and what each left behind."""

    config: ChaosConfig
    server_url: str
    database_url: str
    servers: Sequence[VllmServer] = ()
    kept_ids: set[str] = field(default_factory=set[str])
    faults: list[str] = field(default_factory=list[str])
    """What was wrong with an attempt."""
    attempt: asyncio.subprocess.Process | None = None
    """The last one."""

    @property
    def run_folder(self) -> Path:
        return self.config.folder / "run"

    @property
    def eval_every(self) -> int:
        return 2 if self.config.stages else 0

    def command(self, folder: Path) -> list[str]:
        """The training recipe, small enough that a step takes about a second."""
        config = self.config
        loss = ["loss=ppo", f"max_steps_off_policy={config.max_lag}"] if config.max_lag else ["sampling_seed=1"]
        return [
            *(sys.executable, "-m", "cua_rl.recipes.train", f"log_path={folder}"),
            *(
                f"base_url={self.server_url}",
                f"group_size={config.group_size}",
                f"groups_per_batch={config.groups_per_batch}",
            ),
            *(f"max_steps={config.steps}", "save_every=0"),
            *(f"eval_every={self.eval_every}", f"num_eval_rollouts={config.num_eval_rollouts}"),
            *("behavior_if_log_dir_exists=resume", f"rollout_workers={config.workers}"),
            *(*loss, *config.options.split()),
        ]

    async def start(self, folder: Path | None = None) -> asyncio.subprocess.Process:
        """Begin an attempt; a run starts with all of its model servers."""
        for server in self.servers:
            await server.wait_until_ready()
        environment = dict(os.environ) | {"DATABASE_URL": self.database_url, "HF_HUB_OFFLINE": "1"}
        with (self.config.folder / "output.txt").open("ab") as output:
            self.attempt = await asyncio.create_subprocess_exec(
                *self.command(folder or self.run_folder),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return self.attempt

    def leave(self) -> None:
        """End an attempt that still runs."""
        if self.attempt is not None and self.attempt.returncode is None:
            self.attempt.kill()

    def num_steps(self) -> int:
        """Completed steps by the metrics file."""
        return len(read_steps(self.run_folder))

    async def wait_for_steps(self, process: asyncio.subprocess.Process, num_steps: int) -> None:
        """Wait until so many steps are complete, or the attempt has ended."""
        deadline = time.monotonic() + self.config.timeout_s
        while self.num_steps() < num_steps and process.returncode is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"waited {self.config.timeout_s:.0f} s for step {num_steps}; see {self.config.folder}")
            await asyncio.sleep(POLL_S)

    async def kill_at_random(self, rng: random.Random, number: int) -> bool:
        """One attempt and its end; False if the run was complete before it could be killed."""
        process, before, began = await self.start(), self.num_steps(), time.monotonic()
        if rng.random() < SHARE_IN_SET_UP:
            await asyncio.sleep(rng.uniform(0.5, 12.0))
        else:
            await self.wait_for_steps(process, before + rng.randint(1, 2))
            await self.kill_parts(process, rng)
            await asyncio.sleep(rng.uniform(0.0, 3.0))
        sent = signal.SIGTERM if rng.random() < self.config.preemptions else signal.SIGKILL
        return await self.end(process, sent, number, began)

    async def end_in(self, stage: Stage, rng: random.Random, number: int) -> bool:
        """One attempt and its end by SIGTERM in this stage; False if the run was complete before."""
        process, began = await self.start(), time.monotonic()
        run = WatchedRun(self.run_folder, process.pid, self.eval_every)
        await self.wait_for_steps(process, self.num_steps() + 1)
        while process.returncode is None:
            if await asyncio.to_thread(run.is_in, stage):
                if stage in ("rollouts", "evaluation"):  # they last
                    await asyncio.sleep(rng.uniform(0.0, 1.0))
                    if not await asyncio.to_thread(run.is_in, stage):
                        continue
                break
            await asyncio.sleep(0.005)
        print(f"SIGTERM in {stage}", end=", ", flush=True)
        return await self.end(process, signal.SIGTERM, number, began)

    async def end(self, process: asyncio.subprocess.Process, sent: signal.Signals, number: int, began: float) -> bool:
        """End an attempt that began then, and note what that cost; False if it has ended before."""
        if process.returncode is not None:
            return False
        lived_s, sent_at, sent_unix_s = time.monotonic() - began, time.monotonic(), time.time()
        process.send_signal(sent)
        try:
            async with asyncio.timeout(GRACE_S):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            status = await process.wait()
        took_s = time.monotonic() - sent_at
        # -SIGTERM: while Python imports what would handle it; a shell calls that 143, too
        if status not in (-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGTERM, 0) or took_s > GRACE_S:
            self.faults.append(f"kill {number}: status {status} {took_s:.0f} s after {sent.name}")
        lost, kept = await self.note_kept()
        if lost > 1:
            self.faults.append(f"kill {number}: {sent.name} lost {lost} steps")
        print(
            f"kill {number}: {sent.name} after {lived_s:.1f} s, gone after {took_s:.1f} s, {self.num_steps()} steps, "
            f"{lost} of them lost, {kept} ended groups wait, {await self.count_cut(sent_unix_s)} were cut short",
            flush=True,
        )
        return True

    async def kill_parts(self, process: asyncio.subprocess.Process, rng: random.Random) -> None:
        """Kill a rollout worker and then a model server, of those that come back, and see the run go on each time."""
        parts = [("rollout worker", process.pid, "ray::RolloutWorker")] if self.config.workers else []
        if self.config.replicas > 1:
            parts.append(("model server", os.getpid(), rng.choice(self.server_url.split(",")).removeprefix("unix:")))
        for name, owner, word in parts:
            found = await asyncio.to_thread(processes_of, owner, word)
            if not found or process.returncode is not None:
                continue
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            killed, num_steps, began = rng.choice(found), self.num_steps(), time.monotonic()
            with suppress(psutil.NoSuchProcess):
                killed.kill()
            await self.wait_for_steps(process, num_steps + 2)  # the first may have been over but for its line
            print(
                f"  a {name} was killed at step {num_steps}, +2 steps after {time.monotonic() - began:.1f} s",
                flush=True,
            )

    async def note_kept(self) -> tuple[int, int]:
        """Remember the groups that the next attempt must not lose; returns how many steps it does, and how many groups
        it keeps."""
        if not self.run_folder.exists():
            return 0, 0
        await asyncio.sleep(1.0)  # the folder's lock goes with the last owned process
        with prepare_log_directory(self.run_folder, "resume") as folder:
            checkpoint = newest_checkpoint(folder.path)
        num_done = 0 if checkpoint is None else checkpoint.step
        lost = self.num_steps() - num_done
        if not num_done or not self.config.max_lag:
            return lost, 0
        async with open_sessions(self.database_url) as sessions, sessions() as session:
            training = await find_training(session, self.run_folder.name)
            if training is None:
                return lost, 0
            progress = await load_progress(session, training.id, num_done)
        ids = {group.group_id for group, _ in progress.untrained}
        self.kept_ids |= ids
        return lost, len(ids)

    async def count_cut(self, sent_unix_s: float) -> str:
        """Rollouts that ended with the run, of steps and evaluations."""
        query = text(
            """SELECT count(g.step_id) AS of_steps, count(g.eval_id) AS of_evaluations
               FROM rollouts r JOIN groups g ON g.id = r.group_pk
               WHERE r.status = 'cancelled' AND r.ended_at > to_timestamp(:at)"""
        )
        async with open_sessions(self.database_url) as sessions, sessions() as session:
            if await session.scalar(text("SELECT to_regclass('rollouts')")) is None:  # killed before it had tables
                return "0 rollouts of steps and 0 of evaluations"
            row = (await session.execute(query, {"at": sent_unix_s})).one()
        return f"{row.of_steps} rollouts of steps and {row.of_evaluations} of evaluations"

    async def compare(self) -> dict[str, Any]:
        """Train the same run without kills, and compare the two."""
        folder = self.config.folder / "reference"
        await (await self.start(folder)).wait()
        pairs = list(zip(_rewards(self.run_folder), _rewards(folder), strict=False))
        equal = {
            "steps_with_equal_rewards": sum(one[0] == other[0] for one, other in pairs),
            "largest_gradient_gap_frac": max(abs(one[1] - other[1]) / max(1e-9, other[1]) for one, other in pairs),
        }
        return equal | _compare_success(self.run_folder, folder, self.config.num_eval_rollouts)

    async def verdict(self) -> list[str]:
        """Everything that is wrong with the record."""
        config = self.config
        expected = ExpectedRun(
            run_folder=self.run_folder,
            num_steps=config.steps,
            group_size=config.group_size,
            groups_per_batch=config.groups_per_batch,
            max_lag=config.max_lag,
            kept_ids=self.kept_ids,
            evaluated=[0, *evaluations_due(eval_every=self.eval_every, after=1, total_steps=config.steps)],
            num_eval_rollouts=config.num_eval_rollouts,
        )
        return [*self.faults, *await find_faults(self.database_url, expected)]


def _compare_success(one: Path, other: Path, num_rollouts: int) -> dict[str, Any]:
    """Whether two runs end with the same success, up to chance."""
    ends = [read_summary(folder).get("final_success_rate") for folder in (one, other)]
    rates = [rate for rate in ends if rate is not None]
    if len(rates) < 2:
        return {"is_as_successful": False}
    mean = sum(rates) / 2
    error = math.sqrt(2 * max(mean * (1 - mean), 0.01) / num_rollouts)
    return {"reference_success_rate": rates[1], "is_as_successful": abs(rates[0] - rates[1]) <= 3 * error}


async def _serve(stack: AsyncExitStack, config: ChaosConfig) -> list[VllmServer]:
    os.environ.setdefault(API_KEY_VARIABLE, secrets.token_urlsafe(32))  # of all servers, and for the runs
    served = ServerConfig(model_path=TINY_QWEN3_VL, max_lora_rank=16, max_model_len=2048)
    servers = [
        await stack.enter_async_context(
            VllmServer(served, config.folder / f"vllm-{number}.log", max_restarts=config.kills + 1, backoff_s=0.0)
        )
        for number in range(1, config.replicas + 1)
    ]
    return servers


async def cli_main(config: ChaosConfig) -> None:
    """Kill, resume, judge; ends with status 1 if anything is wrong."""
    await asyncio.to_thread(config.folder.mkdir, parents=True, exist_ok=True)
    rng = random.Random(config.seed)
    async with AsyncExitStack() as stack:
        servers = [] if config.base_url else await _serve(stack, config)
        url = config.base_url or ",".join(server.base_url for server in servers)
        postgres = EmbeddedPostgres(config.folder / "postgres", config.folder / "postgres.log")
        chaos = Chaos(config, url, (await stack.enter_async_context(postgres)).url, servers)
        stack.callback(chaos.leave)
        num_kills = 0
        while num_kills < config.kills:
            stage = STAGES[num_kills % len(STAGES)]
            kill = (
                chaos.end_in(stage, rng, num_kills + 1) if config.stages else chaos.kill_at_random(rng, num_kills + 1)
            )
            if not await kill:
                break
            num_kills += 1
        if config.stages and num_kills < config.kills:
            chaos.faults.append(f"the run was complete after {num_kills} of {config.kills} kills; raise steps")
        process = await chaos.start()
        await chaos.wait_for_steps(process, config.steps)
        status = await process.wait()
        faults = await chaos.verdict()
        comparison = await chaos.compare() if config.compare else {}
    result: dict[str, Any] = {
        "kills": num_kills,
        "steps": chaos.num_steps(),
        "exit_status": status,
        "ended_groups_kept": len(chaos.kept_ids),
        "final_success_rate": read_summary(chaos.run_folder).get("final_success_rate"),
        "faults": faults,
        **comparison,
    }
    print(json.dumps(result))
    if faults or status or not comparison.get("is_as_successful", True):
        raise SystemExit(1)


def _rewards(folder: Path) -> list[tuple[float, float]]:
    """Mean reward and gradient norm of every step."""
    return [(each["reward/mean"], each.get("optim/grad_norm", 0.0)) for each in read_steps(folder)]


if __name__ == "__main__":
    sys.exit(run_recipe(ChaosConfig, cli_main))
