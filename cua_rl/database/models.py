"""The tables. `*_id` strings are the ids that the rest of the system uses; `id` and `*_pk` are keys of this database.

    trainings ── steps ──┐
        │    └── evals ──┴── groups ── rollouts ── turns ── screenshots
        └── checkpoints              ├── validations, judgements, replays
    tasks ── groups, rollouts        └── environments
    status_history: every change of status of a training, step, eval, group or rollout

Deletes cascade to dependent rows; screenshots and tasks are shared by trainings and stay. A screenshot is kept as long
as `rollout_images` says that a rollout shows it (`prune.py`).
"""

from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from cua_rl.database.columns import AnyJson, AnyText, NumberArray
from cua_rl.events import Phase
from cua_rl.types.json_values import JsonDict
from cua_rl.types.rollout import StopReason

STEP_STATUSES = ("rollouts", "training", "completed", "failed", "cancelled")
RUN_STATUSES = ("running", "completed", "failed", "cancelled")
"""Of trainings, evals, groups and rollouts; a failed rollout is one that an infrastructure fault ended."""


_IS_UNREAD = "failure_kind IS NOT NULL"


class Base(DeclarativeBase):
    """Naming rules and column types common to all tables."""

    metadata = sa.MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map: ClassVar[dict[object, object]] = {
        str: AnyText(),
        Phase: AnyText(),
        int: sa.Integer(),
        float: sa.Double[float](),
        datetime: sa.DateTime(timezone=True),
        JsonDict: AnyJson(),
        list[int]: NumberArray(sa.Integer()),
        list[float]: NumberArray(sa.Double[float]()),
        UUID: sa.Uuid(),
    }


def _key() -> Mapped[int]:
    return mapped_column(sa.BigInteger, sa.Identity(), primary_key=True)


def _foreign_key(target: str, *, index: bool = False) -> Mapped[Any]:
    return mapped_column(sa.BigInteger, sa.ForeignKey(target, ondelete="CASCADE"), index=index)


def _now() -> Mapped[datetime]:
    return mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now())


def _updated() -> Mapped[datetime]:
    return mapped_column(sa.DateTime(timezone=True), server_default=sa.func.now(), onupdate=sa.func.now())


def _one_of(column: str, values: tuple[str, ...]) -> sa.CheckConstraint:
    return sa.CheckConstraint(f"{column} IN ({', '.join(repr(str(value)) for value in values)})", name=column)


class Training(Base):
    """One run, identified by name and folder; a resumed run keeps its row. Of an evaluation, each model is a run."""

    __tablename__ = "trainings"
    __table_args__ = (
        sa.UniqueConstraint("run_name", "log_path"),
        _one_of("status", RUN_STATUSES),
        sa.Index("ix_trainings_latest", "started_at", "id"),
    )

    id: Mapped[int] = _key()
    run_name: Mapped[str]
    log_path: Mapped[str]
    config: Mapped[JsonDict]
    image_token_id: Mapped[int]
    """The id that stands for every image token in `turns.prompt_token_ids`."""
    attempt_id: Mapped[UUID]
    """The recorder that wrote last; unfinished records of earlier ones are void."""
    num_attempts: Mapped[int] = mapped_column(default=1)
    status: Mapped[str]
    error: Mapped[str | None]
    first_step: Mapped[int]
    """Where the latest attempt began, 1 for a run's first one; 0 without steps, and if another system sent the run."""
    num_completed_steps: Mapped[int] = mapped_column(default=0)
    total_steps: Mapped[int]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    heartbeat_at: Mapped[datetime]
    """The recorder's last heartbeat."""
    alias: Mapped[str | None]
    """What people call the run; the monitor writes it, like `is_pinned`."""
    is_pinned: Mapped[bool] = mapped_column(server_default=sa.false())
    updated_at: Mapped[datetime] = _updated()


class SourceColumns:
    """What steps and evaluations have in common: rollouts come from either."""

    id: Mapped[int] = _key()
    training_id: Mapped[int] = _foreign_key("trainings.id")
    step: Mapped[int]
    attempt_id: Mapped[UUID]
    status: Mapped[str]
    policy_version: Mapped[int]
    """The newest version when it began; every turn has its own."""
    group_size: Mapped[int]
    num_groups: Mapped[int]
    num_ended_groups: Mapped[int] = mapped_column(default=0)
    task_pks: Mapped[list[int]] = mapped_column(ARRAY(sa.BigInteger()))
    """The task instances that it was started with, in order."""
    metrics: Mapped[JsonDict | None]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    updated_at: Mapped[datetime] = _updated()


