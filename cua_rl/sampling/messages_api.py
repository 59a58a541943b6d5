"""Anthropic's Messages API: a request becomes one of the Responses API, an answer becomes a message.

The tools that Anthropic defines without a schema are offered as functions with theirs; `computer_tool.py` has the one
for a computer.
"""

import json
from collections.abc import Iterator, Mapping

from cua_rl.renderers.openai_fields import FieldPath, list_at, mapping_at, optional_list_at, optional_text_at, text_at
from cua_rl.renderers.request_error import RequestError
from cua_rl.sampling.openai_answers import Answer, event_bytes
from cua_rl.types.json_values import Json, JsonDict, is_object, mapping

_COMPUTER = "computer_20"


def _schema(required: str, **kinds: str) -> JsonDict:
    properties = {name: {"type": kind} for name, kind in kinds.items()}
    return {"type": "object", "properties": properties, "required": [required]}


_PREDEFINED: Mapping[str, tuple[str, JsonDict]] = {
    "bash_20": (
        "Run a command in a shell that stays open; restart starts another one.",
        _schema("command", command="string", restart="boolean"),
    ),
    "text_editor_20": (
        "View, create and edit files. Commands: view, create, str_replace, insert, undo_edit.",
        _schema(
            "command",
            command="string",
            path="string",
            file_text="string",
            old_str="string",
            new_str="string",
            insert_line="integer",
            insert_text="string",
            view_range="array",
        ),
    ),
}
"""Description and parameters of tools that Anthropic's models know, by the beginning of their type."""


def responses_request(body: Json) -> JsonDict:
    """The same request for the Responses API; raises `RequestError` for what cannot be shown to the model."""
    messages = list_at(body.get("messages"), FieldPath("messages"))
    items: list[JsonDict] = []
    for index, message in enumerate(messages):
        at = FieldPath(f"messages[{index}]")
        items += _items(mapping_at(message, at), at)
    if messages and mapping(messages[-1]).get("role") == "assistant":
        raise RequestError(
            expected="a user message at the end", got="one of the assistant", do="leave out the beginning of the answer"
        )
    if body.get("mcp_servers"):
        raise FieldPath("mcp_servers").error("none", body["mcp_servers"], "describe their tools with input_schema")
    tools = [
        _tool(mapping_at(tool, FieldPath(f"tools[{index}]")), FieldPath(f"tools[{index}]"))
        for index, tool in enumerate(optional_list_at(body.get("tools"), FieldPath("tools")))
    ]
    choice = mapping(body.get("tool_choice"))
    text_format = mapping(body.get("output_config")).get("format") or body.get("output_format")  # the earlier name
    return {
        "tool_choice": _choice(choice) if choice else body.get("tool_choice"),
        "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True,
        "text": {"format": text_format},
        "input": items,
        "instructions": "\n".join(_texts(body.get("system"), FieldPath("system"))) or None,
        "tools": tools,
        "max_output_tokens": body.get("max_tokens"),
        "stop": body.get("stop_sequences"),
    }


