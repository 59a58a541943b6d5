"""Which images a rollout shows, so that those that none shows are found at once; and screenshots without their bytes.

Revision: 0008. Made on 2026-11-26.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0008"
down_revision: str | None = "0007"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

# what other systems asked their models names its images in the request alone
_FILL = """
INSERT INTO rollout_images (rollout_pk, sha256)
SELECT DISTINCT turns.rollout_pk, screenshots.sha256
FROM turns CROSS JOIN LATERAL (
    SELECT before_sha256 UNION ALL SELECT after_sha256
    UNION ALL SELECT chunk ->> 'image' FROM jsonb_array_elements(prompt_chunks) AS chunk
    UNION ALL SELECT substr(named #>> '{}', 8)
    FROM jsonb_path_query(request, '$.** ? (@.type() == "string" && @ starts with "sha256:")') AS named
    WHERE prompt_chunks = '[]'
) AS shown (sha256) JOIN screenshots ON screenshots.sha256 = shown.sha256
"""


def upgrade() -> None:
    op.execute("SET LOCAL statement_timeout = 0")
    op.execute("CREATE TABLE rollout_images (rollout_pk BIGINT NOT NULL, sha256 TEXT NOT NULL)")
    op.execute(_FILL)
    op.create_primary_key(op.f("pk_rollout_images"), "rollout_images", ["rollout_pk", "sha256"])
    op.create_index("ix_rollout_images_sha256_rollout_pk", "rollout_images", ["sha256", "rollout_pk"], unique=False)
    for column, target, deletes in (("rollout_pk", "rollouts.id", "CASCADE"), ("sha256", "screenshots.sha256", None)):
        (table, key), name = target.split("."), op.f(f"fk_rollout_images_{column}")
        op.create_foreign_key(name, "rollout_images", table, [column], [key], ondelete=deletes)
    op.alter_column("screenshots", "data", existing_type=sa.LargeBinary(), nullable=True)
    op.add_column("screenshots", sa.Column("size_bytes", sa.Integer(), nullable=True))
    op.add_column("screenshots", sa.Column("removed_at", sa.DateTime(timezone=True), nullable=True))
    op.add_column("rollouts", sa.Column("pruned_at", sa.DateTime(timezone=True), nullable=True))


def downgrade() -> None:
    op.drop_column("rollouts", "pruned_at")
    op.drop_column("screenshots", "removed_at")
    op.drop_column("screenshots", "size_bytes")
    op.execute("UPDATE screenshots SET data = '' WHERE data IS NULL")
    op.alter_column("screenshots", "data", existing_type=sa.LargeBinary(), nullable=False)
    op.drop_table("rollout_images")
