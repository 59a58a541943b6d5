import json
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from typing import Any

import pytest

from cua_rl.environments.pool import DevicePool
from cua_rl.evaluation.attempts import (
    Attempt,
    AttemptJob,
    missing_attempts,
    outcomes_by_position,
    parse_attempts,
    run_missing_attempts,
)
from cua_rl.events import NoRecorder, RolloutSource
from cua_rl.rewards.reward import binary_reward
from cua_rl.rollout.group import GroupJob
from cua_rl.rollout.run import RolloutRunner
from cua_rl.types.errors import ConfigError, DeviceError, SamplingError
from cua_rl.types.rollout import RolloutGroup, SamplingParams
from tests.fakes import FakeAgent, FakeDevice, FakeGateway, make_task

PLAN = AttemptJob(
    model="m",
    tasks=[make_task("first"), make_task("second")],
    group=GroupJob(
        source=RolloutSource(phase="eval", step=0),
        group_size=2,
        params=SamplingParams(max_tokens=8, temperature=0.0),
    ),
)


def make_runner(agent: FakeAgent) -> RolloutRunner:
    async def make_device(_: object) -> Any:
        return FakeDevice()

    return RolloutRunner(
        devices=DevicePool(make_device, max_devices=1),
        gateway=FakeGateway(),  # type: ignore[arg-type]
        agent=agent,
        reward=binary_reward,
        recorder=NoRecorder(),
        max_turns=5,
    )


async def run(agent: FakeAgent, known: list[Attempt], groups: list[RolloutGroup] | None = None) -> list[Attempt]:
    kept: list[Attempt] = []

    async def keep(group: RolloutGroup, attempts: Sequence[Attempt]) -> None:
        kept.extend(attempts)
        if groups is not None:
            groups.append(group)

    await run_missing_attempts(make_runner(agent), PLAN, known, keep)
    return kept


async def test_the_attempts_at_a_task_are_a_group_and_each_names_the_rollout_that_counts() -> None:
    groups: list[RolloutGroup] = []

    kept = await run(FakeAgent(["1", "0", DeviceError("gone"), "1", "0"]), [], groups)

    assert [(group.group_id, group.index, group.task_id, len(group.rollouts)) for group in groups] == [
        ("m-0", 0, "first", 2),
        ("m-1", 1, "second", 2),
    ]
    assert [len(group.faulty) for group in groups] == [0, 1]
    for group in groups:
        counted = {rollout.member_index: rollout for rollout in group.rollouts}
        for item in (item for item in kept if item.position == group.index):
            rollout = counted[item.attempt]
            assert (item.rollout_id, item.success, item.seed) == (rollout.rollout_id, rollout.success, rollout.seed)


async def test_further_attempts_at_a_task_join_its_group() -> None:
    groups: list[RolloutGroup] = []
    first = await run(FakeAgent(["1"]), [])

    await run(FakeAgent(["0"]), [item for item in first if (item.position, item.attempt) != (1, 1)], groups)

    (group,) = groups
    assert (group.group_id, [rollout.member_index for rollout in group.rollouts]) == ("m-1", [1])


def test_lines_of_a_version_without_a_database_are_read() -> None:
    earlier = asdict(Attempt(**dict.fromkeys(name.name for name in fields(Attempt))))  # type: ignore[arg-type]
    del earlier["rollout_id"]

    assert [item.rollout_id for item in parse_attempts([earlier])] == [None]


async def test_all_attempts_are_made_and_survive_a_file() -> None:
    kept = await run(FakeAgent(["1", "0", DeviceError("gone"), "1", "0"]), [])

    assert sorted((item.position, item.attempt) for item in kept) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (sum(item.success is True for item in kept), sum(item.num_faults for item in kept)) == (2, 1)
    assert parse_attempts([json.loads(json.dumps(asdict(item))) for item in kept]) == kept


async def test_only_what_is_missing_is_made_and_what_was_given_up_is_tried_again() -> None:
    first = await run(FakeAgent(["1"]), [])
    given_up = replace(first[0], success=None, reward=None)
    agent = FakeAgent(["0"])

    again = await run(agent, [given_up, *first[1:]])

    assert [(item.position, item.attempt) for item in again] == [(given_up.position, given_up.attempt)]
    assert agent.num_runs == 1
    assert missing_attempts(PLAN, first) == {}


async def test_an_attempt_that_was_given_up_and_made_again_is_no_first_try() -> None:
    kept = await run(FakeAgent(["1"]), [])
    given_up = replace(kept[0], success=None, reward=None, num_faults=3)

    again = await run(FakeAgent(["1"]), [given_up, *kept[1:]])

    # its first try ended in a fault: of the task's two, one or two would have succeeded
    together = [given_up, *kept[1:], *again]
    read = parse_attempts([asdict(item) for item in together])
    for attempts in (together, read):
        outcomes = outcomes_by_position(attempts, "m")[given_up.position]
        assert (outcomes.num_faults, outcomes.num_given_up, outcomes.bounds) == (3, 0, (0.5, 1.0))


async def test_nothing_but_faults_at_the_start_ends_the_evaluation() -> None:
    agent = FakeAgent([DeviceError("no phones here")])

    with pytest.raises(BaseExceptionGroup) as group:
        await run(agent, [])

    assert group.group_contains(SamplingError, match="no phones here")
    assert agent.num_runs <= 12


async def test_attempts_are_gathered_by_task_and_faults_counted_apart() -> None:
    kept = await run(FakeAgent(["1"]), [])
    given_up = [replace(item, success=None, reward=None, num_faults=3) for item in kept if item.attempt == 1]

    outcomes = outcomes_by_position([*(item for item in kept if item.attempt == 0), *given_up], "m")

    assert [(task.successes, task.num_faults) for task in outcomes.values()] == [((True,), 3), ((True,), 3)]
    assert outcomes_by_position(kept, "another") == {}


def test_lines_of_another_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match="overwrite"):
        parse_attempts([{"step": 1}])
