"""UI-TARS' action format: published forms of actions, what is refused, and a rollout through the real gateway.

The forms are those of github.com/bytedance/UI-TARS: `README_coordinates.md`, `codes/ui_tars/prompt.py` and
`action_parser.py`, `data/training_example.json`.
"""

import pytest

from cua_rl.agent.action_format import ScreenAnswer
from cua_rl.agent.agent import AgentOutcome, AgentTask
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.agent.ui_tars import UiTars
from cua_rl.renderers.images import ImageSettings, smart_resize
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen2_5_vl
from cua_rl.rl.datums import build_datums
from cua_rl.types.actions import (
    Action,
    Button,
    Click,
    DoubleClick,
    Drag,
    Finish,
    LongPress,
    OpenApp,
    PressButton,
    PressKey,
    RightClick,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.types.conversation import EncodedImage, ParseFailure
from cua_rl.types.rollout import AgentTurn, StopReason
from tests.agent.test_gbox_agent import FakeDevice, ScriptedModel, text, work
from tests.agent.test_history_data import Screens, assert_trained_in_context, open_gateway
from tests.builders import rollout
from tests.renderers.model_folders import build_qwen2_5_folder, build_small_folder

SETTINGS = ImageSettings(patch_size_px=14, merge_size=2, min_pixels=100 * 28 * 28, max_pixels=16384 * 28 * 28)
UI_TARS = UiTars(image_settings=SETTINGS)
# the nearest multiples of 28: the model sees 1932 x 1092
SEEN = EncodedImage(data=b"", format="png", width_px=1920, height_px=1080)


def parse_answer(answer: str) -> Action | Finish | ParseFailure:
    response = {"status": "completed", "output": [text(answer)]}
    parsed = UI_TARS.parse(ScreenAnswer(response=response, turn=1, kind="linux", seen=SEEN))
    return parsed[0] if isinstance(parsed, tuple) else parsed


def parse(call: str) -> Action | Finish | ParseFailure:
    return parse_answer(f"Thought: I see it.\nAction: {call}")


@pytest.mark.parametrize(
    "box",
    [
        "<|box_start|>(966,546)<|box_end|>",
        "<|box_start|>(966, 546)<|box_end|>",
        "(966,546)",
        "966,546",
        "[960, 540, 972, 552]",
        "<|box_start|>(960,540,972,552)<|box_end|>",
        "<point>966 546</point>",
        "<bbox>960 540 972 552</bbox>",
        "(966.0, 546.0)",
    ],
)
def test_a_point_or_box_of_any_form_is_a_pixel_of_the_screenshot(box: str) -> None:
    assert smart_resize(1920, 1080, SETTINGS) == (1932, 1092)
    assert parse(f"click(start_box='{box}')") == Click(x=960, y=540)  # 966 * 1920 / 1932, 546 * 1080 / 1092


@pytest.mark.parametrize(
    ("call", "action"),
    [
        ("click(point='<point>0 0</point>')", Click(x=0, y=0)),
        ("click(start_box='(1932,1092)')", Click(x=1919, y=1079)),
        ('click(start_box="(966,546)")', Click(x=960, y=540)),
        ("left_double(start_box='(966,546)')", DoubleClick(x=960, y=540)),
        ("right_single(start_box='(966,546)')", RightClick(x=960, y=540)),
        ("long_press(start_box='(966,546)', time='')", LongPress(x=960, y=540)),
        ("drag(start_box='(0,0)', end_box='(966,546)')", Drag(x=0, y=0, to_x=960, to_y=540)),
        (
            "drag(start_point='<point>0 0</point>', end_point='<point>966 546</point>')",
            Drag(x=0, y=0, to_x=960, to_y=540),
        ),
        ("scroll(start_box='(966,546)', direction='down')", Scroll(x=960, y=540, down_px=540)),
        ("scroll(direction='up')", Scroll(x=960, y=540, down_px=-540)),
        ("scroll(start_box='(966,546)', direction='left')", Scroll(x=960, y=540, right_px=-960)),
        ("hotkey(key='ctrl c')", PressKey(keys=("ctrl", "c"))),
        ("type(content='hello')", TypeText(text="hello")),
        (r"type(content='search\n')", TypeText(text="search\n")),
        ("type(content='two\nlines')", TypeText(text="two\nlines")),
        (r"type(content='it\'s')", TypeText(text="it's")),
        ("type(content='it's \"quoted\"')", TypeText(text='it\'s "quoted"')),
        (r"type(content='C:\\new')", TypeText(text=r"C:\new")),
        ("type(content='f(x), (y)')", TypeText(text="f(x), (y)")),
        ("type(content='')", TypeText(text="")),
        ("open_app(app_name='Settings')", OpenApp(name="Settings")),
        ("press_home()", PressButton(button=Button.HOME)),
        ("press_back()", PressButton(button=Button.BACK)),
        ("wait()", Wait(duration_s=5.0)),
        ("finished()", Finish(success_claimed=True)),
        ("finished(content='42')", Finish(success_claimed=True, answer="42")),
        ("call_user()", Finish(success_claimed=False)),
    ],
)
def test_published_actions_are_understood(call: str, action: Action | Finish) -> None:
    assert parse(call) == action


def test_the_last_action_counts_as_a_thought_may_quote_an_earlier_one() -> None:
    answer = "Thought: I wrote\nAction: wait()\nwhich was right.\nAction: press_back()"
    assert parse_answer(answer) == PressButton(button=Button.BACK)


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        ("", "tool_call_form", "expected one call"),
        ("Thought: nothing to do", "tool_call_form", "expected one call"),
        ("Thought: ...\nAction: click", "tool_call_form", "'click'"),
        ("Action: click(start_box='(1,2)'", "tool_call_form", "expected one call"),
        ("Action: shutdown(now='yes')", "tool_name", "no action 'shutdown'"),
        ("Action: __import__('os')", "tool_name", "no action '__import__'"),
        ("Action: click()", "tool_arguments", "it needs start_box"),
        ("Action: click(1, 2)", "tool_arguments", "expected arguments"),
        ("Action: click(start_box='(1)')", "tool_arguments", "not a point"),
        ("Action: click(start_box='(1,2,3)')", "tool_arguments", "not a point"),
        ("Action: click(start_box='(nan,inf)')", "tool_arguments", "not a point"),
        ("Action: click(start_box='(-1,2)')", "tool_arguments", "not a point"),
        (f"Action: click(start_box='({'9' * 5000},2)')", "tool_arguments", "not a point"),
        ("Action: click(start_box='(1933,2)')", "tool_arguments", "1932 x 1092 pixels"),
        ("Action: drag(start_box='(1,2)')", "tool_arguments", "it needs end_box"),
        ("Action: scroll(start_box='(1,2)', direction='in')", "tool_arguments", "direction is 'in'"),
        ("Action: hotkey(key=' ')", "tool_arguments", "key is empty"),
        (f"Action: type(content='{'a' * 2001}')", "tool_arguments", "2001 characters"),
        ("Action: click(start_box='(1,2)')\n\nclick(start_box='(3,4)')", "tool_arguments", "not a point"),
    ],
)
def test_what_is_no_action_is_the_models_fault(answer: str, kind: str, words: str) -> None:
    parsed = parse_answer(answer)
    assert isinstance(parsed, ParseFailure)
    assert parsed.kind == kind
    assert words in parsed.message
    assert len(parsed.message) < 800


