# pyright: reportUnknownMemberType=false
"""A step on a real model whose groups are passed as they end, against one that waits for the last of them."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cua_rl.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.rl.batch import build_batch
from cua_rl.rl.early_passes import early_passes
from cua_rl.rl.train_step import TrainStepResult, TrainStepSettings, train_step
from cua_rl.training import wire
from cua_rl.training.trainer import Trainer
from cua_rl.types import Datum, Reward, RolloutGroup
from tests import builders
from tests.real.training.test_equalities import make_rollout
from tests.real.training.tiny_qwen3_vl import IMAGE_PAD, TINY_ROUNDINGS, draw_screenshot
from tests.rounding import assert_equal_but_for_rounding

# With eps and the rate 1, AdamW's first step is about g / (|g| + 1): weights differ as much as gradients do.
PLAIN_STEP = OptimConfig(learning_rate=1.0, eps=1.0, grad_clip_norm=0.01)


class Direct:
    """A trainer in this process."""

    def __init__(self, config: TrainerConfig) -> None:
        self.trainer = Trainer(config)
        self.num_requests = 0

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, *, token_weights: Any = None, **_: Any
    ) -> wire.ForwardBackwardOutput:
        self.num_requests += 1
        weights = tuple(token_weights)
        return self.trainer.forward_backward(
            wire.ForwardBackward(datums=tuple(datums), loss=loss, token_weights=weights)
        )

    async def optim_step(self, optim: OptimConfig, *, gradient_scale: float = 1.0) -> wire.OptimStepOutput:
        return self.trainer.optim_step(wire.OptimStep(optim=optim, gradient_scale=gradient_scale))

    async def take_account(self) -> dict[str, float]:
        return {}

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> Any:
        raise AssertionError("not needed")

    reference_logprobs = forward

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.trainer.model.trainable_parameters])


def make_groups() -> list[RolloutGroup]:
    """Three groups of two rollouts of 1 to 3 turns; those of the second are equally good, so it teaches nothing."""
    rng = random.Random(3)
    played = [make_rollout(rng, f"r{index}", draw_screenshot(rng)) for index in range(6)]
    cut = [
        replace(one, turns=one.turns[:count], reward=Reward(total=reward, parts={}))
        for one, count, reward in zip(played, (3, 1, 2, 2, 1, 2), (1.0, 0.0, 1.0, 1.0, 0.0, 0.5), strict=True)
    ]
    return [replace(builders.group(*cut[2 * index : 2 * index + 2]), index=index) for index in range(3)]


async def take_step(trainer: Direct, loss: LossConfig, groups: list[RolloutGroup], num_early: int) -> TrainStepResult:
    """A step of which `num_early` groups, the last ones, have ended before the others."""
    settings = TrainStepSettings(
        loss=loss, optim=PLAIN_STEP, num_substeps=1, parity_limit=10.0, kl_penalty_coef=0.0, compute_post_kl=False
    )
    datums = build_batch(groups, "mean", IMAGE_PAD).datums
    if not num_early:
        return await train_step(trainer, datums, settings, step=0, learning_rate=1.0)
    async with early_passes(trainer, loss, "mean", IMAGE_PAD) as begun:
        for group in groups[-num_early:]:
            begun.add(group)
        while not trainer.num_requests:
            await asyncio.sleep(0)
        return await train_step(trainer, datums, settings, step=0, learning_rate=1.0, begun=begun)


@pytest.mark.parametrize("normalisation", ["constant", "sequence_mean"])
async def test_groups_that_are_passed_early_make_the_same_step(config: TrainerConfig, normalisation: Any) -> None:
    loss = LossConfig(name="ppo", normalisation=normalisation, normalisation_tokens=10)
    early, late = Direct(config), Direct(config)

    begun = await take_step(early, loss, make_groups(), num_early=1)
    whole = await take_step(late, loss, make_groups(), num_early=0)

    assert (early.num_requests, late.num_requests) == (2, 1)
    norms = [result.metrics["optim/grad_norm"] for result in (begun, whole)]
    losses = [result.metrics["loss/total"] for result in (begun, whole)]
    assert_equal_but_for_rounding(norms[:1], norms[1:], TINY_ROUNDINGS)
    assert_equal_but_for_rounding(losses[:1], losses[1:], TINY_ROUNDINGS, magnitude=1.0)
    assert_equal_but_for_rounding(early.weights(), late.weights(), TINY_ROUNDINGS)
    for row, other in zip(begun.training_logprobs, whole.training_logprobs, strict=True):
        assert_equal_but_for_rounding(row, other, TINY_ROUNDINGS)
