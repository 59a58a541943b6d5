"""Group-relative advantages: a rollout, or a turn, is good or bad compared with the others of its group."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from math import fsum, sqrt
from operator import attrgetter

from cua_rl.rewards.reward import as_reward
from cua_rl.rl.config import AdvantageKind, CreditSettings, RolloutAdvantageKind
from cua_rl.rollout.branches import state_of
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Datum, Rollout, RolloutGroup, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group and its advantages, aligned with `group.compared`; all 0 if the group has no learning signal."""

    group: RolloutGroup
    advantages: tuple[float, ...]
    turn_advantages: tuple[tuple[float, ...], ...] = ()
    """Those of each rollout's turns; empty, all or one, if every turn has its rollout's."""

    @property
    def has_signal(self) -> bool:
        return any(chain(self.advantages, *self.turn_advantages))

    @property
    def num_trees(self) -> int:
        """Compared rollouts, of which those that share turns count as one."""
        return len({rollout.tree_id for rollout in self.group.compared})

    def members(self) -> Iterator[tuple[Rollout, float, tuple[float, ...]]]:
        """Each compared rollout with its advantage and those of its turns, if they have their own."""
        of_turns = self.turn_advantages or ((),) * len(self.advantages)
        return zip(self.group.compared, self.advantages, of_turns, strict=True)


def score_group(group: RolloutGroup, kind: AdvantageKind, credit: CreditSettings | None = None) -> ScoredGroup:
    """Compare the rollouts of a group, or also their turns, for which screenshots may have to be decoded."""
    credit, rewards = credit or CreditSettings(), group.compared_rewards
    zeros = (0.0,) * len(rewards)
    if any(rollout.parent_id for rollout in group.rollouts) and not group.is_constant:
        if kind != "leave_one_out":
            raise ConfigError(f"advantages: expected leave_one_out for rollouts with branches, got {kind}; change it")
        return compare_branches(group)
    match kind:
        case "state_groups":
            name_of = partial(state_of, moving_top=credit.moving_top or 0.0)
        case "turn_returns":
            name_of = attrgetter("index")
        case _:
            advantages = zeros if group.is_constant else group_advantages(rewards, kind)
            return ScoredGroup(group=group, advantages=advantages)
    if group.is_incomplete:
        return ScoredGroup(group=group, advantages=zeros)
    advantages = group_advantages(rewards, "leave_one_out")
    of_turns = compare_turns(group.compared, advantages, credit, name_of)
    return ScoredGroup(group=group, advantages=advantages, turn_advantages=of_turns)


def compare_branches(group: RolloutGroup) -> ScoredGroup:
    """Advantages in a group in which rollouts go on from turns of others, which they share with their parents.

    A tree is a rollout with its siblings, and worth the mean of their rewards; it counts as one rollout. Turns before
    the fork, which are trained in the parent, have what the tree is worth minus the mean of the other trees. Each
    continuation has its reward minus the mean of the other continuations, divided by their number.
    """
    trees: defaultdict[str, list[int]] = defaultdict(list)
    for index, rollout in enumerate(group.compared):
        trees[rollout.tree_id].append(index)
    rewards = group.compared_rewards
    worth = [_mean([rewards[index] for index in members]) for members in trees.values()]
    advantages: list[float] = list(rewards)
    of_turns: list[tuple[float, ...]] = [()] * len(rewards)
    for members, before in zip(trees.values(), group_advantages(worth, "leave_one_out"), strict=True):
        after = group_advantages([rewards[index] for index in members], "leave_one_out")
        fork = max(group.compared[index].fork_turn for index in members)
        for index, own in zip(members, after, strict=True):
            rollout = group.compared[index]
            shared = 0.0 if rollout.parent_id else before
            advantages[index] = own / len(members) if len(members) > 1 else before
            of_turns[index] = (shared,) * fork + (advantages[index],) * (len(rollout.turns) - fork)
    return ScoredGroup(group=group, advantages=tuple(advantages), turn_advantages=tuple(of_turns))


