"""A recorded run: its database, embedded or named by the environment, and the data on which its steps trained."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from cua_rl.command_line.plain_config import stored_setting
from cua_rl.database.models import RolloutRow, Step, Training
from cua_rl.database.postgres import read_own_database
from cua_rl.database.queries import find_training, latest_trainings, load_steps
from cua_rl.database.rebuild import load_advantages, load_groups
from cua_rl.database.session import find_database
from cua_rl.monitor.databases import Database, open_database
from cua_rl.monitor.run_folders import has_database
from cua_rl.rl.advantages import ScoredGroup
from cua_rl.rl.datums import Batch, build_batch
from cua_rl.run_folder.earlier_attempt import settings_at
from cua_rl.run_folder.log_directory import load_settings
from cua_rl.run_folder.model_folder import fetch_weights, find_model, pinned_name
from cua_rl.types.errors import ConfigError, DatabaseError, boundary
from cua_rl.types.group_members import has_lost_members

TAKEN_OVER = "taken_over_from"
"""The key of config.json that a folder of rollouts has which were taken over from those of another run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTraining:
    """A training run of the past."""

    folder: Path
    settings: Mapping[str, Any]
    """Its config.json."""
    session: AsyncSession
    key: int
    steps: Sequence[Step]
    """Those that have ended, in order."""
    image_token_id: int

    async def load_groups(self, step: int) -> list[ScoredGroup]:
        """What a step was given, in its order; pruned screenshots have no bytes."""
        min_group_size = stored_setting(self.settings_at(step), "sampling.min_group_size") or 1
        recorded = await load_groups(self.session, self.key, step)
        advantages = await load_advantages(self.session, self.key, step)
        return [
            ScoredGroup(
                group=replace(group, is_incomplete=has_lost_members(group, min_group_size)),
                advantages=of_rollouts,
                turn_advantages=of_turns,
            )
            for group, (of_rollouts, of_turns) in zip(recorded, advantages, strict=True)
        ]

    def build_batch(self, step: int, groups: Sequence[ScoredGroup]) -> Batch:
        """The datums that a step made of its groups."""
        settings = self.settings_at(step)
        keeps_constant = bool(settings.get("kl_penalty_coef") or stored_setting(settings, "loss.kl_loss_coef"))
        return build_batch(groups, self.image_token_id, keeps_constant=keeps_constant)

    def settings_at(self, step: int) -> Mapping[str, Any]:
        """Those of a step: the run may have been resumed with others."""
        return settings_at(self.settings, step)


def find_base(run: RecordedTraining, model_name: str | None) -> Path:
    """The base model's folder, where the run found it unless another place is given.

    Raises `ConfigError` for another revision, and for a run that a service has trained.
    """
    if run.settings.get("training") == "tinker":
        raise ConfigError(
            "log_path: expected a run that trained on its own machine, got one with training=tinker, whose service "
            "keeps its states; choose another run"
        )
    recorded, name = Path(str(run.settings["model_path"])), model_name or run.settings.get("model_name")
    base = recorded if model_name is None and recorded.is_dir() else find_model(name)
    was, now = str(run.settings.get("model_name")), str(pinned_name(name, base))
    if "@" in was and "@" in now and was != now:
        raise ConfigError(f"model_name: expected the revision that the run trained, {was!r}, got {now!r}; leave it out")
    fetch_weights(name, base)
    return base


def count_pruned(groups: Sequence[ScoredGroup]) -> int:
    """Rollouts whose screenshots were removed."""
    return sum(
        any(not image.data for turn in rollout.turns for image in turn.model.prompt.images)
        for scored in groups
        for rollout in scored.group.compared
    )


