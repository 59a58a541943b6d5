"""Advantages of branches: numbers worked out by hand, and gradients against an enumerated decision process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from math import log, prod
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray

from cua_rl.rl.advantages import score_group
from cua_rl.rl.config import AdvantageKind, LoopConfig
from cua_rl.rl.datums import build_batch, count_retokenised
from cua_rl.rollout.branches import BranchingSettings, ForkRule, choose_turn, find_forks
from cua_rl.training.config import LossConfig
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Reward, Rollout
from cua_rl.types.snapshot import Moment, Snapshot
from tests.builders import IMAGE_TOKEN, encoded_image, group, model_turn, prompt, rollout, text
from tests.rl.test_turn_credit import PATHS, POLICY, Path, chances, policy_gradient, score_direction

FIRST_TOKEN = 20  # of the actions, by state and action


@cache
def played(path: Path, name: str, *, parent: str = "", fork_turn: int = 0) -> Rollout:
    """The rollout of a path, of which each turn's answer is one token that names state and action."""
    turns = [
        model_turn(
            prompt(text(*range(1, index + 2))),
            sampled=(FIRST_TOKEN + 2 * state + action,),
            logprobs=(log(chances(POLICY)[state, action]),),
        )
        for index, (state, action) in enumerate(path.steps)
    ]
    one = replace(rollout(*turns, rollout_id=name), reward=Reward(total=path.reward, parts={}))
    return replace(one, parent_id=parent, fork_turn=fork_turn) if parent else one


def tree(parent: Path, siblings: Sequence[Path], fork_turn: int, name: str) -> list[Rollout]:
    own = [played(path, f"{name}-{i}", parent=name, fork_turn=fork_turn) for i, path in enumerate(siblings)]
    return [played(parent, name), *own]


def made(states: int, reward: float, name: str, **origin: object) -> Rollout:
    """A rollout of so many turns."""
    turns = [model_turn(prompt(text(*range(1, index + 2))), sampled=(FIRST_TOKEN,)) for index in range(states)]
    return replace(
        rollout(*turns, rollout_id=name),
        reward=Reward(total=reward, parts={}),
        **origin,  # type: ignore[arg-type]
    )


WHOLE = made(2, 0.0, "whole")
PARENT = made(3, 1.0, "parent")
SIBLING = made(4, 0.0, "sibling", parent_id="parent", fork_turn=2)


def test_branches_are_compared_as_worked_out_in_the_documentation() -> None:
    scored = score_group(group(WHOLE, PARENT, SIBLING), "leave_one_out")

    # the tree is worth 1/2, half of a solved one: before the fork 1/2 - 0; after it (1 - 0) / 2 and (0 - 1) / 2
    assert scored.advantages == (-0.5, 0.5, -0.5)
    assert scored.turn_advantages == ((-0.5, -0.5), (0.5, 0.5, 0.5), (0.0, 0.0, -0.5, -0.5))


def test_turns_before_the_fork_are_trained_once_and_a_tree_counts_as_one_rollout() -> None:
    batch = build_batch([score_group(group(WHOLE, PARENT, SIBLING), "leave_one_out")], IMAGE_TOKEN)

    assert [(one.rollout_id, one.turn_indices) for one in batch.datums if one.rollout_id != "whole"] == [
        *(("parent", (index,)) for index in range(3)),
        *(("sibling", (index,)) for index in (2, 3)),
    ]
    assert batch.num_rollouts == 2
    assert len({one.member for one in batch.datums}) == 2
    assert count_retokenised(batch.datums, (WHOLE, PARENT, SIBLING), IMAGE_TOKEN) == 0


def test_a_parent_without_siblings_is_a_rollout_like_any_other() -> None:
    other = made(2, 1.0, "other")
    alone = score_group(group(WHOLE, other), "leave_one_out")

    assert (alone.advantages, alone.turn_advantages) == ((-1.0, 1.0), ())


@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_equal_rewards_give_exact_zeros(reward: float) -> None:
    siblings = [made(3, reward, f"s{i}", parent_id="p", fork_turn=1) for i in range(4)]
    members = group(*(made(2, reward, f"w{i}") for i in range(3)), made(3, reward, "p"), *siblings)

    assert not score_group(members, "leave_one_out").has_signal


