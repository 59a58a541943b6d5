"""Takes over a recorded rollout: repeats its actions up to a turn, then a person or another checkpoint goes on.

What comes out is a rollout whose first turns are those of the recorded one, as a branch has those of its parent: they
are read, and not learned from. It is recorded as a training step of its own in a run of its own, the demonstrations,
so that it is in no statistics of the run that was taken over.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from uuid import uuid4

import chz

from cua_rl.agent.action_format import ToolCalls, reach
from cua_rl.agent.device_step import cursor_after
from cua_rl.command_line.fields import setting
from cua_rl.command_line.plain_config import stored_setting
from cua_rl.database.queries import find_training, load_steps
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import find_database, open_sessions
from cua_rl.events import GroupEnded, Recorder, RolloutSource, SourceStarted, StepTrained, TrainingStarted
from cua_rl.judge.config import JudgeConfig
from cua_rl.renderers.renderer import Renderer
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rollout.branches import Fork
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.run.asking import AskedRun, Recorded, conversation_of
from cua_rl.run.by_hand import Lines, Person
from cua_rl.run.devices import PreparedDevices, open_devices, prepare_devices
from cua_rl.run.judge import prepare_judge
from cua_rl.run.prepared_training import load_task_sets
from cua_rl.run.recording import recorded, start_database
from cua_rl.run.resolve import moving_top
from cua_rl.run.rollouts import make_format, open_runners
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.earlier_attempt import CHANGED, EarlierAttempt
from cua_rl.run_folder.log_directory import LogDirectory, load_settings, prepare_log_directory
from cua_rl.run_folder.model_folder import find_max_model_len, make_image_renderer
from cua_rl.run_folder.recorded_run import TAKEN_OVER, RecordedTraining
from cua_rl.sampling.sampler import Sampler
from cua_rl.tasks.task import Task, Template
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import mapping, sequence
from cua_rl.types.rollout import AdapterRef, Rollout, RolloutGroup, Turn

_SAME = ("renderer", "server.max_pixels")
"""Settings of the runs whose rollouts are taken over: demonstrations that are learned from together have the same."""


@chz.chz
class ContinuedRun(AskedRun):
    """A recorded run whose rollouts others continue, and the folder that records the continuations."""

    max_turns: int | None = setting(
        None, "maximum turns, including repeated ones; None is as many as the rollout was allowed", at_least=1
    )
    demonstrations: Path | None = setting(
        None, "folder of demonstrations, to which these rollouts are added; None is <log_path>-demonstrations"
    )

    @property
    def folder(self) -> Path:
        """Of the demonstrations."""
        return (self.demonstrations or Path(f"{self.log_path}-demonstrations")).expanduser().absolute()


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTakeover:
    """A recorded rollout, the place of the turn from which it goes on, and what it needs to be run."""

    recorded: Recorded
    place: int
    config: CLIConfig
    """Of the run that recorded it."""
    task: Task
    templates: Sequence[Template]
    """Of all tasks of the run."""
    devices: PreparedDevices
    judge: JudgeConfig | None
    renderer: Renderer
    max_model_len: int
    folder: Path
    """Of the demonstrations."""

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.recorded.rollout.turns

    @property
    def instruction(self) -> str:
        """What the recorded agent was told; only a device may have it."""
        items = map(mapping, sequence(self.turns[0].model.request["input"]))
        parts = next(map(mapping, sequence(item["content"])) for item in items if item.get("role") == "user")
        return "\n".join(str(part["text"]) for part in parts if part.get("type") == "input_text")

    def job(self, step: int, adapter: AdapterRef | None) -> RolloutJob:
        """The rollout that goes on from the turn."""
        parent = self.recorded.rollout.rollout_id if self.place else None
        turns, arrival = self.turns[: self.place], self.turns[self.place]
        return RolloutJob(
            source=RolloutSource(phase="step", step=step),
            group_id=uuid4().hex,
            group_index=0,
            member_index=0,
            task=self.task,
            params=self.recorded.params,
            adapter=adapter,
            fork=Fork(parent_id=parent, turns=turns, arrival=arrival, moving_top=moving_top(self.config)),
        )


async def prepare_takeover(
    run: RecordedTraining,
    recorded: Recorded,
    *,
    turn: int,
    max_turns: int | None,
    base: Path,
    folder: Path,
    environ: Mapping[str, str],
) -> PreparedTakeover:
    """Find the task and its devices by the run's settings; raises `ConfigError` if a rollout cannot be taken over."""
    (place,) = recorded.places(turn)
    attempt = EarlierAttempt(path=run.folder, settings=recorded.settings, changed=(), checkpoint=None, last_step=0)
    config = attempt.complete(CLIConfig())
    kinds = {"agent.name": config.agent.name, "devices.coordinate_mode": config.devices.coordinate_mode}
    if tuple(kinds.values()) != ("gbox", "direct"):
        raise ConfigError(
            f"log_path: expected a run of the built-in agent that gives coordinates itself, got {kinds}; repeated "
            "actions of other agents cannot be compared with the recorded ones"
        )
    devices = prepare_devices(config, folder, environ)
    train, held_out = load_task_sets(config, devices)
    templates = (*train.templates, *(() if held_out is None else held_out.templates))
    task = find_task(templates, recorded.rollout, max_turns, config.max_turns)
    if task.max_turns <= place:
        raise ConfigError(
            f"max_turns: expected more than the {place} turns before turn {turn}, got {task.max_turns}; raise it"
        )
    return PreparedTakeover(
        recorded=recorded,
        place=place,
        config=attempt.complete(CLIConfig(max_turns=task.max_turns, max_concurrent_rollouts=1)),
        task=task,
        templates=templates,
        devices=devices,
        judge=await prepare_judge(config, train, held_out, log_dir=config.log_dir),
        renderer=make_image_renderer(base, config.renderer_name, config.server.max_pixels),
        max_model_len=find_max_model_len(base, config.server.max_model_len, max_tokens=config.max_tokens),
        folder=folder,
    )


