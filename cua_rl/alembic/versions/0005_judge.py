# pyright: reportUnknownArgumentType=false
"""What judges said about rollouts, and the prompts that they were asked with.

Revision: 0005. Made on 2026-11-22.
"""

from collections.abc import Sequence

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision: str = "0005"
down_revision: str | None = "0004"
branch_labels: str | Sequence[str] | None = None
depends_on: str | Sequence[str] | None = None


def upgrade() -> None:
    op.create_table(
        "judge_prompts",
        sa.Column("sha256", sa.Text(), nullable=False),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name=op.f("pk_judge_prompts")),
    )
    op.create_table(
        "judgements",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("rollout_pk", sa.BigInteger(), nullable=False),
        sa.Column("prompt_sha256", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("screenshots", sa.Text(), nullable=False),
        sa.Column("decides", sa.Boolean(), nullable=False),
        sa.Column("success", sa.Boolean(), nullable=True),
        sa.Column("score", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("agreement", sa.Double(), nullable=False),
        sa.Column("votes", postgresql.JSONB(), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("num_answer_tokens", sa.Integer(), nullable=False),
        sa.Column("cost_usd", sa.Double(), nullable=True),
        sa.Column("duration_s", sa.Double(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.ForeignKeyConstraint(["prompt_sha256"], ["judge_prompts.sha256"], name=op.f("fk_judgements_prompt_sha256")),
        sa.ForeignKeyConstraint(
            ["rollout_pk"], ["rollouts.id"], name=op.f("fk_judgements_rollout_pk"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_judgements")),
        sa.UniqueConstraint("rollout_pk", name=op.f("uq_judgements_rollout_pk")),
    )
    op.create_index(op.f("ix_judgements_prompt_sha256"), "judgements", ["prompt_sha256"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_judgements_prompt_sha256"), table_name="judgements")
    op.drop_table("judgements")
    op.drop_table("judge_prompts")
