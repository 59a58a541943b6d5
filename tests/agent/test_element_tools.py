"""Tools in words: what the model says becomes what the coordinate model is asked, and that becomes an action."""

import json

import pytest

from cua_rl.agent.element_tools import (
    COMPUTER_ACT,
    MOBILE_ACT,
    Aim,
    Direction,
    Pixel,
    describe,
    parse_element_action,
    resolve,
)
from cua_rl.environments.device import ActionRejected
from cua_rl.types.actions import Click, Drag, Finish, LongPress, PressKey, RightClick, Scroll, TypeText
from cua_rl.types.conversation import EncodedImage, ParseFailure, ToolCall

SEEN = EncodedImage(data=b"screen", format="png", width_px=100, height_px=200)


class Knowing:
    """Finds what it was told about."""

    def __init__(self, **places: Pixel) -> None:
        self.places = places
        self.distance_px = -40

    async def find(self, seen: EncodedImage, target: str) -> Pixel | None:
        return self.places.get(target)

    async def find_drag(self, seen: EncodedImage, target: str, destination: str) -> tuple[Pixel, Pixel] | None:
        start, end = self.places.get(target), self.places.get(destination)
        return None if start is None or end is None else (start, end)

    async def find_scroll(self, seen: EncodedImage, target: str, direction: Direction) -> tuple[Pixel, int] | None:
        at = self.places.get(target)
        return None if at is None else (at, self.distance_px)


def parse(name: str, **arguments: object) -> object:
    return parse_element_action(ToolCall(call_id="c", name=name, arguments=json.dumps(arguments)))


@pytest.mark.parametrize(
    ("name", "arguments", "action"),
    [
        ("mobile_act", {"action": "click", "target": {"element": "save"}}, Click(x=10, y=20)),
        ("mobile_act", {"action": "long_press", "target": "save", "time": 2}, LongPress(x=10, y=20, duration_s=2.0)),
        ("mobile_act", {"action": "swipe", "target": "save", "destination": "bin"}, Drag(x=10, y=20, to_x=99, to_y=9)),
        ("computer_act", {"action": "right_click", "target": "save"}, RightClick(x=10, y=20)),
        # the distance is the coordinate model's, the sign is what was asked for
        ("computer_act", {"action": "scroll", "target": "save", "direction": "down"}, Scroll(x=10, y=20, down_px=40)),
        ("mobile_act", {"action": "scroll", "target": "save", "direction": "left"}, Scroll(x=10, y=20, right_px=-40)),
    ],
)
async def test_elements_are_found_and_acted_on(name: str, arguments: dict[str, object], action: object) -> None:
    aim = parse(name, **arguments)
    assert isinstance(aim, Aim)

    # 120 lies beyond the last of 100 columns
    assert await resolve(aim, SEEN, Knowing(save=(10, 20), bin=(120, 9))) == action


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"action": "type", "text": "x"}, TypeText(text="x")),
        ({"action": "system_button", "button": "Enter"}, PressKey(keys=("enter",))),
        ({"action": "terminate", "status": "success"}, Finish(success_claimed=True)),
    ],
)
def test_what_needs_no_place_is_read_as_with_coordinates(arguments: dict[str, object], expected: object) -> None:
    assert parse("mobile_act", **arguments) == expected


async def test_what_is_not_on_the_screen_is_told_to_the_model() -> None:
    for arguments in (
        {"action": "click", "target": "ghost"},
        {"action": "swipe", "target": "save", "destination": "ghost"},
        {"action": "scroll", "target": "ghost", "direction": "up"},
    ):
        aim = parse("mobile_act", **arguments)
        assert isinstance(aim, Aim)
        with pytest.raises(ActionRejected, match=r"no '.*ghost' on the screen"):
            await resolve(aim, SEEN, Knowing(save=(10, 20)))


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("mobile_use", {"action": "click"}, "mobile_act"),
        ("mobile_act", {"action": "left_click", "target": "x"}, "one of click"),
        ("mobile_act", {"action": "click"}, "Expected target"),
        ("mobile_act", {"action": "click", "target": {"label": "Save"}}, "Expected target"),
        ("mobile_act", {"action": "click", "target": "  "}, "Expected target"),
        ("mobile_act", {"action": "swipe", "target": "x"}, "Expected destination"),
        ("mobile_act", {"action": "scroll", "target": "x", "direction": "in"}, "Expected direction"),
        ("mobile_act", {"action": "long_press", "target": "x", "time": 1e9}, "Expected time"),
        ("mobile_act", {"action": "wait", "time": 1e9}, "0 to 60"),
    ],
)
def test_bad_calls_say_what_was_expected(name: str, arguments: dict[str, object], says: str) -> None:
    failure = parse(name, **arguments)

    assert isinstance(failure, ParseFailure)
    assert says in failure.message


def test_a_description_is_one_line_of_what_the_model_knows() -> None:
    described = {"element": "button", "label": "Save", "color": "blue", "location": "bottom right", "confidence": 1}

    assert describe(described) == "button, labelled Save, blue, bottom right"


def test_phones_and_desktops_get_tools_without_coordinates() -> None:
    for tool in (MOBILE_ACT, COMPUTER_ACT):
        assert "coordinate" not in json.dumps(tool.parameters)
        assert {"click", "left_click"} & set(tool.parameters["properties"]["action"]["enum"])  # type: ignore[index]
