"""The state that a resumed run continues from, according to its checkpoint, folder and database."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from cua_rl.command_line.plain_config import plain_config, stored_setting
from cua_rl.database.progress import Progress, load_progress
from cua_rl.database.queries import find_training, latest_trainings, rename_training
from cua_rl.database.rebuild import load_rollouts
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import open_sessions
from cua_rl.errors import ConfigError
from cua_rl.policy import AdapterRef
from cua_rl.rl.advantages import score_group
from cua_rl.rl.async_loop import AsyncStart
from cua_rl.rl.curriculum import (
    Memory,
    ReplayBuffer,
    SuccessRates,
    load_outcomes,
    newest_success_ids,
)
from cua_rl.rl.group_buffer import WaitingGroup, fitting
from cua_rl.rl.stages import WantedEvaluation
from cua_rl.run.log_directory import LogDirectory, load_settings
from cua_rl.run.training_config import CLIConfig
from cua_rl.types import Rollout

OUTCOMES_NAME = "outcomes.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """State left by an earlier attempt; empty for a new run."""

    start: AsyncStart = field(default_factory=AsyncStart)
    owed_evaluations: tuple[WantedEvaluation, ...] = ()

    @property
    def kept_group_ids(self) -> tuple[str, ...]:
        return tuple(waiting.scored.group.group_id for waiting in self.start.kept_groups)


def require_same_policy(config: CLIConfig, folder: LogDirectory) -> None:
    """Raise `ConfigError` for settings with which the weights of the run's checkpoints would be another policy."""
    if not folder.config_path.is_file():
        return
    before = load_settings(folder.path, "log_path")
    if before and "groups_per_batch" not in before:
        raise ConfigError(
            f"log_path: expected a run of recipes.train to resume, got one of another recipe in {str(folder.path)!r}; "
            "choose another log_path"
        )
    if not folder.checkpoints():
        return
    now = plain_config(config)
    for name in ("model_name", "lora_rank", "trainer.lora_alpha", "trainer.lora_modules"):
        was, wanted = stored_setting(before, name), stored_setting(now, name)
        if name == "model_name":  # its folder may have moved
            was, wanted = (path and Path(path).name for path in (was, wanted))
        if was != wanted and (was is not None or name == "model_name"):  # earlier versions had fewer settings
            raise ConfigError(
                f"{name}: expected {was!r} as when the run in {str(folder.path)!r} began, got {wanted!r}; go on with "
                "the same, or choose another log_path"
            )


async def load_resumed(config: CLIConfig, folder: LogDirectory, run_name: str, num_done: int, url: str) -> Resumed:
    """Load the groups and evaluations that a run resumed after `num_done` steps can reuse, and delete the others."""
    if num_done == 0:
        folder.remove_strays(0)
        return Resumed()

    async with open_sessions(url) as sessions, sessions() as session:
        training = await find_training(session, run_name, str(folder.path))
        if training is None:
            folder.remove_strays(num_done)
            return Resumed()
        progress = await load_progress(session, training.training_id, num_done)
    owed = _owed_evaluations(config, folder, progress, num_done)
    folder.remove_strays(num_done, keep=[wanted.step for wanted in owed])
    return Resumed(start=plan_start(config, progress, num_done), owed_evaluations=owed)


async def follow_move(folder: LogDirectory, run_name: str, url: str) -> None:
    """After a folder has been moved, rename the run in its embedded database accordingly."""
    async with open_sessions(url) as sessions, sessions.begin() as session:
        if await find_training(session, run_name, str(folder.path)) is None:
            for training in await latest_trainings(session, limit=1):
                await rename_training(session, training.training_id, run_name, str(folder.path))


def plan_start(config: CLIConfig, progress: Progress, num_done: int) -> AsyncStart:
    """The groups that asynchronous training keeps. Repeated indices come from synchronous steps, which leave none."""
    done = frozenset(progress.done_indices)
    if len(done) < len(progress.done_indices) or not config.max_steps_off_policy:
        in_order = frozenset(range(num_done * config.groups_per_batch))
        return AsyncStart(done_ordinals=in_order | done, newest_steps=progress.newest_steps)
    # the database does not say whether a group lost too many members to faults: that follows from how it ended
    candidates = [
        WaitingGroup(
            scored=score_group(
                replace(untrained.group, is_incomplete=len(untrained.group.rollouts) < config.sampling.min_group_size),
                config.advantages,
            ),
            last_step=min(untrained.last_step, config.max_steps),
        )
        for untrained in progress.untrained
        if _is_fresh_enough(config, progress, untrained.group.compared, untrained.last_step)
    ]
    kept = fitting(candidates, num_done + 1, config.groups_per_batch)
    return AsyncStart(done_ordinals=done, kept_groups=tuple(kept), newest_steps=progress.newest_steps)


def _is_fresh_enough(config: CLIConfig, progress: Progress, rollouts: tuple[Rollout, ...], last_step: int) -> bool:
    """Whether all turns are fresh enough for the last step that may train them; the bound may have been lowered."""
    steps = [progress.newest_steps[turn.model.policy_version] for rollout in rollouts for turn in rollout.turns]
    return last_step - 1 - min(steps, default=last_step) <= (config.max_steps_off_policy or 0)


def _owed_evaluations(
    config: CLIConfig, folder: LogDirectory, progress: Progress, num_done: int
) -> tuple[WantedEvaluation, ...]:
    """Evaluations that were due and are not recorded, if their adapters still exist.

    An asynchronous run evaluates its baseline while it trains, so a checkpoint may come first.
    """
    due = [] if config.evaluation.skip_baseline else [0]
    due += [step for step in range(1, num_done) if config.eval_every and step % config.eval_every == 0]
    if num_done == config.max_steps or (config.eval_every and num_done % config.eval_every == 0):
        due.append(num_done)
    missing = [step for step in due if step not in progress.evaluated_steps and folder.sampler_path(step).exists()]
    versions = {num_steps: version for version, num_steps in sorted(progress.newest_steps.items())}
    newest = {step: max((v for s, v in versions.items() if s <= step), default=0) for step in missing}
    return tuple(
        WantedEvaluation(
            phase="eval" if step else "baseline",
            step=step,
            adapter=AdapterRef(path=folder.sampler_path(step), policy_version=newest[step]),
        )
        for step in missing
    )


async def load_memory(
    config: CLIConfig, folder: LogDirectory, num_done: int, recorder: DatabaseRecorder, url: str
) -> Memory:
    """The memory after `num_done` steps: rates from the folder's outcomes, stored successes from the database.

    Raises:
        DatabaseError: a success that an earlier attempt stored is not in this database.
    """
    memory = Memory(
        rates=SuccessRates() if config.curriculum.task_sampling == "success_rate" else None,
        replay=ReplayBuffer(
            capacity_per_task=config.curriculum.replay_capacity if config.curriculum.replay_successes else 0
        ),
        outcomes_path=folder.path / OUTCOMES_NAME,
    )
    outcomes = load_outcomes(folder.path / OUTCOMES_NAME, num_done)
    if memory.rates is not None:
        memory.rates.observe(outcomes)
    ids = newest_success_ids(outcomes, memory.replay.capacity_per_task)
    if ids:
        await recorder.flush()  # the training has its id once its start is written
        if recorder.training_id is None:
            raise ValueError("expected TrainingStarted to be recorded before memory is loaded")
        async with open_sessions(url) as sessions, sessions() as session:
            memory.replay.add(await load_rollouts(session, recorder.training_id, ids))
    return memory
