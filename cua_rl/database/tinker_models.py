"""Tables of a Tinker service: keys, sessions, models and their requests, checkpoints, sampling sessions."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Identity, LargeBinary, Text, func
from sqlalchemy.orm import Mapped, mapped_column

from cua_rl.database.columns import AnyJson
from cua_rl.database.models import Base


def _owned_by(target: str) -> Mapped[Any]:
    return mapped_column(ForeignKey(target, ondelete="CASCADE"), index=True)


class TinkerKey(Base):
    """A key, of which only the hash is stored; it sees what was made with it."""

    __tablename__ = "tinker_keys"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    name: Mapped[str] = mapped_column(Text, unique=True)
    key_sha256: Mapped[bytes] = mapped_column(LargeBinary, unique=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class TinkerSession(Base):
    """One client program."""

    __tablename__ = "tinker_sessions"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    key_id: Mapped[int] = _owned_by("tinker_keys.id")
    user_metadata: Mapped[Any] = mapped_column(AnyJson(), nullable=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    seen_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class TinkerModel(Base):
    """An adapter in training: what it began with, and the snapshot from which it is restored."""

    __tablename__ = "tinker_models"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    session_id: Mapped[str] = _owned_by("tinker_sessions.id")
    lora_rank: Mapped[int]
    seed: Mapped[int] = mapped_column(BigInteger)
    user_metadata: Mapped[Any] = mapped_column(AnyJson(), nullable=True)
    num_steps: Mapped[int] = mapped_column(default=0)
    snapshot_seq: Mapped[int] = mapped_column(default=-1)
    """The last request whose effect the snapshot holds."""
    snapshot: Mapped[str | None]
    """Folder; None before the first one."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    requested_at: Mapped[datetime] = mapped_column(server_default=func.now())


class TinkerRequest(Base):
    """A request to a model; its number, counted by the client, is its place in the order."""

    __tablename__ = "tinker_requests"

    model_id: Mapped[str] = mapped_column(Text, ForeignKey("tinker_models.id", ondelete="CASCADE"), primary_key=True)
    seq_id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    body_sha256: Mapped[bytes] = mapped_column(LargeBinary)
    body: Mapped[bytes | None] = mapped_column(LargeBinary)
    """Kept until a snapshot holds its effect."""
    status: Mapped[str]
    answer: Mapped[bytes | None] = mapped_column(LargeBinary)
    """The result, or the error as JSON; deleted some time after it was fetched."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    ended_at: Mapped[datetime | None]


class TinkerCheckpoint(Base):
    """A saved state or adapter under its tinker:// path."""

    __tablename__ = "tinker_checkpoints"

    path: Mapped[str] = mapped_column(Text, primary_key=True)
    model_id: Mapped[str] = _owned_by("tinker_models.id")
    version: Mapped[int]
    """Number of the request that saved it."""
    folder: Mapped[str]
    size_bytes: Mapped[int] = mapped_column(BigInteger)
    is_public: Mapped[bool] = mapped_column(default=False)
    user_metadata: Mapped[Any] = mapped_column(AnyJson(), nullable=True)
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
    expires_at: Mapped[datetime | None] = mapped_column(index=True)


class TinkerSampler(Base):
    """A sampling session: what it samples from, None for the base model."""

    __tablename__ = "tinker_samplers"

    id: Mapped[str] = mapped_column(Text, primary_key=True)
    session_id: Mapped[str] = _owned_by("tinker_sessions.id")
    model_path: Mapped[str | None]
    """The checkpoint; None also for weights that were saved for this session alone."""
    model_id: Mapped[str | None] = mapped_column(Text, index=True)
    version: Mapped[int | None]
    folder: Mapped[str | None]
    is_inflight: Mapped[bool] = mapped_column(default=False)
    """Whether it moves on to what its model saves later."""
    used_at: Mapped[datetime] = mapped_column(server_default=func.now())
