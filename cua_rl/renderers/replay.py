"""The canonical form of a conversation: one system message in front, and every earlier answer as the text it was.

Why it exists: vLLM turns Responses items into chat messages by rules of its own (read in version 0.32) before a chat
template sees them.

- Consecutive assistant items merge: text into an assistant message that has none yet, even behind its tool calls; a
  tool call into whatever assistant message precedes it. Of an assistant message in parts, only the first part is kept.
- Reasoning becomes a field that Qwen3-VL's template ignores, so thoughts would vanish from the prompt.
- Tool-call arguments are parsed and written anew; arguments that are no JSON object become `{}`.
- Assistant text that is empty, but there, puts a line break before the first tool call.
- Developer messages become system messages, and as soon as there are several instructions and one of them is a
  developer's, all are joined into the first message (parts with a line break, messages with an empty line). Without a
  developer message, Qwen's template drops every system message that is not the first item.
- User content is always a list of parts, written without anything in between; but a tool result whose parts are all
  text is joined with line breaks first.
- An image in a system or assistant message is loaded but gets no place in the prompt.
- Tools are written as `{"type": "function", "function": {"name", "description", "parameters"}}`, with `strict` as well
  if the request had it, even if false.

Replaying takes all of this away from the server: instructions travel as one system message, an answer as one assistant
message with its text, and a server writes both as they stand. A gateway sends `responses_input(replay(items))` and
`responses_tools(tools)`; a renderer renders `replay(items)`; both are the same prompt, byte for byte.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from cua_rl.conversation import (
    EncodedImage,
    Item,
    Message,
    Part,
    Reasoning,
    SampledAnswer,
    TextPart,
    ToolCall,
    ToolResult,
)
from cua_rl.renderers.answers import write_answer
from cua_rl.renderers.request_error import RequestError

ReplayedItem = Message | ToolResult | SampledAnswer
"""After replay, messages are of the system (first only) or the user."""

_PLACEHOLDERS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def replay(items: Sequence[Item]) -> tuple[ReplayedItem, ...]:
    """Bring a conversation into its canonical form; replaying it again changes nothing.

    Raises:
        RequestError: an image where the model cannot see it (a system or assistant message).
    """
    instructions = [item for item in items if _is_instruction(item)]
    conversation = [item for item in items if not _is_instruction(item)]
    return (*_system_message(instructions), *_replayed(conversation))


def plain_text(text: str) -> str:
    """Text in which nothing can be mistaken for the place of an image: the marks lose their outer bars."""
    for placeholder in _PLACEHOLDERS:
        text = text.replace(placeholder, f"<{placeholder[2:-2]}>")
    return text


def text_of(message: Message) -> list[str]:
    """The texts of a message that must not hold images."""
    if any(isinstance(part, EncodedImage) for part in message.content):
        raise RequestError(
            expected="images in user messages and tool results only",
            got=f"one in a message of the {message.role}",
            do="put it into a user message",
        )
    return [part.text for part in message.content if isinstance(part, TextPart)]


@dataclass(slots=True)
class _Answer:
    """An assistant turn being put together from its items."""

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

    def written(self) -> SampledAnswer:
        reasoning = "\n".join(self.reasoning) if self.reasoning else None
        text = write_answer(reasoning=reasoning, text=self.text, tool_calls=self.tool_calls)
        return SampledAnswer(text=plain_text(text))


def _is_instruction(item: Item) -> bool:
    return isinstance(item, Message) and item.role in ("system", "developer")


def _system_message(instructions: Sequence[Item]) -> Iterator[Message]:
    messages = [text_of(item) for item in instructions if isinstance(item, Message)]
    if not messages:
        return
    joined = "".join(messages[0]) if len(messages) == 1 else "\n\n".join(filter(None, map("\n".join, messages)))
    yield Message(role="system", content=(TextPart(text=plain_text(joined)),))


def _replayed(conversation: Sequence[Item]) -> Iterator[ReplayedItem]:
    answer: _Answer | None = None
    for item in conversation:
        if isinstance(item, Reasoning | ToolCall) or (isinstance(item, Message) and item.role == "assistant"):
            if answer is not None and not answer.takes(item):
                yield answer.written()
                answer = None
            answer = answer or _Answer()
            answer.add(item)
            continue
        if answer is not None:
            yield answer.written()
            answer = None
        yield _without_placeholders(item)
    if answer is not None:
        yield answer.written()


def _without_placeholders(item: Message | ToolResult | SampledAnswer) -> ReplayedItem:
    if isinstance(item, SampledAnswer):
        return replace(item, text=plain_text(item.text))
    return replace(item, content=tuple(_plain_part(part) for part in item.content))


def _plain_part(part: Part) -> Part:
    return TextPart(text=plain_text(part.text)) if isinstance(part, TextPart) else part
