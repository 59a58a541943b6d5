"""Plays what vendors' computer-use loops sent (`tests/sampling/clients/loops.py`) to the gateway again.

OpenAI's Agents SDK and sample app, Anthropic's demo and LangChain's agent ran unmodified on a phone, a page and a
desktop.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.datums import build_datums
from cua_rl.sampling.client import SamplingClient
from tests.agent.test_history_data import assert_trained_in_context
from tests.builders import rollout
from tests.sampling.clients.loops import LOOPS
from tests.sampling.clients.recording import FOLDER, RecordedTurn, load_recording
from tests.sampling.clients.targets import NUM_TARGETS, SIZES, DeviceName, click_in, is_inside, make_targets
from tests.sampling.fake_vllm import FakeVllm
from tests.sampling.test_clients import DOCS, GOAL, merged_share, play

PATHS = sorted((FOLDER / "loops").glob("*.json"))


@pytest.fixture
def fake(renderer: Qwen3VLRenderer) -> FakeVllm:
    return FakeVllm(renderer, max_model_len=10_000_000)


def device_of(path: Path) -> DeviceName:
    return cast("DeviceName", path.stem.rpartition("_")[2])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
async def test_the_turns_of_a_loop_are_one_sequence_for_training(
    path: Path, client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    recording = load_recording(path)

    gateway = await play(recording, client, fake, renderer)

    turns = gateway.turns("r")
    assert [turn.text for turn in turns] == [turn.answer for turn in recording.turns]
    assert gateway.prompt_mismatches == 0
    assert (share := merged_share(turns, renderer)) >= GOAL
    loop = path.stem.rpartition("_")[0]
    (row,) = (line for line in DOCS.splitlines() if line.startswith("| ") and f"`{loop}`" in line)
    cell = row.strip("| ").split(" | ")[2 + list(SIZES).index(device_of(path))]
    assert cell.startswith(f"{share:.0%}".replace("%", " %"))
    datums = build_datums(rollout(*turns), 1.0, renderer.image_token_id).datums
    assert len(datums) == 1
    assert_trained_in_context(datums, turns, renderer.image_token_id)
    assert sum(len(turn.prompt.images) > 0 for turn in turns) >= len(turns) - 1
    assert [turn.failure is not None for turn in turns].count(True) == 1  # the malformed call


def declared_size(request: Any, device: DeviceName) -> tuple[int, int]:
    """The display that the loop declares, or else that of its screenshots."""
    if request["tools"] == [{"type": "computer"}]:
        return SIZES[device]
    (tool,) = (tool for tool in request["tools"] if "display_width" in json.dumps(tool))
    return (
        tool.get("display_width") or tool["display_width_px"],
        tool.get("display_height") or tool["display_height_px"],
    )


def pixel_of(arguments: str) -> tuple[int, int]:
    """Where a call clicks, in pixels of the declared display, as either vendor writes it."""
    given = json.loads(arguments)
    (action,) = given.get("actions", [given])
    x, y = action.get("coordinate") or (action["x"], action["y"])
    return x, y


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
async def test_a_click_on_each_of_a_hundred_targets_lands(
    path: Path, client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    first, second, *_ = load_recording(path).turns
    recorded, device = load_recording(path), device_of(path)
    width, height = SIZES[device]
    wide, high = declared_size(first.request, device)
    landed = 0
    for target in make_targets(device, seed=2):
        clicked = RecordedTurn(request=second.request, answer=click_in(target, (width, height)), ids=second.ids)
        gateway = await play(replace(recorded, turns=(first, clicked)), client, fake, renderer)
        (call,) = gateway._open("r").answers[-1].parsed.tool_calls
        x, y = pixel_of(call.arguments)
        landed += is_inside(x * width / wide, y * height / high, target)
    assert landed == NUM_TARGETS


def test_every_loop_was_recorded_on_every_kind_of_device() -> None:
    assert {path.stem for path in PATHS} == {f"{loop}_{device}" for loop in LOOPS for device in SIZES}
