"""One run seen from six places: all say the same numbers.

Console, metrics.jsonl, TensorBoard, Weights & Biases (in its offline mode), database and monitor.
"""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import TrainingEnded, TrainingStarted
from cua_rl.reporting.json_lines import read_records
from cua_rl.reporting.metric_log import MetricLog
from cua_rl.reporting.progress import ProgressDisplay
from cua_rl.reporting.run_report import RunReport
from cua_rl.rl.sync_loop import train
from cua_rl.types.errors import DeviceError
from tests.fakes import FakeAgent
from tests.real.database.conftest import run_sql
from tests.real.database.recorded import IMAGE_TOKEN
from tests.real.monitor.conftest import Monitor
from tests.real.reporting.test_wandb import wandb_records
from tests.rl.test_sync_loop import parts, settings

NUM_STEPS = 3
RUN = "/api/runs/1"
CONSOLE = {
    "Success": ("reward/success_rate", "{:.3f}"),
    "Reward": ("reward/mean", "{:.3f}"),
    "Loss": ("loss/policy", "{:.4f}"),
    "KL": ("policy/kl_base", "{:.4f}"),
    "Sampler gap": ("policy/kl_sampling_training/mean", "{:.4f}"),
    "LR": ("optim/learning_rate", "{:.2e}"),
    "tok/s": ("time/tokens_per_s", "{:.0f}"),
    "Faults": ("rollout/num_faults", "{:.0f}"),
}
"""What the console calls the metrics that it shows, and how many of their digits."""
HELD_OUT = "eval/held_out"
OF_FILES = {"progress/step", "progress/done_frac"}
"""How far the run is: to be read off a metric file, which has nothing else; the others know it anyway."""

Numbers = dict[str, float | None]
Place = Mapping[int, Numbers]
"""What one place says: metrics by step."""


async def run_in_a_small_world(url: str, folder: Path, *, wandb_project: str | None = None) -> str:
    """Three steps with a baseline and two evaluations, told to everyone; returns what the console showed."""
    console = Console(file=StringIO(), width=300)
    lost = DeviceError("gone")
    answers = [lost, "1", "1", "0", "1", "1", "0", lost, lost, lost, "1", "0", "1", "1"]
    made, bench, *_ = parts(FakeAgent(answers))
    with MetricLog(folder, config={}, wandb_project=wandb_project) as log:
        report = RunReport(metric_log=log, display=ProgressDisplay(NUM_STEPS, console=console), total_steps=NUM_STEPS)
        kl: dict[str, Any] = {"kl_penalty_coef": 0.1, "compute_post_kl": True}
        chosen = settings(max_steps=NUM_STEPS, group_size=4, eval_every=2, **kl)
        await train(chosen, replace(made, log=report))
    started = TrainingStarted(
        run_name="run", log_path=str(folder), config={"group_size": 4}, first_step=1, total_steps=NUM_STEPS
    )
    async with DatabaseRecorder(url, image_token_id=IMAGE_TOKEN) as recorder:
        for event in (started, *bench.recorder.events, TrainingEnded(status="completed")):
            await recorder.record(event)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def of_file(folder: Path) -> tuple[Place, Place]:
    """Steps and evaluations as metrics.jsonl has them."""
    steps: dict[int, Numbers] = {}
    evaluations: dict[int, Numbers] = {}
    for record in read_records(folder / "metrics.jsonl"):
        place = evaluations if f"{HELD_OUT}/success_rate" in record else steps
        place[int(str(record["step"]))] = {
            name: float(str(value)) for name, value in record.items() if name not in OF_FILES | {"step"}
        }
    return steps, evaluations


def of_tensorboard(folder: Path) -> tuple[Place, Place]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    steps: dict[int, Numbers] = {}
    evaluations: dict[int, Numbers] = {}
    for tag in events.Tags()["scalars"]:
        if tag not in OF_FILES:
            place = evaluations if tag.startswith("eval/") else steps
            for point in events.Scalars(tag):
                place.setdefault(point.step, {})[tag] = point.value
    return steps, evaluations


def of_wandb(folder: Path) -> tuple[Place, Place]:
    """The rows of its run file; one of a step with an evaluation has the numbers of both."""
    record_class: Any = import_module("wandb.proto.wandb_internal_pb2").Record
    (file,) = (folder / "wandb").glob("offline-run-*/*.wandb")
    steps: dict[int, Numbers] = {}
    evaluations: dict[int, Numbers] = {}
    for data in wandb_records(file.read_bytes()):
        row = record_class.FromString(data).history
        numbers = {"/".join(item.nested_key): json.loads(item.value_json) for item in row.item}
        for name, value in numbers.items():
            if "/" in name and name not in OF_FILES:
                place = evaluations if name.startswith("eval/") else steps
                place.setdefault(row.step.num, {})[name] = value
    return steps, evaluations


def of_database(url: str) -> tuple[Place, Place]:
    def metrics(table: str) -> Place:
        rows = run_sql(url, f"SELECT step, metrics::text FROM {table}")
        return {int(str(step)): json.loads(str(found)) for step, found in rows}

    return metrics("steps"), metrics("evals")


async def of_monitor(monitor: Monitor) -> tuple[Place, Place]:
    """The charts of the run's page, and its table of evaluations."""
    series = await monitor.json(f"{RUN}/metrics")
    steps = {
        step: {name: values[place] for name, values in series["series"].items() if values[place] is not None}
        for place, step in enumerate(series["steps"])
    }
    run = await monitor.json(RUN)
    return steps, {one["step"]: one["metrics"] for one in run["evaluations"]}


