"""What a person may say, and what the agent does then: held against the parser of the model's own calls."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from cua_rl.agent.action_format import GUI_OWL, qwen2_5_vl, reach
from cua_rl.agent.tools import COMPUTER_USE, MOBILE_USE, action_names, parse_action
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.run.by_hand import Lines, Person, WrongWords, parse_line, read_lines, usage
from cua_rl.sampling.sampler import TurnRequest
from cua_rl.types import actions
from cua_rl.types.actions import Finish
from cua_rl.types.conversation import EncodedImage, Message, TextPart, Tool
from cua_rl.types.errors import AgentError
from cua_rl.types.rollout import SamplingParams

RENDERER = make_renderer(TINY_QWEN3_VL)
SCREEN = EncodedImage(data=b"screen", format="png", width_px=192, height_px=320)
THOUSAND = (1000, 1000)


def do(line: str, tool: Tool, *, cursor: tuple[int, int] | None = None) -> object:
    call = parse_line(line, tool, SCREEN, THOUSAND)
    return parse_action(call, width_px=192, height_px=320, cursor=cursor, offered=tool)


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("click 96 160", actions.Click(x=96, y=160)),
        ("CLICK 96.4 160", actions.Click(x=96, y=160)),
        ("swipe 96 240 96 80", actions.Drag(x=96, y=240, to_x=96, to_y=80)),
        ('type "green tea"', actions.TypeText(text="green tea")),
        ("type green tea", actions.TypeText(text="green tea")),
        ("""type "don't\"""", actions.TypeText(text="don't")),
        ("back", actions.PressButton(button=actions.Button.BACK)),
        ("system_button Home", actions.PressButton(button=actions.Button.HOME)),
        ("enter", actions.PressKey(keys=("enter",))),
        ("wait 0.5", actions.Wait(duration_s=0.5)),
        ("answer 42 apples", Finish(success_claimed=True, answer="42 apples")),
        ("finish", Finish(success_claimed=True)),
        ("finish failure", Finish(success_claimed=False)),
        ('{"action": "click", "coordinate": [500, 500]}', actions.Click(x=96, y=160)),
        ('{"name": "mobile_use", "arguments": {"action": "wait", "time": 2}}', actions.Wait(duration_s=2.0)),
    ],
)
def test_words_for_a_phone_become_the_actions_that_they_name(line: str, meant: object) -> None:
    assert do(line, MOBILE_USE) == meant


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("click 96 160", actions.Click(x=96, y=160)),
        ("right_click 0 319", actions.RightClick(x=0, y=319)),
        ("left_click_drag 96 160", actions.Drag(x=5, y=6, to_x=96, to_y=160)),
        ("scroll 96 160 -300", actions.Scroll(x=96, y=160, down_px=300)),
        ("key ctrl s", actions.PressKey(keys=("ctrl", "s"))),
    ],
)
def test_words_for_a_computer_become_the_actions_that_they_name(line: str, meant: object) -> None:
    assert do(line, COMPUTER_USE, cursor=(5, 6)) == meant


def test_every_pixel_of_a_small_screen_can_be_clicked_and_of_a_large_one_all_but_one_pixel() -> None:
    for x in range(192):
        for y in range(0, 320, 7):
            assert do(f"click {x} {y}", MOBILE_USE) == actions.Click(x=x, y=y)
    large = EncodedImage(data=b"", format="png", width_px=1080, height_px=2400)
    assert RENDERER.image_settings is not None
    for pixels_of in (None, RENDERER.image_settings):  # thousandths, and pixels of the resized screenshot
        ends = reach(large, pixels_of)
        tool = MOBILE_USE if pixels_of is None else qwen2_5_vl(pixels_of).mobile
        for x, y in ((0, 0), (1, 2), (540, 1199), (1079, 2399)):
            call = parse_line(f"click {x} {y}", tool, large, ends)
            found = parse_action(call, width_px=1080, height_px=2400, offered=tool, scale=ends)
            assert isinstance(found, actions.Click)
            assert max(abs(found.x - x) - 1080 / ends[0] / 2, abs(found.y - y) - 2400 / ends[1] / 2) <= 0.5


