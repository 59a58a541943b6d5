"""Branches: some rollouts of a group go on from a turn of another one, so that only what they do after it differs.

A group's rollouts are of three kinds. Whole ones run from beginning to end. So do parents, each of which has siblings
that go on from its fork turn. This depends only on the whole rollouts and on states that the parent saw by then: if it
depended on what the parent did there, its own continuation would not be like those of its siblings (docs/losses.md).
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from statistics import fmean
from typing import Literal

import chz

from cua_rl.agent.policy_time import RolloutClock
from cua_rl.command_line.fields import setting
from cua_rl.environments.device import ActionRejected, CopiedDevice, Device, DeviceAround
from cua_rl.environments.harness_world import HarnessWorld
from cua_rl.rollout.watched import Watched
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import AgentError, DeviceError, TaskError, UnusableError, boundary
from cua_rl.types.rollout import Rollout, Turn
from cua_rl.types.snapshot import Moment, Snapshot

logger = logging.getLogger(__name__)

_MOST_WAIT_S = 5.0  # for a program to draw, or to be ready for an action

ForkRule = Literal["random_turn", "highest_entropy", "first_disagreement", "before_failure"]
_PARTINGS = ("first_disagreement", "before_failure")  # compare whole rollouts with each other


@chz.chz
class BranchingSettings:
    """Rollouts that go on from a turn of another one (docs/losses.md)."""

    num_siblings: int = setting(
        0,
        "rollouts that continue from one turn of a parent rollout (its siblings); they count towards group_size; needs "
        "advantages=leave_one_out; 0 for none",
        at_least=0,
    )
    at: ForkRule = setting(
        "random_turn",
        "turn from which siblings continue, chosen by the group's rollouts without siblings: random_turn: at random "
        "among theirs; highest_entropy: that at which their sampled answers were least likely on average; "
        "first_disagreement: where two of them first went on differently from the same state; before_failure: where a "
        "failed one last saw a state that a solved one saw, too",
    )

    @property
    def least_whole(self) -> int:
        """How many rollouts of a group have no siblings, at least: two where they are compared with each other."""
        return 2 if self.at in _PARTINGS else 1

    def num_parents(self, group_size: int) -> int:
        """How many rollouts of a group have siblings."""
        return (group_size - self.least_whole) // (1 + self.num_siblings) if self.num_siblings else 0

    def num_begun(self, group_size: int) -> int:
        """How many rollouts of a group begin with its task."""
        return group_size - self.num_parents(group_size) * self.num_siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Where a rollout begins: with its task, or after these turns of its parent."""

    parent_id: str | None = None
    turns: tuple[Turn, ...] = ()
    moment: Moment | None = None
    arrival: Turn | None = None
    """Without a moment, the parent's next turn: those before it are done again on a device that must show the same."""
    moving_top: float = 0.0  # share of screenshots, from the top, that is not compared, because a clock moves there

    @property
    def snapshot(self) -> Snapshot | None:
        return None if self.moment is None else self.moment.snapshot

    def next_turn(self, taken: Sequence[Turn]) -> Turn | None:
        """The parent's turn after those that were `taken`, if it is one of these."""
        return next(iter(self.turns[len(taken) :]), None)

    def require_taken(self, taken: Sequence[Turn]) -> None:
        """Raise `AgentError` if a rollout that goes on from here ended before, or a harness right here."""
        if self.turns and len(taken) < len(self.turns) + (self.arrival is not None):
            raise AgentError(
                f"expected the parent's {len(self.turns)} turns and another one, got {len(taken)}: the agent or its "
                "environment is not reproducible; set branching.num_siblings=0, or take over at turn 1"
            )


BEGINNING = Fork()


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """Where the siblings of any parent go on: at a turn, or before it where the parent first sees a state."""

    turn: int  # at least 1
    state: str | None = None

    def turn_of(self, parent: Rollout, moving_top: float) -> int:
        """The parent's turn; whether it is this one depends on nothing that the parent did from there on."""
        before = parent.turns[1 : self.turn] if self.state else ()
        return next((turn.index for turn in before if state_of(turn, moving_top) == self.state), self.turn)


