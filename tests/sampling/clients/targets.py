"""Random places to click on the screens of the devices on which loops were recorded."""

import json
import random
from collections.abc import Mapping
from typing import Literal

DeviceName = Literal["phone", "page", "desktop"]
SIZES: Mapping[DeviceName, tuple[int, int]] = {"phone": (192, 320), "page": (512, 384), "desktop": (417, 311)}
NUM_TARGETS = 100


def call(**arguments: object) -> str:
    """A call as the policy samples it."""
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


def make_targets(name: DeviceName, seed: int) -> list[tuple[int, int, int, int]]:
    """Places as large as small buttons: left, top, width, height in pixels of the device."""
    draw, (wide, high) = random.Random(seed), SIZES[name]
    sizes = [(draw.randrange(6, 30), draw.randrange(6, 30)) for _ in range(NUM_TARGETS)]
    return [(draw.randrange(wide - width), draw.randrange(high - height), width, height) for width, height in sizes]


def click_in(target: tuple[int, int, int, int], size: tuple[int, int]) -> str:
    """The policy's click on the middle of a target."""
    left, top, width, height = target
    middle = (left + width / 2, top + height / 2)
    return call(
        action="left_click", coordinate=[round(1000 * at / side) for at, side in zip(middle, size, strict=True)]
    )


def is_inside(x: float, y: float, target: tuple[int, int, int, int]) -> bool:
    """Whether a pixel belongs to a target."""
    left, top, width, height = target
    return left <= x < left + width and top <= y < top + height
