from collections.abc import Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import pytest

from cua_rl.agent.tools import parse_action
from cua_rl.environments.phone.demo.expert import DemoExperts
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.renderers.answers import parse_answer
from cua_rl.renderers.images import ImageSettings
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_5
from cua_rl.renderers.renderer import Renderer
from cua_rl.renderers.replay import replay
from cua_rl.supervised.demonstrations import as_taught, build_answer, build_supervised_datum, demonstrate
from cua_rl.tasks.expert import Decision, Expert
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Button, Click, Drag, Finish, PressButton
from cua_rl.types.actions import Finish as ParsedFinish
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
from scripts.tiny_models.lessons import Mix, draw_lesson, draw_text_lesson
from scripts.tiny_models.vocabulary import build_tokenizer, pieces
from tests.renderers.model_folders import build_qwen3_5_folder

SCREEN = EncodedImage(data=b"", format="png", width_px=192, height_px=320)
RENDERER = Qwen3VLRenderer(
    name="qwen3_vl",
    tokenizer=build_tokenizer(pieces()),
    image_settings=ImageSettings(patch_size_px=16, merge_size=2, min_pixels=4096, max_pixels=2**20),
)


def written(decision: Decision) -> str:
    """The answer as Qwen3-VL writes it."""
    (answer,) = replay(build_answer(decision, SCREEN))
    assert isinstance(answer, SampledAnswer)
    return answer.text


def call_of(items: Sequence[Item]) -> ToolCall:
    assert isinstance(items[-1], ToolCall)
    return items[-1]


@pytest.mark.parametrize("x", range(0, 192, 13))
@pytest.mark.parametrize("y", range(0, 320, 29))
def test_a_click_survives_being_written_and_parsed_to_within_a_pixel(x: int, y: int) -> None:
    answer = parse_answer(written(Decision(scanned=("Mail",), action=Click(x=x, y=y))))
    action = parse_action(answer.tool_calls[0], width_px=192, height_px=320)
    # steps of 5 in 1000 are 0.96 px across and 1.6 px down, so rounding is off by at most half of that, rounded
    assert isinstance(action, Click)
    assert abs(action.x - x) <= 1
    assert abs(action.y - y) <= 1


def test_a_decision_becomes_a_thought_and_one_call() -> None:
    assert written(Decision(scanned=("Phone", "Mail"), action=Click(x=96, y=160))) == (
        "<think>\nPhone Mail\n</think>\n\n"
        '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [500, 500]}}\n</tool_call>'
    )


def test_an_end_without_a_scan_is_a_call_alone() -> None:
    parsed = parse_answer(written(Decision(scanned=(), action=Finish(success_claimed=True))))
    assert parsed.reasoning is None
    assert parse_action(parsed.tool_calls[0], width_px=192, height_px=320) == ParsedFinish(success_claimed=True)


def expert(task: Task, phone: SimulatedPhone) -> Expert:
    return DemoExperts().make(task, phone, error_rate=0.0, random=Random(0))


@pytest.mark.parametrize("template", list(TEMPLATES.values())[::5], ids=lambda template: template.task_id)
async def test_the_perfect_expert_solves_demo_tasks_through_the_agent(template) -> None:
    task = template.make_task(seed=5)
    phone = make_simulated_phone(task)
    num_answers = max(task.max_turns, len(template.instance(task.seed).route) + 1)
    lesson = await demonstrate(task.instruction, phone, expert(task, phone), max_turns=num_answers)
    told = parse_action(call_of(lesson.items), width_px=192, height_px=320)
    assert isinstance(told, ParsedFinish)
    assert (await task.validate(phone, told.answer)).success


async def test_a_demonstration_is_the_conversation_that_the_agent_had() -> None:
    task = TEMPLATES["train_02_enable_wifi"].make_task(seed=1)
    phone = make_simulated_phone(task)
    lesson = await demonstrate(task.instruction, phone, expert(task, phone), max_turns=4)
    kinds = [type(item) for item in lesson.items]
    turn = [Reasoning, ToolCall, ToolResult]
    assert kinds == [Message, Message, *turn, *turn, ToolCall]
    assert isinstance(lesson.items[1], Message)
    assert isinstance(lesson.items[1].content[1], EncodedImage)
    assert [tool.name for tool in lesson.tools] == ["mobile_use"]


async def test_all_answers_are_trained_and_nothing_else() -> None:
    task = TEMPLATES["train_02_enable_wifi"].make_task(seed=1)
    phone = make_simulated_phone(task)
    lesson = await demonstrate(task.instruction, phone, expert(task, phone), max_turns=4)
    datum = build_supervised_datum(RENDERER, lesson, name="lesson")
    ids = datum.model_input.token_ids(RENDERER.image_token_id)
    trained = RENDERER.decode([token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on])
    answers = trained.split("<|im_end|>")
    assert len(answers) == 4
    assert answers[3] == ""
    assert answers[0].startswith("<think>\n")
    assert answers[2].startswith("<tool_call>")


