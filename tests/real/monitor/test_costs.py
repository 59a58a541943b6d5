"""What rollouts cost: sums of what their turns, devices and judges used, by hand and row by row."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import (
    CheckpointSaved,
    EvaluationEnded,
    Event,
    GroupEnded,
    Phase,
    RolloutSource,
    SourceStarted,
    StepTrained,
)
from cua_rl.monitor.app import guard, make_app
from cua_rl.monitor.databases import Databases, open_database
from cua_rl.monitor.prices import JudgePrices, Prices
from cua_rl.monitor.security import AccessRules
from cua_rl.tasks.task import Task
from cua_rl.types.rollout import EncodedTextChunk, ModelInput, Rollout, RolloutGroup, Turn
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, make_judgement, rollout_start, start
from tests.real.monitor.conftest import Monitor, Shown
from tests.real.monitor.test_run_figures import EASY, HARD

PRICES = Prices(
    gpu_hour=3.6,
    device_hour=7.2,
    prompt_million_tokens=10.0,
    sampled_million_tokens=100.0,
    judge={"judge-1": JudgePrices(prompt_million_tokens=1000.0, answer_million_tokens=10_000.0)},
)
PLAN = {"server": {"gpus": ["0", "1"]}, "trainer": {"gpus": ["1", "2"]}}  # three, of which one is shared


def turn_of(turn: Turn, index: int, prompt: int, cached: int, sampled: int, took_s: float) -> Turn:
    model = replace(
        turn.model,
        response_id=f"{turn.model.response_id}-{index}",
        prompt=ModelInput(chunks=(EncodedTextChunk(tokens=(1,) * prompt),)),
        sampled_tokens=(2,) * sampled,
        sampling_logprobs=(-0.5,) * sampled,
        cached_tokens=cached,
        duration_s=took_s,
    )
    return replace(turn, index=index, model=model, agent=replace(turn.agent, response_id=model.response_id))


def group_of(name: str, task: Task, *members: Sequence[tuple[int, int, int, float]]) -> RolloutGroup:
    """Rollouts with turns of so many prompt, cached and sampled tokens, and seconds."""
    made = make_group(seed=len(name), group_id=name, num_rollouts=len(members))
    rollouts = tuple(
        replace(
            rollout,
            rollout_id=f"{name}-{place}",
            task_id=task.task_id,
            seed=task.seed,
            turns=tuple(turn_of(rollout.turns[0], index, *used) for index, used in enumerate(turns)),
            judgement=None,
        )
        for place, (rollout, turns) in enumerate(zip(made.rollouts, members, strict=True))
    )
    return replace(made, task_id=task.task_id, seed=task.seed, rollouts=rollouts, faulty=())


def source_of(phase: Phase, step: int, *groups: tuple[Task, RolloutGroup]) -> list[Event]:
    source = RolloutSource(phase=phase, step=step)
    tasks = tuple(task for task, _ in groups)
    events: list[Event] = [SourceStarted(source=source, tasks=tasks, group_size=2, policy_version=max(0, step - 1))]
    for task, group in groups:
        events += [replace(rollout_start(source, group, rollout), task=task) for rollout in group.rollouts]
        advantages = (0.0,) * len(group.rollouts) if phase == "step" else None
        events.append(GroupEnded(source=source, group=group, advantages=advantages))
    return [*events, EvaluationEnded(source=source, metrics={})] if phase != "step" else events


def trained(step: int, *rollouts: Rollout) -> StepTrained:
    logprobs = {
        one.rollout_id: tuple((turn.index, turn.model.sampling_logprobs) for turn in one.turns) for one in rollouts
    }
    return StepTrained(
        step=step, policy_version=step, datums_sha256="", num_datums=1, training_logprobs=logprobs, metrics={}
    )


async def record(url: str, *events: Event) -> None:
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        await recorder.record(replace(start(), config={"gpu_plan": PLAN}))
        for event in events:
            await recorder.record(event)


@asynccontextmanager
async def priced(url: str, prices: Prices) -> AsyncGenerator[httpx.AsyncClient]:
    rules = AccessRules(write_token="not used")
    app = make_app(Databases([open_database(url)]), rules, prices=prices)
    transport = httpx.ASGITransport(app=guard(app, rules), raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        yield client


async def cost_of(client: httpx.AsyncClient, path: str = "/api/rollouts/cost?run_id=1", **wanted: Any) -> Any:
    answer = await client.get(path, params=httpx.QueryParams(path.partition("?")[2]).merge(wanted))
    assert answer.status_code == 200, answer.text
    return answer.json()


def two_steps() -> list[Event]:
    """Step 1 at two tasks, the second of which has a judge; step 2 at the first alone; then an evaluation."""
    first = group_of("a", EASY, [(100, 0, 10, 1.0), (200, 150, 20, 2.0)], [(100, 100, 5, 1.0)])
    second = group_of("bb", HARD, [(1000, 0, 40, 4.0)])
    said = make_judgement(is_reached=True)  # two votes of 1000 and 40 tokens that cost 0.30
    unpriced = replace(said, cost_usd=None)
    second = replace(second, rollouts=(replace(second.rollouts[0], judgement=said),))
    third = group_of("ccc", EASY, [(400, 0, 30, 3.0)])
    third = replace(third, rollouts=(replace(third.rollouts[0], judgement=unpriced),))
    last = group_of("dddd", HARD, [(50, 0, 1, 1.0)])
    return [
        *source_of("step", 1, (EASY, first), (HARD, second)),
        trained(1, first.rollouts[0]),
        CheckpointSaved(step=1, state_path="/1", sampler_path="/1"),
        *source_of("step", 2, (EASY, third)),
        trained(2, *third.rollouts),
        *source_of("eval", 2, (HARD, last)),
    ]


def set_clock(url: str) -> None:
    """Step 1 takes 100 s; of the 80 s of step 2, 20 overlap; the evaluation takes 10 s. A device is leased for 50 s."""
    for table, step, begin, end in (("steps", 1, 0, 100), ("steps", 2, 80, 160), ("evals", 2, 160, 170)):
        at = "timestamptz '2026-01-01'"
        run_sql(
            url,
            f"UPDATE {table} SET started_at = {at} + interval '{begin} s', ended_at = {at} + interval '{end} s' "
            f"WHERE step = {step}",
        )
    run_sql(url, "UPDATE rollouts SET device_s = 50")


async def test_the_cost_of_a_set_is_the_sum_of_what_its_turns_used_and_money_where_there_is_a_price(url: str) -> None:
    await record(url, *two_steps())
    set_clock(url)

    async with priced(url, PRICES) as client:
        found = await cost_of(client)
        cost = found["cost"]
        assert (cost["num_rollouts"], cost["num_open"]) == (5, 0)
        # prompts 100 + 200 + 100, 1000, 400 and 50; sampled 35, 40, 30 and 1; trained 10 + 20 and 30
        tokens = [cost[f"{name}_tokens"] for name in ("prompt", "cached", "sampled", "trained")]
        assert tokens == [1850, 250, 106, 60]
        assert (cost["sampling_s"], cost["device_s"]) == (12.0, 250.0)
        assert cost["gpu_s"] == pytest.approx(3 * (100 + 60 + 10))
        assert (cost["judge_prompt_tokens"], cost["judge_answer_tokens"]) == (4000, 160)
        assert cost["num_unpriced_judgements"] == 0
        assert cost["usd"] == pytest.approx(
            {
                "gpu": 3.6 * 510 / 3600,
                "device": 7.2 * 250 / 3600,
                "prompt": 10 * 1600 / 1e6,  # those that were not cached
                "sampled": 100 * 106 / 1e6,
                "judge": 0.3 + (2000 * 1000 + 80 * 10_000) / 1e6,  # as recorded, and at the price of the model
            }
        )
        assert cost["total_usd"] == pytest.approx(sum(cost["usd"].values()))

        tasks = {one["task_id"]: one["cost"] for one in found["tasks"]}
        assert [tasks[one.task_id]["sampling_s"] for one in (EASY, HARD)] == [7.0, 5.0]
        # of the 8 s of requests in step 1, 4 are of each task; step 2 is of the first, the evaluation of the second
        assert tasks[EASY.task_id]["gpu_s"] == pytest.approx(300 * 4 / 8 + 180)
        assert tasks[HARD.task_id]["gpu_s"] == pytest.approx(300 * 4 / 8 + 30)
        steps = [(one["phase"], one["step"], one["cost"]["sampled_tokens"]) for one in found["steps"]]
        assert steps == [("step", 1, 75), ("step", 2, 30), ("eval", 2, 1)]

        part = (await cost_of(client, step=1, phase="step", task_id=EASY.task_id))["cost"]
        assert (part["prompt_tokens"], part["gpu_s"]) == (400, pytest.approx(150))
        nothing = await cost_of(client, search="nothing-has-this-word")
        assert (nothing["cost"]["num_rollouts"], nothing["cost"]["total_usd"], nothing["tasks"]) == (0, 0.0, [])

    async with priced(url, Prices()) as client:
        cost = (await cost_of(client))["cost"]
        assert cost["usd"] == {"judge": pytest.approx(0.3)}  # what the run recorded needs no price
        assert (cost["num_unpriced_judgements"], cost["gpu_s"]) == (1, pytest.approx(510))
        assert (await cost_of(client, step=1, task_id=EASY.task_id))["cost"]["total_usd"] is None


async def test_a_checkpoint_has_cost_what_the_run_used_until_it_was_made(url: str) -> None:
    events = two_steps()
    before = source_of("baseline", 0, (HARD, group_of("eeeee", HARD, [(7, 0, 3, 1.0)])))
    await record(url, *before, *events)
    set_clock(url)
    run_sql(url, "UPDATE evals SET started_at = ended_at WHERE phase = 'baseline'")

    async with priced(url, PRICES) as client:
        found = await cost_of(client, "/api/runs/1/cost")
    rows = [(one["step"], one["policy_version"], one["is_checkpoint"]) for one in found["versions"]]
    assert rows == [(0, 0, False), (1, 1, True), (2, 2, False)]
    # the baseline's 3 tokens are spent before step 1; the evaluation of version 2 is not a part of what made it
    assert [one["cost"]["sampled_tokens"] for one in found["versions"]] == [0, 3 + 75, 3 + 75 + 30]
    assert [one["cost"]["gpu_s"] for one in found["versions"][1:]] == pytest.approx([300, 480])
    assert [one["success"] is not None for one in found["versions"]] == [True, False, True]
    assert (found["training"]["sampled_tokens"], found["evaluations"]["sampled_tokens"]) == (105, 4)


async def test_an_evaluation_within_a_step_takes_no_time_from_what_the_step_did_before(url: str) -> None:
    await record(url, *two_steps())
    set_clock(url)
    run_sql(url, "UPDATE evals SET started_at = started_at - interval '50 s', ended_at = ended_at - interval '50 s'")

    async with priced(url, PRICES) as client:
        found = await cost_of(client, "/api/runs/1/cost")
    # 110 to 120, within step 2, to which 100 to 110 and 120 to 160 are left
    assert [found[part]["gpu_s"] for part in ("training", "evaluations")] == pytest.approx([3 * 150, 3 * 10])


async def test_turns_that_branches_share_count_once(url: str) -> None:
    group = group_of("a", EASY, [(100, 0, 10, 1.0), (200, 0, 20, 2.0)], [(100, 0, 10, 1.0), (300, 0, 30, 3.0)])
    parent, child = group.rollouts
    child = replace(child, turns=(parent.turns[0], child.turns[1]), parent_id=parent.rollout_id, fork_turn=1)
    await record(url, *source_of("step", 1, (EASY, replace(group, rollouts=(parent, child)))), trained(1, parent))

    async with priced(url, PRICES) as client:
        cost = (await cost_of(client))["cost"]
    assert [cost[f"{name}_tokens"] for name in ("prompt", "sampled", "trained")] == [600, 60, 30]
    assert cost["sampling_s"] == 6.0


@pytest.mark.asyncio(loop_scope="session")
async def test_what_rollouts_keep_is_what_their_rows_add_up_to(shown: Shown) -> None:
    turns: list[Any] = run_sql(
        shown.url,
        "SELECT rollout_id, prompt_token_ids, t.cached_tokens, sampled_tokens, training_logprobs, t.duration_s "
        "FROM turns t JOIN rollouts r ON r.id = rollout_pk",
    )
    stored: list[Any] = run_sql(
        shown.url,
        "SELECT rollout_id, num_prompt_tokens, num_cached_tokens, num_sampled_tokens, num_trained_tokens, sampling_s "
        "FROM rollouts",
    )
    assert len(stored) > 5
    for rollout_id, *kept in stored:
        mine = [turn[1:] for turn in turns if turn[0] == rollout_id]
        assert kept[:3] == [
            sum(len(one[0]) for one in mine),
            sum(one[1] for one in mine),
            sum(len(one[2]) for one in mine),
        ]
        assert (kept[3] or 0) == sum(len(one[3] or ()) for one in mine)
        assert kept[4] == pytest.approx(sum(one[4] for one in mine))
    cost = (await shown.json("/api/rollouts/cost", run_id="1"))["cost"]
    assert cost["sampled_tokens"] == sum(row[3] for row in stored)
    assert cost["gpu_s"] is None  # this run did not record its GPUs


async def test_a_rollout_has_its_device_from_the_lease_until_its_end_without_the_time_of_the_judge(url: str) -> None:
    now = time.time()
    group = group_of("a", EASY, [(1, 0, 1, 1.0)], [(1, 0, 1, 1.0)], [])
    judged, other, brief = (replace(one, started_at=now + 1000, duration_s=50.0) for one in group.rollouts)
    judged = replace(judged, judgement=make_judgement(is_reached=True))  # which took 1.5 s
    await record(url, *source_of("step", 1, (EASY, replace(group, rollouts=(judged, other, brief)))))

    rows: list[Any] = run_sql(
        url,
        "SELECT device_s, r.ended_at, e.started_at, sampling_s FROM rollouts r JOIN environments e "
        "ON rollout_pk = r.id ORDER BY member_index",
    )
    for (device_s, ended_at, leased_at, _), judged_s in zip(rows, (1.5, 0, 0), strict=True):
        assert (ended_at.timestamp(), now <= leased_at.timestamp() < now + 1000) == (pytest.approx(now + 1050), True)
        assert device_s == pytest.approx((ended_at - leased_at).total_seconds() - judged_s)
    assert [row[3] for row in rows] == [1, 1, 0]  # without a turn it used no model


async def test_stragglers_are_those_above_the_95th_percentile_of_their_step_and_the_last_to_end(
    monitor: Monitor,
) -> None:
    group = group_of("a", EASY, *([[(1, 0, 1, 1.0)]] * 40))
    small = group_of("c", HARD, *([[(1, 0, 1, 1.0)]] * 2))
    other = group_of("bb", HARD, *([[(1, 0, 1, 1.0)]] * 2))
    step = source_of("step", 1, (EASY, group), (HARD, small))
    await record(monitor.url, *step, trained(1), *source_of("eval", 1, (HARD, other)))
    # 1 to 40 s, and 1 and 2 s, all begun at once but the shortest, which end last; 95 % of 42 are below 37.95 s
    at = "timestamptz '2026-01-01'"
    run_sql(
        monitor.url,
        "UPDATE rollouts SET duration_s = member_index + 1, ended_at = "
        f"{at} + (CASE WHEN member_index = 0 THEN 90 ELSE member_index + 1 END) * interval '1 s'",
    )

    async def ids(**wanted: object) -> set[str]:
        found = await monitor.json("/api/rollouts", run_id="1", limit=200, **wanted)
        return {one["rollout_id"] for one in found["items"]}

    assert await ids(phase="step", stragglers=True) == {"a-37", "a-38", "a-39", "a-0", "c-0"}
    assert await ids(phase="step", group_id=small.group_id, stragglers=True) == {"c-0"}  # compared with the whole step
    assert await ids(phase="eval", stragglers=True) == {"bb-1", "bb-0"}  # the longer one, and the last to end
    everything = await ids()
    assert await ids(stragglers=False) == everything - await ids(stragglers=True)
    figures = await monitor.json("/api/rollouts/summary", run_id="1", step=1, phase="step", stragglers=True)
    assert figures["num_rollouts"] == 5
