"""Screenshots that are stored turned: renderer, trainer and model server see them as they are shown."""

from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl import Qwen2VLImageProcessor

from cua_rl.conversation import Message
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.training.vision import ImagePreprocessor, read_patches
from tests.builders import stored_image

ORIENTATION = 0x0112


def stored(orientation: int, image_format: str) -> bytes:
    """96x64 pixels in four colours, so that every orientation looks different."""
    image = Image.new("RGB", (96, 64), (200, 30, 30))
    for box, colour in (((0, 0, 96, 16), (20, 160, 40)), ((0, 0, 32, 64), (30, 40, 220)), ((0, 0, 32, 32), (0, 0, 0))):
        image.paste(colour, box)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    buffer = BytesIO()
    image.save(buffer, image_format, exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("image_format", ["png", "jpeg"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_trainer_sees_the_pixels_that_the_model_server_sees(
    small_folder: Path, small_renderer: Qwen3VLRenderer, orientation: int, image_format: str
) -> None:
    media = pytest.importorskip("vllm.multimodal.media")
    part = stored_image(stored(orientation, image_format))
    (chunk,) = small_renderer.render([Message(role="user", content=(part,))]).image_chunks
    shown = media.ImageMediaIO().load_bytes(part.data).media

    prepared = ImagePreprocessor(small_folder).prepare([chunk])[part.sha256]
    patches, grids = read_patches(Qwen2VLImageProcessor.from_pretrained(small_folder), [shown])

    assert shown.size == ((64, 96) if orientation > 4 else (96, 64))
    assert ImagePreprocessor(small_folder).grid(chunk) == prepared.grid == tuple(grids[0].tolist())
    assert torch.equal(prepared.patches, patches)
    assert chunk.expected_tokens == prepared.num_tokens == 6