def _mean(values: Sequence[float]) -> float:
    """Of equal values exactly their value: the rounding error of a mean must not be trained on."""
    return values[0] if len(set(values)) == 1 else fsum(values) / len(values)


def compare_turns(
    rollouts: Sequence[Rollout],
    advantages: Sequence[float],
    credit: CreditSettings,
    name_of: Callable[[Turn], Hashable | None],
) -> tuple[tuple[float, ...], ...]:
    """Per rollout, the advantage of each turn: (1 - w) * the rollout's + w * that among turns with the same name.

    Among them, a turn's return is compared with the mean over the turns of the *other* rollouts (GiGPO, arXiv
    2505.10978, with RLOO's baseline). Its own rollout's turns do not count: their returns contain what it earns itself,
    and a baseline that depends on an action biases the gradient. A turn without a name (None), or whose name no other
    rollout has, keeps the rollout's advantage.
    """
    returns = [turn_returns(rollout, credit.discount) for rollout in rollouts]
    names = [tuple(map(name_of, rollout.turns)) for rollout in rollouts]
    found: defaultdict[Hashable, defaultdict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for member, (own_names, own_returns) in enumerate(zip(names, returns, strict=True)):
        for name, value in zip(own_names, own_returns, strict=True):
            if name is not None:
                found[name][member].append(value)
    baselines: dict[tuple[Hashable, int], float] = {}
    for name, of_members in found.items():
        values = list(chain(*of_members.values()))
        total = fsum(values)
        for member, own in of_members.items():
            if len(own) < len(values):
                is_constant = len(set(values)) == 1  # as in `_mean`
                others = (total - fsum(own)) / (len(values) - len(own))
                baselines[name, member] = values[0] if is_constant else others
    weight = credit.turn_weight
    return tuple(
        tuple(
            (1 - weight) * advantage + weight * (value - baselines[name, member])
            if (name, member) in baselines
            else advantage
            for name, value in zip(names[member], returns[member], strict=True)
        )
        for member, advantage in enumerate(advantages)
    )


def turn_returns(rollout: Rollout, discount: float) -> tuple[float, ...]:
    """What is earned from each turn on, later turns discounted: [0.5, 0] and 1 for success, 0.9 -> [0.5 + 0.9, 1].

    What a solved rollout gets for its end, it gets at its last turn. An unsolved one gets it when its turns are up,
    however early it ends, and all its turns count it as the first does: otherwise a discount would pay for giving up
    (what is left of a small reward is more, the sooner it comes) or for delay (a penalty is less, the later it comes;
    of a state that is seen twice, the later turn is closer to the end). Rounded as rewards are: equal ones are equal.
    """
    assert rollout.reward is not None, "a rollout without a reward is not compared"
    num_turns = len(rollout.turns)
    of_turns = [*(rollout.reward.of_turns or (0.0,) * num_turns)]
    at_end, unsolved = rollout.reward.total - fsum(of_turns), 0.0
    if not rollout.success:
        unsolved = at_end * discount ** max((rollout.max_turns or 0) - 1, num_turns - 1, 0)
    elif of_turns:
        of_turns[-1] += at_end
    returns, following = list[float](), 0.0
    for earned in reversed(of_turns):
        following = earned + discount * following
        returns.append(as_reward(following + unsolved))
    return tuple(reversed(returns))


def group_advantages(rewards: Sequence[float], kind: RolloutAdvantageKind) -> tuple[float, ...]:
    """Centre rewards in their group: [1, 0, 0, 1] -> [.5, -.5, -.5, .5] (Dr. GRPO, arXiv 2503.20783).

    "mean_std" also divides by the population standard deviation (GRPO, arXiv 2402.03300): [1, 0, 0, 0] -> [1.73, -.58,
    ...]. "leave_one_out" compares each rollout with the mean of the others (RLOO, arXiv 2402.14740), which is
    n / (n - 1) times the centred reward: [1, 0, 0, 0] -> [1, -1/3, ...]. "batch_std" is "mean" here: the division
    belongs to the whole step, see `divide_by_batch_std`.

    A constant group gets exact zeros. The mean of eight times 0.1 is not quite 0.1, and the rounding error must not be
    trained on, least of all after division by its own size. Constant means equal, without a tolerance: rewards are
    rounded where they are made (`rewards/reward.py`), so rewards that should be equal are.
    """
    if len(set(rewards)) <= 1:
        return (0.0,) * len(rewards)
    mean = sum(rewards) / len(rewards)
    centred = [reward - mean for reward in rewards]
    match kind:
        case "mean" | "batch_std":
            return tuple(centred)
        case "mean_std":
            std = sqrt(sum(value * value for value in centred) / len(centred))
            return tuple(value / std for value in centred)
        case "leave_one_out":
            return tuple(value * len(rewards) / (len(rewards) - 1) for value in centred)


def divide_by_batch_std(datums: Sequence[Datum]) -> tuple[list[Datum], float]:
    """Divide advantages by their population standard deviation over the step's rollouts; also returns the deviation.

    Every rollout counts once, however many tokens and datums it has (as in REINFORCE++ with a group baseline, arXiv
    2501.03262). Groups without a learning signal do not count, even if a KL term keeps their datums. The division
    happens when a step trains, not when a group ends: recorded advantages are those of the group.
    """
    by_member: dict[tuple[str, str], float] = {}
    for datum in datums:  # all trained tokens of a rollout share its advantage
        trained = zip(datum.advantages, datum.loss_mask, strict=True)
        by_member[datum.member] = next((value for value, is_trained in trained if is_trained), 0.0)
    teaching = {group_id for (group_id, _), value in by_member.items() if value}
    values = [value for (group_id, _), value in by_member.items() if group_id in teaching]
    if not values:
        return list(datums), 0.0
    mean = fsum(values) / len(values)
    std = sqrt(fsum((value - mean) ** 2 for value in values) / len(values))
    if not std:
        return list(datums), std
    return [replace(datum, advantages=tuple(value / std for value in datum.advantages)) for datum in datums], std


def penalise_divergence(
    datums: Sequence[Datum], reference_logprobs: Sequence[Sequence[float]], coef: float
) -> tuple[list[Datum], float]:
    """KL penalty in the reward: lower the advantage of tokens that the policy prefers more than the reference model.

    Per trained token the KL estimate is d = sampling_logprob - reference_logprob; the advantage changes by coef *
    (mean(d) - d). Subtracting the mean makes the penalty move probability between tokens instead of lowering all of
    them. Also returns that mean.

    A token is penalised only for its own divergence. Penalties that are summed (and discounted) over later tokens need
    the mask applied again after the sum: otherwise prompt tokens and screenshots before an answer get an advantage,
    with a sampling log-probability of 0 that does not exist. Here no sum crosses tokens, and masked tokens keep exact
    zeros.
    """
    gaps = [
        logprob - reference
        for datum, row in zip(datums, reference_logprobs, strict=True)
        for logprob, reference, is_trained in zip(datum.sampling_logprobs, row, datum.loss_mask, strict=True)
        if is_trained
    ]
    mean = sum(gaps) / len(gaps)
    penalised: list[Datum] = []
    for datum, row in zip(datums, reference_logprobs, strict=True):
        tokens = zip(datum.advantages, datum.sampling_logprobs, row, datum.loss_mask, strict=True)
        advantages = tuple(
            advantage + coef * (mean - (logprob - reference)) if is_trained else 0.0
            for advantage, logprob, reference, is_trained in tokens
        )
        penalised.append(replace(datum, advantages=advantages))
    return penalised, mean
