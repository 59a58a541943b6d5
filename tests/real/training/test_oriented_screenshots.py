"""Screenshots that are stored turned: renderer, trainer and model server see them as they are shown."""

from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl import Qwen2VLImageProcessor

from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.run_folder.model_folder import make_image_renderer
from cua_rl.training.vision import ImagePreprocessor, read_patches
from cua_rl.types.conversation import EncodedImage, Message, TextPart
from cua_rl.types.errors import TrainingError
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


def test_a_limit_on_pixels_is_the_same_for_renderer_and_trainer() -> None:
    data = BytesIO()
    Image.new("RGB", (1080, 2400)).save(data, "PNG")
    image = EncodedImage(data=data.getvalue(), format="png", width_px=1080, height_px=2400)
    renderer = make_image_renderer(TINY_QWEN3_VL, None, max_pixels=200_000)
    rendered = renderer.render((Message(role="user", content=(TextPart(text="."), image)),))
    (chunk,) = rendered.image_chunks

    prepared = ImagePreprocessor(TINY_QWEN3_VL, max_pixels=200_000).prepare([chunk])[image.sha256]

    # 200,000 pixels are at most 195 tokens of 32 x 32; the trainer refuses a number other than the prompt's
    assert ImagePreprocessor(TINY_QWEN3_VL, max_pixels=200_000).grid(chunk) == prepared.grid
    assert 150 < chunk.expected_tokens == len(prepared.patches) // 4 <= 195
    with pytest.raises(TrainingError, match="sampler and trainer must load the same preprocessor settings"):
        ImagePreprocessor(TINY_QWEN3_VL).grid(chunk)
