"""Formats of open models (`agent.action_format`): clicks land, published answers are understood, others explained.

Names and forms are those that the publishers show: github.com/QwenLM/Qwen3-VL and Qwen2.5-VL
(`cookbooks/utils/agent_function_call.py`), github.com/X-PLUG/MobileAgent (`Mobile-Agent-v3.5`),
github.com/hcompai/surfer-h-cli (`skills/navigation_models.py`) and hub.hcompany.ai/agent-loop.
"""

import json
import random
from typing import Any, cast, get_args

import pytest

from cua_rl.agent.action_format import GUI_OWL, ScreenAnswer, ToolCalls, qwen2_5_vl
from cua_rl.agent.agent import AgentOutcome, AgentTask
from cua_rl.agent.gbox_agent import ActionFormat, GBoxAgent
from cua_rl.agent.holo import Holo
from cua_rl.agent.policy_time import RolloutClock
from cua_rl.agent.ui_tars import UiTars
from cua_rl.environments.device import ActionRejected, DeviceKind
from cua_rl.renderers.images import ImageSettings
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer, load_qwen3_vl
from cua_rl.rl.datums import build_datums
from cua_rl.run.rollout_config import FormatName
from cua_rl.run.rollouts import make_format
from cua_rl.types.actions import (
    Action,
    Button,
    Click,
    DoubleClick,
    Drag,
    Finish,
    MoveMouse,
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
from tests.renderers.model_folders import build_small_folder

AREA = 28 * 28
SETTINGS = ImageSettings(patch_size_px=14, merge_size=2, min_pixels=4 * AREA, max_pixels=1500 * AREA)
SCREENS = {  # how Qwen2.5-VL sees them: the nearest multiples of 28; the last is too large, so its area is scaled, too
    (1366, 768): (1372, 756),
    (401, 873): (392, 868),
    (1919, 517): (1932, 504),
    (333, 211): (336, 224),
    (2560, 1440): (1428, 812),  # 2560 / 1.7705 = 1445.9, 1440 / 1.7705 = 813.3
}
FORMATS: dict[str, ActionFormat] = {
    "qwen3_vl": ToolCalls(),
    "qwen2_5_vl": qwen2_5_vl(SETTINGS),
    "gui_owl": GUI_OWL,
    "ui_tars": UiTars(image_settings=SETTINGS),
    "holo1_5": Holo(pixels_of=SETTINGS),
    "holo3": Holo(),
}
IN_PIXELS = ("qwen2_5_vl", "ui_tars", "holo1_5")
SEEN = EncodedImage(data=b"", format="png", width_px=1366, height_px=768)


def call(name: str, **arguments: object) -> dict[str, Any]:
    written = json.dumps(arguments)
    return {
        "type": "function_call",
        "id": "f",
        "call_id": "c",
        "name": name,
        "arguments": written,
        "status": "completed",
    }


def click_at(name: str, kind: DeviceKind, x: int, y: int) -> dict[str, Any]:
    """A click as a model of the family writes it."""
    match name:
        case "ui_tars":
            return text(f"Thought: there\nAction: click(start_box='<|box_start|>({x},{y})<|box_end|>')")
        case "holo1_5":
            action = {"action": "click_element", "element": "it", "x": x, "y": y}
            return text(json.dumps({"thought": "there", "notes": "", "action": action}))
        case "holo3":
            tool = "click_desktop" if kind == "linux" else "click"
            called = {"tool_name": tool, "element": "it", "x": x, "y": y}
            return text(json.dumps({"note": None, "thought": "there", "tool_call": called}))
        case _ if kind == "android":
            return call("mobile_use", action="click", coordinate=[x, y])
        case _:
            return call("computer_use", action="left_click", coordinate=[x, y])


class Screen(FakeDevice):
    """A device with a screen of this size, on which clicks are counted."""

    def __init__(self, kind: DeviceKind, size: tuple[int, int]) -> None:
        super().__init__(kind)
        self._size = size

    async def observe(self) -> EncodedImage:
        return EncodedImage(data=b"screen", format="png", width_px=self._size[0], height_px=self._size[1])


def make_targets(size: tuple[int, int]) -> list[tuple[int, int, int, int]]:
    """A hundred places to click, as large as a small button: left, top, width, height."""
    draw = random.Random(f"{size}")
    sides = [(draw.randrange(8, 40), draw.randrange(8, 40)) for _ in range(100)]
    return [(draw.randrange(size[0] - wide), draw.randrange(size[1] - high), wide, high) for wide, high in sides]


async def clicks_inside(name: str, kind: DeviceKind, size: tuple[int, int], scale: tuple[int, int]) -> int:
    """How many of a hundred targets a model hits that aims at their middles, in coordinates up to `scale`."""
    targets, device = make_targets(size), Screen(kind, size)
    middles = [(left + wide / 2, top + high / 2) for left, top, wide, high in targets]
    answers = [[click_at(name, kind, round(x * scale[0] / size[0]), round(y * scale[1] / size[1]))] for x, y in middles]
    await work(ScriptedModel(*answers), device, max_turns=100, agent=GBoxAgent(action_format=FORMATS[name]))
    clicks = cast("list[Click]", device.actions)
    return sum(
        left <= click.x < left + wide and top <= click.y < top + high
        for click, (left, top, wide, high) in zip(clicks, targets, strict=False)
    )


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", ["android", "linux", "browser"])
@pytest.mark.parametrize("size", SCREENS)
async def test_a_click_on_each_of_a_hundred_targets_lands(name: str, kind: DeviceKind, size: tuple[int, int]) -> None:
    assert await clicks_inside(name, kind, size, SCREENS[size] if name in IN_PIXELS else (1000, 1000)) == 100


@pytest.mark.parametrize("name", FORMATS)
async def test_clicks_in_the_scale_of_another_format_miss(name: str) -> None:
    other = (1000, 1000) if name in IN_PIXELS else SCREENS[333, 211]
    assert await clicks_inside(name, "linux", (333, 211), other) < 50


def read(name: str, answer: dict[str, Any], kind: DeviceKind = "linux") -> object:
    response = {"status": "completed", "output": [answer]}
    return FORMATS[name].parse(ScreenAnswer(response=response, turn=1, kind=kind, seen=SEEN, cursor=(7, 8)))


def holo3(**called: object) -> dict[str, Any]:
    return text(json.dumps({"note": None, "thought": "t", "tool_call": called}))


def holo1_5(**action: object) -> dict[str, Any]:
    return text(json.dumps({"thought": "t", "notes": "", "action": action}))


@pytest.mark.parametrize(
    ("name", "answer", "kind", "expected"),
    [
        ("qwen2_5_vl", call("mobile_use", action="open", text="Mail"), "android", OpenApp(name="Mail")),
        (
            "qwen2_5_vl",
            call("mobile_use", action="key", text="volume_up"),
            "android",
            PressButton(button=Button.VOLUME_UP),
        ),
        ("qwen2_5_vl", call("mobile_use", action="key", text="KEYCODE_ENTER"), "android", PressKey(keys=("enter",))),
        # 686 * 1366 / 1372 and 378 * 768 / 756
        ("qwen2_5_vl", call("computer_use", action="left_click", coordinate=[686, 378]), "linux", Click(x=683, y=384)),
        (
            "qwen2_5_vl",
            call("mobile_use", action="swipe", coordinate=[0, 0], coordinate2=[1372, 756]),
            "android",
            Drag(x=0, y=0, to_x=1365, to_y=767),
        ),
        ("gui_owl", call("computer_use", action="hscroll", pixels=-30), "linux", Scroll(x=7, y=8, right_px=-30)),
        ("gui_owl", call("mobile_use", action="open", text="Mail"), "android", OpenApp(name="Mail")),
        ("holo3", holo3(tool_name="click_desktop", element="e", x=500, y=500), "linux", Click(x=683, y=384)),
        (
            "holo3",
            holo3(tool_name="click_desktop", element="e", x=500, y=500, button="right"),
            "linux",
            RightClick(x=683, y=384),
        ),
        ("holo3", holo3(tool_name="double_click", element="e", x=0, y=0), "browser", DoubleClick(x=0, y=0)),
        ("holo3", holo3(tool_name="move_to_desktop", element="e", x=0, y=1000), "linux", MoveMouse(x=0, y=767)),
        ("holo3", holo3(tool_name="write_desktop", content="a", press_enter=True), "linux", TypeText(text="a\n")),
        (
            "holo3",
            holo3(tool_name="scroll_desktop", element="e", x=0, y=0, direction="down"),
            "linux",
            Scroll(x=0, y=0, down_px=500),
        ),
        (
            "holo3",
            holo3(tool_name="scroll_desktop", element="e", x=0, y=0, direction="left", scroll_size=2),
            "linux",
            Scroll(x=0, y=0, right_px=-100),
        ),
        (
            "holo3",
            holo3(tool_name="drag_and_drop", description="d", x1=0, y1=0, x2=500, y2=500),
            "linux",
            Drag(x=0, y=0, to_x=683, to_y=384),
        ),
        ("holo3", holo3(tool_name="hotkey_desktop", keys=["ctrl", "s"]), "linux", PressKey(keys=("ctrl", "s"))),
        ("holo3", holo3(tool_name="wait_desktop", seconds=1.5), "linux", Wait(duration_s=1.5)),
        ("holo1_5", holo1_5(action="click_element", element="e", x=686, y=378), "browser", Click(x=683, y=384)),
        ("holo1_5", holo1_5(action="scroll", direction="up"), "browser", Scroll(x=7, y=8, down_px=-500)),
        ("holo1_5", holo1_5(action="go_back"), "browser", PressButton(button=Button.BACK)),
        ("holo1_5", holo1_5(action="wait"), "browser", Wait(duration_s=2.0)),
    ],
)
def test_published_actions_are_understood(
    name: str, answer: dict[str, Any], kind: DeviceKind, expected: Action
) -> None:
    assert read(name, answer, kind) == (expected,)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("holo3", holo3(tool_name="answer", content="42")),
        ("holo3", text('```json\n{"thought": "t", "tool_call": {"tool_name": "answer", "content": "42"}}\n```')),
        ("holo1_5", holo1_5(action="answer", content="42")),
        ("qwen2_5_vl", call("computer_use", action="answer", text="42")),
    ],
)
def test_an_answer_ends_the_rollout(name: str, answer: dict[str, Any]) -> None:
    assert read(name, answer) == Finish(success_claimed=True, answer="42")


