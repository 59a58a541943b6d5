"""Admission of groups and selection of batches: policy lag is bounded without discarding rollouts.

Terms. B is `groups_per_batch`, K is `max_lag`. Steps count from 1; "policy s" is the policy after s steps, and step s
turns policy s - 1 into it. A group that starts while policy v is announced samples every turn with policy v or a later
one, so if step s trains it, its turns are at most s - 1 - v steps old. Its last step is therefore v + K + 1.

Admission. A group may start while policy v is announced only if at most (v + K + 1) * B groups, itself included, have
been started. Every batch takes exactly B groups. So before step s, with (s - 1) * B groups taken, at most
(v + K + 2 - s) * B are waiting or running: as many as the steps s ... v + K + 1 can take.

Selection. The batch of step s is the first B groups that finished, except that it must leave room for the others: for
every t >= s, the remaining groups whose last step is t or earlier must fit into the steps s + 1 ... t, (t - s) * B of
them. Where a finished group would take the place of an older one that still runs, it waits for a later batch; if need
be the batch waits for the older one.

Proof that no turn is older than K. Call the state before step s good if for every t >= s at most (t - s + 1) * B groups
have their last step at t or earlier, and none has it before s. It is good at first: nothing has started. A start under
policy v adds a group with last step v + K + 1; by admission all groups together are at most (v + K + 2 - s) * B, so t =
v + K + 1 stays good, later t allow more, earlier t do not count it. By the selection rule, the state after a batch is
good before step s + 1. And once everything has finished, a batch that obeys the rule exists: the B groups with the
earliest last steps. So the loop never waits forever, and no group outlives its last step.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from cua_rl.rl.advantages import ScoredGroup
from cua_rl.types.errors import TrainingError
from cua_rl.types.rollout import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A group's place in the run."""

    ordinal: int
    """Index of its task instance in the run, 0-based: groups start in this order."""
    last_step: int
    """The last step that may train it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingGroup:
    """A group that has finished, and the last step that may train it."""

    scored: ScoredGroup
    last_step: int


def fitting(groups: Iterable[WaitingGroup], next_step: int, groups_per_batch: int) -> list[WaitingGroup]:
    """Those that can all be trained in time, the most urgent first: all of them, unless batches became smaller."""
    kept: list[WaitingGroup] = []
    for waiting in sorted(groups, key=lambda waiting: waiting.last_step):
        if next_step + len(kept) // groups_per_batch <= waiting.last_step:
            kept.append(waiting)
    return kept


@dataclass
class GroupBuffer:
    """The groups between their start and their batch; `next_step` is the step whose batch is selected next."""

    groups_per_batch: int
    max_lag: int
    max_steps: int
    next_step: int = 1
    announced_step: int = 0
    """Steps completed by the newest policy that new turns are sampled with."""
    max_drops_per_batch: int = 0
    """Constant groups that may be replaced, per batch."""
    _ordinals: deque[int] = field(default_factory=deque[int])
    """To be restarted: these groups were running when an earlier attempt of the run died."""
    _next_ordinal: int = 0
    _running: dict[int, Place] = field(default_factory=dict[int, Place])
    _finished: dict[int, WaitingGroup] = field(default_factory=dict[int, WaitingGroup])
    _dropped: list[ScoredGroup] = field(default_factory=list[ScoredGroup])

    def restore(self, done: Collection[int], kept: Iterable[WaitingGroup]) -> None:
        """Continue an attempt: `done` ordinals are trained, `kept` groups wait, others up to these start again."""
        self._finished |= {waiting.scored.group.index: waiting for waiting in kept}
        known = {*done, *self._finished}
        self._next_ordinal = max(known, default=-1) + 1
        self._ordinals.extend(ordinal for ordinal in range(self._next_ordinal) if ordinal not in known)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Finished groups that no batch has taken."""
        return len(self._finished)

    @property
    def waiting(self) -> tuple[ScoredGroup, ...]:
        """Finished groups that no batch has taken, the first to finish first."""
        return tuple(finished.scored for finished in self._finished.values())

    @property
    def may_start(self) -> bool:
        """Whether one more group can still be trained in time."""
        num_started = (self.next_step - 1) * self.groups_per_batch + len(self._running) + len(self._finished)
        return num_started < min(self.announced_step + self.max_lag + 1, self.max_steps) * self.groups_per_batch

    @property
    def is_complete(self) -> bool:
        """Whether every batch of the run is taken."""
        return self.next_step > self.max_steps

    def start(self) -> Place:
        if not self.may_start:
            raise ValueError("expected a start that admission allows, got one too many")
        if self._ordinals:
            ordinal = self._ordinals.popleft()
        else:
            ordinal, self._next_ordinal = self._next_ordinal, self._next_ordinal + 1
        last_step = min(self.announced_step + self.max_lag + 1, self.max_steps)
        place = self._running[ordinal] = Place(ordinal=ordinal, last_step=last_step)
        return place

    def finish(self, place: Place, scored: ScoredGroup) -> bool:
        """Take a group that has ended; True if it has no learning signal and another one starts in its place."""
        del self._running[place.ordinal]
        if scored.group.is_constant and len(self._dropped) < self.max_drops_per_batch:
            self._dropped.append(scored)
            return True
        self._finished[place.ordinal] = WaitingGroup(scored=scored, last_step=place.last_step)
        return False

    def announce(self, num_steps: int) -> None:
        """From now on, new turns are sampled with policy `num_steps`."""
        self.announced_step = num_steps

    def take_batch(self) -> list[ScoredGroup] | None:
        """The groups of the next step in the order of their ordinals, or None if they have not all finished."""
        # for each relevant t, how many groups with last step at t or earlier this batch must take
        last_steps = [group.last_step for group in (*self._running.values(), *self._finished.values())]
        needed = [
            (t, sum(last <= t for last in last_steps) - (t - self.next_step) * self.groups_per_batch)
            for t in sorted(set(last_steps))
        ]
        chosen: list[int] = []
        for ordinal, finished in self._finished.items():
            left = self.groups_per_batch - len(chosen) - 1
            after = [(t, number - (finished.last_step <= t)) for t, number in needed]
            if all(number <= left for _, number in after):
                chosen.append(ordinal)
                needed = after
            if len(chosen) == self.groups_per_batch:
                break
        else:
            return None
        self.next_step += 1
        return [self._finished.pop(ordinal).scored for ordinal in sorted(chosen)]

    def take_dropped(self) -> list[ScoredGroup]:
        """The constant groups that were replaced since the last call."""
        dropped, self._dropped = self._dropped, []
        return dropped


