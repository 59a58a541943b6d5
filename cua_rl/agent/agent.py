"""The interface between a rollout and its agent: built-in, an external program, a harness, or a gbox-mini-agent."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from cua_rl.agent.offered_device import OfferedDevice
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.agent.rollout_watch import RolloutWatch
from cua_rl.environments.device import Device
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.json_values import Json
from cua_rl.types.rollout import AdapterRef, AgentTurn, ModelTurn, SamplingParams, StopReason, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTask:
    """The task of an agent in one rollout."""

    rollout_id: str
    instruction: str
    max_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """How the agent's work ended. `success_claimed` is None if it made no claim; it is never a reward."""

    stop_reason: StopReason
    num_turns: int
    answer: str | None = None
    success_claimed: bool | None = None
    error: str | None = None
    """What went wrong with an agent that ended its rollout by failing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAddress:
    """The address of model and device of one rollout, for an agent in another process."""

    url: str
    """Without `/v1` or `/device`."""
    api_key: str = field(repr=False)
    """Grants access to the model while the rollout is open."""

    @property
    def keyed_url(self) -> str:
        """The address with the key in its path, for agents without a setting for a key."""
        return f"{self.url}/keys/{self.api_key}"

    def variables(self) -> dict[str, str]:
        """Environment variables from which the clients of OpenAI and Anthropic read address and key."""
        return {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.url,
            "ANTHROPIC_API_KEY": self.api_key,
        }


OnTurn = Callable[[AgentTurn], Awaitable[None]]


class ModelAccess(Protocol):
    """Access of agents to the model: each open rollout has its own OpenAI address, and its requests are recorded."""

    async def respond(self, rollout_id: str, request: Json) -> Json:
        """The answer to an OpenAI Responses request of an agent in this process.

        Raises `ContextOverflow` if prompt and answer exceed the model's context, `ConfigError` if the server takes no
        prompts of this configuration, `SamplingError` if it did not answer.
        """
        ...

    def image_url_of(self, rollout_id: str) -> Callable[[EncodedImage], str]:
        """What an agent in this process sends as the `image_url` of a screenshot."""
        ...

    def expose(
        self, rollout_id: str, watch: RolloutWatch, device: OfferedDevice | None = None
    ) -> AbstractContextManager[ModelAddress]:
        """Expose the rollout, and `device`, to another process in the block; `ConfigError` if none can connect."""
        ...


class RecordingAccess(ModelAccess, Protocol):
    """The gateway as rollouts use it: turns are recorded between opening and closing a rollout."""

    def open_rollout(
        self, rollout_id: str, *, params: SamplingParams | None = None, adapter: AdapterRef | None = None
    ) -> None: ...

    def tell(self, rollout_id: str, turns: Sequence[Turn], arrival: Turn | None) -> None: ...

    def close_rollout(self, rollout_id: str) -> tuple[ModelTurn, ...]: ...

    def turns(self, rollout_id: str) -> tuple[ModelTurn, ...]: ...


class Agent(Protocol):
    """Works on a task until it is finished, out of turns or time, or something fails."""

    async def run(
        self, task: AgentTask, device: Device, access: ModelAccess, *, clock: RolloutClock, on_turn: OnTurn
    ) -> AgentOutcome:
        """Work on the task; `on_turn` is called with every turn, in order, before the next one begins.

        The agent charges the policy's time to `clock`, and ends with `MAX_TIME` once it is used up.

        Raises `SamplingError` if the model did not answer, `DeviceError` if the device failed, `AgentError` if an agent
        outside this process failed before the model answered, `ConfigError` if this configuration can never work.
        """
        ...
