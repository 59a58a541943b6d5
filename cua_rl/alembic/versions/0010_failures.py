"""Faults, and answers that could not be read, are found without looking at the others.

Revision: 0010. Made on 2026-11-26.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0010"
down_revision: str | None = "0009"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.execute("SET LOCAL statement_timeout = 0")
    is_failed = sa.text("failure_kind IS NOT NULL")
    op.create_index("ix_turns_failure_kind", "turns", ["failure_kind", "rollout_pk"], postgresql_where=is_failed)
    has_error = sa.text("error IS NOT NULL")
    op.create_index("ix_rollouts_error", "rollouts", ["training_id"], postgresql_where=has_error)


def downgrade() -> None:
    op.drop_index("ix_turns_failure_kind", "turns")
    op.drop_index("ix_rollouts_error", "rollouts")
