"""What a rollout used, so that the cost of many is summed without reading their turns.

Revision: 0018. Made on 2026-11-27.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op

revision: str = "0018"
down_revision: str | None = "0017"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_COLUMNS: dict[str, type[sa.Integer] | type[sa.Double[float]]] = {
    "num_prompt_tokens": sa.Integer,
    "num_cached_tokens": sa.Integer,
    "num_sampled_tokens": sa.Integer,
    "num_trained_tokens": sa.Integer,
    "sampling_s": sa.Double,
    "device_s": sa.Double,
}
_FILL = """
UPDATE rollouts SET
    (num_prompt_tokens, num_cached_tokens, num_sampled_tokens, num_trained_tokens, sampling_s) = (
        SELECT coalesce(sum(cardinality(prompt_token_ids)), 0), coalesce(sum(cached_tokens), 0),
            coalesce(sum(cardinality(sampled_tokens)), 0), sum(cardinality(training_logprobs)),
            coalesce(sum(duration_s), 0)
        FROM turns WHERE turns.rollout_pk = rollouts.id AND turn_index >= fork_turn),
    device_s = (
        SELECT greatest(0, extract(epoch FROM rollouts.ended_at - used.started_at) - coalesce(judged.duration_s, 0))
        FROM environments used LEFT JOIN judgements judged ON judged.rollout_pk = used.rollout_pk
        WHERE used.rollout_pk = rollouts.id)
WHERE status <> 'running'
"""


def upgrade() -> None:
    op.execute("SET LOCAL statement_timeout = 0")
    for name, kind in _COLUMNS.items():
        op.add_column("rollouts", sa.Column(name, kind(), nullable=True))
    op.execute(_FILL)


def downgrade() -> None:
    for name in _COLUMNS:
        op.drop_column("rollouts", name)
