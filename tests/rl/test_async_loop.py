import asyncio
from itertools import pairwise
from typing import Any

import pytest

from cua_rl.evaluation.evaluate import summarise
from cua_rl.events import BatchTaken, CheckpointSaved, GroupEnded, RolloutSource, StepTrained
from cua_rl.rl.advantages import score_group
from cua_rl.rl.async_loop import PARITY_EVERY, AsyncStart, train
from cua_rl.rl.group_buffer import WaitingGroup, require_lag
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.errors import ParityError, TrainingError
from cua_rl.types.rollout import AdapterRef, Rollout
from tests.fakes import FakeTrainer
from tests.rl.async_world import World, largest_lag, times_trained
from tests.rl.test_sync_loop import settings


@pytest.mark.parametrize("max_lag", [1, 2, 3, 4])
async def test_every_group_is_trained_once_and_none_is_older_than_allowed(max_lag: int) -> None:
    lags: list[int] = []
    for seed in range(5):
        world = World(seed)

        await world.train(max_lag, max_steps=12, groups_per_batch=3)

        assert world.trained_steps == list(range(1, 13))
        assert times_trained(world.batches) == dict.fromkeys(range(36), 1)
        assert world.num_ended_groups == 36
        assert {len(groups) for groups in world.batches} == {3}
        lags.append(largest_lag(world.batches))
        assert max(metrics["rollout/policy_lag/max"] for _, metrics in world.log.steps) == lags[-1]
    assert max(lags) == max_lag  # the bound is reached: rollouts, not the arithmetic, are what it waits for


async def test_rollouts_go_on_while_a_step_trains() -> None:
    world = World()
    entered, leave = asyncio.Event(), asyncio.Event()

    class SlowTrainer(FakeTrainer):
        async def optim_step(self, optim: Any) -> Any:
            entered.set()
            await leave.wait()
            return await super().optim_step(optim)

    world.trainer = world.policy.trainer = SlowTrainer()
    running = asyncio.create_task(world.train(2, max_steps=4, groups_per_batch=2))
    await entered.wait()
    while world.num_ended_groups < 6:  # (0 + 2 + 1) * 2 groups may start before policy 1 is announced
        await asyncio.sleep(0)
    for _ in range(500):
        await asyncio.sleep(0)
    assert world.num_ended_groups == 6
    leave.set()
    await running
    assert world.num_ended_groups == 8


async def test_rollouts_never_exceed_the_limit() -> None:
    world = World(max_rollouts=5)

    await world.train(4, max_steps=6, groups_per_batch=4, group_size=4)

    assert world.most_rollouts == 5
    assert world.limit.num_running == 0


async def test_a_failing_rollout_ends_the_run_and_everything_in_it() -> None:
    class Broken(World):
        async def run(self, plan: RolloutJob) -> Rollout:
            if self.num_rollouts == 20:
                self.num_rollouts += 1
                raise RuntimeError("a defect")
            return await super().run(plan)

    world = Broken()

    with pytest.RaisesGroup(RuntimeError, flatten_subgroups=True):
        await world.train(2, max_steps=10, groups_per_batch=2)

    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    assert world.limit.num_running == 0


async def test_constant_groups_are_replaced_as_often_as_the_refill_factor_allows() -> None:
    class Easy(World):
        def reward(self, plan: RolloutJob) -> float:
            return 1.0 if plan.group_index % 2 else super().reward(plan)

    world = Easy()

    await world.train(1, max_steps=6, groups_per_batch=4, max_refill_factor=2)

    assert world.trained_steps == list(range(1, 7))
    assert max(times_trained(world.batches).values()) == 1
    assert sum(metrics["curriculum/num_dropped_groups"] for _, metrics in world.log.steps) > 6
    for _, metrics in world.log.steps:
        assert 4 <= metrics["curriculum/num_sampled_groups"] <= 8


async def test_asynchronous_steps_are_divided_by_all_judged_rollouts_replaced_ones_too() -> None:
    class Easy(World):
        def reward(self, plan: RolloutJob) -> float:
            return 1.0 if plan.group_index % 2 else super().reward(plan)

    for max_refill_factor in (1, 2):
        world = Easy()

        await world.train(1, max_steps=6, groups_per_batch=4, max_refill_factor=max_refill_factor)

        trained = [groups for groups in world.batches if not all(group.is_constant for group in groups)]
        for groups, call in zip(trained, world.trainer.beside, strict=True):
            num_rollouts = sum(len(group.rollouts) for group in groups)
            assert set(call["token_weights"] or ()) == {1 / 1000 / num_rollouts}


async def test_with_a_kl_term_constant_groups_are_trained_within_the_lag_bound() -> None:
    class Easy(World):
        def reward(self, plan: RolloutJob) -> float:
            return 1.0 if plan.group_index % 2 else super().reward(plan)

    world = Easy()

    await world.train(1, max_steps=6, groups_per_batch=4, max_refill_factor=2, kl_penalty_coef=0.1)

    for groups, (_, metrics) in zip(world.batches, world.log.steps, strict=True):
        turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
        assert metrics["rollout/num_datums"] == len(turns)  # their prompts do not extend each other
        assert metrics["rollout/policy_lag/max"] <= 1


async def test_parity_is_measured_once_where_only_the_kl_term_trains() -> None:
    class Equals(World):
        def reward(self, plan: RolloutJob) -> float:
            return 0.0

    world = Equals(seed=4)

    await world.train(max_lag=0, max_steps=5, kl_penalty_coef=0.1)  # so that each step has turns of the newest policy

    # a metric of two places is refused; the gate looks at what is trained, and no probe beside it
    assert sum("policy/parity_mean_abs" in metrics for _, metrics in world.log.steps) > 0
    assert "forward" not in world.trainer.calls


