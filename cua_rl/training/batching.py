# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Datums as packed micro-batches: sequences end to end in one row, no padding, positions counted per sequence.

`prefixes.py` says what sequences of a row share.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from cua_rl.training import wire
from cua_rl.training.losses import LossTokens
from cua_rl.training.prefixes import PackedSequence, pack_rows
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import Datum, EncodedTextChunk, ImageChunk, ModelInput

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width, before merging."""

RopeIndex = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(input_ids [1, seq], token_types [1, seq], grids [num_images, 3] | None) -> position_ids [3, 1, seq]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Several sequences in one row of `seq` tokens, of which `n` are trained."""

    sequences: tuple[PackedSequence, ...]
    """The datums in row order."""
    lengths: tuple[int, ...]
    """Tokens per sequence without its prefix; they add up to `seq`."""
    input_ids: Tensor  # [1, seq]
    position_ids: Tensor  # [3, 1, seq]: time, height, width; every whole sequence starts at 0
    is_image: Tensor  # [1, seq], bool: the token is a placeholder for a part of an image
    image_hashes: tuple[str, ...]
    """sha256 of the images in row order, repeats included."""
    targets: Tensor  # [n], ids of the trained tokens
    target_positions: Tensor  # [n], in the row; the token before predicts
    turn_ids: Tensor  # [n] int64, counted from 0: which tokens were sampled in one turn
    sampling_logprobs: Tensor  # [n]
    advantages: Tensor  # [n]

    @property
    def datum_indices(self) -> tuple[int, ...]:
        """Positions of the datums in the request, in row order."""
        return tuple(sequence.index for sequence in self.sequences)

    @property
    def num_shared(self) -> tuple[int, ...]:
        """Tokens of each sequence that the row has only in an earlier one."""
        return tuple(sequence.num_shared for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def predictors(self, start: int = 0, end: int | None = None) -> tuple[Tensor, ...]:
        """Per sequence, the positions behind its prefix of the tokens that predict trained ones; `n` in all.

        With `start` and `end`, only tokens of this stretch of the row.
        """
        predicts = torch.zeros(self.num_tokens, dtype=torch.bool)
        predicts[self.target_positions - 1] = True
        predicts[:start] = False
        predicts[self.num_tokens if end is None else end :] = False
        return tuple(part.nonzero()[:, 0] for part in predicts.split(list(self.lengths)))

    def num_image_tokens(self, end: int) -> int:
        """Among the first `end` tokens of the row."""
        return int(self.is_image[0, :end].sum())

    def num_predicted(self, end: int) -> int:
        """Trained tokens that the first `end` tokens of the row predict."""
        return int((self.target_positions <= end).sum())


def make_micro_batches(
    datums: Sequence[Datum],
    indices: Sequence[int],
    *,
    grids: Mapping[str, Grid],
    rope_index: RopeIndex,
    image_token_id: int,
    max_tokens: int,
    shares_prefixes: bool,
) -> Iterator[MicroBatch]:
    """Pack the datums at `indices` as `pack_rows` does."""
    for sequences in pack_rows(datums, indices, max_tokens, shares=shares_prefixes):
        row = [datums[sequence.index] for sequence in sequences]
        ids = [torch.tensor([datum.model_input.token_ids(image_token_id)]) for datum in row]
        # 1 for image tokens, 0 for text, [1, seq] each: from the chunks, because a sampled image token is text
        types = [
            torch.cat([torch.full((1, chunk.length), int(isinstance(chunk, ImageChunk))) for chunk in chunks], dim=1)
            for chunks in (datum.model_input.chunks for datum in row)
        ]
        images = [datum.model_input.images for datum in row]
        grid_rows = [torch.tensor([grids[image.sha256] for image in some]) if some else None for some in images]
        positions = [
            _positions(datum.model_input, rope_index, one_ids, one_types, grids_of_one)
            for datum, one_ids, one_types, grids_of_one in zip(row, ids, types, grid_rows, strict=True)
        ]
        masks = [torch.tensor(datum.loss_mask) for datum in row]
        num_shared = [sequence.num_shared for sequence in sequences]
        own_images = [some[_num_images(datum, n) :] for datum, some, n in zip(row, images, num_shared, strict=True)]

        def own(parts: Sequence[Tensor], num_shared: Sequence[int] = num_shared) -> Tensor:
            """The row: of each sequence what follows its prefix."""
            return torch.cat([part[..., start:] for part, start in zip(parts, num_shared, strict=True)], dim=-1)

        input_ids, own_mask, mask = own(ids), own(masks), torch.cat(masks)
        yield MicroBatch(
            sequences=tuple(sequences),
            lengths=tuple(len(one) - start for one, start in zip(masks, num_shared, strict=True)),
            input_ids=input_ids,
            position_ids=own(positions),
            is_image=own(types) == 1,
            image_hashes=tuple(image.sha256 for some in own_images for image in some),
            targets=input_ids[0, own_mask],
            target_positions=own_mask.nonzero()[:, 0],
            turn_ids=turn_ids(mask),
            sampling_logprobs=_on_mask([datum.sampling_logprobs for datum in row], mask),
            advantages=_on_mask([datum.advantages for datum in row], mask),
        )


def _num_images(datum: Datum, end: int) -> int:
    """Images among the first `end` tokens."""
    chunks = datum.model_input.chunks
    starts = accumulate((chunk.length for chunk in chunks), initial=0)
    return sum(isinstance(chunk, ImageChunk) and start < end for chunk, start in zip(chunks, starts, strict=False))


def _positions(
    model_input: ModelInput, rope_index: RopeIndex, ids: Tensor, types: Tensor, grids: Tensor | None
) -> Tensor:
    """The model's positions of a sequence, [3, 1, seq].

    `rope_index` takes images without text between them for one. So they get a token between them, whose position is
    taken away again.
    """
    chunks = [chunk for chunk in model_input.chunks if chunk.length]
    seams = [
        end
        for (one, other), end in zip(pairwise(chunks), accumulate(chunk.length for chunk in chunks), strict=False)
        if isinstance(one, ImageChunk) and isinstance(other, ImageChunk)
    ]
    if not seams:
        return rope_index(ids, types, grids)
    is_added = torch.zeros(ids.shape[1] + len(seams), dtype=torch.bool)
    is_added[torch.tensor(seams) + torch.arange(len(seams))] = True
    spread_ids, spread_types = (torch.zeros(1, len(is_added), dtype=one.dtype) for one in (ids, types))
    spread_ids[:, ~is_added], spread_types[:, ~is_added] = ids, types
    positions = rope_index(spread_ids, spread_types, grids) - is_added.cumsum(0)
    return positions[:, :, ~is_added]


def pack_greedily(sizes: Sequence[int], limit: int) -> list[slice]:
    """Consecutive runs of entries that add up to at most `limit`; a larger entry is a run by itself."""
    bounds, total = [0], 0
    for index, size in enumerate(sizes):
        if total and total + size > limit:
            bounds.append(index)
            total = 0
        total += size
    return [slice(start, end) for start, end in pairwise([*bounds, len(sizes)])] if sizes else []


def _on_mask(rows: Sequence[Sequence[float]], mask: Tensor) -> Tensor:
    """[n] float32: the values of the trained tokens, datum after datum."""
    return torch.cat([torch.tensor(row, dtype=torch.float32) for row in rows])[mask]


def turn_ids(mask: Tensor) -> Tensor:
    """[n] int64 from the concatenated masks of datums: every run of trained tokens is one turn, counted from 0.

    No run crosses datums: the first token of a datum is never trained.
    """
    starts = mask.clone()
    starts[1:] &= ~mask[:-1]
    return (starts.cumsum(0) - 1)[mask]


def empty_micro_batch(num_tokens: int = 1) -> MicroBatch:
    """Tokens that train nothing, for a pass in which only other ranks have work."""
    nothing = torch.zeros(0)
    return MicroBatch(
        sequences=(),
        lengths=(num_tokens,),
        input_ids=torch.zeros(1, num_tokens, dtype=torch.long),
        position_ids=torch.zeros(3, 1, num_tokens, dtype=torch.long),
        is_image=torch.zeros(1, num_tokens, dtype=torch.bool),
        image_hashes=(),
        targets=nothing.long(),
        target_positions=nothing.long(),
        turn_ids=nothing.long(),
        sampling_logprobs=nothing,
        advantages=nothing,
    )


def make_loss_tokens(request: wire.ForwardBackward, batch: MicroBatch, training_logprobs: Tensor) -> LossTokens:
    """The trained tokens of a micro-batch as the loss sees them, on the device of `training_logprobs` [n]."""
    device = training_logprobs.device
    mask = torch.cat([torch.tensor(request.datums[index].loss_mask) for index in batch.datum_indices])
    turn_ids, in_ratio = batch.turn_ids, None
    if request.ratio_masks is not None:
        in_ratio = torch.cat([torch.tensor(request.ratio_masks[index]) for index in batch.datum_indices])[mask]
        counts = [request.datums[index].num_trained_tokens for index in batch.datum_indices]
        turn_ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))

    def on_device(rows: tuple[tuple[float, ...], ...] | None) -> Tensor | None:
        return None if rows is None else _on_mask([rows[index] for index in batch.datum_indices], mask).to(device)

    return LossTokens(
        training_logprobs=training_logprobs,
        sampling_logprobs=batch.sampling_logprobs.to(device),
        advantages=batch.advantages.to(device),
        turn_ids=turn_ids.to(device),
        in_ratio=None if in_ratio is None else in_ratio.to(device),
        proximal_logprobs=on_device(request.proximal_logprobs),
        reference_logprobs=on_device(request.reference_logprobs),
    )


