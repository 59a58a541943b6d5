"""Repeats a recorded training step from the checkpoint before it and the database alone, also with other settings.

What a step depends on is on record: its groups in their order with their advantages, the settings that it ran with
(config.json), how many tokens a row had (`optim/micro_batch_tokens`), and on which machine it was trained. Features of
screenshots from earlier steps are the exception, so no step uses any (`wire.BeginStep`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, cast

from sqlalchemy import select

from cua_rl.command_line.fields import check_numbers, with_values
from cua_rl.command_line.parsing import make_config
from cua_rl.command_line.plain_config import find_stored, stored_setting
from cua_rl.command_line.settings import SettingNames
from cua_rl.command_line.values import UnfitValueError, as_argument, parse_value
from cua_rl.database.models import RolloutRow, Step, TurnRow
from cua_rl.rl.advantages import ScoredGroup, score_group
from cua_rl.rl.config import LoopConfig
from cua_rl.rl.datums import Batch, build_batch, datums_sha256, logprobs_by_turn
from cua_rl.rl.train_step import Rows, Trainer, TrainStepResult, train_step
from cua_rl.run.training_config import LOSS_CLIPS
from cua_rl.run_folder.checkpoints import find_checkpoint, find_damage
from cua_rl.run_folder.earlier_attempt import kept_settings
from cua_rl.run_folder.log_directory import Checkpoint, read_checkpoints
from cua_rl.run_folder.recorded_run import RecordedTraining, count_pruned
from cua_rl.training.config import LossConfig, LossName, TrainerConfig
from cua_rl.training.loss_checks import check_loss_config
from cua_rl.types.errors import ConfigError, DatabaseError, boundary
from cua_rl.types.rollout import Datum

_WHAT_IF = ("learning_rate", "advantages", "kl_penalty_coef", "num_substeps")
"""Settings of a step that may be others, beside those of `loss` and `adam`."""


class ReplayTrainer(Trainer, Protocol):
    """`training.client.TrainingClient` says what the methods do."""

    policy_version: int

    async def load_state(self, path: Path, *, with_optimizer: bool = True) -> None: ...

    async def save_state(self, path: Path) -> None: ...

    async def load_reference(self, path: Path) -> None: ...


OpenTrainer = Callable[[TrainerConfig], AbstractAsyncContextManager[ReplayTrainer]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step that was made again."""

    row: Step
    config: LoopConfig
    groups: Sequence[ScoredGroup]
    start: int
    """The step after which the replay began."""
    before: Path
    """The state before the step, and in `after` the one after it."""
    after: Path
    trained_on: str | None
    logprob_gap: float
    """Largest difference of the trainer's log-probabilities, before the update, from the recorded ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A step made in another way: the state after it, and how it changed what the answers' tokens are given, nats."""

    settings: Mapping[str, object]
    after: Path
    beta1: float | None
    """AdamW's, if this and the step taken are a single optimizer step each."""
    changes: Mapping[str, float]
    """By rollout: the change of the log-probability of all its answers."""


async def replay_step(
    run: RecordedTraining, number: int, model_path: Path, open_trainer: OpenTrainer, folder: Path
) -> Replay:
    """Make a step again in `folder`, from the newest checkpoint before it, or from the run's beginning.

    Raises:
        ConfigError: the run has no such step, or the model is another one.
        DatabaseError: the record is incomplete: rollouts were pruned, or steps between are missing.
    """
    start = _find_start(run, number)
    num_done = 0 if start is None else start.step
    rows = _rows_between(run, num_done, number)
    state, before, gap, result = (start.state_path if start else None), folder / "before", 0.0, TrainStepResult()
    config, groups = learning_config(run, rows[-1], model_path), list[ScoredGroup]()
    for trainer_config, part in groupby(rows, key=lambda row: learning_config(run, row, model_path).trainer):
        async with open_trainer(trainer_config) as trainer:
            await _load(trainer, run, config, state)
            for row in part:
                config, groups = learning_config(run, row, model_path), await run.load_groups(row.step)
                batch = _require_batch(run, row, groups)
                if row.step == number:
                    await trainer.save_state(before)
                result = await _take_step(trainer, batch, config, row.step)
                gap = await _require_same_policy(run, row, batch, result, float(run.settings["parity_limit"]))
                state = folder / f"{row.step:06d}"
            assert state is not None
            await trainer.save_state(state)
    assert state is not None
    return Replay(
        row=rows[-1], config=config, groups=groups, start=num_done, before=before, after=state,
        trained_on=result.trained_on, logprob_gap=gap,
    )  # fmt: skip