async def test_steps_that_teach_nothing_keep_the_policy_and_its_turns_do_not_grow_old() -> None:
    class Solved(World):
        def reward(self, plan: RolloutJob) -> float:
            return 1.0

    world = Solved()

    await world.train(1, max_steps=5)

    assert world.policy.published == [0]
    assert all(metrics["rollout/policy_lag/max"] == 0 for _, metrics in world.log.steps)


async def test_checkpoints_come_before_anything_is_sampled_with_their_policy() -> None:
    world = World()
    saved_before_serve: list[tuple[list[int], int]] = []
    serve = world.policy.serve

    async def note(saved: Any) -> AdapterRef:
        saved_before_serve.append((list(world.policy.saved), saved.step))
        return await serve(saved)

    world.policy.serve = note  # type: ignore[method-assign]

    await world.train(2, max_steps=5, save_every=1)

    assert all(step == 0 or saved[-1] >= step for saved, step in saved_before_serve)
    kinds = [event for event in world.recorder.events if isinstance(event, StepTrained | CheckpointSaved)]
    assert [type(event) for event in kinds] == [StepTrained, CheckpointSaved] * 5


class Judge:
    """An evaluation that ends when it is told to."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, int, int]] = []
        self.may_end = asyncio.Event()

    async def run(self, source: RolloutSource, adapter: AdapterRef) -> Any:
        self.begun.append((source.phase, source.step, adapter.policy_version))
        await self.may_end.wait()
        return summarise([])


async def test_training_goes_on_beside_evaluations_and_each_has_its_own_policy() -> None:
    world, judge = World(), Judge()
    parts = world.parts(evaluator=judge)
    running = asyncio.create_task(train(settings(max_steps=4, eval_every=2), parts, max_lag=1, limit=world.limit))
    while world.trained_steps != [1, 2, 3, 4]:
        await asyncio.sleep(0)

    assert judge.begun == [("baseline", 0, 0)]
    judge.may_end.set()
    await running
    assert judge.begun == [("baseline", 0, 0), ("eval", 2, 2), ("eval", 4, 4)]
    assert world.log.evaluations == [("baseline", 0), ("eval", 2), ("eval", 4)]


async def test_the_parity_gate_stops_an_asynchronous_run_too() -> None:
    world = World()
    world.trainer = world.policy.trainer = FakeTrainer(gap=0.3)

    with pytest.RaisesGroup(ParityError):
        await world.train(2, max_steps=4)

    assert world.trainer.policy_version == 0


async def test_the_parity_gate_has_something_to_look_at_every_ten_steps_even_if_training_is_the_slower_side() -> None:
    class SlowTrainer(FakeTrainer):
        async def optim_step(self, optim: Any) -> Any:
            for _ in range(50):
                await asyncio.sleep(0)
            return await super().optim_step(optim)

    world = World(longest=2)
    world.trainer = world.policy.trainer = SlowTrainer()

    await world.train(2, max_steps=40)

    looked = [step for step, metrics in world.log.steps if "policy/parity_mean_abs" in metrics]
    assert len(looked) < 40
    assert max(later - earlier for earlier, later in pairwise(looked)) <= PARITY_EVERY
    assert times_trained(world.batches) == dict.fromkeys(range(80), 1)


async def test_where_nothing_teaches_the_parity_gate_looks_at_that_and_rollouts_go_on() -> None:
    class Failed(World):
        def reward(self, plan: RolloutJob) -> float:
            return 0.0

    world = Failed()

    await world.train(2, max_steps=6)

    kinds = [type(event) for event in world.recorder.events if isinstance(event, GroupEnded | BatchTaken)]
    # three batches of groups may be under way: the first step does not wait until all of them have ended
    assert kinds.index(BatchTaken) < 3 * len(world.batches[0])
    assert all("policy/parity_mean_abs" in metrics for _, metrics in world.log.steps)


async def test_a_resumed_run_keeps_finished_groups_and_starts_the_others_again() -> None:
    first = World(seed=3)
    await first.train(2, max_steps=8)
    trained = [group for groups in first.batches[:4] for group in groups]
    kept = [
        WaitingGroup(scored=score_group(group, "mean"), last_step=5 + number)
        for number, groups in enumerate(first.batches[4:])
        for group in groups
        if all(turn.model.policy_version <= 4 for rollout in group.rollouts for turn in rollout.turns)
    ]
    assert kept

    resumed = World(seed=4)
    resumed.trainer.policy_version = 4
    for waiting in kept:
        source = RolloutSource(phase="step", step=waiting.last_step)
        resumed.recorder.events.append(GroupEnded(source=source, group=waiting.scored.group, advantages=None))
    start = AsyncStart(
        done_ordinals=frozenset(group.index for group in trained),
        kept_groups=tuple(kept),
        newest_steps={version: version for version in range(5)},
    )
    await resumed.train(2, start=start, max_steps=8, first_step=5)

    ids = {group.group_id for groups in resumed.batches for group in groups}
    assert {waiting.scored.group.group_id for waiting in kept} <= ids
    both = [*first.batches[:4], *resumed.batches]
    assert times_trained(both) == dict.fromkeys(range(16), 1)
    assert largest_lag(both) <= 2
    assert resumed.num_ended_groups == 8  # four steps of two groups, the kept ones among them


def test_turns_older_than_allowed_are_a_defect_that_stops_the_run() -> None:
    with pytest.raises(TrainingError, match="at most 2 steps old"):
        require_lag([0, 3], 2, step=7)
