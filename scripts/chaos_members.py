"""Let the members of a fleet of rollout workers leave and die at random, and count what became of every rollout.

    python -m scripts.chaos_members folder=/tmp/members members=64 minutes=10

The members are actors of a Ray cluster on this machine, which are started again as those of a run; their rollouts sleep
(`sleeping_member.py`). Every `every_s` seconds something happens to one of them, at random: SIGKILL, SIGTERM, SIGSTOP
for longer or shorter than the fleet waits, or its devices break for a minute. Meanwhile policies are announced.

What must hold at the end: each member of each group has one rollout that counts, or as many faults as there are
attempts; no rollout ran twice; each that counts has ended in the worker that it names, under a policy that was
announced; nothing stays pinned; and no process is left. Prints a JSON line.
"""

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import chz
import psutil

from cua_rl.cluster import Cluster, open_cluster
from cua_rl.command_line.recipe import run_recipe
from cua_rl.events import NoRecorder, RolloutSource
from cua_rl.rollout.group import MAX_ATTEMPTS, GroupJob, run_group
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import AdapterRef, RolloutGroup, SamplingParams
from cua_rl.workers.fleet import Fleet
from cua_rl.workers.launch import keep_alive, run_worker
from scripts.chaos_record import processes_of, wait_until
from scripts.sleeping_member import open_place

GROUP_SIZE = 8
BROKEN_S, PUBLISH_EVERY_S = 60.0, 10.0
STOPPED_S = {"stopped for a moment": 5.0, "stopped": 60.0}
"""Less and more than the 15 s for which the fleet waits for a sign of life."""
TASK = Task(
    task_id="sleep", seed=1, instruction="Sleep.", category="system", difficulty="easy", max_turns=1, validate=None
)


@chz.chz
class ChaosMembersConfig:
    """The fleet, and what happens to it."""

    folder: Path = chz.field(doc="folder for logs; must not exist")
    members: int = chz.field(default=64, doc="rollout workers")
    slots: int = chz.field(default=4, doc="rollouts at a time in each")
    minutes: float = chz.field(default=10.0, doc="how long groups are started")
    mean_s: float = chz.field(default=20.0, doc="how long a rollout takes on average, seconds")
    every_s: float = chz.field(default=4.0, doc="time between two disturbances, seconds")
    seed: int = chz.field(default=0, doc="seed of what happens to whom")


@dataclass
class Policies:
    """The adapters of model servers that nobody needs."""

    current: AdapterRef | None = None
    uses: Counter[AdapterRef] = field(default_factory=Counter[AdapterRef])

    def pin(self, adapter: AdapterRef) -> None:
        self.uses[adapter] += 1

    def unpin(self, adapter: AdapterRef) -> None:
        self.uses[adapter] -= 1


async def publish(policies: Policies, fleet: Fleet) -> None:
    """Announce one policy after the other."""
    version = 0
    while True:
        policies.current = AdapterRef(path=Path(f"/adapters/{version}"), policy_version=version)
        fleet.announce()
        version += 1
        await asyncio.sleep(PUBLISH_EVERY_S)


async def disturb(config: ChaosMembersConfig, names: Sequence[str], causes: Counter[str]) -> None:
    """Do something to one member after the other."""
    rng = random.Random(config.seed)
    async with asyncio.TaskGroup() as healing:
        while True:
            await asyncio.sleep(config.every_s)
            cause = rng.choice(("killed", "left", "broken", *STOPPED_S))
            causes[cause] += 1
            if cause == "broken":
                healing.create_task(break_devices(config.folder / f"{rng.choice(names)}.broken"))
                continue
            members = await asyncio.to_thread(processes_of, os.getpid(), "ray::RolloutWorker")
            with suppress(IndexError, psutil.NoSuchProcess):
                member = rng.choice(members)
                if cause in STOPPED_S:
                    healing.create_task(stop_for(member, STOPPED_S[cause]))
                else:
                    member.send_signal(signal.SIGKILL if cause == "killed" else signal.SIGTERM)


async def break_devices(file: Path) -> None:
    """Let all rollouts of a member fail for a while."""
    await asyncio.to_thread(file.touch)
    await asyncio.sleep(BROKEN_S)
    await asyncio.to_thread(file.unlink, missing_ok=True)


async def stop_for(member: psutil.Process, seconds: float) -> None:
    """Stop a process, and let it go on."""
    with suppress(psutil.NoSuchProcess):
        member.suspend()
        await asyncio.sleep(seconds)
        member.resume()


