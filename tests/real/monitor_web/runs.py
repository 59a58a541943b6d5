"""Runs of every kind as events, for pages that must tell them apart: resumed, dead, asynchronous, with much text."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import (
    BatchTaken,
    EvaluationEnded,
    Event,
    GroupEnded,
    Phase,
    RolloutSource,
    RolloutStarted,
    SourceStarted,
    StepTrained,
    TrainingEnded,
    TrainingStarted,
    TurnTaken,
)
from cua_rl.tasks.task import Task
from cua_rl.types.judgement import Validation
from cua_rl.types.rollout import ModelTurn, Rollout, RolloutGroup, StopReason, Turn
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN, make_group, make_task, step_end
from tests.real.monitor.events import with_images

WIFI = replace(
    make_task(), task_id="settings_wifi_on", instruction="Turn the wireless network on.", category="connections"
)
HELD_OUT = replace(make_task(), task_id="held_out_bluetooth", instruction="Pair the headphones over Bluetooth.")


async def add_run(url: str, *events: Event) -> str:
    """Record one attempt of a run that reports these events and then dies or ends; its id in the monitor."""
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in events:
            await recorder.record(event)
        await recorder.flush()
        return str(recorder.scope.training_id)


def begin(
    name: str, log_path: str = "", *, first_step: int = 1, total_steps: int = 4, **config: Any
) -> TrainingStarted:
    return TrainingStarted(
        run_name=name,
        log_path=log_path or f"/runs/{name}",
        config={"seed": 1} | config,
        first_step=first_step,
        total_steps=total_steps,
    )


def finished() -> TrainingEnded:
    return TrainingEnded(status="completed")


def group_of(name: str, task: Task = WIFI, *, seed: int = 0, has_fault: bool = False) -> RolloutGroup:
    """A group of three rollouts of a task, with images that a browser can show."""
    group = with_images(make_group(seed=seed, group_id=name))
    rollouts = tuple(replace(rollout, rollout_id=f"{name}-{rollout.rollout_id}") for rollout in group.rollouts)
    faulty = tuple(replace(rollout, rollout_id=f"{name}-{rollout.rollout_id}") for rollout in group.faulty)
    return replace(group, task_id=task.task_id, rollouts=rollouts, faulty=faulty if has_fault else ())


def begun(phase: Phase, step: int, task: Task = WIFI, *, version: int | None = None) -> SourceStarted:
    source = RolloutSource(phase=phase, step=step)
    trained = step - 1 if phase == "step" else step
    return SourceStarted(source=source, tasks=(task,), group_size=3, policy_version=version or trained)


def rollouts_of(phase: Phase, step: int, group: RolloutGroup, task: Task = WIFI) -> list[Event]:
    """The rollouts of a group with their turns; the group does not end yet."""
    source = RolloutSource(phase=phase, step=step)
    events: list[Event] = []
    for rollout in (*group.rollouts, *group.faulty):
        started = RolloutStarted(
            source=source,
            rollout_id=rollout.rollout_id,
            group_id=group.group_id,
            group_index=group.index,
            member_index=rollout.member_index,
            task=task,
            device_id=f"phone-{rollout.member_index}",
            max_turns=task.max_turns,
        )
        events += [started, *(TurnTaken(rollout_id=rollout.rollout_id, turn=turn) for turn in rollout.turns)]
    return events


def group_end(phase: Phase, step: int, group: RolloutGroup) -> GroupEnded:
    mean = sum(group.rewards) / max(1, len(group.rewards))
    advantages = tuple(reward - mean for reward in group.rewards) if phase == "step" else None
    return GroupEnded(source=RolloutSource(phase=phase, step=step), group=group, advantages=advantages)


def step(
    number: int, *, metrics: Mapping[str, float] | None = None, task: Task = WIFI, prefix: str = "step"
) -> list[Event]:
    """A trained step of one group."""
    group = group_of(f"{prefix}-{number}", task, seed=number)
    trained: StepTrained = step_end(group, number)
    return [
        begun("step", number, task),
        *rollouts_of("step", number, group, task),
        group_end("step", number, group),
        replace(trained, metrics=dict(metrics or {"reward/mean": 0.5})),
    ]


def evaluation(phase: Phase, number: int, task: Task = HELD_OUT, prefix: str = "held") -> list[Event]:
    """A completed evaluation of one group."""
    group = group_of(f"{prefix}-{phase}-{number}", task, seed=number + 100)
    return [
        begun(phase, number, task),
        *rollouts_of(phase, number, group, task),
        group_end(phase, number, group),
        EvaluationEnded(source=RolloutSource(phase=phase, step=number), metrics={}),
    ]


def asynchronous(num_steps: int) -> list[Event]:
    """Steps that begin before earlier ones are trained: the last one that may train a group begins first."""
    events: list[Event] = []
    for first in range(1, num_steps, 2):
        late, early = group_of(f"late-{first}", seed=first), group_of(f"early-{first}", seed=first + 1)
        for number, group in ((first + 1, late), (first, early)):
            events += [begun("step", number, version=first - 1), *rollouts_of("step", number, group)]
            events.append(group_end("step", number, group))
        for number, group in ((first, early), (first + 1, late)):
            events += [BatchTaken(step=number, group_ids=(group.group_id,)), step_end(group, number)]
    return events


def fall_silent(url: str, run_id: str, *, minutes: int) -> None:
    """Let the run's last sign of life be this long ago."""
    run_sql(url, f"UPDATE trainings SET heartbeat_at = now() - interval '{minutes} minutes' WHERE id = {int(run_id)}")


