"""Forced calls and formats through three protocols: what the model server is asked for, and what is refused."""

import json
from collections.abc import AsyncGenerator
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.renderers.request_error import RequestError
from cua_rl.sampling.gateway import Api, Gateway
from tests.sampling.fake_vllm import FakeVllm

CLICK_SCHEMA: Any = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
OPEN_SCHEMA: Any = {"type": "object", "properties": {"app": {"type": "string"}}}
SCHEMAS = {"click": CLICK_SCHEMA, "open": OPEN_SCHEMA}
RESPONSES_TOOLS: Any = [{"type": "function", "name": name, "parameters": one} for name, one in SCHEMAS.items()]
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": one}} for name, one in SCHEMAS.items()]
CLAUDE_TOOLS: Any = [{"name": name, "input_schema": one} for name, one in SCHEMAS.items()]
PLAIN: dict[Api, dict[str, Any]] = {
    "responses": {"input": "hi", "tools": RESPONSES_TOOLS},
    "chat": {"messages": [{"role": "user", "content": "hi"}], "tools": CHAT_TOOLS},
}
CALL = '<tool_call>\n{"name": "click", "arguments": {"x": 3}}\n</tool_call>'


class Weather(BaseModel):
    """An answer as an agent declares it."""

    city: str
    degrees: int


@pytest_asyncio.fixture
async def claude(gateway: Gateway) -> AsyncGenerator[anthropic.AsyncAnthropic]:
    gateway.open_rollout("r")
    access = gateway.access("r")
    assert access is not None
    async with (
        gateway.serve() as url,
        anthropic.AsyncAnthropic(base_url=f"{url}/rollouts/r", api_key=access.api_key, max_retries=0) as client,
    ):
        yield client


def asked(fake: FakeVllm) -> list[Any]:
    """The grammar of each request to the model server, None if there is none."""
    structured = [request.get("structured_outputs") for request in fake.requests]
    return [None if one is None else json.loads(one["structural_tag"])["format"] for one in structured]


def call_of(name: str) -> Any:
    content = {"type": "json_schema", "json_schema": SCHEMAS[name], "max_whitespace_cnt": 2}
    begin = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return {"type": "tag", "begin": begin, "content": content, "end": "}\n</tool_call>"}


def calls_of(*names: str, one: bool = False) -> Any:
    tags = list(map(call_of, names))
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": one,
    }


