"""Differences between the chat formats of Qwen3-VL Instruct, Qwen3-VL Thinking and Qwen2.5-VL.

The published template of Thinking models

- opens the think block in the prompt, so that an answer begins inside it;
- keeps the reasoning of answers after the last user message, and drops that of earlier answers. Tool results are not
  user messages;
- writes neither tool definitions nor tool calls: both have to be text of a message;
- indents every image by sixteen spaces.

That of Qwen2.5-VL begins a conversation without a system message with one of its own. It writes neither tool
definitions nor tool calls, and tool results under a role that the models were not trained on; they become text of user
messages, in the form that Qwen3-VL's template gives them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from cua_rl.conversation import Message, SampledAnswer, TextPart
from cua_rl.renderers.replay import ReplayedItem

_ANSWER = "<|im_start|>assistant\n"
_OPEN, _CLOSE = "<think>", "</think>"
_THINKING_ANSWER = f"{_ANSWER}{_OPEN}\n"
_OPENS_THINKING = _THINKING_ANSWER.replace("\n", r"\n")
"""The text in a template that opens a think block in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """An answer as it appears in later prompts: its header, which was part of its prompt, and the model's text."""

    header: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """The parts that differ between models."""

    answer_header: str
    """The end of a prompt."""
    before_image: str
    tools_are_text: bool
    """The server's template ignores tools: they have to be sent inside the system message."""
    results_are_text: bool
    """The server's template has no form for tool results: they have to be sent as user messages."""
    default_system: str
    """The system message of a conversation without one; empty for none."""
    write_answers: Callable[[Sequence[ReplayedItem]], Mapping[int, WrittenAnswer]]
    """The answers of a conversation by their index in it."""
    complete: Callable[[str], str]
    """A sampled text including a think block that the prompt opened."""


def answers_as_sampled(items: Sequence[ReplayedItem]) -> Mapping[int, WrittenAnswer]:
    """Every answer unchanged, as Instruct models write it."""
    answers = ((place, item) for place, item in enumerate(items) if isinstance(item, SampledAnswer))
    return {place: WrittenAnswer(header=_ANSWER, text=answer.text) for place, answer in answers}


def answers_with_recent_thinking(items: Sequence[ReplayedItem]) -> Mapping[int, WrittenAnswer]:
    """Answers after the last user message with their reasoning, earlier ones without, as Thinking models write them."""
    last = len(items) - 1
    last_query = max((place for place, item in enumerate(items) if _is_query(item)), default=last)
    answers: dict[int, WrittenAnswer] = {}
    for place, item in enumerate(items):
        if not isinstance(item, SampledAnswer):
            continue
        # of several blocks, the first is the reasoning, and the text follows the last
        before, closed, _ = item.text.partition(_CLOSE)
        thought = before.rstrip("\n").rpartition(_OPEN)[2].lstrip("\n") if closed else ""
        said = item.text.rpartition(_CLOSE)[2].lstrip("\n") if closed else item.text
        if place > last_query and (thought or place == last):
            text = "\n".join((thought.strip("\n"), _CLOSE, "", said.lstrip("\n")))
            answers[place] = WrittenAnswer(header=_THINKING_ANSWER, text=text)
        else:
            answers[place] = WrittenAnswer(header=_ANSWER, text=said)
    return answers


def _is_query(item: ReplayedItem) -> bool:
    """A user message that is not a tool result in the form of one."""
    if not isinstance(item, Message) or item.role != "user":
        return False
    if not item.content:
        return True
    first, last = item.content[0], item.content[-1]
    is_result = isinstance(first, TextPart) and first.text.startswith("<tool_response>")
    return not (is_result and isinstance(last, TextPart) and last.text.endswith("</tool_response>"))


INSTRUCT = ChatFormat(
    answer_header=_ANSWER,
    before_image="",
    tools_are_text=False,
    results_are_text=False,
    default_system="",
    write_answers=answers_as_sampled,
    complete=lambda text: text,
)
QWEN2_5 = replace(INSTRUCT, tools_are_text=True, results_are_text=True, default_system="You are a helpful assistant.")
THINKING = ChatFormat(
    answer_header=_THINKING_ANSWER,
    before_image=" " * 16,
    tools_are_text=True,
    results_are_text=False,
    default_system="",
    write_answers=answers_with_recent_thinking,
    complete=lambda text: text if text.lstrip().startswith(_OPEN) else f"{_OPEN}\n{text}",
)


def is_thinking_model(model_path: Path) -> bool:
    """Whether the folder's chat template opens a think block; without a template, whether the model's name says so."""
    # all places where Transformers looks for a template
    plain = model_path / "chat_template.jinja"
    found: list[object] = [plain.read_text(encoding="utf-8")] if plain.is_file() else []
    names = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
    found += [_read_json(model_path / name).get("chat_template") for name in names]
    templates = [template for template in found if isinstance(template, str)]
    if templates:
        return any(_OPENS_THINKING in template or _THINKING_ANSWER in template for template in templates)
    original_name = str(_read_json(model_path / "config.json").get("_name_or_path", ""))
    return any("thinking" in name.lower() for name in (model_path.name, original_name))


def _read_json(path: Path) -> Mapping[str, object]:
    return cast("Mapping[str, object]", json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
