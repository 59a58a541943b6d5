"""Restores earlier answers in a conversation as they were sampled, so that each prompt extends the previous one."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

from cua_rl.conversation import Item, Message, ParsedAnswer, Reasoning, SampledAnswer, TextPart, ToolCall, ToolResult


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierAnswer:
    """An answer as the model sampled it, and as the agent received it (with call ids)."""

    text: str
    parsed: ParsedAnswer


def replay_answers(items: Sequence[Item], answers: Sequence[EarlierAnswer]) -> tuple[Item, ...]:
    """Replace the items of each earlier answer that the agent sent back by the raw text.

    An answer is recognised by its message text and its tool calls, in order. Client libraries rewrite answers without
    a change of meaning, so these differences do not count: whitespace around texts; order of fields and whitespace in
    arguments; missing or new call ids; a text in several messages, or several answers in one message; results between
    parallel calls. The reasoning may be missing, because many agents drop it, but must not differ. Items that match no
    answer stay: agents may edit their history.
    """
    replayed: list[Item] = []
    left, rest = list(answers), _with_separate_answers(items, answers)
    sampled_ids = {call.call_id for answer in answers for call in answer.parsed.tool_calls}
    while rest:
        found = next(
            ((answer, after) for answer in left if (after := _rest_after(answer, rest, sampled_ids)) is not None), None
        )
        if found is None:
            # what follows an edited thought was edited with it, though it may look the same
            num_edited = 2 if isinstance(rest[0], Reasoning) else 1
            replayed += rest[:num_edited]
            rest = rest[num_edited:]
            continue
        answer, rest = found
        replayed.append(SampledAnswer(text=answer.text))
        left.remove(answer)
    return tuple(replayed)


def visible_items(parsed: ParsedAnswer) -> tuple[Message | ToolCall, ...]:
    """The part of an answer that an agent must send back: its text, unless there are only calls, and its tool calls."""
    message = Message(role="assistant", content=(TextPart(text=parsed.text),))
    return (message, *parsed.tool_calls) if parsed.text or not parsed.tool_calls else parsed.tool_calls


def _rest_after(answer: EarlierAnswer, items: Sequence[Item], sampled_ids: Collection[str]) -> list[Item] | None:
    """What follows the answer if `items` begin with it, else None."""
    at, thought = 0, (answer.parsed.reasoning or "").strip()
    if isinstance(given := items[0], Reasoning):
        if given.text.strip() != thought:
            return None
        at = 1
    missing, num_messages = answer.parsed.text.strip(), 0
    while at < len(items) and (missing or not num_messages) and (text := _said(items[at])) is not None:
        text = text if missing.startswith(text) else _without_thought(text, thought)
        if not missing.startswith(text):
            return None
        missing, num_messages, at = missing[len(text) :].strip(), num_messages + 1, at + 1
    if missing or not (at or answer.parsed.tool_calls):
        return None
    results: list[Item] = []
    for number, call in enumerate(answer.parsed.tool_calls):
        while number and at < len(items) and isinstance(result := items[at], ToolResult):
            results.append(result)
            at += 1
        if at == len(items) or not _is_same_call(items[at], call, sampled_ids):
            return None
        at += 1
    return [*results, *items[at:]]


def _said(item: Item) -> str | None:
    """The text of a message of the assistant, without whitespace around it."""
    if not isinstance(item, Message) or item.role != "assistant":
        return None
    return "".join(part.text for part in item.content if isinstance(part, TextPart)).strip()


def _without_thought(text: str, thought: str) -> str:
    """A text without the think block in front of it, where some clients put the reasoning."""
    opening, _, rest = text.partition("<think>")
    inside, closed, said = rest.partition("</think>")
    return said.strip() if closed and not opening and inside.strip() == thought else text


def _is_same_call(item: Item, call: ToolCall, sampled_ids: Collection[str]) -> bool:
    """Whether a call has the same name and arguments as a sampled one, and not the id of another sampled one."""
    if not isinstance(item, ToolCall) or item.name != call.name or not _same_json(item.arguments, call.arguments):
        return False
    return item.call_id == call.call_id or item.call_id not in sampled_ids


def _same_json(left: str, right: str) -> bool:
    """Whether two texts are the same JSON: order of fields, whitespace and `5.0` for `5` do not count."""
    if left == right:
        return True
    try:
        return _typed(json.loads(left)) == _typed(json.loads(right))
    except (ValueError, RecursionError):
        return False


def _typed(value: object) -> object:
    """JSON in which true and 1 differ, unlike in Python."""
    match value:
        case bool():
            return ("bool", value)
        case dict():
            return {key: _typed(inner) for key, inner in cast("dict[str, object]", value).items()}
        case list():
            return [_typed(inner) for inner in cast("list[object]", value)]
        case _:
            return value


def _with_separate_answers(items: Sequence[Item], answers: Sequence[EarlierAnswer]) -> list[Item]:
    """The items, with each message that joins the texts of several consecutive answers split into these."""
    texts = [text for answer in answers if (text := answer.parsed.text.strip())]
    separate: list[Item] = []
    for item in items:
        said = _said(item)
        parts = [item] if not said or said in texts else _joined_texts(said, texts)
        separate += parts or [item]
    return separate


def _joined_texts(said: str, texts: Sequence[str]) -> list[Item]:
    """Messages of the consecutive texts that `said` joins; none if it is anything else."""
    for start in range(len(texts)):
        left, parts = said, list[Item]()
        for text in texts[start:]:
            if not left.startswith(text):
                break
            parts.append(Message(role="assistant", content=(TextPart(text=text),)))
            left = left[len(text) :].strip()
        if parts and not left:
            return parts
    return []
