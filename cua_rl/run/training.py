"""Runs a training: starts its components, trains, and records how it ended."""

import asyncio
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cua_rl.command_line.plain_config import plain_config
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.evaluation.evaluate import Evaluator
from cua_rl.events import Recorder, TrainingStarted
from cua_rl.host.processes import freeze_loaded_objects
from cua_rl.metrics import merge_metrics
from cua_rl.renderers.renderer import Renderer
from cua_rl.reporting.progress import starting
from cua_rl.reporting.run_report import RunReport
from cua_rl.reporting.step_line import num_of
from cua_rl.reporting.trace_folder import TraceRecorder
from cua_rl.rl import async_loop, sync_loop
from cua_rl.rl.async_loop import AsyncStart
from cua_rl.rl.curriculum import Memory, SuccessRateStream
from cua_rl.rl.served_policy import ServedPolicy, make_canary, make_probe
from cua_rl.rl.stages import LoopParts, LoopSettings, TaskStream
from cua_rl.rollout.limit import LimitedRunner, RolloutLimit, follow_load
from cua_rl.run.decisions import print_decisions, print_settings, training_decisions
from cua_rl.run.monitor import send_events, show_run
from cua_rl.run.preflight import wait_for_servers
from cua_rl.run.prepared_training import PreparedTraining, log_path, prepare_training
from cua_rl.run.recording import recorded, start_database
from cua_rl.run.reporting import finish_report, open_report, open_run_log
from cua_rl.run.resolve import rounding_limit
from cua_rl.run.resume import Resumed, follow_move, load_memory, load_resumed, load_weights
from cua_rl.run.rollouts import compare_speed, make_servers, sampling_params, start_engines
from cua_rl.run.tinker import TinkerSampler, TinkerTrainer, open_tinker
from cua_rl.run.trainer_nodes import open_trainer
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.earlier_attempt import (
    CHANGED,
    Curve,
    EarlierAttempt,
    curve_at,
    find_earlier_attempt,
    say_how_to_go_on,
)
from cua_rl.run_folder.log_directory import Checkpoint, Decision, LogDirectory, choose_behavior, prepare_log_directory
from cua_rl.run_folder.model_folder import fetch_weights
from cua_rl.sampling.canary import Canary, image_canary, text_canary
from cua_rl.sampling.client import SamplingClient
from cua_rl.task_loader import SEED_RANGES, TaskSet
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import TrainerConfig
from cua_rl.training.wire import AdapterPart
from cua_rl.types.errors import AdapterError
from cua_rl.types.rollout import AdapterRef, ModelInput
from cua_rl.workers.launch import Rollouts, open_local_devices, open_rollouts
from cua_rl.workers.worker import LINGER_S

logger = logging.getLogger(__name__)


async def run_training(config: CLIConfig) -> None:
    """Check the configuration, then train; returns when the run is complete and all its processes have ended."""
    started = time.monotonic()
    path, behavior = log_path(config), config.behavior_if_log_dir_exists
    behavior = behavior if config.dry_run else choose_behavior(path, behavior)
    attempt = find_earlier_attempt(path, behavior, config.checkpoints.resume_step, "train")
    config = attempt.complete(config) if attempt else config
    if behavior == "resume" and not config.dry_run:  # a scheduler may start it together with its servers
        await wait_for_servers(config)
    prepared = await prepare_training(config, reference=attempt.reference if attempt else None)
    settings = plain_config(config) | prepared.effective()
    if config.dry_run:
        print_decisions(training_decisions(prepared))
    if attempt is not None:
        print("\n".join(attempt.describe(config, settings)), file=sys.stderr)
        allows_changes = config.checkpoints.resume_with == "changes"
        settings[CHANGED] = attempt.record(config, settings, allows_changes=allows_changes)
    if config.model_name is not None:  # the demo needs no memory estimate
        print(prepared.memory.table(), file=sys.stderr)
    if config.dry_run:
        print_settings(settings, prepared.config)
        return
    if prepared.service is None:
        await asyncio.to_thread(fetch_weights, config.model_name, prepared.config.server.model_path)
    with prepare_log_directory(prepared.log_path, behavior) as folder:
        if folder.decision is Decision.SKIP:
            print(f"skipped: {folder.path} holds an earlier run")
            return
        # in this order: config.json may speak of later steps than there are, never of earlier ones
        folder.truncate_after(attempt.num_done if attempt and attempt.checkpoint else -1)
        folder.write_config(settings)
        with say_how_to_go_on(folder.path, "train"):
            await _run(prepared, folder, started, attempt, settings)


