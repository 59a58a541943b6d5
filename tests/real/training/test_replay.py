"""Steps of recorded runs, made again and in other ways, by a trainer in this process."""

import shutil
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from sqlalchemy import text

from cua_rl.command_line.fields import with_values
from cua_rl.database.postgres import open_own_database
from cua_rl.recipes.replay_step import compare, describe, measure
from cua_rl.reporting.what_if import RolloutChange
from cua_rl.rl.advantages import score_group
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.run.replay import Replay, other_config, replay_step, what_if
from cua_rl.run_folder.recorded_run import RecordedTraining, open_training
from cua_rl.training.config import LossConfig
from cua_rl.training.trainer import Trainer
from cua_rl.training.updates import read_gradient
from cua_rl.types.errors import ConfigError, DatabaseError
from tests.real.training.recorded_training import NUM_STEPS, loop_config, open_local, record_training
from tests.real.training.tiny_qwen3_vl import build_random_qwen3_vl
from tests.real.training.trainer_calls import forward

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUNS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"max_steps_off_policy": 2, "loss": LossConfig(name="ppo")},
    "divergence": {
        "loss": LossConfig(name="ppo", kl_loss_coef=0.1, tis_cap=2.0),
        "advantages": "batch_std",
        "num_substeps": 2,
    },
}
ENVIRONMENT = "DATABASE_URL"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runs(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[Path, str]]:
    """Three runs in one database: their folder, and the database's address."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "logs").mkdir()
    async with open_own_database(folder) as url:
        for name, changes in RUNS.items():
            await record_training(folder / name, model_path, url, loop_config(**changes))
        yield folder, url


async def made_again(
    runs: tuple[Path, str], name: str, number: int, folder: Path, model_path: Path
) -> tuple[RecordedTraining, Replay]:
    """The run's session is closed afterwards."""
    async with open_training(runs[0] / name, {ENVIRONMENT: runs[1]}, "log_path") as run:
        return run, await replay_step(run, number, model_path, open_local, folder)


@pytest.mark.parametrize("name", RUNS)
async def test_every_step_is_made_again_to_its_last_bit(
    runs: tuple[Path, str], name: str, tmp_path: Path, model_path: Path
) -> None:
    for number in range(1, NUM_STEPS + 1):
        run, replay = await made_again(runs, name, number, tmp_path / str(number), model_path)

        found = compare(run, replay)

        assert (replay.start, replay.logprob_gap) == (number - 1, 0.0)
        assert found["adapter"] is not None
        assert found["optimizer"] is not None
        assert found["adapter"].is_equal
        assert found["optimizer"].is_equal
        assert found["adapter"].scale > 0.0
        assert replay.trained_on == replay.row.trained_on


async def test_a_step_far_from_a_checkpoint_is_replayed_forward_and_compared_by_its_hash(
    runs: tuple[Path, str], tmp_path: Path, model_path: Path
) -> None:
    folder = tmp_path / "sync"  # as the run's retention would have left it
    shutil.copytree(runs[0] / "sync", folder)
    for kind in ("weights", "sampler_weights"):
        for step in (1, 2, 3):
            shutil.rmtree(folder / kind / f"{step:06d}")

    async with open_training(runs[0] / "sync", {ENVIRONMENT: runs[1]}, "log_path") as whole:
        run = replace(whole, folder=folder)
        replay = await replay_step(run, 3, model_path, open_local, tmp_path / "replay")

    found = compare(run, replay)
    assert (replay.start, found["optimizer"]) == (0, None)
    assert found["adapter"] is not None
    assert found["adapter"].is_equal
    assert "made again from the run's beginning" in describe(run, replay, found)[0]


async def test_what_cannot_be_made_again_is_refused_with_the_reason(
    runs: tuple[Path, str], tmp_path: Path, model_path: Path
) -> None:
    async with open_training(runs[0] / "sync", {ENVIRONMENT: runs[1]}, "log_path") as run:
        with pytest.raises(ConfigError, match="of 1 to 4, got 9"):
            await replay_step(run, 9, model_path, open_local, tmp_path)
        other = build_random_qwen3_vl(tmp_path / "other", seed=1)
        with pytest.raises(ConfigError, match="expected the model that the run trained"):
            await replay_step(run, 1, other, open_local, tmp_path / "of another")
        without = replace(run, steps=[row for row in run.steps if row.step != 2], folder=tmp_path)
        with pytest.raises(DatabaseError, match="got none of \\[2\\]"):
            await replay_step(without, 3, model_path, open_local, tmp_path)
        await run.session.execute(text("UPDATE screenshots SET data = NULL, size_bytes = 1, removed_at = now()"))
        with pytest.raises(DatabaseError, match="rollouts that were pruned"):
            await replay_step(run, 2, model_path, open_local, tmp_path / "of pruned")