def find_task(templates: Sequence[Template], wanted: Rollout, max_turns: int | None, limit: int) -> Task:
    """The task of a rollout, with `max_turns`, or as many turns as it was allowed; raises `ConfigError` if it is gone.

    `limit` is the run's, for rollouts of which it is not on record.
    """
    task = next((one.make_task(wanted.seed) for one in templates if one.task_id == wanted.task_id), None)
    if task is None:
        raise ConfigError(
            f"rollout_id: expected a rollout of a task that the run's sources still have, got {wanted.task_id!r}; put "
            "the task back, or choose another rollout"
        )
    return replace(task, max_turns=max_turns or wanted.max_turns or task.turns_within(limit))


def make_person(prepared: PreparedTakeover, lines: Lines) -> Person:
    """A person at the terminal; raises `ConfigError` if the recorded agent's answers are no calls of a tool."""
    name, renderer = prepared.config.agent.action_format, prepared.renderer
    action_format = make_format(name, renderer.image_settings)
    if not isinstance(action_format, ToolCalls):
        raise ConfigError(
            f"by: expected a checkpoint to go on, because answers of action_format={name} are not tool calls, got a "
            "person; name a checkpoint"
        )
    (tool,) = conversation_of(prepared.turns[0].model.request).tools
    earlier = [action for turn in prepared.turns[: prepared.place] for action in turn.agent.actions]
    return Person(
        renderer=renderer,
        tool=tool,
        reach=lambda seen: reach(seen, action_format.pixels_of),
        cursor=next(filter(None, map(cursor_after, reversed(earlier))), None),
        turn=prepared.place,
        screen_path=prepared.folder / "screen.png",
        lines=lines,
        echo=partial(print, flush=True),
        max_model_len=prepared.max_model_len,
    )


async def take_over(
    run: RecordedTraining,
    prepared: PreparedTakeover,
    sampler: Sampler,
    adapter: AdapterRef | None,
    environ: Mapping[str, str],
) -> Rollout:
    """Run and record it; an infrastructure fault, such as a screen that is not as recorded, ends it without a reward.

    Raises `ConfigError` if the folder holds something other than demonstrations for the same model.
    """
    async with open_demonstrations(run, prepared, sampler, adapter, environ, tasks=(prepared.task,)) as demonstrations:
        group = await demonstrations.add([prepared.job(demonstrations.step, adapter)])
    return (*group.rollouts, *group.faulty)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstrations:
    """A run of rollouts that were taken over, open for those of one more step."""

    step: int
    runner: RolloutRunner
    recorder: Recorder

    async def add(self, jobs: Sequence[RolloutJob], otherwise: Task | None = None) -> RolloutGroup:
        """Run rollouts that go on from one turn side by side, and record them as a group of the step.

        If none of them succeeds, the step has one more group, of the task `otherwise`.
        """
        rollouts = await asyncio.gather(*map(self.runner.run, jobs))
        group = RolloutGroup(
            group_id=jobs[0].group_id,
            index=jobs[0].group_index,
            task_id=jobs[0].task.task_id,
            seed=jobs[0].task.seed,
            rollouts=tuple(one for one in rollouts if one.reward is not None),
            faulty=tuple(one for one in rollouts if one.reward is None),
            category=jobs[0].task.category,
        )
        following = None if any(one.success for one in rollouts) else otherwise
        await self.recorder.record(
            GroupEnded(source=jobs[0].source, group=group, advantages=None, replaced_by=following)
        )
        return group


