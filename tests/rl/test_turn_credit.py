"""Advantages of turns: numbers worked out by hand, and gradients against an enumerated decision process."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from itertools import product
from math import prod

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from cua_rl.environments.phone.simulator.device import SimulatedPhone, take_screenshot
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.rl.advantages import group_advantages, score_group, turn_returns
from cua_rl.rl.config import AdvantageKind, CreditSettings
from cua_rl.rl.datums import build_batch
from cua_rl.rollout.branches import state_of
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import AgentTurn, Reward, Rollout, StopReason
from tests.builders import IMAGE_TOKEN, encoded_image, group, model_turn, prompt, rollout, text

TURN_KINDS: tuple[AdvantageKind, ...] = ("state_groups", "turn_returns")


def played(
    states: Sequence[str],
    reward: float,
    *,
    of_turns: Sequence[float] = (),
    max_turns: int | None = None,
    name: str = "r",
) -> Rollout:
    """A rollout that saw these states and got this reward, for success if it is above the turns' own."""
    one = rollout(*[model_turn(prompt(text(1)))] * len(states), rollout_id=name, stop_reason=StopReason.MAX_TURNS)
    turns = tuple(replace(turn, state=state) for turn, state in zip(one.turns, states, strict=True))
    assert one.validation is not None
    return replace(
        one,
        turns=turns,
        reward=Reward(total=reward, parts={"all": reward}, of_turns=tuple(of_turns)),
        validation=replace(one.validation, success=reward > sum(of_turns)),
        max_turns=max_turns,
    )


SOLVED = played(("home", "settings", "wifi"), 1.0)
STUCK = played(("home", "settings", "settings"), 0.0, max_turns=4)
LOST = played(("home", "mail"), 0.0, max_turns=4)


def test_turns_that_saw_the_same_state_are_compared_as_worked_out_in_the_documentation() -> None:
    # rollouts, each with the mean of the others: 1 - 0, 0 - 1/2, 0 - 1/2; settings: 1 - 0 and twice 0 - 1
    half = score_group(group(SOLVED, STUCK, LOST), "state_groups")
    assert half.advantages == (1.0, -0.5, -0.5)
    assert half.turn_advantages == ((1.0, 1.0, 1.0), (-0.5, -0.75, -0.75), (-0.5, -0.5))

    # only turns: returns 0.81, 0.9 and 1; home: 0.81 - 0 and 0 - 0.81 / 2; wifi and mail have no companion
    whole = CreditSettings(turn_weight=1.0, discount=0.9)
    solved, stuck, lost = score_group(group(SOLVED, STUCK, LOST), "state_groups", whole).turn_advantages
    assert solved == pytest.approx((0.81, 0.9, 1.0))
    assert stuck == pytest.approx((-0.405, -0.9, -0.9))
    assert lost == pytest.approx((-0.405, -0.5))


def test_turns_of_the_same_index_are_compared_with_the_others_that_came_so_far() -> None:
    early, late = played("ab", 0.5, of_turns=(0.5, 0.0)), played("ab", 0.5, of_turns=(0.0, 0.5))
    alone = played("abc", 0.0)

    scored = score_group(group(early, late, alone), "turn_returns", CreditSettings(turn_weight=1.0))

    # second turns are worth 0, 1/2 and 0: 0 - 1/4, 1/2 - 0, 0 - 1/4; a third turn has only the last rollout, at 0 - 1/2
    assert scored.turn_advantages == ((0.25, -0.25), (0.25, 0.5), (-0.5, -0.25, -0.5))


def test_returns_are_discounted_to_the_end_or_to_the_turns_that_an_unsolved_rollout_was_allowed() -> None:
    assert turn_returns(played("abc", 1.5, of_turns=(0.5, 0.0, 0.0)), 0.9) == pytest.approx((0.5 + 0.81, 0.9, 1.0))
    # -1 comes after the fourth turn, and counts in every turn as in the first, three turns before
    gave_up = played("ab", -1.0, max_turns=4)
    assert turn_returns(gave_up, 0.9) == pytest.approx((-0.729, -0.729))
    assert turn_returns(played("ab", -1.0, max_turns=4), 1.0) == (-1.0, -1.0)
    assert turn_returns(played("", 0.0), 0.9) == ()


@pytest.mark.parametrize("reward", [-1.0, 0.0, 0.1])
def test_a_discount_pays_neither_for_standing_still_nor_for_giving_up(reward: float) -> None:
    def failed(*states: str) -> Rollout:
        one = played(states, reward, max_turns=10)
        assert one.validation is not None
        return replace(one, validation=replace(one.validation, success=False))

    members = failed(*["home"] * 10), failed("home", *"abcdefghi"), failed("home")
    assert not score_group(group(*members), "state_groups", CreditSettings(discount=0.9)).has_signal


