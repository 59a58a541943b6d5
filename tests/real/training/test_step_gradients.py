"""Gradients of whole steps, with their normalisation and KL terms, against formulas of our own in float64."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from typing import Any, get_args

import pytest
import torch

from cua_rl.rl.config import LoopConfig
from cua_rl.rl.datums import Batch
from cua_rl.rl.train_step import train_step
from cua_rl.training.batching import turn_ids
from cua_rl.training.config import LossConfig, LossName, Normalisation, TrainerConfig
from cua_rl.training.losses import LossTokens, token_losses
from cua_rl.training.wire import ForwardBackwardOutput
from cua_rl.types.rollout import Datum
from tests.builders import datum
from tests.fakes import FakeTrainer

Rows = list[list[float]]
CLIPS = {"gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "dppo": (0.1, 0.15)}
TEACHING, CONSTANT = (1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 0.0, 0.0)
POLICY_LOSSES = [name for name in get_args(LossName) if name != "cross_entropy"]


@dataclass(slots=True, kw_only=True)
class World:
    """Groups of four rollouts of one or two turns, those that teach first, and what the policies say of them."""

    datums: list[Datum]
    current: Rows
    reference: Rows
    num_rollouts: int

    def keep_teaching(self) -> None:
        """Without a KL term, the others have no datums."""
        self.datums = [one for one in self.datums if any(one.advantages)]

    @property
    def trained(self) -> list[tuple[int, int]]:
        """Datum and position of every trained token."""
        return [(i, k) for i, one in enumerate(self.datums) for k, is_trained in enumerate(one.loss_mask) if is_trained]


def make_world(*rewards: Sequence[float]) -> World:
    rng, datums = Random(5), list[Datum]()
    for group, (member, reward) in ((g, m) for g, values in enumerate(rewards) for m in enumerate(values)):
        mask = [False, *[True] * rng.randint(1, 3), False, *[True] * (rng.randint(0, 6) + 4 * (group > 0))]
        made = datum(tuple(mask), rollout_id=f"{group}-{member}", turn_indices=(0, 1) if mask[-1] else (0,))
        advantage = reward - sum(rewards[group]) / 4
        values = {
            "advantages": tuple(advantage * flag for flag in mask),
            "sampling_logprobs": tuple(-rng.uniform(0.1, 2.0) * flag for flag in mask),
        }
        datums.append(replace(made, group_id=str(group), **values))
    spread = [[(rng.gauss(0, 0.3), rng.gauss(0, 0.5)) for _ in one.loss_mask] for one in datums]
    rows = [
        [
            [
                (p + noise[which]) * flag
                for p, noise, flag in zip(one.sampling_logprobs, row, one.loss_mask, strict=True)
            ]
            for one, row in zip(datums, spread, strict=True)
        ]
        for which in (0, 1)
    ]
    return World(datums=datums, current=rows[0], reference=rows[1], num_rollouts=len(datums))


class AutogradTrainer(FakeTrainer):
    """Differentiates the loss that it is told, with its weights, by the log-probabilities of another policy."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world, self.gradient, self.total = world, dict[tuple[int, int], float](), 0.0

    async def reference_logprobs(self, datums: Sequence[Datum], **_: Any) -> list[tuple[float, ...]]:
        return [tuple(row) for row in self.world.reference]

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **beside: Sequence[Any] | None
    ) -> ForwardBackwardOutput:
        weights, reference = beside["token_weights"], beside["reference_logprobs"]
        assert weights is not None
        mask = torch.cat([torch.tensor(one.loss_mask) for one in datums])

        def flat(rows: Sequence[Sequence[float]]) -> torch.Tensor:
            return torch.cat([torch.tensor(row, dtype=torch.float64) for row in rows])[mask]

        logprobs = flat(self.world.current[: len(datums)]).requires_grad_()
        tokens = LossTokens(
            training_logprobs=logprobs,
            sampling_logprobs=flat([one.sampling_logprobs for one in datums]),
            advantages=flat([one.advantages for one in datums]),
            turn_ids=turn_ids(mask),
            reference_logprobs=None if reference is None else flat(reference),
        )
        each = flat([[weight] * len(one.loss_mask) for weight, one in zip(weights, datums, strict=True)])
        total = (token_losses(loss, tokens).losses * each).sum()
        self.total = total.item()
        self.gradient = dict(zip(self.world.trained, torch.autograd.grad(total, logprobs)[0].tolist(), strict=True))
        rows = tuple(tuple(row) for row in self.world.current[: len(datums)])
        return ForwardBackwardOutput(training_logprobs=rows, metrics={})


async def trained(world: World, penalty: float = 0.0, **loss: Any) -> AutogradTrainer:
    trainer = AutogradTrainer(world)
    settings = LoopConfig(
        loss=LossConfig(normalisation_tokens=50, **loss),
        trainer=TrainerConfig(parity_limit=10.0),
        kl_penalty_coef=penalty,
    )
    if not settings.has_kl_term:  # as the loop builds its batches
        world.keep_teaching()
    batch = Batch(datums=tuple(world.datums), num_rollouts=world.num_rollouts, metrics={})
    await train_step(trainer, batch, settings, step=1, max_steps=1)
    return trainer


