# pyright: reportUnknownArgumentType=false
"""Replayed rollouts: which rollout of an earlier step joined which group, with which advantage.

Revision: 0002. Made on 2026-11-21.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0002"
down_revision: str | None = "0001"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "replays",
        sa.Column("group_pk", sa.BigInteger(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=False),
        sa.Column("advantage", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["group_pk"], ["groups.id"], name=op.f("fk_replays_group_pk"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(
            ["rollout_pk"], ["rollouts.id"], name=op.f("fk_replays_rollout_pk"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("group_pk", "position", name=op.f("pk_replays")),
    )
    op.create_index(op.f("ix_replays_rollout_pk"), "replays", ["rollout_pk"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_replays_rollout_pk"), table_name="replays")
    op.drop_table("replays")
