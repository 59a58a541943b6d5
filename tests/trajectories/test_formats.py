"""Files of trajectories in the formats of others, and what they become."""

import json
from pathlib import Path

import pytest

from cua_rl.actions import Click, Drag, PressButton, TypeText
from cua_rl.errors import ConfigError
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rl.datums import build_datums
from cua_rl.trajectories.formats import read_trajectories
from cua_rl.trajectories.replayed import replay
from cua_rl.types import Rollout, StopReason
from tests.trajectories.files import adp, atif, draw, write_android_control

RENDERER = make_renderer(TINY_QWEN3_VL)


async def rollouts_of(path: Path) -> list[Rollout]:
    found = [parse() for parse in read_trajectories(path)]
    records = [
        await replay(trajectory, RENDERER, step=1, index=place, started_at=0.0)
        for place, trajectory in enumerate(found)
    ]
    return [record.rollout for record in records]


def write(folder: Path, value: object) -> Path:
    path = folder / "trajectory.json"
    path.write_text(json.dumps(value))
    return path


async def test_an_episode_of_android_control_becomes_a_rollout_of_our_agent(tmp_path: Path) -> None:
    first, second = await rollouts_of(write_android_control(tmp_path))

    # the app that is opened by name is open when the rollout begins
    assert [turn.agent.action for turn in first.turns] == [
        Click(x=96, y=160),
        Drag(x=96, y=256, to_x=96, to_y=64),
        Click(x=48, y=32),
        None,
    ]
    assert [turn.agent.before.data for turn in first.turns if turn.agent.before] == [
        draw(place) for place in (1, 2, 3, 4)
    ]
    assert [None if turn.agent.after is None else turn.agent.after.data for turn in first.turns] == [
        draw(2), draw(3), draw(4), None,
    ]  # fmt: skip
    assert first.turns[0].model.text.startswith("<think>\nClick on Network\n</think>")
    assert '"action": "terminate", "status": "success"' in first.turns[-1].model.text
    assert first.stop_reason is StopReason.FINISHED
    assert (first.success, first.task_id) == (True, "android_control/7")

    # it has no screenshot after its last action, so there is nothing on which to say that it is done
    assert [turn.agent.action for turn in second.turns][1:] == [TypeText(text="tea"), PressButton(button="back")]  # pyright: ignore[reportArgumentType]
    assert second.stop_reason is StopReason.MAX_TURNS
    assert second.turns[-1].agent.after is None


async def test_every_turn_extends_the_one_before_and_trains_on_its_answer_alone(tmp_path: Path) -> None:
    for rollout in await rollouts_of(write_android_control(tmp_path)):
        (datum,) = build_datums(rollout, 0.0, RENDERER.image_token_id).datums
        ids = datum.model_input.token_ids(RENDERER.image_token_id)
        trained = [token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on]
        assert trained == [token for turn in rollout.turns for token in turn.model.sampled_tokens]
        assert RENDERER.decode(rollout.turns[0].model.sampled_tokens).endswith("<|im_end|>")


async def test_adp_with_coordinates_and_code(tmp_path: Path) -> None:
    (rollout,) = await rollouts_of(write(tmp_path, [adp(tmp_path)]))
    assert [turn.agent.action for turn in rollout.turns] == [
        Click(x=96, y=80),
        Click(x=96, y=80),
        TypeText(text="Rome"),
        None,
    ]
    assert rollout.turns[0].model.text.startswith("<think>\nI see a form.\n</think>")
    # both calls of one piece of code begin on the same screen
    assert [turn.agent.before.data for turn in rollout.turns if turn.agent.before] == list(map(draw, (0, 1, 1, 2)))


async def test_atif_with_images_in_messages_and_observations(tmp_path: Path) -> None:
    (rollout,) = await rollouts_of(write(tmp_path, atif(tmp_path)))
    assert rollout.task_id == "atif/s1"
    assert rollout.turns[0].agent.action == Click(x=190, y=2)
    assert "The cross closes it." in rollout.turns[0].model.text
    assert [turn.agent.before.data for turn in rollout.turns if turn.agent.before] == list(map(draw, range(3)))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"actions": [{"action_type": "click", "x": 1, "y": 1}]}, "expected a screenshot before each of the 1 actions"),
        ({"actions": [{"action_type": "teleport"}] * 4}, "trajectory 1: expected an action with a counterpart"),
        ({"actions": [{"kind": "click"}] * 4}, "without what it needs .KeyError: 'action_type'"),
        ({"screenshots": ["shots/none.png"] * 4}, "expected a PNG or JPEG image at 'shots/none.png'"),
        ({"goal": None, "actions": None}, "expected a trajectory with schema_version ATIF-v1"),
        ({"goal": ""}, "expected an instruction and steps with screenshots"),
    ],
)
async def test_what_cannot_be_read_names_its_place(change: dict[str, object], complaint: str, tmp_path: Path) -> None:
    lines = write_android_control(tmp_path).read_text().splitlines()
    value = {key: entry for key, entry in (json.loads(lines[0]) | change).items() if entry is not None}
    with pytest.raises(ConfigError, match=complaint):
        await rollouts_of(write(tmp_path, value))


def test_a_file_that_is_no_json_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file or folder with trajectories"):
        list(read_trajectories(tmp_path))
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(ConfigError, match="expected JSON in"):
        list(read_trajectories(tmp_path))
