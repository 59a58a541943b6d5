from collections.abc import Sequence
from typing import Any

import pytest

from cua_rl.metrics import check_names
from cua_rl.rl.config import LoopConfig
from cua_rl.rl.datums import Batch
from cua_rl.rl.train_step import TrainStepResult, train_step
from cua_rl.training.config import LossConfig, OptimConfig, RateSchedule, TrainerConfig
from cua_rl.training.wire import OptimStepOutput
from cua_rl.types.errors import ParityError
from cua_rl.types.rollout import Datum
from tests.builders import datum
from tests.fakes import FakeTrainer


def make_settings(schedule: RateSchedule = "constant", **changes: Any) -> LoopConfig:
    loss = LossConfig(**{name: changes.pop(name) for name in list(changes) if name in LOSS_FIELDS})
    trainer = TrainerConfig(parity_limit=changes.pop("parity_limit", 0.05))
    return LoopConfig(loss=loss, learning_rate=0.1, trainer=trainer, learning_rate_schedule=schedule, **changes)


LOSS_FIELDS = ("name", "tis_cap", "kl_loss_coef", "normalisation")
DATUMS = [datum(rollout_id=str(value), advantages=(0.0, value, value)) for value in (3.0, 1.0, -1.0, -3.0)]


def batch_of(datums: Sequence[Datum], num_rollouts: int | None = None) -> Batch:
    """Datums, each of a rollout of its own, among `num_rollouts` judged ones; by default there are no others."""
    return Batch(datums=tuple(datums), num_rollouts=num_rollouts or len(datums), metrics={})


async def run(trainer: FakeTrainer, settings: LoopConfig, datums: Sequence[Datum] = DATUMS) -> TrainStepResult:
    result = await train_step(trainer, batch_of(datums), settings, step=1, max_steps=2)
    check_names(result.metrics)
    return result


async def test_the_step_is_taken_at_the_scheduled_rate() -> None:
    result = await train_step(FakeTrainer(), batch_of([datum()]), make_settings("linear"), step=2, max_steps=3)

    assert result.metrics["optim/learning_rate"] == pytest.approx(0.1 * 2 / 3)


async def test_the_trainer_is_told_the_weight_of_every_datum() -> None:
    trainer = FakeTrainer()

    await run(trainer, make_settings(normalisation="sequence_mean"))

    # four rollouts of two tokens
    assert trainer.beside == [
        {"token_weights": [1 / 8] * 4, "proximal_logprobs": None, "reference_logprobs": None},
    ]


async def test_substeps_are_normalised_each_by_its_own_rollouts_and_counted() -> None:
    trainer = FakeTrainer()

    result = await run(trainer, make_settings(normalisation="sequence_mean", num_substeps=2))

    assert [call["token_weights"] for call in trainer.beside] == [[1 / 4] * 2] * 2
    assert result.metrics["optim/num_substeps"] == 2.0
    assert trainer.policy_version == 2


async def test_rollouts_without_datums_count_in_the_means_of_every_substep() -> None:
    for num_substeps, weight in ((1, 1 / (16 * 2)), (2, 1 / (8 * 2))):
        trainer = FakeTrainer()

        settings = make_settings(normalisation="sequence_mean", num_substeps=num_substeps)
        await train_step(trainer, batch_of(DATUMS, num_rollouts=16), settings, step=1, max_steps=1)

        # 16 rollouts were judged, the 4 with datums have two tokens each
        assert {given for call in trainer.beside for given in call["token_weights"] or ()} == {weight}


async def test_log_probabilities_come_back_in_the_order_of_the_datums() -> None:
    datums = [datum(rollout_id=str(value), logprobs=(0.0, -value, -value)) for value in (1.0, 2.0, 3.0, 4.0)]

    result = await run(FakeTrainer(), make_settings(num_substeps=3), datums)

    assert [row[1] for row in result.training_logprobs] == [-1.0, -2.0, -3.0, -4.0]


async def test_the_proximal_policy_is_asked_once_before_several_substeps() -> None:
    trainer = FakeTrainer(gap=0.01)

    await run(trainer, make_settings(name="decoupled_ppo", num_substeps=2))

    assert trainer.calls == ["forward", "forward_backward 2", "optim_step", "forward_backward 2", "optim_step"]
    assert all(call["proximal_logprobs"] == [(0.0, -0.99, -0.99)] * 2 for call in trainer.beside)


class MovingTrainer(FakeTrainer):
    """Every optimizer step lowers all log-probabilities by 0.01."""

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput:
        self.gap -= 0.01
        return await super().optim_step(optim)


@pytest.mark.parametrize("num_substeps", [1, 2, 4])
async def test_the_move_of_a_step_is_that_of_all_its_substeps(num_substeps: int) -> None:
    result = await run(MovingTrainer(), make_settings(name="ppo", num_substeps=num_substeps, compute_post_kl=True))

    assert result.metrics["policy/kl_post"] == pytest.approx(0.01 * num_substeps)
    assert {row[1] for row in result.training_logprobs} == {-1.0}


@pytest.mark.parametrize("changes", [{"tis_cap": 2.0}, {"name": "ppo", "num_substeps": 2}])
async def test_no_forward_pass_is_spent_where_the_proximal_policy_is_known_or_not_needed(changes: Any) -> None:
    trainer = FakeTrainer()

    await run(trainer, make_settings(**changes))

    assert "forward" not in trainer.calls


async def test_parity_is_checked_before_any_step_is_taken() -> None:
    for settings in (make_settings(), make_settings(tis_cap=2.0, num_substeps=2)):
        trainer = FakeTrainer(gap=0.2)
        with pytest.raises(ParityError):
            await run(trainer, settings)
        assert trainer.policy_version == 0


async def test_kl_in_the_loss_travels_beside_the_datums_and_kl_in_the_reward_inside_them() -> None:
    in_loss, in_reward = FakeTrainer(), FakeTrainer()

    await run(in_loss, make_settings(kl_loss_coef=0.1))
    await run(in_reward, make_settings(kl_penalty_coef=0.1))

    assert in_loss.calls[0] == in_reward.calls[0] == "reference_logprobs"
    assert in_loss.beside[0]["reference_logprobs"] == [(0.0, -1.0, -1.0)] * 4
    assert in_reward.beside[0]["reference_logprobs"] is None


async def test_batch_normalised_advantages_report_their_deviation() -> None:
    result = await run(FakeTrainer(), make_settings(advantages="batch_std"))

    # 3, 1, -1, -3: variance (9 + 1 + 1 + 9) / 4 = 5
    assert result.metrics["loss/advantage_std"] == pytest.approx(5**0.5)
