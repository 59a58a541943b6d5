"""The planner's report: predictions for the scenario, for one more of each part, and for other numbers of devices."""

import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from math import inf
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cua_rl.planning.fleet import NOISE, SATURATED, Prices, Scenario, bounds, find_bottleneck, one_more
from cua_rl.planning.simulation import Prediction, predict
from cua_rl.reporting.json_lines import write_text
from cua_rl.reporting.plots import EVALUATION_COLOUR, TRAINING_COLOUR, make_axes, save_figure

_FACTORS = (0.25, 0.5, 2.0)
"""Multiples of the planned number of devices, for the plot."""
_BOUND_COLOURS: Mapping[str, str] = {
    "devices": "#54a24b",
    "sampling": "#b279a2",
    "training": "#e45756",
    "sampling and training": "#e45756",
    "controller": "#9d755d",
}
_ADVICE: Mapping[str, str] = {
    "devices": "more devices, or faster ones",
    "sampling": "more GPUs for sampling, or shorter prompts and responses",
    "training": "more GPUs for training, or shorter sequences",
    "sampling and training": "GPUs of their own for sampling and training",
    "controller": "more rollout_workers, or smaller screenshots",
    "schedule": "parts wait for each other: raise max_steps_off_policy, or have more rollouts per step than devices",
}
_NO_REMEDY = "one more of anything changes little: faster hardware, or less work per rollout"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A scenario with its prediction and what it costs."""

    label: str
    scenario: Scenario
    prediction: Prediction
    usd_per_hour: float

    @property
    def usd_per_1000(self) -> float:
        """Cost of 1,000 rollouts."""
        return 1000 * self.usd_per_hour / self.prediction.rollouts_per_hour


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that the planner says."""

    planned: Outlook
    bounds: Mapping[str, float]
    """Rollouts per hour."""
    more: Mapping[str, Outlook]  # with one more of a part, by the part
    by_devices: Sequence[Outlook]
    """Predictions for fewer, as many and more devices."""

    @property
    def gains(self) -> dict[str, float]:
        """What one more of each part changes, as a share of the rollouts per hour."""
        now = self.planned.prediction.rollouts_per_hour
        return {part: outlook.prediction.rollouts_per_hour / now - 1 for part, outlook in self.more.items()}

    @property
    def bottleneck(self) -> str:
        return find_bottleneck(self.bounds, self.gains)


def make_plan(scenario: Scenario, prices: Prices) -> Plan:
    """Simulate the scenario and its variations, as many at a time as there are processors."""
    more = one_more(scenario)
    counts = sorted({max(1, round(factor * scenario.fleet.num_devices)) for factor in _FACTORS})
    others = [replace(scenario, fleet=replace(scenario.fleet, num_devices=count)) for count in counts]
    labels = ["as planned", *(label for label, _ in more.values()), *(f"{count:,} devices" for count in counts)]
    scenarios = [scenario, *(changed for _, changed in more.values()), *others]
    num_workers = min(len(scenarios), os.cpu_count() or 1)
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        predictions = list(pool.map(predict, scenarios))
    outlooks = [
        Outlook(label=label, scenario=one, prediction=prediction, usd_per_hour=prices.per_hour(one.fleet))
        for label, one, prediction in zip(labels, scenarios, predictions, strict=True)
    ]
    planned = outlooks[0]
    return Plan(
        planned=planned,
        bounds=bounds(scenario),
        more=dict(zip(more, outlooks[1 : 1 + len(more)], strict=True)),
        by_devices=sorted(
            [planned, *outlooks[1 + len(more) :]], key=lambda outlook: outlook.scenario.fleet.num_devices
        ),
    )


def show_plan(plan: Plan, console: Console) -> None:
    """Print the tables."""
    said, fleet, placed = plan.planned.prediction, plan.planned.scenario.fleet, plan.planned.scenario.fleet.placement
    busy = {
        "devices": said.device_busy_frac,
        "sampling": said.server_busy_frac,
        "training": said.trainer_busy_frac,
        "controller": said.rollouts_per_hour / plan.bounds["controller"],
    }
    used = {
        "devices": f"{fleet.num_devices:,}",
        "sampling": _place(placed.num_servers, placed.gpus_per_server, "copies"),
        "training": _place(placed.num_trainers, min(1, placed.gpus_per_server), "processes"),
        "controller": f"{fleet.num_controllers} processes" if fleet.num_controllers > 1 else "1 process",
    }
    parts = Table(title="What each part allows", title_justify="left")
    for heading in ("", "there are", "rollouts/hour at most", "busy"):
        parts.add_column(heading, justify="left" if heading in ("", "there are") else "right")
    for name in dict.fromkeys((*used, *plan.bounds)):
        bound, busy_frac = plan.bounds.get(name, inf), busy.get(name)
        parts.add_row(
            name,
            used.get(name, "the same hardware"),
            "–" if bound == inf else f"{bound:,.0f}",
            f"{100 * busy_frac:.0f} %" if busy_frac else "–",
        )
    console.print(parts)
    varied = Table(title="What one more would bring", title_justify="left")
    is_priced = plan.planned.usd_per_hour > 0
    for heading in ("", "rollouts/hour", "change", *(["US dollars per 1,000"] if is_priced else [])):
        varied.add_column(heading, justify="right" if heading else "left")
    gains = plan.gains
    for part, outlook in {"": plan.planned, **plan.more}.items():
        change = f"{100 * gains[part]:+z.1f} %" if part else ""
        price = [f"{outlook.usd_per_1000:,.2f}"] if is_priced else []
        varied.add_row(outlook.label, f"{outlook.prediction.rollouts_per_hour:,.0f}", change, *price)
    console.print(varied)
    console.print(
        f"{said.rollouts_per_hour:,.0f} rollouts per hour, {said.steps_per_hour:.1f} steps per hour, policy lag "
        f"{said.policy_lag_mean:.1f} on average and at most {said.policy_lag_max:.0f}"
        + (f", {plan.planned.usd_per_1000:,.2f} US dollars per 1,000 rollouts" if is_priced else ""),
        soft_wrap=True,
    )
    name = plan.bottleneck
    advice = _ADVICE[name] if gains.get(name, 0.0) >= NOISE else _NO_REMEDY
    console.print(f"Bottleneck: {name}: {advice}", soft_wrap=True)
    for part, bound in plan.bounds.items():
        if part != name and (used_frac := said.rollouts_per_hour / bound) >= SATURATED:
            console.print(
                f"Next: {part}, at {100 * used_frac:.0f} % of what it allows: {_ADVICE[part]}", soft_wrap=True
            )


