"""What a run's figures count: finished steps, evaluations apart from training, failures by what really went wrong."""

from dataclasses import replace
from math import nan
from typing import Any

import pytest

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.evaluation.statistics import sum_tasks
from cua_rl.events import (
    EvaluationEnded,
    Event,
    GroupEnded,
    Phase,
    RolloutSource,
    RolloutStarted,
    SourceStarted,
    StepTrained,
)
from cua_rl.tasks.task import Task
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import Reward, Rollout, RolloutGroup, StopReason
from tests.fakes import make_task
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, start
from tests.real.monitor.conftest import Monitor

RUN = "/api/runs/1"
EASY = make_task("open", seed=1)
HARD = replace(make_task("order", seed=1), category="shop", difficulty="hard")


def outcome(rollout: Rollout, success: bool, stop_reason: StopReason = StopReason.FINISHED) -> Rollout:
    checked = Validation(query="state", expected="1", actual=str(int(success)), success=success)
    return replace(rollout, validation=checked, reward=Reward(total=float(success), parts={}), stop_reason=stop_reason)


def group_of(source: RolloutSource, index: int, task: Task, *successes: bool, last: StopReason) -> RolloutGroup:
    """A group whose last member was ended by `last`."""
    name = f"{source.phase}-{source.step}-{index}"
    made = make_group(seed=10 * source.step + index, group_id=name, num_rollouts=len(successes))
    reasons = [*[StopReason.FINISHED] * (len(successes) - 1), last][: len(successes)]
    members = tuple(
        replace(outcome(rollout, success, reason), rollout_id=f"{name}-{place}", task_id=task.task_id)
        for place, (rollout, success, reason) in enumerate(zip(made.rollouts, successes, reasons, strict=True))
    )
    return replace(made, index=index, task_id=task.task_id, seed=task.seed, rollouts=members, faulty=())


def source_of(
    phase: Phase, step: int, *groups: tuple[Task, tuple[bool, ...]], last: StopReason = StopReason.FINISHED
) -> list[Event]:
    """A step or evaluation up to the end of these groups; one more group of it has not ended."""
    source = RolloutSource(phase=phase, step=step)
    tasks = (*(task for task, _ in groups), EASY)
    events: list[Event] = [SourceStarted(source=source, tasks=tasks, group_size=2, policy_version=max(0, step - 1))]
    for index, (task, successes) in enumerate(groups):
        group = group_of(source, index, task, *successes, last=last)
        events += [
            RolloutStarted(
                source=source,
                rollout_id=rollout.rollout_id,
                group_id=group.group_id,
                group_index=index,
                member_index=rollout.member_index,
                task=task,
                device_id="phone",
                max_turns=9,
            )
            for rollout in group.rollouts
        ]
        advantages = (0.0,) * len(successes) if phase == "step" else None
        events.append(GroupEnded(source=source, group=group, advantages=advantages))
    if phase != "step":
        events.append(EvaluationEnded(source=source, metrics={}))
    return events


def trained(step: int) -> StepTrained:
    return StepTrained(
        step=step,
        policy_version=step,
        datums_sha256="",
        num_datums=0,
        training_logprobs={},
        metrics={"reward/mean": 0.5},
    )


async def record(monitor: Monitor, *events: Event) -> None:
    async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in (start(), *events):
            await recorder.record(event)


async def test_the_last_quarter_of_a_task_is_the_set_to_which_its_number_leads(monitor: Monitor) -> None:
    events = [one for step in (1, 2, 3) for one in (*source_of("step", step, (EASY, (True, False))), trained(step))]
    await record(monitor, *events, *source_of("step", 4, (EASY, (False, False))))  # which goes on

    (task,) = await monitor.json(f"{RUN}/tasks")
    first = int(0.75 * (await monitor.json(RUN))["num_completed_steps"]) + 1
    wanted = {"run_id": 1, "phase": "step", "min_step": first, "status": "completed"}
    assert (await monitor.json("/api/rollouts/summary", **wanted))["success"]["num_rollouts"] == 4
    assert (task["recent"]["num_successes"], task["recent"]["num_rollouts"]) == (1, 4)


