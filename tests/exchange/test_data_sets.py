"""Data sets of GUI agents in the shapes in which their publishers ship them."""

import json
import random
from collections.abc import Callable
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cua_rl.agent.tools import parse_action, tool_for
from cua_rl.exchange.foreign_actions import View, tool_arguments
from cua_rl.exchange.formats import Format, Told, detect_format, read_trajectories
from cua_rl.exchange.replayed import Replayed, replay
from cua_rl.recipes.import_trajectories import Samples
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
from cua_rl.types.conversation import EncodedImage, ToolCall
from cua_rl.types.errors import ConfigError
from tests.exchange.data_sets import (
    AGUVIS_STEP,
    accessibility_tree,
    agentnet,
    aguvis,
    android_control_example,
    example,
    mind2web_row,
    odyssey,
    wild_example,
    write_many_records,
    write_mind2web,
    write_odyssey,
    write_osworld,
    write_records,
)
from tests.exchange.files import BROWSER, LINUX, RENDERER, actions_of, draw
from tests.exchange.published import android_control_record, anthropic_log, gemini_log, openai_log


async def imported(path: Path, told: Told | None = None) -> list[Replayed]:
    """All trajectories of a file or folder."""
    return [
        await replay(parse(), RENDERER, step=1, index=place, started_at=0.0)
        for place, parse in enumerate(read_trajectories(path, told))
    ]


def screens_of(made: Replayed) -> list[bytes]:
    return [turn.agent.before.data for turn in made.record.rollout.turns if turn.agent.before]


async def test_an_episode_of_gui_odyssey_with_its_screenshots_in_the_folder_beside(tmp_path: Path) -> None:
    episode = odyssey(
        ("CLICK", [[500, 250]]),
        ("LONG_PRESS", [[1000, 1000]]),
        ("SCROLL", [[500, 750], [500, 250]]),
        ("TEXT", "tea"),
        ("CLICK", "KEY_BACK"),
        ("CLICK", "KEY_APPSELECT"),
        ("COMPLETE", ""),
    )

    (made,) = await imported(write_odyssey(tmp_path / "data", episode))

    assert actions_of(made) == [
        Click(x=96, y=80),
        LongPress(x=191, y=319, duration_s=1.0),
        Drag(x=96, y=240, to_x=96, to_y=80),
        TypeText(text="tea"),
        PressButton(button=Button.BACK),
        PressButton(button=Button.RECENTS),
        None,
    ]
    assert screens_of(made) == [draw(place) for place in range(7)]
    assert made.record.task.instruction == "Use Chrome to buy tea."
    assert made.record.rollout.turns[0].model.text.startswith("<think>\nWhy 0\n</think>")


async def test_an_episode_of_gui_odyssey_that_was_impossible_is_a_failure(tmp_path: Path) -> None:
    (made,) = await imported(write_odyssey(tmp_path / "data", odyssey(("CLICK", [[1, 1]]), ("INCOMPLETE", ""))))

    assert made.record.rollout.success is False


@pytest.mark.parametrize(("completed", "success"), [(True, True), (False, False), ("False", False)])
async def test_a_line_of_agentnet(completed: object, success: bool, tmp_path: Path) -> None:
    codes = (
        "pyautogui.click(x=0.5, y=0.25)",
        "pyautogui.write(message='tea')\npyautogui.press('enter')",
        "pyautogui.hotkey(['ctrl', 's'])",
        "pyautogui.scroll(-3)",
        "computer.wait()",
        "computer.terminate(status='success')",
    )
    (tmp_path / "images").mkdir()
    for place in range(len(codes)):
        (tmp_path / "images" / f"step{place}.png").write_bytes(draw(place))
    (tmp_path / "ubuntu.jsonl").write_text(json.dumps(agentnet(*codes, completed=completed)) + "\n")

    (made,) = await imported(tmp_path)

    assert actions_of(made) == [
        Click(x=96, y=80),
        TypeText(text="tea"),
        PressKey(keys=("enter",)),
        PressKey(keys=("ctrl", "s")),
        Scroll(x=96, y=80, down_px=300),
        Wait(duration_s=1.0),
        None,
    ]
    assert screens_of(made) == [draw(place) for place in (0, 1, 1, 2, 3, 4, 5)]
    assert (made.record.task.instruction, made.record.rollout.success) == ("sort the table", success)


