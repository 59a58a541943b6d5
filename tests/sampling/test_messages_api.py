"""Anthropic's client, unmodified, against the gateway."""

import json
from base64 import b64encode
from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from cua_rl.agent.tools import COMPUTER_USE
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.datums import fork_reason
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.types.json_values import mapping
from cua_rl.types.rollout import SamplingParams
from tests.renderers.generated import encode_image, make_image
from tests.sampling.fake_vllm import FakeVllm

SCREENS = [encode_image(make_image(96, 64, seed)) for seed in range(3)]
CLICK: Any = {"name": "click", "description": "Tap", "input_schema": {"type": "object", "properties": {"x": {}}}}
COMPUTER: Any = {
    "type": "computer_20251124",
    "name": "computer",
    "display_width_px": 1000,
    "display_height_px": 500,
    "enable_zoom": True,
}


@pytest.fixture
def fake(renderer: Qwen3VLRenderer) -> FakeVllm:
    return FakeVllm(renderer, max_model_len=100_000)


@pytest.fixture
def gateway(client: SamplingClient, renderer: Qwen3VLRenderer) -> Gateway:
    gateway = Gateway(client, renderer, SamplingParams(max_tokens=400, temperature=1.0))
    gateway.open_rollout("r1")
    return gateway


@pytest_asyncio.fixture
async def claude(gateway: Gateway) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    """A client as an agent has it: it knows the address and the key of its rollout."""
    access = gateway.access("r1")
    assert access is not None
    async with (
        gateway.serve() as url,
        anthropic.AsyncAnthropic(base_url=f"{url}/rollouts/r1", api_key=access.api_key, max_retries=0) as client,
    ):
        yield client


def picture(screen: bytes) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(screen).decode()}
    return {"type": "image", "source": source}


def call(name: str = "computer_use", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def test_the_same_request_through_three_protocols_gives_the_same_tokens(
    gateway: Gateway, claude: anthropic.AsyncAnthropic, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    agent, url = gateway.openai_client("r1"), f"data:image/png;base64,{b64encode(SCREENS[0]).decode()}"
    fake.answers.extend(["<think>\nLook.\n</think>\n\nThere." + call("click", x=5)] * 3)
    await claude.messages.create(
        model="claude",
        max_tokens=64,
        system=[{"type": "text", "text": "Use the phone."}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Open mail."}, picture(SCREENS[0])]}],
        tools=[CLICK],
    )
    function: Any = {"name": "click", "description": "Tap", "parameters": CLICK["input_schema"]}
    await agent.responses.create(
        model="policy",
        instructions="Use the phone.",
        input=[
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "Open mail."},
                    {"type": "input_image", "image_url": url, "detail": "auto"},
                ],
            }
        ],
        tools=[{"type": "function", "strict": False, **function}],
        max_output_tokens=64,
    )
    await agent.chat.completions.create(
        model="policy",
        messages=[
            {"role": "system", "content": "Use the phone."},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Open mail."},
                    {"type": "image_url", "image_url": {"url": url}},
                ],
            },
        ],
        tools=[{"type": "function", "function": function}],
        max_tokens=64,
    )

    one, *others = (request | {"input": len(request["input"])} for request in fake.requests)  # the image is sent once
    assert others == [one, one]
    prompts = {tuple(turn.prompt.token_ids(renderer.image_token_id)) for turn in gateway.turns("r1")}
    assert len(prompts) == 1


