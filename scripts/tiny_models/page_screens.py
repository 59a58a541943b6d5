"""Labelled screenshots of web pages, and files of them."""

import asyncio
import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.expert import label_of, read_scanned
from cua_rl.environments.browser.miniwob.pages import read_result
from cua_rl.environments.browser.miniwob.routes import ROUTES, PageElement
from cua_rl.environments.browser.miniwob.templates import miniwob_template
from cua_rl.environments.browser.page import as_page
from cua_rl.environments.device import Device
from cua_rl.tasks.readiness import prepare
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import TaskError

POINT_STEP = 25
"""The tiny model clicks at multiples of this on the scale of 1000, 4 to 5 CSS pixels: few numbers to learn, and still
precise enough for every element.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledBox:
    """A clickable element: its label, and its rectangle in pixels of the screenshot."""

    label: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PageScreen:
    """A page with its elements in reading order, as the expert knows them."""

    instruction: str
    observation: EncodedImage
    boxes: tuple[LabelledBox, ...]
    target: int
    """Index of the box to click."""


async def look_at(device: Device, name: str) -> PageScreen:
    """Capture the prepared page of a task that one click solves; raises `TaskError` if no click would."""
    page, scale = as_page(device), as_page(device).settings.scale
    result, elements = await read_result(page), await read_scanned(page, name)
    step = ROUTES[name](result.instruction, elements)
    if not isinstance(step, PageElement):
        raise TaskError(f"expected something to click on {name!r} for {result.instruction!r}, got none")
    boxes = tuple(
        LabelledBox(
            label=label_of(name, element),
            x=element.x * scale,
            y=element.y * scale,
            width=element.width * scale,
            height=element.height * scale,
        )
        for element in elements
    )
    return PageScreen(
        instruction=result.instruction,
        observation=await page.observe(),
        boxes=boxes,
        target=elements.index(step),
    )


async def collect_screens(
    names: Sequence[str],
    seeds: range,
    num_screens: int,
    *,
    scale: float,
    seed: int,
    on_screen: Callable[[int], None],
    num_pages: int = 4,
) -> list[PageScreen]:
    """Capture random instances of these tasks in turn; `on_screen` receives the number of each when it starts."""
    random = Random(f"screens-{seed}")
    plans = [(names[index % len(names)], random.choice(seeds)) for index in range(num_screens)]
    screens: list[PageScreen | None] = [None] * num_screens
    places = iter(range(num_screens))
    async with MiniWobPages(scale=scale) as pages, asyncio.TaskGroup() as workers:

        async def work() -> None:
            for place in places:
                on_screen(place)
                name, instance = plans[place]
                task = miniwob_template(name).make_task(instance)
                device = await pages.make(task.device_request())
                try:
                    await prepare(task, device)
                    screens[place] = await look_at(device, name)
                finally:
                    await device.close()

        for _ in range(num_pages):
            workers.create_task(work())
    return [screen for screen in screens if screen is not None]


def write_screens(path: Path, screens: Sequence[PageScreen]) -> None:
    """Write one JSON object per line."""
    with path.open("w", encoding="utf-8") as file:
        for screen in screens:
            shown = screen.observation
            image = {"png": b64encode(shown.data).decode(), "width_px": shown.width_px, "height_px": shown.height_px}
            fields = {
                "instruction": screen.instruction,
                "observation": image,
                "boxes": [asdict(box) for box in screen.boxes],
                "target": screen.target,
            }
            file.write(json.dumps(fields) + "\n")


def read_screens(path: Path) -> list[PageScreen]:
    """Read what `write_screens` wrote."""
    screens: list[PageScreen] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        fields = json.loads(line)
        image = fields["observation"]
        observation = EncodedImage(
            data=b64decode(image["png"]), format="png", width_px=image["width_px"], height_px=image["height_px"]
        )
        boxes = tuple(LabelledBox(**box) for box in fields["boxes"])
        instruction, target = fields["instruction"], fields["target"]
        screens.append(PageScreen(instruction=instruction, observation=observation, boxes=boxes, target=target))
    return screens
