"""Runs an evaluation: makes the missing attempts, one model at a time, and writes the results."""

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from sqlalchemy import select

from cua_rl.agent.agent import RecordingAccess
from cua_rl.database.models import Training
from cua_rl.database.queries import rename_training
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.session import open_sessions
from cua_rl.evaluation.attempts import (
    Attempt,
    AttemptJob,
    missing_attempts,
    outcomes_by_position,
    parse_attempts,
    run_missing_attempts,
)
from cua_rl.evaluation.evaluate import compare_models, summarise
from cua_rl.evaluation.openai_endpoint import EndpointAccess
from cua_rl.events import EvaluationEnded, GroupEnded, RolloutSource, SourceStarted, TrainingStarted
from cua_rl.reporting.comparison import Comparison, print_comparison, write_comparison
from cua_rl.reporting.json_lines import append_records, read_records
from cua_rl.reporting.plots import write_comparison_plot
from cua_rl.reporting.progress import starting
from cua_rl.reporting.step_line import num_of
from cua_rl.rollout.group import GroupJob
from cua_rl.rollout.outcome import Judge
from cua_rl.run.decisions import evaluation_decisions, print_decisions, print_settings
from cua_rl.run.devices import OpenDevices, open_devices
from cua_rl.run.evaluation_config import EvaluateConfig
from cua_rl.run.judge import open_judge
from cua_rl.run.prepared_evaluation import (
    LocalModel,
    Model,
    PreparedEvaluation,
    RemoteModel,
    model_settings,
    prepare_evaluation,
    read_api_key,
    require_same_evaluation,
    with_earlier_models,
)
from cua_rl.run.recording import recorded, start_database
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
from cua_rl.types.rollout import AdapterRef, RolloutGroup


async def run_evaluation(config: EvaluateConfig) -> None:
    """Check the configuration, make the missing attempts, and write the results."""
    prepared = await prepare_evaluation(config)
    if config.dry_run:
        print_decisions(evaluation_decisions(prepared))
    if any(isinstance(model, LocalModel) and model.model_name is not None for model in prepared.models):
        print("\n".join(engine.memory.table() for engine in prepared.engines.values()), file=sys.stderr)
    if config.dry_run:
        check_log_directory(prepared.log_path, config.behavior_if_log_dir_exists)
        if config.behavior_if_log_dir_exists == "resume" and (prepared.log_path / "config.json").is_file():
            require_same_evaluation(load_settings(prepared.log_path, "log_path"), prepared.settings())
            print(f"resumes the evaluation in {prepared.log_path}", file=sys.stderr)
        print_settings(prepared.settings(), prepared.config)
        return
    for model in prepared.models:
        if isinstance(model, LocalModel):
            await asyncio.to_thread(fetch_weights, model.model_name, model.model_path)
    with prepare_log_directory(prepared.log_path, config.behavior_if_log_dir_exists) as folder:
        if folder.decision is Decision.SKIP:
            print(f"skipped: {folder.path} holds an earlier evaluation")
            return
        attempts = await _run(prepared, folder)
        comparison = await asyncio.to_thread(_write_results, prepared, folder, attempts)
        print_comparison(comparison, title=_title(prepared))


async def _run(prepared: PreparedEvaluation, folder: LogDirectory) -> list[Attempt]:
    """Start the components, and make the missing attempts; returns those of all models."""
    config, known = prepared.config, list[Attempt]()
    is_resumed = folder.decision is Decision.RESUME and folder.config_path.exists()
    before = load_settings(folder.path, "log_path") if is_resumed else prepared.settings()
    if is_resumed:
        require_same_evaluation(before, prepared.settings())
        known = _load_known(folder, prepared)
    async with AsyncExitStack() as stack:
        open_run_log(stack, folder)
        url = await start_database(stack, prepared.database_url, folder.path)
        await _follow_move(prepared, Path(str(before.get("log_path", prepared.log_path))), url)
        folder.write_config(with_earlier_models(before, prepared.settings()))
        models, tasks = num_of(len(prepared.models), "model"), num_of(len(prepared.tasks), "task")
        print(f"evaluation of {models} on {tasks} in {folder.path}", flush=True)
        if config.num_attempts > 1 and config.temperature == 0:
            print("temperature 0 makes a model's attempts at a task all alike: set one above 0 for pass@k", flush=True)
        judge = None if prepared.judge is None else await stack.enter_async_context(open_judge(prepared.judge))
        if prepared.judge is not None:
            (folder.path / "judge_prompt.txt").write_text(prepared.judge.prompt_text, encoding="utf-8")
        devices = await stack.enter_async_context(
            open_devices(prepared.devices, max_devices=config.max_concurrent_rollouts)
        )
        evaluation = Evaluation(prepared=prepared, url=url, devices=devices, judge=judge, known=known)
        await evaluation.run()
    return evaluation.attempts