async def test_a_forced_call_is_the_same_grammar_through_three_protocols(
    gateway: Gateway, claude: anthropic.AsyncAnthropic, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.default_answer = CALL
    agent, chat, question = gateway.openai_client("r"), "policy", [{"role": "user", "content": "hi"}]
    messages: Any = {"model": "claude", "max_tokens": 60, "messages": question, "tools": CLAUDE_TOOLS}
    named = {"type": "function", "name": "click"}
    await claude.messages.create(**messages, tool_choice={"type": "any"})
    await agent.responses.create(model=chat, input="hi", tools=RESPONSES_TOOLS, tool_choice="required")
    await agent.chat.completions.create(model=chat, messages=question, tools=CHAT_TOOLS, tool_choice="required")  # type: ignore[arg-type]
    assert asked(fake) == [calls_of("click", "open")] * 3
    assert all(request["stop_token_ids"] == list(renderer.stop_token_ids) for request in fake.requests)

    fake.requests.clear()
    message = await claude.messages.create(**messages, tool_choice={"type": "tool", "name": "click"})
    response = await agent.responses.create(model=chat, input="hi", tools=RESPONSES_TOOLS, tool_choice=named)  # type: ignore[arg-type]
    completion = await agent.chat.completions.create(
        model=chat,
        messages=question,  # type: ignore[arg-type]
        tools=CHAT_TOOLS,
        tool_choice={"type": "function", "function": {"name": "click"}},
    )
    assert asked(fake) == [calls_of("click", one=True)] * 3
    assert response.tool_choice.model_dump() == named  # type: ignore[union-attr]
    assert [block.name for block in message.content if block.type == "tool_use"] == ["click"]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert len({turn.grammar for turn in gateway.turns("r")}) == 2


async def test_a_format_is_the_same_grammar_through_three_protocols(
    gateway: Gateway, claude: anthropic.AsyncAnthropic, fake: FakeVllm
) -> None:
    fake.default_answer = '{"city": "Bern", "degrees": 7}'
    agent, question = gateway.openai_client("r"), [{"role": "user", "content": "hi"}]
    response = await agent.responses.parse(model="policy", input="hi", text_format=Weather)
    completion = await agent.chat.completions.parse(model="policy", messages=question, response_format=Weather)  # type: ignore[arg-type]
    schema = asked(fake)[0]["json_schema"]
    await claude.messages.create(
        model="claude",
        max_tokens=60,
        messages=question,  # type: ignore[arg-type]
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )

    assert schema["required"] == ["city", "degrees"]
    assert asked(fake) == [{"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": 64}] * 3
    assert response.output_parsed == completion.choices[0].message.parsed == Weather(city="Bern", degrees=7)


async def test_an_agent_that_leaves_the_form_open_is_sampled_without_a_grammar(
    gateway: Gateway, claude: anthropic.AsyncAnthropic, fake: FakeVllm
) -> None:
    question: Any = [{"role": "user", "content": "hi"}]
    for more in ({}, {"tool_choice": {"type": "auto"}}, {"output_config": {}}):
        await claude.messages.create(
            model="claude", max_tokens=60, messages=question, tools=CLAUDE_TOOLS, extra_body=more
        )
    for text in ({}, {"format": {"type": "text"}}, None):
        await gateway.answer("r", PLAIN["responses"] | {"text": text, "tool_choice": "auto"}, "responses")
    await gateway.answer("r", PLAIN["chat"] | {"response_format": {"type": "text"}, "tool_choice": None}, "chat")

    assert asked(fake) == [None] * 7
    assert all("stop_token_ids" not in request and request["stop"] == [] for request in fake.requests)
    assert {turn.grammar for turn in gateway.turns("r")} == {""}


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_no_tools_are_offered_where_none_may_be_called(gateway: Gateway, fake: FakeVllm, api: Api) -> None:
    gateway.open_rollout("r")
    fake.default_answer = CALL
    answer = await gateway.answer("r", PLAIN[api] | {"tool_choice": "none"}, api)

    assert fake.requests[0]["tools"] == []
    assert (answer.parsed.text, answer.parsed.tool_calls) == (CALL, ())


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_other_tools_than_the_allowed_ones_are_not_offered(gateway: Gateway, fake: FakeVllm, api: Api) -> None:
    gateway.open_rollout("r")

    def allow(mode: str) -> Any:
        if api == "responses":
            return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "open"}]}
        tools = [{"type": "function", "function": {"name": "open"}}]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}

    for mode in ("auto", "required"):
        await gateway.answer("r", PLAIN[api] | {"tool_choice": allow(mode)}, api)

    assert [[tool["name"] for tool in request["tools"]] for request in fake.requests] == [["open"]] * 2
    assert asked(fake) == [None, calls_of("open")]


async def test_with_tools_and_a_format_the_model_calls_or_answers(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("r")
    text = {"format": {"type": "json_object"}}
    forms: list[dict[str, object]] = [{}, {"parallel_tool_calls": False}, {"tool_choice": "required"}]
    for more in forms:
        await gateway.answer("r", PLAIN["responses"] | {"text": text} | more, "responses")

    anything = {"type": "json_schema", "json_schema": {"type": "object"}, "max_whitespace_cnt": 64}
    assert asked(fake) == [
        {"type": "or", "elements": [calls_of("click", "open"), anything]},
        {"type": "or", "elements": [calls_of("click", "open", one=True), anything]},
        calls_of("click", "open"),
    ]


async def test_an_answer_with_one_call_ends_after_it_and_the_next_prompt_extends_it(
    gateway: Gateway, claude: anthropic.AsyncAnthropic, fake: FakeVllm, renderer: Qwen3VLRenderer
) -> None:
    fake.answers.extend([f"Two.{CALL}\n{CALL}"] * 2)
    request = PLAIN["responses"] | {"parallel_tool_calls": False}
    answer = await gateway.answer("r", request, "responses")
    await claude.messages.create(
        model="claude",
        max_tokens=60,
        messages=[{"role": "user", "content": "hi"}],
        tools=CLAUDE_TOOLS,
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
    )
    (call,) = answer.parsed.tool_calls
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Two."},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "ok"},
    ]
    following = await gateway.answer("r", request | {"input": history}, "responses")

    assert [request["stop"] for request in fake.requests] == [["</tool_call>"]] * 3
    assert asked(fake) == [None] * 3
    assert answer.turn.text == f"Two.{CALL}"
    assert (answer.parsed.text, answer.parsed.failure, answer.ignored) == ("Two.", None, ())
    sampled = [*answer.turn.prompt.token_ids(-1), *answer.turn.sampled_tokens]
    assert following.turn.prompt.token_ids(-1)[: len(sampled)] == sampled


