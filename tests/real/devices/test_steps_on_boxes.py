"""A whole training step on GBox boxes of both kinds, the model giving coordinates or describing elements."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.environments.gbox.coordinate_model import GboxCoordinateModel
from cua_rl.environments.pool import open_pool
from cua_rl.events import GroupEnded
from cua_rl.host.http_server import serve_app
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.rewards.reward import binary_reward
from cua_rl.rl.stages import LoopParts
from cua_rl.rl.sync_loop import train
from cua_rl.rollout.run import RolloutRunner
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer
from cua_rl.task_loader import load_tasks
from cua_rl.types.rollout import SamplingParams
from tests.doubles.gbox_desktop import FIELD, NOTE, SAVE, SIZE_PX
from tests.doubles.gbox_phone import PhoneBox
from tests.doubles.gbox_server import GboxDouble
from tests.doubles.gbox_service import GboxService, serve_gbox
from tests.fakes import FakePolicy, FakeRecorder, FakeTrainer
from tests.rl.test_sync_loop import Log, settings
from tests.sampling.fake_vllm import FakeVllm

PARAMS = SamplingParams(max_tokens=400, temperature=1.0)
FIRST_BOX = next(number for number in range(100) if "settings" in PhoneBox(number).elements())
PHONE_TASK = {"instruction": "Open Settings.", "check": {"query": "current_app", "expected": "com.android.settings"}}
DESKTOP_TASK = {"instruction": "Save milk.", "check": {"query": f"file_text:{NOTE}", "expected": "milk"}}
END = {"action": "terminate", "status": "success"}


def relative(pixel: tuple[int, int], size_px: tuple[int, int]) -> list[int]:
    return [round(1000 * at / size) for at, size in zip(pixel, size_px, strict=True)]


def centre(box: tuple[int, int, int, int]) -> tuple[int, int]:
    return (box[0] + box[2]) // 2, (box[1] + box[3]) // 2


def answers(box_type: str, mode: str) -> list[str]:
    """A rollout that reaches its goal, then one that gives up at once."""
    icon = PhoneBox(FIRST_BOX).elements()["settings"]
    ways: Mapping[tuple[str, str], list[dict[str, Any]]] = {
        ("android", "direct"): [{"action": "click", "coordinate": relative(icon, (192, 320))}],
        ("android", "gbox"): [
            {"action": "click", "target": {"element": "a unicorn"}},  # not there: the model is told
            {"action": "click", "target": {"element": "app icon", "label": "Settings"}},
        ],
        ("linux", "direct"): [
            {"action": "left_click", "coordinate": relative(centre(FIELD), SIZE_PX)},
            {"action": "type", "text": "milk"},
            {"action": "left_click", "coordinate": relative(centre(SAVE), SIZE_PX)},
        ],
        ("linux", "gbox"): [
            {"action": "left_click", "target": {"element": "text field"}},
            {"action": "type", "text": "milk"},
            {"action": "scroll", "target": "list", "direction": "down"},
            {"action": "left_click_drag", "target": "list", "destination": "clear"},
            {"action": "left_click", "target": "the save button"},
        ],
    }
    name = {"android": "mobile", "linux": "computer"}[box_type] + {"direct": "_use", "gbox": "_act"}[mode]
    calls = [*ways[box_type, mode], END, {"action": "terminate", "status": "failure"}]
    return [f"<tool_call>\n{json.dumps({'name': name, 'arguments': call})}\n</tool_call>" for call in calls]


async def run_step(
    gbox: GboxService, renderer: Qwen3VLRenderer, box_type: str, mode: str, films: Path
) -> tuple[Log, FakeTrainer, FakeRecorder]:
    """One step of one group of two, one device after the other."""
    fake, recorder, trainer, log = FakeVllm(renderer, max_model_len=8000), FakeRecorder(), FakeTrainer(), Log()
    fake.answers += answers(box_type, mode)
    backend = gbox.backend(box_type, films=films)
    custom = PHONE_TASK if box_type == "android" else DESKTOP_TASK
    model = GboxCoordinateModel(gbox.connect().client)
    async with (
        serve_app(fake.app(), "127.0.0.1", 0, grace_s=0) as url,
        ExternalServer(url) as server,
        SamplingClient(server, namespace="run") as sampling,
        open_pool(backend, max_devices=1) as pool,
    ):
        runner = RolloutRunner(
            devices=pool,
            gateway=Gateway(sampling, renderer, PARAMS),
            agent=GBoxAgent(grounder=model if mode == "gbox" else None),
            reward=binary_reward,
            recorder=recorder,
            max_turns=8,
        )
        tasks = {"source_type": "custom", "custom_tasks": [custom]}
        parts = LoopParts(
            tasks=load_tasks(tasks, seed=0, split="train", device=backend.abilities),
            runner=runner,
            trainer=trainer,
            policy=FakePolicy(),
            evaluator=None,
            recorder=recorder,
            log=log,
            device_metrics=pool.take_metrics,
        )
        image_token_id = renderer.image_token_id
        await train(settings(max_steps=1, groups_per_batch=1, params=PARAMS, image_token_id=image_token_id), parts)
    await model.close()
    return log, trainer, recorder


@pytest.mark.parametrize("mode", ["direct", "gbox"])
@pytest.mark.parametrize("box_type", ["android", "linux"])
async def test_a_step_trains_on_what_was_done_in_boxes(
    box_type: str, mode: str, small_renderer: Qwen3VLRenderer, tmp_path: Path
) -> None:
    async with serve_gbox(GboxDouble(seed=FIRST_BOX)) as gbox:
        log, trainer, recorder = await run_step(gbox, small_renderer, box_type, mode, tmp_path)

        assert gbox.double.alive == []
        assert gbox.double.most_alive == 1
    ((_, metrics),) = log.steps
    assert (metrics["reward/mean"], metrics["rollout/num_rollouts"]) == (0.5, 2)
    assert (metrics["device/num_leases"], metrics["device/num_made"]) == (2, 2)
    assert metrics["rollout/prompt_mismatches"] == 0
    assert "optim_step" in trainer.calls
    (ended,) = (event for event in recorder.events if isinstance(event, GroupEnded))
    solved, failed = ended.group.rollouts
    assert (solved.success, failed.success) == (True, False)
    assert ended.advantages == (0.5, -0.5)
    assert len({turn.agent.before.sha256 for turn in solved.turns}) >= 2  # the screen answered
    refused = [turn.agent.action_error for turn in solved.turns if turn.agent.action_error]
    assert len(refused) == (1 if (box_type, mode) == ("android", "gbox") else 0)
    assert {film.stem for film in tmp_path.iterdir()} == {solved.rollout_id, failed.rollout_id}
