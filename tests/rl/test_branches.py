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
from cua_rl.rollout.branches import BranchingSettings, ForkPoint, ForkRule, find_forks, fork_points
from cua_rl.training.config import LossConfig
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import Reward, Rollout
from cua_rl.types.snapshot import Moment, Snapshot
from tests.builders import IMAGE_TOKEN, encoded_image, group, model_turn, prompt, rollout, text
from tests.rl.test_turn_credit import PATHS, POLICY, Path, chances, policy_gradient, score_direction

FIRST_TOKEN = 20  # of the actions, by state and action


def choose_fork(whole: Sequence[Rollout], rule: ForkRule, random: Random) -> ForkPoint | None:
    points = fork_points(whole, rule)
    return random.choice(points) if points else None


def judged(one: Rollout, *, is_solved: bool) -> Rollout:
    assert one.validation is not None
    return replace(one, validation=replace(one.validation, success=is_solved))


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
    seen = tuple(replace(turn, state=str(state)) for turn, (state, _) in zip(one.turns, path.steps, strict=True))
    one = judged(replace(one, turns=seen), is_solved=path.is_solved)
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
    assert choose_fork(whole, "highest_entropy", Random(0)) == ForkPoint(1)
    assert choose_fork([*whole, answering(0.0, 0.0, -5.0)], "highest_entropy", Random(0)) == ForkPoint(2)
    drawn = {choose_fork(whole, "random_turn", Random(seed)) for seed in range(50)}
    assert drawn == {ForkPoint(1), ForkPoint(2), ForkPoint(3)}
    assert choose_fork([answering(-1.0)], "random_turn", Random(0)) is None
    assert choose_fork([], "highest_entropy", Random(0)) is None


def seeing(states: str, *, is_solved: bool = False) -> Rollout:
    """A rollout whose turns saw these states, a letter each."""
    one = made(len(states), float(is_solved), states)
    turns = tuple(replace(turn, state=state) for turn, state in zip(one.turns, states, strict=True))
    return judged(replace(one, turns=turns), is_solved=is_solved)


def test_the_fork_is_where_whole_rollouts_first_went_on_differently_from_a_state() -> None:
    def first(*states: str) -> ForkPoint | None:
        return choose_fork([seeing(one) for one in states], "first_disagreement", Random(0))

    # both go on from b to c, and from c elsewhere, the second one turn later; d and f are seen once
    assert first("abcd", "axbcf") == ForkPoint(3, "c")
    assert first("abc", "abcd") == ForkPoint(2, "c")  # one ended there
    assert first("abcde", "abxde", "abcdf") == ForkPoint(1, "b")  # the first of two
    # where they never part, the turn is random: from their beginning all are different anyway
    assert first("abc", "abc") in (ForkPoint(1), ForkPoint(2))
    assert first("ab", "ac") == ForkPoint(1)
    assert first("a", "a") is None


def test_the_fork_is_where_a_failed_rollout_could_last_have_succeeded() -> None:
    solved = seeing("abcd", is_solved=True)

    def last(*members: Rollout) -> ForkPoint | None:
        return choose_fork(members, "before_failure", Random(0))

    assert last(solved, seeing("abcxyz")) == ForkPoint(2, "c")
    assert last(solved, seeing("axxbxx")) == ForkPoint(3, "b")
    assert last(solved, seeing("abx"), seeing("abcx")) == ForkPoint(2, "c")
    # without a success, without a failure, or without a common state the turn is random
    for members in ([seeing("abc"), seeing("abd")], [solved, solved], [solved, seeing("axyz")]):
        point = last(*members)
        assert point is not None
        assert point.state is None


def test_siblings_go_on_where_their_parent_first_sees_the_state_and_at_the_turn_at_the_latest() -> None:
    point = ForkPoint(3, "c")

    turns = {states: point.turn_of(seeing(states), 0.0) for states in ("abcde", "acbde", "abdec", "cabde")}

    assert turns == {"abcde": 2, "acbde": 1, "abdec": 3, "cabde": 3}  # never at the first turn
    assert ForkPoint(3).turn_of(seeing("abcde"), 0.0) == 3