def test_holos_writing_is_several_actions() -> None:
    written = holo3(tool_name="write_at_desktop", content="a", element="e", x=0, y=0, overwrite=True)
    expected = (Click(x=0, y=0), PressKey(keys=("ctrl", "a")), TypeText(text="a"))
    assert read("holo3", written) == expected
    assert read("holo1_5", holo1_5(action="write_element", content="a", element="e", x=0, y=0)) == (
        Click(x=0, y=0),
        TypeText(text="a"),
    )


@pytest.mark.parametrize(
    ("name", "answer", "kind", "says"),
    [
        ("qwen2_5_vl", text("I see it."), "tool_call_form", "one call of computer_use"),
        ("qwen2_5_vl", call("computer_use", action="middle_click", coordinate=[1, 2]), "tool_arguments", "left_click"),
        ("qwen2_5_vl", call("computer_use", action="left_click", coordinate=[1373, 2]), "tool_arguments", "x to 1372"),
        ("gui_owl", call("computer_use", action="interact", text="log in"), "tool_arguments", "'interact'"),
        ("gui_owl", call("computer_use", action="triple_click", coordinate=[1, 2]), "tool_arguments", "double_click"),
        ("gui_owl", call("phone_use", action="click"), "tool_name", "no tool 'phone_use'"),
        # what only other formats have
        ("qwen3_vl", call("computer_use", action="hscroll", pixels=1), "tool_arguments", "'hscroll'"),
        ("qwen3_vl", call("mobile_use", action="open", text="Mail"), "tool_arguments", "'open'"),
        ("holo3", text(""), "json", "one JSON object with note, thought and tool_call"),
        ("holo3", text("{" * 9000), "json", "one JSON object"),
        ("holo3", text('{"thought": "t", "tool_call": "click"}'), "json", "one JSON object"),
        ("holo3", holo3(tool_name="goto", url="http://a"), "tool_name", "no tool_name 'goto', only write_desktop"),
        ("holo3", holo3(tool_name=["click"]), "tool_name", "click_desktop"),
        ("holo3", holo3(tool_name="click_desktop", element="e", x=5), "tool_arguments", "needs y"),
        ("holo3", holo3(tool_name="click_desktop", element="e", x=5, y=1001), "tool_arguments", "from 0 to 1000"),
        ("holo3", holo3(tool_name="click_desktop", element="e", x="5", y=1), "tool_arguments", "two numbers"),
        ("holo3", holo3(tool_name="click_desktop", element="e", x=5, y=1, button="middle"), "tool_arguments", "middle"),
        ("holo3", holo3(tool_name="click_desktop", x=5, y=1, times=2), "tool_arguments", "no argument 'times'"),
        ("holo3", holo3(tool_name="scroll_desktop", x=5, y=1, direction="in"), "tool_arguments", "direction is 'in'"),
        ("holo3", holo3(tool_name="hotkey_desktop", keys="ctrl"), "tool_arguments", "a list of names"),
        ("holo3", holo3(tool_name="write_desktop", content=5), "tool_arguments", "text is 5"),
        (
            "holo3",
            holo3(tool_name="scroll_desktop", x=5, y=1, direction="up", scroll_size="many"),
            "tool_arguments",
            "pixels is 'many'",
        ),
        ("holo1_5", holo1_5(action="goto", url="http://a"), "tool_name", "only click_element"),
        ("holo1_5", holo1_5(action="click_element", element="e", x=1373, y=0), "tool_arguments", "x to 1372"),
    ],
)
def test_what_is_no_action_is_explained_to_the_model(name: str, answer: dict[str, Any], kind: str, says: str) -> None:
    failure = read(name, answer)
    assert isinstance(failure, ParseFailure)
    assert failure.kind == kind
    assert says in failure.message