@asynccontextmanager
async def open_training(folder: Path, environ: Mapping[str, str], setting: str) -> AsyncGenerator[RecordedTraining]:
    """The training run in a folder; `setting` is what named it. Raises `ConfigError` for another folder."""
    settings = load_settings(folder, setting) if (folder / "config.json").is_file() else {}
    if "model_path" not in settings:  # an evaluation has several models
        raise ConfigError(
            f"{setting}: expected the folder of a training run, got {str(folder)!r} without its config.json; "
            "name the folder that the run printed"
        )
    async with open_run_database(str(folder), environ, setting) as (database, name), database.sessions() as session:
        if name is None:  # the run's own database holds no other run, and the folder may have been moved
            training = next(iter(await latest_trainings(session, limit=1)), None)
        else:
            training = await find_training(session, str(settings["run_name"]), str(settings["log_path"]))
        if training is None:
            raise DatabaseError(f"expected a run in {folder} in the database, got none; check {setting}")
        steps = [step for step in await load_steps(session, training.id) if step.trained_policy_version is not None]
        yield RecordedTraining(
            folder=folder,
            settings=settings,
            session=session,
            key=training.id,
            steps=steps,
            image_token_id=training.image_token_id,
        )


@asynccontextmanager
async def open_run_database(
    run: str, environ: Mapping[str, str], setting: str = "run"
) -> AsyncGenerator[tuple[Database, str | None]]:
    """The run's database, and the run's name if the database may hold others; `setting` is what named the run.

    An evaluation's own database holds a run for each model: FOLDER@MODEL names it, "@MODEL" is then its name here.
    """
    folder, model = _locate(run)
    async with AsyncExitStack() as stack:
        if folder is not None:
            url = await stack.enter_async_context(read_own_database(folder))
        else:
            url = await find_database(environ)
        if url is None:
            raise ConfigError(
                f"{setting}: expected the folder of a run with its own database, or DATABASE_URL to be set, got "
                f"{run!r} without postgres/ in it; name such a folder"
            )
        database = open_database(url)
        stack.push_async_callback(database.engine.dispose)
        yield database, run if folder is None else model


def _locate(run: str) -> tuple[Path | None, str | None]:
    """The folder with the run's own database, None without one, and the model's name in it."""
    folder, _, model = run.partition("@")
    for place, name in ((run, None), (folder, f"@{model}")):
        path = Path(place).expanduser().absolute()
        if has_database(path):
            return path, name
    return None, None


async def find_training_id(database: Database, name: str | None, setting: str = "run") -> int:
    """The key of the run of this name or number, or of the only one; raises `ConfigError`."""
    query = select(Training.id, Training.run_name).order_by(Training.started_at.desc(), Training.id.desc())
    wanted = query
    if name is not None and name.startswith("@"):  # whatever the folder was called
        wanted = query.where(Training.run_name.endswith(name, autoescape=True))
    elif name is not None:
        is_number = name.isascii() and name.isdecimal() and len(name) < 18
        is_named = Training.run_name.in_((name, Path(name).name))
        wanted = query.where(Training.id == int(name) if is_number else is_named)
    reading = f"reading run {name!r} (an error about tables or columns: the run's version of the schema is another)"
    with boundary(DatabaseError, reading):
        async with database.sessions() as session:
            found = (await session.execute(wanted.limit(2))).all()
            others = (await session.execute(query.limit(5))).all()
    if not found or (name is None and len(found) > 1):
        names = ", ".join(repr(other.run_name) for other in others) or "none"
        raise ConfigError(
            f"{setting}: expected the name of a recorded run, or FOLDER@MODEL of an evaluation of several models, got "
            f"{'none' if name is None else repr(name)}; the latest ones are {names}"
        )
    return found[0].id


async def find_rollout_id(session: AsyncSession, training_id: int, given: str) -> str:
    """The id of the run's rollout that begins with `given`; raises `ConfigError` without one, or for several."""
    query = (
        select(RolloutRow.rollout_id)
        .where(RolloutRow.training_id == training_id, RolloutRow.rollout_id.startswith(given, autoescape=True))
        .order_by(func.length(RolloutRow.rollout_id))  # the whole id before longer ones
    )
    found = list(await session.scalars(query.limit(2)))
    if not found or (len(found) > 1 and found[0] != given):
        what = (
            "with which several begin; write more of it" if found else "which the run has not; the monitor lists them"
        )
        raise ConfigError(f"rollout_id: expected the beginning of one rollout's id, got {given!r}, {what}")
    return found[0]
