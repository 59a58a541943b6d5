"""Lessons for the model of the ladder."""

import json
import re
from dataclasses import replace
from random import Random

import pytest

from cua_rl.agent.tools import MOBILE_USE
from cua_rl.environments.phone.demo.templates import DEMO_EVAL, DEMO_TRAINING, TEMPLATES
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import Renderer, make_renderer
from cua_rl.supervised.demonstrations import build_supervised_datum
from cua_rl.types.conversation import EncodedImage, Message, Reasoning, TextPart, ToolCall, ToolResult
from cua_rl.types.rollout import Datum
from scripts.tiny_models.ladder_lessons import (
    demonstrate_on,
    draw_copies,
    draw_questions,
    draw_reading,
    draw_search,
    find_digits,
    name_digits,
    other_templates,
    without_sight,
)
from scripts.tiny_models.lessons import text_lesson
from scripts.tiny_models.probes import judge_parts


async def test_every_family_of_lessons_is_solved_by_its_expert() -> None:
    random = Random(0)
    for template in [*other_templates(random), *other_templates(random)]:
        lesson = await demonstrate_on(random.randrange(1000), template, is_seen=False)
        last = lesson.items[-1]
        assert isinstance(last, ToolCall)
        assert json.loads(last.arguments).get("status") == "success" or lesson.answer, lesson.items[1]


def test_lessons_ask_for_nothing_that_evaluation_asks_for() -> None:
    random = Random(0)
    # what training tasks ask for, too, such as "Open Mail.", is no secret
    trained = {template.instance(seed).instruction for template in DEMO_TRAINING for seed in range(64)}
    held_out = {template.instance(seed).instruction for template in DEMO_EVAL for seed in range(64)} - trained
    drawn = {template.instance(seed).instruction for seed in range(20) for template in other_templates(random)}
    assert not drawn & held_out


async def test_a_lesson_without_screenshots_trains_names_of_targets_but_neither_what_shows_nor_where() -> None:
    renderer, template = make_renderer(TINY_QWEN3_VL), TEMPLATES["train_39_open_date_time"]
    lesson = await demonstrate_on(3, template, is_seen=False)

    assert not any(
        isinstance(part, EncodedImage) for item in lesson.items if isinstance(item, Message) for part in item.content
    )
    thoughts = [item.text for item in lesson.items if isinstance(item, Reasoning)]
    assert [thought.partition(":")[0] for thought in thoughts] == ["Settings", "Date"]
    trained = _trained(without_sight(build_supervised_datum(renderer, lesson, name="lesson"), renderer), renderer)
    assert trained.count("</think>") == sum(thought.endswith((" Settings", " Date")) for thought in thoughts)
    assert [thought for thought in thoughts if thought.partition(":")[2] in trained] == []
    assert "]}}" in trained
    assert "swipe" not in trained


@pytest.mark.parametrize(
    ("scan", "trained"),
    [
        ("Sound: Wi-Fi Sound", "Sound:|</think>|click|]}}"),
        ("Sound: Wi-Fi Battery", "Sound:|]}}"),
        ("Zorbi: Wi-Fi Z", "Zorbi:|</think>|click|]}}"),
        ("Enter:", "Enter:|]}}"),
        ("Answer:2,525,75", "Answer:|click|]}}"),
    ],
)
def test_without_sight_a_scan_that_ends_at_its_target_is_followed_by_a_tap(scan: str, trained: str) -> None:
    renderer = make_renderer(TINY_QWEN3_VL)
    call = {"action": "click", "coordinate": [250, 600]}
    answer = (Reasoning(text=scan), ToolCall(call_id="expert", name="mobile_use", arguments=json.dumps(call)))
    lesson = text_lesson("android", MOBILE_USE, "Tap it.", ())
    lesson = replace(lesson, items=(*lesson.items[:-1], *answer), is_open=False)

    datum = without_sight(build_supervised_datum(renderer, lesson, name="lesson"), renderer)
    found = re.findall(r"[A-Z][a-z]+:|</think>|click|]}}|250|Wi-Fi", _trained(datum, renderer))
    assert "|".join(found) == trained


async def test_an_expert_that_errs_seeks_another_element_and_gives_up() -> None:
    lesson = await demonstrate_on(3, TEMPLATES["train_39_open_date_time"], is_seen=False, error_rate=1.0)
    target, _, seen = next(item.text for item in lesson.items if isinstance(item, Reasoning)).partition(": ")
    assert target != "Settings"
    assert seen.endswith(target)
    calls = [json.loads(item.arguments) for item in lesson.items if isinstance(item, ToolCall)]
    assert [(call["action"], call.get("status")) for call in calls] == [("click", None), ("terminate", "failure")]


