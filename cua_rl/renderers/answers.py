"""Answers of the model as text: Qwen's think and tool-call blocks, written and parsed."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Literal, Never, cast

from cua_rl.conversation import ParsedAnswer, ParseFailure, ToolCall

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"
_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_CALL_BLOCK = re.compile(rf"{_CALL_OPEN}(.*?)({_CALL_CLOSE}|(?={_CALL_OPEN})|\Z)", re.DOTALL)
_CALL_FORM = f'{_CALL_OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{_CALL_CLOSE}'

FailureKind = Literal["json", "tool_call_form", "unclosed", "tool_name", "tool_arguments"]


def write_answer(*, reasoning: str | None, text: str | None, tool_calls: Sequence[ToolCall]) -> str:
    """The text of an answer as the model would have written it.

    Arguments are written anew from their JSON; what is no JSON object becomes `{}`, as vLLM does.
    """
    thought = "" if reasoning is None else f"{_THINK_OPEN}\n{reasoning}\n{_THINK_CLOSE}\n\n"
    blocks = [
        f'{_CALL_OPEN}\n{{"name": "{call.name}", "arguments": {_object_json(call.arguments)}}}\n{_CALL_CLOSE}'
        for call in tool_calls
    ]
    return thought + "\n".join([text, *blocks] if text else blocks)


def parse_answer(text: str) -> ParsedAnswer:
    """Take an answer apart; never raises.

    Call ids are `call_0`, `call_1`, ... in the order of the calls that were read.
    A `</think>` without a `<think>` before it closes a block that the prompt opened. Of several things wrong, the first
    is the failure; calls that could be read are there all the same.
    """
    reasoning, rest, failure = _split_reasoning(text)
    calls: list[ToolCall] = []
    for block in _CALL_BLOCK.finditer(rest):
        try:
            calls.append(_parse_call(block, call_id=f"call_{len(calls)}"))
        except _Malformed as malformed:
            failure = failure or malformed.failure
    outside = _CALL_BLOCK.sub("", rest)
    if _CALL_CLOSE in outside:
        failure = failure or _failure("tool_call_form", f"there is a {_CALL_CLOSE} without a {_CALL_OPEN} before it")
    return ParsedAnswer(reasoning=reasoning, text=outside.strip(), tool_calls=tuple(calls), failure=failure)


class _Malformed(Exception):
    def __init__(self, failure: ParseFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def _split_reasoning(text: str) -> tuple[str | None, str, ParseFailure | None]:
    before, closed, after = text.partition(_THINK_CLOSE)
    is_open = before.lstrip().startswith(_THINK_OPEN)
    inside = before.lstrip().removeprefix(_THINK_OPEN).strip()
    if closed and (is_open or _CALL_OPEN not in before):
        return inside, after, None
    if is_open:
        return inside, "", _failure("unclosed", f"the {_THINK_OPEN} block has no {_THINK_CLOSE}")
    return None, text, None


def _parse_call(block: re.Match[str], *, call_id: str) -> ToolCall:
    body, end = block.group(1).strip(), block.group(2)
    if not end:
        raise _Malformed(_failure("unclosed", f"a {_CALL_OPEN} block has no {_CALL_CLOSE}"))
    call = _parse_json(body)
    if not isinstance(call, Mapping) or "name" not in call or "arguments" not in call:
        raise _Malformed(
            _failure(
                "tool_call_form", f"a tool call must be an object with name and arguments, not {_shortened(body)!r}"
            )
        )
    fields = cast("Mapping[str, object]", call)
    name, arguments = fields["name"], fields["arguments"]
    if not isinstance(name, str) or not name:
        raise _Malformed(
            _failure("tool_name", f"the name of a tool must be a non-empty string, unlike in {_shortened(body)!r}")
        )
    if not isinstance(arguments, Mapping):
        raise _Malformed(
            _failure(
                "tool_arguments",
                f"the arguments of {_shortened(name)!r} must be a JSON object, unlike in {_shortened(body)!r}",
            )
        )
    return ToolCall(call_id=call_id, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _parse_json(body: str) -> object:
    try:
        parsed = json.loads(body, parse_constant=_refuse_constant)
        json.dumps(parsed, ensure_ascii=False).encode()  # a lone surrogate is JSON, but no text that can be sent on
    except (ValueError, RecursionError) as error:
        raise _Malformed(_failure("json", f"a tool call is not valid JSON ({error}): {_shortened(body)!r}")) from error
    return parsed


def _refuse_constant(constant: str) -> Never:
    raise ValueError(f"{constant} is no JSON number")


def _object_json(arguments: str) -> str:
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return "{}"
    return json.dumps(parsed, ensure_ascii=False) if isinstance(parsed, dict) else "{}"


def _failure(kind: FailureKind, what: str) -> ParseFailure:
    return ParseFailure(
        kind=kind, message=f"Your answer could not be understood: {what}. Write tool calls as {_CALL_FORM}"
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
