"""Policy losses against cases worked by hand, and against each other where they must agree."""

import math
from dataclasses import replace

import chz
import pytest
import torch
from torch import Tensor

from cua_rl.metrics import check_names
from cua_rl.training.batching import turn_ids
from cua_rl.training.config import LossConfig, LossName
from cua_rl.training.loss_checks import check_loss_config
from cua_rl.training.loss_terms import KL_WEIGHT_CAP, TokenLoss, kl_to_reference, stable_reinforce, turn_means
from cua_rl.training.losses import (
    LossTokens,
    cispo,
    gspo,
    importance_sampling,
    ppo,
    token_losses,
)
from cua_rl.training.metrics import effective_share, loss_metrics, quantiles, ratio_metrics
from cua_rl.types.errors import ConfigError
from tests.rounding import rounding_bound

# Three tokens with ratios 1, 1.5 and 0.5, in two turns.
SAMPLING = torch.tensor([-1.0, -2.0, -0.5])
RATIO = torch.tensor([1.0, 1.5, 0.5])
TRAINING = SAMPLING + RATIO.log()
ADVANTAGES = torch.tensor([2.0, 1.0, -1.0])
TURNS = torch.tensor([0, 0, 1])
POLICY_LOSSES: tuple[LossName, ...] = (
    *("importance_sampling", "ppo", "cispo", "gspo", "decoupled_ppo"),
    *("dppo", "dro", "stable_reinforce"),
)
INFINITE = LossConfig(clip_low=math.inf, clip_high=math.inf)
# Ten logarithms, exponentials and sums of values up to 3, at most.
ROUNDING = rounding_bound(3.0, 10)


def tokens(training: Tensor = TRAINING, sampling: Tensor = SAMPLING, **fields: Tensor) -> LossTokens:
    given = LossTokens(training_logprobs=training, sampling_logprobs=sampling, advantages=ADVANTAGES, turn_ids=TURNS)
    return replace(given, **fields)


def gradient(config: LossConfig, given: LossTokens) -> Tensor:
    """d(summed loss) / d(training log-probability of each token)."""
    logprobs = given.training_logprobs.clone().requires_grad_()
    loss = token_losses(config, replace(given, training_logprobs=logprobs)).losses.sum()
    return torch.autograd.grad(loss, logprobs)[0]


def test_importance_sampling_weighs_advantages_by_the_ratio() -> None:
    # -1 * 2, -1.5 * 1, -0.5 * -1
    torch.testing.assert_close(
        importance_sampling(TRAINING, SAMPLING, ADVANTAGES).losses, torch.tensor([-2.0, -1.5, 0.5])
    )


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


def test_a_dual_clip_bounds_the_loss_of_bad_tokens_and_takes_their_gradient() -> None:
    far = tokens(training=SAMPLING + torch.tensor([4.0, 4.0, 2.0]).log(), advantages=torch.tensor([1.0, -1.0, -1.0]))
    config = LossConfig(name="ppo", dual_clip=3.0)

    loss = token_losses(config, far)

    # advantage 1: 4 held at 1.2; advantage -1: ratio 4 counts as 3, ratio 2 stays
    torch.testing.assert_close(loss.losses, torch.tensor([-1.2, 3.0, 2.0]))
    torch.testing.assert_close(gradient(config, far), torch.tensor([0.0, 0.0, 2.0]))
    assert loss.clipped is not None
    assert loss.clipped.tolist() == [True, True, False]


def test_an_infinite_dual_clip_is_ppo() -> None:
    plain, dual = LossConfig(name="ppo"), LossConfig(name="ppo", dual_clip=math.inf)

    assert token_losses(dual, tokens()).losses.equal(token_losses(plain, tokens()).losses)
    assert gradient(dual, tokens()).equal(gradient(plain, tokens()))