async def test_elements_are_sought_on_a_screen_that_does_not_change() -> None:
    for seed in range(12):
        lesson = await draw_search(Random(seed))
        calls = [json.loads(item.arguments) for item in lesson.items if isinstance(item, ToolCall)]
        named = [item.text for item in lesson.items if isinstance(item, Reasoning)]
        assert len(calls) == len(named) == 2
        # the same name leads to the same place
        assert len({(name, json.dumps(call)) for name, call in zip(named, calls, strict=True)}) == len(set(named))
        shorter, longer = sorted((name.partition(": ")[2] for name in named), key=len)
        assert longer.startswith(shorter)


async def test_readings_name_the_digits_that_the_screen_shows_and_answer_with_them() -> None:
    seen: set[str] = set()
    for seed in range(50):
        lesson, (phone, questions) = await draw_reading(Random(seed)), draw_questions(Random(seed))
        seen.add(phone.state.screen.partition(":")[0])
        thoughts = [item.text for item in lesson.items if isinstance(item, Reasoning)]
        calls = [json.loads(item.arguments) for item in lesson.items if isinstance(item, ToolCall)]
        told = {call["text"]: thought for call, thought in zip(calls, thoughts, strict=True) if "text" in call}
        assert len(calls) == len(questions)
        for answer, thought in told.items():
            name, _, named = thought.partition(":")
            numbers = named.split(",")
            read = "".join(number if len(number) == 1 else str(int(number) // 100) for number in numbers)
            counted = [str(number) for number in range(1, len(numbers) + 1)]
            assert name == "Answer"
            assert read == "".join(filter(str.isdigit, answer)) or (numbers == counted and counted[-1:] == [answer])
    assert seen == {"home", "gallery", "calculator", "contacts/person", "settings/app_storage", "notifications"}


def test_digits_are_found_on_their_image_tokens_and_a_fourth_on_the_next() -> None:
    state = replace(make_phone_state(3), battery_pct=47, minute_of_day=12 * 60 + 58)

    assert find_digits(state) == {(0, 0): "125", (1, 0): "8", (5, 0): "47"}
    assert [name_digits(digits) for digits in find_digits(state).values()] == [["1", "225", "575"], ["4", "725"], ["8"]]


async def test_copies_repeat_words_of_the_instruction_without_a_screen() -> None:
    lesson = await draw_copies(Random(5))
    asked = [
        part.text
        for item in lesson.items
        if isinstance(item, Message | ToolResult)
        for part in item.content
        if isinstance(part, TextPart) and part.text
    ]
    named = [item.text.partition(":")[0] for item in lesson.items if isinstance(item, Reasoning)]
    calls = [json.loads(item.arguments) for item in lesson.items if isinstance(item, ToolCall)]
    typed = [call["text"] for call in calls if call["action"] == "type"]

    assert len(calls) == 8
    assert named
    assert typed
    assert [text for text in named + typed if not any(text in instruction for instruction in asked)] == []


async def test_probes_judge_what_was_trained_part_by_part() -> None:
    renderer = make_renderer(TINY_QWEN3_VL)
    lesson = await demonstrate_on(3, TEMPLATES["train_39_open_date_time"])
    datum = build_supervised_datum(renderer, lesson, name="lesson")
    trained = [token if is_trained else -1 for token, is_trained in zip(_ids(datum), datum.loss_mask, strict=True)]
    first_tap = next(i for i, token in enumerate(trained) if token >= 0 and "click" in renderer.decode([token]))
    likely = [index != first_tap + 1 for index in range(len(trained))]  # all but the first number of a place

    found = judge_parts(datum, likely, renderer)
    num_calls = sum(isinstance(item, ToolCall) for item in lesson.items)
    num_thoughts = sum(isinstance(item, Reasoning) for item in lesson.items)
    assert {part: num for (part, is_right), num in found.items() if not is_right} == {"place": 1, "whole": 1}
    assert (found["action", True], found["whole", True]) == (num_calls, num_calls - 1)
    assert found["target", True] == found["labels", True] == found["end", True] == num_thoughts


def _trained(datum: Datum, renderer: Renderer) -> str:
    return renderer.decode(
        [token for token, is_trained in zip(_ids(datum), datum.loss_mask, strict=True) if is_trained]
    )


def _ids(datum: Datum) -> tuple[int, ...]:
    return datum.model_input.token_ids(-1)