class Step(SourceColumns, Base):
    """One training step, counted from 1: its rollouts, then one optimizer step."""

    __tablename__ = "steps"
    __table_args__ = (sa.UniqueConstraint("training_id", "step"), _one_of("status", STEP_STATUSES))

    trained_policy_version: Mapped[int | None]
    """The version that the step produced."""
    datums_sha256: Mapped[str | None]
    num_datums: Mapped[int | None]
    trained_on: Mapped[str | None]
    """The machine that trained it: with another, sums are rounded differently."""
    adapter_sha256: Mapped[str | None]
    """Of the adapter's weights after it."""
    rollouts_ended_at: Mapped[datetime | None]


class Eval(SourceColumns, Base):
    """One evaluation after training step `step`; the baseline, at step 0, evaluates the untrained model."""

    __tablename__ = "evals"
    __table_args__ = (
        sa.UniqueConstraint("training_id", "phase", "step"),
        _one_of("status", RUN_STATUSES),
        _one_of("phase", ("baseline", "eval")),
    )

    phase: Mapped[Phase]


class TaskRow(Base):
    """One task instance as it was defined when a run used it; a changed definition is a new row."""

    __tablename__ = "tasks"
    __table_args__ = (sa.Index("ix_tasks_task_id_seed", "task_id", "seed"),)

    id: Mapped[int] = _key()
    definition_sha256: Mapped[str] = mapped_column(sa.Text, unique=True)
    task_id: Mapped[str]
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    instruction: Mapped[str]
    category: Mapped[str]
    difficulty: Mapped[str]
    max_turns: Mapped[int]
    tags: Mapped[list[str]] = mapped_column(ARRAY(sa.Text()))
    created_at: Mapped[datetime] = _now()


class Group(Base):
    """Rollouts of one task instance, in a step or in an evaluation."""

    __tablename__ = "groups"
    __table_args__ = (
        sa.CheckConstraint("num_nonnulls(step_id, eval_id) = 1", name="one_parent"),
        sa.UniqueConstraint("step_id", "group_id"),
        sa.UniqueConstraint("eval_id", "group_id"),
        _one_of("status", RUN_STATUSES),
    )

    id: Mapped[int] = _key()
    training_id: Mapped[int] = _foreign_key("trainings.id", index=True)
    step_id: Mapped[int | None] = _foreign_key("steps.id")
    eval_id: Mapped[int | None] = _foreign_key("evals.id")
    group_id: Mapped[str]
    group_index: Mapped[int]
    task_pk: Mapped[int | None] = mapped_column(sa.BigInteger, sa.ForeignKey("tasks.id"), index=True)
    task_id: Mapped[str]
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    status: Mapped[str]
    num_rollouts: Mapped[int | None]
    """Members with a reward, as the figures below without those that go on from another one."""
    num_faulty: Mapped[int | None]
    num_successes: Mapped[int | None]
    reward_mean: Mapped[float | None]
    reward_std: Mapped[float | None]
    """Population standard deviation."""
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]
    updated_at: Mapped[datetime] = _updated()


