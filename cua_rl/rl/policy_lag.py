"""How old is what a step trains on? Policy versions as steps, and the lag of every turn."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cua_rl.errors import TrainingError
from cua_rl.types import RolloutGroup


@dataclass
class PolicyAges:
    """Which policy version was announced after how many steps.

    A step whose groups are all constant makes no new version, and one of several sub-steps skips some; so versions are
    not steps.
    """

    newest_steps: dict[int, int] = field(default_factory=dict[int, int])
    """Per version the largest number of steps after which it was the newest policy."""

    def announce(self, policy_version: int, num_steps: int) -> None:
        """After `num_steps` steps, this is the newest version."""
        self.newest_steps[policy_version] = num_steps

    def lags(self, groups: Sequence[RolloutGroup], step: int) -> list[int]:
        """Steps between sampling and training, per turn of the groups' own rollouts, if `step` trains them.

        Raises:
            TrainingError: a turn has a version that this run never announced.
        """
        versions = [
            turn.model.policy_version for group in groups for rollout in group.rollouts for turn in rollout.turns
        ]
        unknown = sorted({version for version in versions if version not in self.newest_steps})
        if unknown:
            raise TrainingError(
                f"step {step}: expected turns of announced policies {sorted(self.newest_steps)[-5:]!r}, got versions "
                f"{unknown[:5]!r}; the sampler serves somebody else's adapters, or the database is of another run"
            )
        return [max(0, step - 1 - self.newest_steps[version]) for version in versions]


def lag_metrics(lags: Sequence[int]) -> dict[str, float]:
    """Mean and largest lag, and the number of turns of each lag; nothing if there are no turns."""
    if not lags:
        return {}
    turns = {f"rollout/policy_lag/turns/{lag}": float(count) for lag, count in sorted(Counter(lags).items())}
    return {"rollout/policy_lag/mean": sum(lags) / len(lags), "rollout/policy_lag/max": float(max(lags))} | turns


def require_lag(lags: Sequence[int], max_lag: int, *, step: int) -> None:
    """Raise `TrainingError` if a turn is older than admission allows: nobody should train on what it did not expect."""
    if max(lags, default=0) > max_lag:
        raise TrainingError(
            f"step {step}: expected turns at most {max_lag} steps old (max_steps_off_policy), got {max(lags)}; this "
            "is a defect of admission: please report it with logs/run.log"
        )
