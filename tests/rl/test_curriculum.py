import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean

import pytest

from cua_rl.rl.curriculum import (
    FLOOR,
    GroupOutcome,
    SuccessRates,
    SuccessRateStream,
    curriculum_metrics,
    draw_weight,
    systematic_draw,
)
from cua_rl.rollout.group import collect_groups
from cua_rl.tasks.task import Category, Difficulty, Task, Template
from cua_rl.types.rollout import RolloutGroup
from tests.builders import group, rollout
from tests.fakes import make_task

CONSTANT, MIXED = (1.0, 1.0), (1.0, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeTemplate(Template):
    category: Category = "app"
    difficulty: Difficulty = "easy"
    max_turns: int = 10

    def make_task(self, seed: int) -> Task:
        return make_task(self.task_id, seed)


def made(rewards: Sequence[float], index: int) -> RolloutGroup:
    members = [rollout(reward=reward, rollout_id=f"{index}-{member}") for member, reward in enumerate(rewards)]
    plain = group(*members)
    return RolloutGroup(group_id=str(index), index=index, task_id="task", seed=index, rollouts=plain.rollouts)


async def collect(
    outcomes: Sequence[Sequence[float]], num_groups: int, durations: Sequence[int] = ()
) -> tuple[list[RolloutGroup], list[tuple[int, int | None]]]:
    """Collect groups with these rewards, by index; also who was replaced by which seed, in the order of the ends."""
    ends: list[tuple[int, int | None]] = []

    async def run(task: Task, index: int) -> RolloutGroup:
        for _ in range(durations[index] if durations else 0):
            await asyncio.sleep(0)
        return made(outcomes[index], index)

    async def end(ended: RolloutGroup, replaced_by: Task | None) -> RolloutGroup:
        ends.append((ended.index, replaced_by.seed if replaced_by else None))
        return ended

    tasks = [make_task(seed=seed) for seed in range(len(outcomes))]
    return await collect_groups(tasks, run, end, num_groups=num_groups), ends


async def test_constant_groups_are_replaced_until_the_batch_is_full() -> None:
    groups, ends = await collect([CONSTANT, MIXED, CONSTANT, MIXED, MIXED], num_groups=2)

    assert [entry.index for entry in groups] == [0, 1, 2, 3]
    assert sum(not entry.is_constant for entry in groups) == 2
    assert sorted(ends) == [(0, 2), (1, None), (2, 3), (3, None)]


async def test_without_tasks_in_reserve_every_task_runs_once() -> None:
    groups, ends = await collect([CONSTANT, CONSTANT], num_groups=2)

    assert [entry.index for entry in groups] == [0, 1]
    assert sorted(ends) == [(0, None), (1, None)]


async def test_refilling_stops_when_the_reserve_is_used_up() -> None:
    groups, _ = await collect([CONSTANT] * 6, num_groups=2)

    assert len(groups) == 6


async def test_groups_without_any_reward_are_replaced_too() -> None:
    groups, _ = await collect([(), MIXED], num_groups=1)

    assert [len(entry.rollouts) for entry in groups] == [0, 2]


async def test_which_groups_are_run_does_not_depend_on_how_long_they_take() -> None:
    random = Random(0)
    outcomes = [random.choice([CONSTANT, MIXED]) for _ in range(24)]

    runs = [await collect(outcomes, 8, [random.randrange(9) for _ in outcomes]) for _ in range(20)]

    assert len({tuple(entry.index for entry in groups) for groups, _ in runs}) == 1
    assert {sum(not entry.is_constant for entry in groups) for groups, _ in runs} == {8}


def test_metrics_tell_how_many_groups_were_sampled_and_dropped() -> None:
    groups = [made(CONSTANT, 0), made(MIXED, 1), made(CONSTANT, 2), made(MIXED, 3)]

    assert curriculum_metrics(groups, num_wanted=3) == {
        "curriculum/num_sampled_groups": 4.0,
        "curriculum/num_dropped_groups": 2.0,
        "curriculum/effective_group_frac": 0.5,
        "curriculum/batch_fill_frac": 2 / 3,
    }


def outcome(task_id: str, num_successes: int) -> GroupOutcome:
    return GroupOutcome(task_id=task_id, num_successes=num_successes, num_rollouts=8)


def test_a_success_rate_begins_at_half_and_follows_what_happens() -> None:
    rates = SuccessRates()
    assert rates.rate("a") == 0.5

    rates.observe([outcome("a", 8)])
    assert rates.rate("a") == pytest.approx(0.9)  # (8 + 1) / (8 + 2)

    rates.observe([outcome("a", 0)])
    assert rates.rate("a") == pytest.approx(7.4 / 16.4)  # successes 6.4, failures 8
    assert rates.metrics() == {"curriculum/success_rate/a": rates.rate("a")}


def test_a_rate_forgets_old_outcomes() -> None:
    rates = SuccessRates()

    rates.observe([outcome("a", 8)] * 20 + [outcome("a", 0)] * 20)

    assert rates.rate("a") < 0.05


def test_weights_are_largest_at_half_and_never_vanish() -> None:
    assert draw_weight(0.5) == 1.0
    assert draw_weight(0.0) == draw_weight(1.0) == FLOOR
    assert draw_weight(0.9) == pytest.approx(0.1 + 0.9 * 0.36)


def test_a_systematic_draw_gives_every_weight_its_share() -> None:
    assert systematic_draw([3.0, 1.0], 4, 0.0) == [0, 0, 0, 1]
    assert systematic_draw([3.0, 1.0], 4, 0.99) == [0, 0, 0, 1]
    assert systematic_draw([1.0, 1.0], 1, 0.4) == [0]
    assert systematic_draw([1.0, 1.0], 1, 0.6) == [1]


def stream(rates: SuccessRates) -> SuccessRateStream:
    templates = [FakeTemplate(task_id="solved"), FakeTemplate(task_id="open"), FakeTemplate(task_id="hopeless")]
    return SuccessRateStream(templates=templates, seed=3, instance_seeds=range(1000), rates=rates)


def drawn(tasks: SuccessRateStream, num_steps: int = 50) -> Counter[str]:
    return Counter(task.task_id for step in range(num_steps) for task in tasks.batch(step, 4))


def test_solved_and_hopeless_tasks_are_drawn_less_often_but_never_vanish() -> None:
    rates = SuccessRates()
    rates.observe([outcome("solved", 8), outcome("open", 4), outcome("hopeless", 0)] * 10)

    counts = drawn(stream(rates))

    assert set(counts) == {"solved", "open", "hopeless"}
    assert counts["open"] > 3 * max(counts["solved"], counts["hopeless"])


def test_untried_tasks_are_drawn_equally_often() -> None:
    counts = drawn(stream(SuccessRates()))

    assert sum(counts.values()) == 200
    assert max(counts.values()) - min(counts.values()) <= 20


def test_a_batch_depends_on_step_seed_and_outcomes_only() -> None:
    first, second = SuccessRates(), SuccessRates()
    for rates in (first, second):
        rates.observe([outcome("solved", 8), outcome("open", 3)])

    def seen(rates: SuccessRates, step: int) -> list[tuple[str, int]]:
        return [(task.task_id, task.seed) for task in stream(rates).batch(step, 8)]

    assert seen(first, 4) == seen(second, 4) == seen(first, 4)
    assert seen(first, 4) != seen(first, 5)
    assert seen(first, 4) != seen(SuccessRates(), 4)


def test_the_uniform_estimate_of_an_unchanged_policy_does_not_move_with_the_draw() -> None:
    random = Random(0)
    truth = {f"task-{number}": random.betavariate(1.56, 0.44) for number in range(32)}
    rates, seen = SuccessRates(), {"drawn": list[float](), "uniform": list[float]()}
    tasks = SuccessRateStream(
        templates=[FakeTemplate(task_id=name) for name in truth], seed=0, instance_seeds=range(1000), rates=rates
    )
    for step in range(150):
        names = [task.task_id for task in tasks.batch(step, 16)]
        ended = [outcome(name, sum(random.random() < truth[name] for _ in range(8))) for name in names]
        seen["drawn"].append(fmean(one.num_successes / 8 for one in ended))
        seen["uniform"] += rates.uniform_success(ended).values()
        rates.observe(ended)

    drawn, uniform = (fmean(values[10:]) for values in seen.values())
    assert abs(uniform - fmean(truth.values())) < 0.02
    assert drawn < fmean(truth.values()) - 0.05  # an easy task is drawn less often than the others