async def run_groups(config: ChaosMembersConfig, fleet: Fleet) -> list[RolloutGroup]:
    """Run groups, a quarter more than the members have room for, until the time is up and all have ended."""
    groups: list[RolloutGroup] = []
    job = GroupJob(
        source=RolloutSource(phase="step", step=1),
        group_size=GROUP_SIZE,
        params=SamplingParams(max_tokens=1, temperature=1.0),
    )
    deadline = time.monotonic() + 60 * config.minutes

    async def one_after_the_other() -> None:
        while time.monotonic() < deadline:
            groups.append(await run_group(fleet, TASK, len(groups), job))

    async with asyncio.TaskGroup() as running:
        for _ in range(config.members * config.slots * 5 // (4 * GROUP_SIZE)):
            running.create_task(one_after_the_other())
    return groups


async def run_fleet(
    config: ChaosMembersConfig, cluster: Cluster, policies: Policies, causes: Counter[str]
) -> tuple[list[RolloutGroup], dict[str, float]]:
    """The groups that ran while all this happened, and figures of the fleet."""
    names = [f"worker-{number}" for number in range(1, config.members + 1)]
    fleet = Fleet(policies, NoRecorder(), names)
    tasks = [asyncio.create_task(publish(policies, fleet))]
    for name in names:
        place = partial(open_place, name, config.folder, config.mean_s)
        attempt = partial(run_worker, cluster, fleet, place, name, config.slots)
        tasks.append(asyncio.create_task(keep_alive(fleet, name, attempt), name=name))
    try:
        began = time.monotonic()
        await wait_until(lambda: len(fleet.workers) == config.members, "for all members")
        figures = {"all_joined_after_s": time.monotonic() - began}
        figures["gib"] = await asyncio.to_thread(proportional_gib)
        fleet.take_metrics()
        tasks.append(asyncio.create_task(disturb(config, names, causes)))
        groups = await run_groups(config, fleet)
        return groups, figures | {"times_lost": fleet.take_metrics()["device/num_workers_lost"]}
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def proportional_gib() -> float:
    """Main memory of this process and all that it started; what they share counts once."""
    total = 0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            total += process.memory_full_info().pss
    return total / 2**30


def find_faults(groups: Sequence[RolloutGroup], lines: Sequence[str], last_version: int) -> list[str]:
    """Everything that is wrong with what was counted."""
    faults: list[str] = []
    notes = [line.split() for line in lines]
    began = Counter(rollout_id for what, rollout_id, *_ in notes if what == "began")
    ended = {(rollout_id, name) for what, rollout_id, name, *_ in notes if what == "ended"}
    faults += [f"rollout {rollout_id} ran {times} times" for rollout_id, times in began.items() if times > 1]
    faults += [f"unknown policy: {note}" for note in notes if not 0 <= int(note[4]) <= last_version]
    everything = [one for group in groups for one in (*group.rollouts, *group.faulty)]
    if len({one.rollout_id for one in everything}) < len(everything):
        faults.append("a rollout has ended twice")
    if lost := set(began) - {one.rollout_id for one in everything}:
        faults.append(f"{len(lost)} rollouts began and never ended: {sorted(lost)[:3]}")
    for group in groups:
        attempts = Counter(one.member_index for one in (*group.rollouts, *group.faulty))
        scored = Counter(one.member_index for one in group.rollouts)
        for member in range(GROUP_SIZE):
            if not (scored[member] == 1 or (scored[member] == 0 and attempts[member] == MAX_ATTEMPTS)):
                faults.append(
                    f"member {member} of group {group.index}: {attempts[member]} attempts, {scored[member]} count"
                )
        for one in group.rollouts:
            if (one.rollout_id, one.worker) not in ended:
                faults.append(f"rollout {one.rollout_id} counts, but has not ended in {one.worker}")
    return faults


async def cli_main(config: ChaosMembersConfig) -> None:
    """Run, disturb, count; ends with status 1 if anything is wrong."""
    await asyncio.to_thread(config.folder.mkdir, parents=True)
    policies, causes, load = Policies(), Counter[str](), os.getloadavg()[0]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    async with open_cluster(config.folder, num_cpus=config.members, environ=environ) as cluster:
        groups, figures = await run_fleet(config, cluster, policies, causes)
    lines = await asyncio.to_thread((config.folder / "members.txt").read_text)
    assert policies.current is not None
    faults = find_faults(groups, lines.splitlines(), policies.current.policy_version)
    faults += [f"{adapter.name} is still pinned" for adapter in +policies.uses]
    faults += [f"left running: {process}" for process in psutil.Process().children(recursive=True)]
    result: dict[str, Any] = {
        "groups": len(groups),
        "rollouts_that_count": sum(len(group.rollouts) for group in groups),
        "faults_of_devices": sum(len(group.faulty) for group in groups),
        "happened": dict(causes),
        **{name: round(value, 1) for name, value in figures.items()},
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "faults": faults,
    }
    print(json.dumps(result))
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    sys.exit(run_recipe(ChaosMembersConfig, cli_main))
