"""A regression suite: pinned tasks on which each new checkpoint is compared with the last one accepted.

The suite is an evaluation whose folder stays: every checkpoint is one more of its models, and attempts are never made
again. `suite.json` says which checkpoint is accepted, and how each one compared.
"""

import json
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import chz

from cua_rl.command_line.fields import Given, setting, with_presets, with_values
from cua_rl.command_line.settings import accept_value, explain_field
from cua_rl.database.analysis_models import Analysis
from cua_rl.database.postgres import read_own_database
from cua_rl.database.queries import find_training
from cua_rl.database.session import find_database, open_sessions
from cua_rl.evaluation.attempts import Attempt, outcomes_by_position, parse_attempts
from cua_rl.evaluation.evaluate import compare_pair
from cua_rl.evaluation.statistics import regression_p_value, regression_power
from cua_rl.reporting.comparison import PairRow, pair_sentence
from cua_rl.reporting.json_lines import read_records, write_text
from cua_rl.run.evaluation import run_evaluation
from cua_rl.run.evaluation_config import EvaluateConfig, evaluate_presets
from cua_rl.run.prepared_evaluation import LocalModel, parse_models, shown_model
from cua_rl.run_folder.log_directory import prepare_log_directory, run_folder
from cua_rl.training.folders import ADAPTER_WEIGHTS, file_sha256
from cua_rl.types.errors import ConfigError, SamplingError, boundary

_ENOUGH_TASKS = 1024  # as many as are tried, before the advice is to look for a larger fall


def suite_presets(given: Given) -> Given:
    """As of an evaluation, with enough tasks for the promised power."""
    return {**evaluate_presets(given), "num_tasks": 144}