def _load_known(folder: LogDirectory, prepared: PreparedEvaluation) -> list[Attempt]:
    """All attempts of attempts.jsonl, among them those that the evaluation that is resumed has made."""
    known = parse_attempts(read_records(folder.path / "attempts.jsonl"))
    for item in known:
        task = prepared.tasks[item.position] if item.position < len(prepared.tasks) else item
        if (item.task_id, item.seed) != (task.task_id, task.seed):
            raise ConfigError(
                f"expected task {task.task_id!r} with seed {task.seed} at place {item.position} of attempts.jsonl, got "
                f"{item.task_id!r} with {item.seed}: the task set has changed; start again with "
                "behavior_if_log_dir_exists=overwrite"
            )
    return known


async def _follow_move(prepared: PreparedEvaluation, before: Path, url: str) -> None:
    """After an evaluation's folder has been moved, rename the runs of all its models; a copy has runs of its own."""
    if before == prepared.log_path or (prepared.database_url is not None and await asyncio.to_thread(before.exists)):
        return
    async with open_sessions(url) as sessions, sessions.begin() as session:
        moved = (await session.scalars(select(Training).where(Training.log_path == str(before)))).all()
        for run in moved:
            name = f"{prepared.log_path.name}@{run.run_name.removeprefix(f'{before.name}@')}"
            await rename_training(session, run.id, name, str(prepared.log_path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Makes the missing attempts of each model. Rollouts go to the database; attempts.jsonl says which are complete."""

    prepared: PreparedEvaluation
    url: str
    """Of the database."""
    devices: OpenDevices
    judge: Judge | None
    known: list[Attempt]
    """All in attempts.jsonl, which may have had more tasks and attempts at each."""
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def attempts(self) -> list[Attempt]:
        """Those that the evaluation asks for."""
        num_tasks, num_attempts = len(self.prepared.tasks), self.prepared.config.num_attempts
        return [item for item in self.known if item.position < num_tasks and item.attempt < num_attempts]

    async def run(self) -> None:
        """Evaluate one model at a time; models from one folder share a server, started only if attempts are missing."""
        prepared = self.prepared
        for model in prepared.models:
            if isinstance(model, RemoteModel):
                access = EndpointAccess(model, read_api_key(model), prepared.params)
                await self._run_model(model, access, image_token_id=0)  # an endpoint tells no tokens
        for model_path, engine in prepared.engines.items():
            models = [
                item for item in prepared.models if isinstance(item, LocalModel) and item.model_path == model_path
            ]
            servers = make_servers(prepared.config.base_url, engine.server, prepared.log_path / "logs")
            async with AsyncExitStack() as stack:
                if any(missing_attempts(_attempt_job(prepared, item), self.known) for item in models):
                    async with starting(f"model server for {model_path.name}", partial(print, flush=True)):
                        await start_together(stack, *servers)
                for model in models:
                    access = _serve_model(prepared, model, servers)
                    await self._run_model(model, access, engine.renderer.image_token_id)

    async def _run_model(
        self, model: Model, access: AbstractAsyncContextManager[RecordingAccess], image_token_id: int
    ) -> None:
        """Evaluate a model, as a run of its own in the database; it is reached only if attempts are missing."""
        prepared, job, begun_at = self.prepared, _attempt_job(self.prepared, model), time.monotonic()
        num_missing = sum(map(len, missing_attempts(job, self.known).values()))
        progress, source = Progress(model=model.name, num_attempts=num_missing), job.group.source
        started = TrainingStarted(
            run_name=f"{prepared.log_path.name}@{model.name}",
            log_path=str(prepared.log_path),
            config=prepared.settings() | model_settings(model),
            first_step=0,
            total_steps=0,
            kept_group_ids=tuple({job.group_id(item.position) for item in self.known if item.model == model.name}),
        )
        async with DatabaseRecorder(self.url, image_token_id=image_token_id) as recorder, recorded(recorder, started):
            tasks, group_size = prepared.tasks, prepared.config.num_attempts
            await recorder.record(
                SourceStarted(source=source, tasks=tasks, group_size=group_size, policy_version=source.step)
            )

            async def keep(group: RolloutGroup, attempts: Sequence[Attempt]) -> None:
                await recorder.record(GroupEnded(source=source, group=group, advantages=None))
                await recorder.flush()
                async with self._writing:
                    records = [asdict(attempt) for attempt in attempts]
                    await asyncio.to_thread(append_records, prepared.log_path / "attempts.jsonl", records)
                self.known.extend(attempts)
                progress.count(attempts)

            if num_missing:
                async with access as opened:
                    runner = make_runner(
                        prepared.config,
                        self.devices,
                        opened,
                        reward=prepared.reward,
                        judge=self.judge,
                        log_folder=prepared.log_path / "logs" / "agents",
                        recorder=recorder,
                    )
                    await run_missing_attempts(runner, job, list(self.known), keep)
            outcomes = outcomes_by_position(self.attempts, model.name)
            metrics = summarise([*outcomes.values()]).metrics("held_out")
            await recorder.record(EvaluationEnded(source=source, metrics=metrics))
        print(f"{model.name}: {num_of(num_missing, 'attempt')} in {time.monotonic() - begun_at:.0f} s", flush=True)


@dataclass(slots=True)
class Progress:
    """Prints the progress of a model, ten times."""

    model: str
    num_attempts: int
    num_done: int = 0
    num_solved: int = 0

    def count(self, attempts: Sequence[Attempt]) -> None:
        before, self.num_done = self.num_done, self.num_done + len(attempts)
        self.num_solved += sum(attempt.success is True for attempt in attempts)
        if self.num_done * 10 // self.num_attempts > before * 10 // self.num_attempts:
            print(f"{self.model}: {self.num_done} of {self.num_attempts}, {self.num_solved} solved", flush=True)


def _attempt_job(prepared: PreparedEvaluation, model: Model) -> AttemptJob:
    adapter = model.adapter if isinstance(model, LocalModel) else None
    source = RolloutSource(phase="eval", step=adapter.policy_version if adapter else 0)
    group = GroupJob(source=source, group_size=prepared.config.num_attempts, params=prepared.params)
    return AttemptJob(model=model.name, tasks=prepared.tasks, group=group)


@asynccontextmanager
async def _serve_model(
    prepared: PreparedEvaluation, model: LocalModel, servers: Sequence[ModelServer]
) -> AsyncGenerator[Gateway]:
    """A gateway to the model, once its adapter is loaded and verified to change the base model."""
    renderer = prepared.engines[model.model_path].renderer
    async with SamplingClient(*servers, stall_timeout_s=prepared.config.devices.turn_timeout_s) as client:
        await compare_speed(prepared.config, client, renderer)
        if model.adapter is not None:
            adapter = AdapterRef(path=model.adapter.path, policy_version=model.adapter.policy_version)
            canary = Canary(tokens=canary_tokens(renderer), changes_model=model.adapter.changes_model)
            await client.publish(adapter, canary)
        async with open_gateway(prepared.config, client, renderer, prepared.params) as gateway:
            yield gateway


def _write_results(prepared: PreparedEvaluation, folder: LogDirectory, attempts: Sequence[Attempt]) -> Comparison:
    comparison = compare_models(attempts, [model.name for model in prepared.models])
    write_comparison(folder.path, comparison, title=_title(prepared), settings=prepared.settings())
    write_comparison_plot(folder.path / "results.png", comparison, title=_title(prepared))
    return comparison


def _title(prepared: PreparedEvaluation) -> str:
    config = prepared.config
    attempts = "one attempt each" if config.num_attempts == 1 else f"{config.num_attempts} attempts each"
    return f"{num_of(len(prepared.tasks), 'task')}, {attempts}, temperature {config.temperature:g}"
