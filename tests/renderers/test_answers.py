import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cua_rl.renderers.answers import parse_answer, write_answer
from cua_rl.types.conversation import ParsedAnswer, ToolCall


def call(name: str = "click", arguments: str = '{"x": 1}', index: int = 0) -> ToolCall:
    return ToolCall(call_id=f"call_{index}", name=name, arguments=arguments)


CLICK = '<tool_call>\n{"name": "click", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Done.", ParsedAnswer(reasoning=None, text="Done.", tool_calls=())),
        ("", ParsedAnswer(reasoning=None, text="", tool_calls=())),
        (CLICK, ParsedAnswer(reasoning=None, text="", tool_calls=(call(),))),
        (
            f"<think>\nWhere?\n</think>\n\nThere.\n{CLICK}",
            ParsedAnswer(reasoning="Where?", text="There.", tool_calls=(call(),)),
        ),
        (
            f"<think>Phone Mail</think>{CLICK}{CLICK}",
            ParsedAnswer(reasoning="Phone Mail", text="", tool_calls=(call(), call(index=1))),
        ),
        ("opened by the prompt</think>yes", ParsedAnswer(reasoning="opened by the prompt", text="yes", tool_calls=())),
        ("<think></think>", ParsedAnswer(reasoning="", text="", tool_calls=())),
        (
            '<tool_call>{"arguments":{"text":"</think> é"},"name":"type"}</tool_call> so',
            ParsedAnswer(reasoning=None, text="so", tool_calls=(call("type", '{"text": "</think> é"}'),)),
        ),
    ],
)
def test_answers_are_taken_apart(text: str, expected: ParsedAnswer) -> None:
    assert parse_answer(text) == expected


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<think>never ends", "unclosed"),
        ('<tool_call>{"name": "click", "arguments": {}}', "unclosed"),
        (f'<tool_call>{{"name": "click" {CLICK}', "unclosed"),
        ("<tool_call>click(1, 2)</tool_call>", "json"),
        ('<tool_call>{"name": "click", "arguments": {"x": NaN}}</tool_call>', "json"),
        ('<tool_call>{"name": "click", "arguments": {"x": 1e999}}</tool_call>', "json"),
        (f'<tool_call>{{"name": "click", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>', "json"),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "json"),
        ('<tool_call>{"name": "type", "arguments": {"text": "\\ud800"}}</tool_call>', "json"),
        ("<tool_call></tool_call>", "json"),
        ("<tool_call>[1]</tool_call>", "tool_call_form"),
        ('<tool_call>{"name": "click"}</tool_call>', "tool_call_form"),
        ("click</tool_call>", "tool_call_form"),
        ('<tool_call>{"name": 7, "arguments": {}}</tool_call>', "tool_name"),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', "tool_name"),
        ('<tool_call>{"name": "click", "arguments": "{}"}</tool_call>', "tool_arguments"),
        ('<tool_call>{"name": "click", "arguments": null}</tool_call>', "tool_arguments"),
    ],
)
def test_malformed_answers_say_what_is_wrong(text: str, kind: str) -> None:
    failure = parse_answer(text).failure
    assert failure is not None
    assert failure.kind == kind
    assert len(failure.message) < 800


def test_calls_beside_a_malformed_one_are_still_read() -> None:
    parsed = parse_answer(f"<tool_call>nonsense</tool_call>\n{CLICK}")
    assert parsed.tool_calls == (call(),)
    assert parsed.failure is not None
    assert parsed.failure.kind == "json"


_WORDS = ("<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "a", "arguments": {}}', '{"name"')
_PIECES = st.sampled_from((CLICK, *_WORDS, "\n", "{", "}"))


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.lists(st.one_of(_PIECES, st.text(max_size=5))).map("".join)))
def test_any_text_is_parsed_without_an_exception(text: str) -> None:
    parsed = parse_answer(text)
    assert [made.call_id for made in parsed.tool_calls] == [f"call_{index}" for index in range(len(parsed.tool_calls))]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    thought=st.none() | st.text("abc é\n", max_size=12).map(str.strip),
    text=st.text("abc é\n", max_size=12).map(str.strip),
    arguments=st.lists(st.dictionaries(st.text("abc", min_size=1, max_size=4), _JSON, max_size=3), max_size=3),
)
def test_what_is_written_is_parsed_back(thought: str | None, text: str, arguments: list[dict[str, object]]) -> None:
    calls = tuple(
        call(arguments=json.dumps(given, ensure_ascii=False), index=index) for index, given in enumerate(arguments)
    )
    written = write_answer(reasoning=thought, text=text, tool_calls=calls)
    if not any("<" in made.arguments for made in calls):
        assert parse_answer(written) == ParsedAnswer(reasoning=thought, text=text, tool_calls=calls)
