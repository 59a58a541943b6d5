"""Results of recipes about a recorded run: a repeated step, answers of checkpoints, a comparison of a suite."""

from datetime import datetime
from typing import Literal

from sqlalchemy import BigInteger, ForeignKey, Identity, Index, Text, func
from sqlalchemy.orm import Mapped, mapped_column

from cua_rl.database.models import Base
from cua_rl.types.json_values import JsonDict

AnalysisKind = Literal["replay", "answers", "suite"]


class Analysis(Base):
    """A result of `replay_step`, `ask_checkpoints` or `suite`; the newest one of a step or turn counts."""

    __tablename__ = "analyses"
    __table_args__ = (Index(None, "training_id", "kind"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    training_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("trainings.id", ondelete="CASCADE"))
    kind: Mapped[AnalysisKind] = mapped_column(Text)
    step: Mapped[int | None]
    """That was made again."""
    rollout_pk: Mapped[int | None] = mapped_column(
        BigInteger, ForeignKey("rollouts.id", ondelete="CASCADE"), index=True
    )
    turn_index: Mapped[int | None]
    """That was asked about."""
    result: Mapped[JsonDict]
    """What the recipe also writes to the run's folder."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
