# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
"""Screenshots to visual features: decoded and resized as the model server does, encoded once per distinct image."""

import io
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from PIL import Image, ImageOps
from torch import Tensor
from transformers.models.qwen2_vl import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize

from cua_rl.training.batching import Grid, pack_greedily
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import ImageChunk

_MAX_PATCHES = 8192
"""Patches per pass of the vision tower, at most."""

BLANKS = ""
"""Among features, a name without an image: like the features of blank images, it depends on a trained tower."""

Encode = Callable[[Mapping[str, ImageChunk]], Mapping[str, Tensor]]
"""Images by sha256 -> features by sha256, as from `encode_images`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedImage:
    """Input of the vision tower."""

    patches: Tensor  # [num_patches, channels * patch_size**2] float32
    grid: Grid
    num_tokens: int


class ImagePreprocessor:
    """Converts encoded images to patches with the preprocessor settings of the model folder."""

    def __init__(self, model_path: Path, max_pixels: int | None = None) -> None:
        limit: dict[str, Any] = {} if max_pixels is None else {"max_pixels": max_pixels}
        self._processor = Qwen2VLImageProcessor.from_pretrained(model_path, **limit)

    def grid(self, chunk: ImageChunk) -> Grid:
        """Patches of the image.

        Raises:
            TrainingError: the image takes a different number of tokens here than in the sampler's prompt.
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

        def prepare_one(chunk: ImageChunk) -> PreparedImage:
            patches, grids = read_patches(self._processor, [decode_rgb(chunk.image.data)])
            if torch.cuda.is_available():  # copies from pinned memory do not wait for the device
                patches = patches.pin_memory()
            frames, height, width = grids[0].tolist()
            return PreparedImage(patches=patches, grid=(frames, height, width), num_tokens=chunk.expected_tokens)

        with ThreadPoolExecutor() as threads:  # decoding releases the GIL
            return dict(zip(distinct, threads.map(prepare_one, distinct.values()), strict=True))


class PreparedAhead:
    """Prepares the images of one micro-batch while the one before it is computed; a block that ends leaves nothing."""

    def __init__(self, prepare: Callable[[Iterable[ImageChunk]], dict[str, PreparedImage]]) -> None:
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1)
        self._coming: Future[dict[str, PreparedImage]] | None = None

    def start(self, images: Mapping[str, ImageChunk]) -> None:
        """Begin with images that `take` will be asked for next."""
        self._coming = self._thread.submit(self._prepare, images.values())

    def take(self, images: Mapping[str, ImageChunk]) -> dict[str, PreparedImage]:
        """These images by sha256, also those that were not begun; raises what went wrong meanwhile."""
        coming, self._coming = self._coming, None
        ready = {} if coming is None else coming.result()
        others = self._prepare(chunk for name, chunk in images.items() if name not in ready)
        return {name: ready[name] if name in ready else others[name] for name in images}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._coming = None
        self._thread.shutdown(cancel_futures=True)


def decode_rgb(data: bytes) -> Image.Image:
    """Decode like the model server: EXIF orientation applied, transparency on white."""
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

    The processor would repeat a still image for every frame of a patch; `LinearPatchEmbed` does so on the device.
    """
    one_frame: Any = {"temporal_patch_size": 1}
    batch = processor(images=list(images), return_tensors="pt", **one_frame)
    return batch["pixel_values"], batch["image_grid_thw"]


def encode_images(
    tower: Any, images: Mapping[str, PreparedImage], agree_on_passes: Callable[[int], int] = int
) -> dict[str, Tensor]:
    """Features by sha256, [1 + deepstack levels, num_tokens, hidden]: the merger's, then those of deepstack levels.

    `agree_on_passes` maps the passes that these images take to those that every rank makes; the rest are of a blank,
    and if the tower is trained, its backward passes follow from `BLANKS`.
    """
    features: dict[str, Tensor] = {}
    names = list(images)
    groups = [names[part] for part in pack_greedily([len(image.patches) for image in images.values()], _MAX_PATCHES)]
    num_passes, blanks = agree_on_passes(len(groups)), list[Tensor]()
    for group_names in groups:
        group = [images[name] for name in group_names]
        patches = torch.cat([image.patches.to(tower.device, non_blocking=True) for image in group])
        grids = torch.tensor([image.grid for image in group], device=tower.device)
        output = tower(patches, grid_thw=grids, return_dict=True)
        stacked = torch.stack([output.pooler_output, *output.get("deepstack_features", ())])
        features |= zip(group_names, stacked.split([image.num_tokens for image in group], dim=1), strict=True)
    for _ in range(num_passes - len(groups)):
        # the smallest image there is
        side, patch_dim = tower.config.spatial_merge_size, tower.patch_embed.proj.weight[0, :, 0].numel()
        patches = torch.zeros(side * side, patch_dim, device=tower.device)
        output = tower(patches, grid_thw=torch.tensor([[1, side, side]], device=tower.device), return_dict=True)
        outputs = (output.pooler_output, *output.get("deepstack_features", ()))
        blanks += [values.flatten()[:0] for values in outputs if values.requires_grad]
    if blanks:
        features[BLANKS] = torch.cat(blanks)
    return features


class FeatureCache:
    """Features of the most recently used screenshots in main memory, at most `max_bytes` of them.

    Features depend only on the image and the frozen tower (in their last bits also on what was encoded with them), so
    they never become stale; an adapter on the language model does not change them. All levels of a screenshot (merger
    and deepstack) are one entry.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, Tensor] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all of them."""
        self._entries.clear()
        self.num_bytes = 0

    def missing(self, images: Mapping[str, ImageChunk]) -> dict[str, ImageChunk]:
        """The images whose features are not held."""
        return {name: chunk for name, chunk in images.items() if name not in self._entries}

    def features(self, images: Iterable[ImageChunk], encode: Encode) -> dict[str, Tensor]:
        """Features of every distinct image; `encode` is called for those not cached, even for an empty list."""
        wanted = {chunk.image.sha256: chunk for chunk in images}
        found = {name: self._entries[name] for name in wanted if name in self._entries}
        for name in found:
            self._entries.move_to_end(name)
        encoded = encode(self.missing(wanted))
        for name, features in encoded.items():
            if features.nbytes > self._max_bytes:
                continue
            # a copy, because a slice would keep all of the larger tensor alive
            self._entries[name] = kept = features.detach().cpu().clone()
            self.num_bytes += kept.nbytes
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= self._entries.popitem(last=False)[1].nbytes
        return {**found, **encoded}
