"""Judges' verdicts on rollouts with their votes, and each prompt once."""

from datetime import datetime
from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Identity, Text, func
from sqlalchemy.orm import Mapped, mapped_column

from cua_rl.database.columns import AnyJson
from cua_rl.database.models import Base


class JudgePrompt(Base):
    """A judge's system prompt, keyed by the hash of its text."""

    __tablename__ = "judge_prompts"

    sha256: Mapped[str] = mapped_column(Text, primary_key=True)
    text: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class JudgementRow(Base):
    """A judge's result for a rollout, with or without a verdict."""

    __tablename__ = "judgements"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    rollout_pk: Mapped[int] = mapped_column(BigInteger, ForeignKey("rollouts.id", ondelete="CASCADE"), unique=True)
    prompt_sha256: Mapped[str] = mapped_column(Text, ForeignKey("judge_prompts.sha256"), index=True)
    model: Mapped[str]
    screenshots: Mapped[str]
    decides: Mapped[bool]
    """False if the task has a validator, which then decides."""
    success: Mapped[bool | None]
    """None if no majority of the votes agrees."""
    score: Mapped[float | None]
    reason: Mapped[str]
    agreement: Mapped[float]
    """Share of the votes that agree with the verdict."""
    votes: Mapped[Any] = mapped_column(AnyJson(), nullable=False)
    """The fields of each `JudgeVote`, in order."""
    num_prompt_tokens: Mapped[int]
    num_answer_tokens: Mapped[int]
    cost_usd: Mapped[float | None]
    duration_s: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
