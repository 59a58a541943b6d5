"""Failed rollouts, and the search from their turns for what would have worked, on simulated phones."""

from dataclasses import replace
from typing import Any, cast

import pytest

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.environments.device import Device
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import open_pool
from cua_rl.events import GroupEnded, RolloutStarted
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.datums import build_datums
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.rollout.run import RolloutRunner
from cua_rl.run.asking import Recorded
from cua_rl.run.prepared_sft import build_recorded_examples
from cua_rl.run.recovery import Found, Search, fork_places
from cua_rl.run.takeover import Demonstrations, PreparedTakeover
from cua_rl.run.training_config import CLIConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.tasks.task import Task
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import RolloutGroup
from tests.fakes import FakeRecorder
from tests.rollout.test_branches import MAX_TURNS, PARAMS, RENDERER, RandomModel, long_task, repeat, run

NUM_SIBLINGS = 4


def by_luck(task: Task, share: float) -> Task:
    """The task, done if the phone's final state is one of this share of all states."""

    async def validate(device: Device, answer: str | None) -> Validation:
        state = (await device.observe()).state
        is_done = int(state[:4], 16) < share * 16**4
        return Validation(query="state", expected="a lucky one", actual=state, success=is_done)

    return replace(task, validate=validate)


async def failures(task: Task) -> list[Recorded]:
    """With ids that are the same each time, from which the seeds of those that go on follow."""
    rollouts = (await run(task, BranchingSettings())).group.rollouts
    return [
        Recorded(rollout=replace(one, rollout_id=f"failed-{number}"), params=PARAMS, settings={})
        for number, one in enumerate(rollouts)
        if not one.success and len(one.turns) > 1
    ]


async def search(task: Task, recorder: FakeRecorder) -> tuple[list[Found], list[RolloutGroup]]:
    """What is found from every failure, and the groups of siblings in the order in which they ended."""
    failed = await failures(task)
    prepared = PreparedTakeover(
        recorded=failed[0], place=1, config=CLIConfig(), task=task, **cast("dict[str, Any]", dict.fromkeys(_NOT_NEEDED))
    )
    async with open_pool(SimulatedPhones(), max_devices=4) as pool:
        runner = RolloutRunner(
            devices=pool,
            gateway=Gateway(RandomModel(), RENDERER, PARAMS),
            agent=GBoxAgent(),
            reward=binary_reward,
            recorder=recorder,
            max_turns=MAX_TURNS,
        )
        found = await Search(
            failed=[(one, task) for one in failed],
            num_siblings=NUM_SIBLINGS,
            num_turns=3,
            seed=1,
            prepared=prepared,
            demonstrations=Demonstrations(step=1, runner=runner, recorder=recorder),
            adapter=None,
        ).run()
        assert pool.num_alive == 0
    return found, [one.group for one in recorder.events if isinstance(one, GroupEnded)]


_NOT_NEEDED = ("templates", "devices", "judge", "renderer", "max_model_len", "folder")


def forks_of(groups: list[RolloutGroup], parent_id: str) -> list[RolloutGroup]:
    return [group for group in groups if group.rollouts[0].parent_id == parent_id]


@pytest.mark.parametrize(
    ("num_turns", "most", "expected"),
    [(6, 3, [5, 4, 2]), (6, 9, [5, 4, 3, 2, 1]), (6, 1, [5]), (2, 3, [1]), (1, 3, []), (15, 3, [14, 10, 5])],
)
def test_the_last_turn_is_tried_first_and_the_beginning_never(num_turns: int, most: int, expected: list[int]) -> None:
    assert fork_places(num_turns, most) == expected


async def test_the_search_ends_at_the_last_turn_from_which_the_validator_accepts_a_sibling() -> None:
    task, recorder = by_luck(long_task(), 0.15), FakeRecorder()
    found, groups = await search(task, recorder)

    assert {one.turn is None for one in found} == {True, False}
    assert sum(one.num_rollouts for one in found) == sum(len(group.rollouts) for group in groups)
    for one in found:
        parent = one.recorded.rollout
        places = fork_places(len(parent.turns), 3)
        mine = forks_of(groups, parent.rollout_id)
        assert one.faults == ()
        assert [group.rollouts[0].fork_turn for group in mine] == places[: len(mine)]
        wins = [sum(sibling.success for sibling in group.rollouts) for group in mine]
        assert (wins[:-1], wins[-1]) == ([0] * (len(mine) - 1), one.num_successes)
        assert one.turn == (places[len(mine) - 1] + 1 if wins[-1] else None)
        assert wins[-1] or len(mine) == len(places)
        for group in mine:
            assert len({sibling.own_turns[0].model.sampled_tokens for sibling in group.rollouts}) > 1
            for sibling in group.rollouts:
                assert sibling.turns[: sibling.fork_turn] == parent.turns[: sibling.fork_turn]
                await repeat(task, sibling)


async def test_of_what_is_found_the_turns_after_the_fork_are_learned() -> None:
    _, groups = await search(by_luck(long_task(), 0.15), FakeRecorder())
    wins = [one for group in groups for one in group.rollouts if one.success]

    examples = build_recorded_examples(wins, RENDERER.image_token_id)

    assert wins
    for rollout, example in zip(wins, examples, strict=True):
        assert [index for datum in example for index in datum.turn_indices] == [
            turn.index for turn in rollout.own_turns
        ]
        learned = sum(datum.num_trained_tokens for datum in example)
        assert learned == sum(len(turn.model.sampled_tokens) for turn in rollout.own_turns) > 0
        assert build_datums(rollout, 1.0, RENDERER.image_token_id).datums == example


async def test_a_step_knows_of_each_group_that_follows_one_without_success() -> None:
    recorder = FakeRecorder()
    found, groups = await search(by_luck(long_task(), 0.15), recorder)

    ended = [one for one in recorder.events if isinstance(one, GroupEnded)]
    assert sum(one.replaced_by is not None for one in ended) == len(groups) - len(found)
    assert sorted(group.index for group in groups) == list(range(len(groups)))
    started = [one for one in recorder.events if isinstance(one, RolloutStarted)]
    assert len(started) == NUM_SIBLINGS * len(groups)
    assert all(one.parent_id and one.fork_turn for one in started)