async def what_if(
    run: RecordedTraining,
    replay: Replay,
    variants: Sequence[Mapping[str, object]],
    open_trainer: OpenTrainer,
    folder: Path,
) -> list[Outcome]:
    """The step as it was taken, then with other settings each; raises `ConfigError` for settings of something else."""
    configs = [replay.config, *(other_config(replay.config, variant) for variant in variants)]
    scored = build_batch(replay.groups, run.image_token_id, keeps_constant=True).datums
    temperature, outcomes = replay.config.temperature, list[Outcome]()
    async with open_trainer(replay.config.trainer) as trainer:
        # with the reference: any of them may have a KL term
        await _load(trainer, run, with_values(replay.config, kl_penalty_coef=1.0), replay.before)
        rows_before = await trainer.forward(scored, temperature=temperature)
        for index, (config, settings) in enumerate(zip(configs, [{}, *variants], strict=True)):
            after = folder / f"variant-{index}" if index else replay.after
            if index:
                await trainer.load_state(replay.before)
                await _take_step(trainer, _other_batch(run, replay, config), config, replay.row.step)
                await trainer.save_state(after)
            else:
                await trainer.load_state(after)
            rows = await trainer.forward(scored, temperature=temperature)
            is_single = config.num_substeps == replay.config.num_substeps == 1
            outcomes.append(
                Outcome(
                    settings=settings,
                    after=after,
                    beta1=config.adam.beta1 if is_single else None,
                    changes=_changes(scored, rows_before, rows),
                )
            )
    return outcomes


def learning_config(run: RecordedTraining, row: Step, model_path: Path) -> LoopConfig:
    """The settings that a step was trained with; of the trainer also what was chosen for it."""
    settings, values = run.settings_at(row.step), dict[str, object]()
    for setting in kept_settings(LoopConfig):
        is_stored, value = find_stored(settings, setting.name, is_for_group=setting.is_for_group)
        if is_stored:
            values[setting.name] = _parsed(setting.name, as_argument(value), setting.kind)
    config = make_config(LoopConfig, values)
    chosen: Mapping[str, Any] = settings.get("memory_plan", {}).get("settings", {})
    num_processes = settings.get("gpu_plan", {}).get("trainer", {}).get("num_processes")
    row_tokens = (row.metrics or {}).get("optim/micro_batch_tokens", chosen.get("trainer.micro_batch_tokens"))
    sharding = chosen.get("trainer.sharding")
    trainer = with_values(
        config.trainer,
        model_path=model_path,
        lora_rank=config.lora_rank,
        seed=config.seed,
        max_pixels=stored_setting(settings, "server.max_pixels"),
        micro_batch_tokens=None if row_tokens is None else int(row_tokens),
        gradient_checkpointing=chosen.get("trainer.gradient_checkpointing"),
        sharding="replicated" if sharding == "none" else sharding,  # the name in older runs
        num_processes=num_processes,
        num_nodes=None,
        max_restarts=0,
        parity_limit=math.inf,  # what is compared are the recorded log-probabilities
    )
    return with_values(config, trainer=trainer)


def other_config(config: LoopConfig, settings: Mapping[str, object]) -> LoopConfig:
    """The configuration with other settings of a step, named as on a command line; raises `ConfigError` for others."""
    names, changed = SettingNames(LoopConfig), dict[str, object]()
    for name, value in settings.items():
        setting = names.find(name)
        if setting.name not in _WHAT_IF and not setting.name.startswith(("loss.", "adam.")):
            raise ConfigError(
                f"what_if: expected settings of a step, {', '.join(_WHAT_IF)}, or one of loss or adam, got {name!r}; "
                "another task, model or temperature needs other rollouts"
            )
        changed[setting.name] = _parsed(name, as_argument(value), setting.kind)
    if "loss.name" in changed:  # the clips of one loss mean nothing to another
        defaults = {f"loss.{name}": getattr(LossConfig(), name) for name in ("clip_low", "clip_high")}
        changed = {**defaults, **LOSS_CLIPS.get(cast("LossName", changed["loss.name"]), {}), **changed}
    with boundary(ConfigError, "what_if"):
        for group in ("loss", "adam"):
            inner = {path.partition(".")[2]: value for path, value in changed.items() if path.startswith(f"{group}.")}
            config = with_values(config, **{group: with_values(getattr(config, group), **inner)})
        other = with_values(config, **{name: value for name, value in changed.items() if "." not in name})
        check_numbers(other)
        check_loss_config(other.loss)
    return other


def _parsed(name: str, text: str, kind: Any) -> object:
    try:
        return parse_value(text, kind)
    except UnfitValueError as error:
        raise ConfigError(f"{name}: expected {error}, got {text!r}; correct it") from None


def _find_start(run: RecordedTraining, number: int) -> Checkpoint | None:
    """The newest complete checkpoint before a step; None for the run's beginning."""
    earlier = [checkpoint for checkpoint in read_checkpoints(run.folder) if checkpoint.step < number]
    return next((each for each in reversed(earlier) if find_damage(each.state_path) is None), None)


