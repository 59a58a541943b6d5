"""The folder in which people look at rollouts."""

import asyncio
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from cua_rl.events import GroupEnded, RolloutSource, RolloutStarted, TurnTaken
from cua_rl.reporting.trace_folder import TraceRecorder, draw_action
from cua_rl.types.actions import Action, Click, Drag, Scroll, TypeText
from cua_rl.types.conversation import EncodedImage
from tests.fakes import FakeRecorder
from tests.patience import patience
from tests.real.database.recorded import make_group, rollout_start

SOURCE = RolloutSource(phase="step", step=3)


def screenshot() -> EncodedImage:
    buffer = BytesIO()
    Image.new("RGB", (60, 40), "white").save(buffer, "PNG")
    return EncodedImage(data=buffer.getvalue(), format="png", width_px=60, height_px=40)


@pytest.mark.parametrize(
    ("action", "marked"),
    [
        (Click(x=20, y=10), (20, 10)),
        (Drag(x=5, y=5, to_x=50, to_y=30), (50, 30)),
        (Scroll(x=30, y=10, down_px=20), (30, 20)),
    ],
)
def test_the_action_is_drawn_where_it_was_aimed_at(action: Action, marked: tuple[int, int]) -> None:
    picture = draw_action(screenshot(), action)

    assert picture.getpixel(marked) == (214, 51, 108)
    assert picture.size == (60, 56)


def test_an_action_without_a_place_leaves_the_screenshot_as_it_is() -> None:
    for action in (None, TypeText(text="漢 \ud83d")):
        picture = draw_action(screenshot(), action)
        assert picture.crop((0, 0, 60, 40)).getcolors() == [(60 * 40, (255, 255, 255))]


def events_of_a_group() -> list[RolloutStarted | TurnTaken | GroupEnded]:
    group = make_group()
    events: list[RolloutStarted | TurnTaken | GroupEnded] = []
    for rollout in (*group.rollouts, *group.faulty):
        events.append(rollout_start(SOURCE, group, rollout))
        turns = [replace(turn, agent=replace(turn.agent, before=screenshot())) for turn in rollout.turns]
        events += [TurnTaken(rollout_id=rollout.rollout_id, turn=turn) for turn in turns]
    return [*events, GroupEnded(source=SOURCE, group=group, advantages=(0.5, -0.25, -0.25))]


async def test_every_rollout_has_a_folder_with_its_pictures_and_its_text(tmp_path: Path) -> None:
    inner, events = FakeRecorder(), events_of_a_group()

    async with TraceRecorder(inner, tmp_path) as recorder:
        for event in events:
            await recorder.record(event)

    assert inner.events == events
    ended = events[-1]
    assert isinstance(ended, GroupEnded)
    for rollout in (*ended.group.rollouts, *ended.group.faulty):
        (folder,) = tmp_path.glob(f"step-000003/00-*-{rollout.rollout_id}")
        text = (folder / "rollout.md").read_text(encoding="utf-8")
        assert len(list(folder.glob("turn-*.png"))) == len(rollout.turns)
        assert text.startswith("# open_settings, seed 7\n\nOpen the settings.\n")
        assert f"stop: {rollout.stop_reason}" in text
    first = ended.group.rollouts[0]
    text = next(tmp_path.glob(f"*/*-{first.rollout_id}/rollout.md")).read_text(encoding="utf-8")
    assert "advantage: 0.5" in text
    assert first.reward is not None
    assert f"reward: {first.reward.total}" in text


async def test_recording_a_turn_does_not_wait_for_its_picture(tmp_path: Path) -> None:
    events = events_of_a_group()
    inner = FakeRecorder()

    async with TraceRecorder(inner, tmp_path) as recorder:
        for event in events:
            await recorder.record(event)
        # nothing but awaits of a queue with room: the loop has not turned, so nothing can have been written yet
        assert not list(tmp_path.glob("*/*/turn-*.png"))
        await recorder.flush()
        assert list(tmp_path.glob("*/*/turn-*.png"))


async def test_a_full_disk_ends_traces_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    events = events_of_a_group()

    async with TraceRecorder(FakeRecorder(), tmp_path / "file") as recorder:
        for event in events:
            await recorder.record(event)
        await asyncio.wait_for(recorder.flush(), patience(10))

    assert "traces end here, training continues" in caplog.text


async def test_a_screenshot_that_is_broken_in_the_middle_ends_traces_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    buffer = BytesIO()
    Image.effect_noise((300, 300), 50).save(buffer, "PNG")
    first, _, rest = buffer.getvalue().rpartition(b"IDAT")
    broken = EncodedImage(data=first + b"\x00DA!" + rest, format="png", width_px=300, height_px=300)
    started, taken, *later = events_of_a_group()
    assert isinstance(taken, TurnTaken)

    async with TraceRecorder(FakeRecorder(), tmp_path) as recorder:
        for event in (
            started,
            replace(taken, turn=replace(taken.turn, agent=replace(taken.turn.agent, before=broken))),
            *later,
        ):
            await recorder.record(event)
        await asyncio.wait_for(recorder.flush(), patience(10))

    assert "broken PNG file" in caplog.text


async def test_an_action_that_cannot_be_drawn_ends_traces_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started, taken, *later = events_of_a_group()
    assert isinstance(taken, TurnTaken)
    aimed = replace(taken.turn.agent, before=screenshot(), action=Click(x=10**400, y=1))

    async with TraceRecorder(FakeRecorder(), tmp_path) as recorder:
        for event in (started, replace(taken, turn=replace(taken.turn, agent=aimed)), *later):
            await recorder.record(event)
        await asyncio.wait_for(recorder.flush(), patience(10))

    assert "traces end here, training continues: write a trace: " in caplog.text