def test_cispo_bounds_the_weight_and_keeps_every_gradient() -> None:
    loss = cispo(TRAINING, SAMPLING, ADVANTAGES, clip_low=0.2, clip_high=0.3)

    # weights 1, 1.3, 0.8 times advantages 2, 1, -1 times -log p
    torch.testing.assert_close(loss.losses, torch.tensor([-2.0, -1.3, 0.8]) * TRAINING)
    torch.testing.assert_close(
        gradient(LossConfig(name="cispo", clip_high=0.3), tokens()), torch.tensor([-2.0, -1.3, 0.8])
    )
    assert loss.clipped is not None
    assert loss.clipped.tolist() == [False, True, True]


def test_gspo_gives_all_tokens_of_a_turn_the_geometric_mean_of_their_ratios() -> None:
    # turn 0: sqrt(1 * 1.5) = 1.2247 times advantages 2, 1; turn 1: 0.5 times -1
    turn = math.sqrt(1.5)
    free = chz.replace(INFINITE, name="gspo")
    torch.testing.assert_close(token_losses(free, tokens()).losses, torch.tensor([-2 * turn, -turn, 0.5]))
    torch.testing.assert_close(gradient(free, tokens()), torch.tensor([-2 * turn, -turn, 0.5]))

    # clipped at 1.2 and 0.8: turn 0 gains too much as a whole, turn 1 has lost enough
    loss = gspo(TRAINING, SAMPLING, ADVANTAGES, TURNS, 0.2, 0.2)
    torch.testing.assert_close(loss.losses, torch.tensor([-2.4, -1.2, 0.8]))
    assert loss.clipped is not None
    assert loss.clipped.all()


def test_gspo_in_the_token_form_has_the_gradient_of_the_sequence_form() -> None:
    logprobs = TRAINING.clone().requires_grad_()
    one_advantage = tokens(advantages=torch.tensor([2.0, 2.0, -1.0]))
    turn_ratio = torch.exp((logprobs - SAMPLING)[:2].mean())

    # two tokens times - turn ratio * advantage, the ratio differentiated as a whole
    by_sequence = torch.autograd.grad(-2 * turn_ratio * 2.0, logprobs)[0]

    torch.testing.assert_close(gradient(chz.replace(INFINITE, name="gspo"), one_advantage)[:2], by_sequence[:2])


def test_gspo_with_turns_of_one_token_is_ppo_and_importance_sampling() -> None:
    single = tokens(turn_ids=torch.arange(3))

    for clip in (0.2, math.inf):
        config = LossConfig(name="gspo", clip_low=clip, clip_high=clip)
        torch.testing.assert_close(
            token_losses(config, single).losses, token_losses(chz.replace(config, name="ppo"), single).losses
        )
    torch.testing.assert_close(
        gradient(chz.replace(INFINITE, name="gspo"), single), gradient(LossConfig(name="importance_sampling"), single)
    )


@pytest.mark.parametrize("name", ["ppo", "cispo"])
def test_with_an_infinite_clip_gradients_are_those_of_importance_sampling(name: LossName) -> None:
    expected = gradient(LossConfig(name="importance_sampling"), tokens())

    torch.testing.assert_close(gradient(chz.replace(INFINITE, name=name), tokens()), expected)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(name: LossName) -> None:
    # d(-A log p)/d log p = -A
    assert gradient(LossConfig(name=name), tokens(training=SAMPLING)).tolist() == [-2.0, -1.0, 1.0]


def test_decoupled_ppo_clips_against_the_proximal_policy_and_weighs_by_the_behaviour_ratio() -> None:
    # proximal/sampling 1.25, 1, 0.5; training/proximal 0.8, 1.5, 1
    behaviour = torch.tensor([1.25, 1.0, 0.5])
    given = tokens(proximal_logprobs=SAMPLING + behaviour.log())

    loss = token_losses(LossConfig(name="decoupled_ppo"), given)

    # -1.25 * 0.8 * 2, -1 * 1.2 * 1 (clipped), 0.5 * 1 * 1
    torch.testing.assert_close(loss.losses, torch.tensor([-2.0, -1.2, 0.5]))
    assert loss.clipped is not None
    assert loss.clipped.tolist() == [False, True, False]


