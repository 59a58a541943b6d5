"""Alerts of a running training, from the metrics of its latest steps."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cua_rl.types.json_values import mapping

logger = logging.getLogger(__name__)

AlertKind = Literal["stalled", "parity", "entropy", "constant_groups", "faults"]
NUM_STEPS = 3  # a single step says little
MIN_STALLED_S = 600.0
_STALLED_STEPS = 5
_PARITY_LIMIT = 0.02  # of a run that says none, in nats: that of float32
_LOW_ENTROPY = 0.01  # nats
_SOLVED = 0.9
_MOST_CONSTANT = 0.9
_MOST_FAULTY = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """What is wrong, and since which step or for how long."""

    kind: AlertKind
    message: str


def find_alerts(steps: Sequence[Mapping[str, object]], config: Mapping[str, object]) -> list[Alert]:
    """Alerts of a run whose latest steps, oldest first, have these metrics; the last `NUM_STEPS` count."""
    recent = steps[-NUM_STEPS:]
    found: list[Alert] = []
    parity = _values(recent[-1:], "policy/parity_mean_abs")
    limit = mapping(config.get("trainer")).get("parity_limit")
    limit = limit if isinstance(limit, int | float) and limit > 0 else _PARITY_LIMIT
    if parity and parity[0] > limit / 2:
        text = f"sampler and trainer differ by {parity[0]:.3g} nats per token; the run stops above {limit:.3g}"
        found.append(Alert(kind="parity", message=text))
    if len(recent) < NUM_STEPS:
        return found
    entropy, success = _values(recent, "policy/entropy"), _values(recent, "reward/success_rate")
    is_low = len(entropy) == len(success) == NUM_STEPS and max(entropy) < _LOW_ENTROPY and max(success) < _SOLVED
    if is_low:
        text = f"the policy's entropy is below {_LOW_ENTROPY} nats at {success[-1]:.0%} success: it no longer explores"
        found.append(Alert(kind="entropy", message=text))
    constant = _values(recent, "reward/constant_group_frac")
    if len(constant) == NUM_STEPS and min(constant) >= _MOST_CONSTANT:
        text = f"{constant[-1]:.0%} of the groups have equal rewards and train nothing: too hard, too easy, or solved"
        found.append(Alert(kind="constant_groups", message=text))
    num_faults = sum(_values(recent, "rollout/num_faults"))
    num_rollouts = sum(_values(recent, "rollout/num_rollouts")) + num_faults
    if num_faults > _MOST_FAULTY * num_rollouts:
        text = f"faults ended {num_faults:.0f} of {num_rollouts:.0f} rollouts of the last {NUM_STEPS} steps"
        found.append(Alert(kind="faults", message=text))
    return found


def find_stall(quiet_s: float, step_time_s: float | None) -> Alert | None:
    """An alert if a run that goes on has ended no group and no step for much longer than its steps take."""
    most_s = max(MIN_STALLED_S, _STALLED_STEPS * (step_time_s or 0.0))
    if quiet_s <= most_s:
        return None
    return Alert(kind="stalled", message=f"no group has ended for {quiet_s / 60:.0f} minutes; see logs/run.log")


def _values(steps: Sequence[Mapping[str, object]], name: str) -> list[float]:
    return [float(value) for step in steps if isinstance(value := step.get(name), int | float)]


class AlertLog:
    """Writes a line into a run's log when an alert begins, and one when it is over."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self._config = config
        self._steps: list[Mapping[str, object]] = []
        self._known: set[AlertKind] = set()

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """A training step has ended with these metrics."""
        self._steps = [*self._steps, metrics][-NUM_STEPS:]
        alerts: dict[AlertKind, str] = {alert.kind: alert.message for alert in find_alerts(self._steps, self._config)}
        for kind in alerts.keys() - self._known:
            logger.warning("alert kind=%s step=%s: %s", kind, step, alerts[kind])
        for kind in self._known - alerts.keys():
            logger.info("alert over kind=%s step=%s", kind, step)
        self._known = set(alerts)
