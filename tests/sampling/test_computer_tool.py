"""Agents that are written for OpenAI's computer tool, the Agents SDK unmodified among them, against the gateway."""

import json
from base64 import b64encode
from collections.abc import Sequence
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from agents import Agent, AsyncComputer, ComputerTool, OpenAIResponsesModel, Runner, set_tracing_disabled
from agents.computer import Button, Environment
from openai import AsyncOpenAI, BadRequestError

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rl.datums import fork_reason
from cua_rl.sampling import computer_tool
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.types.conversation import ParsedAnswer, ToolCall
from cua_rl.types.rollout import SamplingParams
from tests.renderers.generated import encode_image, make_image
from tests.sampling.fake_vllm import FakeVllm

WIDTH, HEIGHT = 320, 640
SCREENS = [encode_image(make_image(WIDTH, HEIGHT, seed)) for seed in range(3)]
PREVIEW: Any = {
    "type": "computer_use_preview",
    "display_width": 1024,
    "display_height": 768,
    "environment": "browser",
}


@pytest.fixture
def fake(renderer: Qwen3VLRenderer) -> FakeVllm:
    return FakeVllm(renderer, max_model_len=1_000_000)


@pytest.fixture
def gateway(client: SamplingClient, renderer: Qwen3VLRenderer) -> Gateway:
    return Gateway(client, renderer, SamplingParams(max_tokens=400, temperature=1.0))


def call(**arguments: object) -> str:
    """What the policy samples."""
    return f"<tool_call>\n{json.dumps({'name': 'computer_use', 'arguments': arguments})}\n</tool_call>"


def url(screen: bytes) -> str:
    return f"data:image/png;base64,{b64encode(screen).decode()}"


def output(call_id: str, screen: bytes = SCREENS[0], **more: object) -> Any:
    shown = {"type": "computer_screenshot", "image_url": url(screen)}
    return {"type": "computer_call_output", "call_id": call_id, "output": shown, **more}