@dataclass
class PolicyAges:
    """Maps policy versions to the steps after which they were the newest; a step makes none, one or several."""

    newest_steps: dict[int, int] = field(default_factory=dict[int, int])
    """Per version the largest number of steps after which it was the newest policy."""

    def announce(self, policy_version: int, num_steps: int) -> None:
        """After `num_steps` steps, this is the newest version."""
        self.newest_steps[policy_version] = num_steps

    def lags(self, groups: Iterable[RolloutGroup], step: int) -> list[int]:
        """Lag of each turn of the groups' own rollouts at `step`; raises `TrainingError` for an unannounced version."""
        versions = [
            turn.model.policy_version for group in groups for rollout in group.rollouts for turn in rollout.own_turns
        ]
        unknown = sorted({version for version in versions if version not in self.newest_steps})
        if unknown:
            raise TrainingError(
                f"step {step}: expected turns of announced policies {sorted(self.newest_steps)[-5:]!r}, got versions "
                f"{unknown[:5]!r}; the sampler serves another run's adapters, or the database is of another run"
            )
        return [max(0, step - 1 - self.newest_steps[version]) for version in versions]


def lag_metrics(lags: Sequence[int]) -> dict[str, float]:
    """Mean and largest policy lag, and the number of turns of each lag; nothing if there are no turns."""
    if not lags:
        return {}
    turns = {f"rollout/policy_lag/turns/{lag}": float(count) for lag, count in sorted(Counter(lags).items())}
    return {"rollout/policy_lag/mean": sum(lags) / len(lags), "rollout/policy_lag/max": float(max(lags))} | turns


def require_lag(lags: Sequence[int], max_lag: int, *, step: int) -> None:
    """Raise `TrainingError` if a turn is older than admission allows: the measurement must confirm the proof."""
    if max(lags, default=0) > max_lag:
        raise TrainingError(
            f"step {step}: expected turns at most {max_lag} steps old (max_steps_off_policy), got {max(lags)}; this "
            "is a bug in admission control: please report it with logs/run.log"
        )
