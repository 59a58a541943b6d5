"""Small, valid instances of the vocabulary for tests."""

from collections.abc import Sequence

from cua_rl.renderers.images import image_size
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.judgement import Judgement, JudgeVote, Validation
from cua_rl.types.rollout import (
    AgentTurn,
    Datum,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelTurn,
    Reward,
    Rollout,
    RolloutGroup,
    StopReason,
    Turn,
)

IMAGE_TOKEN = 9
NO_TENSORS = (2).to_bytes(8, "little") + b"{}"
"""A complete .safetensors file, for model folders whose weights nobody loads."""


def text(*tokens: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=tokens)


def image(data: bytes = b"a", expected_tokens: int = 2) -> ImageChunk:
    return ImageChunk(image=encoded_image(data), expected_tokens=expected_tokens)


def encoded_image(data: bytes, width_px: int = 10, height_px: int = 20) -> EncodedImage:
    return EncodedImage(data=data, format="png", width_px=width_px, height_px=height_px)


def stored_image(data: bytes) -> EncodedImage:
    """An image whose bytes can be decoded, and say its format and size."""
    width_px, height_px = image_size(data)
    return EncodedImage(
        data=data, format="jpeg" if data.startswith(b"\xff\xd8") else "png", width_px=width_px, height_px=height_px
    )


def prompt(*chunks: EncodedTextChunk | ImageChunk) -> ModelInput:
    return ModelInput(chunks=chunks)


def model_turn(
    model_input: ModelInput,
    sampled: Sequence[int] = (7, 8),
    logprobs: Sequence[float] | None = None,
    policy_version: int = 0,
    response_id: str = "resp",
) -> ModelTurn:
    return ModelTurn(
        response_id=response_id,
        prompt=model_input,
        sampled_tokens=tuple(sampled),
        sampling_logprobs=tuple(logprobs if logprobs is not None else [-0.5] * len(sampled)),
        policy_version=policy_version,
        stop="stop",
        text="",
        failure=None,
        prompt_matches_renderer=True,
        request={},
        started_at=0.0,
        duration_s=0.1,
    )


def turn(index: int, model: ModelTurn) -> Turn:
    return Turn(index=index, model=model, agent=AgentTurn(response_id=model.response_id, before=encoded_image(b"png")))


def rollout(
    *models: ModelTurn,
    reward: float | None = 1.0,
    rollout_id: str = "r",
    stop_reason: StopReason = StopReason.FINISHED,
    member_index: int = 0,
) -> Rollout:
    success = reward is not None and reward > 0
    return Rollout(
        rollout_id=rollout_id,
        task_id="task",
        seed=1,
        group_index=0,
        member_index=member_index,
        device_id="device",
        turns=tuple(turn(index, model) for index, model in enumerate(models)),
        stop_reason=stop_reason,
        answer=None,
        validation=None
        if reward is None
        else Validation(query="q", expected="1", actual="1" if success else "0", success=success),
        reward=None if reward is None else Reward(total=reward, parts={"success": reward}),
        error=None,
        started_at=0.0,
        duration_s=1.0,
    )


def judgement(*votes: JudgeVote, decides: bool = True, cost_usd: float | None = None) -> Judgement:
    return Judgement(
        model="judge-1",
        prompt="Decide.",
        prompt_sha256="0" * 64,
        screenshots="final",
        votes=votes,
        decides=decides,
        duration_s=0.5,
        cost_usd=cost_usd,
    )


def group(*rollouts: Rollout, faulty: Sequence[Rollout] = ()) -> RolloutGroup:
    return RolloutGroup(group_id="g", index=0, task_id="task", seed=1, rollouts=tuple(rollouts), faulty=tuple(faulty))


def datum(
    mask: Sequence[bool] = (False, True, True),
    advantages: Sequence[float] | None = None,
    logprobs: Sequence[float] | None = None,
    model_input: ModelInput | None = None,
    rollout_id: str = "r",
    turn_indices: Sequence[int] = (0,),
    group_id: str = "g",
) -> Datum:
    return Datum(
        rollout_id=rollout_id,
        model_input=model_input or prompt(text(*range(1, len(mask) + 1))),
        loss_mask=tuple(mask),
        advantages=tuple(advantages if advantages is not None else [float(flag) for flag in mask]),
        sampling_logprobs=tuple(logprobs if logprobs is not None else [-1.0 * flag for flag in mask]),
        policy_versions=(0,),
        turn_indices=tuple(turn_indices),
        group_id=group_id,
    )
