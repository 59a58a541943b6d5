"""Tables that only the monitor writes: projects, the items they sent, human verdicts and notes."""

from datetime import datetime

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Identity,
    Index,
    LargeBinary,
    Text,
    UniqueConstraint,
    func,
)
from sqlalchemy.orm import Mapped, mapped_column

from cua_rl.database.models import Base, RolloutRow, TurnRow
from cua_rl.types.json_values import JsonDict


class Project(Base):
    """A project may send runs over HTTP, authenticated by a token of which only the hash is stored."""

    __tablename__ = "projects"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    token_sha256: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class ProjectRun(Base):
    """The project that sent a run."""

    __tablename__ = "project_runs"

    training_id: Mapped[int] = mapped_column(
        BigInteger, ForeignKey("trainings.id", ondelete="CASCADE"), primary_key=True
    )
    project_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("projects.id", ondelete="CASCADE"), index=True)


class IngestItem(Base):
    """One item as a project sent it, and the row that was created from it."""

    __tablename__ = "ingest_items"
    __table_args__ = (UniqueConstraint("project_id", "kind", "client_id"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    project_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("projects.id", ondelete="CASCADE"))
    kind: Mapped[str]
    client_id: Mapped[str]
    """Chosen by the sender, else a hash of the payload."""
    payload: Mapped[JsonDict]
    """All updates of the item merged, without images."""
    row_id: Mapped[int | None] = mapped_column(BigInteger)
    """Key in the table of this kind; None if the kind has no row."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    updated_at: Mapped[datetime] = mapped_column(server_default=func.now(), onupdate=func.now())


class RolloutOverride(Base):
    """A person's verdict on a rollout; the newest row counts, and training data never change."""

    __tablename__ = "rollout_overrides"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    rollout_pk: Mapped[int] = mapped_column(BigInteger, ForeignKey("rollouts.id", ondelete="CASCADE"), index=True)
    success: Mapped[bool | None]
    reward: Mapped[float | None]
    reason: Mapped[str]
    actor: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class NoteRow(Base):
    """A text that a person wrote about a run, a rollout or a turn, or a tag that it was given."""

    __tablename__ = "notes"
    __table_args__ = (
        CheckConstraint("num_nonnulls(tag, text) = 1", name="tag_or_text"),
        CheckConstraint("turn_index IS NULL OR rollout_pk IS NOT NULL", name="turn_index"),
        Index("ix_notes_training_id_tag", "training_id", "tag"),
    )

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    training_id: Mapped[int] = mapped_column(BigInteger, ForeignKey("trainings.id", ondelete="CASCADE"))
    rollout_pk: Mapped[int | None] = mapped_column(
        BigInteger, ForeignKey("rollouts.id", ondelete="CASCADE"), index=True
    )
    """None if it is about the whole run."""
    turn_index: Mapped[int | None]
    tag: Mapped[str | None]
    text: Mapped[str | None]
    actor: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


Index("ix_rollouts_training_id_id", RolloutRow.training_id, RolloutRow.id)
Index("ix_turns_failed", TurnRow.rollout_pk, TurnRow.failure_kind, postgresql_where=TurnRow.failure_kind.is_not(None))
