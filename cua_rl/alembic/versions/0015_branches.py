"""Branches: rollouts that went on from a turn of another one.

Revision: 0015. Made on 2026-11-27.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0015"
down_revision: str | None = "0014"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("parent_id", sa.Text(), nullable=True))
    op.add_column("rollouts", sa.Column("fork_turn", sa.Integer(), server_default="0", nullable=False))
    op.create_check_constraint(op.f("ck_rollouts_fork_turn"), "rollouts", "(parent_id IS NULL) = (fork_turn = 0)")


def downgrade() -> None:
    op.drop_constraint(op.f("ck_rollouts_fork_turn"), "rollouts", type_="check")
    op.drop_column("rollouts", "fork_turn")
    op.drop_column("rollouts", "parent_id")