async def test_questions_of_aguvis_are_tasks_of_their_own_with_the_actions_before_in_their_text(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(draw(1))
    entries = [
        aguvis(("Click on tea", "pyautogui.click(x=0.5, y=0.25)"), ("Go down", "pyautogui.scroll(page=-0.5)")),
        aguvis((AGUVIS_STEP.format("Buy tea.", "None"), "pyautogui.doubleClick(x=0.25, y=0.5)")),
        aguvis((AGUVIS_STEP.format("Buy tea.", "Step 1: Click on tea."), "pyautogui.press(keys=['enter'])")),
    ]
    (tmp_path / "stage2.json").write_text(json.dumps(entries))

    made = await imported(tmp_path, LINUX)

    assert [one.record.task.instruction for one in made] == [
        "Click on tea",
        "Go down",
        "Buy tea.",
        "Buy tea.\n\nPrevious actions:\nStep 1: Click on tea.",
    ]
    assert [repr(actions_of(one)[0]) for one in made] == [
        "Click(x=96, y=80)",
        "Scroll(x=96, y=160, down_px=160, right_px=0)",
        "DoubleClick(x=48, y=160)",
        "PressKey(keys=('enter',))",
    ]
    assert made[0].record.rollout.turns[0].model.text.startswith("<think>\nThought: Why\nAction: Click it.\n</think>")


async def test_phones_of_aguvis_are_known_by_their_plugin(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(draw(1))
    code = "mobile.swipe(from_coord=[0.5, 0.75], to_coord=[0.5, 0.25])"
    (tmp_path / "stage2.json").write_text(json.dumps([aguvis((AGUVIS_STEP.format("Buy tea.", "None"), code))]))

    (made,) = await imported(tmp_path)

    assert actions_of(made) == [Drag(x=96, y=240, to_x=96, to_y=80)]


async def test_rows_of_mind2web_are_tasks_that_end_before_a_step_without_a_box(tmp_path: Path) -> None:
    path = write_mind2web(
        tmp_path,
        mind2web_row(1, "10,20,60.5,40", "TYPE", value="Brooklyn"),
        mind2web_row(0, "86,70,20,20", "CLICK"),
        mind2web_row(2, "0,0,20,20", "CLICK", original="HOVER"),
        mind2web_row(3, "0,0,20,20", "CLICK", original="ENTER"),
        mind2web_row(4, "-1,-1,-1,-1", "CLICK"),
        mind2web_row(5, "0,0,20,20", "CLICK"),
        mind2web_row(0, "0,0,20,20", "CLICK", task="t2"),
        mind2web_row(2, "0,0,20,20", "CLICK", task="t2"),  # the publisher left out a step
        mind2web_row(0, "0,0,20,20", "SELECT", value="2", task="t3"),
    )

    first, second, third = (parse() for parse in read_trajectories(path))
    made = await replay(first, RENDERER, step=1, index=0, started_at=0.0)

    assert actions_of(made) == [
        Click(x=96, y=80),
        Click(x=40, y=40),
        TypeText(text="Brooklyn"),
        MoveMouse(x=10, y=10),
        PressKey(keys=("enter",)),
    ]
    assert (made.ends_before, made.record.task.instruction) == ("left_out", "rent a car in Brooklyn")
    assert screens_of(made) == [draw(place) for place in (0, 1, 1, 2, 3)]
    cut = await replay(second, RENDERER, step=1, index=0, started_at=0.0)
    assert (len(actions_of(cut)), cut.ends_before) == (1, "left_out")
    with pytest.raises(ConfigError, match="counterpart in our tools, got 'select_option'"):
        await replay(third, RENDERER, step=1, index=0, started_at=0.0)


OSWORLD_ACTIONS = ("pyautogui.click(96, 80)", "pyautogui.hotkey('ctrl', 's')", "WAIT", "DONE")


async def test_a_result_folder_of_osworld_begins_where_its_first_screenshot_is(tmp_path: Path) -> None:
    path = write_osworld(tmp_path, *OSWORLD_ACTIONS, response="I click on it.\n```python\npyautogui.click(1, 2)\n```")

    (parse,) = read_trajectories(path)
    found = parse()
    made = await replay(found, RENDERER, step=1, index=0, started_at=0.0)

    assert found.num_unseen == 1  # nobody knows what was there when it clicked
    assert actions_of(made) == [PressKey(keys=("ctrl", "s")), Wait(duration_s=1.0), None]
    assert screens_of(made) == [draw(place) for place in (1, 2, 3)]
    assert (made.record.task.instruction, made.record.rollout.success) == ("Install Spotify.", True)
    assert made.record.rollout.turns[0].model.text.startswith("<think>\nI click on it.\n</think>")


@pytest.mark.parametrize("first", ["step_0_20240101@120000.png", "initial_state.png"])
async def test_a_result_folder_of_osworld_with_its_first_screenshot(first: str, tmp_path: Path) -> None:
    (made,) = await imported(write_osworld(tmp_path, *OSWORLD_ACTIONS, first=first, result="0.0\n"))

    assert actions_of(made)[0] == Click(x=96, y=80)
    assert screens_of(made)[0] == draw(0)
    assert made.record.rollout.success is False


async def test_actions_of_osworld_as_objects(tmp_path: Path) -> None:
    objects = (
        {"action_type": "CLICK", "parameters": {"x": 96, "y": 80, "button": "left", "num_clicks": 1}},
        {"action_type": "DRAG_TO", "parameters": {"x": 10, "y": 20}},
        {"action_type": "SCROLL", "parameters": {"dx": 0, "dy": -3}},
        {"action_type": "TYPING", "parameters": {"text": "tea"}},
        {"action_type": "PRESS", "parameters": {"key": "enter"}},
        {"action_type": "tool_use", "command": "pyautogui.rightClick(48, 32)", "raw_response": "..."},
        {"action_space": "pyautogui", "action": "import time\npyautogui.moveTo(1, 2)", "pending_checks": []},
        {"action_type": "FAIL", "parameters": {}},
    )

    (made,) = await imported(write_osworld(tmp_path, *objects, first="initial_state.png", result=None))

    assert [repr(action) for action in actions_of(made)] == [
        "Click(x=96, y=80)",
        "Drag(x=96, y=80, to_x=10, to_y=20, duration_s=0.3)",
        "Scroll(x=10, y=20, down_px=300, right_px=0)",
        "TypeText(text='tea')",
        "PressKey(keys=('enter',))",
        "RightClick(x=48, y=32)",
        "MoveMouse(x=1, y=2)",
        "None",
    ]
    assert made.record.rollout.success is False  # nothing says that it succeeded


async def test_a_result_folder_of_osworld_without_its_task_file_says_where_to_copy_it(tmp_path: Path) -> None:
    path = write_osworld(tmp_path, *OSWORLD_ACTIONS)
    (tmp_path / "examples" / "os" / "94d95f96.json").unlink()

    with pytest.raises(ConfigError, match="copy OSWorld's folder evaluation_examples/examples there"):
        list(read_trajectories(path))


async def test_tfrecords_of_android_control_are_read_like_their_json(tmp_path: Path) -> None:
    actions = (
        {"action_type": "open_app", "app_name": "Chrome"},
        {"action_type": "click", "x": 96, "y": 160},
        {"action_type": "scroll", "direction": "down"},
        {"action_type": "input_text", "text": "tea"},
    )
    write_records(tmp_path / "android_control-00000-of-00020", android_control_example(*actions))
    (tmp_path / "same.json").write_text(json.dumps(android_control_record(*actions)))

    record, same = await imported(tmp_path)

    assert actions_of(record) == actions_of(same)
    assert [turn.model.text for turn in record.record.rollout.turns] == [
        turn.model.text for turn in same.record.rollout.turns
    ]
    assert record.record.task == same.record.task


def boxes_of(made: Replayed) -> list[tuple[int, ...]]:
    return [turn.agent.target_box for turn in made.record.rollout.turns]


async def test_boxes_of_elements_come_in_pixels_of_the_screenshot_from_each_set_that_has_them(tmp_path: Path) -> None:
    # 192 x 320 pixels
    episode = odyssey(("CLICK", [[500, 250]]), ("SCROLL", [[500, 750], [500, 250]]), ("CLICK", [[500, 250]]))
    episode["steps"][0]["sam2_bbox"] = [250, 125, 750, 375]
    (made,) = await imported(write_odyssey(tmp_path / "odyssey", episode))
    assert boxes_of(made) == [(48, 40, 144, 120), (), ()]

    (made,) = await imported(write_mind2web(tmp_path, mind2web_row(0, "86,70,20.4,20", "TYPE", value="tea")))
    assert boxes_of(made) == [(86, 70, 106, 90), ()]  # of the click before the text

    seen, clickable, editable, long_clickable = 23, 14, 15, 19
    tree = accessibility_tree(
        (1, [((0, 0, 192, 320), [seen, clickable]), ((0, 0, 192, 20), [seen, clickable])]),
        (
            3,  # in front, whatever its place
            [
                ((10, 40, 110, 80), [seen, clickable]),
                ((10, 40, 60, 80), [seen]),  # its label
                ((20, 50, 30, 60), [clickable]),  # hidden
                ((110, 40, 150, 80), [seen, editable]),
                ((110, 40, 150, 80), [seen, long_clickable]),
            ],
        ),
        (2, [((0, 30, 192, 90), [seen, clickable])]),
    )
    at = [(25, 55), (130, 60), (110, 60), (96, 85), (96, 10), (96, 200)]
    actions = [{"action_type": "click", "x": x, "y": y} for x, y in at] + [{"action_type": "wait"}]
    path = write_records(tmp_path / "android_control-00000-of-00020", android_control_example(*actions, tree=tree))
    (made,) = await imported(path)
    assert boxes_of(made) == [
        (10, 40, 110, 80),
        (110, 40, 150, 80),
        (110, 40, 150, 80),  # an edge belongs to both; the smaller one
        (0, 30, 192, 90),
        (0, 0, 192, 20),
        (0, 0, 192, 320),
        (),
        (),
    ]
    half = android_control_example(
        *actions[:1], size=(384, 640), tree=accessibility_tree((1, [((0, 0, 50, 90), [seen, clickable])]))
    )
    (made,) = await imported(write_records(tmp_path / "half-00000-of-00020", half))
    assert boxes_of(made)[0] == (0, 0, 25, 45)  # screenshots of half the size of the display


async def test_accessibility_trees_in_another_form_are_refused(tmp_path: Path) -> None:
    record = android_control_record({"action_type": "click", "x": 96, "y": 160})
    (tmp_path / "one.json").write_text(json.dumps(record | {"accessibility_trees": ["CqctCgo="] * 2}))
    with pytest.raises(ConfigError, match="expected accessibility trees of AndroidControl in base64, got 'CqctCgo='"):
        await imported(tmp_path)


async def test_tfrecords_of_android_in_the_wild_become_episodes(tmp_path: Path) -> None:
    steps = (
        wild_example(1, 4, touch=(0.75, 0.5), lift=(0.25, 0.5)),
        wild_example(0, 4, touch=(0.25, 0.5), lift=(0.27, 0.52)),  # 0.028 apart: a tap
        wild_example(2, 4, touch=(0.25, 0.5), lift=(0.285, 0.535)),  # 0.049 apart: a swipe, though neither axis is 0.04
        wild_example(3, 3, text="tea"),
        wild_example(4, 5),
        wild_example(5, 7),
        wild_example(6, 10),
        wild_example(0, 4, touch=(0.5, 0.5), lift=(0.5, 0.5), episode="78"),
        wild_example(1, 11, episode="78"),
    )

    path = write_records(tmp_path / "general-00000-of-00321", *steps)
    first, second = await imported(path)

    assert actions_of(first) == [
        Click(x=96, y=80),
        Drag(x=96, y=240, to_x=96, to_y=80),
        Drag(x=96, y=80, to_x=103, to_y=91),
        TypeText(text="tea"),
        PressButton(button=Button.BACK),
        PressKey(keys=("enter",)),
        None,
    ]
    assert (first.record.task.task_id, first.record.task.instruction) == ("aitw/77", "buy tea")
    seen = Image.open(BytesIO(screens_of(first)[3])).convert("RGB")
    assert seen.tobytes() == Image.open(BytesIO(draw(3))).convert("RGB").tobytes()
    assert (first.record.rollout.success, second.record.rollout.success) == (True, False)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda data: data[:-40], "TFRecords of tf.train.Example in .*, got"),
        (lambda _: b"\x00" * 64, "a record whose length does not have its checksum"),
        (lambda _: b"PK\x03\x04" + b"\x00" * 60, "a record whose length does not have its checksum"),
    ],
)
def test_a_broken_tfrecord_is_refused(change: Callable[[bytes], bytes], complaint: str, tmp_path: Path) -> None:
    path = write_records(tmp_path / "general-00000-of-00321", wild_example(0, 10))
    path.write_bytes(change(path.read_bytes()))

    with pytest.raises(ConfigError, match=complaint):
        list(read_trajectories(path))