def token_weights(request: wire.ForwardBackward, datum_indices: Sequence[int], like: Tensor) -> Tensor:
    """[n]: the weight of every trained token in the sum, that of its datum; 1 if the request has no weights."""
    if request.token_weights is None:
        return torch.ones_like(like)
    counts = [request.datums[index].num_trained_tokens for index in datum_indices]
    weights = torch.tensor([request.token_weights[index] for index in datum_indices], dtype=torch.float32)
    return weights.repeat_interleave(torch.tensor(counts)).to(like.device)


def check_datums(datums: Sequence[Datum], *, vocabulary_size: int) -> None:
    """Raises `TrainingError` for datums that the model cannot process."""
    if not any(datum.num_trained_tokens for datum in datums):
        raise TrainingError(f"expected at least one trained token, got none in {len(datums)} datums")
    for datum in datums:
        chunks = [chunk for chunk in datum.model_input.chunks if chunk.length]
        texts = [chunk.tokens for chunk in chunks if isinstance(chunk, EncodedTextChunk)]
        smallest, largest = min(map(min, texts)), max(map(max, texts))
        if smallest < 0 or largest >= vocabulary_size:
            wrong = smallest if smallest < 0 else largest
            raise TrainingError(
                f"expected token ids of 0 to below {vocabulary_size} in {datum.rollout_id!r}, got {wrong}: "
                "sampler and trainer must load the same model folder"
            )


