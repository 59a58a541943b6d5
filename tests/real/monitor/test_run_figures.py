"""What a run's figures count: finished steps, evaluations apart from training, failures by what really went wrong."""

from dataclasses import replace
from typing import Any

from cua_rl.database.recorder import DatabaseRecorder
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
from cua_rl.judgement import Validation
from cua_rl.tasks.task import Task
from cua_rl.types import Reward, Rollout, RolloutGroup, StopReason
from tests.fakes import make_task
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
    reasons = [StopReason.FINISHED] * (len(successes) - 1) + [last]
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

    failures = await monitor.json(f"{RUN}/failures")
    # the second member of each group used up its turns: once without success, once with it, which is no failure
    assert failures["training"] == {
        "steps": [1],
        "num_rollouts": [4],
        "num_successes": [2],
        "kinds": {"max_turns": [1], "wrong_final_state": [1]},
        "turn_failures": failures["training"]["turn_failures"],
    }
    assert failures["evaluations"]["steps"] == [0, 1]
    assert failures["evaluations"]["num_rollouts"] == [1, 2]
    assert failures["evaluations"]["kinds"] == {"context_overflow": [0, 1], "wrong_final_state": [1, 0]}


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
