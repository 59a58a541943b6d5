"""The form that a request requires of its answer, and the grammar that enforces it.

A grammar is a structural tag of xgrammar (https://xgrammar.mlc.ai/docs/structural_tag/structural_tag.html): vLLM
samples by it, and `training/grammars.py` recomputes which tokens it allowed.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cua_rl.renderers.openai_fields import FieldPath, list_at, mapping_at, optional_text_at, text_at
from cua_rl.types.conversation import Tool
from cua_rl.types.json_values import Json, JsonDict, is_array, is_object, mapping, sequence

_NOT_ENFORCED = frozenset({"uniqueItems", "contains", "not", "if", "dependentRequired", "dependentSchemas"})
"""Keywords of JSON schemas that xgrammar takes and leaves to the model."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_DATA = ("enum", "const", "default", "examples")
_BLANKS_OF_A_CALL, _BLANKS_OF_A_FORMAT = 2, 64
"""In a row, in JSON: a model that is free to go on with blanks can do so until `max_tokens`. Formats are indented."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What a request says about the form of its answer."""

    tools: tuple[Tool, ...]
    """Those that are offered."""
    must_call: tuple[Tool, ...] = ()
    """One of these has to be called; none: the model decides."""
    one_call: bool = False
    """The answer ends after the first call."""
    schema: Json | None = None
    """Of an answer without calls; None is any text."""

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """Keywords of the schema that the answer may violate."""
        return () if self.schema is None or self.must_call else tuple(sorted(set(_find_not_enforced(self.schema))))


def read_form(request: Json, tools: Sequence[Tool], *, is_chat: bool) -> AnswerForm:
    """The form that a Responses or Chat Completions request with these tools asks for.

    Raises `RequestError` for a tool that is not there, and for a format of the text that is not known.
    """
    mode, names, is_named = _read_choice(request.get("tool_choice"), is_chat=is_chat)
    known = [tool.name for tool in tools]
    if names is not None and not set(names) <= set(known):
        raise FieldPath("tool_choice").error(f"names of tools, which are {known}", names, "name one of them")
    chosen = tuple(tool for tool in tools if names is None or tool.name in names)
    offered = () if mode == "none" else tuple(tools) if is_named else chosen
    if mode == "required" and not offered:
        raise FieldPath("tool_choice").error("auto or none without tools", request.get("tool_choice"), "send tools")
    return AnswerForm(
        tools=offered,
        must_call=chosen if mode == "required" else (),
        one_call=bool(offered) and (is_named or request.get("parallel_tool_calls") is False),
        schema=_read_schema(request, is_chat=is_chat),
    )


def write_grammar(form: AnswerForm, *, thinks: bool, uses_tags: bool) -> str:
    """The grammar of an answer, empty if the form leaves the model free.

    With `thinks`, the answer begins inside a think block; with `uses_tags`, calls are written as Qwen3.5 does.
    """
    called = form.must_call or form.tools
    formats: list[JsonDict] = []
    if form.schema is None and not form.must_call:
        return ""
    if called:
        tags = [_call(tool, uses_tags=uses_tags) for tool in called]
        calls: JsonDict = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
        formats.append({**calls, "stop_after_first": form.one_call})
    if form.schema is not None and not form.must_call:
        formats.append(_json(_with_items(form.schema), _BLANKS_OF_A_FORMAT))
    answer: JsonDict = formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
    if thinks:
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</think>"}
        answer = {"type": "sequence", "elements": [thought, {"type": "const_string", "value": "\n\n"}, answer]}
    return json.dumps({"type": "structural_tag", "format": answer})


def _call(tool: Tool, *, uses_tags: bool) -> JsonDict:
    schema = _with_items({"type": "object", **tool.parameters})
    content = _json(schema, _BLANKS_OF_A_CALL)
    if uses_tags:
        begin, end = f"<tool_call>\n<function={tool.name}>\n", "\n</function>\n</tool_call>"
        content["style"] = "qwen_xml"
    else:
        name = json.dumps(tool.name, ensure_ascii=False)
        begin, end = f'<tool_call>\n{{"name": {name}, "arguments": ', "}\n</tool_call>"
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _json(schema: object, max_blanks: int) -> JsonDict:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": max_blanks}


def _read_choice(choice: object, *, is_chat: bool) -> tuple[str, list[str] | None, bool]:
    """none, auto or required; the names of tools that it is about, None for all; whether one of them is forced."""
    at = FieldPath("tool_choice")
    if choice is None or choice in ("none", "auto", "required"):
        return str(choice or "auto"), None, False
    kind = mapping(choice).get("type")
    if kind not in ("function", "allowed_tools"):
        raise at.error("none, auto, required, a function or allowed_tools", choice, "use one of them")
    fields = mapping_at(choice, at)
    if is_chat:
        fields = mapping_at(fields.get(kind), at / kind)
    if kind == "function":
        return "required", [text_at(fields, "name", at)], True
    mode = optional_text_at(fields, "mode", at) or "auto"
    if mode not in ("auto", "required"):
        raise (at / "mode").error("auto or required", mode, "use one of them")
    given = [mapping_at(tool, at / "tools") for tool in list_at(fields.get("tools"), at / "tools")]
    functions = [mapping_at(tool.get("function"), at / "tools") if is_chat else tool for tool in given]
    return mode, [text_at(one, "name", at / "tools") for one in functions], False


def _read_schema(request: Json, *, is_chat: bool) -> Json | None:
    at = FieldPath("response_format" if is_chat else "text.format")
    given = request.get("response_format" if is_chat else "text")
    if given is not None and not is_chat:
        given = mapping_at(given, FieldPath("text")).get("format")
    if given is None:
        return None
    fields = mapping_at(given, at)
    match fields.get("type"):
        case "text":
            return None
        case "json_object":
            return {"type": "object"}
        case "json_schema":
            inner = mapping_at(fields.get("json_schema"), at / "json_schema") if is_chat else fields
            return mapping_at(inner.get("schema"), at / "schema")
        case kind:
            raise at.error("a format of type text, json_object or json_schema", kind, "ask for one of them")


def _with_items(schema: object) -> object:
    """The schema with any items in arrays that say nothing about theirs, which xgrammar would leave empty."""
    if is_array(schema):
        return [_with_items(part) for part in schema]
    if not is_object(schema):
        return schema
    whole, anything = {name: _with_items(part) for name, part in schema.items()}, JsonDict()
    needs_items = whole.get("type") == "array" and not whole.keys() & {"items", "prefixItems"}
    return {**whole, "items": anything} if needs_items else whole


def _find_not_enforced(schema: object) -> Iterator[str]:
    if is_array(schema):
        for part in schema:
            yield from _find_not_enforced(part)
    if not is_object(schema):
        return
    is_partly = {
        "allOf": len(sequence(schema.get("allOf"))) > 1,
        "$ref": not str(schema.get("$ref", "#")).startswith("#"),
        "multipleOf": schema.get("type") != "integer",
        **dict.fromkeys(("minLength", "maxLength"), bool(schema.keys() & {"pattern", "format"})),
    }
    yield from (name for name in schema if name in _NOT_ENFORCED or is_partly.get(name))
    for name, part in schema.items():
        if name not in _DATA:
            yield from _find_not_enforced(list(mapping(part).values()) if name in _SCHEMAS_BY_NAME else part)
