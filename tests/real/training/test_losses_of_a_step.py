"""A step's gradient on a real model: neither the split into datums nor their order nor the requests may change it."""

import random
from collections.abc import Sequence
from dataclasses import replace

import chz
import pytest
import torch
from torch import Tensor

from cua_rl.metrics import check_names
from cua_rl.rl.train_step import token_weights
from cua_rl.training import wire
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import Datum, Rollout
from tests.real.training.test_equalities import make_rollout, merged, split
from tests.real.training.tiny_qwen3_vl import TINY_ROUNDINGS, draw_screenshot
from tests.rounding import assert_equal_but_for_rounding

STEP = wire.OptimStep(optim=OptimConfig(learning_rate=0.0))
LOSSES = [
    LossConfig(normalisation_tokens=10),
    LossConfig(name="ppo", clip_low=0.6, dual_clip=1.5, kl_loss_coef=0.3, normalisation_tokens=10),
    LossConfig(name="gspo", clip_low=0.7, normalisation="sequence_mean"),
    LossConfig(name="cispo", clip_low=0.7, normalisation="token_mean"),
    LossConfig(name="decoupled_ppo", tis_cap=0.3, icepop_low=0.2, normalisation_tokens=10),
    LossConfig(name="dppo", clip_low=0.01, clip_high=0.01, normalisation_tokens=10),
    LossConfig(name="dro", dro_beta=0.2, normalisation="token_sum"),
    LossConfig(name="stable_reinforce", normalisation_tokens=10),
]


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    """Four rollouts of 3, 1, 2 and 3 turns."""
    rng = random.Random(1)
    screens = [draw_screenshot(rng) for _ in range(2)]
    played = [make_rollout(rng, f"r{index}", screens[index // 2]) for index in range(4)]
    return [replace(one, turns=one.turns[:count]) for one, count in zip(played, (3, 1, 2, 3), strict=True)]


@pytest.fixture(scope="module")
def trainer(config: TrainerConfig, rollouts: list[Rollout]) -> Trainer:
    """Its adapter has left its start, where half of the gradients are zero."""
    trainer = Trainer(config)
    trainer.forward_backward(wire.ForwardBackward(datums=tuple(merged(rollouts)), loss=LossConfig()))
    trainer.optim_step(wire.OptimStep(optim=OptimConfig(learning_rate=1e-2)))
    return trainer


def all_weights(datums: Sequence[Datum], loss: LossConfig) -> list[float]:
    return token_weights(datums, loss, num_rollouts=len({datum.member for datum in datums}))


def requests(
    trainer: Trainer, datums: Sequence[Datum], loss: LossConfig, num_requests: int = 1
) -> list[wire.ForwardBackward]:
    """One optimizer step on `datums`, dealt to requests, with weights that are those of the whole step."""
    weights = all_weights(datums, loss)
    forward = wire.Forward(datums=tuple(datums), temperature=1.0, weights="policy")
    now = trainer.forward(forward).training_logprobs
    base = trainer.forward(replace(forward, weights="base")).training_logprobs
    parts = [range(start, len(datums), num_requests) for start in range(num_requests)]
    return [
        wire.ForwardBackward(
            datums=tuple(datums[index] for index in part),
            loss=loss,
            token_weights=tuple(weights[index] for index in part),
            # a policy that has moved since the step began, by 0.1 nats a token
            proximal_logprobs=tuple(tuple(value - 0.1 for value in now[index]) for index in part),
            reference_logprobs=tuple(base[index] for index in part),
        )
        for part in parts
    ]


def gradient(trainer: Trainer, work: Sequence[wire.ForwardBackward]) -> Tensor:
    """Of all requests together, flat."""
    for request in work:
        check_names(trainer.forward_backward(request).metrics)
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.model.trainable_parameters]
    flat = torch.cat([one.flatten() for one in found])
    trainer.optim_step(STEP)
    return flat


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_splits_order_and_requests_leave_the_gradient_as_it_is(
    trainer: Trainer, rollouts: list[Rollout], loss: LossConfig
) -> None:
    whole = gradient(trainer, requests(trainer, merged(rollouts), loss))
    turns = split(rollouts)
    random.Random(2).shuffle(turns)

    apart = gradient(trainer, requests(trainer, turns, loss, num_requests=3))

    assert len(turns) == 9
    assert whole.norm() > 0.01
    assert_equal_but_for_rounding(apart, whole, TINY_ROUNDINGS)


def test_micro_batches_leave_the_gradient_as_it_is(config: TrainerConfig, rollouts: list[Rollout]) -> None:
    gradients = []
    for micro_batch_tokens in (16384, 60):
        trainer = Trainer(chz.replace(config, micro_batch_tokens=micro_batch_tokens))
        gradients.append(gradient(trainer, requests(trainer, merged(rollouts), LOSSES[2])))

    assert_equal_but_for_rounding(gradients[1], gradients[0], TINY_ROUNDINGS)


def test_the_weights_of_token_mean_are_what_the_trainer_does_without_weights(
    trainer: Trainer, rollouts: list[Rollout]
) -> None:
    datums = tuple(merged(rollouts))
    loss = LossConfig(normalisation="token_mean")
    trainer.forward_backward(wire.ForwardBackward(datums=datums, loss=loss))
    unweighted = trainer.optim_step(STEP)

    trainer.forward_backward(
        wire.ForwardBackward(datums=datums, loss=loss, token_weights=tuple(all_weights(datums, loss)))
    )
    weighted = trainer.optim_step(STEP)

    assert_equal_but_for_rounding([weighted.grad_norm], [unweighted.grad_norm], TINY_ROUNDINGS)
    assert weighted.num_trained_tokens == unweighted.num_trained_tokens == 45


def test_gradients_with_and_without_weights_cannot_be_added_up(trainer: Trainer, rollouts: list[Rollout]) -> None:
    datums = tuple(merged(rollouts))
    trainer.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))

    with pytest.raises(TrainingError, match="with all forward_backward requests"):
        trainer.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig(), token_weights=(1.0,) * 4))
    trainer.optim_step(STEP)


def test_rows_that_do_not_align_with_the_datums_are_refused(trainer: Trainer, rollouts: list[Rollout]) -> None:
    request = wire.ForwardBackward(datums=tuple(merged(rollouts)), loss=LossConfig())

    with pytest.raises(TrainingError, match="one token weight per datum, got 1 for 4"):
        trainer.forward_backward(replace(request, token_weights=(1.0,)))
    with pytest.raises(TrainingError, match="proximal log-probabilities aligned"):
        trainer.forward_backward(replace(request, proximal_logprobs=((0.0,),) * 4))
    with pytest.raises(TrainingError, match="reference_logprobs first"):
        trainer.forward_backward(replace(request, loss=LossConfig(kl_loss_coef=0.1)))