def state_of(turn: Turn, moving_top: float) -> str | None:
    """The state that a turn saw: the device's name for it, else the screenshot's without the share at the top that
    moves by itself; None for text alone.
    """
    if turn.state or turn.agent.before is None:
        return turn.state or None
    return turn.agent.before.sha256_below(moving_top)


def find_forks(
    first: Sequence[Rollout], settings: BranchingSettings, num_parents: int, seed: int | None, moving_top: float = 0.0
) -> dict[int, Fork]:
    """Where each sibling goes on, by its place in the group; the last rollouts of those that began are the parents.

    A parent that ended before its fork turn, or by a fault, or that left a device which cannot be copied there, has no
    siblings: others in their place would make the number of rollouts that count depend on what this one did.
    """
    random, forks = Random(seed), dict[int, Fork]()
    whole = [rollout for rollout in first[:-num_parents] if rollout.reward is not None]
    points = fork_points(whole, settings.at, moving_top)
    for place, parent in enumerate(first[-num_parents:]):
        turn = random.choice(points).turn_of(parent, moving_top) if points else len(parent.turns)
        if turn < len(parent.turns) and parent.reward is not None:
            moment = parent.moments[turn - 1] if parent.moments else None
            if parent.moments and moment is None:
                continue
            fork = Fork(
                parent_id=parent.rollout_id,
                turns=parent.turns[:turn],
                moment=moment,
                arrival=None if parent.moments else parent.turns[turn],  # the turns are done again
                moving_top=moving_top,
            )
            start = len(first) + place * settings.num_siblings
            forks |= dict.fromkeys(range(start, start + settings.num_siblings), fork)
    return forks


def fork_points(whole: Sequence[Rollout], rule: ForkRule, moving_top: float = 0.0) -> list[ForkPoint]:
    """Where a parent's siblings may go on, each as likely: any turn where a rule finds none, nowhere without a second
    turn. Minus the log-probability of a sampled answer is an unbiased estimate of the entropy of all answers there.
    """
    turns = [turn for rollout in whole for turn in rollout.turns[1:]]
    if rule == "highest_entropy" and turns:
        surprises: defaultdict[int, list[float]] = defaultdict(list)
        for turn in turns:
            surprises[turn.index].append(-sum(turn.model.sampling_logprobs))
        return [ForkPoint(max(sorted(surprises), key=lambda index: fmean(surprises[index])))]
    parted = find_parting(whole, rule, moving_top) if rule in _PARTINGS else None
    return [parted] if parted else [ForkPoint(turn.index) for turn in turns]


def find_parting(whole: Sequence[Rollout], rule: ForkRule, moving_top: float) -> ForkPoint | None:
    """The first state from which rollouts went on to different ones, or the last that failed and solved ones saw."""
    visits: defaultdict[str, list[tuple[int, int, str | None, bool]]] = defaultdict(list)
    for member, rollout in enumerate(whole):
        names = [state_of(turn, moving_top) for turn in rollout.turns]
        for index, (name, following) in enumerate(pairwise((*names, None))):
            if index and name:
                visits[name].append((index, member, following, rollout.success))
    points = list[tuple[int, int, str]]()
    for name, seen in visits.items():
        turns, members, following, successes = map(set, zip(*seen, strict=True))
        if rule == "before_failure" and len(successes) > 1:
            points.append((-max(turns), max(turns), name))
        elif rule == "first_disagreement" and len(members) > 1 and len(following) > 1:
            points.append((min(turns), max(turns), name))
    return ForkPoint(*min(points)[1:]) if points else None


async def take_moment(
    device: Device, instruction: str, clock: RolloutClock, watched: Watched
) -> tuple[Moment | None, ...]:
    """What siblings need to go on from here, None if the policy has left nothing to copy, such as a page that closed;
    empty if they do the turns again on a device that must show the same.
    """
    try:
        snapshot = await device.snapshot() if isinstance(device, CopiedDevice) else None
    except (UnusableError, TaskError) as error:
        logger.warning("device_id=%s cannot be copied here: %s", device.device_id, error)
        return (None,)
    if snapshot is None:
        return ()
    moment = Moment(
        snapshot=snapshot,
        instruction=instruction,
        policy_left_s=clock.policy_left_s,
        first_success_turn=watched.first_success_turn,
        milestone_turns=watched.milestone_turns,
    )
    return (moment,)