async def test_a_step_under_way_is_shown_apart_from_the_finished_ones(monitor: Monitor) -> None:
    first = source_of("step", 1, (EASY, (True, True)), (HARD, (True, False)))  # 3 of 4
    running = source_of("step", 2, (EASY, (False, False)))  # the short rollouts, which failed

    await record(monitor, *first, trained(1), *running)

    (run,) = (await monitor.json("/api/runs"))["items"]
    assert (run["success_rate"], run["reward_mean"], run["success_step"]) == (0.75, 0.75, 1)
    assert run["sparkline"] == [0.75]
    under_way = run["running_step"]
    assert (under_way["step"], under_way["num_ended_groups"], under_way["num_groups"]) == (2, 1, 2)
    assert (under_way["success"]["num_successes"], under_way["success"]["num_rollouts"]) == (0, 2)
    assert [point["step"] for point in (await monitor.json(f"{RUN}/metrics"))["success"]] == [1]


def _sampled(step: int) -> dict[str, float]:
    return {"reward/mean": 0.5, "rollout/sampled_tokens": nan if step == 5 else step}


async def test_a_thinned_series_says_how_many_steps_there_are(monitor: Monitor) -> None:
    steps = [
        event
        for step in range(1, 8)
        for event in (*source_of("step", step, (EASY, (True, False))), replace(trained(step), metrics=_sampled(step)))
    ]
    await record(monitor, *steps)

    series = await monitor.json(f"{RUN}/metrics", max_points=3)

    assert (series["steps"], series["num_steps"]) == ([1, 4, 7], 7)  # every third, the newest among them
    assert series["series"]["reward/mean"] == [0.5] * 3
    assert series["tokens"] == [
        1,
        10,
        23,
    ]  # 1, 1 + 2 + 3 + 4, and what is known of 5, 6 and 7: those that are not drawn count
    late = await monitor.json(f"{RUN}/metrics", from_step=6)
    assert (late["steps"], late["tokens"]) == ([6, 7], [16, 23])


async def test_a_run_that_was_resumed_with_other_tasks_is_compared_with_its_new_baseline(monitor: Monitor) -> None:
    before = [*source_of("baseline", 0, (EASY, (True, True))), *source_of("eval", 2, (EASY, (True, False)))]
    again = source_of("baseline", 2, (EASY, (False, False)))

    await record(monitor, *before, *again)
    (run,) = (await monitor.json("/api/runs"))["items"]
    assert (run["baseline"]["rate"], run["baseline_step"], run["last_eval"]) == (0.0, 2, None)  # not that of step 0

    await record(monitor, *before, *again, *source_of("eval", 4, (EASY, (True, True))))
    (run,) = (await monitor.json("/api/runs"))["items"]
    assert (run["baseline"]["rate"], run["last_eval"]["rate"], run["last_eval_step"]) == (0.0, 1.0, 4)


async def test_a_step_of_another_system_is_finished_when_the_next_one_begins(monitor: Monitor) -> None:
    async def send(**items: Any) -> dict[str, Any]:
        answer = await monitor.project.post("/api/ingest/batch", json=items)
        assert answer.status_code == 200, answer.text
        return answer.json()

    training = (await send(training={"run_name": "theirs", "status": "running"}))["training_id"]
    for step in (0, 1):
        sent = {"client_id": f"step-{step}", "training_id": training, "step": step, "status": "running"}
        step_id = (await send(steps=[sent]))["steps"][0]["id"]
        env_id = (await send(environments=[{"client_id": f"env-{step}"}]))["environments"][0]["id"]
        rollout = {"client_id": f"r-{step}", "rollout_id": f"r-{step}", "source_type": "step", "step_id": step_id}
        rollout |= {"env_id": env_id, "status": "completed", "reward": 1.0 - step, "task_success": not step}
        await send(rollouts=[rollout | {"group_num": 0, "env_index": 0}])

    run = await monitor.json(f"/api/runs/{training}")
    assert (run["success_rate"], run["success_step"]) == (1.0, 0)  # the sender's own number
    assert run["running_step"]["step"] == 1
    assert [point["step"] for point in (await monitor.json(f"/api/runs/{training}/metrics"))["success"]] == [0]

    await send(training={"run_name": "theirs", "training_id": training, "status": "completed"})
    run = await monitor.json(f"/api/runs/{training}")
    assert (run["success_rate"], run["success_step"], run["running_step"]) == (0.0, 1, None)