@pytest.mark.parametrize("tool", [MOBILE_USE, COMPUTER_USE, GUI_OWL.mobile, GUI_OWL.computer])
def test_the_help_shows_words_for_every_action_of_a_tool(tool: Tool) -> None:
    values = {
        "X": "1", "Y": "2", "TO_X": "3", "TO_Y": "4", "PIXELS": "5", '"TEXT"': "home", "KEY": "home", "...": "",
        "BUTTON": "Back", "SECONDS": "1", "success|failure": "success",
    }  # fmt: skip
    for name in action_names(tool):
        line = " ".join(values.get(word, word) for word in usage(name, tool).split())
        call = parse_line(line, tool, SCREEN, THOUSAND)
        assert json.loads(call.arguments)["action"] == name
        assert isinstance(
            parse_action(call, width_px=192, height_px=320, cursor=(1, 1), offered=tool), actions.Action | Finish
        ), line


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("press 3", "expected help, finish, or one of click, long_press"),
        ("click", "expected click X Y, on a screen of 192x320 pixels, got 'click'"),
        ("click 3", "expected click X Y"),
        ("click a b", "expected click X Y"),
        ("click 192 0", "expected click X Y"),
        ("click -1 0", "expected click X Y"),
        ("click 1 2 3", "expected click X Y"),
        ("click nan 3", "expected click X Y"),
        ("type", 'expected type "TEXT"'),
        ("type don't", "No closing quotation"),
        ('{"action": "click"', "expected JSON"),
    ],
)
def test_wrong_words_are_refused_with_what_was_expected(line: str, told: str) -> None:
    with pytest.raises(WrongWords) as refused:
        do(line, MOBILE_USE)
    assert told in str(refused.value)


def person(tmp_path: Path, *lines: str | None, said: list[str] | None = None) -> Person:
    typed = Lines()
    for line in lines:
        typed.put_nowait(line)
    return Person(
        renderer=RENDERER,
        tool=MOBILE_USE,
        reach=lambda _: THOUSAND,
        cursor=None,
        turn=2,
        screen_path=tmp_path / "screen.png",
        lines=typed,
        echo=(said if said is not None else []).append,
        max_model_len=10_000,
    )


def request() -> TurnRequest:
    asked = (Message(role="user", content=(TextPart(text="Do it."), SCREEN)),)
    return TurnRequest(
        prompt=RENDERER.render(asked, (MOBILE_USE,)),
        payload={},
        params=SamplingParams(max_tokens=48, temperature=1.0),
    )


async def test_a_person_is_asked_again_until_the_words_are_an_action_and_answers_in_the_models_tokens(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    wrong = (
        "",
        "jump",
        "swipe 1 2",
        "wait 3600",
        "wait inf",
        "back 3",
        '{"action": "fly"}',
        '{"click": 1}',
        "type <|im_end|>",
    )
    asked = person(tmp_path, *wrong, "think The switch is off.", "click 96 160", said=said)
    turn = request()

    sampled, adapter = await asked.sample_turn(turn)

    answer = RENDERER.parse(RENDERER.decode(sampled.tokens), (MOBILE_USE,))
    assert answer.reasoning == "The switch is off."
    (call,) = answer.tool_calls
    assert json.loads(call.arguments) == {"action": "click", "coordinate": [500, 500]}
    assert (sampled.tokens[-1], adapter) == (RENDERER.stop_token_ids[0], None)
    assert sampled.prompt_ids == tuple(turn.prompt.token_ids(RENDERER.image_token_id))
    assert (tmp_path / "screen.png").read_bytes() == SCREEN.data
    # the first line asks for help
    assert sum(line.startswith("not done: ") for line in said) == len(wrong) - 1
    assert (said[0], asked.said) == (f"turn 3: 192x320 pixels in {tmp_path / 'screen.png'}", said)


async def test_an_input_that_ends_before_the_rollout_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match="for turn 3, got the end of the input"):
        await person(tmp_path, "jump", None).sample_turn(request())


async def test_lines_come_as_they_are_typed_and_then_the_end() -> None:
    read, write = os.pipe()
    lines = read_lines(read)
    os.write(write, b"click 1 2\nty")
    async with asyncio.timeout(30):
        assert await lines.get() == "click 1 2\n"
        os.write(write, b'pe "tea"')
        os.close(write)
        assert [await lines.get(), await lines.get()] == ['type "tea"', None]
    os.close(read)
