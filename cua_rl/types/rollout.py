"""The nouns of the system: a rollout has turns, training has steps. Read this first."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from math import isfinite
from pathlib import Path

from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.judgement import Judgement, Validation
from cua_rl.types.snapshot import Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRef:
    """A LoRA adapter on disk (a peft folder) after `policy_version` optimizer steps of a model; 0 is before any."""

    path: Path
    policy_version: int
    model: str = "policy"  # letters, digits and dots; has one adapter per version

    @property
    def name(self) -> str:
        """The adapter's unique name on the model server."""
        return f"{self.model}-{self.policy_version:06d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are sampled. Top-p and top-k stay off, because the trainer could not reproduce them."""

    max_tokens: int
    temperature: float
    seed: int | None = None
    stops: tuple[str, ...] = ()  # texts at which an answer ends
    grammar: str = ""  # what an answer is held to, as `renderers/answer_form.py` writes it; empty for nothing

    def seeded(self, *place: object) -> "SamplingParams":
        """The same parameters with their own seed for a place in the run; without a seed, unchanged."""
        if self.seed is None:
            return self
        digest = sha256("/".join(map(str, (self.seed, *place))).encode()).digest()
        return replace(self, seed=int.from_bytes(digest[:4], "big"))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedTextChunk:
    """A run of text tokens."""

    tokens: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageChunk:
    """An image that takes `expected_tokens` image tokens (its vision start and end marks are text tokens)."""

    image: EncodedImage
    expected_tokens: int

    @property
    def length(self) -> int:
        return self.expected_tokens


Chunk = EncodedTextChunk | ImageChunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """Text and images in the order in which the model reads them."""

    chunks: tuple[Chunk, ...]

    @property
    def length(self) -> int:
        """Number of tokens, image tokens included."""
        return sum(chunk.length for chunk in self.chunks)

    @property
    def image_chunks(self) -> tuple[ImageChunk, ...]:
        return tuple(chunk for chunk in self.chunks if isinstance(chunk, ImageChunk))

    @property
    def images(self) -> tuple[EncodedImage, ...]:
        return tuple(chunk.image for chunk in self.image_chunks)

    def token_ids(self, image_token_id: int) -> list[int]:
        """The flat ids, every image token as `image_token_id`."""
        ids: list[int] = []
        for chunk in self.chunks:
            ids += [image_token_id] * chunk.length if isinstance(chunk, ImageChunk) else chunk.tokens
        return ids


