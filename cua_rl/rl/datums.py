"""Rollouts to training sequences: turns merge while the next prompt extends the last prompt and answer exactly.

Every trained token stands in the very context in which it was sampled. Where a prompt does not extend what came
before, a new datum begins, and the reason is counted.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

from cua_rl.types import Datum, EncodedTextChunk, ModelInput, ModelTurn, Rollout


class ForkReason(StrEnum):
    """Why a turn could not be merged into the sequence of the turns before it."""

    HISTORY_CHANGED = "history_changed"
    """The agent showed the model another past (dropped or edited items)."""
    ANSWER_RETOKENISED = "answer_retokenised"
    """The server split the replayed answer into other tokens than were sampled."""
    IMAGE_CHANGED = "image_changed"
    """Same tokens, but another image at some place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDatums:
    """The training sequences of one rollout, and why there is more than one."""

    datums: tuple[Datum, ...]
    forks: Counter[ForkReason]


def build_datums(rollout: Rollout, advantage: float, image_token_id: int, *, group_id: str = "") -> RolloutDatums:
    """Merge the turns of `rollout` into as few sequences as the exact-prefix rule allows."""
    turns = [(turn.index, turn.model) for turn in rollout.turns if turn.model.sampled_tokens]
    forks: Counter[ForkReason] = Counter()
    runs: list[list[tuple[int, ModelTurn]]] = []
    for index, model in turns:
        reason = fork_reason(runs[-1][-1][1], model, image_token_id) if runs else None
        if runs and reason is None:
            runs[-1].append((index, model))
            continue
        if reason is not None:
            forks[reason] += 1
        runs.append([(index, model)])
    datums = tuple(_merge(rollout.rollout_id, run, advantage, group_id) for run in runs)
    return RolloutDatums(datums=datums, forks=forks)


def fork_reason(last: ModelTurn, following: ModelTurn, image_token_id: int) -> ForkReason | None:
    """None if the prompt of `following` begins with the prompt and the answer of `last`, images included."""
    prompt = last.prompt.token_ids(image_token_id)
    extended = following.prompt.token_ids(image_token_id)
    if extended[: len(prompt)] != prompt:
        return ForkReason.HISTORY_CHANGED
    if tuple(extended[len(prompt) : len(prompt) + len(last.sampled_tokens)]) != last.sampled_tokens:
        return ForkReason.ANSWER_RETOKENISED
    seen = [image.sha256 for image in last.prompt.images]
    if [image.sha256 for image in following.prompt.images][: len(seen)] != seen:
        return ForkReason.IMAGE_CHANGED
    return None


def _merge(rollout_id: str, run: Sequence[tuple[int, ModelTurn]], advantage: float, group_id: str) -> Datum:
    last = run[-1][1]
    model_input = ModelInput(chunks=(*last.prompt.chunks, EncodedTextChunk(tokens=last.sampled_tokens)))
    length = model_input.length
    mask, advantages, logprobs = [False] * length, [0.0] * length, [0.0] * length
    for _, model in run:
        start = model.prompt.length
        for offset, logprob in enumerate(model.sampling_logprobs):
            mask[start + offset], advantages[start + offset], logprobs[start + offset] = True, advantage, logprob
    return Datum(
        rollout_id=rollout_id,
        model_input=model_input,
        loss_mask=tuple(mask),
        advantages=tuple(advantages),
        sampling_logprobs=tuple(logprobs),
        policy_versions=tuple(model.policy_version for _, model in run),
        turn_indices=tuple(index for index, _ in run),
        group_id=group_id,
    )


def count_retokenised(datums: Iterable[Datum], rollouts: Iterable[Rollout], image_token_id: int) -> int:
    """Trained tokens whose ids are not, in order, the ids that were sampled; anything but 0 is a defect."""
    trained: dict[str, list[int]] = {}
    for datum in datums:
        ids = datum.model_input.token_ids(image_token_id)
        trained.setdefault(datum.rollout_id, []).extend(
            token for token, is_trained in zip(ids, datum.loss_mask, strict=True) if is_trained
        )
    sampled = {
        rollout.rollout_id: [t for turn in rollout.turns for t in turn.model.sampled_tokens] for rollout in rollouts
    }
    return sum(_num_differences(tokens, sampled[rollout_id]) for rollout_id, tokens in trained.items())


def _num_differences(left: Sequence[int], right: Sequence[int]) -> int:
    return sum(a != b for a, b in zip(left, right, strict=False)) + abs(len(left) - len(right))


def datums_sha256(datums: Sequence[Datum]) -> str:
    """One identity for a step's training data: tokens, images, masks, advantages and log-probabilities, bit for bit."""
    digest = sha256()
    for datum in datums:
        digest.update(json.dumps(_fingerprint(datum), separators=(",", ":")).encode())
    return digest.hexdigest()


def _fingerprint(datum: Datum) -> list[object]:
    chunks = [
        list(chunk.tokens) if isinstance(chunk, EncodedTextChunk) else [chunk.image.sha256, chunk.expected_tokens]
        for chunk in datum.model_input.chunks
    ]
    return [
        datum.rollout_id,
        chunks,
        datum.loss_mask,
        [value.hex() for value in datum.advantages],
        [value.hex() for value in datum.sampling_logprobs],
        datum.policy_versions,
        datum.turn_indices,
    ]
