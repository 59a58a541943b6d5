"""What travels between controller and worker."""

import random
import subprocess
import sys

from cua_rl.training import wire
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum


def test_equal_images_travel_once_and_come_back_in_place() -> None:
    rng = random.Random(0)
    png = draw_screenshot(rng, width=320, height=320) + rng.randbytes(100_000)
    datums = tuple(make_datum(rng, [bytes(bytearray(png))] * 2, text=4) for _ in range(4))
    request = wire.Forward(datums=datums, temperature=1.0, weights="base")

    payload = wire.encode(request)

    assert len(payload) < 1.3 * len(png)
    assert wire.decode(payload) == request


def test_the_controllers_side_imports_no_torch() -> None:
    code = "import sys, cua_rl.training.client; assert not {'torch', 'transformers', 'peft', 'vllm'} & set(sys.modules)"

    subprocess.run([sys.executable, "-c", code], check=True)
