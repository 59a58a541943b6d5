"""The grammar that an answer was held to, from which the trainer recomputes which tokens could be sampled.

Revision: 0011. Made on 2026-11-26.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0011"
down_revision: str | None = "0010"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("turns", sa.Column("grammar", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("turns", "grammar")
