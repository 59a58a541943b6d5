"""What the planner says of predictions that are given."""

import re
from io import StringIO

import pytest
from rich.console import Console

from cua_rl.planning.fleet import Schedule, Speed, bounds, one_more
from cua_rl.planning.report import Outlook, Plan, plan_json, show_plan
from cua_rl.planning.simulation import Prediction
from tests.planning.scenarios import make_scenario

# 10 devices allow 10 / 13 rollouts a second, the trainer 1, the server 10 / 4, the controller 1 / (4 * 0.3) = 0.83
SCENARIO = make_scenario(
    workload={"controller_s": 0.3},
    server=Speed(alone_s=0.7, each_s=0.0),
    schedule=Schedule(groups_per_batch=5, group_size=2, max_lag=2),
)


def outlook(rate: float, label: str = "as planned") -> Outlook:
    prediction = Prediction(
        steps_per_hour=rate / 10,
        rollouts_per_hour=rate,
        server_busy_frac=0.5,
        trainer_busy_frac=0.5,
        device_busy_frac=0.5,
        policy_lag_mean=1.0,
        policy_lag_max=2.0,
    )
    return Outlook(label=label, scenario=SCENARIO, prediction=prediction, usd_per_hour=1.0)


def shown(**gains: float) -> tuple[str, Plan]:
    """What is printed of a plan of 2,310 rollouts per hour, in which one more of these parts brings so much."""
    more = {part: outlook(2310 * (1 + gains.get(part, 0.0)), label) for part, (label, _) in one_more(SCENARIO).items()}
    plan = Plan(planned=outlook(2310), bounds=bounds(SCENARIO), more=more, by_devices=[outlook(2310)])
    text = StringIO()
    show_plan(plan, Console(file=text, width=120))
    return text.getvalue(), plan


def test_the_conclusion_is_what_the_table_says_and_the_other_full_parts_follow() -> None:
    text, plan = shown(devices=0.062, controller=0.004)

    assert re.search(r"\+ 1 device +│ +2,453 │ +\+6\.2 %", text)
    assert "Bottleneck: devices: more devices" in text
    # 2310 of 3000 an hour
    assert plan.bounds["controller"] == pytest.approx(3000)
    assert "Next: controller, at 77 % of what it allows: more rollout_workers" in text
    assert plan_json(plan)["bottleneck"] == "devices"
    assert "Next: training" not in text  # at 64 %


def test_a_remedy_is_not_promised_where_the_table_has_none() -> None:
    text, plan = shown(devices=0.01)

    assert plan.bottleneck == "devices"
    assert "Bottleneck: devices: one more of anything changes little" in text
