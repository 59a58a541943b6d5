"""Rollouts name the worker that ran them.

Revision: 0007. Made on 2026-11-26.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0007"
down_revision: str | None = "0006"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("worker", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("rollouts", "worker")
