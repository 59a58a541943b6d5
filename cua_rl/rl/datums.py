"""Rollouts to training sequences: turns are merged while each prompt exactly extends the previous prompt and answer.

Every trained token is in the context in which it was sampled. Where a prompt does not extend what came before, a
new datum begins, and the reason is counted.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from itertools import compress, groupby
from operator import ne
from typing import NamedTuple

from cua_rl.rl.advantages import ScoredGroup
from cua_rl.types.rollout import Datum, EncodedTextChunk, ModelInput, ModelTurn, Rollout

TurnLogprobs = tuple[tuple[int, tuple[float, ...]], ...]


class ForkReason(StrEnum):
    """Why a turn could not be merged into the sequence of the turns before it."""

    HISTORY_CHANGED = "history_changed"
    """The agent dropped or edited items of the history."""
    ANSWER_RETOKENISED = "answer_retokenised"
    """The next prompt contains the answer in other tokens than were sampled."""
    IMAGE_CHANGED = "image_changed"
    """The tokens are the same, but an image differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutDatums:
    """The training sequences of one rollout, and why there is more than one."""

    datums: tuple[Datum, ...]
    forks: Counter[ForkReason]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's datums in the order of groups, members and turns."""

    datums: tuple[Datum, ...]
    num_rollouts: int
    """Judged rollouts of all complete groups, including those without datums: the N of a mean over rollouts.

    Those that share turns count as one.
    """
    replayed_ids: frozenset[str] = frozenset()
    """Rollouts that an earlier policy sampled (off-policy)."""
    metrics: Mapping[str, float]


def build_batch(groups: Sequence[ScoredGroup], image_token_id: int, *, keeps_constant: bool = False) -> Batch:
    """The datums of a step; groups without advantages give none, with `keeps_constant` only incomplete ones."""
    datums: list[Datum] = []
    forks: Counter[ForkReason] = Counter()
    num_retokenised = 0
    for scored in groups:
        group = scored.group
        if group.is_incomplete or not (keeps_constant or scored.has_signal):
            continue
        built = [
            build_datums(rollout, advantage, image_token_id, group_id=group.group_id, of_turns=of_turns)
            for rollout, advantage, of_turns in scored.members()
        ]
        of_group = [datum for one in built for datum in one.datums]
        forks += sum((one.forks for one in built), Counter[ForkReason]())
        num_retokenised += count_retokenised(of_group, group.compared, image_token_id)
        datums += of_group
    return Batch(
        datums=tuple(datums),
        num_rollouts=sum(scored.num_trees for scored in groups if not scored.group.is_incomplete),
        replayed_ids=frozenset(rollout.rollout_id for scored in groups for rollout in scored.group.replayed),
        metrics=datum_metrics(datums, forks, num_retokenised),
    )


def build_datums(
    rollout: Rollout, advantage: float, image_token_id: int, *, group_id: str = "", of_turns: Sequence[float] = ()
) -> RolloutDatums:
    """Merge each turn of `rollout` into the sequence of the turn before it where the exact-prefix rule allows.

    Turns that it shares with its parent are the parent's.
    Every turn has the rollout's `advantage`, or its own `of_turns`.
    """
    advantages = of_turns or (advantage,) * len(rollout.turns)
    turns = [
        _ScoredTurn(turn.index, turn.model, own)
        for turn, own in zip(rollout.turns, advantages, strict=True)
        if turn.model.sampled_tokens and turn.index >= rollout.fork_turn
    ]
    forks: Counter[ForkReason] = Counter()
    runs: list[list[_ScoredTurn]] = []
    for turn in turns:
        reason = fork_reason(runs[-1][-1].model, turn.model, image_token_id) if runs else None
        if runs and reason is None:
            runs[-1].append(turn)
            continue
        if reason is not None:
            forks[reason] += 1
        runs.append([turn])
    return RolloutDatums(datums=tuple(_merge(rollout, run, group_id) for run in runs), forks=forks)


class _ScoredTurn(NamedTuple):
    turn_index: int
    model: ModelTurn
    advantage: float


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


