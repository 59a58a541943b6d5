"""Plays what client libraries sent (`tests/sampling/clients`) to the gateway again: do their turns still merge?"""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.datums import fork_reason
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.types.rollout import ModelTurn, SamplingParams
from tests.sampling.clients.recording import FOLDER, Recording, load_recording
from tests.sampling.fake_vllm import FakeVllm

GOAL = 0.95
DOCS = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
COLUMNS = ("chat", "chat_stream", "responses", "responses_stream")


@pytest.fixture
def fake(renderer: Qwen3VLRenderer) -> FakeVllm:
    return FakeVllm(renderer, max_model_len=100_000)


async def play(recording: Recording, client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer) -> Gateway:
    """The gateway after the requests of a recording, in which its own ids take the place of the recorded ones."""
    gateway = Gateway(client, renderer, SamplingParams(max_tokens=400, temperature=1.0))
    gateway.open_rollout("r")
    fake.answers.extend(turn.answer for turn in recording.turns)
    new_ids: dict[str, str] = {}

    def new_id(found: re.Match[str]) -> str:
        return new_ids.get(found[0], found[0])

    for turn in recording.turns:
        # the ids of output items contain that of their response, without its prefix
        request = json.loads(re.sub("[0-9a-f]{32}", new_id, json.dumps(turn.request)))
        answer = await gateway.answer("r", request, recording.api)
        ids = (answer.turn.response_id, *(call.call_id for call in answer.parsed.tool_calls))
        new_ids |= {old[-32:]: new[-32:] for old, new in zip(turn.ids, ids, strict=True)}
    return gateway


def merged_share(turns: tuple[ModelTurn, ...], renderer: Qwen3VLRenderer) -> float:
    """The share of the turns after the first whose prompt extends prompt and answer of the turn before."""
    forks = [fork_reason(last, following, renderer.image_token_id) for last, following in pairwise(turns)]
    return forks.count(None) / len(forks)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
async def test_the_turns_of_a_client_merge(
    path: Path, client: SamplingClient, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    recording = load_recording(path)

    gateway = await play(recording, client, fake, renderer)

    assert [turn.text for turn in gateway.turns("r")] == [
        until_stop(turn.answer, turn.request.get("stop") or []) for turn in recording.turns
    ]
    assert gateway.prompt_mismatches == 0
    share = merged_share(gateway.turns("r"), renderer)
    assert share >= GOAL
    assert documented_share(path.stem, recording) == f"{share:.0%}".replace("%", " %")


def until_stop(text: str, stops: list[str]) -> str:
    """What is sampled of an answer."""
    return text[: min((text.index(stop) + len(stop) for stop in stops if stop in text), default=len(text))]


def documented_share(name: str, recording: Recording) -> str:
    """The share that the table of clients in docs/agents.md has for a recording."""
    client, _, api = re.sub(r"^(openai_\d|pydantic_ai)", lambda found: found[0].replace("_", "."), name).partition("_")
    packages = [re.sub(r"\[.*?\]", "", package) for package in recording.packages]
    if client == "smolagents":  # its two agents are rows, both over Chat Completions
        style, _, streams = api.partition("_")
        row, api = {"tools": "`ToolCallingAgent`", "code": "`CodeAgent`"}[style], f"chat_{streams}".rstrip("_")
    else:
        row = ""
    column = COLUMNS.index(api) if api in COLUMNS else len(COLUMNS)
    shown = re.sub(r"(?<=.)(==|@)", " ", packages[0])
    (cells,) = (
        line.strip("| ").split(" | ")
        for line in DOCS.splitlines()
        if line.startswith(f"| {shown}") and row in line and " % |" in line
    )
    return cells[1 + column].partition(":")[0]