def test_where_the_policy_is_the_proximal_one_only_the_behaviour_weight_is_left() -> None:
    config = LossConfig(name="decoupled_ppo", clip_low=0.0, clip_high=0.0)

    # - ratio * A, although the clip would allow nothing
    torch.testing.assert_close(gradient(config, tokens()), -RATIO * ADVANTAGES)
    torch.testing.assert_close(gradient(config, tokens(proximal_logprobs=TRAINING)), -RATIO * ADVANTAGES)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "decoupled_ppo"])
def test_truncation_caps_the_weight_of_trainer_over_sampler(name: LossName) -> None:
    # weights 1, 1.5 -> 1.2, 0.5
    expected = -torch.tensor([1.0, 1.2, 0.5]) * ADVANTAGES

    torch.testing.assert_close(gradient(LossConfig(name=name, tis_cap=1.2), tokens()), expected)


def test_icepop_masks_tokens_outside_its_band_and_weighs_those_inside() -> None:
    config = LossConfig(name="ppo", icepop_low=0.6, icepop_high=1.5 + 1e-4)
    low_only, high_only = LossConfig(icepop_low=0.6), LossConfig(icepop_high=1.4)

    assert mask(token_losses(config, tokens())) == [False, False, True]
    torch.testing.assert_close(gradient(config, tokens()), torch.tensor([-2.0, -1.5, 0.0]))
    assert mask(token_losses(low_only, tokens())) == [False, False, True]
    assert mask(token_losses(high_only, tokens())) == [False, True, False]


def test_under_gspo_weights_and_masks_are_the_turns() -> None:
    turn = math.sqrt(1.5)
    config = LossConfig(name="gspo", icepop_low=0.6)

    assert mask(token_losses(config, tokens())) == [False, False, True]
    torch.testing.assert_close(gradient(config, tokens()), torch.tensor([-2 * turn, -turn, 0.0]))
    torch.testing.assert_close(gradient(LossConfig(name="gspo", tis_cap=1.1), tokens())[:2], torch.tensor([-2.2, -1.1]))


@pytest.mark.parametrize("is_stale", [False, True])
def test_the_mean_gradient_of_the_kl_term_is_that_of_the_divergence(is_stale: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, base, drift = torch.randn(3, 5, generator=generator)
    base, sampling = base.log_softmax(0), (logits + 0.5 * is_stale * drift).log_softmax(0)  # ratios below the cap
    logits = logits.requires_grad_()
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - base)).sum()

    # every token once, weighted by how often the sampler draws it: the exact mean
    losses, *estimates = kl_to_reference(policy, sampling, base)
    mean = (sampling.exp() * losses).sum()

    expected = torch.autograd.grad(divergence, logits, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], expected)
    for estimate in estimates:
        torch.testing.assert_close((sampling.exp() * estimate).sum(), divergence)


def test_kl_estimates_of_one_token_and_the_cap_on_its_weight() -> None:
    training, base = torch.tensor([-1.0]), torch.tensor([-3.0])

    loss, k3, k1 = (values.item() for values in kl_to_reference(training, training, base))
    *_, stale = kl_to_reference(training, torch.tensor([-9.0]), base)

    # x = 2: exp(-2) - 1 + 2
    assert (loss, k3, k1) == pytest.approx((math.exp(-2) + 1, math.exp(-2) + 1, 2.0), abs=ROUNDING)
    assert stale.item() == pytest.approx(KL_WEIGHT_CAP * 2.0, abs=ROUNDING)


def test_the_kl_term_is_added_with_its_coefficient_and_spares_masked_tokens() -> None:
    base = TRAINING - torch.tensor([1.0, 0.0, 5.0])
    given = tokens(training=SAMPLING, reference_logprobs=SAMPLING - torch.tensor([1.0, 0.0, 5.0]))

    # on policy: -A + 0.1 * x
    torch.testing.assert_close(gradient(LossConfig(kl_loss_coef=0.1), given), torch.tensor([-1.9, -1.0, 1.5]))
    config = LossConfig(kl_loss_coef=0.1, icepop_low=0.6)
    assert gradient(config, tokens(reference_logprobs=base))[2] == 0.0
    with pytest.raises(ValueError, match="reference_logprobs"):
        token_losses(config, tokens())