@pytest.mark.parametrize("kind", ["mean", "mean_std", "batch_std", "state_groups", "turn_returns"])
def test_advantages_that_know_no_trees_are_refused(kind: AdvantageKind) -> None:
    with pytest.raises(ConfigError, match="leave_one_out"):
        score_group(group(WHOLE, PARENT, SIBLING), kind)


def test_the_fork_is_where_whole_rollouts_were_least_certain_and_never_at_the_first_turn() -> None:
    def answering(*logprobs: float) -> Rollout:
        return rollout(*[model_turn(prompt(text(1)), sampled=(7,), logprobs=(value,)) for value in logprobs])

    whole = [answering(-9.0, -1.0, -2.0), answering(-9.0, -1.5, -0.1, -1.2)]
    # means of the second turns 1.25, of the third 1.05, and 1.2
    assert choose_turn(whole, "highest_entropy", Random(0)) == 1
    assert choose_turn([*whole, answering(0.0, 0.0, -5.0)], "highest_entropy", Random(0)) == 2
    assert {choose_turn(whole, "random_turn", Random(seed)) for seed in range(50)} == {1, 2, 3}
    assert choose_turn([answering(-1.0)], "random_turn", Random(0)) is None
    assert choose_turn([], "highest_entropy", Random(0)) is None


def test_a_parent_that_ended_before_its_fork_turn_has_no_siblings() -> None:
    whole, short, long = made(4, 0.0, "whole"), made(1, 0.0, "short"), made(3, 0.0, "long")
    moments = tuple(
        Moment(snapshot=Snapshot(state=number, screen=encoded_image(b"a")), instruction="Do it.", policy_left_s=9.0)
        for number in range(4)
    )
    settings = BranchingSettings(num_siblings=2, at="highest_entropy")  # equally likely turns: the first is chosen
    parents = [replace(one, moments=moments[: len(one.turns)]) for one in (short, long)]

    forks = find_forks([whole, *parents], settings, 2, seed=0)

    found = {place: (fork.parent_id, len(fork.turns), fork.moment) for place, fork in forks.items()}
    assert found == dict.fromkeys((5, 6), ("long", 1, moments[0]))
    assert find_forks([whole, replace(short, moments=moments)], settings, 1, seed=0) == {}
    # nor has one that left a device which cannot be copied there
    uncopied = replace(long, moments=(None, *moments[:2]))
    assert find_forks([whole, uncopied], settings, 1, seed=0) == {}


@pytest.mark.parametrize(("num_siblings", "expected"), [(0, 0), (1, 3), (2, 2), (3, 1), (6, 1), (7, 0)])
def test_a_group_of_eight_has_so_many_parents(num_siblings: int, expected: int) -> None:
    assert BranchingSettings(num_siblings=num_siblings).num_parents(8) == expected


def test_settings_that_cannot_be_compared_are_refused() -> None:
    assert (
        LoopConfig(advantages="leave_one_out", branching=BranchingSettings(num_siblings=2)).branching.num_siblings == 2
    )
    with pytest.raises(ValueError, match="leave_one_out"):
        LoopConfig(branching=BranchingSettings(num_siblings=2))
    with pytest.raises(ValueError, match="sequence_mean"):
        LoopConfig(
            advantages="leave_one_out",
            branching=BranchingSettings(num_siblings=2),
            loss=LossConfig(normalisation="sequence_mean"),
        )
    with pytest.raises(ValueError, match="group_size - 2"):
        LoopConfig(advantages="leave_one_out", branching=BranchingSettings(num_siblings=3))


def continuations(path: Path, fork_turn: int) -> Iterator[tuple[Path, float]]:
    """The paths that go on from the state in which `path` takes this turn, each with its probability."""
    # the turns until then and the state there; chance outcomes before it are the parent's
    shared = [
        other
        for other in PATHS
        if other.steps[:fork_turn] == path.steps[:fork_turn]
        and len(other.steps) > fork_turn
        and other.steps[fork_turn][0] == path.steps[fork_turn][0]
    ]
    total = sum(other.probability(POLICY) for other in shared)
    yield from ((other, other.probability(POLICY) / total) for other in shared)


def trees(fork_turn: int, num_siblings: int, name: str) -> Iterator[tuple[list[Rollout], float]]:
    """All trees of a parent with a fork there, or alone if it ends before, each with its probability."""
    for parent in PATHS:
        chance = parent.probability(POLICY)
        if len(parent.steps) <= fork_turn:
            yield [played(parent, name)], chance
            continue
        for siblings in product(continuations(parent, fork_turn), repeat=num_siblings):
            weight = chance * prod(one for _, one in siblings)
            yield tree(parent, [path for path, _ in siblings], fork_turn, name), weight


