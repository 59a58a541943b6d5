from dataclasses import replace

import pytest

from cua_rl.conversation import Item, Message, Reasoning, Role, SampledAnswer, TextPart, ToolCall, ToolResult
from cua_rl.renderers.answers import parse_answer
from cua_rl.sampling.history_replay import EarlierAnswer, replay_answers


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


@pytest.mark.parametrize(
    "items",
    [
        [Reasoning(text="There."), said("I open it."), call(ARGUMENTS, "call_a")],
        [said("I open it."), call('{"on":true,"x":5,"y":7}', "call_a")],
        [said("\nI open it. "), call(ARGUMENTS, "a_new_id")],
        [said("I open", " it."), call(ARGUMENTS, "")],
        [said("I open"), said("it."), call(ARGUMENTS, "call_a")],
        [said("<think>\nThere.\n</think>\n\nI open it."), call(ARGUMENTS, "call_a")],
    ],
    ids=["as given", "other JSON", "new id", "parts", "several messages", "thought in the text"],
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
    ],
    ids=["text", "argument", "true is not 1", "name", "thought", "longer text", "of the user"],
)
def test_an_answer_with_another_meaning_stays_as_the_agent_wrote_it(items: list[Item]) -> None:
    replayed = replay_answers(items, [CLICK])

    assert SampledAnswer(text=CLICK.text) not in replayed[:1]
    assert items[-2] in replayed


def test_results_between_parallel_calls_follow_the_whole_answer() -> None:
    items = [call('{"x": 1}', "call_b"), result("call_b"), call('{"x":2}', "call_c"), result("call_c")]

    assert replay_answers(items, [PAIR]) == (SampledAnswer(text=PAIR.text), result("call_b"), result("call_c"))


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
