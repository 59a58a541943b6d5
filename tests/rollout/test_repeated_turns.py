"""A rollout that goes on from a turn of a recorded one, on a device on which the turns before it are done again."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.tools import MOBILE_USE
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.pool import open_pool
from cua_rl.events import RolloutSource
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.datums import build_datums
from cua_rl.rollout.branches import BranchingSettings, Fork
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.run.by_hand import Lines, Person
from cua_rl.sampling.gateway import Gateway
from cua_rl.tasks.task import Task
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import Rollout, StopReason, Turn
from tests.fakes import FakeRecorder
from tests.rollout.test_branches import MAX_TURNS, PARAMS, RENDERER, long_task, repeat, run

OTHER = EncodedImage(data=b"another screen", format="png", width_px=192, height_px=320)


async def recorded() -> tuple[Task, Sequence[Rollout]]:
    task = long_task()
    rollouts = (await run(task, BranchingSettings())).group.rollouts
    return task, [one for one in rollouts if len(one.turns) == MAX_TURNS]


def fork_at(place: int, parent: Rollout, turns: Sequence[Turn] = ()) -> Fork:
    turns = turns or parent.turns
    return Fork(parent_id=parent.rollout_id if place else None, turns=tuple(turns[:place]), arrival=turns[place])


def person(folder: Path, lines: Lines, turn: int) -> Person:
    return Person(
        renderer=RENDERER,
        tool=MOBILE_USE,
        reach=lambda _: (1000, 1000),
        cursor=None,
        turn=turn,
        screen_path=folder / "screen.png",
        lines=lines,
        echo=lambda _: None,
        max_model_len=100_000,
    )


async def go_on(task: Task, fork: Fork, folder: Path, lines: Lines, recorder: FakeRecorder | None = None) -> Rollout:
    """Do the turns again, then what the lines say; no device is left, whatever happens."""
    async with open_pool(SimulatedPhones(), max_devices=1) as pool:
        gateway = Gateway(person(folder, lines, len(fork.turns)), RENDERER, PARAMS)
        runner = RolloutRunner(
            devices=pool,
            gateway=gateway,
            agent=GBoxAgent(),
            reward=binary_reward,
            recorder=recorder or FakeRecorder(),
            max_turns=MAX_TURNS,
        )
        job = RolloutJob(
            source=RolloutSource(phase="step", step=1),
            group_id="group",
            group_index=0,
            member_index=0,
            task=task,
            params=PARAMS,
            fork=fork,
        )
        try:
            return await runner.run(job)
        finally:
            assert pool.num_alive == 0


def say(*words: str) -> Lines:
    lines = Lines()
    for line in words:
        lines.put_nowait(line)
    return lines


async def test_from_every_turn_it_goes_on_exactly_where_the_recorded_one_was_state_by_state(tmp_path: Path) -> None:
    task, rollouts = await recorded()
    for parent in rollouts:
        for place in range(MAX_TURNS):
            rollout = await go_on(task, fork_at(place, parent), tmp_path, say("finish failure"))

            assert rollout.error is None
            (own,) = rollout.own_turns
            assert (own.state, own.agent.before) == (parent.turns[place].state, parent.turns[place].agent.before)
            assert own.model.prompt == parent.turns[place].model.prompt
            assert rollout.turns[:place] == parent.turns[:place]
            assert (rollout.stop_reason, rollout.fork_turn) == (StopReason.FINISHED, place)
            # the database knows a parent by the turns that are its
            assert rollout.parent_id == (parent.rollout_id if place else None)
            await repeat(task, rollout)


async def test_only_what_was_done_from_that_turn_on_is_trained(tmp_path: Path) -> None:
    task, rollouts = await recorded()
    rollout = await go_on(task, fork_at(2, rollouts[0]), tmp_path, say("back", "click 5 5", "finish"))

    datums = build_datums(rollout, 1.0, RENDERER.image_token_id).datums
    trained = [
        token
        for datum in datums
        for token, is_on in zip(datum.model_input.token_ids(RENDERER.image_token_id), datum.loss_mask, strict=True)
        if is_on
    ]
    assert len(rollout.own_turns) == 3
    assert trained == [token for turn in rollout.turns[2:] for token in turn.model.sampled_tokens]
    texts = [turn.model.text for turn in rollout.own_turns]
    assert '"Back"' in texts[0]
    assert '"success"' in texts[2]
    told = [token for turn in rollout.turns[:2] for token in turn.model.sampled_tokens]
    assert told, "the others are read"
    assert all(datum.model_input.length > len(told) + datum.num_trained_tokens for datum in datums)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("what", ["screenshot", "state"])
async def test_a_screen_that_is_not_as_recorded_is_a_fault_that_names_the_turn(
    tmp_path: Path, place: int, what: str
) -> None:
    task, rollouts = await recorded()
    # after an action that was refused the agent does not look again
    parent = next(one for one in rollouts if not place or one.turns[place - 1].agent.after is not None)
    turns = list(parent.turns)
    other = replace(turns[place].agent, before=OTHER) if what == "screenshot" else turns[place].agent
    turns[place] = replace(turns[place], agent=other, state=turns[place].state if what == "screenshot" else "other")

    rollout = await go_on(task, fork_at(3, parent, turns), tmp_path, say("finish"))

    assert (rollout.stop_reason, rollout.reward) == (StopReason.DEVICE_ERROR, None)
    assert f"turn {place + 1}: expected the screenshot that was recorded before it" in str(rollout.error)
    assert not (tmp_path / "screen.png").exists(), "the person was not asked"


async def test_another_seed_of_the_task_is_not_taken_for_the_recorded_one(tmp_path: Path) -> None:
    task, rollouts = await recorded()
    other = replace(task, seed=task.seed + 1, world=None)

    rollout = await go_on(other, fork_at(2, rollouts[0]), tmp_path, say("finish"))

    assert "turn 1: expected the screenshot" in str(rollout.error)


async def test_an_interrupted_person_leaves_no_device(tmp_path: Path) -> None:
    task, rollouts = await recorded()
    lines = say("back")
    going_on = asyncio.create_task(go_on(task, fork_at(1, rollouts[0]), tmp_path, lines))
    while not lines.empty():
        await asyncio.sleep(0)
    going_on.cancel()
    with pytest.raises(asyncio.CancelledError):
        await going_on
