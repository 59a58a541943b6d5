"""Harness rollouts that go on from a turn of another one: their programs do the turns before it again."""

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest_asyncio

from cua_rl.agent.external import AgentCommand
from cua_rl.agent.harness import HarnessAgent, HarnessCommand
from cua_rl.environments.harness.environment import HarnessWorlds
from cua_rl.events import RolloutSource
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import score_reward
from cua_rl.rl.advantages import score_group
from cua_rl.rl.datums import build_batch
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.rollout.group import GroupJob, run_group
from cua_rl.rollout.run import RolloutRunner
from cua_rl.task_loader import load_tasks
from cua_rl.types.rollout import RolloutGroup, StopReason
from tests.agent.harness_bench import PROGRAM, PYTHON, Bench, open_bench

NUM_TURNS, NUM_SIBLINGS = 4, 3
WORLD = f"""
import hashlib
world = os.environ["CUA_SEED"]
for turn in range({NUM_TURNS}):
    answer = ask(f"turn {{turn}}, the world is {{world[:12]}}")
    world = hashlib.sha256((world + answer).encode()).hexdigest()
report(reward=int(world[:4], 16) / 2**16, answer=world)
"""
"""A world in a process, which every answer changes for good; its last state is the reward."""


@pytest_asyncio.fixture
async def bench(small_renderer: Qwen3VLRenderer, tmp_path: Path) -> AsyncGenerator[Bench]:
    async with open_bench(small_renderer, tmp_path) as opened:
        opened.fake.answers.extend(f"move {number}" for number in range(1000))  # every answer that is sampled differs
        yield opened


async def run(bench: Bench, script: str) -> RolloutGroup:
    path = bench.folder / "rows.jsonl"
    path.write_text(json.dumps({"task_id": "game", "seed": 5, "max_turns": NUM_TURNS}))
    source = {"source_type": "harness", "file_path": str(path)}
    command = AgentCommand(argv=(PYTHON, "-c", PROGRAM + script), log_folder=bench.folder)
    runner = RolloutRunner(
        devices=bench.pool,
        gateway=bench.gateway,
        agent=HarnessAgent(program=HarnessCommand(command)),
        reward=score_reward,
        recorder=bench.recorder,
        max_turns=20,
    )
    task = load_tasks(source, seed=0, split="train", device=HarnessWorlds.abilities).batch(0, 1)[0]
    job = GroupJob(
        source=RolloutSource(phase="step", step=1),
        group_size=2 + NUM_SIBLINGS,
        params=bench.params,
        branching=BranchingSettings(num_siblings=NUM_SIBLINGS),
    )
    return await run_group(runner, task, 0, job)


async def test_siblings_of_a_harness_come_to_the_fork_by_themselves_and_go_their_own_ways(bench: Bench) -> None:
    group = await run(bench, WORLD)

    assert not group.faulty, [one.error for one in group.faulty]
    whole, parent, *siblings = group.rollouts
    assert len(siblings) == NUM_SIBLINGS
    assert (whole.fork_turn, parent.fork_turn) == (0, 0)
    for one in siblings:
        assert one.parent_id == parent.rollout_id
        assert one.turns[: one.fork_turn] == parent.turns[: one.fork_turn]
        assert one.own_turns[0].model.prompt == parent.turns[one.fork_turn].model.prompt
        assert len(one.turns) == NUM_TURNS
    assert len({one.answer for one in group.rollouts}) == len(group.rollouts)
    # what is told again is not sampled
    num_sampled = sum(len(one.own_turns) for one in group.rollouts)
    assert bench.fake.num_answers == num_sampled < NUM_TURNS * len(group.rollouts)
    batch = build_batch([score_group(group, "leave_one_out")], bench.gateway._renderer.image_token_id)
    assert sum(len(datum.turn_indices) for datum in batch.datums) == num_sampled
    assert batch.metrics["rollout/retokenised_tokens"] == 0


async def test_a_world_that_does_not_repeat_itself_is_a_fault_and_never_a_wrong_start(bench: Bench) -> None:
    forgetful = WORLD.replace('os.environ["CUA_SEED"]', "os.urandom(8).hex()")

    group = await run(bench, forgetful)

    assert [one.parent_id for one in group.rollouts] == [None, None]
    assert len(group.faulty) == 3 * NUM_SIBLINGS  # tried again, in vain
    for one in group.faulty:
        assert one.stop_reason is StopReason.SAMPLING_ERROR
        assert "is not reproducible" in str(one.error)


async def test_a_world_that_differs_only_at_the_fork_is_a_fault_too(bench: Bench) -> None:
    # the parent's prompts before the fork come again, and only the one at which it goes on does not
    late = (
        WORLD.replace("report(", "pass\nreport(")
        .replace("    answer = ask(", "    if turn == 1: world += os.urandom(8).hex()\n    answer = ask(")
        .replace("[:12]", "[-12:]")
    )

    group = await run(bench, late)

    assert [one.parent_id for one in group.rollouts] == [None, None]
    assert all("prompt of turn 2 again" in str(one.error) for one in group.faulty)
