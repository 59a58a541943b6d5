"""Plain OpenAI JSON for agents: Response objects and Chat completions from what the model said."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cua_rl.conversation import ParsedAnswer, ToolCall
from cua_rl.sampling.history_replay import visible_items
from cua_rl.types import JsonDict


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One finished answer, before it takes the form of an API."""

    response_id: str
    model: str
    created_at: int
    parsed: ParsedAnswer
    is_complete: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int


def response_object(answer: Answer, request: Mapping[str, Any]) -> JsonDict:
    """The answer as a Response object, with the request's settings echoed as OpenAI does."""
    return {
        "id": answer.response_id,
        "object": "response",
        "created_at": answer.created_at,
        "status": "completed" if answer.is_complete else "incomplete",
        "incomplete_details": None if answer.is_complete else {"reason": "max_output_tokens"},
        "error": None,
        "model": answer.model,
        "output": output_items(answer),
        "instructions": request.get("instructions"),
        "metadata": request.get("metadata") or {},
        "parallel_tool_calls": True,
        "temperature": request.get("temperature"),
        "top_p": request.get("top_p"),
        "tool_choice": "auto",
        "tools": request.get("tools") or [],
        "store": False,
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": answer.num_sampled_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        },
    }


def output_items(answer: Answer) -> list[JsonDict]:
    """Reasoning, message and function-call items, in this order; those that the model did not produce are left out."""
    parsed, suffix = answer.parsed, answer.response_id.removeprefix("resp_")
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


def chat_completion(answer: Answer) -> JsonDict:
    """The answer as a Chat completion."""
    return {
        "id": answer.response_id,
        "object": "chat.completion",
        "created": answer.created_at,
        "model": answer.model,
        "choices": [
            {"index": 0, "message": chat_message(answer), "finish_reason": finish_reason(answer), "logprobs": None}
        ],
        "usage": chat_usage(answer),
    }


def chat_message(answer: Answer) -> JsonDict:
    """The assistant message; thoughts are in `reasoning_content`, as is the custom of open model servers."""
    message: JsonDict = {"role": "assistant", "content": answer.parsed.text, "refusal": None}
    if answer.parsed.reasoning is not None:
        message["reasoning_content"] = answer.parsed.reasoning
    if answer.parsed.tool_calls:
        message["content"] = answer.parsed.text or None
        message["tool_calls"] = chat_tool_calls(answer.parsed.tool_calls)
    return message


def chat_tool_calls(calls: Sequence[ToolCall]) -> list[JsonDict]:
    """Tool calls in the nested form of Chat completions."""
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in calls
    ]


def finish_reason(answer: Answer) -> str:
    """Why the answer ended, in the words of Chat completions."""
    if not answer.is_complete:
        return "length"
    return "tool_calls" if answer.parsed.tool_calls else "stop"


def chat_usage(answer: Answer) -> JsonDict:
    """Token counts in the words of Chat completions."""
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_sampled_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached_tokens},
    }
