import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cua_rl.renderers.answers import parse_answer
from cua_rl.sampling.history_replay import EarlierAnswer, replay_answers
from cua_rl.types.conversation import Item, Message, Reasoning, Role, SampledAnswer, TextPart, ToolCall, ToolResult


def earlier(text: str, *ids: str) -> EarlierAnswer:
    parsed = parse_answer(text)
    calls = tuple(replace(call, call_id=name) for call, name in zip(parsed.tool_calls, ids, strict=True))
    return EarlierAnswer(text=text, parsed=replace(parsed, tool_calls=calls))


def said(*texts: str, role: Role = "assistant") -> Message:
    return Message(role=role, content=tuple(TextPart(text=text) for text in texts))


def call(arguments: str, call_id: str, name: str = "click") -> ToolCall:
    return ToolCall(call_id=call_id, name=name, arguments=arguments)


def result(call_id: str) -> ToolResult:
    return ToolResult(call_id=call_id, content=(TextPart(text="ok"),))


def written_call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "click", "arguments": {arguments}}}\n</tool_call>'


THOUGHT = "<think>\nThere.\n</think>\n\n"
CLICK = earlier(THOUGHT + "  I open it.\n\n" + written_call('{"y": 7, "x": 5.0, "on": true}'), "call_a")
PAIR = earlier(written_call('{"x": 1}') + "\n" + written_call('{"x": 2}'), "call_b", "call_c")
ARGUMENTS = CLICK.parsed.tool_calls[0].arguments
WRITTEN = "[{'id': 'call_a', 'function': {'name': 'click', 'arguments': {'y': 7, 'x': 5.0, 'on': True}}}]"


@pytest.mark.parametrize(
    "items",
    [
        [Reasoning(text="There."), said("I open it."), call(ARGUMENTS, "call_a")],
        [said("I open it."), call('{"on":true,"x":5,"y":7}', "call_a")],
        [said("\nI open it. "), call(ARGUMENTS, "a_new_id")],
        [said("I open", " it."), call(ARGUMENTS, "")],
        [said("I open"), said("it."), call(ARGUMENTS, "call_a")],
        [said("<think>\nThere.\n</think>\n\nI open it."), call(ARGUMENTS, "call_a")],
        [Reasoning(text=""), said("I open it."), call(ARGUMENTS, "call_a")],
        [call(ARGUMENTS, "call_a"), said("I open it.")],
        [said("I open it.\nCalling tools:\n" + WRITTEN)],
    ],
    ids=[
        *("as given", "other JSON", "new id", "parts", "several messages", "thought in the text"),
        *("empty thought", "text behind the call", "call in the text"),
    ],
)
def test_an_answer_is_recognised_however_a_client_writes_it(items: list[Item]) -> None:
    assert replay_answers([*items, result("call_a")], [CLICK]) == (SampledAnswer(text=CLICK.text), result("call_a"))


@pytest.mark.parametrize(
    "items",
    [
        [said("I close it."), call(ARGUMENTS, "call_a")],
        [said("I open it."), call('{"y": 7, "x": 6, "on": true}', "call_a")],
        [said("I open it."), call('{"y": 7, "x": 5, "on": 1}', "call_a")],
        [said("I open it."), call(ARGUMENTS, "call_a", name="tap")],
        [Reasoning(text="Elsewhere."), said("I open it."), call(ARGUMENTS, "call_a")],
        [said("I open it. Soon."), call(ARGUMENTS, "call_a")],
        [said("I open it.", role="user"), call(ARGUMENTS, "call_a")],
        [said("I open it.\nCalling tools:\n" + WRITTEN.replace("7", "8")), result("call_a")],
        [said("I open it.\nCalling tools:\n" + WRITTEN + "(" * 10_000), result("call_a")],
    ],
    ids=[
        *("text", "argument", "true is not 1", "name", "thought", "longer text", "of the user"),
        *("argument in the text", "no Python"),
    ],
)
def test_an_answer_with_another_meaning_stays_as_the_agent_wrote_it(items: list[Item]) -> None:
    replayed = replay_answers(items, [CLICK])

    assert SampledAnswer(text=CLICK.text) not in replayed[:1]
    assert items[-2] in replayed


