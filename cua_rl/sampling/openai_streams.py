"""Finished answers as the server-sent events of both OpenAI APIs, for agents that ask for a stream.

The gateway has the whole answer before the first event: what an agent reads must be what was recorded.
"""

import json
from collections.abc import Iterator
from typing import Any

from cua_rl.sampling.openai_answers import Answer, chat_tool_calls, chat_usage, finish_reason
from cua_rl.types import JsonDict


def response_events(response: JsonDict) -> Iterator[bytes]:
    """A Response object as the events that build it up."""
    for number, event in enumerate(_response_events(response)):
        yield _event({**event, "sequence_number": number}, name=event["type"])


def _response_events(response: JsonDict) -> Iterator[JsonDict]:
    begun: JsonDict = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        yield {"type": "response.output_item.added", "output_index": index, "item": _emptied(item)}
        yield from ({**event, "item_id": item["id"], "output_index": index} for event in _item_events(item))
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _emptied(item: JsonDict) -> JsonDict:
    if item["type"] == "function_call":
        return {**item, "arguments": "", "status": "in_progress"}
    return {**item, "content": [], "status": "in_progress"}


def _item_events(item: JsonDict) -> Iterator[JsonDict]:
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", "delta": item["arguments"]}
        yield {
            "type": "response.function_call_arguments.done",
            "name": item["name"],
            "arguments": item["arguments"],
        }
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
    for delta in _chat_deltas(answer):
        yield _event(_chunk(answer, [_choice(delta, None)]))
    yield _event(_chunk(answer, [_choice({}, finish_reason(answer))]))
    if with_usage:
        yield _event({**_chunk(answer, []), "usage": chat_usage(answer)})
    yield b"data: [DONE]\n\n"


def _chat_deltas(answer: Answer) -> Iterator[JsonDict]:
    yield {"role": "assistant", "content": ""}
    if answer.parsed.reasoning is not None:
        yield {"reasoning_content": answer.parsed.reasoning}
    if answer.parsed.text:
        yield {"content": answer.parsed.text}
    for index, call in enumerate(chat_tool_calls(answer.parsed.tool_calls)):
        yield {"tool_calls": [{"index": index, **call}]}


def _choice(delta: JsonDict, reason: str | None) -> JsonDict:
    return {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}


def _chunk(answer: Answer, choices: list[JsonDict]) -> JsonDict:
    return {
        "id": answer.response_id,
        "object": "chat.completion.chunk",
        "created": answer.created_at,
        "model": answer.model,
        "choices": choices,
    }


def _event(data: dict[str, Any], *, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