async def test_the_computer_tool_is_forced_by_its_name(
    gateway: Gateway, claude: anthropic.AsyncAnthropic, fake: FakeVllm
) -> None:
    fake.default_answer = '<tool_call>\n{"name": "computer_use", "arguments": {"action": "screenshot"}}\n</tool_call>'
    size = {"display_width": 100, "display_height": 100, "environment": "browser"}
    preview = {"type": "computer_use_preview", **size}
    choice = {"type": "computer_use_preview"}
    request: Any = {"input": "hi", "tools": [preview, *RESPONSES_TOOLS], "tool_choice": choice}
    await gateway.answer("r", request, "responses")
    computer: Any = {"type": "computer_20250124", "name": "computer", "display_width_px": 9, "display_height_px": 9}
    message = await claude.messages.create(
        model="claude",
        max_tokens=60,
        messages=[{"role": "user", "content": "hi"}],
        tools=[computer],
        tool_choice={"type": "tool", "name": "computer"},
    )

    begins = [[tag["begin"] for tag in grammar["tags"]] for grammar in asked(fake)]
    assert begins == [['<tool_call>\n{"name": "computer_use", "arguments": ']] * 2
    assert [block.input for block in message.content if block.type == "tool_use"] == [{"action": "screenshot"}]


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no such tool": ({"tool_choice": {"type": "function", "name": "swipe"}}, "click.*got .'swipe'"),
    "nothing to call": ({"tool_choice": "required", "tools": []}, "expected auto or none without tools"),
    "an unknown choice": ({"tool_choice": "maybe"}, "allowed_tools at tool_choice, got 'maybe'"),
    "a tool of another type": ({"tool_choice": {"type": "file_search"}}, "at tool_choice"),
    "a name that is no text": ({"tool_choice": {"type": "function", "name": 3}}, "string at tool_choice.name"),
    "an unknown mode": ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode"),
    "no list of tools": ({"tool_choice": {"type": "allowed_tools", "tools": 1}}, "list at tool_choice.tools"),
    "text that is no object": ({"text": "json"}, "object at text,"),
    "an unknown format": ({"text": {"format": {"type": "grammar"}}}, "json_schema at text.format, got 'grammar'"),
    "no schema": ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "object at text.format.schema"),
    "a list as schema": ({"text": {"format": {"type": "json_schema", "schema": [1]}}}, "object at text.format.schema"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_forms_are_refused_with_their_place(gateway: Gateway, fake: FakeVllm, name: str) -> None:
    gateway.open_rollout("r")
    more, sentence = MALFORMED[name]
    with pytest.raises(RequestError, match=sentence):
        await gateway.answer("r", PLAIN["responses"] | more, "responses")
    assert (fake.requests, gateway.turns("r")) == ([], ())


async def test_a_schema_that_the_server_cannot_compile_is_a_refusal_and_no_fault(
    gateway: Gateway, fake: FakeVllm
) -> None:
    gateway.open_rollout("r")
    fake.refusal = (400, "Invalid structural tag specification.")
    agent = gateway.openai_client("r")
    with pytest.raises(openai.BadRequestError, match=r"got others \(Invalid structural tag"):
        await agent.responses.create(model="policy", input="hi", text={"format": {"type": "json_object"}})
    assert gateway.turns("r") == ()


async def test_what_a_schema_says_without_effect_is_named(gateway: Gateway, fake: FakeVllm) -> None:
    gateway.open_rollout("r")
    schema = {
        "type": "object",
        "properties": {
            "contains": {"type": "array", "items": {"type": "string", "pattern": "a", "minLength": 3}},
            "if": {"type": "integer", "multipleOf": 3},
            "not": {"$ref": "#/$defs/unique"},
            "one": {"allOf": [{"$ref": "#/$defs/unique"}], "default": {"multipleOf": 3}},
        },
        "$defs": {"unique": {"type": "array", "uniqueItems": True}},
    }
    answers = [
        await gateway.answer("r", PLAIN[api] | more, api)
        for api, more in (
            ("responses", {"text": {"format": {"type": "json_schema", "schema": schema}, "verbosity": "low"}}),
            ("chat", {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
            ("chat", {"text": {"format": {"type": "json_object"}}}),
        )
    ]
    assert [answer.ignored for answer in answers] == [
        ("text.format: minLength", "text.format: uniqueItems", "text.verbosity"),
        ("response_format: minLength", "response_format: uniqueItems"),
        ("text",),
    ]
