"""Whether a rollout solved its task: what a validator read from the device, or the verdict of a judge."""

from collections.abc import Mapping
from dataclasses import dataclass, field

MAX_REWARD = 1e6
"""Largest absolute value of scores and rewards: their squares, and sums of these in float32, stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What a task's validator read from the device, compared with what it expected."""

    query: str
    expected: str
    actual: str
    success: bool
    duration_s: float = 0.0
    score: float | None = None
    """How much of the goal was reached, from 0 to 1, if the validator reports it; of a harness its reward."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Further numbers that a harness reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeVote:
    """One answer of a judge; without a verdict if the endpoint failed or the answer was malformed."""

    success: bool | None
    reason: str = ""
    score: float | None = None
    error: str | None = None
    """Why there is no verdict."""
    is_malformed: bool = False
    """The endpoint answered, but not with a verdict."""
    text: str = ""
    """The answer as it came."""
    duration_s: float = 0.0
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A judge's verdict on a rollout, by majority of its votes; there may be none.

    A majority is more than half of all votes that were asked for, so votes without a verdict count against it.
    """

    model: str
    prompt: str
    prompt_sha256: str
    screenshots: str
    """Which screenshots it saw: "final" or "all"."""
    votes: tuple[JudgeVote, ...]
    decides: bool
    """True if the verdict is the rollout's validation; False if a validator decides."""
    duration_s: float
    cost_usd: float | None = None
    """None if no prices are set."""

    @property
    def success(self) -> bool | None:
        """The verdict of more than half of the votes; None if there is no such majority."""
        for verdict in (True, False):
            if 2 * sum(vote.success is verdict for vote in self.votes) > len(self.votes):
                return verdict
        return None

    @property
    def agreement(self) -> float:
        """Share of the votes that agree with the verdict; 0 without a verdict."""
        verdict = self.success
        return sum(vote.success is verdict for vote in self.votes) / len(self.votes) if verdict is not None else 0.0

    @property
    def score(self) -> float | None:
        """Mean score of the votes that agree with the verdict and give one; None if none does."""
        agreeing = [vote for vote in self.votes if self.success is not None and vote.success is self.success]
        given = [vote.score for vote in agreeing if vote.score is not None]
        return sum(given) / len(given) if given else None

    @property
    def reason(self) -> str:
        """The first reason for the verdict, or why there is none."""
        if self.success is None:
            return next((vote.error for vote in self.votes if vote.error), "the votes are divided")
        return next(vote.reason for vote in self.votes if vote.success is self.success)
