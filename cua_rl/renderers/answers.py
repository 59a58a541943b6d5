"""Writes and parses answers as text with Qwen's think and tool-call blocks, calls as JSON or as tags (Qwen3.5)."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Never

from cua_rl.renderers import function_calls
from cua_rl.renderers.function_calls import FailureKind, MalformedCallError
from cua_rl.types.conversation import ParsedAnswer, ParseFailure, Tool, ToolCall
from cua_rl.types.json_values import is_object, mapping

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_CALL_BLOCK = re.compile(rf"{_CALL_OPEN}(.*?)({_CALL_CLOSE}|(?={_CALL_OPEN})|\Z)", re.DOTALL)
JSON_CALL_FORM = f'{_CALL_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{_CALL_CLOSE}'


def write_answer(*, reasoning: str | None, text: str | None, tool_calls: Sequence[ToolCall]) -> str:
    """The text of an answer as the model would write it; arguments that are no JSON object become `{}`, as in vLLM."""
    blocks: list[str] = []
    for call in tool_calls:
        arguments = json.dumps(_read_arguments(call), ensure_ascii=False)
        blocks.append(f'{_CALL_OPEN}\n{{"name": "{call.name}", "arguments": {arguments}}}\n{_CALL_CLOSE}')
    return _write_thought(reasoning) + "\n".join([text, *blocks] if text else blocks)


def write_function_answer(
    write_value: Callable[[object], str], *, reasoning: str | None, text: str | None, tool_calls: Sequence[ToolCall]
) -> str:
    """As `write_answer`, with calls in the form of Qwen3.5 and later models."""
    calls = [function_calls.write_call(call.name, _read_arguments(call), write_value) for call in tool_calls]
    said = [(text or "").rstrip(), "\n".join(calls)]
    return _write_thought(reasoning) + "\n\n".join(filter(None, said))


def _write_thought(reasoning: str | None) -> str:
    return "" if reasoning is None else f"{_THINK_OPEN}\n{reasoning}\n{_THINK_CLOSE}\n\n"


def _read_arguments(call: ToolCall) -> Mapping[str, object]:
    try:
        parsed: object = json.loads(call.arguments)
        json.dumps(parsed, ensure_ascii=False).encode()  # a lone surrogate is valid JSON, but no text
    except (ValueError, RecursionError):
        return {}
    return mapping(parsed)


def parse_answer(text: str, tools: Sequence[Tool] = (), *, call_form: str = JSON_CALL_FORM) -> ParsedAnswer:
    """Split an answer into reasoning, text and tool calls; never raises.

    Calls in JSON and calls in tags are both read; the values of the latter by the schemas of `tools`. `call_form` is
    the form that a failure's message asks for.

    Call ids are `call_0`, `call_1`, ... in the order of the parsed calls. A `</think>` without a `<think>` before it
    closes a block that the prompt opened. If several things are wrong, the first one is the failure; calls that could
    be parsed are still included.
    """
    before, closed, after = text.partition(_THINK_CLOSE)
    is_open = before.lstrip().startswith(_THINK_OPEN)
    inside = before.lstrip().removeprefix(_THINK_OPEN).strip()
    failure: ParseFailure | None = None
    if closed and (is_open or _CALL_OPEN not in before):
        reasoning, rest = inside, after
    elif is_open:
        reasoning, rest = inside, ""
        failure = _failure("unclosed", f"the {_THINK_OPEN} block has no {_THINK_CLOSE}", call_form)
    else:
        reasoning, rest = None, text
    calls: list[ToolCall] = []
    for block in _CALL_BLOCK.finditer(rest):
        try:
            calls.append(_parse_call(block, tools, call_id=f"call_{len(calls)}"))
        except MalformedCallError as malformed:
            failure = failure or _failure(malformed.kind, str(malformed), call_form)
    outside = _CALL_BLOCK.sub("", rest)
    if _CALL_CLOSE in outside:
        what = f"there is a {_CALL_CLOSE} without a {_CALL_OPEN} before it"
        failure = failure or _failure("tool_call_form", what, call_form)
    return ParsedAnswer(reasoning=reasoning, text=outside.strip(), tool_calls=tuple(calls), failure=failure)


def _parse_call(block: re.Match[str], tools: Sequence[Tool], *, call_id: str) -> ToolCall:
    def refuse_constant(constant: str) -> Never:
        raise ValueError(f"{constant} is no JSON number")

    body, end = block.group(1).strip(), block.group(2)
    shown = _shortened(body)
    if not end:
        raise MalformedCallError("unclosed", f"a {_CALL_OPEN} block has no {_CALL_CLOSE}")
    if body.startswith("<function"):
        return function_calls.parse_call(body, tools, call_id=call_id)
    try:
        call = json.loads(body, parse_constant=refuse_constant)
        # 1e999 is infinite, which JSON lacks; a lone surrogate is valid JSON, but cannot be sent on as text
        json.dumps(call, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise MalformedCallError("json", f"a tool call is not valid JSON ({error}): {shown!r}") from error
    if not is_object(call) or "name" not in call or "arguments" not in call:
        raise MalformedCallError(
            "tool_call_form", f"a tool call must be an object with name and arguments, not {shown!r}"
        )
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not name:
        raise MalformedCallError("tool_name", f"the name of a tool must be a non-empty string, unlike in {shown!r}")
    if not isinstance(arguments, Mapping):
        what = f"the arguments of {_shortened(name)!r} must be a JSON object, unlike in {shown!r}"
        raise MalformedCallError("tool_arguments", what)
    return ToolCall(call_id=call_id, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _failure(kind: FailureKind, what: str, call_form: str) -> ParseFailure:
    return ParseFailure(
        kind=kind, message=f"Your answer could not be understood: {what}. Write tool calls as {call_form}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
