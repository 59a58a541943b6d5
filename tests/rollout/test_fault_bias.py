"""What is reported of a policy covers the truth, whatever the policy does that could pass for a fault.

The table of all policies, with hundreds of repetitions each: `python -m tests.rollout.fault_world 400`.
"""

from functools import cache
from math import sqrt
from statistics import fmean, stdev

import pytest

from tests.rollout.fault_world import (
    FAULTS,
    FaultName,
    Report,
    coverage,
    fewest_covered,
    repeat,
    true_pass_at,
    true_success,
)

NUM = 12
POLICY = "middling"
COSTS_DEVICES = ("lost devices", "lost devices on hard tasks")


@cache
def reports_of(fault: FaultName) -> list[Report]:
    return repeat(POLICY, fault, NUM)


@pytest.mark.parametrize("fault", FAULTS)
def test_success_and_pass_at_k_are_unbiased_in_training_and_evaluation(fault: FaultName) -> None:
    """Dropped as faults, failures of the policy's own doing made 0.50 look like 0.79, and pass@4 of 0.80 like 0.98."""
    reports = reports_of(fault)

    for rates, truth in (
        ([report.rate for report in reports], true_success(POLICY)),
        ([report.step_rate for report in reports], true_success(POLICY)),
        ([report.pass_at[4] for report in reports if 4 in report.pass_at], true_pass_at(POLICY, 4)),
    ):
        if len(rates) > 3:  # pass@4 is left out where a task has fewer attempts
            assert abs(fmean(rates) - truth) < 4 * stdev(rates) / sqrt(len(rates))
    assert (sum(report.num_faults for report in reports) > 0) == (fault in COSTS_DEVICES)


def test_the_intervals_cover_the_truth_over_all_faults() -> None:
    reports = [report for fault in FAULTS for report in reports_of(fault)]
    fewest = fewest_covered(len(reports)) / len(reports)

    assert coverage(reports, true_success(POLICY), lambda report: report.interval) >= fewest
    assert coverage(reports, true_success(POLICY), lambda report: report.step_interval) >= fewest


@pytest.mark.parametrize("fault", COSTS_DEVICES)
def test_with_faults_a_training_step_also_reports_bounds(fault: FaultName) -> None:
    """A bound is not an estimate: the success of the same tasks under no fault lies between them."""
    for report in reports_of(fault):
        assert report.step_bounds is not None
        worst, best = report.step_bounds
        assert worst <= report.step_rate <= best
    assert all(report.step_bounds is None for report in reports_of("none"))