def _rows_between(run: RecordedTraining, num_done: int, number: int) -> list[Step]:
    """The steps after `num_done` up to `number` that trained something."""
    rows = {row.step: row for row in run.steps if row.step <= number}
    if number not in rows or not rows[number].num_datums:
        trained = [row.step for row in run.steps if row.num_datums]
        known = f"1 to {trained[-1]}" if trained else "none"
        raise ConfigError(f"step: expected a step that trained something, of {known}, got {number}; choose one")
    missing = [step for step in range(num_done + 1, number) if step not in rows]
    if missing:
        raise DatabaseError(
            f"expected steps {num_done + 1} to {number} in the database, got none of {missing}; choose a step after a "
            f"later checkpoint ({[each.step for each in read_checkpoints(run.folder)]})"
        )
    return [rows[step] for step in range(num_done + 1, number + 1) if rows[step].num_datums]


async def _load(trainer: ReplayTrainer, run: RecordedTraining, config: LoopConfig, state: Path | None) -> None:
    """Load what a step begins with: a state, or what the run began with; and the reference of KL terms."""
    own = config.load_checkpoint_path
    sizes = {"lora_rank": config.lora_rank, "lora_alpha": config.trainer.lora_alpha}
    if state is not None:
        await trainer.load_state(state)
    elif (first := find_checkpoint(own, **sizes)) is not None:
        await trainer.load_state(first, with_optimizer=False)
    if own is not None and config.has_kl_term:
        copied = run.folder / "reference"
        reference = copied if copied.is_dir() else find_checkpoint(own, **sizes)
        assert reference is not None
        await trainer.load_reference(reference)


def _require_batch(run: RecordedTraining, row: Step, groups: Sequence[ScoredGroup]) -> Batch:
    """The datums of a step, if they are those that it trained on."""
    if num_pruned := count_pruned(groups):
        raise DatabaseError(
            f"expected the screenshots of step {row.step}, got {num_pruned} rollouts that were pruned; choose a step "
            "whose rollouts are whole, after a later checkpoint"
        )
    batch = run.build_batch(row.step, groups)
    if datums_sha256(batch.datums) != row.datums_sha256:
        raise DatabaseError(
            f"expected the datums that step {row.step} was trained on ({row.datums_sha256}), got others: rollouts were "
            "pruned, or the record was changed; python -m cua_rl.recipes.rebuild_datums says of which steps"
        )
    return batch


async def _take_step(trainer: ReplayTrainer, batch: Batch, config: LoopConfig, step: int) -> TrainStepResult:
    version = trainer.policy_version
    return await train_step(trainer, batch, config, step=step, max_steps=config.max_steps, policy_version=version)


async def _require_same_policy(
    run: RecordedTraining, row: Step, batch: Batch, result: TrainStepResult, limit: float
) -> float:
    """The largest difference from the recorded log-probabilities; raises `ConfigError` if it is another policy's."""
    found = logprobs_by_turn(batch.datums, result.training_logprobs, leave_out=batch.replayed_ids)
    query = select(RolloutRow.rollout_id, TurnRow.turn_index, TurnRow.training_logprobs).join(
        TurnRow, TurnRow.rollout_pk == RolloutRow.id
    )
    mine = RolloutRow.training_id == run.key, RolloutRow.rollout_id.in_(found)
    recorded = {(name, index): values for name, index, values in await run.session.execute(query.where(*mine))}
    gaps = [
        abs(one - other)
        for name, turns in found.items()
        for index, values in turns
        for one, other in zip(values, recorded[name, index] or (), strict=True)
    ]
    if gaps and math.fsum(gaps) / len(gaps) > limit:
        raise ConfigError(
            f"model_name: expected the model that the run trained, whose log-probabilities in step {row.step} are on "
            f"record, got one whose differ by {math.fsum(gaps) / len(gaps):.3g} nats on average (up to {max(gaps):.3g})"
            "; name the same revision of it"
        )
    return max(gaps, default=0.0)


def _other_batch(run: RecordedTraining, replay: Replay, config: LoopConfig) -> Batch:
    """The step's datums with the advantages that other settings give them."""
    groups = replay.groups
    if (config.advantages, config.credit) != (replay.config.advantages, replay.config.credit):
        groups = [score_group(scored.group, config.advantages, config.credit) for scored in groups]
    return build_batch(groups, run.image_token_id, keeps_constant=config.has_kl_term)


def _changes(datums: Sequence[Datum], before: Rows, after: Rows) -> dict[str, float]:
    """By rollout, the change of the sum over its trained tokens, once for all groups; off-mask values are 0."""
    changes: dict[tuple[str, str], float] = {}
    for datum, old, new in zip(datums, before, after, strict=True):
        member = (datum.rollout_id, datum.group_id)
        changes[member] = changes.get(member, 0.0) + math.fsum(new) - math.fsum(old)
    return {rollout_id: change for (rollout_id, _), change in changes.items()}