def check_rows(request: wire.ForwardBackward) -> None:
    """Raises `TrainingError` if the values beside the datums do not align with them."""
    if request.token_weights is not None and len(request.token_weights) != len(request.datums):
        raise TrainingError(
            f"expected one token weight per datum, got {len(request.token_weights)} for {len(request.datums)} datums"
        )
    for name, rows in (
        ("proximal log-probabilities", request.proximal_logprobs),
        ("reference log-probabilities", request.reference_logprobs),
        ("ratio masks", request.ratio_masks),
    ):
        if rows is None:
            continue
        lengths = [len(row) for row in rows]
        expected = [datum.model_input.length for datum in request.datums]
        if lengths != expected:
            raise TrainingError(f"expected {name} aligned with the datums' {expected} tokens, got rows of {lengths}")
    if request.loss.kl_loss_coef and request.reference_logprobs is None:
        raise TrainingError(
            "expected reference log-probabilities with kl_loss_coef, got none: ask for reference_logprobs first"
        )


def align_with_tokens(
    datums: Sequence[Datum], micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]
) -> tuple[tuple[float, ...], ...]:
    """Per datum, one value per token, 0.0 off-mask; `values` are [n] vectors, one per micro-batch."""
    aligned: dict[int, tuple[float, ...]] = {}
    for micro_batch, trained in zip(micro_batches, values, strict=True):
        row = torch.zeros(micro_batch.num_tokens)
        row[micro_batch.target_positions.cpu()] = trained.detach().float().cpu()
        parts = zip(micro_batch.sequences, row.split(list(micro_batch.lengths)), strict=True)
        aligned |= {sequence.index: (0.0,) * sequence.num_shared + tuple(part.tolist()) for sequence, part in parts}
    return tuple(aligned[index] for index in range(len(datums)))
