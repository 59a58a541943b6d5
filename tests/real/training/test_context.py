"""Trainer processes that share each row, against one that computes it alone."""

import random
from dataclasses import replace
from pathlib import Path

import chz
import pytest

from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, Sharding, TrainerConfig
from cua_rl.training.context import Context
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import ConfigError, TrainingError
from cua_rl.types.rollout import ModelInput
from tests.real.training.test_ranks import NUM_ROUNDINGS, PLAIN_STEP, adapter, assert_close
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum
from tests.rounding import assert_equal_but_for_rounding


def test_a_row_is_shared_out_in_stretches_of_about_one_length() -> None:
    shares = [Context(rank=rank, size=3) for rank in range(3)]
    assert [share.span(10) for share in shares] == [(0, 3), (3, 6), (6, 10)]
    assert Context().span(10) == (0, 10)


def test_a_row_with_fewer_tokens_than_ranks_is_refused() -> None:
    with pytest.raises(TrainingError, match="a token for each of the 4 ranks that share a row, got 3; lower it"):
        Context(rank=1, size=4).span(3)


def test_rows_are_shared_by_all_ranks_or_by_none_too_many(config: TrainerConfig) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.context_parallel: expected a divisor of the 1 trainer processes"):
        Trainer(chz.replace(config, context_parallel=2))


@pytest.mark.parametrize(("num_processes", "sharding"), [(2, "replicated"), (4, "full")])
async def test_processes_that_share_each_row_take_the_step_of_one(
    num_processes: int, sharding: Sharding, config: TrainerConfig, tmp_path: Path
) -> None:
    """Rows of several sequences, cut inside an image; of four processes, two have one row and two have two."""
    config = chz.replace(config, micro_batch_tokens=64, gradient_checkpointing=True)
    loss = LossConfig(name="gspo")  # its ratio is that of whole turns, which the cut goes through
    rng = random.Random(0)
    screens = [draw_screenshot(rng) for _ in range(3)]
    datums = tuple(make_datum(rng, shown) for shown in (screens, screens[:1], []))
    sibling = datums[1].model_input.chunks[:3]  # sees the prompt in the row, of which another rank has a part
    other = make_datum(rng, screens[:1])
    datums += (replace(other, model_input=ModelInput(chunks=(*sibling, other.model_input.chunks[-1]))),)
    alone = Trainer(config)
    expected = alone.forward_backward(wire.ForwardBackward(datums=datums, loss=loss))
    expected_step = alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    alone.save_weights_for_sampler(tmp_path / "alone")
    shared = chz.replace(
        config, num_processes=num_processes, sharding=sharding, context_parallel=2, keeps_attention=True
    )

    async with TrainingClient(shared, tmp_path / "trainer.log") as several:
        output = await several.forward_backward(datums, loss)
        step = await several.optim_step(PLAIN_STEP)
        account = await several.trainer_metrics()
        base = await several.base_logprobs(datums[2:3])  # of four processes, two have nothing to do
        await several.save_weights_for_sampler(tmp_path / "several")

    expected_base = Trainer(config).forward(wire.Forward(datums=datums[2:3], temperature=1.0, weights="base"))
    expected_rows = (*expected.training_logprobs, *expected_base.training_logprobs)
    for row, other in zip((*output.training_logprobs, *base), expected_rows, strict=True):
        assert_equal_but_for_rounding(row, other, NUM_ROUNDINGS)
    for name, value in expected.metrics.items():
        if name.startswith("loss/"):
            assert_equal_but_for_rounding(
                [output.metrics[name]], [value], NUM_ROUNDINGS, magnitude=max(1.0, abs(value))
            )
    assert_equal_but_for_rounding([step.grad_norm], [expected_step.grad_norm], NUM_ROUNDINGS)
    assert_close(adapter(tmp_path / "several"), adapter(tmp_path / "alone"))
    assert account["trainer/shared_tokens"] == alone.account.take()["trainer/shared_tokens"] == 13
    assert account["trainer/tokens"] == sum(datum.model_input.length for datum in datums) - 13
