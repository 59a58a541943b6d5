"""Where the chat formats of Qwen3-VL Instruct and Thinking differ, and which of the two a model folder wants.

The published template of Thinking models

- opens the think block in the prompt, so that an answer begins inside it;
- writes the thinking of answers behind the last message of the user, and drops that of earlier ones. Results of tools
  are no messages of the user;
- writes neither definitions nor calls of tools: both have to be text of a message;
- indents every image by sixteen spaces.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from cua_rl.conversation import Message, SampledAnswer, TextPart
from cua_rl.renderers.replay import ReplayedItem

_ANSWER = "<|im_start|>assistant\n"
_OPEN, _CLOSE = "<think>", "</think>"
_THINKING_ANSWER = f"{_ANSWER}{_OPEN}\n"
_OPENS_THINKING = _THINKING_ANSWER.replace("\n", r"\n")
"""How a template says that answers begin inside a think block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """An answer as later prompts show it: what the prompt had opened it with, and what the model wrote then."""

    header: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """What Instruct and Thinking models write differently."""

    answer_header: str
    """The end of a prompt."""
    before_image: str
    tools_are_text: bool
    """The server's template writes no tools: they have to be sent inside the system message."""
    write_answers: Callable[[Sequence[ReplayedItem]], Mapping[int, WrittenAnswer]]
    """The answers of a conversation by their place in it."""
    complete: Callable[[str], str]
    """A sampled text together with what the prompt had opened it with."""


def _as_sampled(items: Sequence[ReplayedItem]) -> Mapping[int, WrittenAnswer]:
    answers = ((place, item) for place, item in enumerate(items) if isinstance(item, SampledAnswer))
    return {place: WrittenAnswer(header=_ANSWER, text=answer.text) for place, answer in answers}


def _with_recent_thinking(items: Sequence[ReplayedItem]) -> Mapping[int, WrittenAnswer]:
    last_query = max((place for place, item in enumerate(items) if _is_query(item)), default=len(items) - 1)
    return {
        place: _recent(item.text, is_last=place == len(items) - 1) if place > last_query else _earlier(item.text)
        for place, item in enumerate(items)
        if isinstance(item, SampledAnswer)
    }


def _is_query(item: ReplayedItem) -> bool:
    """A message of the user that is not a tool's result in disguise."""
    if not isinstance(item, Message) or item.role != "user" or not item.content:
        return isinstance(item, Message) and item.role == "user"
    first, last = item.content[0], item.content[-1]
    is_result = isinstance(first, TextPart) and first.text.startswith("<tool_response>")
    return not (is_result and isinstance(last, TextPart) and last.text.endswith("</tool_response>"))


def _earlier(text: str) -> WrittenAnswer:
    return WrittenAnswer(header=_ANSWER, text=_split(text)[1])


def _recent(text: str, *, is_last: bool) -> WrittenAnswer:
    thought, said = _split(text)
    if not thought and not is_last:
        return WrittenAnswer(header=_ANSWER, text=said)
    thought, said = thought.strip("\n"), said.lstrip("\n")
    return WrittenAnswer(header=_THINKING_ANSWER, text=f"{thought}\n{_CLOSE}\n\n{said}")


def _split(text: str) -> tuple[str, str]:
    """Thinking, and what follows it; of several blocks the first is the thinking, and what follows the last is said."""
    if _CLOSE not in text:
        return "", text
    thought = text.partition(_CLOSE)[0].rstrip("\n").rpartition(_OPEN)[2].lstrip("\n")
    return thought, text.rpartition(_CLOSE)[2].lstrip("\n")


def _unchanged(text: str) -> str:
    return text


def _inside_thinking(text: str) -> str:
    return text if text.lstrip().startswith(_OPEN) else f"{_OPEN}\n{text}"


INSTRUCT = ChatFormat(
    answer_header=_ANSWER,
    before_image="",
    tools_are_text=False,
    write_answers=_as_sampled,
    complete=_unchanged,
)
THINKING = ChatFormat(
    answer_header=_THINKING_ANSWER,
    before_image=" " * 16,
    tools_are_text=True,
    write_answers=_with_recent_thinking,
    complete=_inside_thinking,
)


def is_thinking_model(model_path: Path) -> bool:
    """Whether the folder's chat template opens a think block; where it has none, whether the model is called so."""
    templates = _templates(model_path)
    if templates:
        return any(_OPENS_THINKING in template or _THINKING_ANSWER in template for template in templates)
    return any("thinking" in name.lower() for name in (model_path.name, _config_name(model_path)))


def _templates(model_path: Path) -> list[str]:
    """What the folder has as chat templates, in any of the places where Transformers looks."""
    plain = model_path / "chat_template.jinja"
    found: list[object] = [plain.read_text(encoding="utf-8")] if plain.is_file() else []
    names = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
    found += [_read_json(model_path / name).get("chat_template") for name in names]
    return [template for template in found if isinstance(template, str)]


def _config_name(model_path: Path) -> str:
    return str(_read_json(model_path / "config.json").get("_name_or_path", ""))


def _read_json(path: Path) -> Mapping[str, object]:
    return cast("Mapping[str, object]", json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
