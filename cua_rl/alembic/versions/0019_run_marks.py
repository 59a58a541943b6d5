"""What people call a run, and whether it stands first in the list of runs.

Revision: 0019. Made on 2026-11-27.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0019"
down_revision: str | None = "0018"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.add_column("trainings", sa.Column("alias", sa.Text(), nullable=True))
    op.add_column("trainings", sa.Column("is_pinned", sa.Boolean(), server_default=sa.text("false"), nullable=False))


def downgrade() -> None:
    op.drop_column("trainings", "is_pinned")
    op.drop_column("trainings", "alias")
