# ruff: noqa: E501
# pyright: reportUnknownArgumentType=false
"""The first schema.

Revision: 0001. Made on 2026-11-21.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0001"
down_revision: str | None = None
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "screenshots",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        sa.Column("format", sa.Text(), nullable=False),
        sa.Column("width_px", sa.Integer(), nullable=True),
        sa.Column("height_px", sa.Integer(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("format IN ('png', 'jpeg')", name=op.f("ck_screenshots_format")),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_screenshots")),
    )
    op.create_table(
        "tasks",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("definition_sha256", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("instruction", sa.Text(), nullable=False),
        sa.Column("category", sa.Text(), nullable=False),
        sa.Column("difficulty", sa.Text(), nullable=False),
        sa.Column("max_turns", sa.Integer(), nullable=False),
        sa.Column("tags", postgresql.ARRAY(sa.Text()), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("definition_sha256", name=op.f("uq_tasks_definition_sha256")),
    )
    op.create_index("ix_tasks_task_id_seed", "tasks", ["task_id", "seed"], unique=False)
    op.create_table(
        "trainings",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("run_name", sa.Text(), nullable=False),
        sa.Column("log_path", sa.Text(), nullable=False),
        sa.Column("config", postgresql.JSONB(), nullable=False),
        sa.Column("image_token_id", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("first_step", sa.Integer(), nullable=False),
        sa.Column("num_completed_steps", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "status IN ('running', 'completed', 'failed', 'cancelled')", name=op.f("ck_trainings_status")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_trainings")),
        sa.UniqueConstraint("run_name", "log_path", name=op.f("uq_trainings_run_name_log_path")),
    )
    op.create_index("ix_trainings_latest", "trainings", ["started_at", "id"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("state_path", sa.Text(), nullable=False),
        sa.Column("sampler_path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_checkpoints_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("training_id", "step", name=op.f("uq_checkpoints_training_id_step")),
    )
    op.create_table(
        "evals",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("num_groups", sa.Integer(), nullable=False),
        sa.Column("num_ended_groups", sa.Integer(), nullable=False),
        sa.Column("task_pks", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("metrics", postgresql.JSONB(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("phase IN ('baseline', 'eval')", name=op.f("ck_evals_phase")),
        sa.CheckConstraint("status IN ('running', 'completed', 'failed', 'cancelled')", name=op.f("ck_evals_status")),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_evals_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evals")),
        sa.UniqueConstraint("training_id", "phase", "step", name=op.f("uq_evals_training_id_phase_step")),
    )
    op.create_table(
        "steps",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("attempt_id", sa.Uuid(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("trained_policy_version", sa.Integer(), nullable=True),
        sa.Column("group_size", sa.Integer(), nullable=False),
        sa.Column("num_groups", sa.Integer(), nullable=False),
        sa.Column("num_ended_groups", sa.Integer(), nullable=False),
        sa.Column("task_pks", postgresql.ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("datums_sha256", sa.Text(), nullable=True),
        sa.Column("num_datums", sa.Integer(), nullable=True),
        sa.Column("metrics", postgresql.JSONB(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("rollouts_ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "status IN ('rollouts', 'training', 'completed', 'failed', 'cancelled')", name=op.f("ck_steps_status")
        ),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_steps_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_steps")),
        sa.UniqueConstraint("training_id", "step", name=op.f("uq_steps_training_id_step")),
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("step_id", sa.BigInteger(), nullable=True),
        sa.Column("eval_id", sa.BigInteger(), nullable=True),
        sa.Column("group_id", sa.Text(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("task_pk", sa.BigInteger(), nullable=True),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("num_rollouts", sa.Integer(), nullable=True),
        sa.Column("num_faulty", sa.Integer(), nullable=True),
        sa.Column("num_successes", sa.Integer(), nullable=True),
        sa.Column("reward_mean", sa.Double(), nullable=True),
        sa.Column("reward_std", sa.Double(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("status IN ('running', 'completed', 'failed', 'cancelled')", name=op.f("ck_groups_status")),
        sa.CheckConstraint("num_nonnulls(step_id, eval_id) = 1", name=op.f("ck_groups_one_parent")),
        sa.ForeignKeyConstraint(["eval_id"], ["evals.id"], name=op.f("fk_groups_eval_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_groups_step_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["task_pk"], ["tasks.id"], name=op.f("fk_groups_task_pk")),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_groups_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint("eval_id", "group_id", name=op.f("uq_groups_eval_id_group_id")),
        sa.UniqueConstraint("step_id", "group_id", name=op.f("uq_groups_step_id_group_id")),
    )
    op.create_index(op.f("ix_groups_task_pk"), "groups", ["task_pk"], unique=False)
    op.create_index(op.f("ix_groups_training_id"), "groups", ["training_id"], unique=False)
    op.create_table(
        "rollouts",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("group_pk", sa.BigInteger(), nullable=False),
        sa.Column("task_pk", sa.BigInteger(), nullable=True),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=False),
        sa.Column("group_index", sa.Integer(), nullable=False),
        sa.Column("member_index", sa.Integer(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=True),
        sa.Column("device_id", sa.Text(), nullable=True),
        sa.Column("max_turns", sa.Integer(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("num_turns", sa.Integer(), nullable=False),
        sa.Column("stop_reason", sa.Text(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("reward_parts", postgresql.JSONB(), nullable=True),
        sa.Column("advantage", sa.Double(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_unix_s", sa.Double(), nullable=True),
        sa.Column("duration_s", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "status IN ('running', 'completed', 'failed', 'cancelled')", name=op.f("ck_rollouts_status")
        ),
        sa.CheckConstraint(
            "stop_reason IN ('finished', 'max_turns', 'context_overflow', 'time_limit', 'device_error', 'sampling_error', 'task_error')",
            name=op.f("ck_rollouts_stop_reason"),
        ),
        sa.ForeignKeyConstraint(["group_pk"], ["groups.id"], name=op.f("fk_rollouts_group_pk"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["task_pk"], ["tasks.id"], name=op.f("fk_rollouts_task_pk")),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_rollouts_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("training_id", "rollout_id", name=op.f("uq_rollouts_training_id_rollout_id")),
    )
    op.create_index(op.f("ix_rollouts_group_pk"), "rollouts", ["group_pk"], unique=False)
    op.create_index("ix_rollouts_rollout_id", "rollouts", ["rollout_id"], unique=False)
    op.create_index("ix_rollouts_task_id_started_at", "rollouts", ["task_id", "started_at"], unique=False)
    op.create_index(op.f("ix_rollouts_task_pk"), "rollouts", ["task_pk"], unique=False)
    op.create_table(
        "environments",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=False),
        sa.Column("device_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("status IN ('running', 'released', 'failed')", name=op.f("ck_environments_status")),
        sa.ForeignKeyConstraint(
            ["rollout_pk"], ["rollouts.id"], name=op.f("fk_environments_rollout_pk"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_environments")),
        sa.UniqueConstraint("rollout_pk", name=op.f("uq_environments_rollout_pk")),
    )
    op.create_index(op.f("ix_environments_device_id"), "environments", ["device_id"], unique=False)
    op.create_table(
        "status_history",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=True),
        sa.Column("step_id", sa.BigInteger(), nullable=True),
        sa.Column("eval_id", sa.BigInteger(), nullable=True),
        sa.Column("group_pk", sa.BigInteger(), nullable=True),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=True),
        sa.Column("old_status", sa.Text(), nullable=True),
        sa.Column("new_status", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint(
            "num_nonnulls(training_id, step_id, eval_id, group_pk, rollout_pk) = 1",
            name=op.f("ck_status_history_one_subject"),
        ),
        sa.ForeignKeyConstraint(["eval_id"], ["evals.id"], name=op.f("fk_status_history_eval_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["group_pk"], ["groups.id"], name=op.f("fk_status_history_group_pk"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["rollout_pk"], ["rollouts.id"], name=op.f("fk_status_history_rollout_pk"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["step_id"], ["steps.id"], name=op.f("fk_status_history_step_id"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_status_history_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_status_history")),
    )
    op.create_index(op.f("ix_status_history_eval_id"), "status_history", ["eval_id"], unique=False)
    op.create_index(op.f("ix_status_history_group_pk"), "status_history", ["group_pk"], unique=False)
    op.create_index(op.f("ix_status_history_rollout_pk"), "status_history", ["rollout_pk"], unique=False)
    op.create_index(op.f("ix_status_history_step_id"), "status_history", ["step_id"], unique=False)
    op.create_index(op.f("ix_status_history_training_id"), "status_history", ["training_id"], unique=False)
    op.create_table(
        "turns",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=False),
        sa.Column("turn_index", sa.Integer(), nullable=False),
        sa.Column("response_id", sa.Text(), nullable=False),
        sa.Column("prompt_token_ids", postgresql.ARRAY(sa.Integer()), nullable=False),
        sa.Column("prompt_chunks", postgresql.JSONB(), nullable=False),
        sa.Column("sampled_tokens", postgresql.ARRAY(sa.Integer()), nullable=False),
        sa.Column("sampling_logprobs", postgresql.ARRAY(sa.Double()), nullable=False),
        sa.Column("training_logprobs", postgresql.ARRAY(sa.Double()), nullable=True),
        sa.Column("policy_version", sa.Integer(), nullable=False),
        sa.Column("stop", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("failure_kind", sa.Text(), nullable=True),
        sa.Column("failure_message", sa.Text(), nullable=True),
        sa.Column("prompt_matches_renderer", sa.Boolean(), nullable=False),
        sa.Column("request", postgresql.JSONB(), nullable=False),
        sa.Column("cached_tokens", sa.Integer(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_unix_s", sa.Double(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("durations_s", postgresql.JSONB(), nullable=False),
        sa.Column("action", postgresql.JSONB(), nullable=True),
        sa.Column("action_error", sa.Text(), nullable=True),
        sa.Column("before_sha256", sa.Text(), nullable=False),
        sa.Column("after_sha256", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint(
            "cardinality(sampled_tokens) = cardinality(sampling_logprobs)", name=op.f("ck_turns_sampling_logprobs")
        ),
        sa.CheckConstraint("num_nonnulls(failure_kind, failure_message) IN (0, 2)", name=op.f("ck_turns_failure")),
        sa.CheckConstraint(
            "training_logprobs IS NULL OR cardinality(training_logprobs) = cardinality(sampled_tokens)",
            name=op.f("ck_turns_training_logprobs"),
        ),
        sa.ForeignKeyConstraint(["after_sha256"], ["screenshots.sha256"], name=op.f("fk_turns_after_sha256")),
        sa.ForeignKeyConstraint(["before_sha256"], ["screenshots.sha256"], name=op.f("fk_turns_before_sha256")),
        sa.ForeignKeyConstraint(["rollout_pk"], ["rollouts.id"], name=op.f("fk_turns_rollout_pk"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_turns")),
        sa.UniqueConstraint("rollout_pk", "turn_index", name=op.f("uq_turns_rollout_pk_turn_index")),
    )
    op.create_index(op.f("ix_turns_after_sha256"), "turns", ["after_sha256"], unique=False)
    op.create_index(op.f("ix_turns_before_sha256"), "turns", ["before_sha256"], unique=False)
    op.create_index(op.f("ix_turns_response_id"), "turns", ["response_id"], unique=False)
    op.create_table(
        "validations",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=False),
        sa.Column("query", sa.Text(), nullable=False),
        sa.Column("expected", sa.Text(), nullable=False),
        sa.Column("actual", sa.Text(), nullable=False),
        sa.Column("success", sa.Boolean(), nullable=False),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_pk"], ["rollouts.id"], name=op.f("fk_validations_rollout_pk"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_validations")),
        sa.UniqueConstraint("rollout_pk", name=op.f("uq_validations_rollout_pk")),
    )


def downgrade() -> None:
    op.drop_table("validations")
    op.drop_index(op.f("ix_turns_response_id"), table_name="turns")
    op.drop_index(op.f("ix_turns_before_sha256"), table_name="turns")
    op.drop_index(op.f("ix_turns_after_sha256"), table_name="turns")
    op.drop_table("turns")
    op.drop_index(op.f("ix_status_history_training_id"), table_name="status_history")
    op.drop_index(op.f("ix_status_history_step_id"), table_name="status_history")
    op.drop_index(op.f("ix_status_history_rollout_pk"), table_name="status_history")
    op.drop_index(op.f("ix_status_history_group_pk"), table_name="status_history")
    op.drop_index(op.f("ix_status_history_eval_id"), table_name="status_history")
    op.drop_table("status_history")
    op.drop_index(op.f("ix_environments_device_id"), table_name="environments")
    op.drop_table("environments")
    op.drop_index(op.f("ix_rollouts_task_pk"), table_name="rollouts")
    op.drop_index("ix_rollouts_task_id_started_at", table_name="rollouts")
    op.drop_index("ix_rollouts_rollout_id", table_name="rollouts")
    op.drop_index(op.f("ix_rollouts_group_pk"), table_name="rollouts")
    op.drop_table("rollouts")
    op.drop_index(op.f("ix_groups_training_id"), table_name="groups")
    op.drop_index(op.f("ix_groups_task_pk"), table_name="groups")
    op.drop_table("groups")
    op.drop_table("steps")
    op.drop_table("evals")
    op.drop_table("checkpoints")
    op.drop_index("ix_trainings_latest", table_name="trainings")
    op.drop_table("trainings")
    op.drop_index("ix_tasks_task_id_seed", table_name="tasks")
    op.drop_table("tasks")
    op.drop_table("screenshots")
