"""Credit per turn: advantages and rewards of turns, and the state that a turn saw, by which turns are compared.

Revision: 0013. Made on 2026-11-26.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0013"
down_revision: str | None = "0012"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_NUMBERS = (("rollouts", "turn_rewards"), ("rollouts", "turn_advantages"), ("replays", "turn_advantages"))


def upgrade() -> None:
    for table, column in _NUMBERS:
        op.add_column(table, sa.Column(column, postgresql.ARRAY(sa.Double[float]()), nullable=True))
    op.add_column("turns", sa.Column("state", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "state")
    for table, column in _NUMBERS:
        op.drop_column(table, column)