class RolloutRow(Base):
    """One attempt at a task; inserted at its start, completed when its group has ended."""

    __tablename__ = "rollouts"
    __table_args__ = (
        sa.UniqueConstraint("training_id", "rollout_id"),
        _one_of("status", RUN_STATUSES),
        _one_of("stop_reason", tuple(StopReason)),
        sa.CheckConstraint("(parent_id IS NULL) = (fork_turn = 0)", name="fork_turn"),
        sa.Index("ix_rollouts_task_id_started_at", "task_id", "started_at"),
        sa.Index("ix_rollouts_rollout_id", "rollout_id"),
        sa.Index("ix_rollouts_verdict", "training_id", "group_pk", "status", "success", "stop_reason"),
        sa.Index("ix_rollouts_error", "training_id", postgresql_where=sa.text("error IS NOT NULL")),
    )

    id: Mapped[int] = _key()
    training_id: Mapped[int] = _foreign_key("trainings.id")
    group_pk: Mapped[int] = _foreign_key("groups.id", index=True)
    task_pk: Mapped[int | None] = mapped_column(sa.BigInteger, sa.ForeignKey("tasks.id"), index=True)
    rollout_id: Mapped[str]
    task_id: Mapped[str]
    seed: Mapped[int] = mapped_column(sa.BigInteger)
    group_index: Mapped[int]
    member_index: Mapped[int]
    position: Mapped[int | None]
    """Place in the group's `rollouts` or, if it has no reward, in its `faulty`."""
    device_id: Mapped[str | None]
    worker: Mapped[str | None]
    """The rollout worker that ran it; None for the run's own process."""
    parent_id: Mapped[str | None]
    """`rollout_id` of the rollout in its group, or that was taken over, from which it went on; None: from the task."""
    fork_turn: Mapped[int] = mapped_column(server_default="0")
    """The turn from which it did. The turns before it, which it has too, are its parent's, and trained there."""
    max_turns: Mapped[int | None]
    status: Mapped[str]
    num_turns: Mapped[int] = mapped_column(default=0)
    stop_reason: Mapped[str | None]
    answer: Mapped[str | None]
    error: Mapped[str | None]
    success: Mapped[bool | None]
    reward: Mapped[float | None]
    reward_parts: Mapped[JsonDict | None]
    turn_rewards: Mapped[list[float] | None]
    """What each turn earned, of the reward; None if all of it is earned by how the rollout ends."""
    advantage: Mapped[float | None]
    turn_advantages: Mapped[list[float] | None]
    """One per turn; None if every turn has the rollout's."""
    started_at: Mapped[datetime]
    started_unix_s: Mapped[float | None]
    """`started_at` exactly as the run measured it."""
    duration_s: Mapped[float | None]
    ended_at: Mapped[datetime | None]
    max_gap: Mapped[float | None]
    """Of its trained tokens, the largest |trainer - sampler| log-probability; then the signed one."""
    max_log_ratio: Mapped[float | None]
    min_logprob: Mapped[float | None]
    """The lowest log-probability with which one was sampled."""
    num_prompt_tokens: Mapped[int | None]
    """Of its own turns, not of those that it shares with its parent. None until it has ended, as what follows."""
    num_cached_tokens: Mapped[int | None]
    """Those of its prompts that the model server had computed before."""
    num_sampled_tokens: Mapped[int | None]
    num_trained_tokens: Mapped[int | None]
    """Sampled tokens that have been trained on; None if none was."""
    sampling_s: Mapped[float | None]
    """Of its requests to the model."""
    device_s: Mapped[float | None]
    """From when it had its device until it ended, without the judge's time; None if it never had one."""
    pruned_at: Mapped[datetime | None]
    """When those of its screenshots were removed that no other rollout shows."""
    updated_at: Mapped[datetime] = _updated()


