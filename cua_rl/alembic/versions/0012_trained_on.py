"""What a step was trained on, and the fingerprint of its adapter, so that the step can be made again and compared.

Revision: 0012. Made on 2026-11-26.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0012"
down_revision: str | None = "0011"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    for name in ("trained_on", "adapter_sha256"):
        op.add_column("steps", sa.Column(name, sa.Text(), nullable=True))


def downgrade() -> None:
    for name in ("trained_on", "adapter_sha256"):
        op.drop_column("steps", name)
