"""Images inside what other programs send."""

from base64 import b64encode
from io import BytesIO

from PIL import Image

from cua_rl.monitor.ingest_images import take_images
from cua_rl.renderers.images import image_size


def data_uri(*, orientation: int) -> str:
    """A JPEG of 40 x 20 stored pixels, with an EXIF orientation."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = BytesIO()
    Image.new("RGB", (40, 20)).save(buffer, "JPEG", exif=exif)
    return f"data:image/jpeg;base64,{b64encode(buffer.getvalue()).decode()}"


def test_a_rotated_screenshot_has_the_size_in_which_it_is_shown() -> None:
    payload, (upright, rotated) = take_images(
        {"screen_before": data_uri(orientation=1), "screen_after": data_uri(orientation=6)}
    )

    assert (upright.width_px, upright.height_px) == (40, 20)
    assert (rotated.width_px, rotated.height_px) == (20, 40) == image_size(rotated.data)
    assert payload == {"screen_before": f"sha256:{upright.sha256}", "screen_after": f"sha256:{rotated.sha256}"}


def test_what_is_no_image_stays_as_it_was_sent() -> None:
    broken = {"screen_before": "data:image/png;base64,AAAA", "screen_after": "data:image/png;base64,?"}

    assert take_images(broken) == (broken, [])
