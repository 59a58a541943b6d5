"""Rollouts may end because the policy used up its time, which is no fault.

Revision: 0006. Made on 2026-11-22.
"""

from collections.abc import Sequence

from alembic import op

revision: str = "0006"
down_revision: str | None = "0005"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None

_BEFORE = (
    "finished",
    "max_turns",
    "context_overflow",
    "time_limit",
    "device_error",
    "sampling_error",
    "task_error",
)
_AFTER = ("finished", "max_turns", "max_time", "context_overflow", *_BEFORE[3:])


def upgrade() -> None:
    _allow(_AFTER)


def downgrade() -> None:
    op.execute("UPDATE rollouts SET stop_reason = 'max_turns' WHERE stop_reason = 'max_time'")
    _allow(_BEFORE)


def _allow(reasons: Sequence[str]) -> None:
    name = op.f("ck_rollouts_stop_reason")
    op.drop_constraint(name, "rollouts", type_="check")
    op.create_check_constraint(name, "rollouts", f"stop_reason IN ({', '.join(map(repr, reasons))})")