def test_tfrecords_of_other_data_sets_are_refused(tmp_path: Path) -> None:
    path = write_records(tmp_path / "train.tfrecord", example({"image": [b"x"], "label": [3]}))

    with pytest.raises(ConfigError, match=r"an episode of AndroidControl .* got \['image', 'label'\]"):
        list(read_trajectories(path))


def test_parquet_files_of_other_data_sets_are_refused(tmp_path: Path) -> None:
    path = write_mind2web(tmp_path, {"text": "a"})

    with pytest.raises(ConfigError, match="expected the columns of Multimodal-Mind2Web"):
        list(read_trajectories(path))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (odyssey(("COMPLETE", "")), "gui_odyssey"),
        (agentnet("computer.wait()"), "agentnet"),
        (aguvis(("Click", "pyautogui.click(x=0.1, y=0.2)")), "aguvis"),
        (android_control_record({"action_type": "wait"}), "android_control"),
        (openai_log({"type": "wait"}), "openai"),
        (anthropic_log({"action": "screenshot"}), "anthropic"),
        (gemini_log(("open_web_browser", {})), "gemini"),
    ],
)
def test_the_format_is_known_by_its_keys(value: object, expected: Format) -> None:
    assert detect_format(value, "here") == expected


# Where publishers draw a point: written from their own programs, in pixels of the screenshot.
Draw = Callable[[float, float, int, int], tuple[float, float]]
Write = Callable[[Path, list[tuple[float, float]], int, int], tuple[Path, Told | None]]