def go_on_from(moment: Moment, clock: RolloutClock, watched: Watched) -> None:
    """Set what has been used up and found when a rollout comes to its fork."""
    if clock.policy_left_s > moment.policy_left_s:
        clock.credit(moment.policy_left_s - clock.policy_left_s)
    watched.first_success_turn, watched.milestone_turns = moment.first_success_turn, moment.milestone_turns


def retell(device: Device, fork: Fork, taken: Sequence[Turn]) -> Device:
    """The device for an agent that comes to the fork by itself; programs of harnesses have worlds of their own."""
    is_retold = bool(fork.turns or fork.arrival) and not isinstance(device, HarnessWorld)
    return RetoldDevice(device, fork=fork, taken=taken) if is_retold else device


@dataclass(frozen=True, slots=True)
class RetoldDevice(DeviceAround):
    """A copy of a device, of which an agent first sees what its parent's agent saw, up to the turn after which it goes
    on; `taken` are the agent's own turns so far.

    So an agent comes to the fork by itself, whatever it keeps in mind. Nothing is executed before it, unless the device
    is no copy: then it must show the same up to the fork, below the share that is not compared.
    """

    fork: Fork
    taken: Sequence[Turn]
    _num_executed: Counter[int] = field(default_factory=Counter[int])

    async def observe(self) -> EncodedImage:
        place, told = len(self.taken), self.fork.turns
        if self.fork.arrival is not None:
            return await self._observe_same(place + bool(self._num_executed[place]))
        if place >= len(told):
            return await self.device.observe()
        agent = told[place].agent
        shown = agent.after if self._num_executed[place] else agent.before
        if shown is None:
            raise DeviceError(f"expected a screenshot where the parent's agent took one, got one at {place}")
        return shown

    async def execute(self, action: Action) -> None:
        place, told, number = len(self.taken), self.fork.turns, self._num_executed[len(self.taken)]
        if self.fork.arrival is not None or place >= len(told):
            # programs get the time that the parent's model took
            if not number and place < len(told) and not told[place].state:
                await asyncio.sleep(min(_MOST_WAIT_S, told[place].agent.durations_s.get("respond", 0.0)))
            self._num_executed[place] += 1
            return await self.device.execute(action)
        agent = told[place].agent
        if agent.actions[number : number + 1] != (action,):
            raise DeviceError(f"expected the actions of the parent's agent, got {action!r} in turn {place}")
        self._num_executed[place] += 1
        if agent.action_error is not None and number + 1 == len(agent.actions):
            raise ActionRejected(agent.action_error)

    async def _observe_same(self, place: int) -> EncodedImage:
        turn = next(iter((*self.fork.turns, self.fork.arrival)[place:]), None)
        shown = await self.device.observe()
        if turn is None:
            return shown
        told, top, ended_at = turn.agent.before, self.fork.moving_top, time.monotonic() + _MOST_WAIT_S
        while told is not None and turn.state in ("", shown.state):
            with boundary(DeviceError, "compare screenshots"):
                names = [await asyncio.to_thread(one.sha256_below, top) for one in (shown, told)]
            if names[0] == names[1]:
                return told if top else shown
            # a device whose states have no names may still be drawing what the parent's agent saw
            if turn.state or time.monotonic() > ended_at:
                break
            await asyncio.sleep(0.1)
            shown = await self.device.observe()
        raise DeviceError(
            f"turn {place + 1}: expected the screenshot that was recorded before it, {told and told.sha256[:12]} in "
            f"state {turn.state[:12]!r}, got {shown.sha256[:12]} in {shown.state[:12]!r} after the same actions: the "
            "task or its device differs from one time to the next; choose an earlier turn, or another rollout"
        )
