"""What earlier steps leave for later ones: success rates and successes, and the file from which both are made again.

outcomes.jsonl   one JSON object per completed step: how each of its groups went
"""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from cua_rl.reporting.json_lines import append_record, read_records, write_records
from cua_rl.rl.curriculum import GroupOutcome, SuccessRates
from cua_rl.rl.replay import ReplayBuffer, first_success
from cua_rl.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Remembers how groups went; by default it keeps nothing."""

    rates: SuccessRates | None = None
    """None if nothing is drawn by them."""
    replay: ReplayBuffer = field(default_factory=ReplayBuffer)
    outcomes_path: Path | None = None

    async def remember(self, num_steps: int, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        """Take in the groups of a step, `num_steps` being complete with it; durable when this returns."""
        outcomes = [build_outcome(group) for group in groups]
        if self.rates is not None:
            self.rates.observe(outcomes)
        self.replay.add(success for group in groups if (success := first_success(group)) is not None)
        if self.outcomes_path is not None:
            record = {"step": num_steps, "groups": [asdict(outcome) for outcome in outcomes]}
            await asyncio.to_thread(append_record, self.outcomes_path, record)
        return self._metrics()

    def _metrics(self) -> dict[str, float]:
        rates = self.rates.metrics() if self.rates is not None else {}
        stored = {"replay/num_stored": float(self.replay.num_stored)} if self.replay.capacity_per_task else {}
        return rates | stored


def build_outcome(group: RolloutGroup) -> GroupOutcome:
    """How a group went, without what it replayed."""
    success = first_success(group)
    return GroupOutcome(
        task_id=group.task_id,
        num_successes=sum(rollout.success for rollout in group.rollouts),
        num_rollouts=len(group.rollouts),
        success_id=None if success is None else success.rollout_id,
    )


def load_outcomes(path: Path, num_steps: int) -> list[GroupOutcome]:
    """The outcomes of the first `num_steps` steps, in order; forgets those of later steps, which will run again."""
    records = read_records(path)
    kept = [record for record in records if cast("int", record["step"]) <= num_steps]
    if len(kept) < len(records):
        write_records(path, kept)
    groups = [group for record in kept for group in cast("list[Mapping[str, Any]]", record["groups"])]
    return [GroupOutcome(**group) for group in groups]


def newest_success_ids(outcomes: Iterable[GroupOutcome], capacity_per_task: int) -> list[str]:
    """Ids of the rollouts that a `ReplayBuffer` holds after these outcomes, in the order in which it took them."""
    by_task: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.success_id is not None:
            by_task.setdefault(outcome.task_id, []).append(outcome.success_id)
    return [rollout_id for ids in by_task.values() for rollout_id in ids[max(0, len(ids) - capacity_per_task) :]]
