# pyright: reportUnknownArgumentType=false
"""What the monitor needs: projects, what they sent, verdicts of people, and announcements of every change.

Triggers announce on the channel `cua_rl`, as JSON: {"kind": "turn", "training": 7, "rollout": "…", "turn": 3}.

Revision: 0003. Made on 2026-11-21.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0003"
down_revision: str | None = "0002"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_SOURCE = """
    CASE WHEN changed.eval_id IS NULL THEN 'step' ELSE (SELECT phase FROM evals WHERE id = changed.eval_id) END,
    'step', coalesce((SELECT step FROM steps WHERE id = changed.step_id),
                     (SELECT step FROM evals WHERE id = changed.eval_id))
"""
_ANNOUNCED: tuple[tuple[str, str, str, str], ...] = (
    (
        "trainings",
        "json_build_object('kind', 'run', 'training', changed.id, 'status', changed.status)",
        "",
        "(before.status, before.num_completed_steps) IS DISTINCT FROM (changed.status, changed.num_completed_steps)",
    ),
    (
        "steps",
        "json_build_object('kind', 'step', 'training', changed.training_id, 'phase', 'step', 'step', changed.step,"
        " 'status', changed.status)",
        "",
        "(before.status, before.num_ended_groups) IS DISTINCT FROM (changed.status, changed.num_ended_groups)",
    ),
    (
        "evals",
        "json_build_object('kind', 'eval', 'training', changed.training_id, 'phase', changed.phase,"
        " 'step', changed.step, 'status', changed.status)",
        "",
        "(before.status, before.num_ended_groups) IS DISTINCT FROM (changed.status, changed.num_ended_groups)",
    ),
    (
        "groups",
        "json_build_object('kind', 'group', 'training', changed.training_id, 'group', changed.group_id,"
        f" 'status', changed.status, 'phase', {_SOURCE})",
        "",
        "(before.status, before.num_successes) IS DISTINCT FROM (changed.status, changed.num_successes)",
    ),
    (
        "rollouts",
        "json_build_object('kind', 'rollout', 'training', changed.training_id, 'rollout', changed.rollout_id,"
        " 'group', parent.group_id, 'status', changed.status)",
        "JOIN groups AS parent ON parent.id = changed.group_pk",
        "(before.status, before.reward, before.success) IS DISTINCT FROM"
        " (changed.status, changed.reward, changed.success)",
    ),
)
_TURNS = """
CREATE OR REPLACE FUNCTION cua_rl_announce_turns() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('cua_rl', json_build_object('kind', 'turn', 'training', parent.training_id,
        'rollout', parent.rollout_id, 'turn', max(changed.turn_index))::text)
    FROM changed JOIN rollouts AS parent ON parent.id = changed.rollout_pk
    GROUP BY parent.training_id, parent.rollout_id;
    RETURN NULL;
END $$
"""
_OVERRIDES = """
CREATE OR REPLACE FUNCTION cua_rl_announce_rollout_overrides() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('cua_rl', json_build_object('kind', 'override', 'training', parent.training_id,
        'rollout', parent.rollout_id)::text)
    FROM changed JOIN rollouts AS parent ON parent.id = changed.rollout_pk;
    RETURN NULL;
END $$
"""


def _function(name: str, announcement: str, source: str, condition: str) -> str:
    return f"""
CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('cua_rl', ({announcement})::text) FROM {source} {condition};
    RETURN NULL;
END $$
"""


def _trigger(name: str, table: str, event: str) -> str:
    tables = "NEW TABLE AS changed" + (" OLD TABLE AS before" if event == "UPDATE" else "")
    return (
        f"CREATE TRIGGER {name} AFTER {event} ON {table} REFERENCING {tables} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {name}()"
    )


def upgrade() -> None:
    _create_tables()
    op.create_index("ix_rollouts_training_id_id", "rollouts", ["training_id", "id"], unique=False)
    op.create_index(
        "ix_turns_failed",
        "turns",
        ["rollout_pk", "failure_kind"],
        unique=False,
        postgresql_where=sa.text("failure_kind IS NOT NULL"),
    )
    op.alter_column("turns", "before_sha256", existing_type=sa.Text(), nullable=True)
    for table, announcement, join, condition in _ANNOUNCED:
        insert, update = f"cua_rl_announce_new_{table}", f"cua_rl_announce_{table}"
        op.execute(_function(insert, announcement, f"changed {join}", ""))
        op.execute(_trigger(insert, table, "INSERT"))
        op.execute(_function(update, announcement, f"changed JOIN before USING (id) {join}", f"WHERE {condition}"))
        op.execute(_trigger(update, table, "UPDATE"))
    for table, function in (("turns", _TURNS), ("rollout_overrides", _OVERRIDES)):
        op.execute(function)
        op.execute(_trigger(f"cua_rl_announce_{table}", table, "INSERT"))


def _create_tables() -> None:
    op.create_table(
        "projects",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token_sha256", sa.LargeBinary(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_projects")),
        sa.UniqueConstraint("name", name=op.f("uq_projects_name")),
        sa.UniqueConstraint("token_sha256", name=op.f("uq_projects_token_sha256")),
    )
    op.create_table(
        "project_runs",
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("project_id", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_project_runs_project_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_project_runs_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("training_id", name=op.f("pk_project_runs")),
    )
    op.create_index(op.f("ix_project_runs_project_id"), "project_runs", ["project_id"], unique=False)
    op.create_table(
        "ingest_items",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("project_id", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("client_id", sa.Text(), nullable=False),
        sa.Column("payload", postgresql.JSONB(), nullable=False),
        sa.Column("row_id", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["project_id"], ["projects.id"], name=op.f("fk_ingest_items_project_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ingest_items")),
        sa.UniqueConstraint("project_id", "kind", "client_id", name=op.f("uq_ingest_items_project_id_kind_client_id")),
    )
    op.create_table(
        "rollout_overrides",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=False),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("reward", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout_pk"], ["rollouts.id"], name=op.f("fk_rollout_overrides_rollout_pk"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollout_overrides")),
    )
    op.create_index(op.f("ix_rollout_overrides_rollout_pk"), "rollout_overrides", ["rollout_pk"], unique=False)


def downgrade() -> None:
    names = [(table, f"cua_rl_announce_{table}") for table in ("turns", "rollout_overrides")]
    for table, *_ in _ANNOUNCED:
        names += [(table, f"cua_rl_announce_new_{table}"), (table, f"cua_rl_announce_{table}")]
    for table, name in names:
        op.execute(f"DROP TRIGGER {name} ON {table}")
        op.execute(f"DROP FUNCTION {name}()")
    op.execute("DELETE FROM turns WHERE before_sha256 IS NULL")
    op.alter_column("turns", "before_sha256", existing_type=sa.Text(), nullable=False)
    op.drop_index("ix_turns_failed", table_name="turns")
    op.drop_index("ix_rollouts_training_id_id", table_name="rollouts")
    for table in ("rollout_overrides", "ingest_items", "project_runs", "projects"):
        op.drop_table(table)
