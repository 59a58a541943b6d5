"""Requests to OpenAI-compatible endpoints, in their Responses or Chat API, and the parsing of their answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import cast
from uuid import uuid4

from cua_rl.renderers.answers import parse_answer
from cua_rl.renderers.openai_items import responses_input, responses_tools
from cua_rl.sampling.openai_answers import chat_tool_calls
from cua_rl.types.conversation import (
    EncodedImage,
    Item,
    Message,
    ParsedAnswer,
    Reasoning,
    TextPart,
    Tool,
    ToolCall,
    ToolResult,
)
from cua_rl.types.errors import SamplingError
from cua_rl.types.json_values import JsonDict, mapping
from cua_rl.types.rollout import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An endpoint's answer; token counts are its own, 0 if it reports none."""

    parsed: ParsedAnswer
    is_complete: bool
    num_prompt_tokens: int
    num_cached_tokens: int
    num_sampled_tokens: int


def responses_body(items: Sequence[Item], tools: Sequence[Tool], model: str, params: SamplingParams) -> JsonDict:
    """A Responses request, without reasoning, because an endpoint only accepts reasoning that it has stored itself."""
    spoken = [item for item in items if not isinstance(item, Reasoning)]
    return {
        "model": model,
        "input": responses_input(spoken),
        "tools": [{**tool, "strict": False} for tool in responses_tools(tools)],
        "temperature": params.temperature,
        "max_output_tokens": params.max_tokens,
        "store": False,
    }


def chat_body(items: Sequence[Item], tools: Sequence[Tool], model: str, params: SamplingParams) -> JsonDict:
    return {
        "model": model,
        "messages": chat_messages(items),
        "tools": [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
            }
            for tool in tools
        ],
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
    }


def chat_messages(items: Sequence[Item]) -> list[JsonDict]:
    """Items as Chat messages; screenshots of tool results, which can only be text, follow in a user message."""
    messages: list[JsonDict] = []
    for kind, run in groupby((item for item in items if not isinstance(item, Reasoning)), _kind):
        group = list(run)
        if kind == "answer":
            text = "".join(_text(item) for item in group if isinstance(item, Message))
            calls = chat_tool_calls([item for item in group if isinstance(item, ToolCall)])
            with_calls = {"content": text or None, "tool_calls": calls} if calls else {}
            messages.append({"role": "assistant", "content": text, **with_calls})
        elif kind == "result":
            results = [item for item in group if isinstance(item, ToolResult)]
            for result in results:
                content = "".join(part.text for part in result.content if isinstance(part, TextPart)) or "Done."
                messages.append({"role": "tool", "tool_call_id": result.call_id, "content": content})
            parts = [part for result in results for part in result.content]
            if images := [_chat_part(part) for part in parts if isinstance(part, EncodedImage)]:
                messages.append({"role": "user", "content": images})
        else:
            for message in group:
                if isinstance(message, Message) and message.role == "user":
                    messages.append({"role": "user", "content": [_chat_part(part) for part in message.content]})
                elif isinstance(message, Message):  # a developer message is a system message here
                    messages.append({"role": "system", "content": _text(message)})
    return messages


def parse_responses_reply(body: object, tools: Sequence[Tool] = ()) -> Reply:
    """Parse a Response; `tools` give types to calls left in the text. Raises `SamplingError` for anything else."""
    try:
        fields = cast("JsonDict", body)
        texts, thoughts, calls = "", "", list[ToolCall]()
        for item in cast("list[JsonDict]", fields["output"]):
            match item["type"]:
                case "message":
                    texts += "".join(part.get("text", "") for part in item["content"])
                case "reasoning":
                    parts = cast("list[JsonDict]", item.get("content") or item.get("summary") or [])
                    thoughts += "".join(part.get("text", "") for part in parts)
                case "function_call":
                    calls.append(_call(item.get("call_id"), item["name"], item["arguments"]))
                case _:
                    continue
        usage = fields.get("usage")
        return Reply(
            parsed=_parsed(texts, thoughts or None, calls, tools),
            is_complete=fields.get("status", "completed") == "completed",
            num_prompt_tokens=_count(usage, "input_tokens"),
            num_cached_tokens=_count(usage, "input_tokens_details", "cached_tokens"),
            num_sampled_tokens=_count(usage, "output_tokens"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _no_reply("a Response object", body, error) from error


def parse_chat_reply(body: object, tools: Sequence[Tool] = ()) -> Reply:
    """Parse a Chat completion; `tools` and errors as in `parse_responses_reply`."""
    try:
        fields = cast("JsonDict", body)
        choice: JsonDict = fields["choices"][0]
        message: JsonDict = choice["message"]
        calls = [
            _call(call.get("id"), call["function"]["name"], call["function"]["arguments"])
            for call in cast("list[JsonDict]", message.get("tool_calls") or [])
        ]
        thoughts = message.get("reasoning_content") or message.get("reasoning")
        usage = fields.get("usage")
        return Reply(
            parsed=_parsed(message.get("content") or "", thoughts, calls, tools),
            is_complete=choice.get("finish_reason") != "length",
            num_prompt_tokens=_count(usage, "prompt_tokens"),
            num_cached_tokens=_count(usage, "prompt_tokens_details", "cached_tokens"),
            num_sampled_tokens=_count(usage, "completion_tokens"),
        )
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise _no_reply("a Chat completion", body, error) from error


def _parsed(text: str, reasoning: str | None, calls: Sequence[ToolCall], tools: Sequence[Tool]) -> ParsedAnswer:
    """The answer, with tool calls from the text if the endpoint has no tool parser."""
    if calls or "<tool_call>" not in text:
        return ParsedAnswer(reasoning=reasoning, text=text.strip(), tool_calls=tuple(calls))
    parsed = parse_answer(text, tools)
    named = tuple(replace(call, call_id=f"call_{uuid4().hex}") for call in parsed.tool_calls)
    return replace(parsed, reasoning=parsed.reasoning or reasoning, tool_calls=named)


def _call(call_id: object, name: str, arguments: object) -> ToolCall:
    return ToolCall(
        call_id=str(call_id) if call_id else f"call_{uuid4().hex}",
        name=name,
        arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
    )


def _count(usage: object, *path: str) -> int:
    """A token count; 0 if the endpoint does not report it."""
    for key in path:
        usage = mapping(usage).get(key)
    return usage if isinstance(usage, int) else 0


def _no_reply(expected: str, body: object, error: Exception) -> SamplingError:
    return SamplingError(
        f"expected {expected} from the endpoint, got {str(body)[:300]!r} ({type(error).__name__}: {error}); "
        "set api to responses or chat, whichever it speaks"
    )


def _kind(item: Item) -> str:
    match item:
        case ToolResult():
            return "result"
        case Message(role="system" | "developer" | "user"):
            return "told"
        case _:
            return "answer"


def _chat_part(part: TextPart | EncodedImage) -> Mapping[str, object]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.data_url()}}


def _text(message: Message) -> str:
    return "".join(part.text for part in message.content if isinstance(part, TextPart))
