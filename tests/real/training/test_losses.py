"""Policy losses against cases worked by hand."""

import math

import pytest
import torch

from cua_rl.config import LossConfig
from cua_rl.errors import ConfigError
from cua_rl.metrics import check_names
from cua_rl.training.losses import check_loss_config, importance_sampling, loss_metrics, ppo, token_losses

# Three tokens with ratios 1, 1.5 and 0.5.
SAMPLING = torch.tensor([-1.0, -2.0, -0.5])
TRAINING = SAMPLING + torch.tensor([1.0, 1.5, 0.5]).log()
ADVANTAGES = torch.tensor([2.0, 1.0, -1.0])


def test_importance_sampling_weighs_advantages_by_the_ratio() -> None:
    loss = importance_sampling(TRAINING, SAMPLING, ADVANTAGES)

    # -1 * 2, -1.5 * 1, -0.5 * -1
    torch.testing.assert_close(loss.losses, torch.tensor([-2.0, -1.5, 0.5]))


def test_ppo_clips_what_would_gain_and_keeps_what_would_lose() -> None:
    loss = ppo(TRAINING, SAMPLING, ADVANTAGES, clip_low=0.2, clip_high=0.3)

    # -2; ratio 1.5 held at 1.3; ratio 0.5 with advantage -1: min(-0.5, -0.8) is -0.8
    torch.testing.assert_close(loss.losses, torch.tensor([-2.0, -1.3, 0.8]))
    assert loss.clipped is not None
    assert loss.clipped.tolist() == [False, True, True]


def test_ppo_does_not_clip_a_ratio_that_went_the_wrong_way() -> None:
    loss = ppo(TRAINING[1:], SAMPLING[1:], torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2)

    # min(1.5 * -1, 1.2 * -1) = -1.5 and min(0.5, 0.8) = 0.5: both keep their gradient
    torch.testing.assert_close(loss.losses, torch.tensor([1.5, -0.5]))
    assert loss.clipped is not None
    assert not loss.clipped.any()


def test_ppo_with_infinite_clip_is_importance_sampling() -> None:
    free = ppo(TRAINING, SAMPLING, ADVANTAGES, clip_low=math.inf, clip_high=math.inf)

    assert free.losses.equal(importance_sampling(TRAINING, SAMPLING, ADVANTAGES).losses)


def test_on_policy_the_gradient_is_the_policy_gradient() -> None:
    logprobs = SAMPLING.clone().requires_grad_()

    for name in ("importance_sampling", "ppo"):
        loss = token_losses(LossConfig(name=name), logprobs, SAMPLING, ADVANTAGES).losses.sum()

        # d(-A log p)/d log p = -A
        assert torch.autograd.grad(loss, logprobs)[0].tolist() == [-2.0, -1.0, 1.0]


def test_cross_entropy_gives_every_token_weight_one_and_looks_at_nothing_else() -> None:
    loss = token_losses(LossConfig(name="cross_entropy"), TRAINING, SAMPLING * math.nan, ADVANTAGES * math.nan)

    assert loss.losses.equal(-TRAINING)
    assert loss.ratio is None


def test_metrics_are_means_over_tokens_under_known_names() -> None:
    config = LossConfig(name="ppo")
    metrics = loss_metrics(config, token_losses(config, TRAINING, SAMPLING, ADVANTAGES), TRAINING, SAMPLING)

    check_names(metrics)
    assert metrics["loss/policy"] == pytest.approx((-2.0 - 1.2 + 0.8) / 3)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0)
    assert metrics["policy/clip_frac"] == pytest.approx(2 / 3)
    # k1 = -mean(log ratio), k3 = mean(ratio - 1 - log ratio) = k1, because the mean ratio is 1
    assert metrics["policy/kl_sampling_training/mean"] == pytest.approx(-math.log(0.75) / 3, rel=1e-5)
    assert metrics["policy/kl_sampling_training_k3/mean"] == pytest.approx(-math.log(0.75) / 3, rel=1e-5)


@pytest.mark.parametrize("config", [LossConfig(temperature=0.0), LossConfig(clip_low=-0.1)])
def test_impossible_constants_are_refused(config: LossConfig) -> None:
    with pytest.raises(ConfigError):
        check_loss_config(config)
