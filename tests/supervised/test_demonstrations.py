from random import Random

import pytest

from cua_rl.actions import Button, Click, Drag, PressButton
from cua_rl.agent.tools import Finish as ParsedFinish
from cua_rl.agent.tools import parse_action
from cua_rl.conversation import EncodedImage, Message, Reasoning, SampledAnswer, ToolCall, ToolResult
from cua_rl.devices.simulator.device import SimulatedPhone
from cua_rl.models.tokenizer import build_tokenizer
from cua_rl.models.vocabulary import pieces
from cua_rl.renderers.answers import parse_answer
from cua_rl.renderers.images import ImageSettings
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.supervised.demonstrations import build_supervised_datum, demonstrate
from cua_rl.supervised.expert_answers import write_decision
from cua_rl.supervised.lessons import Mix, draw_lesson, draw_text_lesson
from cua_rl.tasks.demo.expert import DemoExperts
from cua_rl.tasks.demo.phone import make_simulated_phone
from cua_rl.tasks.demo.templates import TEMPLATES
from cua_rl.tasks.expert import Decision, Expert, Finish
from cua_rl.tasks.task import Task

SCREEN = EncodedImage(data=b"", format="png", width_px=192, height_px=320)
RENDERER = Qwen3VLRenderer(
    name="qwen3_vl",
    tokenizer=build_tokenizer(pieces()),
    image_settings=ImageSettings(patch_size_px=16, merge_size=2, min_pixels=4096, max_pixels=2**20),
)


@pytest.mark.parametrize("x", range(0, 192, 13))
@pytest.mark.parametrize("y", range(0, 320, 29))
def test_a_click_survives_being_written_and_parsed_to_within_a_pixel(x: int, y: int) -> None:
    answer = parse_answer(write_decision(Decision(scanned=("Mail",), action=Click(x=x, y=y)), SCREEN))
    action = parse_action(answer.tool_calls[0], width_px=192, height_px=320)
    # steps of 5 in 1000 are 0.96 px across and 1.6 px down, so rounding is off by at most half of that, rounded
    assert isinstance(action, Click)
    assert abs(action.x - x) <= 1
    assert abs(action.y - y) <= 1


def test_a_decision_becomes_a_thought_and_one_call() -> None:
    written = write_decision(Decision(scanned=("Phone", "Mail"), action=Click(x=96, y=160)), SCREEN)
    assert written == (
        "<think>\nPhone Mail\n</think>\n\n"
        '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [500, 500]}}\n</tool_call>'
    )


def test_an_end_without_a_scan_is_a_call_alone() -> None:
    written = write_decision(Decision(scanned=(), action=Finish(success_claimed=True)), SCREEN)
    parsed = parse_answer(written)
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
    answers = [parse_answer(item.text) for item in lesson.items if isinstance(item, SampledAnswer)]
    told = parse_action(answers[-1].tool_calls[0], width_px=192, height_px=320)
    assert isinstance(told, ParsedFinish)
    assert (await task.validate(phone, told.answer)).success


async def test_a_demonstration_is_the_conversation_that_the_agent_had() -> None:
    task = TEMPLATES["train_02_enable_wifi"].make_task(seed=1)
    phone = make_simulated_phone(task)
    lesson = await demonstrate(task.instruction, phone, expert(task, phone), max_turns=4)
    kinds = [type(item) for item in lesson.items]
    turn = [Reasoning, ToolCall, ToolResult]
    assert kinds == [Message, Message, *turn, *turn, SampledAnswer]
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


async def test_the_erring_expert_sometimes_taps_the_wrong_thing_and_then_gives_up() -> None:
    mix = Mix(listing_share=0.0, whole_share=1.0, error_rate=1.0)
    random, claims = Random(3), []
    for _ in range(20):
        lesson = await draw_lesson(random, mix)
        last = lesson.items[-1]
        assert isinstance(last, SampledAnswer)
        finish = parse_action(parse_answer(last.text).tool_calls[0], width_px=192, height_px=320)
        assert isinstance(finish, ParsedFinish)
        claims.append(finish.success_claimed)
    assert True in claims
    assert False in claims


async def test_a_listing_names_everything_on_the_screen() -> None:
    lesson = await draw_lesson(Random(0), Mix(listing_share=1.0, whole_share=0.0, error_rate=0.0))
    last = lesson.items[-1]
    assert isinstance(last, SampledAnswer)
    assert len((parse_answer(last.text).reasoning or "").split()) in (7, 8)


def test_drags_and_buttons_are_written_as_the_phone_tool_has_them() -> None:
    drag = parse_answer(write_decision(Decision(scanned=(), action=Drag(x=96, y=160, to_x=0, to_y=0)), SCREEN))
    assert '"swipe"' in drag.tool_calls[0].arguments
    button = write_decision(Decision(scanned=(), action=PressButton(button=Button.HOME)), SCREEN)
    assert '"Home"' in button


def test_a_text_lesson_scans_up_to_the_name_it_was_told_and_stays_open() -> None:
    lesson = draw_text_lesson(Random(4))
    datum = build_supervised_datum(RENDERER, lesson, name="lesson")
    ids = datum.model_input.token_ids(RENDERER.image_token_id)
    trained = RENDERER.decode([token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on])
    assert trained.startswith("<think>\n")
    assert trained.endswith("\n</think>\n\n")
    assert datum.model_input.images == ()
