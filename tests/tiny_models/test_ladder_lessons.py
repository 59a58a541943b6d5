"""Lessons for the model of the ladder."""

import json
from random import Random

from cua_rl.environments.phone.demo.templates import DEMO_EVAL, DEMO_TRAINING, TEMPLATES
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.supervised.demonstrations import build_supervised_datum
from cua_rl.types.conversation import EncodedImage, Message, Reasoning, TextPart, ToolCall, ToolResult
from scripts.tiny_models.ladder_lessons import (
    demonstrate_on,
    draw_copies,
    draw_search,
    other_templates,
    without_places,
)


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


async def test_a_lesson_without_screenshots_names_targets_but_trains_neither_taps_nor_places() -> None:
    renderer, template = make_renderer(TINY_QWEN3_VL), TEMPLATES["train_39_open_date_time"]
    lesson = await demonstrate_on(3, template, is_seen=False)

    assert not any(
        isinstance(part, EncodedImage) for item in lesson.items if isinstance(item, Message) for part in item.content
    )
    assert [item.text for item in lesson.items if isinstance(item, Reasoning)] == ["Settings", "Date"]
    datum = without_places(build_supervised_datum(renderer, lesson, name="lesson"), renderer)
    ids = datum.model_input.token_ids(-1)
    trained = renderer.decode([token for token, is_trained in zip(ids, datum.loss_mask, strict=True) if is_trained])
    assert trained.count("</think>\n\n<|im_end|>") == 2
    assert "coordinate" not in trained


async def test_elements_are_sought_on_a_screen_that_does_not_change() -> None:
    lesson = await draw_search(Random(5))
    calls = [json.loads(item.arguments) for item in lesson.items if isinstance(item, ToolCall)]
    named = [item.text for item in lesson.items if isinstance(item, Reasoning)]
    assert len(calls) == len(named) == 6
    # the same name leads to the same place
    assert len({(name, json.dumps(call)) for name, call in zip(named, calls, strict=True)}) == len(set(named))


async def test_copies_repeat_words_of_the_instruction_without_a_screen() -> None:
    lesson = await draw_copies(Random(5))
    asked = [
        part.text
        for item in lesson.items
        if isinstance(item, Message | ToolResult)
        for part in item.content
        if isinstance(part, TextPart) and part.text
    ]
    named = [item.text for item in lesson.items if isinstance(item, Reasoning)]
    calls = [json.loads(item.arguments) for item in lesson.items if isinstance(item, ToolCall)]
    typed = [call["text"] for call in calls if call["action"] == "type"]

    assert len(calls) == 8
    assert named
    assert typed
    assert [text for text in named + typed if not any(text in instruction for instruction in asked)] == []
