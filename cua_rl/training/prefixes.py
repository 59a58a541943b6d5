"""Rows that hold, and compute, once what their sequences have in common at the beginning: a tree in every row.

Rollouts of a group begin with the same prompt, and those that went on from a turn of another one with its turns. Such a
sequence leaves out its first tokens and sees those of earlier sequences instead. As no token sees what follows it, all
values, and the sum of all gradients, are those of whole sequences.
"""

from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass

from cua_rl.types.rollout import Datum, EncodedTextChunk

Prefix = tuple[tuple[int, int], ...]
"""What a sequence leaves out, in order: (another sequence's place in the row, how many of its own first tokens)."""

_COPY_SHARE = 8
"""Attention copies keys and values of a prefix for every sequence. A token needs at least eight times their memory in
every model that we know (`tests/real/training/test_prefixes.py`)."""

_LONGEST_REST = 2
"""A prefix is shared if the rest of the sequence is at most twice as long: attention is slower behind a prefix than in
a whole sequence, so with a longer rest it could cost more than it saves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSequence:
    """A datum in a row."""

    index: int
    """Its position in the request."""
    prefix: Prefix = ()

    @property
    def num_shared(self) -> int:
        """Tokens that it leaves out."""
        return sum(count for _, count in self.prefix)


def pack_rows(
    datums: Sequence[Datum], indices: Sequence[int], max_tokens: int, *, shares: bool
) -> list[list[PackedSequence]]:
    """The datums at `indices` in order, at most `max_tokens` a row; a longer datum gets its own row.

    Copies of prefixes count as tokens by their memory. Without `shares`, every sequence is whole.
    """
    rows: list[list[PackedSequence]] = []
    known: list[tuple[tuple[int, ...], Prefix]] = []  # the last row's, sorted, each with its path through the tree
    size = 0.0
    for index in indices:
        names = _name_tokens(datums[index])
        sequence = PackedSequence(index=index, prefix=_find_prefix(datums[index], names, known) if shares else ())
        added = len(names) - sequence.num_shared * (1 - 1 / _COPY_SHARE)
        if not rows or (size and size + added > max_tokens):
            rows.append([])
            known, size = [], 0.0
            sequence, added = PackedSequence(index=index), len(names)
        own = (len(rows[-1]), len(names) - sequence.num_shared)
        rows[-1].append(sequence)
        insort(known, (names, (*sequence.prefix, own)))
        size += added
    return rows


def split_groups(datums: Sequence[Datum], most: int) -> list[list[int]]:
    """Datums that one rank should have, because they may share a prefix: neighbours of a group, `most` tokens at most.

    A longer datum is alone.
    """
    parts: list[list[int]] = []
    size = 0
    for index, datum in enumerate(datums):
        size += datum.model_input.length
        if not parts or size > most or datum.group_id != datums[index - 1].group_id:
            parts.append([])
            size = datum.model_input.length
        parts[-1].append(index)
    return parts


def _name_tokens(datum: Datum) -> tuple[int, ...]:
    """What tells tokens apart: the id of text, the hash, below 0, of the image that the token is a part of."""
    names: list[int] = []
    for chunk in datum.model_input.chunks:
        is_text = isinstance(chunk, EncodedTextChunk)
        names += chunk.tokens if is_text else [-1 - int(chunk.image.sha256, 16)] * chunk.length
    return tuple(names)


def _find_prefix(datum: Datum, names: tuple[int, ...], known: Sequence[tuple[tuple[int, ...], Prefix]]) -> Prefix:
    """The longest beginning that the row has already; () if it is too short.

    It ends before the token that predicts the first trained one, so that a trained token and its predictor are
    neighbours, and between images.
    """
    place = bisect(known, (names, ()))  # the two beside it have most in common with it
    longest = (datum.loss_mask.index(True) if any(datum.loss_mask) else len(names)) - 1
    num_shared, path = 0, ()
    for others, other_path in known[max(0, place - 1) : place + 1]:
        pairs = enumerate(zip(names[:longest], others, strict=False))
        num_common = next((at for at, (one, other) in pairs if one != other), min(longest, len(others)))
        if num_common > num_shared:
            num_shared, path = num_common, other_path
    while num_shared and names[num_shared - 1] < 0 and names[num_shared - 1] == names[num_shared]:
        num_shared -= 1
    if len(names) - num_shared > _LONGEST_REST * num_shared:
        return ()
    prefix: list[tuple[int, int]] = []
    for sequence, count in path:
        count = min(count, num_shared)
        if count:
            prefix.append((sequence, count))
        num_shared -= count
    return tuple(prefix)
