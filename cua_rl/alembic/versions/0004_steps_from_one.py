"""Steps count from 1, as in metric files and on the console: step N makes policy N, and the baseline is step 0.

Evaluations and checkpoints were numbered after the step before them and stay as they are. So do the steps of runs that
other systems sent (`image_token_id` is 0): theirs are the sender's own numbers.

Revision: 0004. Made on 2026-12-05.
"""

from collections.abc import Sequence

from alembic import op

revision: str = "0004"
down_revision: str | None = "0003"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_OURS = """
    SELECT id FROM trainings WHERE image_token_id <> 0 OR id NOT IN (SELECT training_id FROM project_runs)
"""


def upgrade() -> None:
    _shift(1)


def downgrade() -> None:
    _shift(-1)


def _shift(by: int) -> None:
    """Renumber by way of numbers below zero: a run's numbers stay unique row by row."""
    op.execute(f"UPDATE trainings SET first_step = greatest(0, first_step + ({by})) WHERE id IN ({_OURS})")
    op.execute(f"UPDATE steps SET step = -1000 - (step + ({by})) WHERE training_id IN ({_OURS})")
    op.execute(f"UPDATE steps SET step = -1000 - step WHERE training_id IN ({_OURS})")