def test_the_order_in_which_milestones_are_added_up_is_no_signal() -> None:
    three_apart = played("abc", 1.3, of_turns=(0.1, 0.1, 0.1))
    two_at_once = played("axy", 1.3, of_turns=(0.2, 0.0, 0.1))

    assert not score_group(group(three_apart, two_at_once), "state_groups").has_signal


@pytest.mark.parametrize("kind", TURN_KINDS)
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_equal_rollouts_get_exact_zeros_for_every_turn(kind: AdvantageKind, reward: float) -> None:
    members = [played(("home",) * 3 + ("end",), reward, name=str(index)) for index in range(8)]

    scored = score_group(group(*members), kind)

    assert not scored.has_signal
    assert build_batch([scored], IMAGE_TOKEN).datums == ()


@pytest.mark.parametrize("kind", TURN_KINDS)
def test_without_weight_a_turn_has_its_rollouts_advantage(kind: AdvantageKind) -> None:
    scored = score_group(group(SOLVED, STUCK, LOST), kind, CreditSettings(turn_weight=0.0))

    assert scored.advantages == group_advantages([1.0, 0.0, 0.0], "leave_one_out")
    assert [set(own) for own in scored.turn_advantages] == [{one} for one in scored.advantages]


def test_an_incomplete_group_and_a_single_rollout_teach_nothing() -> None:
    assert not score_group(replace(group(SOLVED, STUCK), is_incomplete=True), "state_groups").has_signal
    assert not score_group(group(SOLVED), "state_groups").has_signal


def test_a_turn_without_a_picture_has_its_rollouts_advantage() -> None:
    blind = [
        replace(one, turns=tuple(replace(t, state="", agent=replace(t.agent, before=None)) for t in one.turns))
        for one in (SOLVED, STUCK, LOST)
    ]
    assert score_group(group(*blind), "state_groups").turn_advantages == ((1.0,) * 3, (-0.5,) * 3, (-0.5,) * 2)


def test_the_tokens_of_a_turn_have_its_advantage() -> None:
    first = model_turn(prompt(text(1)), sampled=(2, 3))
    second = model_turn(prompt(text(1, 2, 3, 4)), sampled=(5,))  # extends the first: one datum
    members = [
        replace(one, turns=tuple(replace(t, model=m) for t, m in zip(one.turns, (first, second), strict=False)))
        for one in (replace(SOLVED, rollout_id="a"), replace(STUCK, rollout_id="b"))
    ]

    scored = score_group(group(*members), "state_groups", CreditSettings(turn_weight=1.0, discount=0.5))
    datums = build_batch([scored], IMAGE_TOKEN).datums

    assert [one.advantages for one in datums] == [(0.0, 0.5, 0.5, 0.0, 1.0), (0.0, -0.5, -0.5, 0.0, -1.0)]


def screen(clock: int, content: int) -> EncodedImage:
    """A grey picture whose top tenth is a clock."""
    pixels = np.full((100, 20), content, dtype=np.uint8)
    pixels[:10] = clock
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return encoded_image(buffer.getvalue(), width_px=20, height_px=100)


def test_what_moves_at_the_top_of_a_screenshot_makes_no_other_state() -> None:
    turn = SOLVED.turns[0]
    now, later, elsewhere = [
        replace(turn, state="", agent=AgentTurn(response_id="r", before=screen(*shown)))
        for shown in ((1, 5), (2, 5), (1, 6))
    ]

    assert state_of(now, 0.0) != state_of(later, 0.0)
    assert state_of(now, 0.1) == state_of(later, 0.1) != state_of(elsewhere, 0.1)
    assert state_of(now, 0.05) != state_of(later, 0.05)


def test_pictures_below_the_top_are_told_apart_by_what_they_show() -> None:
    def below(image: Image.Image) -> str:
        buffer = BytesIO()
        image.save(buffer, "PNG")
        return encoded_image(buffer.getvalue()).sha256_below(0.1)

    grey, dark = (Image.new("RGB", (20, 40), (shade,) * 3) for shade in (200, 20))
    assert below(grey) == below(grey.convert("RGBA"))  # however they are stored
    palettes = grey.quantize(2), dark.quantize(2)
    assert palettes[0].tobytes() == palettes[1].tobytes()
    assert below(palettes[0]) == below(palettes[0].convert("RGB")) != below(palettes[1])
    assert below(grey) != below(grey.transpose(Image.Transpose.ROTATE_90))


async def test_the_simulated_phone_names_its_state_where_a_picture_does_not_show_it() -> None:
    state = make_phone_state(3)
    muted = replace(state, media_volume=state.media_volume - 1)
    seen = await SimulatedPhone(state).observe()

    assert take_screenshot(muted, 1).data == seen.data
    assert take_screenshot(muted, 1).state != seen.state
    assert take_screenshot(PhoneState(**{name: getattr(state, name) for name in PhoneState.__slots__}), 1).state == (
        seen.state
    )


