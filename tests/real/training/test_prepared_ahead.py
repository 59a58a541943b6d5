"""Images that are prepared while the micro-batch before theirs is computed."""

import random
import threading
import weakref
from collections.abc import Iterable

import chz
import pytest
import torch
from PIL import UnidentifiedImageError
from torch import Tensor

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.training.config import TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.training.vision import ImagePreprocessor, PreparedAhead, PreparedImage
from cua_rl.types.rollout import ImageChunk
from tests.builders import image
from tests.real.training.tiny_qwen3_vl import draw_screenshot, image_chunk, make_datum
from tests.real.training.trainer_calls import STEP, gradients, train

A, B, C = ({chunk.image.sha256: chunk} for chunk in (image(name) for name in (b"a", b"b", b"c")))


class Preparation:
    """Prepares when it is let, and remembers what in which thread."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.begun = threading.Event()
        self.prepared: list[tuple[bytes, bool]] = []
        self.patches: list[weakref.ref[Tensor]] = []

    def __call__(self, chunks: Iterable[ImageChunk]) -> dict[str, PreparedImage]:
        is_ahead = threading.current_thread() is not threading.main_thread()
        if is_ahead:
            self.begun.set()
            assert self.may_go_on.wait(10)
        found: dict[str, PreparedImage] = {}
        for chunk in chunks:
            if chunk.image.data == b"c":
                raise UnidentifiedImageError("cannot identify image file")
            self.prepared.append((chunk.image.data, is_ahead))
            patches = torch.full((4, 3), float(chunk.image.data[0]))
            self.patches.append(weakref.ref(patches))
            found[chunk.image.sha256] = PreparedImage(patches=patches, grid=(1, 2, 2), num_tokens=1)
        return found


def test_images_are_prepared_meanwhile_and_only_the_others_when_they_are_needed() -> None:
    preparation = Preparation()

    with PreparedAhead(preparation) as ahead:
        ahead.start(A)
        assert preparation.begun.wait(10)
        assert preparation.prepared == []  # and yet the caller went on
        preparation.may_go_on.set()
        taken = ahead.take(B | A)

    assert list(taken) == [*B, *A]
    assert [float(one.patches[0, 0]) for one in taken.values()] == [ord("b"), ord("a")]
    assert preparation.prepared == [(b"a", True), (b"b", False)]


def test_what_goes_wrong_meanwhile_is_raised_where_the_image_is_needed() -> None:
    preparation = Preparation()
    preparation.may_go_on.set()

    with PreparedAhead(preparation) as ahead:
        ahead.start(C)
        with pytest.raises(UnidentifiedImageError):
            ahead.take(C)
        assert list(ahead.take(B)) == [*B]  # and only there


def test_a_block_that_fails_waits_for_its_thread_and_leaves_no_image() -> None:
    preparation, threads = Preparation(), threading.active_count()
    ahead = PreparedAhead(preparation)

    def fail() -> None:
        with ahead:
            ahead.start(A)
            assert preparation.begun.wait(10)
            preparation.may_go_on.set()
            raise RuntimeError("the step failed")

    with pytest.raises(RuntimeError, match="the step failed"):
        fail()

    assert threading.active_count() == threads
    assert [patches() for patches in preparation.patches] == [None]
    with pytest.raises(RuntimeError, match="after shutdown"):
        ahead.start(A)


@pytest.mark.parametrize("has_gpu", [False, True])
def test_patches_are_pinned_where_there_is_a_gpu(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Size] = []

    def pin(patches: Tensor) -> Tensor:
        pinned.append(patches.shape)
        return patches

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(Tensor, "pin_memory", pin)
    chunk = image_chunk(draw_screenshot(random.Random(0)))

    found = ImagePreprocessor(TINY_QWEN3_VL).prepare([chunk])[chunk.image.sha256]

    assert pinned == ([found.patches.shape] if has_gpu else [])


def test_a_step_over_many_rows_equals_one_over_a_single_row_and_ends_without_threads(config: TrainerConfig) -> None:
    rng = random.Random(0)
    screens = [draw_screenshot(rng) for _ in range(5)]
    datums = [make_datum(rng, screens[first : first + 2]) for first in (0, 0, 1, 3)]
    threads = threading.active_count()
    found: list[list[Tensor]] = []
    for micro_batch_tokens, vision_cache_gib in ((16384, 1.0), (40, 1.0), (40, 0.0)):
        changes = {"micro_batch_tokens": micro_batch_tokens, "vision_cache_gib": vision_cache_gib}
        trainer = Trainer(chz.replace(config, **changes))
        train(trainer, datums)
        found.append(gradients(trainer))
        # rows of two screens: 0 1, 0 1, 1 2, 3 4; without a cache, each row's anew
        assert trainer.account.take()["trainer/encoded_images"] == (8 if vision_cache_gib == 0.0 else 5)

    assert threading.active_count() == threads
    for gradient, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


def test_a_screenshot_of_the_next_row_that_cannot_be_read_fails_the_step(config: TrainerConfig) -> None:
    rng = random.Random(0)
    datums = [make_datum(rng, [draw_screenshot(rng)]), make_datum(rng, [draw_screenshot(rng)[:100] + b"IEND"])]
    trainer, threads = Trainer(chz.replace(config, micro_batch_tokens=20)), threading.active_count()

    with pytest.raises(OSError, match="truncated"):
        train(trainer, datums)

    assert threading.active_count() == threads
    train(trainer, datums[:1])
    assert trainer.optim_step(STEP).num_trained_tokens == 5
