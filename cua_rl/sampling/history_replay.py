"""Restores earlier answers in a conversation to the sampled text, so that each prompt extends the previous one."""

import json
from ast import literal_eval
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cua_rl.types.conversation import (
    Item,
    Message,
    ParsedAnswer,
    Reasoning,
    SampledAnswer,
    TextPart,
    ToolCall,
    ToolResult,
)
from cua_rl.types.json_values import is_array, is_object


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierAnswer:
    """An answer as the model sampled it, and as the agent received it (with call ids)."""

    text: str
    parsed: ParsedAnswer


def replay_answers(
    items: Sequence[Item], answers: Sequence[EarlierAnswer], stops: Collection[str] = ()
) -> tuple[Item, ...]:
    """Replace the items of each earlier answer in the history by its sampled text.

    An answer is recognised by its message text and its tool calls. Client libraries rewrite answers without changing
    their meaning, so these differences are ignored: whitespace around texts; order of fields and whitespace in
    arguments; missing or new call ids; text after the calls, parallel calls in another order, results between them; a
    text split into several messages, or several answers joined into one; calls written into the text, as smolagents
    does; one of the request's `stops` at the end. The reasoning may be missing, because many agents drop it, but must
    not differ. Items that match no answer are kept: agents may edit their history.
    """
    replayed: list[Item] = []
    calls = [call for answer in answers for call in answer.parsed.tool_calls]
    sampled_ids = {call.call_id: place for place, call in enumerate(calls)}
    left, rest = list(answers), _as_sampled(items, answers, sampled_ids, stops)
    while rest:
        if (found := _find_answer(left, rest, sampled_ids)) is None:
            # an edited thought makes the item after it an edit too, even if that looks the same
            num_edited = 2 if isinstance(rest[0], Reasoning) else 1
            replayed += rest[:num_edited]
            rest = rest[num_edited:]
            continue
        answer, rest = found
        left.remove(answer)
        replayed.append(SampledAnswer(text=answer.text))
    return tuple(_in_order_of_calls(replayed, sampled_ids))


def visible_items(parsed: ParsedAnswer) -> tuple[Message | ToolCall, ...]:
    """The items of an answer that an agent must send back: its tool calls, and its text unless that is empty."""
    message = Message(role="assistant", content=(TextPart(text=parsed.text),))
    return (message, *parsed.tool_calls) if parsed.text or not parsed.tool_calls else parsed.tool_calls


def _find_answer(
    answers: Sequence[EarlierAnswer], items: Sequence[Item], sampled_ids: Collection[str]
) -> tuple[EarlierAnswer, list[Item]] | None:
    """The answer that `items` begin with, and the items after it; the longest match, then the first."""
    # The longest, because an agent may leave out an answer with a malformed call and repeat the request: the text of
    # that answer must not match the beginning of a later answer with the same text and calls.
    found = [(answer, after) for answer in answers if (after := _rest_after(answer, items, sampled_ids)) is not None]
    return min(found, key=lambda pair: len(pair[1]), default=None)


def _rest_after(answer: EarlierAnswer, items: Sequence[Item], sampled_ids: Collection[str]) -> list[Item] | None:
    """The items after the answer if `items` begin with it, else None."""
    thought, missing = (answer.parsed.reasoning or "").strip(), answer.parsed.text.strip()
    calls, results = list(answer.parsed.tool_calls), list[Item]()
    num_taken, has_message = 0, False
    for item in items:
        if isinstance(item, Reasoning):
            if num_taken or item.text.strip() not in ("", thought):
                break
        elif isinstance(item, ToolCall):
            if (call := _find_call(item, calls, sampled_ids)) is None:
                break
            calls.remove(call)
        elif isinstance(item, ToolResult) and 0 < len(calls) < len(answer.parsed.tool_calls):
            results.append(item)
        elif (said := _said(item)) is not None and (missing or not has_message):
            text = said if missing.startswith(said) else _without_thought(said, thought)
            if not missing.startswith(text):
                break
            missing, has_message = missing[len(text) :].strip(), True
        else:
            break
        num_taken += 1
    return [*results, *items[num_taken:]] if num_taken and not (missing or calls) else None


def _in_order_of_calls(items: Sequence[Item], places: Mapping[str, int]) -> Iterator[Item]:
    """Consecutive results in the order of their calls, because the model sees no ids."""
    for _, run in groupby(items, key=type):
        group = list(run)
        if results := [item for item in group if isinstance(item, ToolResult)]:
            is_known = all(result.call_id in places for result in results)
            group = sorted(results, key=lambda result: places[result.call_id]) if is_known else results
        yield from group