@pytest.mark.parametrize("name", ["sync", "async"])
async def test_the_same_settings_give_the_same_update_and_no_learning_rate_none(
    runs: tuple[Path, str], name: str, tmp_path: Path, model_path: Path
) -> None:
    same = {"sync": "importance_sampling", "async": "ppo"}[name]
    variants = [{"loss": same}, {"learning_rate": 0}, {"advantages": "mean_std", "kl_penalty_coef": 1}]
    async with open_training(runs[0] / name, {ENVIRONMENT: runs[1]}, "log_path") as run:
        replay = await replay_step(run, 2, model_path, open_local, tmp_path)
        outcomes = await what_if(run, replay, variants, open_local, tmp_path)

    taken, again, still, other = measure(replay, outcomes)

    assert (taken.name, still.name) == ("as taken", "learning_rate=0")
    assert again.cosine == pytest.approx(1.0, abs=1e-12)
    assert again.gradient_cosine == pytest.approx(1.0, abs=1e-12)
    assert (again.norm, again.relative_norm, again.rollouts) == (taken.norm, 1.0, taken.rollouts)
    assert (still.norm, still.cosine) == (0.0, None)
    assert {one.change for one in still.rollouts} == {0.0}
    assert taken.norm > 0.0
    assert len(taken.rollouts) == 6
    assert other.cosine is not None
    assert other.gradient_cosine is not None
    assert other.gradient_cosine < 1 - 1e-6
    # the step raises what was better than its group, and lowers the rest
    moved = {success: taken.mean_change(success=success) for success in (True, False)}
    assert moved[True] is not None
    assert moved[False] is not None
    assert moved[True] > moved[False]


async def test_a_success_that_joined_two_groups_of_the_step_is_counted_once(
    runs: tuple[Path, str], tmp_path: Path, model_path: Path
) -> None:
    async with open_training(runs[0] / "sync", {ENVIRONMENT: runs[1]}, "log_path") as run:
        (success, *_) = [one for scored in await run.load_groups(1) for one in scored.group.rollouts if one.success]
        replay = await replay_step(run, 2, model_path, open_local, tmp_path)
        joined = [score_group(replace(scored.group, replayed=(success,)), "leave_one_out") for scored in replay.groups]
        found: list[RolloutChange] = []
        for num_groups in (1, 2):
            part = replace(replay, groups=joined[:num_groups])
            (taken,) = measure(part, await what_if(run, part, [], open_local, tmp_path))
            found += [one for one in taken.rollouts if one.rollout_id == success.rollout_id]

    once, twice = found
    assert twice.change == pytest.approx(once.change, rel=1e-3)  # its log-probability is what it is
    assert once.advantage == joined[0].advantages[-1]
    assert twice.advantage == joined[0].advantages[-1] + joined[1].advantages[-1]  # as it was trained on


@pytest.mark.parametrize("loss", ["importance_sampling", "dro"])
async def test_the_gradient_of_another_loss_is_that_of_finite_differences(
    runs: tuple[Path, str], loss: str, tmp_path: Path, model_path: Path
) -> None:
    async with open_training(runs[0] / "async", {ENVIRONMENT: runs[1]}, "log_path") as run:
        replay = await replay_step(run, 3, model_path, open_local, tmp_path)
        outcomes = await what_if(run, replay, [{"loss": loss, "grad_clip_norm": 0}], open_local, tmp_path)
        batch = run.build_batch(3, replay.groups)
    beta1 = outcomes[1].beta1
    assert beta1 is not None
    gradient = read_gradient(replay.before, outcomes[1].after, beta1)
    norm = sum(one.square().sum() for one in gradient) ** 0.5
    torch.manual_seed(0)
    aside = [torch.randn_like(one) for one in gradient]
    far = sum(one.square().sum() for one in aside) ** 0.5
    direction = [one / norm + other / far for one, other in zip(gradient, aside, strict=True)]
    trainer = Trainer(replay.config.trainer)
    trainer.load_state(replay.before, with_optimizer=True)

    def total(shift: float) -> float:
        """The step's loss by its formula, the weights shifted along the direction."""
        for parameter, one in zip(trainer.model.trainable_parameters, direction, strict=True):
            parameter.data += (shift * one).float()
        rows = forward(trainer, batch.datums)
        for parameter, one in zip(trainer.model.trainable_parameters, direction, strict=True):
            parameter.data -= (shift * one).float()
        found = 0.0
        for datum, row in zip(batch.datums, rows, strict=True):
            gap = row.double() - torch.tensor(datum.sampling_logprobs, dtype=torch.float64)
            advantages = torch.tensor(datum.advantages, dtype=torch.float64)
            each = -gap.exp() * advantages if loss == "importance_sampling" else 0.025 * gap**2 - advantages * row
            found += float(each[torch.tensor(datum.loss_mask)].sum()) / 1000 / batch.num_rollouts
        return found

    expected = float(sum((one * other).sum() for one, other in zip(gradient, direction, strict=True)))
    shift = 5e-3
    assert (total(shift) - total(-shift)) / (2 * shift) == pytest.approx(expected, rel=0.02)


async def test_only_settings_of_a_step_can_be_others() -> None:
    config = loop_config()

    changed = other_config(config, {"loss": "gspo", "clip_high": 0.5, "learning_rate": 0.5})

    # gspo has clips of its own, unless they are given
    assert (changed.loss.name, changed.loss.clip_low, changed.loss.clip_high) == ("gspo", 3e-4, 0.5)
    assert (changed.learning_rate, changed.adam, changed.advantages) == (0.5, config.adam, config.advantages)
    with pytest.raises(ConfigError, match="what_if: expected settings of a step"):
        other_config(config, {"temperature": 0.5})
    with pytest.raises(ConfigError, match="loss"):
        other_config(config, {"loss": "something"})
    with pytest.raises(ConfigError, match="dual_clip"):
        other_config(config, {"dual_clip": 3})
    branched = with_values(
        config, group_size=4, advantages="leave_one_out", branching=BranchingSettings(num_siblings=1)
    )
    with pytest.raises(ConfigError, match="leave_one_out"):
        other_config(branched, {"advantages": "mean"})
