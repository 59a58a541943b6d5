"""Harness rollouts of which a fifth die: groups are full, rewards unbiased, and nothing is left.

50 rollouts; `make test-harnesses` runs 500 (`CUA_RL_HARNESS_ROLLOUTS`).
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import sqrt
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessAgent, HarnessAssignment, HarnessCommand, HarnessProgram, RunEnd
from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.environments.pool import DevicePool
from cua_rl.events import RolloutSource
from cua_rl.host.scratch import MARK, scratch_folder
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import score_reward
from cua_rl.rollout.group import GroupJob, collect_groups, run_group
from cua_rl.rollout.run import RolloutRunner
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import RolloutGroup
from tests.agent.harness_bench import PARAMS, PROGRAM, PYTHON, Bench, open_bench
from tests.fakes import FakeRecorder

logger = logging.getLogger(__name__)

NUM_ROLLOUTS = int(os.environ.get("CUA_RL_HARNESS_ROLLOUTS", "50"))
GROUP_SIZE = 5
OUTCOMES = {"win": 0.3, "lose": 0.2, "again": 0.5}
"""What the policy says, and how often; "again" asks until it is refused, and fails."""
DEATHS = {
    "killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "ended by another signal": "os.kill(os.getpid(), signal.SIGSEGV)",
    "hangs": "time.sleep(600)",
    "garbage": "open(os.environ['CUA_RESULT_PATH'], 'wb').write(os.urandom(5000)); sys.exit(0)",
    "no number": "report(reward=float('nan')); sys.exit(0)",
    "nothing": "sys.exit(0)",
    "wants another try": "report(reward=1.0); sys.exit(75)",
    "crashes": "report(reward=1.0); raise RuntimeError",
    "a fault": "report(reward=0.0, fault={'kind': 'environment', 'message': 'lost'}); sys.exit(0)",
}
SCRIPT = f"""
import random, socket
dice = random.Random(sys.stdin.read())
server = socket.create_server(("127.0.0.1", 0))
if not os.fork():  # a daemon that listens, and outlives its parent; some do not end by themselves either
    os.setsid(); signal.signal(signal.SIGTERM, dice.choice([signal.SIG_IGN] + 9 * [signal.SIG_DFL])); time.sleep(600)
print("listens on", server.getsockname()[1], flush=True)
open(os.path.join(os.environ["CUA_WORK_DIR"], "profile"), "w").write("x" * 100000)
said = ask()
if dice.random() < 0.2:
    exec(dice.choice({list(DEATHS.values())!r}))
while said == "again":
    said = ask()
if isinstance(said, int):
    sys.exit("refused")  # what the policy brought about: a failure, though the program crashes
report(reward=float(said == "win"))
"""
"""Deaths depend on nothing that the policy does; crashes after a refusal depend on it."""


@dataclass(frozen=True, slots=True)
class Numbered:
    """Gives every attempt its number as payload, so that the same ones die in every run of this test."""

    program: HarnessProgram
    numbers: Iterator[int]

    async def work(self, assignment: HarnessAssignment, over: asyncio.Event) -> RunEnd:
        assignment.world.payload = {"number": next(self.numbers)}
        return await self.program.work(assignment, over)


@pytest.fixture
def tasks(tmp_path: Path) -> list[Task]:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"task_id": "game/{i}", "max_turns": 2}}\n' for i in range(NUM_ROLLOUTS // GROUP_SIZE)))
    source = {"source_type": "harness", "file_path": str(path)}
    return load_tasks(source, seed=0, split="train", device=HarnessWorlds.abilities).batch(
        0, NUM_ROLLOUTS // GROUP_SIZE
    )


async def run_all(bench: Bench, tasks: list[Task]) -> list[RolloutGroup]:
    words = Random(3).choices(list(OUTCOMES), list(OUTCOMES.values()), k=4 * NUM_ROLLOUTS)
    bench.fake.answers.extend(words)
    command = AgentCommand(argv=(PYTHON, "-c", PROGRAM + SCRIPT), log_folder=bench.folder)
    runner = RolloutRunner(
        devices=DevicePool(HarnessWorlds().make, max_devices=8),
        gateway=bench.gateway,
        agent=HarnessAgent(program=Numbered(HarnessCommand(command), count())),
        reward=score_reward,
        recorder=FakeRecorder(),
        max_turns=2,
        time_limits=DeviceConfig(task_timeout_s=10.0),
    )
    plan = GroupJob(source=RolloutSource(phase="step", step=1), group_size=GROUP_SIZE, params=PARAMS)

    async def as_it_is(group: RolloutGroup, _: Task | None) -> RolloutGroup:
        return group

    return await collect_groups(tasks, partial(run_group, runner, job=plan), as_it_is)


def marked_processes() -> list[str]:
    """Command lines of what this process has started and what those have."""
    mark = f"{MARK}={scratch_folder()}".encode()
    found: list[str] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200])
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.timeout(1800)
async def test_with_a_fifth_of_programs_dying_groups_are_full_rewards_unbiased_and_nothing_is_left(
    small_renderer: Qwen3VLRenderer, tmp_path: Path, tasks: list[Task]
) -> None:
    before, running = set(scratch_folder().iterdir()), set(marked_processes())
    async with open_bench(small_renderer, tmp_path) as bench:
        groups = await run_all(bench, tasks)

    num_faults = sum(len(group.faulty) for group in groups)
    rewards = [reward for group in groups for reward in group.rewards]
    num_attempts = num_faults + len(rewards)
    stops = Counter(rollout.stop_reason for group in groups for rollout in (*group.rollouts, *group.faulty))
    logger.info(
        f"{len(rewards)} of {NUM_ROLLOUTS} rollouts, {num_faults} faults, mean {fmean(rewards):.3f}, {dict(stops)}"
    )
    assert abs(num_faults / num_attempts - 0.2) < 3 * sqrt(0.16 / num_attempts)
    assert len(groups) == NUM_ROLLOUTS // GROUP_SIZE
    # three attempts each: 0.2 ** 3 = 0.8 % of the places stay empty
    assert len(rewards) >= NUM_ROLLOUTS - 3 * sqrt(0.008 * NUM_ROLLOUTS) - 0.008 * NUM_ROLLOUTS
    assert not any(group.is_incomplete for group in groups)
    # "again" fails unless its second answer is "win": 0.3 + 0.5 * 0.3; 0.60 if failures by refusal were left out
    expected = OUTCOMES["win"] * (1 + OUTCOMES["again"])
    assert abs(fmean(rewards) - expected) < 3 * sqrt(expected * (1 - expected) / len(rewards))
    assert set(marked_processes()) <= running  # other tests of this process have servers
    assert set(scratch_folder().iterdir()) == before
    assert len(list(tmp_path.glob("*.log"))) == num_attempts