async def _run(
    prepared: PreparedTraining,
    folder: LogDirectory,
    started: float,
    attempt: EarlierAttempt | None,
    stored: Mapping[str, Any],
) -> None:
    """Start the components, train, and record how the run ended."""
    checkpoint = attempt.checkpoint if attempt else None
    num_done = checkpoint.step if checkpoint else 0
    first_step, curve = num_done + 1, curve_at(stored, prepared.config.max_steps)
    async with AsyncExitStack() as stack:
        open_run_log(stack, folder)
        url = await start_database(stack, prepared.database_url, folder.path)
        if attempt is not None:
            await follow_move(attempt, prepared.run_name, url, is_own=prepared.database_url is None)
        image_token_id = prepared.renderer.image_token_id
        own = await stack.enter_async_context(DatabaseRecorder(url, image_token_id=image_token_id, linger_s=LINGER_S))
        recorder = await send_events(stack, own, prepared.monitor, folder.path, image_token_id)
        if prepared.config.trace:
            recorder = await stack.enter_async_context(TraceRecorder(recorder, folder.path / "trace"))
        report = open_report(stack, prepared, folder, first_step, curve)
        shown_at = await show_run(stack, prepared.config.monitor, url, folder.path)
        if shown_at is not None:
            report.display.note(f"monitor at {shown_at}")
        resumed = await load_resumed(prepared.config, folder, prepared.run_name, num_done, url, curve)
        event = TrainingStarted(
            run_name=prepared.run_name,
            log_path=str(folder.path),
            config=stored,
            first_step=first_step,
            total_steps=prepared.config.max_steps,
            kept_group_ids=resumed.kept_group_ids,
        )
        async with recorded(recorder, event):
            async with starting("devices", report.display.status):
                devices = await open_local_devices(stack, prepared)
            memory = await load_memory(prepared.config, folder, num_done, own, url)
            async with starting("model server and trainer", report.display.status):
                engine = await _start_engine(stack, prepared, folder, checkpoint)
            urls = [url for url, *_ in engine.sampler.addresses]
            report.display.note(f"samples from {num_of(len(urls), 'model server')}: {', '.join(urls)}")
            rollouts = await open_rollouts(stack, prepared, engine.sampler, recorder, own, url, devices)
            ready = time.monotonic()
            report.display.begin_steps()
            settings = _loop_settings(prepared, first_step, resumed, curve)
            parts = _parts(prepared, folder, engine, rollouts, recorder, report, memory)
            await run_loop(prepared.config, settings, parts, resumed.start, engine.sampler)
    await finish_report(report, prepared, folder, setup_time_s=ready - started, train_time_s=time.monotonic() - ready)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The running trainer and sampler."""

    trainer: TrainingClient | TinkerTrainer
    sampler: SamplingClient | TinkerSampler


async def _start_engine(
    stack: AsyncExitStack, prepared: PreparedTraining, folder: LogDirectory, checkpoint: Checkpoint | None
) -> Engine:
    """Start model servers and trainer, and load the checkpoint to resume from."""
    config, logs = prepared.config, folder.path / "logs"
    if prepared.service is not None:
        opened = open_tinker(prepared.service, config.trainer, prepared.renderer)
        remote, answering = await stack.enter_async_context(opened)
        if checkpoint is not None:
            await remote.load_state(checkpoint.state_path)
        return Engine(trainer=remote, sampler=answering)
    servers = make_servers(config.base_url, config.server, logs)
    trainer = await open_trainer(stack, config.trainer, config.model_name, logs / "trainer.log")
    await start_engines(stack, servers, trainer, is_shared=prepared.memory.gpus.is_shared)
    await load_weights(trainer, prepared, folder, checkpoint, needs_reference=prepared.config.has_kl_term)
    stall_timeout_s = prepared.config.devices.turn_timeout_s
    sampler = await stack.enter_async_context(SamplingClient(*servers, stall_timeout_s=stall_timeout_s))
    await prove_adapters(
        trainer, sampler, config.trainer, prepared.renderer, rounding_limit(config), prepared.log_path / "probe"
    )
    await compare_speed(prepared.config, sampler, prepared.renderer)
    return Engine(trainer=trainer, sampler=sampler)


async def prove_adapters(
    trainer: TrainingClient,
    sampler: SamplingClient,
    settings: TrainerConfig,
    renderer: Renderer,
    limit: float,
    folder: Path,
) -> dict[AdapterPart, tuple[float, float]]:
    """Verify that the server applies adapters as the trainer does, before the first step.

    Each part of the model with an adapter gets a probe, verified on a prompt with an image. Returns for each part the
    change of the log-probabilities and its difference from the trainer's, nats. Raises `AdapterError` if it does not;
    `limit` is the difference that rounding explains.
    """
    parts: list[AdapterPart] = ["language"] if "language" in settings.lora_modules else []
    if settings.adapts_vision:
        parts.append("vision")
    proofs: dict[AdapterPart, tuple[float, float]] = {}
    for part in parts:
        try:
            adapter, canary = await make_probe(trainer, image_canary(renderer), limit, folder, part)
            proofs[part] = await sampler.probe(adapter, canary)
        except AdapterError as error:
            needs = "; vLLM needs --enable-tower-connector-lora for it" if part == "vision" else ""
            raise AdapterError(f"trainer.lora_modules: expected the server to adapt {part}{needs}; {error}") from error
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return proofs


def _loop_settings(prepared: PreparedTraining, first_step: int, resumed: Resumed, curve: Curve) -> LoopSettings:
    config = prepared.config
    return LoopSettings(
        config=config,
        params=sampling_params(config, config.temperature),
        image_token_id=prepared.renderer.image_token_id,
        first_step=first_step,
        num_tasks=len(prepared.train_tasks.templates),
        begins_curve=first_step == curve.after_step + 1,
        owed_evaluations=resumed.owed_evaluations,
        kept_groups={waiting.scored.group.index: waiting.scored.group for waiting in resumed.start.kept_groups},
    )


def _parts(
    prepared: PreparedTraining,
    folder: LogDirectory,
    engine: Engine,
    rollouts: Rollouts,
    recorder: Recorder,
    report: RunReport,
    memory: Memory,
) -> LoopParts:
    """Wire the components of the training loop."""
    config = prepared.config
    own_temperature = config.evaluation.eval_temperature
    evaluator = Evaluator(
        tasks=prepared.eval_tasks,
        runner=rollouts.for_evaluation,
        params=sampling_params(config, config.temperature if own_temperature is None else own_temperature),
        recorder=recorder,
        num_attempts=config.evaluation.eval_attempts,
    )
    return LoopParts(
        tasks=make_task_stream(config, prepared.train_tasks, memory),
        runner=rollouts.for_training,
        trainer=engine.trainer,
        policy=_served_policy(prepared, engine, folder, rollouts.announce),
        evaluator=evaluator if prepared.eval_tasks else None,
        recorder=recorder,
        log=report,
        memory=memory,
        device_metrics=lambda: merge_metrics(
            rollouts.device_metrics(), {"rollout/num_model_servers": float(len(engine.sampler.replicas))}
        ),
    )


def canary_prompt(prepared: PreparedTraining) -> ModelInput:
    """The prompt of the canary: with an image if the adapter affects the vision tower."""
    return (image_canary if prepared.config.trainer.adapts_vision else text_canary)(prepared.renderer)


def _served_policy(
    prepared: PreparedTraining,
    engine: Engine,
    folder: LogDirectory,
    announce: Callable[[], None],
) -> ServedPolicy:
    async def make() -> Canary | None:
        """None on a service, whose base model and random adapters cannot be asked for."""
        if not isinstance(engine.trainer, TrainingClient):
            return None
        return await make_canary(engine.trainer, canary_prompt(prepared), rounding_limit(prepared.config))

    async def publish(adapter: AdapterRef, canary: Canary | None) -> None:
        await engine.sampler.publish(adapter, canary)
        announce()

    def record_checkpoint(step: int, state_path: Path, sampler_path: Path, is_interim: bool) -> None:
        folder.record_checkpoint(
            Checkpoint(step=step, state_path=state_path, sampler_path=sampler_path, is_interim=is_interim)
        )
        folder.prune_checkpoints(prepared.config.checkpoints.keep_checkpoints, prepared.config.checkpoints.keep_every)

    return ServedPolicy(
        trainer=engine.trainer,
        make_canary=make,
        load_and_prove=publish,
        state_path=folder.state_path,
        sampler_path=folder.sampler_path,
        record_checkpoint=record_checkpoint,
    )


def make_task_stream(config: CLIConfig, tasks: TaskSet, memory: Memory) -> TaskStream:
    """Tasks sampled uniformly, or by running success rate."""
    if memory.rates is None:
        return tasks
    return SuccessRateStream(
        templates=tasks.templates, seed=config.seed, instance_seeds=SEED_RANGES[tasks.split], rates=memory.rates
    )


async def run_loop(
    config: CLIConfig,
    settings: LoopSettings,
    parts: LoopParts,
    start: AsyncStart,
    sampler: SamplingClient | TinkerSampler,
) -> None:
    """Train to the end; the number of concurrent rollouts follows the model server's load."""
    limit = RolloutLimit(
        largest=config.max_concurrent_rollouts, smallest=min(config.group_size, config.max_concurrent_rollouts)
    )
    freeze_loaded_objects()
    async with AsyncExitStack() as stack:
        follower = asyncio.create_task(follow_load(sampler.fetch_load, limit), name="follow-load")
        stack.push_async_callback(_end, follower)
        if config.max_steps_off_policy:
            await async_loop.train(settings, parts, max_lag=config.max_steps_off_policy, limit=limit, start=start)
        else:
            await sync_loop.train(settings, replace(parts, runner=LimitedRunner(parts.runner, limit)))


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
