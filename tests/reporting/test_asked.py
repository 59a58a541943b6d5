"""The picture of what checkpoints answer to a turn."""

from io import BytesIO

from PIL import Image, ImageColor

from cua_rl.reporting.asked import Answer, AskedTurn, CheckpointAnswers, colour_of, draw_answers
from cua_rl.types.actions import Click, Wait
from cua_rl.types.conversation import EncodedImage


def answer(*actions: Click | Wait) -> Answer:
    return Answer(text="a", done=", ".join(map(repr, actions)), actions=actions, logprobs=(-1.0,))


def checkpoint(name: str, *samples: Answer) -> CheckpointAnswers:
    return CheckpointAnswers(name=name, is_own=False, logprobs=(-0.5, -0.25), mean_abs_gap=0.1, samples=samples)


def test_each_checkpoint_rings_its_clicks_in_its_colour_around_the_recorded_one() -> None:
    data = BytesIO()
    Image.new("RGB", (192, 200), "white").save(data, "PNG")
    seen = EncodedImage(data=data.getvalue(), format="png", width_px=192, height_px=200)
    here, there = answer(Click(x=50, y=60)), answer(Click(x=120, y=150))
    asked = AskedTurn(
        rollout_id="r",
        turn=1,
        policy_version=0,
        temperature=1.0,
        recorded=here,
        checkpoints=[checkpoint("base", there, answer(Wait(duration_s=1.0))), checkpoint("step 1", here, here)],
        seen=seen,
    )

    picture = draw_answers(seen, asked)

    # radii: 4 for what was recorded, 7 for the first checkpoint and 10 for the second
    first, second = (ImageColor.getrgb(colour_of(index, 2)) for index in range(2))
    assert first != second
    assert picture.getpixel((54, 60)) == (0, 0, 0)
    assert picture.getpixel((127, 150)) == first
    assert picture.getpixel((60, 60)) == second
    assert picture.getpixel((57, 60)) == picture.getpixel((124, 150)) == (255, 255, 255)
    assert asked.as_json()["checkpoints"][1]["samples"][0]["actions"] == [{"type": "Click", "x": 50, "y": 60}]
