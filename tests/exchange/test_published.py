"""Files in the shapes that publishers ship, and actions by the providers' own libraries."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from cua_rl.environments.device import DeviceKind
from cua_rl.exchange.foreign_actions import ForeignAction, NoCounterpart, UnknownAction, View, tool_arguments
from cua_rl.exchange.formats import Told, read_trajectories
from cua_rl.exchange.replayed import Replayed, replay
from cua_rl.types.actions import (
    Button,
    Click,
    Drag,
    LongPress,
    MoveMouse,
    PressButton,
    PressKey,
    Scroll,
    TypeText,
    Wait,
)
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError
from tests.exchange.files import ANDROID, BROWSER, HEIGHT_PX, LINUX, RENDERER, WIDTH_PX, actions_of, draw
from tests.exchange.published import (
    adp_of_a_phone,
    android_control_record,
    anthropic_log,
    atif_of_a_phone,
    gemini_log,
    openai_log,
    shot,
)


async def imported(folder: Path, value: object, told: Told | None = None) -> Replayed:
    """The only trajectory of a file."""
    path = folder / "published.json"
    path.write_text(json.dumps(value))
    (parse,) = read_trajectories(path, told)
    return await replay(parse(), RENDERER, step=1, index=0, started_at=0.0)


async def test_a_responses_log_of_openai(tmp_path: Path) -> None:
    log = openai_log(
        {"type": "screenshot"},
        {"type": "click", "button": "left", "x": 96, "y": 160, "keys": None},
        {"type": "scroll", "x": 96, "y": 160, "scroll_x": 0, "scroll_y": 300},
        {"type": "drag", "path": [{"x": 10, "y": 20}, {"x": 60, "y": 120}, {"x": 110, "y": 220}]},
        {"type": "keypress", "keys": ["CTRL", "A"]},
        {"type": "wait"},
    )
    expected = [
        Click(x=96, y=160),
        Scroll(x=96, y=160, down_px=300),
        MoveMouse(x=10, y=20),
        Drag(x=10, y=20, to_x=110, to_y=220),
        PressKey(keys=("ctrl", "a")),
        Wait(duration_s=1.0),
        None,  # the model's last words end the task
    ]
    made = await imported(tmp_path, log)  # the tool says that it is a browser
    assert actions_of(made) == expected
    assert actions_of(await imported(tmp_path, log["input"], BROWSER)) == expected  # the items alone
    rollout = made.record.rollout
    assert [turn.agent.before.data for turn in rollout.turns if turn.agent.before] == [
        draw(place) for place in (0, 1, 2, 2, 3, 4, 5)
    ]
    assert rollout.turns[0].model.text.startswith("<think>\nWhy 1\n</think>")
    assert made.record.task.instruction == "Buy tea."


@pytest.mark.parametrize("role", ["system", "developer"])
async def test_rules_that_a_model_was_given_are_not_taught_as_its_reasoning(role: str, tmp_path: Path) -> None:
    log = openai_log({"type": "screenshot"}, {"type": "click", "button": "left", "x": 96, "y": 160})
    log["input"] = [item for item in log["input"] if item.get("type") != "reasoning"]
    log["input"].insert(0, {"role": role, "content": "Never buy coffee."})
    rollout = (await imported(tmp_path, log)).record.rollout
    assert "coffee" not in rollout.turns[0].model.text
    assert rollout.turns[0].agent.action == Click(x=96, y=160)


async def test_a_messages_log_of_anthropic(tmp_path: Path) -> None:
    log = anthropic_log(
        {"action": "screenshot"},
        {"action": "zoom", "region": [0, 0, 20, 20]},  # its image is a part of the screen, not the next screen
        {"action": "mouse_move", "coordinate": [96, 160]},
        {"action": "left_click"},  # where the mouse is
        {"action": "scroll", "coordinate": [96, 160], "scroll_direction": "down", "scroll_amount": 3},
        {"action": "key", "text": "ctrl+s"},
        {"action": "key", "text": "Down Down"},  # xdotool presses one after the other
        {"action": "left_click_drag", "start_coordinate": [10, 20], "coordinate": [110, 220]},
        {"action": "wait", "duration": 2},
        {"action": "triple_click", "coordinate": [96, 160]},  # our tools have none
        {"action": "left_click", "coordinate": [1, 1]},
    )
    made = await imported(tmp_path, log, LINUX)
    assert actions_of(made) == [
        MoveMouse(x=96, y=160),
        Click(x=96, y=160),
        Scroll(x=96, y=160, down_px=300),
        PressKey(keys=("ctrl", "s")),
        PressKey(keys=("down",)),
        PressKey(keys=("down",)),
        MoveMouse(x=10, y=20),
        Drag(x=10, y=20, to_x=110, to_y=220),
        Wait(duration_s=2.0),
    ]
    assert made.ends_before == "triple_click"
    rollout = made.record.rollout
    assert rollout.turns[0].agent.before is not None
    assert rollout.turns[0].agent.before.data == draw(0)
    assert rollout.turns[-1].agent.after is not None  # the screen on which the missing action was done
    assert rollout.turns[-1].agent.after.data == draw(8)
    assert made.record.task.tags == ("imported", "incomplete")


async def test_contents_of_gemini(tmp_path: Path) -> None:
    log = gemini_log(
        ("open_web_browser", {}),
        ("navigate", {"url": "http://a/"}),
        ("click_at", {"x": 500, "y": 250}),
        ("type_text_at", {"x": 500, "y": 250, "text": "tea", "press_enter": True, "clear_before_typing": False}),
        ("scroll_at", {"x": 500, "y": 500, "direction": "down", "magnitude": 400}),
        ("scroll_document", {"direction": "up"}),
        ("key_combination", {"keys": "control+a"}),
        ("drag_and_drop", {"x": 100, "y": 200, "destination_x": 500, "destination_y": 600}),
        ("hover_at", {"x": 500, "y": 500}),
        ("wait_5_seconds", {}),
        ("go_back", {}),
        ("search", {}),
    )
    made = await imported(tmp_path, log, BROWSER)
    # thousandths of a screen of 192 x 320 px
    assert actions_of(made) == [
        Click(x=96, y=80),
        Click(x=96, y=80),
        TypeText(text="tea"),
        PressKey(keys=("enter",)),
        Scroll(x=96, y=160, down_px=128),
        PressKey(keys=("pageup",)),
        PressKey(keys=("ctrl", "a")),
        MoveMouse(x=19, y=64),
        Drag(x=19, y=64, to_x=96, to_y=192),
        MoveMouse(x=96, y=160),
        Wait(duration_s=5.0),
        PressKey(keys=("alt", "left")),
    ]
    assert made.ends_before == "search"
    camel = json.loads(json.dumps(log).replace("function_call", "functionCall").replace("inline_data", "inlineData"))
    camel = json.loads(json.dumps(camel).replace("function_response", "functionResponse"))  # of its REST interface
    assert actions_of(await imported(tmp_path, camel, BROWSER)) == actions_of(made)


PHONE_STEPS: list[dict[str, Any]] = [
    {"function": "open_app", "kwargs": {"app_name": "Shop"}},
    {"function": "wait", "kwargs": {}},
    {"function": "click", "kwargs": {"x": 96, "y": 160}},
    {"function": "input_text", "kwargs": {"text": "tea"}},
    {"function": "scroll", "kwargs": {"direction": "down"}},
    {"function": "back", "kwargs": {}},
    {"function": "navigate_home", "kwargs": {}},
]
PHONE_ACTIONS = [
    Wait(duration_s=1.0),
    Click(x=96, y=160),
    TypeText(text="tea"),
    Drag(x=96, y=256, to_x=96, to_y=64),  # 60 % of the screen, upwards
    PressButton(button=Button.BACK),
    PressButton(button=Button.HOME),
    None,
]


@pytest.mark.parametrize("write", [adp_of_a_phone, atif_of_a_phone])
async def test_phones_in_the_agent_data_protocol(write: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    made = await imported(tmp_path, write(*PHONE_STEPS), ANDROID)
    assert actions_of(made) == PHONE_ACTIONS
    assert made.record.task.instruction == "Buy tea."
    assert made.record.rollout.turns[0].model.text.startswith("<think>\nWhy 1\n</think>")
    for told in (None, Told(device=None)):
        with pytest.raises(
            ConfigError, match=r"device: expected the kind of device .* set device=android, device=linux"
        ):
            await imported(tmp_path, write(*PHONE_STEPS), told)


async def test_android_in_the_wild_in_the_agent_data_protocol(tmp_path: Path) -> None:
    def touch(x0: float, y0: float, x1: float, y1: float) -> dict[str, Any]:
        return {"function": "touch_and_lift", "kwargs": {"x0": x0, "y0": y0, "x1": x1, "y1": y1}}

    log = adp_of_a_phone(
        touch(0.5, 0.25, 0.5, 0.25),
        touch(0.5, 0.75, 0.5, 0.25),
        {"function": "type", "kwargs": {"text": "tea"}},
        {"function": "press", "kwargs": {"key_name": "go_back"}},
        {"function": "end", "kwargs": {"succeeds": False}},
    )
    made = await imported(tmp_path, log, ANDROID)
    assert actions_of(made) == [
        Click(x=96, y=80),
        Drag(x=96, y=240, to_x=96, to_y=80),
        TypeText(text="tea"),
        PressButton(button=Button.BACK),
        None,
    ]
    assert '"status": "failure"' in made.record.rollout.turns[-1].model.text


async def test_a_record_of_android_control(tmp_path: Path) -> None:
    record = android_control_record(
        {"action_type": "open_app", "app_name": "Shop"},
        {"action_type": "type", "text": "tea", "x": 96, "y": 160},  # clicks, types and presses enter, says its README
        {"action_type": "long_press", "x": 96, "y": 160},
        {"action_type": "open_app", "app_name": "Clock"},
        {"action_type": "click", "x": 1, "y": 1},
    )
    made = await imported(tmp_path, record)
    assert actions_of(made) == [
        Click(x=96, y=160),
        TypeText(text="tea"),
        PressKey(keys=("enter",)),
        LongPress(x=96, y=160),
    ]
    assert made.ends_before == "open_app"
    with pytest.raises(ConfigError, match="got browser for a file of android"):
        await imported(tmp_path, record, BROWSER)


@pytest.mark.parametrize("told", [None, Told(display=(384, 640), device="browser")])
async def test_coordinates_in_pixels_of_another_display(told: Told | None, tmp_path: Path) -> None:
    # twice the size of the screenshot
    actions = [
        {"type": "screenshot"},
        {"type": "click", "button": "left", "x": 192, "y": 320},
        {"type": "scroll", "x": 192, "y": 320, "scroll_x": 0, "scroll_y": 300},
    ]
    log = openai_log(*actions, display=(384, 640) if told is None else (WIDTH_PX, HEIGHT_PX))
    assert actions_of(await imported(tmp_path, log, told)) == [
        Click(x=96, y=160),
        Scroll(x=96, y=160, down_px=150),
        None,
    ]


def test_every_action_and_field_of_the_providers_libraries_is_known() -> None:
    from openai.types.responses import computer_action, response_computer_tool_call

    beta = pytest.importorskip("anthropic.types.beta", reason="`make setup` installs vllm, which needs it")
    unions: list[object] = [computer_action.ComputerAction, response_computer_tool_call.Action]
    models = [model for union in unions for model in get_args(get_args(union)[0])]
    told = [(str(get_args(model.model_fields["type"].annotation)[0]), set(model.model_fields)) for model in models]
    names = beta.beta_computer_member_name.BETA_COMPUTER_MEMBER_NAME_VALUES
    without = {"right_click": "left_click", "middle_click": "left_click"}  # share a model
    for name in names:
        title = "".join(word.title() for word in str(without.get(name, name)).split("_"))
        told.append((name, set(getattr(beta, f"BetaComputer{title}Input").model_fields)))
    assert len(told) == 18 + 17

    point, keys = {"x": 10, "y": 20}, {"keys": ["SHIFT"], "text": "ctrl", "repeat": 2}
    samples = {**point, **keys, "button": "left", "path": [point, {"x": 90, "y": 80}], "scroll_x": 0, "scroll_y": 100}
    samples |= {"coordinate": [10, 20], "start_coordinate": [30, 40], "scroll_amount": 3, "scroll_direction": "up"}
    samples |= {"duration": 2, "region": [0, 0, 10, 10]}
    screen = EncodedImage(data=b"", format="png", width_px=1000, height_px=500)
    for name, fields in told:
        given = {field: samples[field] for field in fields - {"type"}}
        with suppress(NoCounterpart):  # such as a click while a key is held
            tool_arguments(ForeignAction(name=name, given=given), View(screen=screen, kind="linux"))
        plain = {field: value for field, value in given.items() if field not in ("keys", "text")}
        if name not in ("key", "keypress", "type", "hold_key"):
            with suppress(NoCounterpart):
                tool_arguments(ForeignAction(name=name, given=plain), View(screen=screen, kind="linux", cursor=[1, 2]))


async def test_steps_of_an_unknown_kind_are_refused_not_passed_over(tmp_path: Path) -> None:
    openai = openai_log({"type": "screenshot"}, {"type": "wait"})
    openai["input"].insert(3, {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}})
    anthropic = anthropic_log({"action": "screenshot"}, {"action": "wait", "duration": 1})
    anthropic["messages"][3]["content"].insert(0, {"type": "server_tool_use", "id": "s", "name": "a", "input": {}})
    adp = adp_of_a_phone({"function": "wait", "kwargs": {}})
    adp["content"].insert(2, {"class_": "tool_action", "name": "tap"})
    for log, told, named in (
        (openai, None, "local_shell_call"),
        (anthropic, LINUX, "server_tool_use"),
        (adp, ANDROID, "tool_action"),
    ):
        with pytest.raises(ConfigError, match=named):
            await imported(tmp_path, log, told)


@pytest.mark.parametrize(
    ("kind", "given", "complaint"),
    [
        ("linux", {"action": "left_click", "coordinate": [1, 2], "buton": "right"}, "left_click, unlike buton"),
        ("linux", {"action": "scroll", "scroll_direction": "down", "scrol_amount": 3}, "unlike scrol_amount"),
        ("linux", {"action": "type", "text": "a", "delay_ms": 3, "enter": True}, "unlike delay_ms, enter"),
        ("linux", {"action": "click", "x": 1, "y": 2, "type": "double"}, "unlike type"),
        ("android", {"action": "terminate", "status": "sucess"}, "expected success or failure"),
        ("linux", {"action": "keypress", "keys": "Down Down"}, "joined by"),
        ("linux", {"action": "scroll", "scroll_direction": "down", "scroll_amount": -3}, "0 or more"),
        ("linux", {"action": "drag", "path": [{"x": 1, "y": 2}]}, "two points"),
    ],
)
def test_what_is_not_known_of_an_action_is_refused(kind: DeviceKind, given: dict[str, Any], complaint: str) -> None:
    screen = EncodedImage(data=b"", format="png", width_px=1000, height_px=500)
    with pytest.raises(UnknownAction, match=complaint) as refused:
        tool_arguments(ForeignAction(name="computer", given=given), View(screen=screen, kind=kind))
    assert not isinstance(refused.value, NoCounterpart)
    assert "correct" not in str(refused.value)  # a published file is not the reader's to correct


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("linux", {"action": "left_click", "coordinate": [1, 2], "text": "ctrl"}),
        ("linux", {"type": "click", "x": 1, "y": 2, "button": "left", "keys": ["SHIFT"]}),
        ("linux", {"type": "click", "x": 1, "y": 2, "button": "wheel"}),
        ("linux", {"action": "scroll", "scroll_direction": "right", "scroll_amount": 3}),
        ("linux", {"action": "scroll", "scroll_direction": "up", "scroll_amount": 3, "text": "ctrl"}),
        ("linux", {"action": "hold_key", "text": "shift", "duration": 2}),
        ("linux", {"action": "left_mouse_down"}),
        ("linux", {"action": "key", "text": "XF86AudioPlay"}),
        ("linux", {"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 400, "y": 30}, {"x": 1, "y": 60}]}),
        ("linux", {"type": "drag", "path": [{"x": 1, "y": 2}, {"x": 400, "y": 30}, {"x": 1, "y": 2}]}),
        ("linux", {"action": "wait", "duration": 90}),
        ("browser", {"action": "goto", "url": "http://a/"}),
        ("android", {"action": "left_click_drag", "start_coordinate": [1, 2], "coordinate": [3, 4], "text": "shift"}),
        ("android", {"action": "scroll", "scroll_direction": "down", "scroll_amount": 5}),  # 500 px of 500
    ],
)
def test_what_our_tools_lack_ends_the_rollout(kind: DeviceKind, given: dict[str, Any]) -> None:
    screen = EncodedImage(data=b"", format="png", width_px=1000, height_px=500)
    with pytest.raises(NoCounterpart):
        tool_arguments(ForeignAction(name="computer", given=given), View(screen=screen, kind=kind))


def test_a_swipe_near_the_edge_scrolls_as_far_as_one_in_the_middle() -> None:
    screen = EncodedImage(data=b"", format="png", width_px=1000, height_px=1000)
    for y in (10, 500, 990):
        given = {"direction": "down", "x": 500, "y": y}
        (call,) = tool_arguments(ForeignAction(name="scroll", given=given), View(screen=screen, kind="android"))
        start, end = cast("list[list[int]]", [call["coordinate"], call["coordinate2"]])
        assert start[1] - end[1] == 600
        assert 50 <= end[1] < start[1] <= 950


def shown(n: int) -> dict[str, str]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{shot(n)}"}


def screens_of(made: Replayed) -> list[bytes]:
    return [turn.agent.before.data for turn in made.record.rollout.turns]


async def test_a_screenshot_that_a_function_of_openai_returns_is_what_the_next_action_sees(tmp_path: Path) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "input_text", "text": "Buy tea."}, shown(0)]}]
    for n in (1, 2):
        arguments = json.dumps({"x": 10 * n, "y": 10})
        items.append({"type": "function_call", "call_id": f"c{n}", "name": "click", "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": f"c{n}", "output": [shown(n)]})

    made = await imported(tmp_path, items, BROWSER)

    assert screens_of(made) == [draw(0), draw(1), draw(2)]


def gemini_results(result: dict[str, Any]) -> dict[str, Any]:
    """Two clicks, of which the first returns this."""
    log = gemini_log(("open_web_browser", {}), ("click_at", {"x": 5, "y": 5}), ("click_at", {"x": 9, "y": 9}))
    log["contents"][4]["parts"][0]["function_response"] = {"name": "click_at", "response": {}} | result
    return log


def anthropic_results(*parts: dict[str, Any]) -> dict[str, Any]:
    """Two clicks, of which the first returns this."""
    click = {"action": "left_click", "coordinate": [5, 5]}
    log = anthropic_log({"action": "screenshot"}, click, click)
    log["messages"][4]["content"][0]["content"] = list(parts)
    return log


CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "computer", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("log", "told", "message"),
    [
        (gemini_results({}), BROWSER, "expected a screenshot before action 2 of .*, got 'click_at'"),
        (
            gemini_results({"parts": [{"file_data": {"file_uri": "gs://a/1.png"}}]}),
            BROWSER,
            "a picture outside the file",
        ),
        (anthropic_results({"type": "text", "text": "Clicked."}), LINUX, "a screenshot before action 2 of .*, got"),
        (anthropic_results({"type": "image_url", "image_url": {"url": "a.png"}}), LINUX, "of type 'image_url'"),
        (
            {"messages": [{"role": "assistant", "content": "I click.", "tool_calls": [CHAT_CALL]}]},
            LINUX,
            "Chat Completions",
        ),
        ([{"type": "human", "content": "Buy tea."}], LINUX, "items of type 'human', which are not read"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, LINUX, "'input_file'"),
    ],
)
async def test_what_may_hide_the_screen_of_the_next_action_is_refused(
    tmp_path: Path, log: object, told: Told, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await imported(tmp_path, log, told)


async def test_a_conversation_whose_last_result_has_no_screenshot_ends_with_its_last_action(tmp_path: Path) -> None:
    log = anthropic_results({"type": "text", "text": "Clicked."})
    del log["messages"][5:7]  # the second click

    assert [type(action) for action in actions_of(await imported(tmp_path, log, LINUX))] == [Click]


@pytest.mark.parametrize("told", ["False", "True"])
async def test_a_task_that_the_annotators_of_agentnet_call_unfinished_is_no_success(tmp_path: Path, told: str) -> None:
    """As neulab/agent-data-protocol, datasets/agentnet/raw_to_standardized.py, and as its ATIF."""
    details = {"dataset": "agentnet", "task_completed": told, "alignment_score": "3"}
    adp = adp_of_a_phone({"function": "click", "kwargs": {"x": 0.25, "y": 0.5}}) | {"details": details}
    atif = atif_of_a_phone({"function": "click", "kwargs": {"x": 0.25, "y": 0.5}})
    atif["extra"]["adp_details"] = details

    for log in (adp, atif):
        assert (await imported(tmp_path, log, LINUX)).record.rollout.success is (told == "True")