async def test_failures_are_told_by_their_cause_and_evaluations_apart(monitor: Monitor) -> None:
    await record(
        monitor,
        *source_of("baseline", 0, (HARD, (False,))),
        *source_of("step", 1, (EASY, (True, False)), (HARD, (False, True)), last=StopReason.MAX_TURNS),
        trained(1),
        *source_of("eval", 1, (HARD, (False,)), (EASY, (True,)), last=StopReason.CONTEXT_OVERFLOW),
    )

    steps = (await monitor.json("/api/rollouts/summary", run_id="1"))["steps"]
    figures = [[one[name] for name in ("phase", "step", "num_rollouts", "num_successes", "causes")] for one in steps]
    assert figures == [
        # the second member of each group used up its turns: once without success, once with it, which is no failure
        ["step", 1, 4, 2, {"max_turns": 1, "wrong_final_state": 1}],
        ["baseline", 0, 1, 0, {"wrong_final_state": 1}],
        ["eval", 1, 2, 1, {"context_overflow": 1}],
    ]


async def test_evaluations_have_categories_and_difficulties_apart_and_lead_on_from_the_baseline(
    monitor: Monitor,
) -> None:
    await record(
        monitor,
        *source_of("baseline", 0, (EASY, (False,)), (HARD, (False,))),
        *source_of("step", 1, (EASY, (True, True))),
        trained(1),
        *source_of("eval", 1, (EASY, (True,)), (HARD, (False,))),
    )

    baseline, after = await monitor.json(f"{RUN}/evaluations")
    assert {name: rate["rate"] for name, rate in after["by_category"].items()} == {"app": 1.0, "shop": 0.0}
    assert {name: rate["rate"] for name, rate in after["by_difficulty"].items()} == {"easy": 1.0, "hard": 0.0}
    assert baseline["by_category"]["app"] == {**after["by_category"]["shop"]}  # none of one
    first, second = await monitor.json(f"{RUN}/baseline/0"), await monitor.json(f"{RUN}/eval/1")
    assert (first["previous"], first["next"]) == (None, {"phase": "eval", "step": 1})
    assert (second["previous"], second["next"]) == ({"phase": "baseline", "step": 0}, None)
    step = await monitor.json(f"{RUN}/step/1")
    assert (step["previous"], step["next"]) == (None, None)


async def test_a_task_s_figures_keep_training_baseline_and_evaluation_apart(monitor: Monitor) -> None:
    await record(
        monitor,
        *source_of("baseline", 0, (HARD, (False,)), (EASY, (False,))),
        *source_of("step", 1, (EASY, (True, False))),
        trained(1),
        *source_of("eval", 1, (HARD, (True,)), (EASY, (True,))),
    )

    held_out = await monitor.json(f"{RUN}/tasks/{HARD.task_id}")
    assert held_out["training"]["num_rollouts"] == 0
    assert (held_out["baseline"]["rate"], held_out["last_eval"]["rate"], held_out["last_eval_step"]) == (0.0, 1.0, 1)
    assert held_out["examined"] == {"phase": "eval", "step": 1}
    assert [instance["success"]["num_rollouts"] for instance in held_out["instances"]] == [1]
    assert held_out["stop_reasons"] == held_out["failed_checks"] == []
    both = await monitor.json(f"{RUN}/tasks/{EASY.task_id}")
    assert (both["training"]["num_successes"], both["training"]["num_rollouts"]) == (1, 2)
    assert both["examined"] is None
    assert both["stop_reasons"] == [{"name": "wrong_final_state", "count": 1}]
    for task in await monitor.json(f"{RUN}/tasks"):
        wanted = {"run_id": 1, "task_id": task["task_id"], "status": "completed", **task["held_out_in"]}
        rate = (await monitor.json("/api/rollouts/summary", **wanted))["success"]
        assert (rate["num_successes"], rate["num_rollouts"]) == (1, 1)  # without the baseline
        assert task["held_out"]["num_rollouts"] == 1


async def test_the_rollouts_of_a_run_are_those_of_the_set_to_which_their_number_leads(monitor: Monitor) -> None:
    running = source_of("step", 2, (EASY, (False, False)))
    await record(monitor, *source_of("step", 1, (EASY, (True, False))), trained(1), *running[:-1])  # 2 go on
    found = await monitor.json("/api/rollouts/summary", run_id=1)
    assert (await monitor.json(RUN))["num_rollouts"] == found["num_rollouts"] == 4


