"""Runs an evaluation: makes the missing attempts, one model at a time, and writes the results."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from cua_rl.agent.agent import RecordingAccess
from cua_rl.evaluation.attempts import (
    Attempt,
    AttemptJob,
    attempt_record,
    missing_attempts,
    parse_attempts,
    run_missing_attempts,
)
from cua_rl.evaluation.compare import compare_models
from cua_rl.evaluation.openai_endpoint import EndpointAccess
from cua_rl.judge.judge import Judge
from cua_rl.reporting.comparison import Comparison, print_comparison, write_comparison
from cua_rl.reporting.json_lines import append_record, read_records
from cua_rl.reporting.plots import write_comparison_plot
from cua_rl.reporting.progress import starting
from cua_rl.reporting.step_line import num_of
from cua_rl.run.decisions import evaluation_decisions, print_decisions, print_settings
from cua_rl.run.devices import OpenDevices, open_devices
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.evaluation_plan import (
    LocalModel,
    Model,
    PreparedEvaluation,
    RemoteModel,
    plan_evaluation,
    read_api_key,
    require_same_evaluation,
)
from cua_rl.run.judge import open_judge
from cua_rl.run.reporting import open_run_log
from cua_rl.run.rollouts import compare_speed, make_runner, make_servers, open_gateway, start_together
from cua_rl.run_folder.log_directory import (
    Decision,
    LogDirectory,
    check_log_directory,
    load_settings,
    prepare_log_directory,
)
from cua_rl.run_folder.model_folder import fetch_weights
from cua_rl.sampling.canary import Canary, canary_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ModelServer
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import AdapterRef


async def run_evaluation(config: EvaluateConfig) -> None:
    """Check the configuration, make the missing attempts, and write the results."""
    plan = await plan_evaluation(config)
    if config.dry_run:
        print_decisions(evaluation_decisions(plan))
    if any(isinstance(model, LocalModel) and model.model_name is not None for model in plan.models):
        print("\n".join(engine.memory.table() for engine in plan.engines.values()), file=sys.stderr)
    if config.dry_run:
        check_log_directory(plan.log_path, config.behavior_if_log_dir_exists)
        if config.behavior_if_log_dir_exists == "resume" and (plan.log_path / "config.json").is_file():
            require_same_evaluation(load_settings(plan.log_path, "log_path"), plan.settings())
            print(f"resumes the evaluation in {plan.log_path}", file=sys.stderr)
        print_settings(plan.settings(), plan.config)
        return
    for model in plan.models:
        if isinstance(model, LocalModel):
            await asyncio.to_thread(fetch_weights, model.model_name, model.model_path)
    with prepare_log_directory(plan.log_path, config.behavior_if_log_dir_exists) as folder:
        if folder.decision is Decision.SKIP:
            print(f"skipped: {folder.path} holds an earlier evaluation")
            return
        known = _load_known(folder, plan)
        folder.write_config(plan.settings())
        record = AttemptFile(path=folder.path / "attempts.jsonl", attempts=known)
        print(
            f"evaluation of {num_of(len(plan.models), 'model')} on {num_of(len(plan.tasks), 'task')} in {folder.path}",
            flush=True,
        )
        if config.num_attempts > 1 and config.temperature == 0:
            print("temperature 0 makes a model's attempts at a task all alike: set one above 0 for pass@k", flush=True)
        async with AsyncExitStack() as stack:
            open_run_log(stack, folder)
            judge = None if plan.judge is None else await stack.enter_async_context(open_judge(plan.judge))
            if plan.judge is not None:
                (folder.path / "judge_prompt.txt").write_text(plan.judge.prompt_text, encoding="utf-8")
            devices = await stack.enter_async_context(
                open_devices(plan.devices, max_devices=config.max_concurrent_rollouts)
            )
            await _run_models(plan, folder, Surroundings(devices=devices, judge=judge), record)
        comparison = await asyncio.to_thread(_write_results, plan, folder, record.attempts)
        print_comparison(comparison, title=_title(plan))


def _load_known(folder: LogDirectory, plan: PreparedEvaluation) -> list[Attempt]:
    """Attempts already made by the evaluation that is resumed; none for a new one."""
    if folder.decision is not Decision.RESUME or not folder.config_path.exists():
        return []
    require_same_evaluation(load_settings(folder.path, "log_path"), plan.settings())
    known = parse_attempts(read_records(folder.path / "attempts.jsonl"))
    names = {model.name for model in plan.models}
    known = [
        item
        for item in known
        if item.model in names and item.position < len(plan.tasks) and item.attempt < plan.config.num_attempts
    ]
    for item in known:
        task = plan.tasks[item.position]
        if (item.task_id, item.seed) != (task.task_id, task.seed):
            raise ConfigError(
                f"expected task {task.task_id!r} with seed {task.seed} at place {item.position} of attempts.jsonl, got "
                f"{item.task_id!r} with {item.seed}: the task set has changed; start again with "
                "behavior_if_log_dir_exists=overwrite"
            )
    return known


@dataclass(slots=True)
class AttemptFile:
    """attempts.jsonl: every attempt is durable before it counts."""

    path: Path
    attempts: list[Attempt]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def keep(self, attempt: Attempt) -> None:
        async with self._lock:
            await asyncio.to_thread(append_record, self.path, attempt_record(attempt))
        self.attempts.append(attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Devices for the attempts, and the judge of tasks without a validator."""

    devices: OpenDevices
    judge: Judge | None


