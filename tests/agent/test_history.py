import pytest

from cua_rl.agent.history import (
    DROPPED_IMAGE,
    DropOldScreenshots,
    make_history,
    system_item,
    tool_result_item,
    user_item,
)
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import ConfigError

SCREEN = EncodedImage(data=b"png", format="png", width_px=1, height_px=1)


def items_after(num_turns: int):
    items = [system_item("s"), user_item("task", SCREEN.data_url())]
    for turn in range(num_turns):
        items.append({"type": "function_call", "call_id": str(turn), "name": "t", "arguments": "{}"})
        items.append(tool_result_item(str(turn), "", SCREEN.data_url()))
    return items


def num_images(items) -> int:
    return str(items).count("input_image")


def test_old_screenshots_are_dropped_in_blocks() -> None:
    history = DropOldScreenshots(max_images=4, block=2)
    # n turns make n + 1 screenshots; the fifth one drops two, the sixth none, the seventh two more
    shown = [num_images(history.visible(items_after(turns))) for turns in range(8)]
    assert shown == [1, 2, 3, 4, 3, 4, 3, 4]


def test_between_drops_each_request_extends_the_one_before() -> None:
    history = DropOldScreenshots(max_images=4, block=2)
    views = [history.visible(items_after(turns)) for turns in range(8)]
    extends = [views[i + 1][: len(views[i])] == views[i] for i in range(7)]
    assert extends == [True, True, True, False, True, False, True]


def test_a_dropped_screenshot_leaves_a_note_and_the_task_text() -> None:
    view = DropOldScreenshots(max_images=1, block=1).visible(items_after(1))
    assert view[1]["content"] == [{"type": "input_text", "text": "task"}, {"type": "input_text", "text": DROPPED_IMAGE}]
    assert num_images(view[3:]) == 1


def test_a_history_is_made_by_name_and_numbers_that_do_not_fit_are_refused() -> None:
    assert make_history("full", max_images=0) is None
    assert make_history("last_n", max_images=3) == DropOldScreenshots(max_images=3, block=1)
    assert make_history("block_drop", max_images=8) == DropOldScreenshots(max_images=8, block=4)
    with pytest.raises(ConfigError, match=r"history_images: expected at least 1 .* got 0"):
        make_history("last_n", max_images=0)
    with pytest.raises(ConfigError, match=r"history_images: expected at least 2 .* got 1"):
        make_history("block_drop", max_images=1)
