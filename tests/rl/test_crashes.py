"""Agents that fail after their first answer."""

import logging
from dataclasses import replace

import pytest

from cua_rl.rl.stages import report_crashes
from cua_rl.types.rollout import RolloutGroup, StopReason
from tests.builders import rollout


@pytest.mark.parametrize(("num_crashed", "is_reported"), [(0, False), (2, False), (3, True), (4, True)])
def test_a_step_in_which_most_agents_failed_is_an_error_that_says_what_to_do(
    num_crashed: int, is_reported: bool, caplog: pytest.LogCaptureFixture
) -> None:
    crashed = [
        replace(rollout(reward=0.0), error="the agent ended with status 1: KeyError") for _ in range(num_crashed)
    ]
    rollouts = (*crashed, *(rollout() for _ in range(4 - num_crashed)))

    report_crashes(3, [RolloutGroup(group_id="g", index=0, task_id="game", seed=5, rollouts=rollouts)])

    errors = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == is_reported
    for message in errors:
        assert f"step=3 expected agents that end by themselves, got {num_crashed} of 4" in message
        assert "KeyError" in message
        assert "fix the agent" in message


def test_devices_that_the_policy_made_useless_are_no_agents_that_failed(caplog: pytest.LogCaptureFixture) -> None:
    hung = replace(rollout(reward=0.0), stop_reason=StopReason.MAX_TIME, error="the page hangs")

    report_crashes(3, [RolloutGroup(group_id="g", index=0, task_id="game", seed=5, rollouts=(hung, hung))])

    assert not caplog.records