@asynccontextmanager
async def open_demonstrations(
    run: RecordedTraining,
    prepared: PreparedTakeover,
    sampler: Sampler,
    adapter: AdapterRef | None,
    environ: Mapping[str, str],
    *,
    tasks: Sequence[Task],
    group_size: int = 1,
) -> AsyncGenerator[Demonstrations]:
    """The run in the folder of the demonstrations, and what its rollouts need, of which the configuration says how many
    there are at a time. `tasks` are those of the step's groups.

    Raises `ConfigError` if the folder holds something other than demonstrations for the same model.
    """
    _require_demonstrations(prepared)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(prepare_log_directory(prepared.folder, "resume"))
        url = await start_database(stack, await find_database(environ), folder.path)
        # the other run's, without what would let `recipes.train` resume the demonstrations
        of_run = prepared.recorded.settings.items()
        settings = {name: value for name, value in of_run if name not in (CHANGED, "groups_per_batch")}
        settings |= {"run_name": folder.path.name, "log_path": str(folder.path), TAKEN_OVER: str(run.folder.absolute())}
        folder.write_config(settings)
        step = await _count_steps(url, folder) + 1
        started = TrainingStarted(
            run_name=folder.path.name, log_path=str(folder.path), config=settings, first_step=step, total_steps=step
        )
        recorder = await stack.enter_async_context(DatabaseRecorder(url, image_token_id=run.image_token_id))
        await stack.enter_async_context(recorded(recorder, started))
        source, version = RolloutSource(phase="step", step=step), 0 if adapter is None else adapter.policy_version
        await recorder.record(
            SourceStarted(source=source, tasks=tuple(tasks), group_size=group_size, policy_version=version)
        )
        config = prepared.config
        devices = await stack.enter_async_context(
            open_devices(prepared.devices, max_devices=config.max_concurrent_rollouts)
        )
        make_runner = await stack.enter_async_context(
            open_runners(
                config,
                devices,
                sampler,
                prepared.renderer,
                prepared.judge,
                reward=load_reward(config.reward, config.reward_clip, config.credit.milestone_reward),
                log_folder=folder.path / "logs",
                recorder=recorder,
            )
        )
        yield Demonstrations(step=step, runner=make_runner(), recorder=recorder)
        trained = StepTrained(
            step=step, policy_version=version, datums_sha256="", num_datums=0, training_logprobs={}, metrics={}
        )
        await recorder.record(trained)


def _require_demonstrations(prepared: PreparedTakeover) -> None:
    folder, settings = prepared.folder, prepared.recorded.settings
    if not (folder / "config.json").is_file():
        return
    before = load_settings(folder, "demonstrations")
    if TAKEN_OVER not in before:
        raise ConfigError(
            f"demonstrations: expected a folder of rollouts that were taken over, or a new one, got {str(folder)!r} "
            "with another run; choose another"
        )
    for name in _SAME:
        was, now = stored_setting(before, name), stored_setting(settings, name)
        if was != now:
            raise ConfigError(
                f"demonstrations: expected those of runs with the same {name}, {was!r} in {str(folder)!r}, got "
                f"{now!r}; choose another folder"
            )


async def _count_steps(url: str, folder: LogDirectory) -> int:
    """Rollouts taken over so far; one that was interrupted does not count."""
    async with open_sessions(url) as sessions, sessions() as session:
        training = await find_training(session, folder.path.name, str(folder.path))
        steps = [] if training is None else await load_steps(session, training.id)
    return max((step.step for step in steps if step.trained_policy_version is not None), default=0)
