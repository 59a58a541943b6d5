"""Tool definitions and calls as Qwen3.5 and later models write them: a tag for the function and one per parameter.

Values carry no types: a text stands as it is, everything else as JSON (in Qwen3.5, scalars as Python writes them). They
are read by the parameter's schema; a value that does not fit stays text, so that the tool itself says what it expects.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from cua_rl.types.conversation import Tool, ToolCall
from cua_rl.types.json_values import is_array, is_object, mapping, sequence

FailureKind = Literal["json", "tool_call_form", "unclosed", "tool_name", "tool_arguments"]
CALL_FORM = (
    "<tool_call>\n<function=function_name>\n<parameter=parameter_name>\nvalue\n</parameter>\n</function>\n</tool_call>"
)
_TOOLS_HEADER = "# Tools\n\nYou have access to the following functions:\n\n<tools>\n"
_TOOLS_FOOTER = (
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
    "</parameter>\n</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT "
    "after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not "
    "tell the user about function calls\n</IMPORTANT>"
)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_PYTHON_LITERALS: Mapping[str, object] = {"True": True, "False": False, "None": None}


class MalformedCallError(Exception):
    """A tool call that cannot be read; `kind` is that of the `ParseFailure`."""

    def __init__(self, kind: FailureKind, what: str) -> None:
        super().__init__(what)
        self.kind: FailureKind = kind


def write_tools(definitions: Sequence[str]) -> str:
    """The part of the system message that defines tools, from the JSON of each."""
    return _TOOLS_HEADER + "\n".join(definitions) + _TOOLS_FOOTER


def write_python_value(value: object) -> str:
    """A value as Qwen3.5's template writes it: `True` and `None`, but JSON for lists and objects."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def write_json_value(value: object) -> str:
    """A value as Qwen3.6's template writes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_call(name: str, arguments: Mapping[str, object], write_value: Callable[[object], str]) -> str:
    """A call with its `<tool_call>` tags."""
    values = [f"<parameter={key}>\n{write_value(value)}\n</parameter>\n" for key, value in arguments.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(values)}</function>\n</tool_call>"


def parse_call(body: str, tools: Sequence[Tool], *, call_id: str) -> ToolCall:
    """The call between `<tool_call>` tags, without white space around it; raises `MalformedCallError`."""
    shown = body if len(body) <= 200 else f"{body[:200]}..."
    function = _FUNCTION.fullmatch(body)
    if function is None:
        raise MalformedCallError("tool_call_form", f"a tool call must be one <function=...> block, not {shown!r}")
    name, inside = function.group(1).strip(), function.group(2)
    if not name:
        raise MalformedCallError("tool_name", f"the name of a tool must not be empty, unlike in {shown!r}")
    schemas = _properties(name, tools)
    arguments: dict[str, object] = {}
    end = 0
    while (parameter := _PARAMETER.match(inside, end)) is not None:
        key, written = parameter.group(1).strip(), parameter.group(2)
        arguments[key] = _read_value(written.removeprefix("\n").removesuffix("\n"), schemas.get(key))
        end = parameter.end()
    if rest := inside[end:].strip():
        what = f"a function holds <parameter=...> blocks with </parameter> only, unlike {rest[:200]!r} in {shown!r}"
        raise MalformedCallError("tool_arguments", what)
    return ToolCall(call_id=call_id, name=name, arguments=json.dumps(arguments, ensure_ascii=False))


def _properties(name: str, tools: Sequence[Tool]) -> Mapping[str, object]:
    for tool in tools:
        properties = tool.parameters.get("properties")
        if tool.name == name and is_object(properties):
            return properties
    return {}


def _read_value(text: str, schema: object) -> object:
    """The value that the schema allows, or else the text itself."""
    kinds = _kinds(schema)
    if kinds == {"string"}:
        return text
    try:
        value: object = _PYTHON_LITERALS[text] if text in _PYTHON_LITERALS else json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return text
    if not kinds:  # an unknown tool or parameter: a text such as [1, 2] would be wrong
        return value if is_object(value) or is_array(value) else text
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    return value if _kind(value) in kinds | ({"integer"} if "number" in kinds else set()) else text


def _kinds(schema: object) -> set[str]:
    """The JSON types that a schema allows, as far as it says."""
    fields = mapping(schema)
    stated = fields.get("type")
    if isinstance(stated, str):
        return {stated}
    if is_array(stated):
        return set(map(str, stated))
    for choices in (fields.get("anyOf"), fields.get("oneOf")):
        if is_array(choices):
            return set[str]().union(*map(_kinds, choices))
    return set(map(_kind, sequence(fields.get("enum"))))


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