async def _run_models(
    plan: PreparedEvaluation, folder: LogDirectory, around: Surroundings, record: AttemptFile
) -> None:
    """Evaluate one model at a time; models from one folder share a server, started only if attempts are missing."""
    for model in plan.models:
        if isinstance(model, RemoteModel):
            access = EndpointAccess(model.endpoint, read_api_key(model), plan.params)
            async with access:
                await _run_model(plan, model, access, around, record)
    for model_path in plan.engines:
        models = [item for item in plan.models if isinstance(item, LocalModel) and item.model_path == model_path]
        if not any(missing_attempts(_attempt_plan(plan, item), record.attempts) for item in models):
            continue
        servers = make_servers(plan.config.base_url, plan.engines[model_path].server, folder.path / "logs")
        async with AsyncExitStack() as stack:
            async with starting(f"model server for {model_path.name}", partial(print, flush=True)):
                await start_together(stack, *servers)
            for model in models:
                async with _serve_model(plan, model, servers) as gateway:
                    await _run_model(plan, model, gateway, around, record)


async def _run_model(
    plan: PreparedEvaluation, model: Model, access: RecordingAccess, around: Surroundings, record: AttemptFile
) -> None:
    attempt_plan = _attempt_plan(plan, model)
    num_missing, started = len(missing_attempts(attempt_plan, record.attempts)), time.monotonic()
    progress = Progress(model=model.name, num_attempts=num_missing)

    async def keep(attempt: Attempt) -> None:
        await record.keep(attempt)
        progress.count(attempt)

    runner = make_runner(
        plan.config,
        around.devices,
        access,
        reward=plan.reward,
        judge=around.judge,
        log_folder=plan.log_path / "logs" / "agents",
    )
    await run_missing_attempts(runner, attempt_plan, list(record.attempts), keep)
    print(f"{model.name}: {num_of(num_missing, 'attempt')} in {time.monotonic() - started:.0f} s", flush=True)


@dataclass(slots=True)
class Progress:
    """Prints the progress of a model, ten times."""

    model: str
    num_attempts: int
    num_done: int = 0
    num_solved: int = 0

    def count(self, attempt: Attempt) -> None:
        self.num_done += 1
        self.num_solved += attempt.success is True
        if self.num_done * 10 // self.num_attempts > (self.num_done - 1) * 10 // self.num_attempts:
            print(f"{self.model}: {self.num_done} of {self.num_attempts}, {self.num_solved} solved", flush=True)


def _attempt_plan(plan: PreparedEvaluation, model: Model) -> AttemptJob:
    return AttemptJob(model=model.name, tasks=plan.tasks, num_attempts=plan.config.num_attempts, params=plan.params)


@asynccontextmanager
async def _serve_model(
    plan: PreparedEvaluation, model: LocalModel, servers: Sequence[ModelServer]
) -> AsyncGenerator[Gateway]:
    """A gateway to the model, once its adapter is loaded and verified to change the base model."""
    renderer = plan.engines[model.model_path].renderer
    async with SamplingClient(*servers, stall_timeout_s=plan.config.devices.turn_timeout_s) as client:
        await compare_speed(plan.config, client, renderer)
        if model.adapter is not None:
            adapter = AdapterRef(path=model.adapter.path, policy_version=model.adapter.policy_version)
            canary = Canary(tokens=canary_tokens(renderer), changes_model=model.adapter.changes_model)
            await client.publish(adapter, canary)
        async with open_gateway(plan.config, client, renderer, plan.params) as gateway:
            yield gateway


def _write_results(plan: PreparedEvaluation, folder: LogDirectory, attempts: Sequence[Attempt]) -> Comparison:
    comparison = compare_models(attempts, [model.name for model in plan.models])
    write_comparison(folder.path, comparison, title=_title(plan), settings=plan.settings())
    write_comparison_plot(folder.path / "results.png", comparison, title=_title(plan))
    return comparison


def _title(plan: PreparedEvaluation) -> str:
    config = plan.config
    attempts = "one attempt each" if config.num_attempts == 1 else f"{config.num_attempts} attempts each"
    return f"{num_of(len(plan.tasks), 'task')}, {attempts}, temperature {config.temperature:g}"
