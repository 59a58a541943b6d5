"""Rendered text against what the published chat templates of each family make of 60 conversations.

`published/qwen3_vl.jsonl` has, a line each, `messages` and `tools` as Transformers' chat templates take them, and the
text that each template made of them, generation prompt included, images as one placeholder. `qwen2_5_vl.jsonl` has what
Qwen2.5-VL's template made of the same messages, consecutive tool results written as one user message; `qwen3_5.jsonl`
has what Qwen3.5's made of messages and tools.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cua_rl.renderers.qwen3_vl import (
    CHAT_TEMPLATE_PATH,
    Qwen3VLRenderer,
    load_qwen2_5_vl,
    load_qwen3_5,
    load_qwen3_vl_thinking,
)
from cua_rl.renderers.replay import ReplayedItem
from cua_rl.types.conversation import Item, Message, Part, SampledAnswer, TextPart, Tool, ToolCall, ToolResult
from tests.builders import stored_image
from tests.renderers.generated import encode_image, make_image
from tests.renderers.model_folders import (
    QWEN2_5_TEMPLATE,
    QWEN3_5_TEMPLATE,
    THINKING_TEMPLATE,
    build_qwen2_5_folder,
    build_qwen3_5_folder,
)

PUBLISHED = Path(__file__).parent / "published"
ONE_TOKEN = stored_image(encode_image(make_image(32, 32)))
ROWS: list[dict[str, Any]] = [
    json.loads(line) for line in (PUBLISHED / "qwen3_vl.jsonl").read_text(encoding="utf-8").splitlines()
]
QWEN2_5_TEXTS: list[str] = [
    json.loads(line)["text"] for line in (PUBLISHED / "qwen2_5_vl.jsonl").read_text(encoding="utf-8").splitlines()
]
QWEN3_5_TEXTS: list[str] = [
    json.loads(line)["text"] for line in (PUBLISHED / "qwen3_5.jsonl").read_text(encoding="utf-8").splitlines()
]


def parts(content: str | Sequence[Mapping[str, str]]) -> tuple[Part, ...]:
    if isinstance(content, str):
        return (TextPart(text=content),)
    return tuple(ONE_TOKEN if part["type"] == "image" else TextPart(text=part["text"]) for part in content)


def items_of(messages: Sequence[Mapping[str, Any]], *, with_calls: bool) -> list[Item]:
    items: list[Item] = []
    for place, message in enumerate(messages):
        match message["role"]:
            case "tool":
                items.append(ToolResult(call_id=f"call_{place}", content=parts(message["content"])))
            case "assistant" if with_calls and message.get("tool_calls"):
                if message["content"]:
                    items.append(Message(role="assistant", content=parts(message["content"])))
                for call in message["tool_calls"]:
                    name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
                    items.append(ToolCall(call_id=f"call_{place}", name=name, arguments=arguments))
            case "assistant":
                items.append(SampledAnswer(text=cast("str", message["content"])))
            case role:
                items.append(Message(role=role, content=parts(message["content"])))
    return items


def tools_of(row: Mapping[str, Any]) -> list[Tool]:
    functions = [tool["function"] for tool in row["tools"] or []]
    return [Tool(name=f["name"], description=f["description"], parameters=f["parameters"]) for f in functions]


@pytest.fixture(scope="module")
def thinking(small_folder: Path) -> Qwen3VLRenderer:
    return load_qwen3_vl_thinking(small_folder)


@pytest.fixture(scope="module")
def qwen2_5(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLRenderer:
    return load_qwen2_5_vl(build_qwen2_5_folder(small_folder, tmp_path_factory.mktemp("qwen2_5_vl")))


def messages_of(items: Sequence[ReplayedItem]) -> list[dict[str, object]]:
    """Sent items as a server hands them to its template."""
    messages: list[dict[str, object]] = []
    for item in items:
        match item:
            case SampledAnswer(text=text):
                messages.append({"role": "assistant", "content": text})
            case Message():
                content = [
                    {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": "image"}
                    for part in item.content
                ]
                messages.append({"role": item.role, "content": content})
            case ToolResult():
                raise AssertionError("expected no tool results, which the template does not know")
    return messages


def test_instruct_prompts_are_those_of_the_published_template(small_renderer: Qwen3VLRenderer) -> None:
    for row in ROWS:
        rendered = small_renderer.render(items_of(row["messages"], with_calls=True), tools_of(row))
        expected = small_renderer.encode(row["instruct"])
        assert rendered.token_ids(small_renderer.image_token_id) == expected, row["seed"]


def test_thinking_prompts_are_those_of_the_published_template_which_knows_no_tools(thinking: Qwen3VLRenderer) -> None:
    for row in ROWS:
        rendered = thinking.render(items_of(row["messages"], with_calls=False))
        expected = thinking.encode(row["thinking"])
        assert rendered.token_ids(thinking.image_token_id) == expected, row["seed"]


@pytest.mark.parametrize(
    ("path", "column"),
    [(CHAT_TEMPLATE_PATH, "instruct"), (THINKING_TEMPLATE, "thinking")],
    ids=["instruct", "thinking"],
)
def test_our_templates_write_what_the_published_ones_write(path: Path, column: str) -> None:
    chat_templates = pytest.importorskip("transformers.utils.chat_template_utils")
    for row in ROWS:
        texts, _ = chat_templates.render_jinja_template(
            conversations=[row["messages"]],
            tools=row["tools"],
            chat_template=path.read_text(encoding="utf-8"),
            add_generation_prompt=True,
        )
        assert texts == [row[column]], row["seed"]


def test_qwen2_5_prompts_are_those_of_the_published_template(qwen2_5: Qwen3VLRenderer) -> None:
    for row, expected in zip(ROWS, QWEN2_5_TEXTS, strict=True):
        rendered = qwen2_5.render(items_of(row["messages"], with_calls=False))
        assert rendered.token_ids(qwen2_5.image_token_id) == qwen2_5.encode(expected), row["seed"]


def test_our_qwen2_5_template_writes_of_what_is_sent_what_the_published_one_writes(qwen2_5: Qwen3VLRenderer) -> None:
    chat_templates = pytest.importorskip("transformers.utils.chat_template_utils")
    for row, expected in zip(ROWS, QWEN2_5_TEXTS, strict=True):
        sent, tools = qwen2_5.to_send(items_of(row["messages"], with_calls=False))
        texts, _ = chat_templates.render_jinja_template(
            conversations=[messages_of(sent)],
            tools=list(tools),
            chat_template=QWEN2_5_TEMPLATE.read_text(encoding="utf-8"),
            add_generation_prompt=True,
        )
        assert texts == [expected], row["seed"]


@pytest.fixture(scope="module")
def qwen3_5(small_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLRenderer:
    return load_qwen3_5(build_qwen3_5_folder(small_folder, tmp_path_factory.mktemp("qwen3_5")))


def test_qwen3_5_prompts_are_those_of_the_published_template(qwen3_5: Qwen3VLRenderer) -> None:
    """Servers are sent calls as text, where the template takes a `</think>` in an argument for the end of thinking."""
    compared = 0
    for row, expected in zip(ROWS, QWEN3_5_TEXTS, strict=True):
        calls = [call for message in row["messages"] for call in message.get("tool_calls") or ()]
        if any("</think>" in json.dumps(call) for call in calls):
            continue
        rendered = qwen3_5.render(items_of(row["messages"], with_calls=True), tools_of(row))
        assert rendered.token_ids(qwen3_5.image_token_id) == qwen3_5.encode(expected), row["seed"]
        compared += 1
    assert compared == 40


def test_our_qwen3_5_template_writes_what_the_published_one_writes() -> None:
    chat_templates = pytest.importorskip("transformers.utils.chat_template_utils")
    for row, expected in zip(ROWS, QWEN3_5_TEXTS, strict=True):
        texts, _ = chat_templates.render_jinja_template(
            conversations=[row["messages"]],
            tools=row["tools"],
            chat_template=QWEN3_5_TEMPLATE.read_text(encoding="utf-8"),
            add_generation_prompt=True,
        )
        assert texts == [expected], row["seed"]