def test_states_without_names_are_told_apart_by_their_pictures() -> None:
    def pictured(states: str) -> Rollout:
        one = seeing(states)
        turns = [
            replace(turn, state="", agent=replace(turn.agent, before=encoded_image(turn.state.encode())))
            for turn in one.turns
        ]
        return replace(one, turns=tuple(turns))

    point = choose_fork([pictured("abcd"), pictured("abce")], "first_disagreement", Random(0))

    assert point == ForkPoint(2, encoded_image(b"c").sha256)
    assert point.turn_of(pictured("acxx"), 0.0) == 1


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


@pytest.mark.parametrize("at", ["first_disagreement", "before_failure"])
def test_whole_rollouts_that_are_compared_are_two_at_least(at: ForkRule) -> None:
    assert [BranchingSettings(num_siblings=1, at=at).num_parents(size) for size in (3, 4, 7, 8)] == [0, 1, 2, 3]


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
    by_state = BranchingSettings(num_siblings=2, at="first_disagreement")
    with pytest.raises(ValueError, match="group_size - 3"):
        LoopConfig(advantages="leave_one_out", branching=by_state)  # of four
    assert LoopConfig(advantages="leave_one_out", branching=by_state, group_size=5).branching.num_parents(5) == 1


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


def trees(point: ForkPoint | None, num_siblings: int, name: str) -> Iterator[tuple[list[Rollout], float]]:
    """All trees of a parent with a fork there, or alone if it ends before, each with its probability."""
    for parent in PATHS:
        chance = parent.probability(POLICY)
        fork_turn = point.turn_of(played(parent, name), 0.0) if point else len(parent.steps)
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


Choose = Callable[[Sequence[Path]], Sequence[tuple[ForkPoint | None, float]]]


def expected_estimate(
    choose: Choose, num_siblings: int, *, num_trees: int = 1, num_whole: int = 1
) -> NDArray[np.float64]:
    """The mean over all groups of whole rollouts and trees, each with its probability."""
    total = np.zeros_like(POLICY)
    for whole in product(PATHS, repeat=num_whole):
        members = [played(path, f"whole-{number}") for number, path in enumerate(whole)]
        for point, chosen in choose(whole):
            grown = [list(trees(point, num_siblings, f"t{number}")) for number in range(num_trees)]
            for combined in product(*grown):
                weight = chosen * prod(path.probability(POLICY) for path in whole) * prod(one for _, one in combined)
                total += weight * estimate([*members, *(one for own, _ in combined for one in own)])
    return total


def by_rule(rule: ForkRule) -> Choose:
    def choose(whole: Sequence[Path]) -> Sequence[tuple[ForkPoint | None, float]]:
        members = [played(path, "whole") for path in whole]
        drawn = [choose_fork(members, rule, Random(seed)) for seed in range(40)]
        return [(point, drawn.count(point) / len(drawn)) for point in sorted(set(drawn), key=str)]

    return choose


@pytest.mark.parametrize(
    ("rule", "num_siblings", "num_whole"),
    [
        ("random_turn", 1, 1),
        ("highest_entropy", 1, 1),
        ("highest_entropy", 2, 1),
        ("first_disagreement", 1, 2),
        ("before_failure", 1, 2),
    ],
)
def test_the_expected_gradient_is_the_policy_gradient(rule: ForkRule, num_siblings: int, num_whole: int) -> None:
    found = expected_estimate(by_rule(rule), num_siblings, num_whole=num_whole)
    assert found == pytest.approx(policy_gradient(), abs=1e-7)


def test_two_trees_beside_a_whole_rollout_have_the_same_expected_gradient() -> None:
    def late(whole: Sequence[Path]) -> Sequence[tuple[ForkPoint | None, float]]:
        # few enough groups to enumerate; the fork is where a parent comes to state 1, or at its last turn
        return [(ForkPoint(2, "1") if whole[0].is_solved else None, 1.0)]

    assert expected_estimate(late, 1, num_trees=2) == pytest.approx(policy_gradient(), abs=1e-7)


def test_what_is_trained_is_the_estimate() -> None:
    whole = [played(path, "whole") for path in PATHS[::3]]
    for one, (own, _) in product(whole, list(trees(ForkPoint(1), 1, "t"))[::7]):
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