@cache
def blank(width: int, height: int) -> bytes:
    Image.new("RGB", (width, height)).save(data := BytesIO(), "PNG")
    return data.getvalue()


def as_odyssey(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    episode = odyssey(*(("CLICK", [[x, y]]) for x, y in points), size=(width, height))
    return write_odyssey(folder / "odyssey", episode, *[blank(width, height)] * len(points)), None


def as_agentnet(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    line = agentnet(*(f"pyautogui.click(x={x:.4f}, y={y:.4f})" for x, y in points))
    for step in line["traj"]:
        step["image"] = "one.png"
    (folder / "one.png").write_bytes(blank(width, height))
    (folder / "agentnet.jsonl").write_text(json.dumps(line))
    return folder / "agentnet.jsonl", None


def as_aguvis(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    (folder / "a.png").write_bytes(blank(width, height))
    asked = [("Click.", f"pyautogui.click(x={x:.4f}, y={y:.4f})") for x, y in points]
    (folder / "aguvis.json").write_text(json.dumps([aguvis(*asked)]))
    return folder / "aguvis.json", LINUX


def as_mind2web(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    rows = [mind2web_row(place, f"{x},{y},16,8", "CLICK") for place, (x, y) in enumerate(points)]
    for row in rows:
        row["screenshot"] = {"bytes": blank(width, height), "path": None}
    return write_mind2web(folder, *rows), None


def as_osworld(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    codes = [f"pyautogui.click({x}, {y})" for x, y in points]
    path = write_osworld(folder / "osworld", *codes, first="initial_state.png")
    for picture in path.rglob("*.png"):
        picture.write_bytes(blank(width, height))
    return path, None


def as_wild(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    steps = [
        wild_example(place, 4, touch=(y, x), lift=(y, x), size=(width, height)) for place, (x, y) in enumerate(points)
    ]
    return write_many_records(folder / "general-00000-of-00001", *steps), None


def as_control(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    record = android_control_record(*({"action_type": "click", "x": x, "y": y} for x, y in points))
    (folder / "screen.png").write_bytes(blank(width, height))
    record |= {"screenshots": ["screen.png"] * (len(points) + 1), "screenshot_widths": [], "screenshot_heights": []}
    (folder / "control.json").write_text(json.dumps(record))
    return folder / "control.json", None


def in_log(log: dict[str, Any], folder: Path, width: int, height: int) -> Path:
    """A provider's log with screenshots of another size."""
    (folder / "screen.png").write_bytes(blank(width, height))
    log = json.loads(
        json.dumps(log),
        object_hook=lambda one: {
            key: "screen.png" if key in ("data", "image_url") and isinstance(value, str) else value
            for key, value in one.items()
        },
    )
    (folder / "log.json").write_text(json.dumps(log))
    return folder / "log.json"


def as_openai(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    clicks = ({"type": "click", "button": "left", "x": x, "y": y} for x, y in points)
    log = openai_log({"type": "screenshot"}, *clicks, display=(width, height), environment="linux")
    return in_log(log, folder, width, height), None


def as_anthropic(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    clicks = ({"action": "left_click", "coordinate": [x, y]} for x, y in points)
    log = anthropic_log({"action": "screenshot"}, *clicks, display=(width, height))
    return in_log(log, folder, width, height), LINUX


def as_gemini(folder: Path, points: list[tuple[float, float]], width: int, height: int) -> tuple[Path, Told | None]:
    log = gemini_log(("open_web_browser", {}), *(("click_at", {"x": x, "y": y}) for x, y in points))
    return in_log(log, folder, width, height), BROWSER


def pixels(x: float, y: float, width: int, height: int) -> tuple[float, float]:
    """OpenAI's and Anthropic's tools, OSWorld and AndroidControl: coordinates are pixels of the screenshot."""
    return x, y


def shares(x: float, y: float, width: int, height: int) -> tuple[float, float]:
    """android_in_the_wild/visualization_utils.py, _plot_dual_point; pyautogui calls of AgentNet and AGUVIS."""
    return x * width, y * height


def thousandths(x: float, y: float, width: int, height: int) -> tuple[float, float]:
    """GUI-Odyssey: x / 1000 * w; google-gemini/computer-use-preview, denormalize_x: int(x / 1000 * width)."""
    return x / 1000 * width, y / 1000 * height


def middle(x: float, y: float, width: int, height: int) -> tuple[float, float]:
    """OSU-NLP-Group/SeeAct: the middle of a box of 16 x 8 pixels at x, y."""
    return x + 8, y + 4


@pytest.mark.parametrize(
    ("write", "drawn", "size"),
    [
        (as_odyssey, thousandths, (1080, 1920)),
        (as_agentnet, shares, (1920, 1080)),
        (as_aguvis, shares, (1280, 720)),
        (as_mind2web, middle, (1280, 1900)),
        (as_osworld, pixels, (1920, 1080)),
        (as_wild, shares, (412, 732)),
        (as_control, pixels, (1080, 2400)),
        (as_openai, pixels, (1920, 1080)),
        (as_anthropic, pixels, (1024, 768)),
        (as_gemini, thousandths, (1440, 900)),
    ],
)
def test_two_hundred_points_land_where_the_publisher_draws_them(
    write: Write, drawn: Draw, size: tuple[int, int], tmp_path: Path
) -> None:
    rng = random.Random(11)
    width, height = size
    most_x, most_y = {thousandths: (1000, 1000), middle: (width - 16, height - 8)}.get(drawn, size)
    points: list[tuple[float, float]] = [
        (round(rng.uniform(0, 0.9999), 4), round(rng.uniform(0, 0.9999), 4))
        if drawn is shares
        else (rng.randrange(most_x), rng.randrange(most_y))
        for _ in range(200)
    ]
    path, told = write(tmp_path, points, width, height)

    clicks = [
        parse_action(ToolCall(call_id="c", name=tool_for(kind).name, arguments=json.dumps(call)), **screen)
        for kind, found in (
            (found.kind or "linux", found) for found in (parse() for parse in read_trajectories(path, told))
        )
        for step in found.steps
        for screen in ({"width_px": width, "height_px": height},)
        for call in tool_arguments(
            step.action,
            View(screen=EncodedImage(data=b"", format="png", **screen), kind=kind, display=step.screen.display),
        )
    ]
    clicks = [click for click in clicks if isinstance(click, Click)]

    expected = [drawn(x, y, width, height) for x, y in points]
    assert len(clicks) == 200
    worst = max(
        max(abs(click.x - round(x)), abs(click.y - round(y))) for click, (x, y) in zip(clicks, expected, strict=True)
    )
    assert worst <= 1


async def test_samples_show_where_actions_aim_on_their_screenshots(tmp_path: Path) -> None:
    episode = odyssey(*(("CLICK", [[500, 250]]),) * 5, ("COMPLETE", ""))
    (made,) = await imported(write_odyssey(tmp_path / "data", episode))
    samples = Samples(folder=tmp_path / "samples", limit=6)

    samples.draw(made.record)
    samples.draw(made.record)
    samples.draw(made.record)

    assert sorted(path.name for path in samples.folder.glob("*.png")) == [f"00{n}.png" for n in range(1, 7)]
    with Image.open(samples.folder / "002.png") as drawn, Image.open(BytesIO(draw(1))) as screen:
        assert drawn.width == screen.width
        after, before = drawn.convert("RGB"), screen.convert("RGB")
        changed = {
            (x, y)
            for x in range(screen.width)
            for y in range(screen.height)
            if after.getpixel((x, y)) != before.getpixel((x, y))
        }
    assert (96, 80) in changed
    assert all(abs(x - 96) <= 8 and abs(y - 80) <= 8 for x, y in changed)
    page = (samples.folder / "samples.md").read_text()
    assert page.count("Use Chrome to buy tea.") == page.count("![screenshot](") == 6
