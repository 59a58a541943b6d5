"""The interface with which the gateway samples: vLLM servers (`client.py`) or a Tinker service (`run/tinker.py`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from cua_rl.types.rollout import AdapterRef, ModelInput, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """A prompt in both forms, as tokens and images and as a conversation, and how it is answered."""

    prompt: ModelInput
    """As the renderer writes it."""
    payload: Mapping[str, object]
    """The same prompt, and `params`, as a request to vLLM's Responses API."""
    params: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The server's prompt tokens and sampled tokens."""

    prompt_ids: tuple[int, ...]
    """Including all placeholder tokens of images."""
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    is_complete: bool
    """False if the answer reached the token limit."""
    cached_tokens: int


class Sampler(Protocol):
    """What answers turns; `client.SamplingClient` says what the methods do."""

    current: AdapterRef | None

    @property
    def max_model_len(self) -> int: ...

    def pin(self, adapter: AdapterRef) -> None: ...

    def unpin(self, adapter: AdapterRef) -> None: ...

    def forget(self, sticky_key: str) -> None: ...

    async def sample_turn(
        self, turn: TurnRequest, *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> tuple[Sampled, AdapterRef | None]: ...