def test_prompts_offer_the_actions_and_the_scale() -> None:
    (tool,) = FORMATS["qwen2_5_vl"].tools("linux", SEEN)
    assert "resolution is 1372x756" in str(tool["description"])
    (tool,) = GUI_OWL.tools("linux", SEEN)
    assert "from 0 to 1000" in str(tool["description"])
    assert "hscroll" in json.dumps(tool)
    phone = json.dumps(FORMATS["qwen2_5_vl"].tools("android", SEEN))
    assert '"key", "open"' in phone
    system = cast("Any", FORMATS["holo3"].opening("linux", "Save it.", "data:"))[0]["content"][0]["text"]
    assert "Task: Save it." in system
    schema = json.loads(system.split("```json\n")[1].split("\n```")[0])
    named = [one["properties"]["tool_name"]["const"] for one in schema["properties"]["tool_call"]["anyOf"]]
    assert {"click_desktop", "write_at_desktop", "drag_and_drop", "answer"} <= set(named)


async def test_holo_reads_the_output_of_its_call_before_the_next_screen() -> None:
    device = FakeDevice("linux", reject="A desktop has no such button.")
    model = ScriptedModel(
        [holo3(tool_name="click_desktop", element="e", x=500, y=500)],
        [holo3(tool_name="fly")],
        [holo3(tool_name="answer", content="done")],
    )

    outcome, turns = await work(model, device, agent=GBoxAgent(action_format=Holo()))

    assert outcome == AgentOutcome(stop_reason=StopReason.FINISHED, num_turns=3, answer="done", success_claimed=True)
    assert device.actions == [Click(x=100, y=200)]
    _, screen, _, after, _, error = model.requests[2]["input"]
    assert [part.get("text") for part in screen["content"]] == ["<observation>\n", None, "\n</observation>"]
    assert [part.get("text") for part in after["content"]] == [
        '<tool_output tool="click_desktop">\n\n</tool_output><observation>\n',
        None,
        "\n</observation>",
    ]
    assert error["content"][0]["text"].startswith('<tool_output tool="fly">\nYour answer could not be understood')
    assert turns[1].action_error is not None


