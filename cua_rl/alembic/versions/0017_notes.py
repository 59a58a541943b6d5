"""Notes: what people wrote about runs, rollouts and turns, and the tags that they gave them.

Revision: 0017. Made on 2026-11-27.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0017"
down_revision: str | None = "0016"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "notes",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("training_id", sa.BigInteger(), nullable=False),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=True),
        sa.Column("turn_index", sa.Integer(), nullable=True),
        sa.Column("tag", sa.Text(), nullable=True),
        sa.Column("text", sa.Text(), nullable=True),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.CheckConstraint("num_nonnulls(tag, text) = 1", name=op.f("ck_notes_tag_or_text")),
        sa.CheckConstraint("turn_index IS NULL OR rollout_pk IS NOT NULL", name=op.f("ck_notes_turn_index")),
        sa.ForeignKeyConstraint(["rollout_pk"], ["rollouts.id"], name=op.f("fk_notes_rollout_pk"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["training_id"], ["trainings.id"], name=op.f("fk_notes_training_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notes")),
    )
    op.create_index(op.f("ix_notes_rollout_pk"), "notes", ["rollout_pk"], unique=False)
    op.create_index(op.f("ix_notes_training_id_tag"), "notes", ["training_id", "tag"], unique=False)


def downgrade() -> None:
    op.drop_table("notes")
