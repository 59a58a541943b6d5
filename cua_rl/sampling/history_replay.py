"""Restores earlier answers in a conversation as they were sampled, so that each prompt extends the previous one."""

from collections.abc import Sequence
from dataclasses import dataclass

from cua_rl.conversation import Item, Message, ParsedAnswer, Reasoning, SampledAnswer, TextPart, ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierAnswer:
    """An answer as the model sampled it, and as the agent received it (with call ids)."""

    text: str
    parsed: ParsedAnswer


def replay_answers(items: Sequence[Item], answers: Sequence[EarlierAnswer]) -> tuple[Item, ...]:
    """Replace the items of each earlier answer that the agent sent back unchanged by the raw text.

    An answer is recognised by its message text and its tool calls with their unique ids, in order. Its reasoning may be
    missing, because many agents drop it, but must not differ. Items that match no answer stay: agents may edit their
    history.
    """
    replayed: list[Item] = []
    left, start = list(answers), 0
    while start < len(items):
        answer = next((answer for answer in left if _end_of(answer, items, start) > start), None)
        if answer is None:
            replayed.append(items[start])
            start += 1
        else:
            replayed.append(SampledAnswer(text=answer.text))
            start = _end_of(answer, items, start)
            left.remove(answer)
    return tuple(replayed)


def _end_of(answer: EarlierAnswer, items: Sequence[Item], start: int) -> int:
    """The index after the answer's items if these are at `start`, else `start`."""
    at = start
    if isinstance(given := items[at], Reasoning):
        if given.text != answer.parsed.reasoning:
            return start
        at += 1
    for wanted in visible_items(answer.parsed):
        given = items[at] if at < len(items) else None
        if isinstance(wanted, Message):
            is_same = isinstance(given, Message) and given.role == "assistant" and _text(given) == _text(wanted)
            may_be_missing = at > start and not _text(wanted)  # Chat has no empty message beside reasoning
        else:
            is_same, may_be_missing = given == wanted, False
        if is_same:
            at += 1
        elif not may_be_missing:
            return start
    return at


def visible_items(parsed: ParsedAnswer) -> tuple[Message | ToolCall, ...]:
    """The part of an answer that an agent must send back: its text, unless there are only calls, and its tool calls."""
    message = Message(role="assistant", content=(TextPart(text=parsed.text),))
    return (message, *parsed.tool_calls) if parsed.text or not parsed.tool_calls else parsed.tool_calls


def _text(message: Message) -> str:
    return "".join(part.text for part in message.content if isinstance(part, TextPart))
