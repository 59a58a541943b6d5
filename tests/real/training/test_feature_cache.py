"""Features held between requests."""

from collections.abc import Mapping

import torch
from torch import Tensor

from cua_rl.training.vision import FeatureCache
from cua_rl.types.rollout import ImageChunk
from tests.builders import image

A, B, C = (image(name) for name in (b"a", b"b", b"c"))
ENTRY_BYTES = 2 * 3 * 4  # [2, 3] float32


class Tower:
    """Counts what it is asked to encode."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def __call__(self, images: Mapping[str, ImageChunk]) -> Mapping[str, Tensor]:
        if not images:
            return {}
        self.encoded += [chunk.image.data for chunk in images.values()]
        together = torch.cat([torch.full((2, 3), float(chunk.image.data[0])) for chunk in images.values()], dim=1)
        return dict(zip(images, together.split(3, dim=1), strict=True))


def test_only_what_is_not_held_is_encoded() -> None:
    tower, cache = Tower(), FeatureCache(10 * ENTRY_BYTES)

    cache.features([A, B, A], tower)
    features = cache.features([B, C], tower)

    assert tower.encoded == [b"a", b"b", b"c"]
    assert features[B.image.sha256].equal(torch.full((2, 3), float(ord("b"))))


def test_the_least_recently_used_features_make_room() -> None:
    tower, cache = Tower(), FeatureCache(2 * ENTRY_BYTES)
    for images in ([A], [B], [A], [C]):
        cache.features(images, tower)

    cache.features([A], tower)
    cache.features([B], tower)

    assert tower.encoded == [b"a", b"b", b"c", b"b"]
    assert (len(cache), cache.num_bytes) == (2, 2 * ENTRY_BYTES)


def test_what_is_larger_than_the_cache_is_encoded_every_time() -> None:
    tower, cache = Tower(), FeatureCache(ENTRY_BYTES - 1)

    features = [cache.features([A], tower)[A.image.sha256] for _ in range(2)]

    assert features[0].equal(features[1])
    assert (tower.encoded, cache.num_bytes) == ([b"a", b"a"], 0)
