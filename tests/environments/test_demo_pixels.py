"""The tasks tagged "demo" look exactly as they did when the tiny model that ships with the package learned them."""

import json
from collections.abc import Callable
from dataclasses import asdict
from hashlib import sha256

import pytest

from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.painter import draw_phone
from cua_rl.environments.phone.simulator.reducer import launch, scroll_by
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState

SEEDS = (0, 7, 1_000_003)
FIELDS = (
    "alarms_on",
    "app",
    "battery_pct",
    "brightness_level",
    "calculation",
    "calls",
    "dialled",
    "draft",
    "enabled",
    "focus",
    "home_page",
    "home_pages",
    "is_recents_open",
    "is_screen_on",
    "is_volume_shown",
    "media_volume",
    "minute_of_day",
    "notes",
    "num_photos",
    "recent_apps",
    "scroll",
    "screen_timeout_ms",
    "seed",
    "setting_rows",
    "subscreens",
    "threads",
    "track",
    "wallpaper",
)
"""What a phone's state consisted of when the model was trained; later fields may be added beside them."""


def old_fields(state: PhoneState) -> bytes:
    fields = asdict(state)
    return json.dumps({name: fields[name] for name in FIELDS}, sort_keys=True).encode()


def pixels(state: PhoneState) -> bytes:
    return draw_phone(state, 1).tobytes()


def settings_pixels(state: PhoneState) -> bytes:
    settings = launch(state, "settings")
    return pixels(settings) + pixels(scroll_by(settings, 10_000))


GOLDEN: dict[Callable[[PhoneState], bytes], str] = {
    old_fields: "ee5b70b15643a4d6a6840271cd690e67dbcfb15b1f0247870123778b7cdc661e",
    pixels: "31e647bde07163e8d84d5f16ff31f5232dd7c9fae308440a29049dc9d1e18c94",
    settings_pixels: "e47d9719db8c20805ab71bd4789350d5e90054370f70af09e1749f4c2a80fec6",
}


def demo_instances() -> list[tuple[str, PhoneState]]:
    templates = sorted((t for t in TEMPLATES.values() if "demo" in t.tags), key=lambda template: template.task_id)
    instances = [(template.instance(seed), seed) for template in templates for seed in SEEDS]
    return [(instance.instruction, make_phone_state(seed, instance.start)) for instance, seed in instances]


@pytest.mark.parametrize("read", GOLDEN, ids=lambda read: read.__name__)
def test_demo_phones_are_the_ones_the_model_was_trained_on(read: Callable[[PhoneState], bytes]) -> None:
    digest = sha256(b"".join(read(state) for _, state in demo_instances())).hexdigest()

    assert digest == GOLDEN[read]


def test_demo_instructions_are_the_ones_the_model_was_trained_on() -> None:
    digest = sha256("\n".join(instruction for instruction, _ in demo_instances()).encode()).hexdigest()

    assert digest == "14892d806e7ae66cd6c9b8307eb3aeec77f73de65c28d2552a4ac7ab15bb49af"
