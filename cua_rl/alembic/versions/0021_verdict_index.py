"""An index of all columns by which sets of rollouts are counted.

Revision: 0021. Made on 2026-11-27.
"""

from collections.abc import Sequence

from alembic import op

revision: str = "0021"
down_revision: str | None = "0020"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_index("ix_rollouts_verdict", "rollouts", ["training_id", "group_pk", "status", "success", "stop_reason"])


def downgrade() -> None:
    op.drop_index("ix_rollouts_verdict", "rollouts")