async def remove(window: Any, run_ids: Iterable[str]) -> None:
    """Leave the page and delete runs with all that belongs to them: the first page of the list has room for 50."""
    await window.page.goto("about:blank")  # a request for what is being deleted may fail in any way
    ids = ", ".join(str(int(run_id)) for run_id in run_ids)
    run_sql(window.site.database_url, f"DELETE FROM trainings WHERE id IN ({ids})")


def move_times(url: str, run_id: str, *, started_minutes: int, ended_minutes: int) -> None:
    """Let the run have begun and ended this long ago."""
    run_sql(
        url,
        f"UPDATE trainings SET started_at = now() - interval '{started_minutes} minutes',"
        f" ended_at = now() - interval '{ended_minutes} minutes' WHERE id = {int(run_id)}",
    )


def set_times(url: str, run_id: str, minutes_ago: Mapping[tuple[str, int], tuple[float, float]]) -> None:
    """Let steps and evaluations have begun and ended so many minutes ago; as events, they are all of one moment."""
    for (phase, number), (began, ended) in minutes_ago.items():
        table, of_phase = ("steps", "") if phase == "step" else ("evals", f" AND phase = '{phase}'")
        times = f"started_at = now() - interval '{began} minutes', ended_at = now() - interval '{ended} minutes'"
        run_sql(url, f"UPDATE {table} SET {times} WHERE training_id = {int(run_id)} AND step = {number}{of_phase}")


def with_long_texts(rollout: Rollout, *, num_messages: int) -> Rollout:
    """The rollout with a request of many long messages, long thoughts and a long fault."""
    paragraph = "The page lists every order of the last year with its customer, price and state of delivery. " * 12
    messages = [{"role": "user", "content": f"{number}: {paragraph}"} for number in range(num_messages)]

    def lengthen(turn: Turn) -> Turn:
        model: ModelTurn = replace(turn.model, request={"input": messages}, text=f"<think>{paragraph * 8}</think> done")
        return replace(turn, model=model)

    checked = None if rollout.validation is None else replace(rollout.validation, actual=paragraph * 4)
    return replace(rollout, turns=tuple(map(lengthen, rollout.turns)), validation=checked)


def lost(rollout: Rollout, error: str) -> Rollout:
    """The rollout as a fault of the device ended it."""
    checked: Validation | None = None
    return replace(rollout, reward=None, validation=checked, stop_reason=StopReason.DEVICE_ERROR, error=error)
