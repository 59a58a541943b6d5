# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Datums to packed micro-batches: sequences end to end in one row, no padding, positions counted per sequence."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from cua_rl.errors import TrainingError
from cua_rl.types import Datum, EncodedTextChunk, ImageChunk, ModelInput

Grid = tuple[int, int, int]
"""Patches of an image in time, height and width, before merging."""

RopeIndex = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(input_ids [1, seq], token_types [1, seq], grids [num_images, 3] | None) -> position_ids [3, 1, seq]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Several sequences in one row of `seq` tokens, of which `n` are trained."""

    datum_indices: tuple[int, ...]
    """Which datums of the request, in row order."""
    lengths: tuple[int, ...]
    """Tokens per sequence; they add up to `seq`."""
    input_ids: Tensor  # [1, seq]
    position_ids: Tensor  # [3, 1, seq]: time, height, width; every sequence starts at 0
    is_image: Tensor  # [1, seq], bool: the token stands for a piece of an image
    image_hashes: tuple[str, ...]
    """sha256 of the images in row order, repeats included."""
    targets: Tensor  # [n], ids of the trained tokens
    target_positions: Tensor  # [n], where they stand in the row; the token before predicts
    sampling_logprobs: Tensor  # [n]
    advantages: Tensor  # [n]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def predictors(self) -> tuple[Tensor, ...]:
        """Per sequence, where in it the tokens stand that predict trained ones; `n` in all."""
        predicts = torch.zeros(self.num_tokens, dtype=torch.bool)
        predicts[self.target_positions - 1] = True
        return tuple(part.nonzero()[:, 0] for part in predicts.split(list(self.lengths)))


def make_micro_batches(
    datums: Sequence[Datum],
    indices: Sequence[int],
    *,
    grids: Mapping[str, Grid],
    rope_index: RopeIndex,
    image_token_id: int,
    max_tokens: int,
) -> Iterator[MicroBatch]:
    """Pack the datums at `indices` in order, at most `max_tokens` a row; a longer datum gets a row of its own."""
    lengths = [datums[index].model_input.length for index in indices]
    for start, end in pairwise(_row_bounds(lengths, max_tokens)):
        yield _pack(indices[start:end], datums, grids, rope_index, image_token_id)


def _row_bounds(lengths: Sequence[int], max_tokens: int) -> list[int]:
    bounds, in_row = [0], 0
    for index, length in enumerate(lengths):
        if in_row and in_row + length > max_tokens:
            bounds.append(index)
            in_row = 0
        in_row += length
    return [*bounds, len(lengths)] if lengths else bounds


def _pack(
    indices: Sequence[int],
    datums: Sequence[Datum],
    grids: Mapping[str, Grid],
    rope_index: RopeIndex,
    image_token_id: int,
) -> MicroBatch:
    row = [datums[index] for index in indices]
    ids = [torch.tensor([datum.model_input.token_ids(image_token_id)]) for datum in row]
    types = [_token_types(datum.model_input) for datum in row]
    positions = [
        rope_index(one_ids, one_types, _grid_tensor(datum.model_input, grids))
        for datum, one_ids, one_types in zip(row, ids, types, strict=True)
    ]
    input_ids = torch.cat(ids, dim=1)
    target_positions = torch.cat([torch.tensor(datum.loss_mask) for datum in row]).nonzero()[:, 0]
    return MicroBatch(
        datum_indices=tuple(indices),
        lengths=tuple(one_ids.shape[1] for one_ids in ids),
        input_ids=input_ids,
        position_ids=torch.cat(positions, dim=2),
        is_image=torch.cat(types, dim=1) == 1,
        image_hashes=tuple(image.sha256 for datum in row for image in datum.model_input.images),
        targets=input_ids[0, target_positions],
        target_positions=target_positions,
        sampling_logprobs=torch.tensor([x for datum in row for x in datum.sampling_logprobs])[target_positions],
        advantages=torch.tensor([x for datum in row for x in datum.advantages])[target_positions],
    )


def _token_types(model_input: ModelInput) -> Tensor:
    """1 for image tokens, 0 for text, [1, seq]: from the chunks, so that a sampled image mark counts as text."""
    return torch.cat(
        [torch.full((1, chunk.length), int(isinstance(chunk, ImageChunk))) for chunk in model_input.chunks], dim=1
    )


def _grid_tensor(model_input: ModelInput, grids: Mapping[str, Grid]) -> Tensor | None:
    images = model_input.images
    return torch.tensor([grids[image.sha256] for image in images]) if images else None


def check_datums(datums: Sequence[Datum], *, vocabulary_size: int) -> None:
    """Raises `TrainingError` for datums that the model cannot read."""
    if not any(datum.num_trained_tokens for datum in datums):
        raise TrainingError(f"expected at least one trained token, got none in {len(datums)} datums")
    for datum in datums:
        chunks = [chunk for chunk in datum.model_input.chunks if chunk.length]
        if any(isinstance(one, ImageChunk) and isinstance(two, ImageChunk) for one, two in pairwise(chunks)):
            raise TrainingError(f"expected text between the images of {datum.rollout_id!r}, got two side by side")
        largest = max(max(chunk.tokens) for chunk in chunks if isinstance(chunk, EncodedTextChunk))
        if largest >= vocabulary_size:
            raise TrainingError(
                f"expected token ids below {vocabulary_size} in {datum.rollout_id!r}, got {largest}: "
                "sampler and trainer must load the same model folder"
            )


def align_with_tokens(
    datums: Sequence[Datum], micro_batches: Sequence[MicroBatch], values: Sequence[Tensor]
) -> tuple[tuple[float, ...], ...]:
    """Per datum, one value per token, 0.0 off-mask; `values` are [n] vectors, one per micro-batch."""
    aligned: dict[int, tuple[float, ...]] = {}
    for micro_batch, trained in zip(micro_batches, values, strict=True):
        row = torch.zeros(micro_batch.num_tokens)
        row[micro_batch.target_positions.cpu()] = trained.detach().float().cpu()
        parts = row.split(list(micro_batch.lengths))
        aligned |= {index: tuple(part.tolist()) for index, part in zip(micro_batch.datum_indices, parts, strict=True)}
    return tuple(aligned[index] for index in range(len(datums)))