@pytest.mark.parametrize("streams", [False, True])
async def test_an_answer_is_a_message_and_its_history_stays_exact(
    gateway: Gateway, claude: anthropic.AsyncAnthropic, fake: FakeVllm, renderer: Qwen3VLRenderer, streams: bool
) -> None:
    fake.answers.extend(
        ["<think>\nLook.\n</think>\n\nThere.\n" + call("click", x=5) + "\n" + call("click", x=6), "Done."]
    )
    history: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Go."}, picture(SCREENS[0])]}]

    async def ask() -> anthropic.types.Message:
        wanted: Any = {"model": "claude", "max_tokens": 300, "messages": history, "tools": [CLICK]}
        if not streams:
            return await claude.messages.create(**wanted)
        async with claude.messages.stream(**wanted) as stream:
            return await stream.get_final_message()

    first = await ask()
    thought, said, one, two = first.content
    assert (thought.type, said.type, one.type, two.type) == ("thinking", "text", "tool_use", "tool_use")
    assert [block.input for block in (one, two) if block.type == "tool_use"] == [{"x": 5}, {"x": 6}]
    assert (first.stop_reason, first.role) == ("tool_use", "assistant")
    history.append({"role": "assistant", "content": first.content})
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "ok"}, picture(screen)]}
        for block, screen in zip((one, two), SCREENS[1:], strict=True)
        if block.type == "tool_use"
    ]
    history.append({"role": "user", "content": [*results, {"type": "text", "text": "Go on."}]})
    last = await ask()

    assert ([block.to_dict() for block in last.content], last.stop_reason) == (
        [{"type": "text", "text": "Done."}],
        "end_turn",
    )
    turns = gateway.turns("r1")
    assert [fork_reason(*pair, renderer.image_token_id) for pair in pairwise(turns)] == [None]
    assert last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0) == turns[1].prompt.length
    assert last.usage.output_tokens == len(turns[1].sampled_tokens)


async def test_an_answer_may_end_at_a_stop_sequence_or_at_the_limit(
    claude: anthropic.AsyncAnthropic, fake: FakeVllm
) -> None:
    fake.answers.extend(["Thought.\nObservation: none", "a long answer"])
    go: Any = [{"role": "user", "content": "Go."}]
    stopped = await claude.messages.create(
        model="claude", max_tokens=99, messages=go, stop_sequences=["never", "\nObservation:"]
    )
    cut = await claude.messages.create(model="claude", max_tokens=3, messages=go)

    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "\nObservation:")
    assert [block.to_dict() for block in stopped.content] == [{"type": "text", "text": "Thought."}]
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


@pytest.mark.parametrize(
    ("sampled", "given"),
    [
        ({"action": "screenshot"}, {"action": "screenshot"}),
        ({"action": "left_click", "coordinate": [500, 250]}, {"action": "left_click", "coordinate": [500, 125]}),
        ({"action": "right_click", "coordinate": [1000, 0]}, {"action": "right_click", "coordinate": [999, 0]}),
        ({"action": "middle_click", "coordinate": [1, 2]}, {"action": "middle_click", "coordinate": [1, 1]}),
        ({"action": "double_click", "coordinate": [10, 10]}, {"action": "double_click", "coordinate": [10, 5]}),
        ({"action": "triple_click", "coordinate": [10, 10]}, {"action": "triple_click", "coordinate": [10, 5]}),
        ({"action": "mouse_move", "coordinate": [10, 10]}, {"action": "mouse_move", "coordinate": [10, 5]}),
        (
            {"action": "scroll", "coordinate": [100, 100], "pixels": -170},
            {"action": "scroll", "coordinate": [100, 50], "scroll_direction": "down", "scroll_amount": 3},
        ),
        (
            {"action": "scroll", "pixels": 10},
            {"action": "scroll", "coordinate": [500, 250], "scroll_direction": "up", "scroll_amount": 1},
        ),
        (
            {"action": "scroll", "pixels": 0, "coordinate": [500, 500]},
            {"action": "scroll", "coordinate": [500, 250], "scroll_direction": "down", "scroll_amount": 0},
        ),
        ({"action": "key", "keys": ["ctrl", "s"]}, {"action": "key", "text": "ctrl+s"}),
        ({"action": "hold_key", "keys": ["shift"], "time": 2}, {"action": "hold_key", "text": "shift", "duration": 2}),
        ({"action": "type", "text": "hi"}, {"action": "type", "text": "hi"}),
        ({"action": "wait", "time": 1.5}, {"action": "wait", "duration": 1.5}),
        ({"action": "left_mouse_down"}, {"action": "left_mouse_down"}),
        ({"action": "left_mouse_up"}, {"action": "left_mouse_up"}),
        (
            {"action": "zoom", "coordinate": [0, 0], "coordinate2": [500, 500]},
            {"action": "zoom", "region": [0, 0, 500, 250]},
        ),
    ],
)
async def test_actions_come_in_anthropics_words_and_in_pixels_of_the_declared_display(
    gateway: Gateway,
    claude: anthropic.AsyncAnthropic,
    fake: FakeVllm,
    renderer: Qwen3VLRenderer,
    sampled: dict[str, Any],
    given: dict[str, Any],
) -> None:
    fake.answers.extend([call(**sampled), "Done."])
    history: list[Any] = [{"role": "user", "content": "Go."}]
    first = await claude.messages.create(model="claude", max_tokens=300, messages=history, tools=[COMPUTER])
    (block,) = first.content
    assert block.type == "tool_use"
    history.append({"role": "assistant", "content": first.content})
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [picture(SCREENS[0])]}
    history.append({"role": "user", "content": [result]})
    await claude.messages.create(model="claude", max_tokens=300, messages=history, tools=[COMPUTER])

    assert (block.name, block.input) == ("computer", given)
    assert [fork_reason(*pair, renderer.image_token_id) for pair in pairwise(gateway.turns("r1"))] == [None]
    (offered,) = fake.requests[0]["tools"]
    names = mapping(offered["parameters"]["properties"]["action"])["enum"]
    assert offered["name"] == COMPUTER_USE.name
    assert sampled["action"] in names