def _merge(rollout: Rollout, run: Sequence[_ScoredTurn], group_id: str) -> Datum:
    last = run[-1].model
    model_input = ModelInput(chunks=(*last.prompt.chunks, EncodedTextChunk(tokens=last.sampled_tokens)))
    length = model_input.length
    mask, advantages, logprobs = [False] * length, [0.0] * length, [0.0] * length
    for _, model, advantage in run:
        start = model.prompt.length
        for offset, logprob in enumerate(model.sampling_logprobs):
            mask[start + offset], advantages[start + offset], logprobs[start + offset] = True, advantage, logprob
    return Datum(
        rollout_id=rollout.rollout_id,
        model_input=model_input,
        loss_mask=tuple(mask),
        advantages=tuple(advantages),
        sampling_logprobs=tuple(logprobs),
        policy_versions=tuple(turn.model.policy_version for turn in run),
        turn_indices=tuple(turn.turn_index for turn in run),
        group_id=group_id,
        grammars=tuple((turn.model.prompt.length, turn.model.grammar) for turn in run if turn.model.grammar),
        tree_id=rollout.tree_id,
    )


def count_retokenised(datums: Iterable[Datum], rollouts: Iterable[Rollout], image_token_id: int) -> int:
    """Trained tokens whose ids are not, in order, the sampled ids; anything but 0 is a bug."""
    trained: defaultdict[str, list[int]] = defaultdict(list)
    for datum in datums:
        ids = datum.model_input.token_ids(image_token_id)
        trained[datum.rollout_id] += compress(ids, datum.loss_mask)
    sampled = {
        rollout.rollout_id: [t for turn in rollout.own_turns for t in turn.model.sampled_tokens] for rollout in rollouts
    }
    num_differences = 0
    for rollout_id, tokens in trained.items():
        expected = sampled[rollout_id]
        num_differences += sum(map(ne, tokens, expected)) + abs(len(tokens) - len(expected))
    return num_differences


def datum_metrics(datums: Sequence[Datum], forks: Counter[ForkReason], num_retokenised: int) -> dict[str, float]:
    """Metrics of the merging of turns into training sequences."""
    num_turns = sum(len(datum.turn_indices) for datum in datums)
    num_rollouts = len({(datum.group_id, datum.rollout_id) for datum in datums})
    return {
        "rollout/num_datums": float(len(datums)),
        "rollout/sequences/mean": len(datums) / num_rollouts if datums else 0.0,
        "rollout/trained_tokens": float(sum(datum.num_trained_tokens for datum in datums)),
        "rollout/datum_tokens": float(sum(datum.model_input.length for datum in datums)),
        "rollout/merged_turn_frac": 1 - len(datums) / num_turns if num_turns else 0.0,
        "rollout/retokenised_tokens": float(num_retokenised),
    } | {f"rollout/forks/{reason}": float(count) for reason, count in forks.items()}


def logprobs_by_turn(
    datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]], leave_out: Collection[str] = ()
) -> Mapping[str, TurnLogprobs]:
    """The trainer's log-probabilities per rollout (except `leave_out`) and turn, which is a run of trained tokens."""
    by_rollout: dict[str, TurnLogprobs] = {}
    for datum, row in zip(datums, training_logprobs, strict=True):
        if datum.rollout_id in leave_out:
            continue
        runs = [
            tuple(row[position] for position, _ in run)
            for is_trained, run in groupby(enumerate(datum.loss_mask), key=lambda entry: entry[1])
            if is_trained
        ]
        turns = tuple(zip(datum.turn_indices, runs, strict=True))
        by_rollout[datum.rollout_id] = (*by_rollout.get(datum.rollout_id, ()), *turns)
    return by_rollout


def datums_sha256(datums: Sequence[Datum]) -> str:
    """Fingerprint of a step's training data, bit for bit: all of a datum but its group."""
    digest = sha256()
    for datum in datums:
        chunks = [
            list(chunk.tokens) if isinstance(chunk, EncodedTextChunk) else [chunk.image.sha256, chunk.expected_tokens]
            for chunk in datum.model_input.chunks
        ]
        content: list[object] = [
            datum.rollout_id,
            chunks,
            datum.loss_mask,
            [value.hex() for value in datum.advantages],
            [value.hex() for value in datum.sampling_logprobs],
            datum.policy_versions,
            datum.turn_indices,
            *datum.grammars,
        ]
        digest.update(json.dumps(content, separators=(",", ":")).encode())
    return digest.hexdigest()