def estimate(members: Sequence[Rollout]) -> NDArray[np.float64]:
    """Of the gradient: the sum of advantages over all turns that were sampled, divided by the number of trees."""
    scored = score_group(group(*members), "leave_one_out")
    total = np.zeros_like(POLICY)
    for one, advantage, of_turns in scored.members():
        for turn in one.own_turns:
            (token,) = turn.model.sampled_tokens
            credit = of_turns[turn.index] if of_turns else advantage
            total += credit * score_direction(divmod(token - FIRST_TOKEN, 2))
    return total / scored.num_trees


def trained_estimate(members: Sequence[Rollout]) -> NDArray[np.float64]:
    """The same as it is trained: the advantages of the datums' tokens, divided by the number of rollouts."""
    batch = build_batch([score_group(group(*members), "leave_one_out")], IMAGE_TOKEN)
    total = np.zeros_like(POLICY)
    for datum in batch.datums:
        tokens = datum.model_input.token_ids(IMAGE_TOKEN)
        for token, advantage, is_trained in zip(tokens, datum.advantages, datum.loss_mask, strict=True):
            if is_trained:
                total += advantage * score_direction(divmod(token - FIRST_TOKEN, 2))
    return total / batch.num_rollouts


Choose = Callable[[Path], Sequence[tuple[int | None, float]]]


def expected_estimate(choose: Choose, num_siblings: int, num_trees: int = 1) -> NDArray[np.float64]:
    """The mean over all groups of a whole rollout and trees, each with its probability."""
    total = np.zeros_like(POLICY)
    for whole in PATHS:
        for turn, chosen in choose(whole):
            fork_turn = len(whole.steps) + 9 if turn is None else turn
            grown = [list(trees(fork_turn, num_siblings, f"t{number}")) for number in range(num_trees)]
            for combined in product(*grown):
                weight = whole.probability(POLICY) * chosen * prod(one for _, one in combined)
                total += weight * estimate([played(whole, "whole"), *(one for own, _ in combined for one in own)])
    return total


def by_rule(rule: ForkRule) -> Choose:
    def choose(whole: Path) -> Sequence[tuple[int | None, float]]:
        drawn = [choose_turn([played(whole, "whole")], rule, Random(seed)) for seed in range(40)]
        return [(turn, drawn.count(turn) / len(drawn)) for turn in sorted(set(drawn), key=str)]

    return choose


@pytest.mark.parametrize(("rule", "num_siblings"), [("random_turn", 1), ("highest_entropy", 1), ("highest_entropy", 2)])
def test_the_expected_gradient_is_the_policy_gradient(rule: ForkRule, num_siblings: int) -> None:
    assert expected_estimate(by_rule(rule), num_siblings) == pytest.approx(policy_gradient(), abs=1e-7)


def test_two_trees_beside_a_whole_rollout_have_the_same_expected_gradient() -> None:
    def late(whole: Path) -> Sequence[tuple[int | None, float]]:
        return [(2 if whole.is_solved else None, 1.0)]  # few enough groups to enumerate

    assert expected_estimate(late, 1, num_trees=2) == pytest.approx(policy_gradient(), abs=1e-7)


def test_what_is_trained_is_the_estimate() -> None:
    whole = [played(path, "whole") for path in PATHS[::3]]
    for one, (own, _) in product(whole, list(trees(1, 1, "t"))[::7]):
        assert trained_estimate([one, *own]) == pytest.approx(estimate([one, *own]), abs=1e-12)


def test_a_fork_that_is_chosen_by_what_the_parent_did_there_would_bias_it() -> None:
    def least_likely(path: Path) -> int:
        return min(range(1, len(path.steps)), key=lambda turn: chances(POLICY)[path.steps[turn]], default=9)

    total = np.zeros_like(POLICY)
    for whole, parent in product(PATHS, PATHS):
        weight, turn = whole.probability(POLICY) * parent.probability(POLICY), least_likely(parent)
        siblings = list(continuations(parent, turn)) if turn < len(parent.steps) else [(None, 1.0)]
        for sibling, chance in siblings:
            own = [played(parent, "t")] if sibling is None else tree(parent, [sibling], turn, "t")
            total += weight * chance * estimate([played(whole, "whole"), *own])
    assert np.abs(total - policy_gradient()).max() > 1e-3