class Desk(AsyncComputer):
    """Notes what is done to it, and shows another picture after each action."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    @property
    def environment(self) -> Environment:
        return "browser"

    @property
    def dimensions(self) -> tuple[int, int]:
        return WIDTH, HEIGHT

    async def screenshot(self) -> str:
        return b64encode(SCREENS[len(self.done) % len(SCREENS)]).decode()

    async def click(self, x: int, y: int, button: Button) -> None:
        self.done.append(("click", x, y, button))

    async def double_click(self, x: int, y: int) -> None:
        self.done.append(("double_click", x, y))

    async def scroll(self, x: int, y: int, scroll_x: int, scroll_y: int) -> None:
        self.done.append(("scroll", x, y, scroll_x, scroll_y))

    async def type(self, text: str) -> None:
        self.done.append(("type", text))

    async def wait(self) -> None:
        self.done.append(("wait",))

    async def move(self, x: int, y: int) -> None:
        self.done.append(("move", x, y))

    async def keypress(self, keys: list[str]) -> None:
        self.done.append(("keypress", *keys))

    async def drag(self, path: list[tuple[int, int]]) -> None:
        self.done.append(("drag", *path))


async def run_agents_sdk(gateway: Gateway, model: str, rollout_id: str, num_turns: int) -> tuple[Desk, str]:
    """The Agents SDK's loop around a computer; returns what was done, and the agent's last words."""
    set_tracing_disabled(True)
    desk = Desk()
    gateway.open_rollout(rollout_id)
    agent = Agent(
        name="user of a computer",
        model=OpenAIResponsesModel(model=model, openai_client=gateway.openai_client(rollout_id)),
        tools=[ComputerTool(desk)],
    )
    result = await Runner.run(agent, "Look around.", max_turns=num_turns)
    return desk, str(result.final_output)


@pytest.mark.parametrize("model", ["policy", "computer-use-preview"])
async def test_every_action_of_the_policy_reaches_the_agents_sdks_computer(
    gateway: Gateway, fake: FakeVllm, renderer: Qwen3VLRenderer, model: str
) -> None:
    fake.answers.extend(
        [
            call(action="screenshot"),
            call(action="left_click", coordinate=[500, 250]),
            call(action="right_click", coordinate=[0, 1000]),
            call(action="mouse_move", coordinate=[100, 100]),
            call(action="left_click_drag", coordinate=[200, 300]),
            call(action="scroll", pixels=-40),
            call(action="double_click", coordinate=[999, 999]),
            call(action="key", keys=["ctrl", "s"]),
            call(action="type", text="Zürich") + "\n" + call(action="wait", time=1),
            call(action="answer", text="done so"),
        ]
    )
    desk, said = await run_agents_sdk(gateway, model, "sdk", 12)

    assert desk.done == [
        ("click", 160, 160, "left"),
        ("click", 0, 639, "right"),
        ("move", 32, 64),
        ("drag", (32, 64), (64, 192)),
        ("scroll", 64, 192, 0, 40),
        ("double_click", 319, 639),
        ("keypress", "CTRL", "s"),
        ("type", "Zürich"),
        ("wait",),
    ]
    assert said == "done so"
    turns = gateway.close_rollout("sdk")
    assert [fork_reason(last, following, renderer.image_token_id) for last, following in pairwise(turns)] == [None] * 9
    assert gateway.prompt_mismatches == 0


@pytest.mark.parametrize("model", ["policy", "computer-use-preview"])
async def test_a_click_on_each_of_100_targets_lands(gateway: Gateway, fake: FakeVllm, model: str) -> None:
    """The policy speaks thousandths of the screen, of which a pixel has at least one in both directions here."""
    rng = Random(0)
    targets = [(rng.randrange(WIDTH), rng.randrange(HEIGHT)) for _ in range(100)]
    done: list[tuple[object, ...]] = []
    for start in range(0, 100, 10):
        fake.answers.append(call(action="screenshot"))
        for x, y in targets[start : start + 10]:
            point = [round(1000 * x / WIDTH), round(1000 * y / HEIGHT)]
            fake.answers.append(call(action="left_click", coordinate=point))
        fake.answers.append("done")
        desk, _ = await run_agents_sdk(gateway, model, f"targets {start}", 20)
        done += desk.done

    assert done == [("click", x, y, "left") for x, y in targets]


@pytest.fixture
def agent(gateway: Gateway) -> AsyncOpenAI:
    gateway.open_rollout("r1")
    return gateway.openai_client("r1")


async def test_pixels_are_those_of_the_declared_display_whatever_the_screenshots_have(
    agent: AsyncOpenAI, fake: FakeVllm
) -> None:
    fake.answers.append(call(action="left_click", coordinate=[500, 500]))

    response = await agent.responses.create(
        model="policy", tools=[PREVIEW], input=[output("call_x")], truncation="auto", previous_response_id=None
    )

    (made,) = response.output
    assert made.type == "computer_call"
    assert made.action is not None
    assert made.action.to_dict() == {"type": "click", "button": "left", "x": 512, "y": 384}
    assert made.pending_safety_checks == []


async def test_a_loop_that_sends_only_what_is_new_keeps_the_cursor(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.extend(
        [call(action="mouse_move", coordinate=[100, 100]), call(action="left_click_drag", coordinate=[200, 200])]
    )
    tools: Any = [{"type": "computer"}]
    question: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url(SCREENS[0])}]}
    first = await agent.responses.create(model="policy", tools=tools, input=[question])
    (moved,) = first.output
    assert moved.type == "computer_call"
    second = await agent.responses.create(
        model="policy",
        tools=tools,
        previous_response_id=first.id,
        input=[output(moved.call_id, acknowledged_safety_checks=[], current_url="https://a.example/")],
    )

    (dragged,) = second.output
    assert dragged.type == "computer_call"
    assert [action.to_dict() for action in dragged.actions or []] == [
        {"type": "drag", "path": [{"x": 32, "y": 64}, {"x": 64, "y": 128}]}
    ]
    assert "URL: https://a.example/" in json.dumps(fake.requests[1]["input"])


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        (call(action="left_click", coordinate=[5000, 1]), "Expected coordinate"),
        (call(action="fly"), "Expected one of"),
        ("<tool_call>\n{]\n</tool_call>", "JSON"),
    ],
)
async def test_a_malformed_call_asks_for_a_screenshot_and_the_policy_reads_why(
    agent: AsyncOpenAI, gateway: Gateway, fake: FakeVllm, sampled: str, message: str
) -> None:
    fake.answers.extend([sampled, call(action="wait")])
    tools: Any = [{"type": "computer"}]
    question: Any = {"role": "user", "content": [{"type": "input_image", "image_url": url(SCREENS[0])}]}
    first = await agent.responses.create(model="policy", tools=tools, input=[question])
    made = first.output[-1]
    assert made.type == "computer_call"
    history: Any = [question, *first.output, output(made.call_id)]
    await agent.responses.create(model="policy", tools=tools, input=history)

    assert [action.type for action in made.actions or []] == ["screenshot"]
    assert message in json.dumps(fake.requests[1]["input"])
    assert [turn.failure is None for turn in gateway.turns("r1")] == [False, True]


async def test_a_click_before_the_first_screenshot_asks_for_one(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.append(call(action="left_click", coordinate=[500, 500]))
    response = await agent.responses.create(model="policy", tools=[{"type": "computer"}], input="Open mail.")
    (made,) = response.output
    assert made.type == "computer_call"
    assert [action.type for action in made.actions or []] == ["screenshot"]


@pytest.mark.parametrize(
    ("keys", "of_openai", "of_x11"),
    [
        (["Control", "Down"], ["CTRL", "ARROWDOWN"], "ctrl+Down"),
        (["escape"], ["ESC"], "Escape"),
        (["cmd", "+"], ["WIN", "+"], "super+plus"),
        (["shift", "page_up"], ["SHIFT", "PAGEUP"], "shift+Page_Up"),
        (["backspace"], ["BACKSPACE"], "BackSpace"),
        (["F5"], ["F5"], "F5"),
        (["XF86AudioPlay"], ["XF86AudioPlay"], "XF86AudioPlay"),
    ],
)
def test_keys_have_the_names_that_a_vendors_programs_look_up(
    keys: list[str], of_openai: list[str], of_x11: str
) -> None:
    parsed = ParsedAnswer(
        reasoning=None,
        text="",
        tool_calls=(ToolCall(call_id="", name="computer_use", arguments=json.dumps({"action": "key", "keys": keys})),),
    )
    tools = [computer_tool.ComputerTool(kind=kind, size=(100, 100)) for kind in ("current", "anthropic")]
    current, anthropic = (json.loads(tool.answer(parsed, [], []).tool_calls[0].arguments) for tool in tools)

    assert current == {"actions": [{"type": "keypress", "keys": of_openai}]}
    assert anthropic == {"action": "key", "text": of_x11}


async def test_calls_stream_as_events_the_openai_package_understands(agent: AsyncOpenAI, fake: FakeVllm) -> None:
    fake.answers.append(call(action="key", keys=["enter"]))
    async with agent.responses.stream(model="policy", tools=[PREVIEW], input="go") as stream:
        kinds = [event.type async for event in stream]
        (made,) = (await stream.get_final_response()).output
    assert made.type == "computer_call"
    assert kinds[-3:] == ["response.output_item.added", "response.output_item.done", "response.completed"]


@pytest.mark.parametrize(
    ("tools", "items"),
    [
        ([{"type": "computer_use_preview", "environment": "browser"}], []),
        ([PREVIEW, {"type": "function", "name": "computer", "parameters": {}}], []),
        ([PREVIEW], [{"type": "computer_call", "call_id": "c", "actions": 5}]),
        ([PREVIEW], [{"type": "computer_call", "call_id": "c"}]),
        ([PREVIEW], [{"type": "computer_call_output", "call_id": "c", "output": "seen"}]),
        ([PREVIEW], [{"type": "computer_call_output", "call_id": "c", "output": {"file_id": "f"}}]),
    ],
)
async def test_what_is_no_computer_call_is_refused(
    agent: AsyncOpenAI, fake: FakeVllm, tools: Any, items: Sequence[Any]
) -> None:
    with pytest.raises(BadRequestError, match="expected"):
        await agent.responses.create(model="policy", tools=tools, input=[{"role": "user", "content": "go"}, *items])
    assert fake.requests == []