def test_results_between_parallel_calls_follow_the_whole_answer() -> None:
    items = [call('{"x": 1}', "call_b"), result("call_b"), call('{"x":2}', "call_c"), result("call_c")]

    assert replay_answers(items, [PAIR]) == (SampledAnswer(text=PAIR.text), result("call_b"), result("call_c"))


def test_parallel_calls_in_another_order_are_the_answer_and_their_results_take_its_order() -> None:
    items = [call('{"x": 2}', "call_c"), call('{"x":1}', "call_b"), result("call_c"), result("call_b")]

    assert replay_answers(items, [PAIR]) == (SampledAnswer(text=PAIR.text), result("call_b"), result("call_c"))


def test_results_of_a_stored_answer_take_the_order_of_its_calls() -> None:
    stored = SampledAnswer(text=PAIR.text)  # named by `previous_response_id`
    items = [stored, result("call_c"), result("call_b")]

    assert replay_answers(items, [PAIR]) == (stored, result("call_b"), result("call_c"))


def test_code_that_smolagents_repeats_as_a_call_is_not_part_of_the_answer() -> None:
    code = earlier("I look.\n<code>\nlook()\n\nclick(1)\n</code>")
    made = "\nCalling tools:\n[{'id': 'call_1', 'function': {'name': 'python_interpreter', 'arguments': '%s'}}]"

    for written, is_same in (("look()\\n\\nclick(1)", True), ("look()\\n\\nclick(2)", False)):
        items = [said(code.text + made % written)]
        assert replay_answers(items, [code]) == ((SampledAnswer(text=code.text),) if is_same else tuple(items))


def test_a_stop_that_the_agent_puts_back_is_not_part_of_the_answer() -> None:
    answer, items = earlier("No code at all."), [said("No code at all.</code>")]

    assert replay_answers(items, [answer], ["Observation:", "</code>"]) == (SampledAnswer(text=answer.text),)
    assert replay_answers(items, [answer], ["Observation:"]) == tuple(items)


def test_one_message_with_the_texts_of_several_answers_is_taken_apart() -> None:
    first, second = earlier("I tried."), earlier(" Once more.\n")

    assert replay_answers([said("I tried.\nOnce more."), said("next", role="user")], [first, second]) == (
        SampledAnswer(text="I tried."),
        SampledAnswer(text=" Once more.\n"),
        said("next", role="user"),
    )


def test_the_id_of_a_call_tells_equal_answers_apart() -> None:
    first, second = earlier(written_call('{"x": 1}'), "1"), earlier(" " + written_call('{"x": 1}'), "2")

    assert replay_answers([call('{"x": 1}', "2")], [first, second]) == (SampledAnswer(text=second.text),)


def test_an_answer_that_the_agent_left_out_is_not_found_in_the_next_one_with_its_text() -> None:
    malformed = earlier('I open it.\n<tool_call>\n{"name": "click", "argum\n</tool_call>')
    repeated = earlier("I open it.\n" + written_call('{"x": 1}'), "1")
    empty = earlier("<think>\nThere.\n</think>\n\n")

    items = [Reasoning(text=""), said("I open it."), call('{"x": 1}', "1"), result("1")]

    assert replay_answers(items, [empty, malformed, repeated]) == (SampledAnswer(text=repeated.text), result("1"))


def test_a_long_text_is_not_read_as_calls() -> None:
    item = said("I open it.\nCalling tools:\n[" + "1," * 2_000_000 + "]")
    started = time.process_time()

    assert replay_answers([item], [CLICK]) == (item,)
    assert time.process_time() - started < 2.0  # Python's parser takes 2 GB and a minute for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What a model might say."""

    thought: str | None
    text: str
    calls: tuple[Mapping[str, object], ...]

    def answer(self, number: int) -> EarlierAnswer:
        """The answer as it is written, with ids that depend on its number."""
        think = "" if self.thought is None else f"<think>\n{self.thought}\n</think>\n\n"
        calls = "\n".join(written_call(json.dumps(arguments)) for arguments in self.calls)
        return earlier(f"{think}{self.text}\n{calls}", *(f"call_{number}_{at}" for at in range(len(self.calls))))


