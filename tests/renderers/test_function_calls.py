"""Calls in the form of Qwen3.5: values are text, and the schema says what they mean."""

import json
from pathlib import Path

import pytest

from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_5
from cua_rl.types.conversation import Message, SampledAnswer, TextPart, Tool, ToolCall
from tests.renderers.model_folders import QWEN3_5_TEMPLATE, build_qwen3_5_folder

PROPERTIES = {
    "x": {"type": "integer"},
    "share": {"type": "number"},
    "text": {"type": "string"},
    "path": {"type": "array", "items": {"type": "integer"}},
    "is_long": {"type": "boolean"},
    "until": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "side": {"enum": ["left", 3]},
}
TAP = Tool(name="tap", description="", parameters={"type": "object", "properties": PROPERTIES})


@pytest.fixture(scope="module")
def folder(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_qwen3_5_folder(small_folder, tmp_path_factory.mktemp("qwen3_5"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Qwen3VLRenderer:
    return load_qwen3_5(folder)


def call(**values: str) -> str:
    written = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
    return f"<tool_call>\n<function=tap>\n{written}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("x", "500", 500),
        ("x", "500.0", 500),
        ("x", "the middle", "the middle"),
        ("x", "true", "true"),
        ("share", "1", 1),
        ("share", "NaN", "NaN"),
        ("text", "500", "500"),
        ("text", "two\n\nlines ", "two\n\nlines "),
        ("text", "null", "null"),
        ("path", "[1, 2]", [1, 2]),
        ("is_long", "True", True),
        ("is_long", "false", False),
        ("until", "None", None),
        ("until", "null", None),
        ("side", "left", "left"),
        ("side", "3", 3),
        ("unknown", "7", "7"),
        ("unknown", '{"a": 1}', {"a": 1}),
    ],
)
def test_values_are_read_by_their_schema(renderer: Qwen3VLRenderer, name: str, written: str, value: object) -> None:
    parsed = renderer.parse(f"I tap.\n</think>\n\n{call(**{name: written})}<|im_end|>", (TAP,))

    assert parsed.failure is None
    assert (parsed.reasoning, parsed.text) == ("I tap.", "")
    assert [json.loads(one.arguments) for one in parsed.tool_calls] == [{name: value}]


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        ("<tool_call>\n<function=tap>\n", "unclosed"),
        ("<tool_call>\n<function=tap>\n</tool_call>", "tool_call_form"),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", "tool_name"),
        ("<tool_call>\n<function=tap>\n<parameter=x>\n5\n</function>\n</tool_call>", "tool_arguments"),
        ("<tool_call>\n<function=tap>\nx=5\n</function>\n</tool_call>", "tool_arguments"),
    ],
)
def test_what_is_wrong_with_a_call_is_said_with_the_right_form(
    renderer: Qwen3VLRenderer, block: str, kind: str
) -> None:
    failure = renderer.parse(f"</think>\n\n{block}", (TAP,)).failure

    assert failure is not None
    assert failure.kind == kind
    assert "<parameter=parameter_name>" in failure.message


def rendered(folder: Path, *answers: SampledAnswer | ToolCall) -> str:
    renderer = load_qwen3_5(folder)
    items = [Message(role="user", content=(TextPart(text="Go."),)), *answers]
    return renderer.decode(renderer.render(items).token_ids(renderer.image_token_id))


def test_a_template_that_thinks_only_when_asked_closes_the_block_in_the_prompt(folder: Path, tmp_path: Path) -> None:
    closed = build_qwen3_5_folder(folder, tmp_path / "small")
    ending = "{% if enable_thinking is defined and enable_thinking is true %}<think>\n{% else %}...{% endif %}"
    (closed / "chat_template.jinja").write_text(QWEN3_5_TEMPLATE.read_text() + ending)

    assert rendered(folder).endswith("<|im_start|>assistant\n<think>\n")
    assert rendered(closed).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert rendered(closed, SampledAnswer(text="yes")).startswith(f"{rendered(closed)}yes<|im_end|>")
    assert load_qwen3_5(closed).parse("yes").failure is None


def test_scalars_are_written_as_the_template_of_each_generation_writes_them(folder: Path, tmp_path: Path) -> None:
    later = build_qwen3_5_folder(folder, tmp_path / "qwen3_6")
    (later / "chat_template.jinja").write_text("args_value | string if args_value is string else args_value | tojson")
    tap = ToolCall(call_id="a", name="tap", arguments='{"is_long": true, "path": [1]}')

    assert "<parameter=is_long>\nTrue\n</parameter>\n<parameter=path>\n[1]\n" in rendered(folder, tap)
    assert "<parameter=is_long>\ntrue\n</parameter>\n<parameter=path>\n[1]\n" in rendered(later, tap)
