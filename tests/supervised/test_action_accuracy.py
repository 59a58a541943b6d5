"""Held-out steps and the rules by which actions are the same."""

import json

import pytest

from cua_rl.host.http_server import serve_app
from cua_rl.renderers.answers import write_answer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ExternalServer
from cua_rl.supervised.action_accuracy import ANSWER_ROOM, ActionExam, held_out_steps, same_action
from cua_rl.supervised.demonstrations import Demonstration, build_supervised_datum
from cua_rl.types.actions import (
    Action,
    Button,
    Click,
    DoubleClick,
    Drag,
    Finish,
    LongPress,
    MoveMouse,
    OpenApp,
    PressButton,
    PressKey,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.types.conversation import EncodedImage, Item, Message, Reasoning, TextPart, ToolCall
from tests.exchange.files import HEIGHT_PX, RENDERER, WIDTH_PX, draw
from tests.sampling.fake_vllm import FakeVllm

SCREEN = EncodedImage(data=b"", format="png", width_px=1000, height_px=2000)


@pytest.mark.parametrize(
    ("recorded", "given", "is_same"),
    [
        # 0.14 of the width; 280 px are 0.14 of the height
        (Click(x=100, y=100), Click(x=239, y=100), True),
        (Click(x=100, y=100), Click(x=241, y=100), False),
        (Click(x=100, y=100), Click(x=100, y=379), True),
        (Click(x=100, y=100), Click(x=100, y=381), False),
        (Click(x=100, y=100), Click(x=199, y=300), False),  # sqrt(0.099^2 + 0.1^2) = 0.1407
        (Click(x=100, y=100), Click(x=198, y=298), True),  # sqrt(0.098^2 + 0.099^2) = 0.1393
        (Click(x=100, y=100), LongPress(x=100, y=100), False),
        (Click(x=100, y=100), DoubleClick(x=100, y=100), False),
        (LongPress(x=1, y=1, duration_s=1.0), LongPress(x=9, y=9, duration_s=2.0), True),
        (Drag(x=500, y=900, to_x=500, to_y=100), Drag(x=200, y=800, to_x=240, to_y=700), True),
        (Drag(x=500, y=900, to_x=500, to_y=100), Drag(x=500, y=100, to_x=500, to_y=900), False),
        (Drag(x=500, y=900, to_x=500, to_y=100), Drag(x=500, y=900, to_x=100, to_y=900), False),
        (Scroll(x=1, y=1, down_px=300), Scroll(x=500, y=500, down_px=40), True),
        (Scroll(x=1, y=1, down_px=300), Scroll(x=1, y=1, down_px=-300), False),
        (Scroll(x=1, y=1, right_px=300), Scroll(x=1, y=1, down_px=300), False),
        (TypeText(text="green tea"), TypeText(text=" Green Tea"), True),
        (TypeText(text="green tea"), TypeText(text="tea"), False),
        (OpenApp(name="Mail"), OpenApp(name="mail"), True),
        (PressKey(keys=("ctrl", "s")), PressKey(keys=("ctrl", "c")), False),
        (PressButton(button=Button.BACK), PressButton(button=Button.BACK), True),
        (PressButton(button=Button.BACK), PressButton(button=Button.HOME), False),
        (Wait(duration_s=1.0), Wait(duration_s=5.0), True),
        (Finish(success_claimed=True), Finish(success_claimed=False), False),
        (Finish(success_claimed=True, answer="Rome"), Finish(success_claimed=True, answer="rome"), True),
        (Finish(success_claimed=True, answer="Rome"), Finish(success_claimed=True), False),
        (Click(x=100, y=100), None, False),
    ],
)
def test_actions_are_the_same_by_type_place_direction_and_text(
    recorded: Action | Finish, given: Action | Finish | None, is_same: bool
) -> None:
    assert same_action(recorded, given, SCREEN) is is_same


@pytest.mark.parametrize(
    ("given", "is_right"),
    [
        (Click(x=300, y=100), True),  # far from the recorded click, on the same wide element
        (Click(x=600, y=140), True),  # its last pixel
        (Click(x=601, y=100), False),
        (Click(x=100, y=141), False),  # near, beside it
        (LongPress(x=300, y=100), False),
    ],
)
def test_a_click_is_right_in_the_box_of_the_element_that_was_aimed_at(given: Action, is_right: bool) -> None:
    assert same_action(Click(x=100, y=120), given, SCREEN, (60, 90, 600, 140)) is is_right


def shown(number: int) -> Message:
    image = EncodedImage(data=draw(number), format="png", width_px=WIDTH_PX, height_px=HEIGHT_PX)
    return Message(role="user", content=(image,))


def called(**arguments: object) -> ToolCall:
    return ToolCall(call_id="one", name="computer_use", arguments=json.dumps(arguments))


def test_a_step_has_the_conversation_before_its_answer_as_the_model_would_be_asked() -> None:
    items: tuple[Item, ...] = (
        Message(role="user", content=(TextPart(text="Tidy up."),)),
        Message(role="assistant", content=(TextPart(text="Show me."),)),  # no screenshot yet
        shown(1),
        Reasoning(text="The file."),
        called(action="mouse_move", coordinate=[500, 250]),
        shown(2),
        called(action="left_click_drag", coordinate=[500, 750]),  # from where the mouse was moved to
        shown(3),
        Message(role="assistant", content=(TextPart(text="It is tidy."),)),  # no action of ours
        shown(4),
        called(action="terminate", status="success"),
    )
    datum = build_supervised_datum(RENDERER, Demonstration(items=items, tools=()), name="one")

    steps = list(held_out_steps([datum], RENDERER, {}))

    assert [step.action for step in steps] == [
        MoveMouse(x=96, y=80),
        Drag(x=96, y=80, to_x=96, to_y=240),
        Finish(success_claimed=True),
    ]
    assert [step.prompt for step in steps] == [RENDERER.render(items[:number]) for number in (3, 6, 10)]
    assert [step.screen.data for step in steps] == [draw(number) for number in (1, 2, 4)]
    ends = [step.prompt.length + step.num_answer_tokens for step in steps]
    assert ends[2] == datum.model_input.length


@pytest.mark.parametrize(
    ("answer", "box", "whole", "kind", "click", "text"),
    [
        # of two clicks, one text and an end: the near click; both clicks are of its type
        (called(action="left_click", coordinate=[480, 510]), (), 0.25, 0.5, 0.5, 0),
        # (92, 163) is within the box of what the far one aimed at, too
        (called(action="left_click", coordinate=[480, 510]), (80, 20, 190, 180), 0.5, 0.5, 1, 0),
        (called(action="type", text="TEA"), (), 0.25, 0.25, 0, 1),
        (called(action="terminate", status="failure"), (), 0, 0.25, 0, 0),
        (called(action="fly"), (), 0, 0, 0, 0),
    ],
)
async def test_the_shares_of_steps_whose_answers_are_right(
    answer: ToolCall, box: tuple[int, ...], whole: float, kind: float, click: float, text: float
) -> None:
    recorded = [
        called(action="left_click", coordinate=[500, 500]),
        called(action="left_click", coordinate=[900, 100]),
        called(action="type", text="tea"),
        called(action="terminate", status="success"),
    ]
    items = [item for number, call in enumerate(recorded) for item in (shown(number), call)]
    datum = build_supervised_datum(RENDERER, Demonstration(items=tuple(items), tools=()), name="one")
    boxes: dict[tuple[str, Action], tuple[int, ...]] = {(datum.model_input.images[1].sha256, Click(x=173, y=32)): box}
    steps = list(held_out_steps([datum], RENDERER, boxes))
    fake = FakeVllm(RENDERER, default_answer=write_answer(reasoning=None, text=None, tool_calls=[answer]))
    async with serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url, ExternalServer(url) as server:
        async with SamplingClient(server) as sampler:
            metrics = await ActionExam(steps=steps, renderer=RENDERER, sampler=sampler).take()

    assert metrics == {
        "eval/held_out/action_accuracy": whole,
        "eval/held_out/action_accuracy/type": kind,
        "eval/held_out/action_accuracy/click": click,
        "eval/held_out/action_accuracy/text": text,
        "eval/held_out/num_actions": 4,
    }
    asked = [request["sampling_params"] for request in fake.requests]
    assert [params["temperature"] for params in asked] == [0.0] * 4
    assert {params["max_tokens"] for params in asked} == {step.num_answer_tokens + ANSWER_ROOM for step in steps}