words = st.text('ab ,:{}"\n\u00fc', min_size=1, max_size=8).filter(str.strip)
values = st.none() | st.booleans() | st.integers(-9, 9) | words
arguments = st.dictionaries(
    st.sampled_from("xyz"), values | st.lists(values, max_size=2) | st.dictionaries(words, values, max_size=2)
)
conversations = st.lists(
    st.builds(Sampled, thought=st.none() | words, text=words, calls=st.lists(arguments, max_size=3).map(tuple)),
    min_size=1,
    max_size=4,
)


def rewritten(answer: EarlierAnswer, rng: Random) -> list[Item]:
    """An answer as some client might send it back, with the results of its calls."""
    parsed, text = answer.parsed, answer.parsed.text
    items: list[Item] = []
    match rng.choice(["given", "dropped", "empty", "in the text"]):
        case "given" if parsed.reasoning is not None:
            items.append(Reasoning(text=parsed.reasoning))
        case "empty":
            items.append(Reasoning(text=""))
        case "in the text" if parsed.reasoning is not None:
            text = f"<think>{parsed.reasoning}</think>\n{text}"
        case _:
            pass
    cut = 0 if text.startswith("<think>") else rng.randrange(len(text) + 1)
    messages: list[Item] = [said(part + rng.choice(["", "\n"])) for part in (text[:cut], text[cut:]) if part.strip()]
    has_ids = rng.random() < 0.7
    calls = [
        replace(made, arguments=rewritten_json(made.arguments, rng), call_id=made.call_id if has_ids else f"new_{at}")
        for at, made in enumerate(parsed.tool_calls)
    ]
    rng.shuffle(calls)
    results = [result(made.call_id) for made in calls]
    if rng.random() < 0.5:  # each result behind its call
        return [*items, *messages, *(item for pair in zip(calls, results, strict=True) for item in pair)]
    blocks: list[list[Item]] = [messages, [*calls]]
    rng.shuffle(blocks)
    return [*items, *blocks[0], *blocks[1], *results]


def rewritten_json(written: str, rng: Random) -> str:
    fields = list(json.loads(written).items())
    rng.shuffle(fields)
    made = {key: float(value) if type(value) is int and rng.random() < 0.5 else value for key, value in fields}
    return json.dumps(made, indent=rng.choice([None, 2]), ensure_ascii=rng.random() < 0.5)


@given(conversations, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_every_answer_of_a_rewritten_history_is_recognised(made: list[Sampled], rng: Random) -> None:
    answers = [one.answer(number) for number, one in enumerate(made)]
    items = [item for answer in answers for item in (*rewritten(answer, rng), said("go on", role="user"))]

    replayed = replay_answers(items, answers)

    assert [item.text for item in replayed if isinstance(item, SampledAnswer)] == [answer.text for answer in answers]
    assert len(replayed) == 2 * len(answers) + sum(len(answer.parsed.tool_calls) for answer in answers)


@given(conversations, st.data(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_an_edited_answer_of_a_rewritten_history_is_not_taken_for_a_sampled_one(
    made: list[Sampled], data: st.DataObject, rng: Random
) -> None:
    # texts that differ: else an edit may make one answer into another
    answers = [replace(one, text=f"{number} {one.text}").answer(number) for number, one in enumerate(made)]
    edited = data.draw(st.integers(0, len(made) - 1))
    items: list[Item] = []
    for number, answer in enumerate(answers):
        own = rewritten(answer, rng)
        if number == edited:
            at = data.draw(st.sampled_from([at for at, item in enumerate(own) if isinstance(item, Message | ToolCall)]))
            own[at] = edit(own[at])
        items += [*own, said("go on", role="user")]

    texts = [item.text for item in replay_answers(items, answers) if isinstance(item, SampledAnswer)]

    assert texts == [answer.text for number, answer in enumerate(answers) if number != edited]


def edit(item: Item) -> Item:
    """The item with another word in its text, or another argument."""
    if isinstance(item, ToolCall):
        return replace(item, arguments=json.dumps({**json.loads(item.arguments), "x": "edited"}))
    assert isinstance(item, Message)
    return said("".join(part.text for part in item.content if isinstance(part, TextPart)) + " edited")
