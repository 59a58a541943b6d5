"""How good is a policy? Held-out task instances, one adapter version, success with its uncertainty."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from cua_rl.events import EvaluationEnded, GroupEnded, Recorder, Source, SourceStarted
from cua_rl.rollout.group import GroupPlan, run_groups
from cua_rl.rollout.run import RolloutRunner
from cua_rl.tasks.task import Task
from cua_rl.types import AdapterRef, RolloutGroup, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Success over `num_rollouts` held-out rollouts; the interval is Wilson's at 95 %."""

    success_rate: float
    low: float
    high: float
    num_rollouts: int
    num_faults: int
    num_turns_mean: float
    success_rate_by_category: dict[str, float]

    def metrics(self, suite: str) -> dict[str, float]:
        """The result under its metric names, `eval/<suite>/...`."""
        values = {
            "success_rate": self.success_rate,
            "success_rate_low": self.low,
            "success_rate_high": self.high,
            "num_rollouts": float(self.num_rollouts),
            "num_faults": float(self.num_faults),
            "num_turns/mean": self.num_turns_mean,
        }
        by_category = {f"success_rate/{name}": rate for name, rate in self.success_rate_by_category.items()}
        return {f"eval/{suite}/{name}": value for name, value in (values | by_category).items()}


class Evaluator:
    """Runs the same held-out tasks every time, pinned to the adapter it is asked about."""

    def __init__(
        self, tasks: Sequence[Task], *, runner: RolloutRunner, params: SamplingParams, recorder: Recorder
    ) -> None:
        self._tasks = tuple(tasks)
        self._runner = runner
        self._params = params
        self._recorder = recorder

    async def run(self, source: Source, adapter: AdapterRef) -> EvalResult:
        """Attempt every task once under `adapter` and record the outcome."""
        await self._recorder.record(
            SourceStarted(source=source, tasks=self._tasks, group_size=1, policy_version=adapter.policy_version)
        )

        async def on_group(group: RolloutGroup) -> None:
            await self._recorder.record(GroupEnded(source=source, group=group, advantages=None))

        plan = GroupPlan(source=source, group_size=1, params=self._params, adapter=adapter)
        groups = await run_groups(self._runner, self._tasks, plan, on_group)
        result = summarise(groups, self._tasks)
        await self._recorder.record(EvaluationEnded(source=source, metrics=result.metrics("held_out")))
        return result


def summarise(groups: Sequence[RolloutGroup], tasks: Sequence[Task]) -> EvalResult:
    """Success over all members that ended without a fault."""
    outcomes = [
        (task.category, rollout) for group, task in zip(groups, tasks, strict=True) for rollout in group.rollouts
    ]
    num_successes = sum(rollout.success for _, rollout in outcomes)
    low, high = wilson_interval(num_successes, len(outcomes))
    by_category: dict[str, list[bool]] = {}
    for category, rollout in outcomes:
        by_category.setdefault(category, []).append(rollout.success)
    return EvalResult(
        success_rate=num_successes / max(1, len(outcomes)),
        low=low,
        high=high,
        num_rollouts=len(outcomes),
        num_faults=sum(len(group.faulty) for group in groups),
        num_turns_mean=sum(len(rollout.turns) for _, rollout in outcomes) / max(1, len(outcomes)),
        success_rate_by_category={name: sum(values) / len(values) for name, values in by_category.items()},
    )


def wilson_interval(num_successes: int, num_trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval for a success rate (E. B. Wilson, 1927): 8 of 10 -> (0.49, 0.94); no trials -> (0, 1)."""
    if num_trials == 0:
        return 0.0, 1.0
    rate, z2 = num_successes / num_trials, z * z
    centre = rate + z2 / (2 * num_trials)
    spread = z * sqrt(rate * (1 - rate) / num_trials + z2 / (4 * num_trials**2))
    scale = 1 + z2 / num_trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)