def message_object(answer: Answer, request: Json) -> JsonDict:
    """The answer as a Message."""
    parsed, content = answer.parsed, list[JsonDict]()
    if parsed.reasoning is not None:
        content.append({"type": "thinking", "thinking": parsed.reasoning, "signature": ""})
    if parsed.text:
        content.append({"type": "text", "text": parsed.text})
    for call in parsed.tool_calls:
        given = json.loads(call.arguments)
        content.append({"type": "tool_use", "id": call.call_id, "name": call.name, "input": dict(mapping(given))})
    stops = optional_list_at(request.get("stop_sequences"), FieldPath("stop_sequences"))
    hit = next((stop for stop in stops if isinstance(stop, str) and stop and stop in answer.turn.text), None)
    reason = "tool_use" if parsed.tool_calls else "end_turn" if hit is None else "stop_sequence"
    return {
        "id": answer.turn.response_id.replace("resp_", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": answer.model,
        "content": content,
        "stop_reason": reason if answer.is_complete else "max_tokens",
        "stop_sequence": hit,
        "usage": {
            "input_tokens": answer.num_prompt_tokens - answer.turn.cached_tokens,
            "cache_read_input_tokens": answer.turn.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": answer.num_sampled_tokens,
        },
    }


def message_events(message: JsonDict) -> Iterator[bytes]:
    """A Message as the events that build it up."""
    begun: JsonDict = {**message, "content": [], "stop_reason": None, "stop_sequence": None}
    begun["usage"] = {**message["usage"], "output_tokens": 0}
    events: list[JsonDict] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        empty: JsonDict = {}
        match block["type"]:
            case "tool_use":
                empty["input"] = {}
                delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            case "thinking":
                empty["thinking"] = ""
                delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            case _:
                empty["text"] = ""
                delta = {"type": "text_delta", "text": block["text"]}
        events.append({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
        events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    ended = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    events += {"type": "message_delta", "delta": ended, "usage": message["usage"]}, {"type": "message_stop"}
    for event in events:
        yield event_bytes(event, name=event["type"])


def _items(message: Json, at: FieldPath) -> list[JsonDict]:
    """A message as items: consecutive texts and images are one of them."""
    role, given = text_at(message, "role", at), message.get("content")
    blocks = [{"type": "text", "text": given}] if isinstance(given, str) else list_at(given, at / "content")
    items: list[JsonDict] = []
    for index, one in enumerate(blocks):
        place = FieldPath(f"{at}.content[{index}]")
        block = mapping_at(one, place)
        match block.get("type"):
            case "tool_use":
                arguments = json.dumps(mapping_at(block.get("input"), place / "input"))
                call = {"call_id": text_at(block, "id", place), "name": text_at(block, "name", place)}
                items.append({"type": "function_call", **call, "arguments": arguments})
            case "tool_result":
                content = block.get("content")
                output = content if content is None or isinstance(content, str) else _parts(content, place / "content")
                call_id = text_at(block, "tool_use_id", place)
                items.append({"type": "function_call_output", "call_id": call_id, "output": output})
            case "thinking":
                thought = {"type": "reasoning_text", "text": text_at(block, "thinking", place)}
                items.append({"type": "reasoning", "content": [thought]})
            case "redacted_thinking":
                pass
            case _:
                if not (items and items[-1]["type"] == "message"):
                    items.append({"type": "message", "role": role, "content": []})
                items[-1]["content"] += _parts([block], place)
    return items


def _parts(blocks: object, at: FieldPath) -> list[JsonDict]:
    parts: list[JsonDict] = []
    for index, one in enumerate(list_at(blocks, at)):
        place = FieldPath(f"{at}[{index}]")
        block = mapping_at(one, place)
        match block.get("type"):
            case "text":
                parts.append({"type": "input_text", "text": text_at(block, "text", place)})
            case "image":
                source = mapping_at(block.get("source"), place / "source")
                url = source.get("url")
                if source.get("type") == "base64":
                    kind, data = (text_at(source, name, place / "source") for name in ("media_type", "data"))
                    url = f"data:{kind};base64,{data}"
                parts.append({"type": "input_image", "image_url": url})
            case kind:
                raise place.error("a block of text or an image", kind, "send text or a screenshot")
    return parts


def _choice(choice: Json) -> object:
    match choice.get("type"):
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "name": choice.get("name")}
        case kind:
            return kind


def _texts(system: object, at: FieldPath) -> list[str]:
    if system is None or isinstance(system, str):
        return [text_at({"system": system}, "system", at)] if system else []
    return [text_at(mapping_at(block, at), "text", at) for block in list_at(system, at)]


def _tool(tool: Json, at: FieldPath) -> JsonDict:
    kind = tool.get("type") or "custom"
    if isinstance(kind, str) and kind.startswith(_COMPUTER):
        return dict(tool)
    known = next(
        (known for begin, known in _PREDEFINED.items() if isinstance(kind, str) and kind.startswith(begin)), None
    )
    if known is None and kind != "custom":
        raise at.error("a custom tool, or one of computer, bash and text_editor", kind, "describe it with input_schema")
    schema = tool.get("input_schema")
    description, parameters = known or (
        optional_text_at(tool, "description", at) or "",
        schema if is_object(schema) else mapping_at(schema, at / "input_schema"),
    )
    return {
        "type": "function",
        "name": text_at(tool, "name", at),
        "description": description,
        "parameters": dict(parameters),
    }