def test_cross_entropy_weighs_every_token_by_its_advantage_and_looks_at_nothing_else() -> None:
    nothing = torch.full((3,), math.nan)
    config = LossConfig(name="cross_entropy")

    assert token_losses(config, tokens(sampling=nothing, advantages=torch.ones(3))).losses.equal(-TRAINING)
    # any number is a weight: custom losses send the gradients that they have computed
    given = tokens(sampling=nothing, advantages=torch.tensor([0.0, 0.25, -2.0]))
    assert token_losses(config, given).losses.equal(-TRAINING * torch.tensor([0.0, 0.25, -2.0]))
    assert gradient(config, given).tolist() == [0.0, -0.25, 2.0]


def test_dppo_excludes_probabilities_that_have_moved_too_far_where_their_advantage_pushes_them() -> None:
    # from 0.2 to 0.4, from 0.001 to 0.01, from 0.5 to 0.3, and again from 0.2 to 0.4 and from 0.5 to 0.3
    old = torch.tensor([0.2, 0.001, 0.5, 0.2, 0.5])
    new = torch.tensor([0.4, 0.01, 0.3, 0.4, 0.3])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0])
    given = LossTokens(
        training_logprobs=new.log(), sampling_logprobs=old.log(), advantages=advantages, turn_ids=torch.arange(5)
    )
    config = LossConfig(name="dppo", clip_low=0.15, clip_high=0.15)

    loss = token_losses(config, given)

    # the first and the third have moved by 0.2; the second's ratio is 10, but it has moved by 0.009 only;
    # the last two have moved against their advantage
    assert loss.clipped is not None
    assert loss.clipped.tolist() == [True, False, True, False, False]
    torch.testing.assert_close(gradient(config, given), torch.tensor([0.0, -10.0, 0.0, 2.0, -1.2]))
    torch.testing.assert_close(loss.losses, torch.tensor([0.0, -10.0, 0.0, 2.0, -1.2]) * new.log())
    torch.testing.assert_close(gradient(chz.replace(config, clip_high=0.25), given)[0], torch.tensor(-2.0))
    far = replace(given, sampling_logprobs=(new / 1000).log(), advantages=-torch.ones(5))
    torch.testing.assert_close(gradient(config, far), torch.full((5,), 20.0))


def test_dro_pulls_back_in_proportion_to_the_log_ratio() -> None:
    # -A + beta * log ratio, and -A log p + beta / 2 * (log ratio)^2
    config = LossConfig(name="dro", dro_beta=0.5)
    logs = RATIO.log()

    torch.testing.assert_close(gradient(config, tokens()), -ADVANTAGES + 0.5 * logs)
    torch.testing.assert_close(token_losses(config, tokens()).losses, -ADVANTAGES * TRAINING + 0.25 * logs.square())


def test_stable_reinforce_weighs_by_what_sampler_and_trainer_leave_to_other_tokens() -> None:
    # (1 - 0.6) / (1 - 0.8), (1 - 0.1) / (1 - 0.5); a token that the sampler was certain of teaches nothing
    sampling, training = torch.tensor([0.6, 0.1, 1.0]).log(), torch.tensor([0.8, 0.5, 0.9]).log()
    config = LossConfig(name="stable_reinforce")

    torch.testing.assert_close(
        gradient(config, tokens(training=training, sampling=sampling)), torch.tensor([-4.0, -1.8, 0.0])
    )
    # the largest probability below 1 in float32 leaves 6e-8: the weight stays finite, and so does its product with the
    # gradient of the log-probability, which is as small
    certain = tokens(training=torch.zeros(3), sampling=torch.tensor([0.5]).log().expand(3))
    assert gradient(config, certain).abs().max() <= 2.0 * 0.5 / 1e-6 * (1 + ROUNDING)


