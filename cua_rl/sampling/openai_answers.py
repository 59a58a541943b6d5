"""Answers in OpenAI's formats: Responses and Chat Completions, also as events made from the complete answer."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cua_rl.renderers.openai_items import conversation_from_responses
from cua_rl.sampling.history_replay import visible_items
from cua_rl.types.conversation import Item, ParsedAnswer, ToolCall
from cua_rl.types.json_values import JsonDict
from cua_rl.types.rollout import ModelTurn

_UNFINISHED: Mapping[str, JsonDict] = {"function_call": {"arguments": ""}, "computer_call": {}}
"""What an output item is added with as an event; those with content are added without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A finished answer, independent of the API."""

    turn: ModelTurn
    parsed: ParsedAnswer
    model: str
    num_prompt_tokens: int
    num_sampled_tokens: int
    ignored: tuple[str, ...] = ()
    """Fields of the request that had no effect."""

    @property
    def is_complete(self) -> bool:
        return self.turn.stop == "stop"


def response_object(answer: Answer, request: Mapping[str, Any]) -> JsonDict:
    """The answer as a Response object, with the request's settings echoed as OpenAI does."""
    return {
        "id": answer.turn.response_id,
        "object": "response",
        "created_at": int(answer.turn.started_at),
        "status": "completed" if answer.is_complete else "incomplete",
        "incomplete_details": None if answer.is_complete else {"reason": "max_output_tokens"},
        "error": None,
        "model": answer.model,
        "output": output_items(answer),
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "temperature": request.get("temperature"),
        "top_p": request.get("top_p"),
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "store": False,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.turn.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.num_sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        },
    }


def output_items(answer: Answer) -> list[JsonDict]:
    """The reasoning, message and function-call items that the model produced, in this order."""
    parsed, suffix = answer.parsed, answer.turn.response_id.removeprefix("resp_")
    status = "completed" if answer.is_complete else "incomplete"
    items: list[JsonDict] = []
    if parsed.reasoning is not None:
        content = [{"type": "reasoning_text", "text": parsed.reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{suffix}", "summary": [], "content": content, "status": status})
    for index, item in enumerate(visible_items(parsed)):
        if isinstance(item, ToolCall):
            items.append(
                {
                    "type": "function_call",
                    "id": f"fc_{suffix}_{index}",
                    "call_id": item.call_id,
                    "name": item.name,
                    "arguments": item.arguments,
                    "status": "completed",
                }
            )
            continue
        part: JsonDict = {"type": "output_text", "text": parsed.text, "annotations": [], "logprobs": []}
        items.append(
            {"type": "message", "id": f"msg_{suffix}", "role": "assistant", "status": status, "content": [part]}
        )
    return items


def items_by_id(answer: Answer) -> dict[str, Item]:
    """The output items of a response as items of a conversation, by the ids that the agent received."""
    output = output_items(answer)
    items = conversation_from_responses({"input": output}).items
    return {given["id"]: item for given, item in zip(output, items, strict=True)}


def chat_completion(answer: Answer) -> JsonDict:
    return {
        "id": answer.turn.response_id,
        "object": "chat.completion",
        "created": int(answer.turn.started_at),
        "model": answer.model,
        "choices": [
            {"index": 0, "message": chat_message(answer), "finish_reason": finish_reason(answer), "logprobs": None}
        ],
        "usage": chat_usage(answer),
    }


def chat_message(answer: Answer) -> JsonDict:
    """The assistant message; reasoning is in `reasoning_content`, as in other open model servers."""
    message: JsonDict = {"role": "assistant", "content": answer.parsed.text, "refusal": None}
    if answer.parsed.reasoning is not None:
        message["reasoning_content"] = answer.parsed.reasoning
    if answer.parsed.tool_calls:
        message["content"] = answer.parsed.text or None
        message["tool_calls"] = chat_tool_calls(answer.parsed.tool_calls)
    return message


def chat_tool_calls(calls: Sequence[ToolCall]) -> list[JsonDict]:
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def finish_reason(answer: Answer) -> str:
    """Chat's `finish_reason`."""
    if not answer.is_complete:
        return "length"
    return "tool_calls" if answer.parsed.tool_calls else "stop"


def chat_usage(answer: Answer) -> JsonDict:
    """Chat's `usage`."""
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.turn.cached_tokens},
    }


def response_events(response: JsonDict) -> Iterator[bytes]:
    """A Response object as the events that build it up."""
    begun: JsonDict = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events: list[JsonDict] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(response["output"]):
        empty = _UNFINISHED.get(item["type"], {"content": []})
        added: JsonDict = {**item, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": index, "item": added})
        events += ({**event, "item_id": item["id"], "output_index": index} for event in item_events(item))
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{response['status']}", "response": response})
    for number, event in enumerate(events):
        yield event_bytes({**event, "sequence_number": number}, name=event["type"])


def item_events(item: JsonDict) -> Iterator[JsonDict]:
    """The events of an output item between those that add and finish it."""
    if item["type"] == "computer_call":
        return
    if item["type"] == "function_call":
        arguments, name = item["arguments"], item["name"]
        yield {"type": "response.function_call_arguments.delta", "delta": arguments}
        yield {"type": "response.function_call_arguments.done", "name": name, "arguments": arguments}
        return
    part: JsonDict = item["content"][0]
    kind, at = part["type"], {"content_index": 0}
    extra: JsonDict = {"logprobs": []} if kind == "output_text" else {}
    yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    yield {"type": f"response.{kind}.delta", **at, **extra, "delta": part["text"]}
    yield {"type": f"response.{kind}.done", **at, **extra, "text": part["text"]}
    yield {"type": "response.content_part.done", **at, "part": part}


def chat_events(answer: Answer, *, with_usage: bool) -> Iterator[bytes]:
    """A Chat completion as chunks, ended by `[DONE]`."""
    deltas: list[JsonDict] = [{"role": "assistant", "content": ""}]
    if answer.parsed.reasoning is not None:
        deltas.append({"reasoning_content": answer.parsed.reasoning})
    if answer.parsed.text:
        deltas.append({"content": answer.parsed.text})
    calls = chat_tool_calls(answer.parsed.tool_calls)
    deltas += ({"tool_calls": [{"index": index, **call}]} for index, call in enumerate(calls))
    chunk: JsonDict = {
        "id": answer.turn.response_id,
        "object": "chat.completion.chunk",
        "created": int(answer.turn.started_at),
        "model": answer.model,
    }
    for delta, reason in [*((delta, None) for delta in deltas), ({}, finish_reason(answer))]:
        choice: JsonDict = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        yield event_bytes({**chunk, "choices": [choice]})
    if with_usage:
        yield event_bytes({**chunk, "choices": [], "usage": chat_usage(answer)})
    yield b"data: [DONE]\n\n"


def event_bytes(data: dict[str, Any], *, name: str | None = None) -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    # in ASCII, because httpx and others end a line at U+2028 and U+0085 too
    return f"{head}data: {json.dumps(data)}\n\n".encode()