def _said(item: Item) -> str | None:
    """The text of a message of the assistant, without whitespace around it."""
    if not isinstance(item, Message) or item.role != "assistant":
        return None
    return "".join(part.text for part in item.content if isinstance(part, TextPart)).strip()


def _without_thought(text: str, thought: str) -> str:
    """A text without the think block with the reasoning that some clients put before it."""
    opening, _, rest = text.partition("<think>")
    inside, closed, said = rest.partition("</think>")
    return said.strip() if closed and not opening and inside.strip() == thought else text


def _find_call(given: ToolCall, calls: Sequence[ToolCall], sampled_ids: Collection[str]) -> ToolCall | None:
    """The first call with the same name and arguments, unless the given one has the id of another sampled call."""
    return next(
        (
            call
            for call in calls
            if (given.call_id == call.call_id or given.call_id not in sampled_ids)
            and given.name == call.name
            and _same_json(given.arguments, call.arguments)
        ),
        None,
    )


def _same_json(left: str, right: str) -> bool:
    """Whether two texts are equal as JSON, ignoring order of fields, whitespace, and `5.0` for `5`."""
    if left == right:
        return True
    try:
        return _typed(json.loads(left)) == _typed(json.loads(right))
    except (ValueError, RecursionError):
        return False


def _typed(value: object) -> object:
    """A JSON value in which true and 1 compare as different, unlike in Python."""
    if isinstance(value, bool):
        return ("bool", value)
    if is_object(value):
        return {key: _typed(inner) for key, inner in value.items()}
    return [_typed(inner) for inner in value] if is_array(value) else value


def _as_sampled(
    items: Sequence[Item], answers: Sequence[EarlierAnswer], sampled_ids: Collection[str], stops: Collection[str]
) -> list[Item]:
    """The items, with messages into which a client joined answers, or texts and calls, split up again."""
    texts = [text for answer in answers if (text := answer.parsed.text.strip())]
    # Python's parser holds the GIL, for minutes if the text has megabytes
    max_written = 8 * max((len(answer.text) for answer in answers), default=0) + 1000
    separate: list[Item] = []
    for item in items:
        said = _said(item) or ""
        stopped = _without_stop(said, texts, stops)
        written = [
            _message(_without_stop(text, texts, stops)) if (text := _said(part)) else part
            for part in (_written_calls(said) if len(said) <= max_written else [])
        ]
        if said in texts or not said:
            separate.append(item)
        elif stopped in texts:
            separate.append(_message(stopped))
        elif any(_rest_after(answer, written, sampled_ids) == [] for answer in answers):
            separate += written
        else:
            separate += _joined_texts(said, texts) or [item]
    return separate


def _without_stop(said: str, texts: Collection[str], stops: Collection[str]) -> str:
    """The one of `texts` behind which the client put a stop back, else what it said."""
    return next((text for stop in stops if (text := said.removesuffix(stop).strip()) in texts), said)


def _message(text: str) -> Message:
    return Message(role="assistant", content=(TextPart(text=text),))


def _written_calls(said: str) -> list[Item]:
    """The text and the calls of a message in which smolagents wrote the calls below the text, as a Python literal."""
    # Its CodeAgent adds a call of `python_interpreter` with the code of the text; the model made no such call.
    text, found, written = said.rpartition("Calling tools:\n")
    calls = list[Item]()
    if not found:
        return calls
    try:
        for call in literal_eval(written):
            name, given = call["function"]["name"], call["function"]["arguments"]
            if name == "python_interpreter" and all(line.strip() in text for line in given.split("\n")):
                continue
            arguments = given if isinstance(given, str) else json.dumps(given)
            calls.append(ToolCall(call_id=str(call["id"]), name=str(name), arguments=arguments))
    except (ValueError, SyntaxError, TypeError, KeyError, AttributeError, MemoryError, RecursionError):
        return []
    return [*([_message(text)] if text.strip() else []), *calls]


def _joined_texts(said: str, texts: Sequence[str]) -> list[Item]:
    """One message for each of the consecutive texts that `said` joins; none if it is not such a join."""
    for start in range(len(texts)):
        left, parts = said, list[Item]()
        for text in texts[start:]:
            if not left.startswith(text):
                break
            parts.append(_message(text))
            left = left[len(text) :].strip()
        if parts and not left:
            return parts
    return []
