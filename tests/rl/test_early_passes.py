"""Groups trained on as they end: the same step as when the trainer waits for the last."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cua_rl.config import LossConfig, Normalisation
from cua_rl.events import StepTrained
from cua_rl.rl.early_passes import early_passes
from cua_rl.rl.normalisation import own_weights, step_divisor, token_weights
from cua_rl.rl.sync_loop import Parts, train
from cua_rl.rollout.run import RolloutPlan
from cua_rl.training.wire import ForwardBackwardOutput
from cua_rl.types import Datum, Rollout
from tests.builders import IMAGE_TOKEN, datum
from tests.fakes import FakeTrainer
from tests.rl.async_world import World
from tests.rl.test_sync_loop import settings
from tests.rl.test_train_step import make_settings


class SlowRollouts(World):
    """The second group of each step waits until the trainer has passed the first."""

    async def run(self, plan: RolloutPlan) -> Rollout:
        if plan.task.seed % 100 == 1:
            wanted = 1 + 2 * (plan.task.seed // 100)
            async with self.in_order:  # rollouts are numbered as they begin
                while self.has_early and sum(call.startswith("forward") for call in self.trainer.calls) < wanted:
                    await asyncio.sleep(0)
        return await super().run(plan)

    def __init__(self, has_early: bool) -> None:
        super().__init__()
        self.has_early = has_early
        self.in_order = asyncio.Lock()


async def run(begins_early: bool) -> SlowRollouts:
    world = SlowRollouts(begins_early)
    parts: Parts = world.parts()
    await train(settings(train=make_settings(begins_early=begins_early)), parts)
    return world


def verbs(world: World) -> list[str]:
    return [call.split()[0] for call in world.trainer.calls]


async def test_the_trainer_begins_while_other_groups_run_and_the_record_is_the_same() -> None:
    early, late = await run(True), await run(False)

    assert verbs(early) == ["forward_backward", "forward_backward", "optim_step"] * 2
    assert verbs(late) == ["forward_backward", "optim_step"] * 2
    assert early.trainer.gradient_scales == [1 / 4] * 2  # four rollouts; each pass had 1 / normalisation_tokens
    assert late.trainer.gradient_scales == [1.0] * 2
    recorded = [[event for event in world.recorder.events if isinstance(event, StepTrained)] for world in (early, late)]
    for one, other in zip(*recorded, strict=True):
        assert (one.datums_sha256, one.training_logprobs) == (other.datums_sha256, other.training_logprobs)
        assert one.metrics["policy/parity_mean_abs"] == other.metrics["policy/parity_mean_abs"]
        assert one.metrics["optim/num_passes"] == 2.0


async def test_parity_stops_a_step_that_has_begun_before_it_is_taken() -> None:
    world = SlowRollouts(True)
    world.trainer = FakeTrainer(gap=0.2)

    with pytest.raises(ExceptionGroup, match="unhandled"):
        await train(settings(train=make_settings(begins_early=True)), world.parts())
    assert world.trainer.policy_version == 0


class Numbered(FakeTrainer):
    """Answers with the first sampled token's own log-probability, so that rows can be told apart."""

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **beside: Sequence[Any] | None
    ) -> ForwardBackwardOutput:
        await asyncio.sleep(0)
        return await super().forward_backward(datums, loss, **beside)


async def test_rows_come_back_in_the_order_of_the_step() -> None:
    datums = [datum(rollout_id=str(value), logprobs=(0.0, -value, -value)) for value in (1.0, 2.0, 3.0)]
    async with early_passes(Numbered(), LossConfig(), "mean", IMAGE_TOKEN) as early:
        output = await early.complete([datums[2], datums[0], datums[1]])

    assert [row[1] for row in output.training_logprobs] == [-3.0, -1.0, -2.0]


@pytest.mark.parametrize("normalisation", ["constant", "token_mean", "sequence_mean", "token_sum"])
def test_own_weights_over_the_divisor_are_the_weights_of_the_step(normalisation: Normalisation) -> None:
    loss = LossConfig(normalisation=normalisation)
    parts = [[datum(rollout_id="a"), datum((False, True), rollout_id="a")], [datum(rollout_id="b")]]
    together = [*parts[0], *parts[1]]

    divisor = step_divisor(together, loss, num_rollouts=2)
    alone = [weight / divisor for part in parts for weight in own_weights(part, loss)]
    assert alone == pytest.approx(token_weights(together, loss, num_rollouts=2))
