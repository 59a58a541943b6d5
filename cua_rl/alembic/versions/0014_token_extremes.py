"""The extremes of a rollout's tokens, so that outliers among all tokens of a run are found without reading them.

Revision: 0014. Made on 2026-11-26.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0014"
down_revision: str | None = "0013"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS = ("max_gap", "max_log_ratio", "min_logprob")
_FILL = """
UPDATE rollouts SET (max_gap, max_log_ratio, min_logprob) = (
    SELECT max(abs(trained - sampled)), max(trained - sampled), min(sampled)
    FROM turns, unnest(training_logprobs, sampling_logprobs) AS token (trained, sampled)
    WHERE turns.rollout_pk = rollouts.id)
WHERE id IN (SELECT rollout_pk FROM turns WHERE training_logprobs IS NOT NULL)
"""


def upgrade() -> None:
    op.execute("SET LOCAL statement_timeout = 0")
    for name in _COLUMNS:
        op.add_column("rollouts", sa.Column(name, sa.Double(), nullable=True))
    op.execute(_FILL)


def downgrade() -> None:
    for name in _COLUMNS:
        op.drop_column("rollouts", name)
