"""A step's rollout groups as training data, and back: which log-probability belongs to which turn."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cua_rl.rl.advantages import AdvantageKind, group_advantages
from cua_rl.rl.datums import ForkReason, build_datums, count_retokenised
from cua_rl.rl.step_metrics import datum_metrics
from cua_rl.types import Datum, RolloutGroup

TurnLogprobs = tuple[tuple[int, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The datums of a step, in the order of groups, members and turns."""

    datums: tuple[Datum, ...]
    metrics: dict[str, float]


def build_batch(groups: Sequence[RolloutGroup], kind: AdvantageKind, image_token_id: int) -> Batch:
    """Advantages and datums of all groups that teach something."""
    advantages = [group_advantages(group.rewards, kind) for group in groups]
    datums, forks = build_datums_of_groups(groups, advantages, image_token_id)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    num_retokenised = count_retokenised(datums, rollouts, image_token_id)
    return Batch(datums=tuple(datums), metrics=datum_metrics(datums, forks, num_retokenised))


def build_datums_of_groups(
    groups: Sequence[RolloutGroup], advantages: Sequence[Sequence[float]], image_token_id: int
) -> tuple[list[Datum], Counter[ForkReason]]:
    """The datums of a step from its groups and their advantages; constant groups give none."""
    datums: list[Datum] = []
    forks: Counter[ForkReason] = Counter()
    for group, group_values in zip(groups, advantages, strict=True):
        if group.is_constant:
            continue
        for rollout, advantage in zip(group.rollouts, group_values, strict=True):
            built = build_datums(rollout, advantage, image_token_id)
            datums += built.datums
            forks += built.forks
    return datums, forks


def logprobs_by_turn(
    datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]]
) -> Mapping[str, TurnLogprobs]:
    """The trainer's log-probabilities per rollout and turn; every run of trained tokens in a datum is one turn."""
    by_rollout: dict[str, TurnLogprobs] = {}
    for datum, row in zip(datums, training_logprobs, strict=True):
        runs = [
            tuple(row[position] for position, _ in run)
            for is_trained, run in groupby(enumerate(datum.loss_mask), key=lambda entry: entry[1])
            if is_trained
        ]
        turns = tuple(zip(datum.turn_indices, runs, strict=True))
        by_rollout[datum.rollout_id] = (*by_rollout.get(datum.rollout_id, ()), *turns)
    return by_rollout
