"""Is lossless WebP worth its time? Real screenshots of phone, web pages and a desktop: a JSON line for each kind.

    python -m benchmarks.screenshot_formats [--screens 20]

`ratio` is the size of the WebP files to that of the PNGs as devices make them, `ms` the time of one encoding. Each
WebP is decoded again and has the same pixels, or this fails.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from io import BytesIO
from random import Random

from PIL import Image

from benchmarks.browser import NAMES, SCALE
from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.pages import begin
from cua_rl.environments.desktop.desktops import LinuxDesktops
from cua_rl.environments.desktop.templates import DESKTOP_TASKS
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.types.actions import Click, TypeText

METHODS = (0, 4, 6)  # libwebp's effort


async def phone_screens(num_screens: int, scale: int) -> list[bytes]:
    """Screens after taps at random, on phones of several tasks."""
    random, names = Random(0), sorted(TEMPLATES)
    screens: list[bytes] = []
    for number in range(num_screens):
        phone = make_simulated_phone(TEMPLATES[names[number % len(names)]].make_task(number), scale=scale)
        await phone.execute(Click(x=random.randrange(180 * scale), y=random.randrange(300 * scale)))
        screens.append((await phone.observe()).data)
    return screens


async def page_screens(num_screens: int) -> list[bytes]:
    """New instances of MiniWoB++ tasks."""
    screens: list[bytes] = []
    async with MiniWobPages(scale=SCALE) as backend:
        page = await backend.lend()
        for number in range(num_screens):
            await begin(page, NAMES[number % len(NAMES)], number)
            screens.append((await page.observe()).data)
    return screens


async def desktop_screens(num_screens: int) -> list[bytes]:
    """An editor in which a text grows."""
    task = DESKTOP_TASKS[0].make_task(0)
    assert task.prepare is not None
    screens: list[bytes] = []
    async with LinuxDesktops(width_px=1024, height_px=768) as backend:
        desktop = await backend.make(task.device_request())
        try:
            await task.prepare(desktop)
            for number in range(num_screens):
                await desktop.execute(TypeText(text=f"line {number}: the quick brown fox\n"))
                screens.append((await desktop.observe()).data)
        finally:
            await desktop.close()
    return screens


def compare(kind: str, screens: Sequence[bytes]) -> dict[str, object]:
    """Sizes and times of all methods."""
    figure: dict[str, object] = {"figure": "screenshot_formats", "kind": kind, "num_screens": len(screens)}
    images = [Image.open(BytesIO(data)).convert("RGB") for data in screens]
    png_bytes = sum(map(len, screens))
    figure |= {"size_px": "{}x{}".format(*images[0].size), "png_kb": round(png_bytes / len(screens) / 1e3, 1)}
    for method in METHODS:
        num_bytes, seconds = 0, 0.0
        for image in images:
            buffer, clock = BytesIO(), time.process_time()
            image.save(buffer, "WEBP", lossless=True, method=method, exact=True)
            seconds += time.process_time() - clock
            num_bytes += len(buffer.getvalue())
            assert Image.open(buffer).convert("RGB").tobytes() == image.tobytes(), kind
        figure |= {
            f"ratio_{method}": round(num_bytes / png_bytes, 2),
            f"ms_{method}": round(1000 * seconds / len(images), 1),
        }
    return figure | {"load": round(os.getloadavg()[0], 1)}


async def main(num_screens: int) -> None:
    """Take the screenshots, and compare."""
    for kind, screens in (
        ("demo phone", await phone_screens(num_screens, 1)),
        ("demo phone of six times the size", await phone_screens(num_screens, 6)),
        ("MiniWoB++", await page_screens(num_screens)),
        ("desktop", await desktop_screens(num_screens)),
    ):
        print(json.dumps(compare(kind, screens)), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--screens", type=int, default=20)
    asyncio.run(main(parser.parse_args().screens))
