"""Reports of a running training: the loop calls it once per step and once per evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cua_rl.events import Phase
from cua_rl.metrics import Mean, merge_metrics
from cua_rl.reporting.alerts import AlertLog
from cua_rl.reporting.comparison import EvalResult
from cua_rl.reporting.json_lines import read_records
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.progress import ProgressDisplay

_LABELS: Mapping[Phase, str] = {"baseline": "Baseline", "step": "Step", "eval": "Eval"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Sends each step and evaluation to the metric files and the display.

    The figures for the summary are read back from metrics.jsonl, so they cover the earlier attempts of a resumed run.
    """

    metric_log: MetricLog
    display: ProgressDisplay
    total_steps: int
    curve: int = 1
    """Which part of the run this is, counted from 1; success is compared within it."""
    baseline_step: int = 0
    """The step after which the curve begins."""
    suite: str = "held_out"
    alerts: AlertLog = field(default_factory=lambda: AlertLog({}))

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        progress = {"progress/step": float(step), "progress/done_frac": step / self.total_steps}
        self.metric_log.log(step, merge_metrics(progress, metrics, self._curve_metrics()))
        self.display.step(step, metrics)
        self.alerts.note(step, metrics)

    def log_group(self, index: int, rewards: Sequence[float]) -> None:
        """A group of a training step has ended; called for the first few of a step only."""
        self.display.group(index, rewards)

    def log_evaluation(self, phase: Phase, step: int, result: EvalResult) -> None:
        """An evaluation after `step` is done; the baseline is the one after step 0."""
        metrics = result.metrics(self.suite)
        self.metric_log.log(step, metrics | self._curve_metrics())
        self.display.evaluation(_LABELS[phase], self.suite, metrics)

    @property
    def baseline_success_rate(self) -> float | None:
        """Success before the first step of the curve, if it was measured."""
        return next(reversed(self._rates(first_step=self.baseline_step, last_step=self.baseline_step)), None)

    @property
    def final_success_rate(self) -> float | None:
        """Success at the last evaluation of the curve after training began."""
        return next(reversed(self._rates(first_step=self.baseline_step + 1, last_step=self.total_steps)), None)

    @property
    def num_eval_rollouts(self) -> int:
        return round(next(reversed(self._values(f"eval/{self.suite}/num_rollouts")), 0.0))

    @property
    def retokenised_tokens(self) -> int:
        """Trained tokens over the run that are not literally the sampled ones."""
        return round(sum(self._values("rollout/retokenised_tokens")))

    @property
    def parity_mean_abs(self) -> float | None:
        """Mean absolute difference of sampler and trainer log-probabilities per trained token of the run."""
        parity = Mean()
        for record in read_records(self.metric_log.path):
            mean, count = record.get("policy/parity_mean_abs"), record.get("rollout/trained_tokens", 1.0)
            if isinstance(mean, float) and isinstance(count, float):
                parity += Mean(total=mean * count, count=round(count))
        return parity.value if parity.count else None

    def _curve_metrics(self) -> dict[str, float]:
        return {"progress/curve": float(self.curve)} if self.curve > 1 else {}

    def _values(self, name: str) -> list[float]:
        values = [record.get(name) for record in read_records(self.metric_log.path)]
        return [value for value in values if isinstance(value, float)]

    def _rates(self, *, first_step: int, last_step: int) -> list[float]:
        rates = [
            record.get(f"eval/{self.suite}/success_rate")
            for record in read_records(self.metric_log.path)
            if isinstance(step := record["step"], int) and first_step <= step <= last_step
            if record.get("progress/curve", 1.0) == self.curve
        ]
        return [rate for rate in rates if isinstance(rate, float)]