async def test_a_drag_starts_where_the_last_action_left_the_mouse(
    claude: anthropic.AsyncAnthropic, fake: FakeVllm
) -> None:
    fake.answers.append(
        call(action="mouse_move", coordinate=[100, 100])
        + call(action="zoom", coordinate=[0, 0], coordinate2=[500, 500])
        + call(action="left_click_drag", coordinate=[200, 200])
    )
    answer = await claude.messages.create(
        model="claude", max_tokens=300, messages=[{"role": "user", "content": "Go."}], tools=[COMPUTER]
    )
    assert [block.input for block in answer.content if block.type == "tool_use"] == [
        {"action": "mouse_move", "coordinate": [100, 50]},
        {"action": "zoom", "region": [0, 0, 500, 250]},
        {"action": "left_click_drag", "start_coordinate": [100, 50], "coordinate": [200, 100]},
    ]


async def test_the_policy_reads_with_the_screenshot_what_was_wrong_with_its_call(
    claude: anthropic.AsyncAnthropic, fake: FakeVllm
) -> None:
    fake.answers.extend([call(action="left_click"), "Done."])
    history: list[Any] = [{"role": "user", "content": "Go."}]
    first = await claude.messages.create(model="claude", max_tokens=300, messages=history, tools=[COMPUTER])
    (block,) = first.content
    assert block.type == "tool_use"
    history.append({"role": "assistant", "content": first.content})
    history.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "seen"}]})
    await claude.messages.create(model="claude", max_tokens=300, messages=history, tools=[COMPUTER])

    assert block.input == {"action": "screenshot"}
    said = json.dumps(fake.requests[1]["input"])
    assert "Expected coordinate" in said
    assert "seen" in said


async def test_tools_that_anthropic_defines_are_functions_with_their_schema(
    claude: anthropic.AsyncAnthropic, fake: FakeVllm
) -> None:
    tools: Any = [
        {"type": "bash_20250124", "name": "bash"},
        {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    ]
    fake.answers.append(call("bash", command="ls"))
    answer = await claude.messages.create(
        model="claude", max_tokens=300, messages=[{"role": "user", "content": "Go."}], tools=tools
    )
    assert [block.input for block in answer.content if block.type == "tool_use"] == [{"command": "ls"}]
    bash, editor = fake.requests[0]["tools"]
    assert set(bash["parameters"]["properties"]) == {"command", "restart"}
    assert editor["name"] == "str_replace_based_edit_tool"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"messages": "go"}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "source"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "at the end"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, r"tools\[0\]"),
        ({"tools": [{"name": "click"}]}, "input_schema"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "display_width_px"),
        ({"max_tokens": -1}, "max_output_tokens"),
        ({"system": 5}, "system"),
    ],
)
async def test_requests_that_cannot_be_rendered_are_refused_with_anthropics_error_body(
    claude: anthropic.AsyncAnthropic, fake: FakeVllm, more: dict[str, Any], message: str
) -> None:
    wanted: Any = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": "go"}], **more}
    with pytest.raises(anthropic.BadRequestError, match=message) as refused:
        await claude.messages.create(**wanted)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert fake.requests == []


async def test_another_key_is_refused(claude: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError):
        await claude.with_options(api_key="no").messages.create(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "go"}]
        )