# A decision process in which states come back, an action has chance outcomes, and a milestone pays on the way:
# 0 -a-> 1, 0 -b-> 0, 1 -a-> goal (0.7) or 1 (0.3), 1 -b-> 0; three turns, 1 for the goal, 0.2 for coming to 1 first.

MAX_TURNS = 3
MILESTONE = 0.2
POLICY = np.array([[0.3, -0.2], [-0.5, 0.4]])  # logits [state, action]


@dataclass(frozen=True)
class Path:
    steps: tuple[tuple[int, int], ...]  # (state, action)
    chance: float  # of the outcomes, given the actions
    of_turns: tuple[float, ...]
    is_solved: bool

    @property
    def reward(self) -> float:
        return sum(self.of_turns) + self.is_solved

    def probability(self, logits: NDArray[np.float64]) -> float:
        return self.chance * prod(float(chances(logits)[step]) for step in self.steps)

    def as_rollout(self) -> Rollout:
        names = [str(state) for state, _ in self.steps]
        return played(names, self.reward, of_turns=self.of_turns, max_turns=MAX_TURNS)


def chances(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)


def paths(state: int = 0, before: Path = Path((), 1.0, (), False)) -> Iterator[Path]:
    if before.is_solved or len(before.steps) == MAX_TURNS:
        yield before
        return
    for action in (0, 1):
        goal = [(2, 0.7), (1, 0.3)]
        for following, chance in goal if (state, action) == (1, 0) else [(1 if (state, action) == (0, 0) else 0, 1.0)]:
            is_first = following == 1 and not any(before.of_turns)
            after = Path(
                steps=(*before.steps, (state, action)),
                chance=before.chance * chance,
                of_turns=(*before.of_turns, MILESTONE if is_first else 0.0),
                is_solved=following == 2,
            )
            yield from paths(following, after)


PATHS = tuple(paths())


@cache
def score_direction(step: tuple[int, int]) -> NDArray[np.float64]:
    """The gradient of log pi(action | state) by the logits."""
    state, action = step
    direction = np.zeros_like(POLICY)
    direction[state] -= chances(POLICY)[state]
    direction[state, action] += 1
    return direction


def policy_gradient() -> NDArray[np.float64]:
    """The gradient of the expected reward by central differences, which knows nothing of advantages."""
    found = np.zeros_like(POLICY)
    for place in np.ndindex(*POLICY.shape):
        nudge = np.zeros_like(POLICY)
        nudge[place] = 1e-6
        up, down = (sum(path.probability(POLICY + sign * nudge) * path.reward for path in PATHS) for sign in (1, -1))
        found[place] = (up - down) / 2e-6
    return found


def expected_estimate(size: int, advantages_of: Callable[[Sequence[Path]], Sequence[Sequence[float]]]) -> object:
    """The mean estimate over all groups of this many rollouts, each with its probability."""
    total = np.zeros_like(POLICY)
    for members in product(PATHS, repeat=size):
        weight = prod(path.probability(POLICY) for path in members) / size
        for path, own in zip(members, advantages_of(members), strict=True):
            for step, advantage in zip(path.steps, own, strict=True):
                total += weight * advantage * score_direction(step)
    return total


def test_the_enumeration_is_complete() -> None:
    assert sum(path.probability(POLICY) for path in PATHS) == pytest.approx(1.0)
    assert any(len({state for state, _ in path.steps}) < len(path.steps) for path in PATHS)  # states come back


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize(("kind", "size"), [("state_groups", 2), ("state_groups", 3), ("turn_returns", 2)])
def test_the_expected_gradient_is_the_policy_gradient(kind: AdvantageKind, size: int, weight: float) -> None:
    credit, rollouts = CreditSettings(turn_weight=weight), {path: path.as_rollout() for path in PATHS}

    def advantages_of(members: Sequence[Path]) -> Sequence[Sequence[float]]:
        return score_group(group(*(rollouts[path] for path in members)), kind, credit).turn_advantages

    assert expected_estimate(size, advantages_of) == pytest.approx(policy_gradient(), abs=1e-7)


def test_a_mean_that_contains_a_rollouts_own_turns_would_bias_it() -> None:
    def advantages_of(members: Sequence[Path]) -> Sequence[Sequence[float]]:
        returns = [turn_returns(path.as_rollout(), 1.0) for path in members]
        values: dict[int, list[float]] = {}
        for path, own in zip(members, returns, strict=True):
            for (state, _), value in zip(path.steps, own, strict=True):
                values.setdefault(state, []).append(value)
        return [
            [value - np.mean(values[state]) for (state, _), value in zip(path.steps, own, strict=True)]
            for path, own in zip(members, returns, strict=True)
        ]

    # not even in direction: no factor makes up for it
    biased, exact = np.ravel(expected_estimate(2, advantages_of)), policy_gradient().ravel()
    factor = float(biased @ exact / (biased @ biased))
    assert np.abs(factor * biased - exact).max() > 1e-3
