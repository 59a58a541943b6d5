# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Screenshots to features: decoded and resized as the model server does it, encoded once per distinct image."""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from cua_rl.errors import TrainingError
from cua_rl.training.batching import Grid
from cua_rl.types import ImageChunk

_MAX_PATCHES = 8192
"""Most patches that the vision tower sees at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """An image as the vision tower reads it."""

    patches: Tensor  # [num_patches, channels * patch_size**2] float32
    grid: Grid
    num_tokens: int


class ImagePreprocessor:
    """Encoded images to patches, with the preprocessor settings of the model folder."""

    def __init__(self, model_path: Path) -> None:
        self._processor = Qwen2VLImageProcessor.from_pretrained(model_path)

    def grid(self, chunk: ImageChunk) -> Grid:
        """How many patches the image will have.

        Raises:
            TrainingError: that is another number of tokens than the sampler's prompt had.
        """
        settings = self._processor
        height_px, width_px = smart_resize(
            chunk.image.height_px,
            chunk.image.width_px,
            factor=settings.patch_size * settings.merge_size,
            min_pixels=settings.size["shortest_edge"],
            max_pixels=settings.size["longest_edge"],
        )
        height, width = height_px // settings.patch_size, width_px // settings.patch_size
        num_tokens = height * width // settings.merge_size**2
        if num_tokens != chunk.expected_tokens:
            raise TrainingError(
                f"expected image {chunk.image.sha256[:12]} to take {chunk.expected_tokens} tokens, as in the sampler's "
                f"prompt, got {num_tokens}: sampler and trainer must load the same preprocessor settings"
            )
        return 1, height, width

    def prepare(self, chunks: Iterable[ImageChunk]) -> dict[str, PreparedImage]:
        """The patches of every distinct image once, by sha256."""
        distinct = {chunk.image.sha256: chunk for chunk in chunks}
        if not distinct:
            return {}
        with ThreadPoolExecutor() as threads:  # decoding lets go of the interpreter
            return dict(zip(distinct, threads.map(self._prepare, distinct.values()), strict=True))

    def _prepare(self, chunk: ImageChunk) -> PreparedImage:
        patches, grids = read_patches(self._processor, [_decode(chunk.image.data)])
        frames, height, width = grids[0].tolist()
        return PreparedImage(patches=patches, grid=(frames, height, width), num_tokens=chunk.expected_tokens)


def _decode(data: bytes) -> Image.Image:
    """Decode to RGB, turned as EXIF says, transparency on white: as the model server does it."""
    image = Image.open(io.BytesIO(data))
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        background = Image.new("RGB", rgba.size, (255, 255, 255))
        background.paste(rgba, mask=rgba.getchannel("A"))
        return background
    return image.convert("RGB")


def read_patches(processor: Qwen2VLImageProcessor, images: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
    """Patches of one frame per image, [num_patches, channels * patch_size**2], and grids [num_images, 3].

    The processor would repeat a still image for every frame of a patch; `LinearPatchEmbed` does that where it is used.
    """
    one_frame: Any = {"temporal_patch_size": 1}
    batch = processor(images=list(images), return_tensors="pt", **one_frame)
    return batch["pixel_values"], batch["image_grid_thw"]


class LinearPatchEmbed(nn.Module):
    """The tower's patch embedding as one matrix product: its convolution has no overlap, and is slow."""

    def __init__(self, proj: nn.Conv3d) -> None:
        super().__init__()
        self.proj = proj

    def forward(self, patches: Tensor) -> Tensor:
        """patches [num_patches, channels * patch_size**2], which every frame repeats -> [num_patches, hidden]."""
        weight = self.proj.weight  # [hidden, channels, frames, patch_size, patch_size]
        one_frame = patches.to(weight.dtype).view(len(patches), weight.shape[1], 1, -1)
        frames = one_frame.expand(-1, -1, weight.shape[2], -1)
        return linear(frames.flatten(1), weight.flatten(1), self.proj.bias)


def use_linear_patch_embedding(tower: Qwen3VLVisionModel) -> None:
    """Swap the tower's patch embedding; its parameters keep their names."""
    tower.add_module("patch_embed", LinearPatchEmbed(tower.patch_embed.proj))


def encode_images(
    tower: Qwen3VLVisionModel, images: Mapping[str, PreparedImage], agree_on_passes: Callable[[int], int] = int
) -> dict[str, Tensor]:
    """Features by sha256, [1 + deepstack levels, num_tokens, hidden]: the merger's, then every deepstack level's.

    Told how many passes the images take, `agree_on_passes` answers how many to make; the rest are of a blank image.
    """
    features: dict[str, Tensor] = {}
    groups = list(_groups(images))
    num_passes = agree_on_passes(len(groups))
    for names in groups:
        group = [images[name] for name in names]
        patches = torch.cat([image.patches for image in group]).to(tower.device)
        grids = torch.tensor([image.grid for image in group], device=tower.device)
        output = tower(patches, grid_thw=grids, return_dict=True)
        stacked = torch.stack([output.pooler_output, *output.deepstack_features])
        features |= zip(names, stacked.split([image.num_tokens for image in group], dim=1), strict=True)
    for _ in range(num_passes - len(groups)):
        _encode_blank(tower)
    return features


def _encode_blank(tower: Qwen3VLVisionModel) -> None:
    """A pass of the smallest image there is."""
    side, patch_dim = tower.config.spatial_merge_size, tower.patch_embed.proj.weight[0, :, 0].numel()
    patches = torch.zeros(side * side, patch_dim, device=tower.device)
    tower(patches, grid_thw=torch.tensor([[1, side, side]], device=tower.device), return_dict=True)


def _groups(images: Mapping[str, PreparedImage]) -> Iterator[list[str]]:
    group: list[str] = []
    num_patches = 0
    for name, image in images.items():
        if group and num_patches + len(image.patches) > _MAX_PATCHES:
            yield group
            group, num_patches = [], 0
        group.append(name)
        num_patches += len(image.patches)
    if group:
        yield group