def test_stable_reinforce_does_not_drift_where_there_are_two_tokens() -> None:
    """Whatever sampler and trainer think: the mean gradient of an advantage without meaning is zero, exactly."""
    logits = torch.randn(7, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    sampler = torch.randn(7, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64).log_softmax(1)
    policy, ones = logits.log_softmax(1).flatten(), torch.ones(14, dtype=torch.float64)

    def drift(losses: Tensor) -> Tensor:
        """The gradient of the mean over what the sampler draws."""
        return torch.autograd.grad((sampler.exp().flatten() * losses).sum(), logits, retain_graph=True)[0]

    assert drift(-policy).abs().max() > 0.1
    assert drift(stable_reinforce(policy, sampler.flatten(), ones).losses).abs().max() < 1e-12


@pytest.mark.parametrize(("peak", "least", "most"), [(0.0, 0.85, 0.95), (8.0, 0.2, 0.3)])
def test_stable_reinforce_leaves_little_drift_where_one_token_is_likely(peak: float, least: float, most: float) -> None:
    """Of 50 tokens the first has 1 % at most, or about 96 %; the sampler's logits differ by 0.3."""
    drifts = {"reinforce": 0.0, "stable": 0.0}
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        logits, noise = torch.randn(2, 50, generator=generator, dtype=torch.float64)
        logits[0] += peak
        sampler, policy = (logits + 0.3 * noise).log_softmax(0), logits.requires_grad_().log_softmax(0)
        centered = stable_reinforce(policy, sampler, torch.ones(50, dtype=torch.float64)).losses
        for name, losses in (("reinforce", -policy), ("stable", centered)):
            mean = (sampler.exp() * losses).sum()
            drifts[name] += torch.autograd.grad(mean, logits, retain_graph=True)[0].norm().item()

    assert least < drifts["stable"] / drifts["reinforce"] < most


def test_gspo_takes_the_mean_of_a_whole_datum_over_the_tokens_that_it_is_told() -> None:
    # mean log ratio of the first and last token: sqrt(1 * 0.5); all three tokens have this ratio
    given = tokens(turn_ids=torch.zeros(3, dtype=torch.int64), in_ratio=torch.tensor([True, False, True]))
    ratio = math.sqrt(0.5)

    torch.testing.assert_close(gradient(chz.replace(INFINITE, name="gspo"), given), -ratio * ADVANTAGES)
    nothing = replace(given, in_ratio=torch.zeros(3, dtype=torch.bool))
    torch.testing.assert_close(gradient(chz.replace(INFINITE, name="gspo"), nothing), -ADVANTAGES)


def test_every_run_of_trained_tokens_is_a_turn_and_datums_begin_new_ones() -> None:
    # two datums: prompt, turn of two, prompt, turn of one | prompt, turn of two
    mask = torch.tensor([False, True, True, False, True, False, True, True])

    assert turn_ids(mask).tolist() == [0, 0, 1, 2, 2]
    torch.testing.assert_close(
        turn_means(torch.tensor([1.0, 3.0, 5.0, 2.0, 4.0]), turn_ids(mask)), torch.tensor([2.0, 2.0, 5.0, 3.0, 3.0])
    )


def test_metrics_are_means_over_tokens_under_known_names() -> None:
    config = LossConfig(name="ppo", kl_loss_coef=0.5, icepop_low=0.6, icepop_high=2.0)
    given = tokens(reference_logprobs=SAMPLING - 1.0)
    first, rest = slice(0, 1), slice(1, 3)
    losses = [
        token_losses(config, replace(given, **{name: getattr(given, name)[part] for name in VECTORS})).detach()
        for part in (first, rest)
    ]

    metrics = loss_metrics(config, losses, TRAINING, SAMPLING, torch.full((3,), 1 / 3))
    weighted = loss_metrics(config, losses, TRAINING, SAMPLING, torch.tensor([2.0, 0.5, 3.0]))

    check_names(metrics)
    # what is minimised: each token's loss times its weight; the means over tokens stay what they are
    each = torch.cat([loss.losses for loss in losses]).tolist()
    assert weighted["loss/total"] == pytest.approx(2.0 * each[0] + 0.5 * each[1] + 3.0 * each[2], abs=ROUNDING)
    assert {**weighted, "loss/total": 0.0} == {**metrics, "loss/total": 0.0}
    assert metrics["policy/trained_entropy_estimate"] == pytest.approx(-sum(TRAINING.tolist()) / 3, abs=ROUNDING)
    # -1 * 2, -1.5 * 1, masked; x = 1 + log ratio, weighted by the ratio; k3 adds exp(-x) - 1 to x
    k1 = (1.0 + 1.5 * (1 + math.log(1.5))) / 3
    kl = k1 + (math.exp(-1) - 1 + 1.5 * (math.exp(-1) / 1.5 - 1)) / 3
    assert metrics["loss/policy"] == pytest.approx(-3.5 / 3, abs=ROUNDING)
    assert metrics["loss/kl_base"] == pytest.approx(kl, abs=ROUNDING)
    assert metrics["loss/kl_base_k1"] == pytest.approx(k1, abs=ROUNDING)
    assert metrics["loss/total"] == pytest.approx(-3.5 / 3 + 0.5 * kl, abs=ROUNDING)
    assert metrics["policy/mask_frac"] == pytest.approx(1 / 3, abs=ROUNDING)
    assert metrics["policy/clip_frac"] == 0.0


def test_ratio_metrics_say_how_far_from_on_policy_the_tokens_are() -> None:
    metrics = ratio_metrics(TRAINING - SAMPLING)

    assert metrics["policy/ratio_mean"] == pytest.approx(1.0, abs=ROUNDING)
    assert metrics["policy/ratio_p50"] == pytest.approx(1.0, abs=ROUNDING)
    assert metrics["policy/ratio_p99"] == pytest.approx(1.0 + 0.98 * 0.5, abs=ROUNDING)
    assert metrics["policy/ratio_max"] == pytest.approx(1.5, abs=ROUNDING)
    # (1 + 1.5 + 0.5)^2 / (3 * (1 + 2.25 + 0.25))
    assert metrics["policy/ess_frac"] == pytest.approx(9 / 10.5, abs=ROUNDING)
    # k1 = -mean(log ratio), k3 = mean(ratio - 1 - log ratio) = k1, because the mean ratio is 1
    assert metrics["policy/kl_sampling_training/mean"] == pytest.approx(-math.log(0.75) / 3, abs=ROUNDING)
    assert metrics["policy/kl_sampling_training_k3/mean"] == pytest.approx(-math.log(0.75) / 3, abs=ROUNDING)
    assert effective_share(torch.tensor([0.0, 5.0])) == 0.5


def test_quantiles_are_those_of_torch_and_there_is_no_limit_to_the_number_of_tokens() -> None:
    values = torch.rand(1001, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = (0.0, 0.25, 0.5, 0.9903, 1.0)

    assert quantiles(values, *shares) == pytest.approx(values.quantile(values.new_tensor(shares)).tolist())
    # 2^24 + 1 zeros, of which one per cent is above
    many = torch.zeros(2**24 + 1)
    many[: 2**24 // 50] = 1.0
    assert quantiles(many, 0.5, 0.99) == [0.0, 1.0]
    with pytest.raises(RuntimeError, match="too large"):
        many.quantile(0.5)


@pytest.mark.parametrize(
    "config",
    [
        LossConfig(temperature=0.0),
        LossConfig(clip_low=-0.1),
        LossConfig(dual_clip=3.0),
        LossConfig(name="ppo", dual_clip=1.0),
        LossConfig(tis_cap=0.0),
        LossConfig(icepop_low=1.1),
        LossConfig(icepop_high=0.9),
        LossConfig(kl_loss_coef=-1.0),
        LossConfig(normalisation_tokens=0),
        LossConfig(name="cross_entropy", tis_cap=2.0),
        LossConfig(name="stable_reinforce", tis_cap=2.0),
        LossConfig(name="dro", dro_beta=-1.0),
    ],
)
def test_impossible_constants_are_refused(config: LossConfig) -> None:
    with pytest.raises(ConfigError, match="expected"):
        check_loss_config(config)


VECTORS = ("training_logprobs", "sampling_logprobs", "advantages", "turn_ids", "reference_logprobs")


def mask(loss: TokenLoss) -> list[bool]:
    assert loss.masked is not None
    return loss.masked.tolist()
