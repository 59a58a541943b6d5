"""Image sizes and token counts against Transformers' image processor."""

import pytest

from cua_rl.renderers.images import ImageSettings, num_image_tokens
from tests.renderers.generated import make_image

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "settings",
    [
        ImageSettings(patch_size_px=16, merge_size=2, min_pixels=65_536, max_pixels=16_777_216),
        ImageSettings(patch_size_px=16, merge_size=2, min_pixels=1_024, max_pixels=65_536),
        ImageSettings(patch_size_px=14, merge_size=2, min_pixels=3_136, max_pixels=1_003_520),
    ],
)
def test_tokens_are_those_of_the_image_processor_for_every_kind_of_size(settings: ImageSettings) -> None:
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=settings.patch_size_px,
        merge_size=settings.merge_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
    )
    edges = [1, 7, 15, 16, 17, 31, 32, 33, 47, 48, 49, 100, 255, 256, 257, 333, 719, 720, 1080, 1999, 2560, 4000, 9001]
    for width in edges:
        for height in edges:
            if max(width, height) > 200 * min(width, height):
                continue
            patches = processor.get_number_of_image_patches(height, width)
            assert num_image_tokens(width, height, settings) == patches // settings.merge_size**2, (width, height)


def test_pixels_are_cut_into_as_many_patches_as_are_counted() -> None:
    settings = ImageSettings(patch_size_px=16, merge_size=2, min_pixels=1_024, max_pixels=65_536)
    processor = transformers.Qwen2VLImageProcessor(
        patch_size=16, merge_size=2, size={"shortest_edge": 1_024, "longest_edge": 65_536}
    )
    for width, height in [(10, 10), (48, 80), (300, 200), (500, 33), (720, 1280)]:
        grid = processor(images=[make_image(width, height)], return_tensors="pt")["image_grid_thw"][0].tolist()
        assert num_image_tokens(width, height, settings) == grid[1] * grid[2] // 4
