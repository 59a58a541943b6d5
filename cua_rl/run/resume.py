"""The state from which a resumed run continues, according to its checkpoint, folder and database."""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path

from cua_rl.database.progress import Progress, load_progress
from cua_rl.database.queries import find_training, latest_trainings, rename_training
from cua_rl.database.rebuild import load_rollouts
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import open_sessions
from cua_rl.events import Phase
from cua_rl.rl.advantages import score_group
from cua_rl.rl.async_loop import AsyncStart
from cua_rl.rl.curriculum import Memory, ReplayBuffer, SuccessRates, load_outcomes, newest_success_ids
from cua_rl.rl.group_buffer import WaitingGroup, fitting
from cua_rl.rl.stages import WantedEvaluation
from cua_rl.run.prepared_training import PreparedTraining
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.earlier_attempt import Curve, EarlierAttempt
from cua_rl.run_folder.log_directory import Checkpoint, LogDirectory
from cua_rl.training.client import TrainingClient
from cua_rl.types.group_members import has_lost_members, without_siblings
from cua_rl.types.rollout import AdapterRef, Rollout, RolloutGroup

OUTCOMES_NAME = "outcomes.jsonl"
_REPLAY_CAPACITY = 2  # successes of a task


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """State left by an earlier attempt; empty for a new run."""

    start: AsyncStart = field(default_factory=AsyncStart)
    owed_evaluations: tuple[WantedEvaluation, ...] = ()

    @property
    def kept_group_ids(self) -> tuple[str, ...]:
        return tuple(waiting.scored.group.group_id for waiting in self.start.kept_groups)


async def load_resumed(
    config: CLIConfig, folder: LogDirectory, run_name: str, num_done: int, url: str, curve: Curve
) -> Resumed:
    """Load the groups and evaluations that a run resumed after `num_done` steps can reuse, and delete the others."""
    if num_done == 0:
        folder.remove_strays(0)
        return Resumed()

    async with open_sessions(url) as sessions, sessions() as session:
        training = await find_training(session, run_name, str(folder.path))
        if training is None:
            folder.remove_strays(num_done)
            return Resumed()
        progress = await load_progress(session, training.id, num_done)
    owed = _owed_evaluations(config, folder, progress, num_done, curve)
    folder.remove_strays(num_done, keep=[wanted.step for wanted in owed])
    if num_done == curve.after_step:  # what is left was sampled for other tasks, or has other rewards or advantages
        progress = replace(progress, untrained=())
    return Resumed(start=plan_start(config, progress, num_done), owed_evaluations=owed)


async def follow_move(attempt: EarlierAttempt, run_name: str, url: str, *, is_own: bool) -> None:
    """After a run's folder has been moved, rename the run in its database accordingly; a copy becomes a separate run.

    `is_own`: the database is in the folder, and holds no other run.
    """
    earlier_path = Path(str(attempt.settings.get("log_path", attempt.path)))
    async with open_sessions(url) as sessions, sessions.begin() as session:
        if await find_training(session, run_name, str(attempt.path)) is not None:
            return
        if is_own:
            moved = next(iter(await latest_trainings(session, limit=1)), None)
        elif await asyncio.to_thread(earlier_path.exists):
            return
        else:
            moved = await find_training(session, str(attempt.settings.get("run_name")), str(earlier_path))
        if moved is not None:
            await rename_training(session, moved.id, run_name, str(attempt.path))


async def load_weights(
    trainer: TrainingClient,
    prepared: PreparedTraining,
    folder: LogDirectory,
    checkpoint: Checkpoint | None,
    *,
    needs_reference: bool,
) -> None:
    """Load the weights that the run continues from, and the reference model of KL terms.

    The reference is what the first attempt started from. A copy stays in the run's folder, so that a resumed run has
    the same one even if the original folder has changed.
    """
    reference = folder.path / "reference"
    if checkpoint is not None:
        await trainer.load_state(checkpoint.state_path)
    elif prepared.checkpoint_path is not None:
        await trainer.load_state(prepared.checkpoint_path, with_optimizer=False)
        await trainer.save_weights_for_sampler(reference)
    if prepared.checkpoint_path is not None and needs_reference:
        await trainer.load_reference(reference if reference.is_dir() else prepared.checkpoint_path)