class StopReason(StrEnum):
    """Why a rollout ended."""

    FINISHED = "finished"
    """The agent said it was done."""
    MAX_TURNS = "max_turns"
    """The agent used up its turns."""
    MAX_TIME = "max_time"
    """The agent used up its time: waits, work between requests, or an action after which the device hangs."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The next prompt would not fit into the model's context."""
    TIME_LIMIT = "time_limit"
    """Device, set-up or lease exceeded its time limit (an infrastructure fault)."""
    DEVICE_ERROR = "device_error"
    """The device failed (an infrastructure fault)."""
    SAMPLING_ERROR = "sampling_error"
    """The model server failed (an infrastructure fault)."""
    TASK_ERROR = "task_error"
    """Set-up or validation of the task failed (an infrastructure fault)."""

    @property
    def is_fault(self) -> bool:
        """True if infrastructure, not the policy, ended the rollout: it must never become a reward."""
        return self in (
            StopReason.TIME_LIMIT,
            StopReason.DEVICE_ERROR,
            StopReason.SAMPLING_ERROR,
            StopReason.TASK_ERROR,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTurn:
    """The model's side of a turn as the gateway recorded it: everything that training needs."""

    response_id: str
    prompt: ModelInput
    sampled_tokens: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    policy_version: int
    stop: str
    """"stop" if the model ended its answer, "length" if it ran into `max_tokens`."""
    text: str  # the sampled text without the end-of-turn token
    failure: ParseFailure | None
    prompt_matches_renderer: bool
    request: Mapping[str, object]
    """The agent's request as JSON, images replaced by their sha256."""
    started_at: float
    """Unix time, seconds."""
    duration_s: float
    cached_tokens: int = 0
    grammar: str = ""  # what the answer was held to: its log-probabilities are those among the tokens allowed

    def __post_init__(self) -> None:
        if len(self.sampled_tokens) != len(self.sampling_logprobs):
            raise ValueError(
                f"expected one log-probability per sampled token, got {len(self.sampling_logprobs)} "
                f"for {len(self.sampled_tokens)} tokens in response {self.response_id!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTurn:
    """The agent's side of a turn: what it saw (None for text alone), what it did, what the device showed afterwards."""

    response_id: str
    """The model's answer that it acted on."""
    before: EncodedImage | None
    action: Action | None = None  # None if the answer could not be parsed or ended the rollout
    action_error: str | None = None
    """The error message to the model if its answer could not be parsed or its action could not be executed."""
    after: EncodedImage | None = None  # None if nothing was executed
    durations_s: Mapping[str, float] = field(default_factory=dict[str, float])  # respond, ground, execute, observe
    more_actions: tuple[Action, ...] = ()  # further ones on the same answer
    target_box: tuple[int, ...] = ()
    """Left, top, right and bottom of the element that the action aims at in `before`, where a data set tells them."""

    @property
    def actions(self) -> tuple[Action, ...]:
        return self.more_actions if self.action is None else (self.action, *self.more_actions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of a rollout: the model's side as the gateway recorded it, and the agent's side."""

    index: int  # from 0
    model: ModelTurn
    agent: AgentTurn
    state: str = ""  # the device's name for the state that the agent saw, if it has one


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The scalar that is trained on, and the parts that it consists of."""

    total: float
    parts: Mapping[str, float]
    of_turns: tuple[float, ...] = ()  # what each turn earned, of the total; the end earned the rest, or all


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task. `reward` is None if and only if an infrastructure fault ended it."""

    rollout_id: str
    task_id: str
    seed: int
    group_index: int
    member_index: int
    device_id: str | None
    turns: tuple[Turn, ...]
    stop_reason: StopReason
    answer: str | None
    validation: Validation | None
    reward: Reward | None
    error: str | None
    started_at: float
    duration_s: float
    judgement: Judgement | None = None
    """The judge's verdict, if one was asked for; a faulty rollout keeps the votes that it cost."""
    worker: str | None = None  # the rollout worker that ran it
    max_turns: int | None = None  # that it was allowed, if known
    parent_id: str | None = None  # of the rollout in its group, or that was taken over, from which it went on
    fork_turn: int = 0  # the turns before this one are its parent's
    moments: tuple[Moment | None, ...] = field(default=(), compare=False, repr=False)  # until siblings begin

    def __post_init__(self) -> None:
        if (self.reward is None) != self.stop_reason.is_fault:
            raise ValueError(
                f"expected a reward for {self.stop_reason!r} unless it is an infrastructure fault, got {self.reward!r}"
            )

    @property
    def success(self) -> bool:
        return self.validation is not None and self.validation.success

    @property
    def own_turns(self) -> tuple[Turn, ...]:
        """Without those that it shares with its parent."""
        return self.turns[self.fork_turn :]

    @property
    def tree_id(self) -> str:
        """The same for a rollout and those that went on from one of its turns."""
        return self.parent_id or self.rollout_id


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """Rollouts of one task instance (same task, same seed); faulty members are kept apart."""

    group_id: str
    index: int
    task_id: str
    seed: int
    rollouts: tuple[Rollout, ...]
    """Members with a reward."""
    faulty: tuple[Rollout, ...] = ()
    replayed: tuple[Rollout, ...] = ()
    """Successes of earlier steps that join the comparison: trained on, but not counted in the group's success."""
    is_incomplete: bool = False
    """Too few members have a reward for a fair comparison: the group is not trained on."""
    category: str = ""  # of the task

    @property
    def rewards(self) -> list[float]:
        return [rollout.reward.total for rollout in self.rollouts if rollout.reward is not None]

    @property
    def compared(self) -> tuple[Rollout, ...]:
        """Everything that gets an advantage: the members with a reward, then the replayed rollouts."""
        return (*self.rollouts, *self.replayed)

    @property
    def compared_rewards(self) -> list[float]:
        return [rollout.reward.total for rollout in self.compared if rollout.reward is not None]

    @property
    def is_constant(self) -> bool:
        """True if all compared rewards are equal, or too few are left to compare: there is no learning signal."""
        return self.is_incomplete or len(set(self.compared_rewards)) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One training sequence. `model_input` is the whole sequence; the per-token fields align with it, token for token.

    Position t of `loss_mask`, `advantages` and `sampling_logprobs` belongs to token t itself (the trainer predicts it
    from the tokens before t). Off-mask values are 0.0. `policy_versions` has one entry per merged turn.
    """

    rollout_id: str
    model_input: ModelInput
    loss_mask: tuple[bool, ...]
    advantages: tuple[float, ...]
    sampling_logprobs: tuple[float, ...]
    policy_versions: tuple[int, ...]
    turn_indices: tuple[int, ...] = ()
    group_id: str = ""  # of its advantage: a replayed rollout may be compared in several groups of a step
    grammars: tuple[tuple[int, str], ...] = ()  # of turns held to one, with the position of the first sampled token
    tree_id: str = ""  # of its rollout, if others went on from it or it went on from another

    def __post_init__(self) -> None:
        length = self.model_input.length
        for name in ("loss_mask", "advantages", "sampling_logprobs"):
            if len(getattr(self, name)) != length:
                raise ValueError(
                    f"expected {length} entries in {name} of {self.rollout_id!r}, got {len(getattr(self, name))}"
                )
        if self.loss_mask and self.loss_mask[0]:
            raise ValueError(f"expected the first token of {self.rollout_id!r} off-mask: nothing predicts it")
        if not all(map(isfinite, self.sampling_logprobs)):
            raise ValueError(f"expected finite sampling log-probabilities in {self.rollout_id!r}")

    @property
    def num_trained_tokens(self) -> int:
        return sum(self.loss_mask)

    @property
    def member(self) -> tuple[str, str]:
        """The member of the group, a rollout or a tree of them: all its datums share a weight."""
        return self.group_id, self.tree_id or self.rollout_id
