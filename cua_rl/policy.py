"""The policy that acts: its adapter on disk, and how tokens are sampled from it."""

from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """A LoRA adapter on disk (a peft folder) after `policy_version` optimizer steps; version 0 is before any step."""

    path: Path
    policy_version: int

    @property
    def name(self) -> str:
        """The adapter's unique name on the model server."""
        return f"policy-{self.policy_version:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. Top-p and top-k stay off, because the trainer could not reproduce them."""

    max_tokens: int
    temperature: float
    seed: int | None = None

    def seeded(self, *place: object) -> "SamplingParams":
        """The same parameters with a seed of their own for a place in the run; without a seed, unchanged."""
        if self.seed is None:
            return self
        digest = sha256("/".join(map(str, (self.seed, *place))).encode()).digest()
        return replace(self, seed=int.from_bytes(digest[:4], "big"))