class Replay(Base):
    """A rollout of an earlier step that joined a group in which every member failed, and was trained on with it."""

    __tablename__ = "replays"

    group_pk: Mapped[int] = mapped_column(
        sa.BigInteger, sa.ForeignKey("groups.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(primary_key=True)
    rollout_pk: Mapped[int] = _foreign_key("rollouts.id", index=True)
    advantage: Mapped[float]
    turn_advantages: Mapped[list[float] | None]


class Environment(Base):
    """The device that a rollout used."""

    __tablename__ = "environments"
    __table_args__ = (_one_of("status", ("running", "released", "failed")),)

    id: Mapped[int] = _key()
    rollout_pk: Mapped[int] = mapped_column(
        sa.BigInteger, sa.ForeignKey("rollouts.id", ondelete="CASCADE"), unique=True
    )
    device_id: Mapped[str] = mapped_column(index=True)
    status: Mapped[str]
    error: Mapped[str | None]
    started_at: Mapped[datetime]
    ended_at: Mapped[datetime | None]


class Screenshot(Base):
    """An encoded image; stored once, however many turns show it."""

    __tablename__ = "screenshots"
    __table_args__ = (_one_of("format", ("png", "jpeg")),)

    sha256: Mapped[str] = mapped_column(sa.Text, primary_key=True)
    data: Mapped[bytes | None] = mapped_column(sa.LargeBinary)
    """None if it was pruned, or lies in the store of `screenshots.py`."""
    size_bytes: Mapped[int | None]
    """None in rows of earlier versions, which have `data`."""
    removed_at: Mapped[datetime | None]
    """When it was pruned."""
    format: Mapped[str]
    width_px: Mapped[int | None]
    """None for an image that an earlier version wrote when it had only appeared in prompts."""
    height_px: Mapped[int | None]
    created_at: Mapped[datetime] = _now()


class RolloutImage(Base):
    """An image that a rollout shows, before or after a turn or in a prompt; a pruned rollout keeps none."""

    __tablename__ = "rollout_images"
    __table_args__ = (sa.Index("ix_rollout_images_sha256_rollout_pk", "sha256", "rollout_pk"),)

    rollout_pk: Mapped[int] = mapped_column(
        sa.BigInteger, sa.ForeignKey("rollouts.id", ondelete="CASCADE"), primary_key=True
    )
    sha256: Mapped[str] = mapped_column(sa.Text, sa.ForeignKey("screenshots.sha256"), primary_key=True)


class TurnRow(Base):
    """One turn: request, answer, action, screenshots. A turn of text alone has no screenshot before it."""

    __tablename__ = "turns"
    __table_args__ = (
        sa.UniqueConstraint("rollout_pk", "turn_index"),
        sa.CheckConstraint("cardinality(sampled_tokens) = cardinality(sampling_logprobs)", name="sampling_logprobs"),
        sa.CheckConstraint(
            "training_logprobs IS NULL OR cardinality(training_logprobs) = cardinality(sampled_tokens)",
            name="training_logprobs",
        ),
        sa.CheckConstraint("num_nonnulls(failure_kind, failure_message) IN (0, 2)", name="failure"),
        sa.Index("ix_turns_failure_kind", "failure_kind", "rollout_pk", postgresql_where=sa.text(_IS_UNREAD)),
    )

    id: Mapped[int] = _key()
    rollout_pk: Mapped[int] = _foreign_key("rollouts.id")
    turn_index: Mapped[int]
    response_id: Mapped[str] = mapped_column(index=True)
    prompt_token_ids: Mapped[list[int]]
    """Image tokens expanded, each as the training's `image_token_id`."""
    prompt_chunks: Mapped[Any] = mapped_column(AnyJson(), nullable=False)
    """The prompt's chunks in order: {"text": num_tokens} or {"image": sha256, "tokens": num_tokens}."""
    sampled_tokens: Mapped[list[int]]
    sampling_logprobs: Mapped[list[float]]
    training_logprobs: Mapped[list[float] | None]
    policy_version: Mapped[int]
    stop: Mapped[str]
    text: Mapped[str]
    failure_kind: Mapped[str | None]
    failure_message: Mapped[str | None]
    prompt_matches_renderer: Mapped[bool]
    request: Mapped[JsonDict]
    grammar: Mapped[str | None]
    """What the answer was held to; its log-probabilities are those among the tokens that this allowed."""
    cached_tokens: Mapped[int]
    started_at: Mapped[datetime]
    started_unix_s: Mapped[float]
    duration_s: Mapped[float]
    """Of the request to the model."""
    durations_s: Mapped[JsonDict]
    action: Mapped[JsonDict | None]
    action_error: Mapped[str | None]
    state: Mapped[str | None]
    """The device's name for the state that the turn saw; None if it has none."""
    target_box: Mapped[list[int] | None]
    """Of the element that the action aims at, where an imported data set tells it: left, top, right, bottom."""
    before_sha256: Mapped[str | None] = mapped_column(sa.Text, sa.ForeignKey("screenshots.sha256"), index=True)
    after_sha256: Mapped[str | None] = mapped_column(sa.Text, sa.ForeignKey("screenshots.sha256"), index=True)
    created_at: Mapped[datetime] = _now()


class ValidationRow(Base):
    """A task validator's result at the end of a rollout."""

    __tablename__ = "validations"

    id: Mapped[int] = _key()
    rollout_pk: Mapped[int] = mapped_column(
        sa.BigInteger, sa.ForeignKey("rollouts.id", ondelete="CASCADE"), unique=True
    )
    query: Mapped[str]
    expected: Mapped[str]
    actual: Mapped[str]
    success: Mapped[bool]
    duration_s: Mapped[float]
    created_at: Mapped[datetime] = _now()


class Checkpoint(Base):
    """A checkpoint on disk from which the run can resume."""

    __tablename__ = "checkpoints"
    __table_args__ = (sa.UniqueConstraint("training_id", "step"),)

    id: Mapped[int] = _key()
    training_id: Mapped[int] = _foreign_key("trainings.id")
    step: Mapped[int]
    state_path: Mapped[str]
    sampler_path: Mapped[str]
    created_at: Mapped[datetime] = _now()


class StatusChange(Base):
    """One status change of exactly one row; a killed training is marked `interrupted` when it resumes."""

    __tablename__ = "status_history"
    __table_args__ = (
        sa.CheckConstraint("num_nonnulls(training_id, step_id, eval_id, group_pk, rollout_pk) = 1", name="one_subject"),
    )

    id: Mapped[int] = _key()
    training_id: Mapped[int | None] = _foreign_key("trainings.id", index=True)
    step_id: Mapped[int | None] = _foreign_key("steps.id", index=True)
    eval_id: Mapped[int | None] = _foreign_key("evals.id", index=True)
    group_pk: Mapped[int | None] = _foreign_key("groups.id", index=True)
    rollout_pk: Mapped[int | None] = _foreign_key("rollouts.id", index=True)
    old_status: Mapped[str | None]
    new_status: Mapped[str]
    changed_at: Mapped[datetime]