@with_presets(suite_presets, explain_field, accept_value)
@chz.chz
class SuiteConfig(EvaluateConfig):
    """Compare a checkpoint with the last accepted one, on pinned tasks."""

    fall: float = setting(0.1, "fall of the success rate that the suite must find", within=(0.0, 1.0))
    power: float = setting(0.8, "minimum probability of finding such a fall", within=(0.0, 1.0))
    false_alarms: float = setting(0.05, "maximum probability of an alarm without any fall", within=(0.0, 1.0))
    churn: float = setting(
        0.1,
        "share of tasks whose outcome changes from one checkpoint to the next without a fall, half of them for the "
        "better; the power depends on it",
        within=(0.0, 1.0),
    )
    accept: bool = setting(
        False,
        "accept the checkpoint unless there is an alarm, or faults left too few tasks for `power`; the first one is "
        "always accepted",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteResult:
    """How a checkpoint compares with the one accepted."""

    pair: PairRow
    p_value: float
    """One-sided."""
    power: float
    """With which a fall of the size asked for is found among these tasks."""
    is_regression: bool


async def run_suite(config: SuiteConfig) -> SuiteResult | None:
    """Attempt the tasks with the checkpoint, compare, and record it; None for a dry run or the first checkpoint.

    Raises `ConfigError` for too few tasks, settings that are not the suite's, or the name of another checkpoint, and
    `SamplingError` if faults have left too few tasks for an answer.
    """
    require_power(config)
    if config.num_attempts != 1 or len(config.models) != 1:
        raise ConfigError(
            f"models: expected one checkpoint, and one attempt at each task, got {len(config.models)} and "
            f"num_attempts={config.num_attempts}; a suite compares with the checkpoint that it has accepted"
        )
    if config.log_path is None:
        raise ConfigError("log_path: expected the folder of the suite, got none; the same for every checkpoint")
    folder = run_folder(config.log_path, None, "")
    record, (model,) = _load(folder), parse_models(config.models, config.model_name)
    shown = shown_model(model)
    if isinstance(model, LocalModel) and model.adapter is not None:
        shown["sha256"] = file_sha256(model.adapter.path / ADAPTER_WEIGHTS)
    known = record["models"].get(model.name, shown)
    if known != shown:
        raise ConfigError(
            f"models: expected a new name for another checkpoint, got {model.name!r}, which was {known}; rename it"
        )
    if not config.dry_run:
        with prepare_log_directory(folder, "resume"):  # before the first attempt, as a suite may be killed
            record = _load(folder)
            record["models"][model.name] = shown
            _write(folder, record)
    await run_evaluation(with_values(config, behavior_if_log_dir_exists="resume"))
    if config.dry_run:
        return None
    record = _load(folder)  # a suite of another checkpoint may have ended meanwhile
    attempts, accepted = parse_attempts(read_records(folder / "attempts.jsonl")), record["accepted"]
    result = None
    if accepted in (None, model.name):
        record["accepted"] = model.name
    else:
        result = compare_checkpoints(config, attempts, accepted, model.name)
        if may_accept(config, result):
            record["accepted"] = model.name
        promise = {"fall": config.fall, "churn": config.churn, "false_alarms": config.false_alarms}
        at = datetime.now(UTC).isoformat(timespec="seconds")
        record["results"].append({"at": at, **asdict(result), **promise, "accepted": record["accepted"]})
    _write(folder, record)
    print(describe(config, result, record["accepted"]), flush=True)
    if result is not None:
        await _save(folder, model.name, record["results"][-1])
        require_answer(config, result)
    return result


async def _save(folder: Path, name: str, found: dict[str, object]) -> None:
    """Record a comparison in the database that has the attempts, where the monitor finds it."""
    async with AsyncExitStack() as stack:
        url = await find_database(os.environ) or await stack.enter_async_context(read_own_database(folder))
        sessions = await stack.enter_async_context(open_sessions(url))
        session = await stack.enter_async_context(sessions.begin())
        training = await find_training(session, f"{folder.name}@{name}", str(folder))
        assert training is not None  # the evaluation has recorded it
        session.add(Analysis(training_id=training.id, kind="suite", result=found))


def compare_checkpoints(config: SuiteConfig, attempts: Sequence[Attempt], accepted: str, candidate: str) -> SuiteResult:
    """The test on the tasks of which both have an outcome."""
    before, now = (outcomes_by_position(attempts, name) for name in (accepted, candidate))
    pair = compare_pair(accepted, before, candidate, now)
    p_value = regression_p_value(pair.num_only_first, pair.num_only_second)
    return SuiteResult(
        pair=pair,
        p_value=p_value,
        power=power_of(config, pair.num_tasks),
        is_regression=p_value <= config.false_alarms,
    )


def power_of(config: SuiteConfig, num_tasks: int) -> float:
    """The probability that the fall is found, beside the churn."""
    better = config.churn / 2
    return regression_power(num_tasks, min(better + config.fall, 1.0 - better), better, config.false_alarms)


def may_accept(config: SuiteConfig, result: SuiteResult) -> bool:
    """Whether later checkpoints are compared with this one: not if faults have left too few tasks to find the fall."""
    return config.accept and not result.is_regression and result.power >= config.power


def require_answer(config: SuiteConfig, result: SuiteResult) -> None:
    """Raises `SamplingError` without an alarm among too few tasks to find the fall, which would be no all-clear."""
    if not result.is_regression and result.power < config.power:
        raise SamplingError(
            f"expected outcomes of enough tasks for power={config.power:g}, got {result.pair.num_tasks} tasks with "
            f"{result.power:.2f}, because faults took the others; run the same command again, which repeats those"
        )


def require_power(config: SuiteConfig) -> None:
    """Raises `ConfigError` if a fall would be found less often than promised; says how many tasks are enough."""
    if (power := power_of(config, config.num_tasks)) >= config.power:
        return
    counts = range(config.num_tasks, _ENOUGH_TASKS, 8)
    place = bisect_left(counts, config.power, key=lambda count: power_of(config, count))
    advice = f"set num_tasks={counts[place]}" if place < len(counts) else "raise fall, or lower power or churn"
    raise ConfigError(
        f"num_tasks: expected enough tasks to find a fall of {100 * config.fall:g} points with probability "
        f"{config.power:g}, got {config.num_tasks}, which find it with {power:.2f}; {advice}"
    )


def describe(config: SuiteConfig, result: SuiteResult | None, accepted: str) -> str:
    """The verdict for a person."""
    if result is None:
        return f"accepted: {accepted}, with which the next checkpoints are compared"
    verdict = "REGRESSION" if result.is_regression else "no regression"
    few = f", fewer than power={config.power:g} needs" if result.power < config.power else ""
    return (
        f"{pair_sentence(result.pair)}\n{verdict}: one-sided p = {result.p_value:.2g} (McNemar's test, exact; alarm at "
        f"{config.false_alarms:g}); {result.pair.num_tasks} tasks find a fall of {100 * config.fall:g} points with "
        f"probability {result.power:.2f} at a churn of {100 * config.churn:g} %{few}\naccepted: {accepted}"
    )


def _write(folder: Path, record: Mapping[str, object]) -> None:
    write_text(folder / "suite.json", json.dumps(record, indent=2) + "\n")


def _load(folder: Path) -> dict[str, Any]:
    path = folder / "suite.json"
    if not path.exists():
        return {"accepted": None, "models": {}, "results": []}
    with boundary(ConfigError, f"log_path: expected a suite that can be read in {str(path)!r}"):
        loaded: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return {"accepted": loaded["accepted"], "models": dict(loaded["models"]), "results": list(loaded["results"])}
