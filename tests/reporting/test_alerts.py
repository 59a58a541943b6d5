"""When a run should be looked at, on steps whose figures are made up around each limit."""

import logging

import pytest

from cua_rl.host.masking import known_secrets, mask_secrets, mask_text
from cua_rl.reporting.alerts import AlertKind, AlertLog, find_alerts, find_stall

HEALTHY: dict[str, object] = {
    "policy/parity_mean_abs": 1e-6,
    "policy/entropy": 0.2,
    "reward/success_rate": 0.4,
    "reward/constant_group_frac": 0.5,
    "rollout/num_faults": 1.0,
    "rollout/num_rollouts": 31.0,
}


def _kinds(*steps: dict[str, object], limit: float | None = 0.02) -> list[AlertKind]:
    return [
        alert.kind for alert in find_alerts([HEALTHY | step for step in steps], {"trainer": {"parity_limit": limit}})
    ]


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, []),
        ({"policy/parity_mean_abs": 0.011}, ["parity"]),  # the limit is 0.02
        ({"policy/parity_mean_abs": 0.009}, []),
        ({"policy/entropy": 0.005}, ["entropy"]),
        ({"policy/entropy": 0.005, "reward/success_rate": 0.95}, []),  # solved: certainty is what it should have
        ({"reward/constant_group_frac": 0.95}, ["constant_groups"]),
        ({"reward/constant_group_frac": 0.85}, []),
        ({"rollout/num_faults": 8.0, "rollout/num_rollouts": 24.0}, ["faults"]),  # a quarter
        ({"rollout/num_faults": 6.0, "rollout/num_rollouts": 26.0}, []),  # 19 %
        ({"policy/entropy": None, "reward/constant_group_frac": None, "rollout/num_faults": None}, []),
    ],
)
def test_three_steps_beyond_a_limit_are_an_alert(changes: dict[str, object], kinds: list[AlertKind]) -> None:
    assert _kinds(changes, changes, changes) == kinds


def test_one_step_is_enough_for_parity_alone() -> None:
    wrong = {"policy/parity_mean_abs": 0.5, "reward/constant_group_frac": 1.0, "policy/entropy": 0.0}
    assert _kinds({}, {}, wrong) == ["parity"]
    assert _kinds(wrong) == ["parity"]
    assert _kinds(wrong, {}, {}) == []
    assert find_alerts([], {}) == []


def test_parity_is_held_against_the_limit_of_the_run() -> None:
    assert _kinds({"policy/parity_mean_abs": 0.04}, limit=0.1) == []
    assert _kinds({"policy/parity_mean_abs": 0.06}, limit=0.1) == ["parity"]
    assert _kinds({"policy/parity_mean_abs": 0.011}, limit=None) == ["parity"]


def test_a_run_is_stalled_when_it_is_quiet_for_ten_minutes_and_five_steps() -> None:
    assert find_stall(599.0, None) is None
    alert = find_stall(1260.0, 60.0)
    assert alert is not None
    assert "21 minutes" in alert.message
    assert find_stall(1260.0, 300.0) is None  # five steps take 25 minutes


def test_the_address_of_a_webhook_is_in_no_stored_setting_and_no_line_of_a_log() -> None:
    address = "https://alerts.example/hooks/3141592653589793"
    settings = mask_secrets({"alerts_webhook": address})
    assert settings != {"alerts_webhook": address}
    secrets = known_secrets({"MONITOR_ALERTS_WEBHOOK": address})
    assert address not in mask_text(f'HTTP Request: POST {address} "HTTP/1.1 200 OK"', secrets)


def test_a_run_writes_one_line_when_an_alert_begins_and_one_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    log = AlertLog({})
    wrong: dict[str, float] = {"reward/constant_group_frac": 1.0, "reward/success_rate": 0.0}
    with caplog.at_level(logging.INFO):
        for step in range(1, 6):
            log.note(step, wrong)
        assert [record.getMessage().split(":")[0] for record in caplog.records] == ["alert kind=constant_groups step=3"]
        log.note(6, wrong | {"reward/constant_group_frac": 0.5})
        assert caplog.records[-1].getMessage() == "alert over kind=constant_groups step=6"