def of_console(shown: str) -> dict[int, dict[str, str]]:
    """Per step the texts behind the labels; baseline and evaluations are lines of another form."""
    steps: dict[int, dict[str, str]] = {}
    for number, rest in re.findall(r"^Step (\d+)/\d+ \S+ \| (.*)$", shown, re.MULTILINE):
        steps[int(number)] = dict(part.split(": ", 1) for part in rest.split(" | "))
        steps[int(number)].pop("ETA", None)
    return steps


def as_table(places: Mapping[str, Place]) -> str:
    """A line per step and number with what every place says."""
    names = list(places)
    lines = [f"{'step':>4}  {'number':44}" + "".join(f"{name:>22}" for name in names)]
    for step, numbers in sorted(places[names[0]].items()):
        for number in sorted(numbers):
            values = [places[name].get(step, {}).get(number) for name in names]
            lines.append(f"{step:4}  {number:44}" + "".join(f"{value!s:>22.22}" for value in values))
    return "\n".join(lines) + "\n"


async def test_every_number_is_the_same_wherever_it_is_shown(
    monitor: Monitor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    shown = await run_in_a_small_world(monitor.url, tmp_path, wandb_project="agents")
    (file, file_evals), (board, board_evals) = of_file(tmp_path), of_tensorboard(tmp_path)
    (database, database_evals), (web, web_evals) = of_database(monitor.url), await of_monitor(monitor)
    wandb, wandb_evals = of_wandb(tmp_path)
    names = ("metrics.jsonl", "TensorBoard", "W&B", "database", "monitor")
    for told in (
        (file, board, wandb, database, web),
        (file_evals, board_evals, wandb_evals, database_evals, web_evals),
    ):
        sys.stdout.write(as_table(dict(zip(names, told, strict=True))))

    assert list(file) == list(of_console(shown)) == [1, 2, 3]
    assert list(file_evals) == [0, 2, 3]
    assert sum(len(numbers) for numbers in file.values()) > 90
    assert database == web == wandb == file
    assert database_evals == web_evals == wandb_evals == file_evals
    for ours, theirs in ((file, board), (file_evals, board_evals)):  # whose files have 32 bits for a number
        assert {step: {name: float(np.float32(value)) for name, value in numbers.items()}
                for step, numbers in ours.items()} == theirs  # fmt: skip
    for step, texts in of_console(shown).items():
        assert texts == {
            label: form.format(file[step][name])
            for label, (name, form) in CONSOLE.items()
            if name in file[step] and (label != "Faults" or file[step][name])
        }
    assert any("Faults" in texts for texts in of_console(shown).values())


async def test_what_the_monitor_counts_itself_is_what_was_measured(monitor: Monitor, tmp_path: Path) -> None:
    shown = await run_in_a_small_world(monitor.url, tmp_path)
    file, file_evals = of_file(tmp_path)

    def same(rate: Mapping[str, Any], numbers: Numbers, prefix: str = "reward") -> None:
        assert rate["rate"] == pytest.approx(numbers[f"{prefix}/success_rate"])
        counted = "rollout/num_rollouts" if prefix == "reward" else f"{prefix}/num_rollouts"
        assert rate["num_rollouts"] == numbers[counted]

    (headline,) = (await monitor.json("/api/runs"))["items"]
    assert headline["success_rate"] == pytest.approx(file[NUM_STEPS]["reward/success_rate"])
    assert headline["reward_mean"] == pytest.approx(file[NUM_STEPS]["reward/mean"])
    assert headline["num_completed_steps"] == headline["total_steps"] == NUM_STEPS
    assert headline["sparkline"] == pytest.approx([file[step]["reward/success_rate"] for step in (1, 2, 3)])
    assert headline["last_eval_step"] == NUM_STEPS
    same(headline["baseline"], file_evals[0], HELD_OUT)
    same(headline["last_eval"], file_evals[NUM_STEPS], HELD_OUT)

    series = await monitor.json(f"{RUN}/metrics")
    assert [point["step"] for point in series["success"]] == [1, 2, 3]
    for point in series["success"]:
        same(point, file[point["step"]])
    evaluations = (await monitor.json(RUN))["evaluations"]
    assert {one["fault_bounds"] is None for one in evaluations} == {True, False}
    for one in evaluations:
        numbers = file_evals[one["step"]]
        same(one["success"], numbers, HELD_OUT)
        assert one["reward_mean"] == pytest.approx(numbers[f"{HELD_OUT}/reward/mean"])
        low, high = numbers[f"{HELD_OUT}/success_rate_low"], numbers[f"{HELD_OUT}/success_rate_high"]
        assert (one["success"]["low"], one["success"]["high"]) == pytest.approx((low, high))
        bounds = {name: numbers.get(f"{HELD_OUT}/success_rate_{name}") for name in ("worst", "best")}
        num_faults = numbers[f"{HELD_OUT}/num_faults"]
        assert one["fault_bounds"] == (bounds | {"num_faults": num_faults} if num_faults else None)
    for item in await monitor.json(f"{RUN}/timeline"):
        is_step = item["phase"] == "step"
        source = await monitor.json(f"{RUN}/{item['phase']}/{item['step']}")
        for rate in (item["success"], source["success"]):
            same(rate, (file if is_step else file_evals)[item["step"]], "reward" if is_step else HELD_OUT)
        assert item["policy_version"] == item["step"] - is_step  # step N makes policy N
    told = [f"{numbers[f'{HELD_OUT}/success_rate']:.3f}" for numbers in file_evals.values()]
    assert re.findall(r"held_out \| Success: (\S+)", shown) == told