async def test_a_refused_part_of_an_answer_shows_what_the_others_did() -> None:
    class NoKeys(FakeDevice):
        async def execute(self, action: Action) -> None:
            if isinstance(action, PressKey):
                raise ActionRejected("there is no key 'ctrl'")
            await super().execute(action)

    written = holo3(tool_name="write_at", content="a", element="e", x=500, y=500, overwrite=True)
    model = ScriptedModel([written], [holo3(tool_name="answer", content="")])

    _, turns = await work(model, NoKeys("android"), agent=GBoxAgent(action_format=Holo()))

    assert turns[0].actions == (Click(x=100, y=200), PressKey(keys=("ctrl", "a")))
    assert turns[0].action_error == "there is no key 'ctrl'"
    assert turns[0].after is not None
    assert "no key 'ctrl'" in model.requests[1]["input"][-1]["content"][0]["text"]


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Qwen3VLRenderer:
    return load_qwen3_vl(build_small_folder(tmp_path_factory.mktemp("model")))


async def test_each_name_is_a_format_and_pixels_are_those_that_the_model_sees(renderer: Qwen3VLRenderer) -> None:
    async with open_gateway(renderer, []) as gateway:
        settings = gateway.image_settings
    formats = {name: make_format(name, settings) for name in get_args(FormatName)}

    assert formats == {
        "qwen3_vl": ToolCalls(),
        "qwen2_5_vl": qwen2_5_vl(settings),
        "gui_owl": GUI_OWL,
        "ui_tars": UiTars(image_settings=settings),
        "holo1_5": Holo(pixels_of=settings),
        "holo3": Holo(),
    }
    assert set(formats) == set(FORMATS)


