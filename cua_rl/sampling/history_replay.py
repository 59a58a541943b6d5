"""Puts earlier answers back into a conversation as they were sampled, so that each prompt extends the last one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cua_rl.conversation import Item, Message, ParsedAnswer, Reasoning, SampledAnswer, TextPart, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierAnswer:
    """An answer as the model sampled it and as the agent was given it (with the call ids it got)."""

    text: str
    parsed: ParsedAnswer


def replay_answers(items: Sequence[Item], answers: Sequence[EarlierAnswer]) -> tuple[Item, ...]:
    """Replace the items of each earlier answer that the agent sent back unchanged by the raw text.

    An answer is recognised by what it says: its message text and its tool calls with their unique ids, in order. Its
    reasoning may be missing, as many agents drop it, but not differ. Items that match no answer stay: the agent has
    edited its history, and that is its right.
    """
    return tuple(_replayed(list(items), list(answers)))


def _replayed(items: list[Item], answers: list[EarlierAnswer]) -> Iterator[Item]:
    start = 0
    while start < len(items):
        answer = next((answer for answer in answers if _end_of(answer, items, start) > start), None)
        if answer is None:
            yield items[start]
            start += 1
        else:
            start = _end_of(answer, items, start)
            answers.remove(answer)
            yield SampledAnswer(text=answer.text)


def _end_of(answer: EarlierAnswer, items: Sequence[Item], start: int) -> int:
    """The index after the answer's items if they stand at `start`, else `start`."""
    at = start
    if isinstance(given := items[at], Reasoning):
        if given.text != answer.parsed.reasoning:
            return start
        at += 1
    for wanted in visible_items(answer.parsed):
        if at < len(items) and _says_the_same(items[at], wanted):
            at += 1
        elif at == start or not _is_empty(wanted):  # Chat has no empty message beside a thought
            return start
    return at


def visible_items(parsed: ParsedAnswer) -> tuple[Message | ToolCall, ...]:
    """What an agent must send back of an answer: its text, unless there are only calls, and its tool calls."""
    message = Message(role="assistant", content=(TextPart(text=parsed.text),))
    return (message, *parsed.tool_calls) if parsed.text or not parsed.tool_calls else parsed.tool_calls


def _is_empty(item: Message | ToolCall) -> bool:
    return isinstance(item, Message) and not _text(item)


def _says_the_same(given: Item, wanted: Message | ToolCall) -> bool:
    if isinstance(given, Message) and isinstance(wanted, Message):
        return given.role == "assistant" and _text(given) == _text(wanted)
    return given == wanted


def _text(message: Message) -> str:
    return "".join(part.text for part in message.content if isinstance(part, TextPart))