def plan_json(plan: Plan) -> dict[str, Any]:
    """All figures."""

    def figures(outlook: Outlook) -> dict[str, Any]:
        return {
            "num_devices": outlook.scenario.fleet.num_devices,
            "num_gpus": outlook.scenario.fleet.placement.num_gpus,
            **asdict(outlook.prediction),
            "usd_per_1000_rollouts": outlook.usd_per_1000,
        }

    return {
        "scenario": asdict(plan.planned.scenario),
        "planned": figures(plan.planned),
        "max_rollouts_per_hour": {name: bound for name, bound in plan.bounds.items() if bound != inf},
        "bottleneck": plan.bottleneck,
        "more": {outlook.label: figures(outlook) for outlook in plan.more.values()},
        "by_devices": [figures(outlook) for outlook in plan.by_devices],
    }


def write_plan_json(path: Path, plan: Plan) -> None:
    """Write all figures."""
    write_text(path, json.dumps(plan_json(plan), indent=1) + "\n")


def write_plan_plot(path: Path, plan: Plan, *, title: str) -> None:
    """Plot rollouts per hour with their bounds by number of devices, and what one more of each would bring."""
    figure, (speed, gain) = make_axes(12, 5.2, (title, "what one more would bring"), width_ratios=(3, 2))
    _draw_speed(speed, plan)
    _draw_gain(gain, plan)
    save_figure(figure, path)


def _draw_speed(axes: Any, plan: Plan) -> None:
    counts = [outlook.scenario.fleet.num_devices for outlook in plan.by_devices]
    rates = [outlook.prediction.rollouts_per_hour for outlook in plan.by_devices]
    highest = 2 * max(rates)  # bounds far above carry no information
    scenario = plan.planned.scenario
    spaced = sorted({round(counts[0] * (counts[-1] / counts[0]) ** (place / 50)) for place in range(51)})
    limits = [bounds(replace(scenario, fleet=replace(scenario.fleet, num_devices=count))) for count in spaced]
    for name in plan.bounds:
        heights = [limit[name] for limit in limits]
        if min(heights) < highest:
            axes.plot(spaced, heights, "--", color=_BOUND_COLOURS[name], linewidth=1.3, label=f"bound: {name}")
    axes.plot(counts, rates, "-", color=TRAINING_COLOUR, linewidth=2, marker="o", markersize=5, label="simulated")
    planned = plan.planned
    place = (planned.scenario.fleet.num_devices, planned.prediction.rollouts_per_hour)
    axes.plot(*place, "D", color=EVALUATION_COLOUR, markersize=8, label="as planned")
    axes.annotate(
        f"{place[1]:,.0f}",
        place,
        xytext=(0, -9),
        textcoords="offset points",
        ha="center",
        va="top",
        color=EVALUATION_COLOUR,
        fontweight="bold",
    )
    axes.set_xscale("log")
    axes.set_xticks(counts, [f"{count:,}" for count in counts])
    axes.minorticks_off()
    axes.set_ylim(0, highest)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("devices")
    axes.set_ylabel("rollouts per hour")
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.8)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False, fontsize=9)


def _draw_gain(axes: Any, plan: Plan) -> None:
    changes = {plan.more[part].label: 100 * gain for part, gain in reversed(plan.gains.items())}
    axes.barh(list(changes), list(changes.values()), 0.55, color=TRAINING_COLOUR)
    widest = max(1.0, *(abs(change) for change in changes.values()))
    for name, change in changes.items():
        at = (max(0.0, change) + 0.02 * widest, name)
        axes.annotate(f"{change:+z.1f} %", at, va="center", fontsize=9)
    axes.set_xlim(min(0.0, 1.1 * min(changes.values())), 1.3 * widest)
    axes.axvline(0, color="#333333", linewidth=0.8)
    axes.set_xlabel("change of rollouts per hour, %")
    axes.grid(visible=True, axis="x", color="#e6e6e6", linewidth=0.8)


def _place(number: int, num_gpus: int, noun: str) -> str:
    singular = {"copies": "copy", "processes": "process"}[noun]
    counted = f"{number} {noun if number > 1 else singular}"
    return f"{counted} on {number * num_gpus} GPU{'s' if number * num_gpus > 1 else ''}" if num_gpus else counted
