from cua_rl.config import LossConfig, OptimConfig
from cua_rl.rl.train_step import Schedule, TrainStepSettings, scheduled_learning_rate, train_step
from tests.builders import datum
from tests.fakes import FakeTrainer


def make_settings(schedule: Schedule) -> TrainStepSettings:
    return TrainStepSettings(
        loss=LossConfig(),
        optim=OptimConfig(learning_rate=0.1),
        num_substeps=1,
        parity_limit=0.05,
        kl_penalty_coef=0.0,
        compute_post_kl=False,
        schedule=schedule,
    )


def test_a_linear_schedule_falls_from_the_full_rate_to_a_twentieth() -> None:
    rates = [scheduled_learning_rate(make_settings("linear"), step, 3) for step in range(3)]

    # 0.1, then halfway between 0.1 and 0.005, then 0.005
    assert [round(rate, 6) for rate in rates] == [0.1, 0.0525, 0.005]


def test_a_constant_schedule_and_a_run_of_one_step_keep_the_rate() -> None:
    assert scheduled_learning_rate(make_settings("constant"), 7, 9) == 0.1
    assert scheduled_learning_rate(make_settings("linear"), 0, 1) == 0.1


async def test_the_step_is_taken_at_the_rate_that_was_asked_for() -> None:
    trainer = FakeTrainer()

    result = await train_step(trainer, [datum()], make_settings("linear"), step=0, learning_rate=0.02)

    assert result.metrics["optim/learning_rate"] == 0.02