async def test_every_success_shown_counts_groups_alike_and_has_the_clustered_interval(monitor: Monitor) -> None:
    easy = [replace(EASY, seed=seed) for seed in (1, 2, 3)]
    won = ((True,) * 4, (True,) * 4, (True, True, False, False), (False,))  # faults took three of the last
    groups = list(zip((*easy, HARD), won, strict=True))
    await record(
        monitor,
        *source_of("baseline", 0, *groups),
        *source_of("step", 1, *groups, (easy[0], ())),  # all of the last
        trained(1),
        *source_of("eval", 1, *groups),
    )

    def shows(rate: Any, *tasks: tuple[bool, ...]) -> bool:
        sums = sum_tasks((sum(task), len(task)) for task in tasks)
        numbers = [sums.rate, *sums.interval, sums.num_independent, sums.num_lost, sums.num_successes]
        names = ("rate", "low", "high", "num_independent", "num_lost_tasks", "num_successes")
        return [rate[name] for name in names] == pytest.approx(numbers)

    (run,) = (await monitor.json("/api/runs"))["items"]
    assert run["success_rate"] == run["reward_mean"] == 2.5 / 4  # not 10 of 13
    series, evaluations = await monitor.json(f"{RUN}/metrics"), await monitor.json(f"{RUN}/evaluations")
    (point,), timeline = series["success"], await monitor.json(f"{RUN}/timeline")
    step, evaluation = await monitor.json(f"{RUN}/step/1"), await monitor.json(f"{RUN}/eval/1")
    assert all(shows(rate, *won, ()) for rate in (point, timeline[1]["success"], step["success"]))
    seen = [run["baseline"], run["last_eval"], *series["evaluations"], timeline[0]["success"], evaluation["success"]]
    assert all(shows(rate, *won) for rate in (*seen, *(one["success"] for one in evaluations)))
    assert shows(evaluations[1]["by_category"]["app"], *won[:3])
    # of a task, the instances; the only instance of another, by its attempts, which are independent
    page, (order, open_task) = await monitor.json(f"{RUN}/tasks/open"), await monitor.json(f"{RUN}/tasks")
    assert all(shows(rate, *won[:3]) for rate in (page["training"], page["last_eval"], open_task["success"]))
    assert all(shows(rate, (False,)) for rate in (order["success"], order["recent"], order["held_out"]))
    assert shows(page["instances"][0]["success"], (True,), (True,), (False,), (False,))


async def test_ids_in_messages_do_not_split_a_fault(monitor: Monitor) -> None:
    await record(monitor, *source_of("step", 1, (EASY, (True, True, False))), trained(1))
    messages = (
        "container 3fa9c1d07b2e gone after 12 s at 0x7f8a",
        "container 9b2e77aa01cd gone after 7 s at 0x11ff",
        "session 6ba7b810-9dad-11d1-80b4-00c04fd430c8 defaced the added feedback",
    )
    for place, text in enumerate(messages):
        run_sql(monitor.url, f"UPDATE rollouts SET status = 'failed', error = '{text}' WHERE member_index = {place}")

    found = await monitor.json("/api/rollouts/summary", run_id="1")
    assert [(one["name"], one["count"]) for one in found["faults"]] == [
        ("container # gone after # s at #", 2),
        ("session # defaced the added feedback", 1),
    ]
    assert (found["num_faults"], found["verdicts"]) == (2, [{"name": "fault", "count": 3}])
    assert found["success"]["num_rollouts"] == 0
    alike = await monitor.json("/api/rollouts", run_id="1", fault="container # gone after # s at #")
    assert len(alike["items"]) == 2


async def test_a_resumed_run_starts_without_a_step_under_way_and_at_its_own_pace(monitor: Monitor) -> None:
    kept = source_of("step", 2, (EASY, (True, False)))
    await record(monitor, *source_of("step", 1, (EASY, (True, True))), trained(1), *kept)
    run_sql(monitor.url, "UPDATE status_history SET changed_at = changed_at - interval '1 hour'")
    run_sql(monitor.url, "UPDATE rollouts SET started_at = started_at - interval '1 hour'")
    run_sql(
        monitor.url,
        "UPDATE steps SET started_at = started_at - interval '1 hour', ended_at = ended_at - interval '50 minutes'",
    )
    again = replace(start(), first_step=2, kept_group_ids=("step-2-0",))
    async with DatabaseRecorder(monitor.url, image_token_id=IMAGE_TOKEN) as recorder:
        await recorder.record(again)
        await recorder.flush()
        run = await monitor.json(RUN)
        # 10 minutes of step 1 and an hour without the run are not this attempt's pace
        assert (run["running_step"], run["step_time_s"], run["eta_s"]) == (None, None, None)
        for event in source_of("step", 3, (EASY, (True, False))):
            await recorder.record(event)
        await recorder.flush()
        assert (await monitor.json(RUN))["running_step"]["step"] == 2
        await recorder.record(trained(2))
        await recorder.flush()
        run = await monitor.json(RUN)
        assert 0 < run["step_time_s"] < 60
