"""A rollout as an animated GIF or WebP: read back with Pillow, frame by frame."""

from io import BytesIO
from typing import Any

import pytest
from PIL import Image, ImageSequence

from cua_rl.monitor import rollout_schemas as schemas
from cua_rl.monitor.databases import NotFoundError
from cua_rl.monitor.film import MAX_FRAMES, MAX_SIDE_PX, make_film
from cua_rl.types.conversation import EncodedImage

_CLICK = {"type": "Click", "x": 100, "y": 300}
_INK = (214, 51, 108)


def _screen(width_px: int, height_px: int, colour: tuple[int, int, int]) -> EncodedImage:
    out = BytesIO()
    Image.new("RGB", (width_px, height_px), colour).save(out, "PNG")
    return EncodedImage(data=out.getvalue(), format="png", width_px=width_px, height_px=height_px)


def _rollout(turns: list[tuple[EncodedImage | None, dict[str, Any] | None]], after: EncodedImage | None) -> Any:
    def shown(image: EncodedImage | None) -> schemas.ScreenshotRef | None:
        return image and schemas.ScreenshotRef(sha256=image.sha256, width_px=image.width_px, height_px=image.height_px)

    details = [
        schemas.TurnDetail.model_construct(
            turn_index=index,
            action=action,
            failure_kind=None,
            before=shown(before),
            after=shown(after) if index == len(turns) - 1 else None,
        )
        for index, (before, action) in enumerate(turns)
    ]
    return schemas.Rollout.model_construct(
        rollout_id="one", turns=details, success=False, stop_reason="finished", status="completed"
    )


def _frames(film: bytes) -> list[Image.Image]:
    with Image.open(BytesIO(film)) as opened:
        assert opened.format == "GIF"
        return [frame.convert("RGB") for frame in ImageSequence.Iterator(opened)]


def _near(pixel: Any, wanted: tuple[int, int, int], most: int = 40) -> bool:
    return max(abs(a - b) for a, b in zip(pixel, wanted, strict=True)) <= most


def test_each_turn_is_a_frame_with_its_click_where_it_was_aimed_and_the_last_screen_has_none() -> None:
    first, second = _screen(200, 400, (0, 0, 120)), _screen(200, 400, (0, 120, 0))
    film = make_film(_rollout([(first, _CLICK), (first, None)], second), {one.sha256: one for one in (first, second)})

    frames = _frames(film)
    assert [frame.size for frame in frames] == [(200, 418)] * 3  # 400 px and a line of text
    # 3 % of 400 px: a ring of 12 px around (100, 300)
    assert _near(frames[0].getpixel((100 - 11, 300)), _INK)
    assert _near(frames[0].getpixel((100, 300 + 11)), _INK)
    assert _near(frames[0].getpixel((100, 250)), (0, 0, 120))
    assert _near(frames[1].getpixel((100 - 11, 300)), (0, 0, 120))
    assert _near(frames[2].getpixel((100, 300)), (0, 120, 0))


def test_a_webp_film_keeps_every_colour_and_is_shown_as_long_as_the_gif() -> None:
    out = BytesIO()
    Image.linear_gradient("L").convert("RGB").rotate(30, fillcolor=(3, 200, 7)).save(out, "PNG")
    screen = EncodedImage(data=out.getvalue(), format="png", width_px=256, height_px=256)
    rollout = _rollout([(screen, _CLICK), (screen, None)], None)
    durations: dict[str, int] = {}
    for kind in ("gif", "webp"):
        with Image.open(BytesIO(make_film(rollout, {screen.sha256: screen}, kind))) as film:
            frames = [(frame.convert("RGB"), frame.info["duration"]) for frame in ImageSequence.Iterator(film)]
            durations[kind] = sum(duration for _, duration in frames)
            assert film.format == kind.upper()
    with Image.open(BytesIO(screen.data)) as shown:
        assert frames[-1][0].crop((0, 0, 256, 256)).tobytes() == shown.tobytes()
    assert durations == {"gif": 4200, "webp": 4200}  # 1.2 s and the end for 3 s


def test_a_large_screen_is_made_smaller_with_its_click() -> None:
    screen = _screen(1080, 2400, (0, 0, 120))
    film = make_film(_rollout([(screen, {"type": "Click", "x": 540, "y": 1200})], None), {screen.sha256: screen})

    (frame,) = _frames(film)
    assert frame.size == (288, MAX_SIDE_PX + 18)  # 1080 * 640 / 2400
    ring = [frame.getpixel((144 - offset, 320)) for offset in range(14, 22)]  # 72 px of 2400 are 19 of 640
    assert any(_near(pixel, _INK, 60) for pixel in ring)


def test_a_long_rollout_is_thinned_to_its_first_and_last_screen_and_some_between() -> None:
    screens = [_screen(8, 8, (index % 250, index // 250 * 200, 50)) for index in range(400)]
    film = make_film(_rollout([(one, None) for one in screens], screens[-1]), {one.sha256: one for one in screens})

    frames = _frames(film)
    assert 100 <= len(frames) <= MAX_FRAMES
    assert _near(frames[0].getpixel((4, 4)), (0, 0, 50), 8)
    assert _near(frames[-1].getpixel((4, 4)), (399 % 250, 200, 50), 8)


def test_pruned_and_broken_screenshots_are_grey() -> None:
    whole = _screen(60, 40, (0, 0, 120))
    broken = EncodedImage(data=whole.data[:-40], format="png", width_px=60, height_px=40)
    turns: list[Any] = [(whole, None), (broken, None)]
    frames = _frames(make_film(_rollout(turns, None), {broken.sha256: broken}))
    assert [_near(frame.getpixel((30, 20)), (136, 136, 136)) for frame in frames] == [True, True]


@pytest.mark.parametrize(
    "action",
    [
        {"type": "swipe", "x": 1, "y": 1e300},
        {"type": "Scroll", "x": 5, "y": 5, "right_px": -20},
        {"type": "Drag", "x": 5, "y": 5, "to_x": 9, "to_y": 12},
        {"type": "tap", "x": "left", "y": None},
        {"type": "TypeText", "text": "caf\u00e9 \ud800\n"},
        {"type": "Click", "x": 2, "y": 3, "then": [_CLICK, "odd"]},
    ],
)
def test_whatever_a_sender_calls_an_action_gives_a_frame(action: dict[str, Any]) -> None:
    screen = _screen(60, 40, (0, 0, 120))
    assert len(_frames(make_film(_rollout([(screen, action)], None), {screen.sha256: screen}))) == 1


def test_a_rollout_of_text_alone_has_no_film_and_says_so() -> None:
    with pytest.raises(NotFoundError, match="expected a rollout with screenshots, got 'one' without"):
        make_film(_rollout([(None, None)], None), {})


@pytest.mark.parametrize("more", [{"to_x": 5}, {"to_y": 5, "down_px": 40}])
def test_a_scroll_with_fields_of_another_action_is_drawn_as_a_scroll(more: dict[str, int]) -> None:
    screen = _screen(200, 400, (0, 0, 120))
    scroll = {"type": "Scroll", "x": 100, "y": 300, **more}

    assert len(_frames(make_film(_rollout([(screen, scroll)], None), {screen.sha256: screen}))) == 1
