"""Where a resumed run goes on: what its checkpoint, its folder and its database say together."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cua_rl.recipes.log_directory import LogDirectory
from cua_rl.recipes.train_config import CLIConfig
from cua_rl.rl.advantages import score_group
from cua_rl.rl.async_loop import AsyncStart
from cua_rl.rl.group_buffer import WaitingGroup, fitting
from cua_rl.rl.stages import WantedEvaluation
from cua_rl.types import AdapterRef, Rollout, RolloutGroup

if TYPE_CHECKING:
    from cua_rl.database.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What an earlier attempt left; nothing of a new run."""

    start: AsyncStart = field(default_factory=AsyncStart)
    owed_evaluations: tuple[WantedEvaluation, ...] = ()

    @property
    def kept_group_ids(self) -> tuple[str, ...]:
        return tuple(waiting.scored.group.group_id for waiting in self.start.kept_groups)


async def load_resumed(config: CLIConfig, folder: LogDirectory, run_name: str, num_done: int, url: str) -> Resumed:
    """Read what a run that goes on after `num_done` steps can build on, and delete what it cannot."""
    if num_done == 0:
        folder.remove_strays(0)
        return Resumed()
    from cua_rl.database.progress import load_progress
    from cua_rl.database.queries import find_training
    from cua_rl.database.session import open_sessions

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
    """Give the one run of a folder's own database the name and place that the folder has now, if it was moved."""
    from cua_rl.database.queries import find_training, latest_trainings, rename_training
    from cua_rl.database.session import open_sessions

    async with open_sessions(url) as sessions, sessions.begin() as session:
        if await find_training(session, run_name, str(folder.path)) is None:
            for training in await latest_trainings(session, limit=1):
                await rename_training(session, training.training_id, run_name, str(folder.path))


def plan_start(config: CLIConfig, progress: "Progress", num_done: int) -> AsyncStart:
    """What asynchronous training keeps. Indices that repeat are of synchronous steps, which leave nothing behind."""
    done = frozenset(progress.done_indices)
    if len(done) < len(progress.done_indices) or not config.max_steps_off_policy:
        in_order = frozenset(range(num_done * config.groups_per_batch))
        return AsyncStart(done_ordinals=in_order | done, newest_steps=progress.newest_steps)
    candidates = [
        WaitingGroup(
            scored=score_group(_as_counted(config, untrained.group), config.advantages),
            last_step=min(untrained.last_step, config.max_steps),
        )
        for untrained in progress.untrained
        if _is_fresh_enough(config, progress, untrained.group.compared, untrained.last_step)
    ]
    kept = fitting(candidates, num_done + 1, config.groups_per_batch)
    return AsyncStart(done_ordinals=done, kept_groups=tuple(kept), newest_steps=progress.newest_steps)


def _as_counted(config: CLIConfig, group: RolloutGroup) -> RolloutGroup:
    """The group as it ended: whether too few members survived faults is not in the database, but follows from it."""
    return replace(group, is_incomplete=len(group.rollouts) < config.min_group_size)


def _is_fresh_enough(config: CLIConfig, progress: "Progress", rollouts: tuple[Rollout, ...], last_step: int) -> bool:
    """Whether even the last step that may train them finds no turn too old: a run may go on with a smaller bound."""
    steps = [progress.newest_steps[turn.model.policy_version] for rollout in rollouts for turn in rollout.turns]
    return last_step - 1 - min(steps, default=last_step) <= (config.max_steps_off_policy or 0)


def _owed_evaluations(
    config: CLIConfig, folder: LogDirectory, progress: "Progress", num_done: int
) -> tuple[WantedEvaluation, ...]:
    """Evaluations that were due and are not recorded, of adapters that are still there."""
    due = [step for step in range(1, num_done) if config.eval_every and step % config.eval_every == 0]
    if num_done == config.max_steps or (config.eval_every and num_done % config.eval_every == 0):
        due.append(num_done)
    missing = [step for step in due if step not in progress.evaluated_steps and folder.sampler_path(step).exists()]
    versions = {num_steps: version for version, num_steps in sorted(progress.newest_steps.items())}
    newest = {step: max((v for s, v in versions.items() if s <= step), default=0) for step in missing}
    return tuple(
        WantedEvaluation(
            phase="eval", step=step, adapter=AdapterRef(path=folder.sampler_path(step), policy_version=newest[step])
        )
        for step in missing
    )
