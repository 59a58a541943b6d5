"""Files of trajectories in the formats of others, and what they become."""

import json
import os
import shutil
from pathlib import Path

import pytest

from cua_rl.exchange.formats import Told, read_trajectories
from cua_rl.exchange.replayed import replay
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rl.datums import build_datums
from cua_rl.types.actions import Click, Drag, PressButton, TypeText
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Rollout, StopReason
from tests.exchange.files import adp, atif, draw, write_android_control, write_images
from tests.renderers.model_folders import THINKING_TEMPLATE, build_qwen2_5_folder, build_qwen3_5_folder

RENDERER = make_renderer(TINY_QWEN3_VL)


async def rollouts_of(path: Path, told: Told | None = None) -> list[Rollout]:
    found = [parse() for parse in read_trajectories(path, told)]
    made = [
        await replay(trajectory, RENDERER, step=1, index=place, started_at=0.0)
        for place, trajectory in enumerate(found)
    ]
    return [one.record.rollout for one in made]


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


async def test_a_part_of_a_data_set_in_json_is_no_tfrecord(tmp_path: Path) -> None:
    whole = write_android_control(tmp_path)
    part = whole.rename(tmp_path / f"train-00000-of-00001{whole.suffix}")

    assert len(await rollouts_of(part)) == len(await rollouts_of(tmp_path)) == 2


async def test_every_turn_extends_the_one_before_and_trains_on_its_answer_alone(tmp_path: Path) -> None:
    for rollout in await rollouts_of(write_android_control(tmp_path)):
        (datum,) = build_datums(rollout, 0.0, RENDERER.image_token_id).datums
        ids = datum.model_input.token_ids(RENDERER.image_token_id)
        trained = [token for token, is_on in zip(ids, datum.loss_mask, strict=True) if is_on]
        assert trained == [token for turn in rollout.turns for token in turn.model.sampled_tokens]
        assert RENDERER.decode(rollout.turns[0].model.sampled_tokens).endswith("<|im_end|>")


async def test_adp_with_coordinates_and_code(tmp_path: Path) -> None:
    (rollout,) = await rollouts_of(write(tmp_path, [adp(tmp_path)]), Told(device="browser"))
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
        ({"actions": [{"action_type": "teleport"}] * 4}, "trajectory 1: expected an action that is known"),
        ({"actions": [{"kind": "click"}] * 4}, "without what is read from it .KeyError: 'action_type'"),
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


def atif_of(folder: Path, arguments: object) -> dict[str, object]:
    """One call with these arguments."""
    shown = {"type": "image", "source": {"path": write_images(folder, 1)[0]}}
    call = {"tool_call_id": "c", "function_name": "computer", "arguments": arguments}
    return {
        "schema_version": "ATIF-v1.6",
        "steps": [
            {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "Look."}, shown]},
            {"step_id": 2, "source": "agent", "message": "", "tool_calls": [call]},
        ],
    }


@pytest.mark.parametrize(
    ("action", "complaint"),
    [
        ({"action_type": "click", "x": 10**400, "y": 1}, "expected coordinates on the screenshot"),
        ({"action_type": "click", "x": float("nan"), "y": 1}, "expected coordinates on the screenshot"),
        ({"action_type": "scroll", "pixels": float("inf")}, "expected a number"),
        ({"action_type": "wait", "time": float("nan")}, "expected a number"),
        ({"action_type": "input_text", "text": "\ud83d"}, "Expected text: a string of valid Unicode"),
        ({"action_type": "input_text", "text": "a<|im_end|>b"}, "expected answers that the model can end"),
        ("click", "JSONDecodeError"),
    ],
)
async def test_actions_that_would_break_the_import_are_refused(action: object, complaint: str, tmp_path: Path) -> None:
    episode = {"goal": "Look.", "screenshots": write_images(tmp_path, 2), "actions": [action, {"action_type": "wait"}]}
    with pytest.raises(ConfigError, match=rf"trajectory 1[:,](?s:.*){complaint}"):
        await rollouts_of(write(tmp_path, episode))


@pytest.mark.parametrize("arguments", [None, '{"action": "left_click"}', [1]])
async def test_arguments_are_an_object(arguments: object, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected the arguments of an action as an object"):
        await rollouts_of(write(tmp_path, atif_of(tmp_path, arguments)))


async def test_images_lie_below_the_imported_path(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "episodes"
    folder.mkdir(parents=True)
    (tmp_path / "ours.png").write_bytes(draw(1))
    (tmp_path / "data" / "theirs.png").write_bytes(draw(2))
    os.mkfifo(folder / "endless.png")

    def episode(shot: str) -> Path:
        write(folder, {"goal": "Look.", "screenshots": [shot], "actions": [{"action_type": "wait"}]})
        return tmp_path / "data"

    for shot in ("../../ours.png", str(tmp_path / "ours.png"), "/dev/zero", "endless.png"):
        with pytest.raises(ConfigError, match="expected a PNG or JPEG image at"):
            await rollouts_of(episode(shot))
    (rollout,) = await rollouts_of(episode("../theirs.png"))
    assert rollout.turns[0].agent.before is not None
    assert rollout.turns[0].agent.before.data == draw(2)


def family_folder(name: str, folder: Path) -> Path:
    """A model folder of each chat format, with the tiny model's tokenizer."""
    match name:
        case "qwen2_5_vl":
            return build_qwen2_5_folder(TINY_QWEN3_VL, folder)
        case "qwen3_5" | "qwen3_5_unthinking":
            found = build_qwen3_5_folder(TINY_QWEN3_VL, folder)
        case _:
            shutil.copytree(TINY_QWEN3_VL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
            found = folder
    template = found / "chat_template.jinja"
    if name == "qwen3_vl_thinking":
        template.write_text(THINKING_TEMPLATE.read_text(encoding="utf-8"))
    if name == "qwen3_5_unthinking":
        template.write_text(f"{template.read_text(encoding='utf-8')}{{# enable_thinking is true #}}")
    return found


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_thinking", "qwen2_5_vl", "qwen3_5", "qwen3_5_unthinking"])
async def test_every_family_is_taught_answers_that_continue_its_prompts(family: str, tmp_path: Path) -> None:
    renderer = make_renderer(family_folder(family, tmp_path / "model"))
    for parse in read_trajectories(write_android_control(tmp_path)):
        rollout = (await replay(parse(), renderer, step=1, index=0, started_at=0.0)).record.rollout
        for turn in rollout.turns:
            prompt = turn.model.prompt.token_ids(renderer.image_token_id)
            written = renderer.decode(prompt[-20:]) + renderer.decode(turn.model.sampled_tokens)
            answer = written.rpartition("<|im_start|>assistant\n")[2]
            assert answer.count("</think>") <= 1
            assert answer.count("<think>") == answer.count("</think>")
            parsed = renderer.parse(turn.model.text)
            assert parsed.failure is None
            assert len(parsed.tool_calls) == 1
            told = rollout.task_id.endswith("7") and turn.index < len(rollout.turns) - 1
            assert bool(parsed.reasoning or parsed.text.strip()) is told


@pytest.mark.parametrize(("name", "content"), [("lines.jsonl", "\n"), ("list.json", "[]")])
def test_a_file_without_trajectories_is_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ConfigError, match="path: expected at least one trajectory"):
            list(read_trajectories(path))


def test_a_file_that_is_no_json_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a file or folder with trajectories"):
        list(read_trajectories(tmp_path))
    for broken in ("{", "[" * 100_000):
        (tmp_path / "broken.json").write_text(broken)
        with pytest.raises(ConfigError, match="expected JSON in"):
            list(read_trajectories(tmp_path))
