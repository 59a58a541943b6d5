"""The table of request fields in docs/agents.md: what it calls ignored is ignored, what it calls refused is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from cua_rl.renderers.request_error import RequestError
from cua_rl.sampling.gateway import Api, Gateway
from tests.sampling.fake_vllm import FakeVllm

DOCS = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
PLAIN: dict[Api, dict[str, Any]] = {
    "responses": {
        "instructions": "Use the phone.",
        "input": "hi",
        "tools": [{"type": "function", "name": "click", "parameters": SCHEMA}],
    },
    "chat": {
        "messages": [{"role": "system", "content": "Use the phone."}, {"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "click", "parameters": SCHEMA}}],
    },
}
IGNORED: dict[str, Any] = {
    "max_tool_calls": 1,
    "reasoning": {"effort": "high", "summary": "auto"},
    "reasoning_effort": "high",
    "verbosity": "low",
    "temperature": 0.1,
    "top_p": 0.2,
    "seed": 3,
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "logit_bias": {"5": 100},
    "logprobs": True,
    "top_logprobs": 3,
    "include": ["reasoning.encrypted_content"],
    "model": "gpt",
    "store": True,
    "truncation": "auto",
    "user": "me",
    "metadata": {"a": "b"},
    "service_tier": "flex",
    "stream_options": {"include_usage": True},
}
REFUSED: dict[str, Any] = {
    "n": 2,
    "background": True,
    "conversation": {"id": "conv_1"},
    "prompt": {"id": "pmpt_1"},
    "functions": [{"name": "click", "parameters": SCHEMA}],
    "web_search_options": {"search_context_size": "low"},
    "audio": {"voice": "alloy", "format": "wav"},
}
HONOURED = {
    *("input", "messages", "instructions", "tools", "stream", "stream_options"),
    # see test_answer_form.py and test_gateway.py
    *("tool_choice", "parallel_tool_calls", "text", "response_format"),
    *("stop", "max_tokens", "max_output_tokens", "max_completion_tokens", "previous_response_id", "item_reference"),
}


def documented(status: str, column: int) -> set[str]:
    """Fields whose cell in this column begins with a status."""
    start = DOCS.index("| field of a request |")
    rows = [line.strip("| ").split(" | ") for line in DOCS[start : DOCS.index("\n\n", start)].splitlines()[2:]]
    names: set[str] = set()
    for fields, *cells in rows:
        cell = cells[0] if cells[column].startswith("as Responses") else cells[column]
        if cell.startswith(status):
            names |= set(re.findall("`([a-z_]+)`", fields.partition(" of type ")[0]))
    return names


def test_every_documented_field_is_tested() -> None:
    for column in (0, 1):
        assert documented("ignored", column) | {"stream_options"} == set(IGNORED)
        assert documented("refused", column) == set(REFUSED)
        assert documented("honoured", column) <= HONOURED


@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_ignored_fields_change_nothing_that_the_model_server_gets(
    gateway: Gateway, fake: FakeVllm, api: Api
) -> None:
    gateway.open_rollout("r")
    for more in ({}, *({name: value} for name, value in IGNORED.items()), IGNORED):
        await gateway.answer("r", PLAIN[api] | more, api)

    assert all(request == fake.requests[0] for request in fake.requests)
    assert len(fake.requests) == len(IGNORED) + 2
    assert "metadata" not in fake.requests[0]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("api", ["responses", "chat"])
async def test_refused_fields_are_named_unless_they_are_empty(
    gateway: Gateway, fake: FakeVllm, api: Api, name: str
) -> None:
    gateway.open_rollout("r")
    with pytest.raises(RequestError, match=name):
        await gateway.answer("r", PLAIN[api] | {name: REFUSED[name]}, api)
    assert fake.requests == []

    await gateway.answer("r", PLAIN[api] | {name: None}, api)


@pytest.mark.parametrize(("api", "field"), [("responses", "input"), ("chat", "messages")])
async def test_a_request_without_a_conversation_is_no_turn(
    gateway: Gateway, fake: FakeVllm, api: Api, field: str
) -> None:
    gateway.open_rollout("r")
    for request in ({"model": "policy"}, {field: []}, {"input": [], "messages": []}):
        with pytest.raises(RequestError, match=f"expected a conversation in {field}"):
            await gateway.answer("r", request, api)
    assert (fake.requests, gateway.turns("r")) == ([], ())


@pytest.mark.parametrize("has_ids", [True, False])
async def test_missing_ids_of_calls_and_results_are_matched_in_order(
    gateway: Gateway, fake: FakeVllm, has_ids: bool
) -> None:
    gateway.open_rollout("r")
    names = [{"id": name} if has_ids else {} for name in "ab"]
    calls = [{**one, "type": "function", "function": {"name": "click", "arguments": "{}"}} for one in names]
    results = [
        {"role": "tool", "content": f"result {at}", **({"tool_call_id": one["id"]} if has_ids else {})}
        for at, one in enumerate(names)
    ]
    question = PLAIN["chat"]["messages"]

    async def ask(*messages: object) -> object:
        await gateway.answer("r", PLAIN["chat"] | {"messages": [*question, *messages]}, "chat")
        return gateway.turns("r")[-1].prompt

    assistant = {"role": "assistant", "content": None, "tool_calls": calls}
    whole = await ask(assistant, *results)
    named = [{**call, "id": name} for call, name in zip(calls, "ab", strict=True)]
    given = [{**result, "tool_call_id": name} for result, name in zip(results, "ab", strict=True)]
    assert whole == await ask({**assistant, "tool_calls": named}, *given)
    assert whole == await ask({**assistant, "tool_calls": named}, *reversed(given))
    if not has_ids:
        with pytest.raises(RequestError, match="1 results without an id after 2 calls"):
            await ask(assistant, results[0])