@pytest.mark.parametrize(
    ("action_format", "answers"),
    [
        (
            GUI_OWL,
            [
                'Action: Open it.\n<tool_call>\n{"name": "mobile_use", "arguments": {"action": "open", "text": "M"}}\n'
                "</tool_call>",
                "Action: none",
                '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "answer", "text": "ok"}}\n</tool_call>',
            ],
        ),
        (
            Holo(),
            [
                '{"note": "n", "thought": "t", "tool_call": {"tool_name": "click",  "element": "e", "x": 5, "y": 5}}',
                '{"note": null, "thought": ',
                '{"thought": "t", "tool_call": {"tool_name": "answer", "content": "ok"}}',
            ],
        ),
    ],
)
async def test_a_rollout_is_trained_on_the_tokens_that_were_sampled(
    renderer: Qwen3VLRenderer, action_format: ActionFormat, answers: list[str]
) -> None:
    turns: list[AgentTurn] = []

    async def keep(turn: AgentTurn) -> None:
        turns.append(turn)

    async with open_gateway(renderer, answers) as gateway:
        gateway.open_rollout("r")
        task = AgentTask(rollout_id="r", instruction="Tap.", max_turns=5)
        agent = GBoxAgent(action_format=action_format)
        outcome = await agent.run(task, Screens(), gateway, clock=RolloutClock(), on_turn=keep)
        played = gateway.close_rollout("r")
        assert gateway.prompt_mismatches == 0

    assert outcome.answer == "ok"
    assert [turn.action_error is not None for turn in turns] == [False, True, False]
    assert [renderer.decode(turn.sampled_tokens[:-1]) for turn in played] == answers
    datums = build_datums(rollout(*played), 1.0, renderer.image_token_id).datums
    assert len(datums) == 1  # each prompt extends the one before
    assert_trained_in_context(datums, played, renderer.image_token_id)
