"""A small recorded run: its turns are asked about again, under the checkpoint that sampled them and under others."""

import json
import re
import shutil
from dataclasses import replace
from math import fsum
from pathlib import Path
from statistics import fmean

import pytest
from sqlalchemy import select

from cua_rl.database.models import Eval, Group, RolloutRow, Step
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.recipes.ask_checkpoints import AskConfig, cli_main, require_parity
from cua_rl.reporting.asked import AskedTurn
from cua_rl.run.asking import find_models, load_recorded, open_questions
from cua_rl.run_folder.log_directory import load_settings
from cua_rl.run_folder.recorded_run import RecordedTraining, open_training
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import VllmServer
from cua_rl.types.errors import ConfigError, ParityError
from tests.real.end_to_end.runs import Run
from tests.real.evaluation.shown import get, open_monitor

pytestmark = pytest.mark.timeout(900)

PARITY_LIMIT = 0.005
"""Of the run, see `runs.SMALL`."""


@pytest.fixture(scope="module")
def folder(server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = Run(
        tmp_path_factory.mktemp("asked") / "run",
        "max_steps=2",
        "sampling.seed=1",
        f"base_url={server.base_url}",
        "monitor=false",
    )
    assert run.finish() == 0, run.output()
    return run.folder


async def rollouts_of(run: RecordedTraining, *, step: int, eval_step: int) -> list[str]:
    """Ids of a training step's rollouts, and of those of an evaluation."""
    query = select(RolloutRow.rollout_id).join(Group, RolloutRow.group_pk == Group.id)
    query = query.outerjoin(Step, Group.step_id == Step.id).outerjoin(Eval, Group.eval_id == Eval.id)
    return list(await run.session.scalars(query.where((Step.step == step) | (Eval.step == eval_step))))


@pytest.mark.asyncio(loop_scope="session")
async def test_every_turn_has_its_recorded_logprobs_under_the_checkpoint_that_sampled_it_and_no_other(
    server: VllmServer, folder: Path
) -> None:
    asked: list[AskedTurn] = []
    async with open_training(folder, {}, "log_path") as run:
        models = find_models(run, [], TINY_QWEN3_VL)
        # version 1 sampled step 2 at temperature 1, version 2 the last evaluation at 0.5
        chosen = [await load_recorded(run, one) for one in await rollouts_of(run, step=2, eval_step=2)]
        async with open_questions(run, chosen[0], models, ServerConfig(), server.base_url) as questions:
            for recorded in chosen:
                asked += [await questions.ask(recorded, place, models, 1) for place in recorded.places(None)]

    assert len(asked) >= 24
    assert {(one.policy_version, one.temperature) for one in asked} == {(1, 1.0), (2, 0.5)}
    done = {
        (one.rollout.rollout_id, turn.index + 1): turn.agent.actions for one in chosen for turn in one.rollout.turns
    }
    for one in asked:
        own, others = ([each for each in one.checkpoints if each.is_own is is_own] for is_own in (True, False))
        assert [each.name for each in own] == [f"step {one.policy_version}"]
        assert others[0].name == "base"
        assert own[0].logprobs == pytest.approx(one.recorded.logprobs, abs=PARITY_LIMIT)
        assert one.recorded.actions == done[one.rollout_id, one.turn]
        require_parity(one, PARITY_LIMIT)
    # how far a step moves an answer depends on what the run drew; rounding is orders of magnitude smaller
    own_gap = fmean(each.mean_abs_gap for one in asked for each in one.checkpoints if each.is_own)
    for name in ("base", "step 1", "step 2"):
        gaps = [each.mean_abs_gap for one in asked for each in one.checkpoints if each.name == name and not each.is_own]
        assert fmean(gaps) > 10 * own_gap
    # another checkpoint that passes itself off as the one that sampled the turn
    pairs = ((one, each) for one in asked for each in one.checkpoints if not each.is_own)
    one, other = max(pairs, key=lambda pair: pair[1].mean_abs_gap)
    limit = other.mean_abs_gap / 2
    message = f"from {other.name}, which sampled it, within {limit} nats on average"
    with pytest.raises(ParityError, match=re.escape(message)):
        require_parity(replace(one, checkpoints=[replace(other, is_own=True)]), limit)


async def test_the_command_prints_a_table_and_writes_answers_and_a_picture_and_the_monitor_shows_them(
    server: VllmServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (folder / "outcomes.jsonl").read_text().partition('"success_id": "')[2]
    rollout_id = words.partition('"')[0]
    given = {"log_path": folder, "rollout_id": rollout_id[:-2], "turn": 1, "num_samples": 3}

    await cli_main(AskConfig(**given, base_url=server.base_url))

    place = folder / "answers" / f"{rollout_id}-1"
    found = json.loads(place.with_suffix(".json").read_text())
    assert [one["name"] for one in found["checkpoints"]] == ["base", "step 1", "step 2"]
    assert [one["is_own"] for one in found["checkpoints"]] == [
        version == found["policy_version"] for version in range(3)
    ]
    assert all(len(one["samples"]) == 3 for one in found["checkpoints"])
    assert any(each["actions"] for one in found["checkpoints"] for each in one["samples"])
    assert place.with_suffix(".png").stat().st_size > 10_000
    async with open_monitor(folder) as client:
        (asked,) = await get(client, f"/api/runs/1/rollouts/{rollout_id}/asked")
    assert (asked["turn_index"], asked["logprob"]) == (0, fsum(found["recorded"]["logprobs"]))
    for shown, written in zip(asked["checkpoints"], found["checkpoints"], strict=True):
        assert (shown["name"], shown["logprob"]) == (written["name"], fsum(written["logprobs"]))
        assert [one["actions"] for one in shown["samples"]] == [one["actions"] for one in written["samples"]]
        assert all(action["type"] for one in shown["samples"] for action in one["actions"])
    said = capsys.readouterr().out
    assert "which sampled it" in said
    assert f"turn 1 of rollout {rollout_id}" in said.replace("\n", " ")


@pytest.mark.asyncio(loop_scope="session")
async def test_what_cannot_be_asked_is_refused_before_a_model_loads(folder: Path, tmp_path: Path) -> None:
    async with open_training(folder, {}, "log_path") as run:
        (rollout_id, *_) = await rollouts_of(run, step=2, eval_step=2)
        recorded = await load_recorded(run, rollout_id)
        with pytest.raises(ConfigError, match="got 'nothing', which the run has not"):
            await load_recorded(run, "nothing")
        with pytest.raises(ConfigError, match=r"turn: expected one of the [0-9]+ turns .* got 99"):
            recorded.places(99)
        with pytest.raises(ConfigError, match=r"steps \[1, 2\], got '9', which was pruned or never saved"):
            find_models(run, ["9"], TINY_QWEN3_VL)
        other = tmp_path / "other"
        shutil.copytree(folder / "sampler_weights", other / "sampler_weights")
        (other / "config.json").write_text(
            json.dumps(load_settings(folder, "log_path") | {"model_name": "Other/Model"})
        )
        with pytest.raises(ConfigError, match=r"of the run's base model 'tiny_qwen3_vl', got .* of 'Model'"):
            find_models(run, [f"{other}@1"], TINY_QWEN3_VL)