def policy_slope(name: str, sampled: float, ratio: float, turn_ratio: float, advantage: float) -> float:
    """d loss / d log p of a token, from the papers' formulas."""
    low, high = CLIPS.get(name, (0.2, 0.2))
    match name:
        case "cispo":
            return -min(max(ratio, 1 - low), 1 + high) * advantage
        case "ppo" | "gspo":
            ratio = turn_ratio if name == "gspo" else ratio
            is_clipped = ratio > 1 + high if advantage > 0 else ratio < 1 - low
            return 0.0 if is_clipped else -ratio * advantage
        case "dppo":
            rise = math.exp(sampled) * (ratio - 1.0)
            return 0.0 if (rise > high if advantage > 0 else -rise > low) else -ratio * advantage
        case "dro":
            return 0.05 * math.log(ratio) - advantage
        case "stable_reinforce":
            left = [-math.expm1(logprob) for logprob in (sampled, sampled + math.log(ratio))]
            return -left[0] / max(left[1], 1e-6) * advantage
        case _:  # importance sampling; and decoupled PPO at the proximal policy, whose behaviour weight is the ratio
            return -ratio * advantage


def expected(world: World, name: str, normalisation: str, coef: float, penalty: float) -> dict[tuple[int, int], float]:
    """The gradient by every trained token: the policy's divisor is that of teaching groups, the divergence's of all."""
    datums, tokens = world.datums, world.trained
    teaching = {one.group_id for one in datums if any(one.advantages)}
    num_all, num_rollouts = len(tokens), world.num_rollouts
    num_teaching = sum(datums[i].group_id in teaching for i, _ in tokens) or num_all
    gap = {(i, k): datums[i].sampling_logprobs[k] - world.reference[i][k] for i, k in tokens}
    mean_gap = math.fsum(gap.values()) / num_all
    found: dict[tuple[int, int], float] = {}
    for i, k in tokens:
        own = sum(datums[i].loss_mask)
        for_policy = {
            "constant": 1 / (num_rollouts * 50),
            "token_mean": 1 / num_teaching,
            "sequence_mean": 1 / (num_rollouts * own),
            "token_sum": 1.0,
        }[normalisation]
        for_divergence = 1 / num_all if normalisation == "token_mean" else for_policy
        start = k - next(n for n in range(1, k + 1) if not datums[i].loss_mask[k - n]) + 1
        turn = [start]
        while turn[-1] + 1 < len(datums[i].loss_mask) and datums[i].loss_mask[turn[-1] + 1]:
            turn.append(turn[-1] + 1)
        moved = {n: world.current[i][n] - datums[i].sampling_logprobs[n] for n in turn}
        ratio, turn_ratio = math.exp(moved[k]), math.exp(math.fsum(moved.values()) / len(turn))
        advantage = datums[i].advantages[k] + penalty * (mean_gap - gap[i, k]) * for_divergence / for_policy
        slope = for_policy * policy_slope(name, datums[i].sampling_logprobs[k], ratio, turn_ratio, advantage)
        found[i, k] = slope + coef * for_divergence * min(ratio, 5.0) * (world.current[i][k] - world.reference[i][k])
    return found


@pytest.mark.parametrize(("name", "normalisation"), list(product(POLICY_LOSSES, get_args(Normalisation))))
@pytest.mark.parametrize(
    ("rewards", "coef", "penalty"),
    [
        ((TEACHING, CONSTANT, CONSTANT), 0.0, 0.0),
        ((TEACHING, CONSTANT, CONSTANT), 0.05, 0.0),
        ((TEACHING, CONSTANT, CONSTANT), 0.0, 0.05),
        ((TEACHING, TEACHING), 0.05, 0.0),
        ((CONSTANT, CONSTANT), 0.05, 0.0),
        ((CONSTANT, CONSTANT), 0.0, 0.05),
    ],
)
async def test_the_gradient_of_a_step_is_that_of_the_formulas(
    rewards: tuple[tuple[float, ...], ...], name: LossName, normalisation: Normalisation, coef: float, penalty: float
) -> None:
    world = make_world(*rewards)
    low, high = CLIPS.get(name, (0.2, 0.2))

    found = await trained(
        world, penalty, name=name, normalisation=normalisation, kl_loss_coef=coef, clip_low=low, clip_high=high
    )

    wanted = expected(world, name, normalisation, coef, penalty)
    for token, slope in wanted.items():
        assert found.gradient[token] == pytest.approx(slope, rel=1e-9, abs=1e-12)


async def test_a_divergence_leaves_the_weights_of_the_policy_loss_as_they_are() -> None:
    # one group of three teaches; a coefficient of nothing but a name must change nothing
    world = make_world(TEACHING, CONSTANT, CONSTANT)

    tiny = await trained(world, normalisation="token_mean", kl_loss_coef=1e-12)
    penalised = await trained(world, 1e-12, normalisation="token_mean")
    without = await trained(world, normalisation="token_mean")

    for token, slope in without.gradient.items():
        assert tiny.gradient[token] == pytest.approx(slope, rel=1e-6)
        assert penalised.gradient[token] == pytest.approx(slope, rel=1e-6)
