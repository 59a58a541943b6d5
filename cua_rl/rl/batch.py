"""A step's rollout groups as training data, and back: which log-probability belongs to which turn."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from cua_rl.rl.advantages import AdvantageKind, advantages_of
from cua_rl.rl.datums import ForkReason, build_datums, count_retokenised
from cua_rl.rl.replay import replayed_ids
from cua_rl.rl.step_metrics import datum_metrics
from cua_rl.types import Datum, RolloutGroup

TurnLogprobs = tuple[tuple[int, tuple[float, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The datums of a step, in the order of groups, members and turns; those of `replayed_ids` are off-policy."""

    datums: tuple[Datum, ...]
    num_rollouts: int
    """Rollouts that were judged and compared, those of groups without datums too: what a mean over rollouts is over."""
    replayed_ids: frozenset[str]
    metrics: dict[str, float]


def build_batch(
    groups: Sequence[RolloutGroup], kind: AdvantageKind, image_token_id: int, *, keeps_constant: bool = False
) -> Batch:
    """Advantages and datums of all groups that teach something; `keeps_constant` as in `build_datums_of_groups`."""
    datums: list[Datum] = []
    forks: Counter[ForkReason] = Counter()
    num_retokenised = 0
    for group in groups:
        advantages = advantages_of(group, kind)
        built, reasons = build_datums_of_groups([group], [advantages], image_token_id, keeps_constant=keeps_constant)
        num_retokenised += count_retokenised(built, group.compared, image_token_id)
        datums += built
        forks += reasons
    metrics = datum_metrics(datums, forks, num_retokenised)
    return Batch(
        datums=tuple(datums),
        num_rollouts=sum(len(group.compared) for group in groups if not group.is_incomplete),
        replayed_ids=replayed_ids(groups),
        metrics=metrics,
    )


def build_datums_of_groups(
    groups: Sequence[RolloutGroup],
    advantages: Sequence[Sequence[float]],
    image_token_id: int,
    *,
    keeps_constant: bool = False,
) -> tuple[list[Datum], Counter[ForkReason]]:
    """The datums of a step from its groups and their advantages; groups whose advantages are all 0 give none.

    With `keeps_constant` only incomplete groups give none: a KL term has a gradient where the advantage is 0.
    """
    datums: list[Datum] = []
    forks: Counter[ForkReason] = Counter()
    for group, group_values in zip(groups, advantages, strict=True):
        if group.is_incomplete or not (keeps_constant or any(group_values)):
            continue
        for rollout, advantage in zip(group.compared, group_values, strict=True):
            built = build_datums(rollout, advantage, image_token_id, group_id=group.group_id)
            datums += built.datums
            forks += built.forks
    return datums, forks


def logprobs_by_turn(
    datums: Sequence[Datum], training_logprobs: Sequence[Sequence[float]], leave_out: Collection[str] = ()
) -> Mapping[str, TurnLogprobs]:
    """The trainer's log-probabilities per rollout and turn; every run of trained tokens in a datum is one turn.

    `leave_out` are rollouts whose log-probabilities are on record from the step that sampled them.
    """
    by_rollout: dict[str, TurnLogprobs] = {}
    for datum, row in zip(datums, training_logprobs, strict=True):
        if datum.rollout_id in leave_out:
            continue
        runs = [
            tuple(row[position] for position, _ in run)
            for is_trained, run in groupby(enumerate(datum.loss_mask), key=lambda entry: entry[1])
            if is_trained
        ]
        turns = tuple(zip(datum.turn_indices, runs, strict=True))
        by_rollout[datum.rollout_id] = (*by_rollout.get(datum.rollout_id, ()), *turns)
    return by_rollout