async def test_a_model_of_another_family_learns_calls_in_its_own_form(small_folder: Path, tmp_path: Path) -> None:
    renderer = load_qwen3_5(build_qwen3_5_folder(small_folder, tmp_path / "qwen3_5"))
    task = TEMPLATES["train_02_enable_wifi"].make_task(seed=1)
    phone = make_simulated_phone(task)
    lesson = await demonstrate(task.instruction, phone, expert(task, phone), max_turns=1)
    datum = build_supervised_datum(renderer, lesson, name="lesson")
    ids = datum.model_input.token_ids(renderer.image_token_id)
    trained = renderer.decode([token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on])

    thought, called = trained.split("\n</think>\n\n")  # the prompt has opened the think block
    assert "<think>" not in thought
    assert called.startswith("<tool_call>\n<function=mobile_use>\n<parameter=action>\nclick\n</parameter>\n")
    parsed = renderer.parse(trained.removesuffix("<|im_end|>"), lesson.tools).tool_calls[0]
    assert parse_action(parsed, width_px=192, height_px=320) == parse_action(
        call_of(lesson.items), width_px=192, height_px=320
    )


@pytest.mark.parametrize("turns", [1, 3])
async def test_a_model_that_does_not_think_learns_thoughts_as_text_behind_the_prompts_that_it_gets(
    turns: int, small_folder: Path, tmp_path: Path
) -> None:
    folder = build_qwen3_5_folder(small_folder, tmp_path / "qwen3_5")
    template = folder / "chat_template.jinja"
    template.write_text(f"{template.read_text(encoding='utf-8')}{{# enable_thinking is true #}}")
    renderer = load_qwen3_5(folder)
    task = TEMPLATES["train_02_enable_wifi"].make_task(seed=1)
    phone = make_simulated_phone(task)
    lesson = await demonstrate(task.instruction, phone, expert(task, phone), max_turns=turns)
    assert any(isinstance(item, Reasoning) for item in lesson.items)

    datum = build_supervised_datum(renderer, lesson, name="lesson")

    ids = datum.model_input.token_ids(renderer.image_token_id)
    start = max(at for at, is_on in enumerate(datum.loss_mask) if is_on and not datum.loss_mask[at - 1])
    asked = max(at for at, item in enumerate(lesson.items) if isinstance(item, ToolResult | Message)) + 1
    prompt = renderer.render(as_taught(lesson.items[:asked], renderer), lesson.tools).token_ids(renderer.image_token_id)
    assert ids[:start] == prompt
    assert renderer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    answer = renderer.parse(renderer.decode(ids[start:]))
    assert answer.reasoning is None
    assert answer.failure is None
    assert len(answer.tool_calls) == 1


def test_thoughts_before_a_text_begin_it_and_others_are_texts_of_their_own() -> None:
    def said(text: str) -> Message:
        return Message(role="assistant", content=(TextPart(text=text),))

    unthinking = cast("Renderer", SimpleNamespace(closes_thinking=True))
    asked = Message(role="user", content=(TextPart(text="Go on."),))
    call = ToolCall(call_id="c", name="f", arguments="{}")
    items = (Reasoning(text="a"), Reasoning(text="b"), call, asked, Reasoning(text="c"), said("d"), Reasoning(text="e"))
    taught = as_taught(items, unthinking)
    both = Message(role="assistant", content=(TextPart(text="c\n\n"), TextPart(text="d")))
    assert taught == (said("a\nb"), call, asked, both, said("e"))


async def test_the_erring_expert_sometimes_taps_the_wrong_thing_and_then_gives_up() -> None:
    mix = Mix(listing_share=0.0, whole_share=1.0, error_rate=1.0)
    random, claims = Random(3), []
    for _ in range(20):
        lesson = await draw_lesson(random, mix)
        finish = parse_action(call_of(lesson.items), width_px=192, height_px=320)
        assert isinstance(finish, ParsedFinish)
        claims.append(finish.success_claimed)
    assert True in claims
    assert False in claims


async def test_a_listing_names_everything_on_the_screen() -> None:
    lesson = await draw_lesson(Random(0), Mix(listing_share=1.0, whole_share=0.0, error_rate=0.0))
    (thought,) = [item for item in lesson.items if isinstance(item, Reasoning)]
    assert len(thought.text.split()) in (7, 8)


def test_drags_and_buttons_are_written_as_the_phone_tool_has_them() -> None:
    drag = build_answer(Decision(scanned=(), action=Drag(x=96, y=160, to_x=0, to_y=0)), SCREEN)
    assert '"swipe"' in call_of(drag).arguments
    button = build_answer(Decision(scanned=(), action=PressButton(button=Button.HOME)), SCREEN)
    assert '"Home"' in call_of(button).arguments


def test_a_text_lesson_scans_up_to_the_name_it_was_told_and_stays_open() -> None:
    lesson = draw_text_lesson(Random(4))
    datum = build_supervised_datum(RENDERER, lesson, name="lesson")
    ids = datum.model_input.token_ids(RENDERER.image_token_id)
    trained = RENDERER.decode([token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on])
    assert trained.startswith("<think>\n")
    assert trained.endswith("\n</think>\n\n")
    assert datum.model_input.images == ()
