"""The canonical form of a conversation: one system message first, and every earlier answer as its text.

It is needed because vLLM (version 0.32) converts Responses items to chat messages by its own rules before it applies a
chat template.

- Consecutive assistant items merge: text into an assistant message that has none yet, even behind its tool calls; a
  tool call into whatever assistant message precedes it. Of an assistant message in parts, only the first part is kept.
- Reasoning becomes a field that Qwen3-VL's template ignores, so it would vanish from the prompt.
- Tool-call arguments are parsed and serialised again; anything but a JSON object becomes `{}`.
- Assistant text that is present but empty puts a line break before the first tool call.
- Developer messages become system messages, and as soon as there are several instructions and one of them is a
  developer's, all are joined into the first message (parts with a line break, messages with an empty line). Without a
  developer message, Qwen's template drops every system message that is not the first item.
- User content is always a list of parts, written without anything in between; but a tool result whose parts are all
  text is joined with line breaks first.
- An image in a system or assistant message is loaded but does not appear in the prompt.
- Tools are written as `{"type": "function", "function": {"name", "description", "parameters"}}`, with `strict` as well
  if the request had it, even if false.

After `replay`, none of these rules apply: instructions are one system message, an answer is one assistant message with
its text, and a server writes both unchanged. The gateway sends `responses_input(replay(items))` and
`responses_tools(tools)`, the renderer renders `replay(items)`: both give the same prompt, byte for byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Protocol

from cua_rl.renderers.answers import write_answer
from cua_rl.renderers.request_error import RequestError
from cua_rl.types.conversation import (
    EncodedImage,
    Item,
    Message,
    Reasoning,
    SampledAnswer,
    TextPart,
    ToolCall,
    ToolResult,
)


class WriteAnswer(Protocol):
    """Writes an answer as the model would have written it."""

    def __call__(self, *, reasoning: str | None, text: str | None, tool_calls: Sequence[ToolCall]) -> str: ...


ReplayedItem = Message | ToolResult | SampledAnswer
"""After `replay`, messages are system (only the first) or user messages."""

_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def replay(items: Sequence[Item], write: WriteAnswer = write_answer) -> tuple[ReplayedItem, ...]:
    """Bring a conversation into its canonical form; replaying it again changes nothing.

    Later instructions become user messages in their place: at the front, they would change the beginning of the prompt,
    and the turns before them could not be merged with those after them. `write` makes the text of an answer from its
    parts. Raises `RequestError` if an image is where the model cannot see it (a system or assistant message).
    """
    instructions = list(takewhile(lambda one: isinstance(one, Message) and one.role in ("system", "developer"), items))
    conversation = items[len(instructions) :]
    texts = [text_of(item) for item in instructions if isinstance(item, Message)]
    system: list[Message] = []
    if texts:
        joined = "".join(texts[0]) if len(texts) == 1 else "\n\n".join(filter(None, map("\n".join, texts)))
        system = [Message(role="system", content=(TextPart(text=plain_text(joined)),))]
    return (*system, *_replayed(conversation, write))


def plain_text(text: str) -> str:
    """Text in which nothing can be mistaken for an image: placeholder tokens lose their outer bars."""
    for placeholder in _PLACEHOLDERS:
        text = text.replace(placeholder, f"<{placeholder[2:-2]}>")
    return text


def text_of(message: Message) -> list[str]:
    """The texts of a message that must not contain images."""
    if any(isinstance(part, EncodedImage) for part in message.content):
        raise RequestError(
            expected="images in user messages and tool results only",
            got=f"one in a message of the {message.role}",
            do="put it into a user message",
        )
    return [part.text for part in message.content if isinstance(part, TextPart)]


@dataclass(slots=True)
class _Answer:
    """An assistant turn, collected from its items."""

    reasoning: list[str] = field(default_factory=list[str])
    text: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list[ToolCall])

    def takes(self, item: Reasoning | Message | ToolCall) -> bool:
        if isinstance(item, Reasoning):
            return self.text is None and not self.tool_calls
        return isinstance(item, ToolCall) or self.text is None

    def add(self, item: Reasoning | Message | ToolCall) -> None:
        match item:
            case Reasoning():
                self.reasoning.append(item.text)
            case ToolCall():
                self.tool_calls.append(item)
            case Message():
                self.text = "".join(text_of(item))

    def written(self, write: WriteAnswer) -> SampledAnswer:
        reasoning = "\n".join(self.reasoning) if self.reasoning else None
        text = write(reasoning=reasoning, text=self.text, tool_calls=self.tool_calls)
        return SampledAnswer(text=plain_text(text))


def _replayed(conversation: Sequence[Item], write: WriteAnswer) -> Iterator[ReplayedItem]:
    answer: _Answer | None = None
    for item in conversation:
        if isinstance(item, Reasoning | ToolCall) or (isinstance(item, Message) and item.role == "assistant"):
            if answer is not None and not answer.takes(item):
                yield answer.written(write)
                answer = None
            answer = answer or _Answer()
            answer.add(item)
            continue
        if answer is not None:
            yield answer.written(write)
            answer = None
        if isinstance(item, SampledAnswer):
            yield replace(item, text=plain_text(item.text))
            continue
        if isinstance(item, Message) and item.role != "user":
            item = Message(role="user", content=tuple(TextPart(text=text) for text in text_of(item)))
        content = [
            TextPart(text=plain_text(part.text)) if isinstance(part, TextPart) else part for part in item.content
        ]
        yield replace(item, content=tuple(content))
    if answer is not None:
        yield answer.written(write)
