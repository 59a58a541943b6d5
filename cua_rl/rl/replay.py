"""Replay: where a whole group fails, a stored success of an earlier step shows what would have been right.

What is biased. The replayed rollout was drawn by an older policy, so its tokens enter the loss with the ratio of
training over recorded sampling probability, per token; that leaves the old policy's screens uncorrected, and "ppo"
rather than "importance_sampling" keeps a large ratio from pushing too far. It was also chosen because it succeeded,
and on another phone than the group's, so the group's mean reward is no longer an estimate of what the policy earns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cua_rl.types import Datum, Rollout, RolloutGroup


@dataclass
class ReplayBuffer:
    """The newest successes of every task, at most `capacity_per_task`; with 0, nothing is kept and nothing replayed.

    A group leaves one success at most, so that one easy phone does not crowd out the others. Screenshots stay in
    memory with their rollouts.
    """

    capacity_per_task: int = 0
    _stored: dict[str, tuple[Rollout, ...]] = field(default_factory=dict[str, tuple[Rollout, ...]])

    @property
    def num_stored(self) -> int:
        return sum(map(len, self._stored.values()))

    def join(self, group: RolloutGroup) -> RolloutGroup:
        """The group with a stored success of its task, if no member succeeded; which one depends on its index only."""
        stored = self._stored.get(group.task_id, ())
        if not stored or not group.rollouts or any(rollout.success for rollout in group.rollouts):
            return group
        return replace(group, replayed=(stored[-1 - group.index % len(stored)],))

    def add(self, rollouts: Iterable[Rollout]) -> None:
        """Store successes, oldest first."""
        if self.capacity_per_task:
            for rollout in rollouts:
                kept = (*self._stored.get(rollout.task_id, ()), rollout)
                self._stored[rollout.task_id] = kept[-self.capacity_per_task :]


def first_success(group: RolloutGroup) -> Rollout | None:
    """The success that a group leaves for replay."""
    return next((rollout for rollout in group.rollouts if rollout.success), None)


def replay_metrics(groups: Sequence[RolloutGroup], policy_version: int) -> dict[str, float]:
    """How many rollouts were replayed, and how many optimizer steps before `policy_version` they were sampled."""
    replayed = [rollout for group in groups for rollout in group.replayed]
    ages = [policy_version - turn.model.policy_version for rollout in replayed for turn in rollout.turns]
    metrics = {"replay/num_rollouts": float(len(replayed))}
    return metrics | ({"replay/age/mean": sum(ages) / len(ages), "replay/age/max": float(max(ages))} if ages else {})


def replayed_ids(groups: Iterable[RolloutGroup]) -> frozenset[str]:
    """Ids of the rollouts that were sampled by an earlier policy."""
    return frozenset(rollout.rollout_id for group in groups for rollout in group.replayed)


def ratio_metrics(datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]]) -> dict[str, float]:
    """How far the policy has moved from the one that sampled `datums`: |log ratio| per trained token, nats."""
    gaps = [
        abs(training - sampling)
        for datum, row in zip(datums, training_logprobs, strict=True)
        for training, sampling, is_trained in zip(row, datum.sampling_logprobs, datum.loss_mask, strict=True)
        if is_trained
    ]
    return {"replay/log_ratio/mean": sum(gaps) / len(gaps), "replay/log_ratio/max": max(gaps)} if gaps else {}
