"""Accuracy of a judge on tasks with validators: confusion matrix and rates with intervals, in `calibration.json`."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cua_rl.evaluation.statistics import ratio_interval
from cua_rl.judge.config import JudgeConfig
from cua_rl.types.errors import ConfigError

Rate = tuple[float | None, float, float]
"""Value (None without data) and the ends of its 95 % interval, which allows for mistakes repeated at a task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The validator's and the judge's verdict on a recorded rollout."""

    rollout_id: str
    task_id: str
    category: str
    truth: bool
    verdict: bool | None
    agreement: float
    reason: str
    seed: int = 0
    """The task's instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """Counts of verdicts by truth; positive is "success"."""

    true_positives: int
    false_positives: int
    false_negatives: int
    true_negatives: int
    num_without_verdict: int
    precision: Rate
    """Share of "success" verdicts that are correct."""
    recall: Rate
    """Share of successes that the judge recognises."""
    false_positive_rate: Rate
    """Share of failures that the judge mistakes for successes."""

    @property
    def balanced_precision(self) -> Rate:
        """The precision if half of the rollouts succeeded, recall / (recall + false-positive rate).

        Unlike the precision it does not depend on how good the recorded policy was: a judge that always says yes has
        0.5. Its interval pairs the worst recall with the worst false-positive rate, so it covers at least as often.
        """
        (recall, *recalls), (wrong, *wrongs) = self.recall, self.false_positive_rate
        value = None if recall is None or wrong is None or not recall + wrong else recall / (recall + wrong)
        low, high = recalls[0] / max(1e-9, recalls[0] + wrongs[1]), recalls[1] / max(1e-9, recalls[1] + wrongs[0])
        return value, low, high

    @property
    def num_verdicts(self) -> int:
        return self.true_positives + self.false_positives + self.false_negatives + self.true_negatives

    def as_json(self) -> dict[str, object]:
        """Counts and rates."""
        rates = {"precision": self.precision, "recall": self.recall, "false_positive_rate": self.false_positive_rate}
        rates |= {"balanced_precision": self.balanced_precision}
        shown = {name: {"value": rate[0], "low": rate[1], "high": rate[2]} for name, rate in rates.items()}
        return {**asdict(self), **shown}


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRecord:
    """The part of a calibration that decides whether training may use the judge."""

    path: Path
    fingerprint: str
    num_verdicts: int
    precision: Rate
    balanced_precision: Rate


def confusion(judged: Iterable[Judged]) -> Confusion:
    items = list(judged)

    def count(truth: bool, verdict: bool) -> int:
        return sum(item.truth is truth and item.verdict is verdict for item in items)

    return Confusion(
        true_positives=count(True, True),
        false_positives=count(False, True),
        false_negatives=count(True, False),
        true_negatives=count(False, False),
        num_without_verdict=sum(item.verdict is None for item in items),
        precision=_rate(items, lambda item: item.verdict is True, lambda item: item.truth),
        recall=_rate(items, lambda item: item.truth, lambda item: item.verdict is True),
        false_positive_rate=_rate(items, lambda item: not item.truth, lambda item: item.verdict is True),
    )


def confusion_by(judged: Sequence[Judged], name_of: Callable[[Judged], str]) -> dict[str, Confusion]:
    """A matrix per name, sorted by name."""
    names = sorted({name_of(item) for item in judged})
    return {name: confusion(item for item in judged if name_of(item) == name) for name in names}


def calibration_json(judge: JudgeConfig, judged: Sequence[Judged], more: Mapping[str, object]) -> dict[str, object]:
    """The whole record; `more` adds the origin of the rollouts and the cost."""
    mistakes = [item for item in judged if item.verdict is not item.truth]
    return {
        "judge": judge.identity(),
        **more,
        "all": confusion(judged).as_json(),
        "by_category": {name: one.as_json() for name, one in confusion_by(judged, lambda item: item.category).items()},
        "by_task": {name: one.as_json() for name, one in confusion_by(judged, lambda item: item.task_id).items()},
        "mistakes": [asdict(item) for item in mistakes],
    }


def load_calibration(path: Path) -> CalibrationRecord:
    """Read a record; raises `ConfigError` if there is no such file, or it is not a calibration record."""
    try:
        record: Any = json.loads(path.read_text(encoding="utf-8"))
        counts = record["all"]
        precision, balanced = (
            (rate["value"], float(rate["low"]), float(rate["high"]))
            for rate in (counts["precision"], counts["balanced_precision"])
        )
        return CalibrationRecord(
            path=path,
            fingerprint=str(record["judge"]["fingerprint"]),
            num_verdicts=sum(
                int(counts[name]) for name in ("true_positives", "false_positives", "false_negatives", "true_negatives")
            ),
            precision=precision,
            balanced_precision=balanced,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"judge_calibration: expected a file that recipes.calibrate_judge wrote, got {str(path)!r} "
            f"({type(error).__name__}: {error}); calibrate the judge again"
        ) from None


def _rate(items: Iterable[Judged], is_counted: Callable[[Judged], bool], is_hit: Callable[[Judged], bool]) -> Rate:
    """The share of hits among the counted verdicts."""
    by_task: defaultdict[tuple[str, int], list[bool]] = defaultdict(list)
    for item in items:
        if item.verdict is not None and is_counted(item):
            by_task[item.task_id, item.seed].append(is_hit(item))
    hits = [hit for task in by_task.values() for hit in task]
    low, high = ratio_interval((sum(task), len(task)) for task in by_task.values())
    return (sum(hits) / len(hits) if hits else None, low, high)
