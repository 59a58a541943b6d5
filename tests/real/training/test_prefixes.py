"""What sequences of a row share is computed once: the same log-probabilities and gradients for fewer tokens."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import chz
import pytest
import torch
from torch import Tensor

from cua_rl.machine.model_sizes import load_model_sizes
from cua_rl.training import wire
from cua_rl.training.batching import MicroBatch, align_with_tokens, make_micro_batches
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.prefixes import PackedSequence, pack_rows, split_groups
from cua_rl.training.trainer import Trainer
from cua_rl.types.rollout import Chunk, Datum, EncodedTextChunk, ImageChunk, ModelInput
from tests.real.training.tiny_families import BUILDERS
from tests.real.training.tiny_qwen3_vl import (
    IMAGE_PAD,
    TINY_ROUNDINGS,
    VISION_END,
    VISION_START,
    draw_screenshot,
    image_chunk,
)
from tests.rounding import assert_equal_but_for_rounding

MODEL_CONFIGS = Path(__file__).parents[2] / "machine" / "model_configs"


def text(rng: random.Random, count: int) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=tuple(rng.randrange(16, 320) for _ in range(count)))


def datum_of(rng: random.Random, chunks: Sequence[Chunk], mask: Sequence[bool]) -> Datum:
    """Like the rollouts of a group: an advantage of its own, and what the sampler said of every trained token."""
    advantage = rng.choice([-1.0, 0.5, 2.0])
    return Datum(
        rollout_id=f"rollout-{rng.randrange(10**6)}",
        model_input=ModelInput(chunks=tuple(chunks)),
        loss_mask=tuple(mask),
        advantages=tuple(advantage if trained else 0.0 for trained in mask),
        sampling_logprobs=tuple(-4 - rng.random() if trained else 0.0 for trained in mask),
        policy_versions=(0,),
    )


def grow(
    rng: random.Random, screens: Sequence[ImageChunk], path: Sequence[Chunk], mask: Sequence[bool], depth: int
) -> Iterator[Datum]:
    """The leaves of a random tree: several answers to one prompt, of which some go on; turns are trained once."""
    prompt: list[Chunk] = [text(rng, rng.randrange(1, 9))]
    for screen in rng.choices(screens, k=rng.randrange(3)):
        prompt += [EncodedTextChunk(tokens=(VISION_START,)), screen, EncodedTextChunk(tokens=(VISION_END,))]
    if rng.random() < 0.2:
        prompt += rng.choices(screens, k=2)  # without text between them, and right before what is sampled
    mask = [*mask, *[False] * sum(chunk.length for chunk in prompt)]
    for _ in range(rng.randrange(1, 4)):
        answer = text(rng, rng.randrange(1, 6))
        chunks, whole_mask = [*path, *prompt, answer], [*mask, *[True] * answer.length]
        if depth and rng.random() < 0.6:
            yield from grow(rng, screens, chunks, whole_mask, depth - 1)
        else:
            yield datum_of(rng, chunks, whole_mask)
        mask = [False] * len(mask)  # what comes before is trained with the first


def random_trees(seed: int) -> list[Datum]:
    rng = random.Random(seed)
    sizes = [(96, 64), (64, 64), (160, 64), (96, 64)]
    screens = [image_chunk(draw_screenshot(rng, width=width, height=height)) for width, height in sizes]
    return [datum for _ in range(2) for datum in grow(rng, screens, [text(rng, 8)], [False] * 8, 2)]


def named(datum: Datum) -> list[int | str]:
    names: list[int | str] = []
    for chunk in datum.model_input.chunks:
        names += [chunk.image.sha256] * chunk.length if isinstance(chunk, ImageChunk) else chunk.tokens
    return names


def positions_that_tell_what_comes_before(ids: Tensor, types: Tensor, grids: Tensor | None) -> Tensor:
    assert (grids is None) == (not types.any())
    so_far = (ids + 1000 * types).cumsum(1)
    return torch.stack([so_far, 2 * so_far, 3 * so_far])


def micro_batches(datums: Sequence[Datum], max_tokens: int, *, shares: bool = True) -> list[MicroBatch]:
    images = [chunk for datum in datums for chunk in datum.model_input.image_chunks]
    return list(
        make_micro_batches(
            datums,
            range(len(datums)),
            grids={one.image.sha256: (1, one.image.height_px // 16, one.image.width_px // 16) for one in images},
            rope_index=positions_that_tell_what_comes_before,
            image_token_id=IMAGE_PAD,
            max_tokens=max_tokens,
            shares_prefixes=shares,
        )
    )


def test_every_sequence_can_be_read_from_its_row_and_from_those_before_it() -> None:
    num_shared = num_rows = 0
    for seed in range(60):
        datums = random_trees(seed)
        sizes = {one.image.sha256: one.length for datum in datums for one in datum.model_input.image_chunks}
        rows = micro_batches(datums, max_tokens=random.Random(seed).choice([40, 200, 10_000]))
        for row in rows:
            images = iter([name for name in row.image_hashes for _ in range(sizes[name])])
            ids, is_image = row.input_ids[0].tolist(), row.is_image[0].tolist()
            names = [next(images) if one else number for number, one in zip(ids, is_image, strict=True)]
            assert list(images) == []
            ends = torch.tensor(row.lengths).cumsum(0).tolist()
            starts = [end - length for end, length in zip(ends, row.lengths, strict=True)]
            trained = []
            for sequence, start, end in zip(row.sequences, starts, ends, strict=True):
                places = [starts[other] + at for other, count in sequence.prefix for at in range(count)]
                places += range(start, end)
                datum = datums[sequence.index]
                (alone,) = micro_batches([datum], 1)
                assert [names[at] for at in places] == named(datum)
                assert row.position_ids[:, :, places].equal(alone.position_ids)
                trained += [places[at] for at, is_trained in enumerate(datum.loss_mask) if is_trained]
                # a trained token is in the same stretch as the one that predicts it
                assert all(places[at] > start for at, is_trained in enumerate(datum.loss_mask) if is_trained)
            assert trained == row.target_positions.tolist()
            num_shared += sum(row.num_shared)
        values = [row.advantages for row in rows]
        assert align_with_tokens(datums, rows, values) == tuple(datum.advantages for datum in datums)
        num_rows += len(rows)
    assert num_rows > 200
    assert num_shared > 10_000


def group(rng: random.Random, size: int, *, prompt: int, answer: int) -> list[Datum]:
    shared = text(rng, prompt)
    return [datum_of(rng, [shared, text(rng, answer)], [False] * prompt + [True] * answer) for _ in range(size)]


def test_a_group_costs_one_prompt_and_all_answers() -> None:
    datums = group(random.Random(0), 8, prompt=1100, answer=50)

    (row,) = micro_batches(datums, 16384)

    # the prompt's last token predicts the first sampled one of each answer, so every member has it
    assert row.lengths == (1150, *(7 * [51]))
    assert row.sequences[7] == PackedSequence(index=7, prefix=((0, 1099),))
    assert row.num_tokens == 8 * 1150 - 7 * 1099


def test_a_branch_of_a_branch_sees_both_and_a_row_counts_an_eighth_of_what_it_copies() -> None:
    rng = random.Random(0)
    start, turn, other = text(rng, 40), text(rng, 30), text(rng, 30)
    ends = [text(rng, 8) for _ in range(4)]
    parts = [(start, ends[0]), (start, turn, ends[1]), (start, turn, ends[2]), (start, turn, ends[3]), (start, other)]
    datums = [
        datum_of(rng, chunks, [False] * sum(one.length for one in chunks[:-1]) + [True] * chunks[-1].length)
        for chunks in parts
    ]

    (row,) = pack_rows(datums, range(5), 1000, shares=True)
    two = pack_rows(datums, range(5), 101, shares=True)

    branch = ((0, 40), (1, 29))  # its own last token predicts the first trained one
    assert [sequence.prefix for sequence in row] == [(), ((0, 40),), branch, branch, ((0, 39),)]
    # 48 and 38 + 40 / 8 = 43; 78 and 9 + 69 / 8 = 17.6, and then 31 + 39 / 8 = 35.9 is too much
    assert [[sequence.index for sequence in row] for row in two] == [[0, 1], [2, 3], [4]]
    assert [sequence.prefix for sequence in two[1]] == [(), ((0, 69),)]


def test_a_rank_gets_neighbours_of_a_group_up_to_a_limit() -> None:
    rng = random.Random(0)
    datums = [replace(one, group_id=name) for name in "ab" for one in group(rng, 4, prompt=20, answer=5)]
    datums += group(rng, 1, prompt=60, answer=5)

    assert split_groups(datums, 50) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    assert split_groups(datums, 1000) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert split_groups(datums, 0) == [[index] for index in range(9)]


def test_what_is_not_worth_it_or_not_the_same_is_not_shared() -> None:
    rng = random.Random(0)
    screens = [image_chunk(draw_screenshot(rng)) for _ in range(2)]
    start, end = text(rng, 10), text(rng, 6)

    def prefixes(*sequences: Sequence[Chunk], shares: bool = True) -> list[int]:
        datums = [datum_of(rng, one, [False] * (sum(c.length for c in one) - 5) + [True] * 5) for one in sequences]
        (row,) = pack_rows(datums, range(len(datums)), 10_000, shares=shares)
        return [sequence.num_shared for sequence in row]

    assert prefixes([start, screens[0], end], [start, screens[1], end]) == [0, 10]  # the other screen has 6 tokens, too
    assert prefixes([start, screens[0], text(rng, 5)], [start, screens[0], text(rng, 5)]) == [0, 10]  # none is cut
    assert prefixes([start, text(rng, 20)], [start, text(rng, 20)]) == [0, 10]
    assert prefixes([start, text(rng, 20)], [start, text(rng, 21)]) == [0, 0]  # more than twice as long
    assert prefixes([start, end], [start, end], shares=False) == [0, 0]


def test_a_copied_token_takes_at_most_an_eighth_of_the_memory_of_one_that_is_computed() -> None:
    folders = [folder for folder in MODEL_CONFIGS.iterdir() if load_model_sizes(folder).linear is None]
    assert len(folders) >= 5
    for folder in folders:
        model = load_model_sizes(folder)
        of_layer = model.kv_bytes_per_token(1) / model.num_layers
        last = 2 * of_layer * model.num_heads / model.num_kv_heads  # for every head, and the gradient
        for recomputes, copies in ((False, model.num_layers), (True, 2)):  # of all layers; of one, and the gradient
            few, many = (model.activation_bytes(count, 16, recomputes=recomputes) for count in (50_000, 100_000))
            assert of_layer * copies + last <= (many - few) / 50_000 / 8


@pytest.fixture(scope="module")
def moved(config: TrainerConfig) -> Callable[..., Trainer]:
    """Makes trainers whose adapter has left its start, where half of the gradients are zero."""

    def make(**changes: object) -> Trainer:
        trainer = Trainer(chz.replace(config, **changes))
        trainer.forward_backward(wire.ForwardBackward(datums=tuple(random_trees(99)), loss=LossConfig()))
        trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=1e-2)))
        trainer.account.take()
        return trainer

    return make


def step(trainer: Trainer, *batches: Sequence[Datum]) -> tuple[list[Tensor], Tensor, dict[str, float]]:
    """Log-probabilities, the gradient as one vector, and the account."""
    rows: list[Tensor] = []
    for datums in batches:
        output = trainer.forward_backward(wire.ForwardBackward(datums=tuple(datums), loss=LossConfig()))
        rows += [torch.tensor(row) for row in output.training_logprobs]
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainer.model.trainable_parameters]
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=0.0)))
    return rows, torch.cat([one.flatten() for one in found]), trainer.account.take()


def assert_same(
    found: tuple[list[Tensor], Tensor, dict[str, float]], expected: tuple[list[Tensor], Tensor, dict[str, float]]
) -> None:
    for row, other in zip(found[0], expected[0], strict=True):
        assert_equal_but_for_rounding(row, other, TINY_ROUNDINGS)
    assert_equal_but_for_rounding(found[1], expected[1], TINY_ROUNDINGS)
    assert expected[1].norm() > 1.0
    assert (found[1] - expected[1]).norm() < 1e-5 * expected[1].norm()


@pytest.mark.parametrize("seed", [0, 1])
def test_shared_prefixes_leave_log_probabilities_and_gradients_as_they_are(
    moved: Callable[..., Trainer], seed: int
) -> None:
    trainer, datums = moved(), random_trees(seed)
    total = sum(datum.model_input.length for datum in datums)

    shared = step(trainer, datums)
    trainer.model.shares_prefixes = False
    packed, alone = step(trainer, datums), step(trainer, *[[datum] for datum in datums])

    assert shared[2]["trainer/tokens"] + shared[2]["trainer/shared_tokens"] == total
    assert shared[2]["trainer/shared_tokens"] > 0.5 * total
    assert (packed[2]["trainer/tokens"], packed[2]["trainer/shared_tokens"]) == (total, 0.0)
    assert_same(shared, packed)
    assert_same(shared, alone)


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_modules": ("language", "merger", "vision")},
        {"gradient_checkpointing": True, "keeps_attention": True},
        {"micro_batch_tokens": 120},
    ],
    ids=["vision trained", "recomputed", "several rows"],
)
def test_shared_prefixes_are_exact_whatever_is_trained_and_kept(
    moved: Callable[..., Trainer], changes: dict[str, object]
) -> None:
    trainer, datums = moved(**changes), random_trees(0)

    shared = step(trainer, datums)
    trainer.model.shares_prefixes = False

    assert shared[2]["trainer/shared_tokens"] > 0
    assert_same(shared, step(trainer, *[[datum] for datum in datums]))


def test_a_model_with_linear_attention_has_whole_sequences(tmp_path: Path) -> None:
    trainer = Trainer(TrainerConfig(model_path=BUILDERS["qwen3_5"](tmp_path)))
    datums = group(random.Random(0), 3, prompt=20, answer=4)

    _, _, account = step(trainer, datums)

    assert (account["trainer/tokens"], account["trainer/shared_tokens"]) == (3 * 24, 0.0)
