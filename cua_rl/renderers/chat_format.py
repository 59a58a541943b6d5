"""Differences between the chat formats of Qwen3-VL Instruct, Qwen3-VL Thinking, Qwen2.5-VL and Qwen3.5.

The published template of Thinking models

- opens the think block in the prompt, so that an answer begins inside it;
- keeps the reasoning of answers after the last user message, and drops that of earlier answers. Tool results are not
  user messages;
- writes neither tool definitions nor tool calls: both have to be text of a message;
- indents every image by sixteen spaces.

That of Qwen2.5-VL begins a conversation without a system message with one of its own. It writes neither tool
definitions nor tool calls, and tool results under a role that the models were not trained on; they become text of user
messages, in the form that Qwen3-VL's template gives them.

That of Qwen3.5 and Qwen3.6

- writes tool definitions before the system text, and calls as tags (`function_calls`);
- drops white space around every message and tool result;
- writes a think block into every answer after the last user message, if need be an empty one, and drops the reasoning
  of earlier answers;
- opens the think block in the prompt or, for models that think only when asked to, opens and closes it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cua_rl.renderers import function_calls
from cua_rl.renderers.answers import JSON_CALL_FORM, write_answer, write_function_answer
from cua_rl.renderers.replay import ReplayedItem, WriteAnswer
from cua_rl.types.conversation import EncodedImage, Message, SampledAnswer
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import mapping

_ANSWER = "<|im_start|>assistant\n"
_OPEN, _CLOSE = "<think>", "</think>"
_THINKING_ANSWER = f"{_ANSWER}{_OPEN}\n"
_UNTHINKING_ANSWER = f"{_THINKING_ANSWER}\n{_CLOSE}\n\n"
_OPENS_THINKING = _THINKING_ANSWER.replace("\n", r"\n")
"""The text in a template that opens a think block in the prompt."""
_THINKS_WHEN_ASKED = "enable_thinking is true"
"""The text in a Qwen3.5 template whose think block is closed unless thinking is asked for."""
_WRITES_JSON = "args_value is string else args_value | tojson"
"""The text in a Qwen3.6 template that writes every argument but texts as JSON."""
_KEEPS_THOUGHTS = "preserve_thinking is undefined"
"""The text in a Qwen3.8 template, which keeps the reasoning of every answer and reads it from a separate field."""
_TOOLS_HEADER = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_TOOLS_FOOTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    f"<tool_call></tool_call> XML tags:\n{JSON_CALL_FORM}"
)


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
    write_answer: WriteAnswer
    """The text of an answer that comes in parts."""
    call_form: str
    """The tool-call format that the prompt asks for."""
    write_system: Callable[[str | None, Sequence[str]], str]
    """The text of the system message, from that which was given and the JSON of each tool."""
    strips_messages: bool
    """White space around a message or tool result is dropped."""


def tools_after_text(text: str | None, tools: Sequence[str]) -> str:
    """The system message of Qwen3-VL."""
    said = [] if text is None else [text]
    return "\n\n".join([*said, _TOOLS_HEADER + "\n".join(tools) + _TOOLS_FOOTER] if tools else said)


def tools_before_text(text: str | None, tools: Sequence[str]) -> str:
    """The system message of Qwen3.5."""
    return "\n\n".join(filter(None, [function_calls.write_tools(tools) if tools else "", (text or "").strip()]))


def answers_as_sampled(items: Sequence[ReplayedItem]) -> Mapping[int, WrittenAnswer]:
    """Every answer unchanged, as Instruct models write it."""
    answers = ((place, item) for place, item in enumerate(items) if isinstance(item, SampledAnswer))
    return {place: WrittenAnswer(header=_ANSWER, text=answer.text) for place, answer in answers}


def answers_with_recent_thinking(items: Sequence[ReplayedItem]) -> Mapping[int, WrittenAnswer]:
    """Answers after the last user message with their reasoning, earlier ones without, as Thinking models write them."""
    last, last_query = len(items) - 1, _last_query(items)
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


def answers_with_think_blocks(items: Sequence[ReplayedItem], answer_header: str) -> Mapping[int, WrittenAnswer]:
    """Answers after the last user message with a think block, earlier ones without, as Qwen3.5 writes them."""
    last_query = _last_query(items, strips=True)
    answers: dict[int, WrittenAnswer] = {}
    for place, item in enumerate(items):
        if not isinstance(item, SampledAnswer):
            continue
        said = item.text.strip()
        before, closed, _ = said.partition(_CLOSE)
        thought = before.rstrip("\n").rpartition(_OPEN)[2].strip() if closed else ""
        said = said.rpartition(_CLOSE)[2].lstrip("\n") if closed else said
        if place <= last_query:
            answers[place] = WrittenAnswer(header=_ANSWER, text=said)
        elif answer_header == _UNTHINKING_ANSWER and not thought:
            answers[place] = WrittenAnswer(header=answer_header, text=said)
        else:
            answers[place] = WrittenAnswer(header=_THINKING_ANSWER, text=f"{thought}\n{_CLOSE}\n\n{said}")
    return answers


def _last_query(items: Sequence[ReplayedItem], *, strips: bool = False) -> int:
    """The place of the last user message that is not a tool result in the form of one; of the last item if none is."""
    return max((place for place, item in enumerate(items) if _is_query(item, strips=strips)), default=len(items) - 1)


def _is_query(item: ReplayedItem, *, strips: bool) -> bool:
    if not isinstance(item, Message) or item.role != "user":
        return False
    shown = "".join("<image>" if isinstance(part, EncodedImage) else part.text for part in item.content)
    shown = shown.strip() if strips else shown
    return not (shown.startswith("<tool_response>") and shown.endswith("</tool_response>"))


def _complete_thought(text: str) -> str:
    return text if text.lstrip().startswith(_OPEN) else f"{_OPEN}\n{text}"


INSTRUCT = ChatFormat(
    answer_header=_ANSWER,
    before_image="",
    tools_are_text=False,
    results_are_text=False,
    default_system="",
    write_answers=answers_as_sampled,
    complete=lambda text: text,
    write_answer=write_answer,
    call_form=JSON_CALL_FORM,
    write_system=tools_after_text,
    strips_messages=False,
)
QWEN2_5 = replace(INSTRUCT, tools_are_text=True, results_are_text=True, default_system="You are a helpful assistant.")
THINKING = replace(
    INSTRUCT,
    answer_header=_THINKING_ANSWER,
    before_image=" " * 16,
    tools_are_text=True,
    write_answers=answers_with_recent_thinking,
    complete=_complete_thought,
)


def qwen3_5_format(model_path: Path) -> ChatFormat:
    """The format of a Qwen3.5 or Qwen3.6 model folder, as its chat template has it; without one, that of Qwen3.5 9B.

    Raises `ConfigError` for the template of Qwen3.8.
    """
    templates = _read_templates(model_path)
    if any(_KEEPS_THOUGHTS in template for template in templates):
        raise ConfigError(
            f"model_name: expected a chat template as Qwen3.5 and Qwen3.6 have it in {str(model_path)!r}, got one that "
            "keeps the reasoning of every answer, as Qwen3.8 has it; replace it by that of Qwen3.6 "
            "(chat_template.jinja), or use another model"
        )
    opens_only = not any(_THINKS_WHEN_ASKED in template for template in templates)
    writes_json = any(_WRITES_JSON in template for template in templates)
    header = _THINKING_ANSWER if opens_only else _UNTHINKING_ANSWER
    write_value = function_calls.write_json_value if writes_json else function_calls.write_python_value
    return replace(
        INSTRUCT,
        answer_header=header,
        write_answers=partial(answers_with_think_blocks, answer_header=header),
        complete=_complete_thought if opens_only else INSTRUCT.complete,
        write_answer=partial(write_function_answer, write_value),
        call_form=function_calls.CALL_FORM,
        write_system=tools_before_text,
        strips_messages=True,
    )


def is_thinking_model(model_path: Path) -> bool:
    """Whether the folder's chat template opens a think block; without a template, whether the model's name says so."""
    if templates := _read_templates(model_path):
        return any(_OPENS_THINKING in template or _THINKING_ANSWER in template for template in templates)
    original_name = str(_read_json(model_path / "config.json").get("_name_or_path", ""))
    return any("thinking" in name.lower() for name in (model_path.name, original_name))


def _read_templates(model_path: Path) -> list[str]:
    """The templates in all places where Transformers looks for one."""
    plain = model_path / "chat_template.jinja"
    found: list[object] = [plain.read_text(encoding="utf-8")] if plain.is_file() else []
    names = ("chat_template.json", "processor_config.json", "tokenizer_config.json")
    found += [_read_json(model_path / name).get("chat_template") for name in names]
    return [template for template in found if isinstance(template, str)]


def _read_json(path: Path) -> Mapping[str, object]:
    return mapping(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