async def test_the_conversation_is_the_published_one_without_tools() -> None:
    model = ScriptedModel(
        [text("Thought: a\nAction: press_home()")], [text("Action: fly()")], [text("Action: finished()")]
    )
    device = FakeDevice()

    outcome, turns = await work(model, device, agent=GBoxAgent(action_format=UI_TARS))

    assert outcome == AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=3, success_claimed=True)
    assert device.actions == [PressButton(button=Button.HOME)]
    assert [turn.action_error is not None for turn in turns] == [False, True, False]
    task, screen, answer, after, _, error = model.requests[2]["input"]
    assert model.requests[2]["tools"] == []
    assert task["content"][0]["text"].startswith("You are a GUI agent.")
    assert task["content"][0]["text"].endswith("## User Instruction\nOpen Mail")
    assert "press_home()" in task["content"][0]["text"]
    assert [part["type"] for one in (screen, after) for part in one["content"]] == ["input_image"] * 2
    assert (task["role"], screen["role"], after["role"]) == ("user",) * 3
    assert answer["content"][0]["text"] == "Thought: a\nAction: press_home()"
    assert "no action 'fly'" in error["content"][0]["text"]


@pytest.fixture(scope="module")
def qwen2_5(tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLRenderer:
    folder = tmp_path_factory.mktemp("models")
    return load_qwen2_5_vl(build_qwen2_5_folder(build_small_folder(folder / "small"), folder / "ui_tars"))


async def test_a_rollout_is_trained_on_the_tokens_that_were_sampled(qwen2_5: Qwen3VLRenderer) -> None:
    assert qwen2_5.image_settings is not None
    answers = [
        "Thought: tap\nAction: click(start_box='<|box_start|>(28, 28)<|box_end|>')",
        "Thought: no such\nAction:  fly( )",
        r"Action: finished(content='it\'s done')",
    ]
    turns: list[AgentTurn] = []

    async def keep(turn: AgentTurn) -> None:
        turns.append(turn)

    async with open_gateway(qwen2_5, answers) as gateway:
        gateway.open_rollout("r")
        agent = GBoxAgent(action_format=UiTars(image_settings=gateway.image_settings))
        task = AgentTask(rollout_id="r", instruction="Tap.", max_turns=5)
        outcome = await agent.run(task, Screens(), gateway, clock=RolloutClock(), on_turn=keep)
        played = gateway.close_rollout("r")
        assert gateway.prompt_mismatches == 0

    assert outcome.answer == "it's done"
    assert turns[0].action == Click(x=32, y=32)  # the screen of 64 x 96 is seen as 56 x 84: 28 * 64 / 56, 28 * 96 / 84
    assert [qwen2_5.decode(turn.sampled_tokens[:-1]) for turn in played] == answers
    assert qwen2_5.decode(played[0].prompt.token_ids(qwen2_5.image_token_id)).startswith(
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nYou are a GUI agent."
    )
    datums = build_datums(rollout(*played), 1.0, qwen2_5.image_token_id).datums
    assert len(datums) == 1  # each prompt extends the one before
    assert_trained_in_context(datums, played, qwen2_5.image_token_id)