def plan_start(config: CLIConfig, progress: Progress, num_done: int) -> AsyncStart:
    """The groups that training keeps. Repeated indices come from synchronous steps, whose next one keeps its own."""
    done = frozenset(progress.done_indices)
    # the database does not say whether a group lost too many members to faults: that follows from how it ended
    candidates = [
        WaitingGroup(
            scored=score_group(
                replace(group, is_incomplete=has_lost_members(group, config.sampling.min_group_size)),
                config.advantages,
                config.credit,
            ),
            last_step=min(last_step, config.max_steps),
        )
        for group, last_step in progress.untrained
        if _is_fresh_enough(config, progress, group.compared, last_step)
    ]
    if len(done) < len(progress.done_indices) or not config.max_steps_off_policy:
        in_order = frozenset(range(num_done * config.groups_per_batch))
        # with refill_groups, others may have been sampled in the place of one
        keeps = not config.max_steps_off_policy and config.max_refill_factor == 1
        now = [waiting for waiting in candidates if keeps and waiting.last_step == num_done + 1]
        kept = [waiting for waiting in now if _has_all_members(config, waiting.scored.group)]
        return AsyncStart(done_ordinals=in_order | done, kept_groups=tuple(kept), newest_steps=progress.newest_steps)
    kept = fitting(candidates, num_done + 1, config.groups_per_batch)
    return AsyncStart(done_ordinals=done, kept_groups=tuple(kept), newest_steps=progress.newest_steps)


def _has_all_members(config: CLIConfig, group: RolloutGroup) -> bool:
    """Whether no fault took a member; a parent that ended before its fork turn has no siblings."""
    num_begun = config.branching.num_begun(config.group_size)
    return len(without_siblings(group).rollouts) == num_begun and not has_lost_members(group, config.group_size)


def _is_fresh_enough(config: CLIConfig, progress: Progress, rollouts: tuple[Rollout, ...], last_step: int) -> bool:
    """Whether all turns are fresh enough for the last step that may train them; the bound may have been lowered."""
    steps = [progress.newest_steps[turn.model.policy_version] for rollout in rollouts for turn in rollout.turns]
    return last_step - 1 - min(steps, default=last_step) <= (config.max_steps_off_policy or 0)


def _owed_evaluations(
    config: CLIConfig, folder: LogDirectory, progress: Progress, num_done: int, curve: Curve
) -> tuple[WantedEvaluation, ...]:
    """Evaluations of the curve that were due and are not recorded, if their adapters still exist."""
    # An asynchronous run evaluates its baseline while it trains, so a checkpoint may come first.
    if num_done == curve.after_step:
        return ()  # the curve begins with its baseline
    steps = [
        step
        for step in range(curve.after_step + 1, num_done + 1)
        if step == config.max_steps or (config.eval_every and step % config.eval_every == 0)
    ]
    due: list[tuple[Phase, int]] = [("eval", step) for step in steps]
    if not config.evaluation.skip_baseline:
        due.insert(0, ("baseline", curve.after_step))
    missing = [one for one in due if one not in progress.evaluated and folder.sampler_path(one[1]).exists()]
    versions = {num_steps: version for version, num_steps in sorted(progress.newest_steps.items())}
    newest = {step: max((v for s, v in versions.items() if s <= step), default=0) for _, step in missing}
    return tuple(
        WantedEvaluation(
            phase=phase, step=step, adapter=AdapterRef(path=folder.sampler_path(step), policy_version=newest[step])
        )
        for phase, step in missing
    )


async def load_memory(
    config: CLIConfig, folder: LogDirectory, num_done: int, recorder: DatabaseRecorder, url: str
) -> Memory:
    """The memory after `num_done` steps: rates from the folder's outcomes, stored successes from the database, without
    pruned ones; raises `DatabaseError` if a success that an earlier attempt stored is not in this database.
    """
    memory = Memory(
        rates=SuccessRates() if config.curriculum.task_sampling == "success_rate" else None,
        replay=ReplayBuffer(capacity_per_task=_REPLAY_CAPACITY if config.curriculum.replay_successes else 0),
        outcomes_path=folder.path / OUTCOMES_NAME,
    )
    outcomes = load_outcomes(folder.path / OUTCOMES_NAME, num_done)
    if memory.rates is not None:
        memory.rates.observe(outcomes)
    ids = newest_success_ids(outcomes, memory.replay.capacity_per_task)
    if ids:
        await recorder.flush()  # the training has its id once its start is written
        async with open_sessions(url) as sessions, sessions() as session:
            memory.replay.add(await load_rollouts(session, recorder.scope.require_training(), ids))
    return memory
