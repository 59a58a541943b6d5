"""Train a vision computer-use agent: `python -m cua_rl.recipes.train key=value ...`.

With no model named, this is the embedded demo: a tiny Qwen3-VL on a simulated phone, a database of its own, and vLLM on
whatever the machine has.
"""

import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.config import LoraConfig, ServerConfig, TrainerConfig
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.devices.pool import DeviceSource
from cua_rl.evaluation.evaluate import Evaluator
from cua_rl.events import Recorder, TrainingEnded, TrainingStarted
from cua_rl.judge.judge import Judge
from cua_rl.recipes.agents import make_agent, open_gateway
from cua_rl.recipes.curriculum import load_memory, make_task_stream
from cua_rl.recipes.judge_config import open_judge
from cua_rl.recipes.learning import train_step_settings
from cua_rl.recipes.log_directory import Checkpoint, Decision, LogDirectory, check_log_directory, prepare_log_directory
from cua_rl.recipes.model_folder import fetch_weights
from cua_rl.recipes.plain_config import plain_config
from cua_rl.recipes.resume import Resumed, follow_move, load_resumed
from cua_rl.recipes.rollout_config import PAID_DEVICES
from cua_rl.recipes.run_devices import OpenDevices, open_devices
from cua_rl.recipes.run_loop import run_loop
from cua_rl.recipes.run_monitor import send_events, show_run
from cua_rl.recipes.run_plan import RunPlan, plan_run
from cua_rl.recipes.run_recipe import run_recipe
from cua_rl.recipes.run_reporting import finish_report, open_report, open_run_log
from cua_rl.recipes.train_config import EMBEDDED_DEMO, CLIConfig
from cua_rl.reporting.run_report import RunReport
from cua_rl.reporting.trace_folder import TraceRecorder
from cua_rl.rl.memory import Memory
from cua_rl.rl.served_policy import ServedPolicy, make_canary
from cua_rl.rl.sync_loop import LoopSettings, Parts
from cua_rl.rollout.run import RolloutRunner
from cua_rl.sampling.canary import canary_tokens
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer, VllmServer
from cua_rl.training.client import TrainingClient
from cua_rl.types import SamplingParams

if TYPE_CHECKING:
    from cua_rl.database.recorder import DatabaseRecorder

__all__ = ["CLIConfig", "cli_main"]

logger = logging.getLogger(__name__)


async def cli_main(config: CLIConfig) -> None:
    """Check the configuration, then run it; returns when the run is complete and everything it owned is gone."""
    started = time.monotonic()
    plan = await plan_run(config)
    if config.dry_run:
        check_log_directory(plan.log_path, config.behavior_if_log_dir_exists)
        print(json.dumps(plain_config(config) | plan.effective(), indent=2))
        return
    await asyncio.to_thread(fetch_weights, config.model_name, plan.model_path)
    with prepare_log_directory(plan.log_path, config.behavior_if_log_dir_exists) as folder:
        if folder.decision is Decision.SKIP:
            print(f"skipped: {folder.path} holds an earlier run")
            return
        folder.write_config(plain_config(config) | plan.effective())
        await _run(plan, folder, started)


async def _run(plan: RunPlan, folder: LogDirectory, started: float) -> None:
    """Start what the run needs, train, and record how it ended."""
    checkpoint = folder.latest_checkpoint() if folder.decision is Decision.RESUME else None
    num_done = checkpoint.step if checkpoint else 0
    first_step = num_done + 1
    folder.truncate_after(num_done)
    async with AsyncExitStack() as stack:
        open_run_log(stack, folder)
        url = await _open_database(stack, plan, folder)
        if folder.decision is Decision.RESUME and plan.database_url is None:
            await follow_move(folder, plan.run_name, url)
        own = await _open_recorder(stack, plan, url)
        recorder = await send_events(stack, own, plan.monitor, folder.path, plan.renderer.image_token_id)
        if plan.config.trace:
            recorder = await stack.enter_async_context(TraceRecorder(recorder, folder.path / "trace"))
        report = open_report(stack, plan, folder, first_step)
        shown_at = await show_run(stack, plan.config, url, folder.path)
        if shown_at is not None:
            report.display.note(f"monitor at {shown_at}")
        resumed = await load_resumed(plan.config, folder, plan.run_name, num_done, url)
        await recorder.record(_training_started(plan, folder, first_step, resumed))
        try:
            devices = await stack.enter_async_context(
                open_devices(plan.config, plan.devices, max_devices=max(_max_rollouts(plan.config)))
            )
            report.display.status("starting model server and trainer")
            memory = await load_memory(plan.config, folder, num_done, own, url)
            engine = await _start_engine(stack, plan, folder, checkpoint)
            ready = time.monotonic()
            report.display.begin_steps()
            settings = replace(_loop_settings(plan, first_step), owed_evaluations=resumed.owed_evaluations)
            parts = _parts(plan, folder, engine, devices, recorder, report, memory)
            await run_loop(plan.config, settings, parts, resumed.start, engine.sampler)
        except BaseException as error:
            await asyncio.shield(recorder.record(_training_ended(error)))
            raise
        await recorder.record(TrainingEnded(status="completed"))
        await recorder.flush()
    await finish_report(report, plan, folder, setup_time_s=ready - started, train_time_s=time.monotonic() - ready)


async def _open_database(stack: AsyncExitStack, plan: RunPlan, folder: LogDirectory) -> str:
    """URL of the database that the environment names, or of one of our own in the run's folder; migrated."""
    # SQLAlchemy's models and Alembic take as long to import as all else: only a run that really starts pays for them
    from cua_rl.database.migrations import migrate

    url = plan.database_url
    if url is None:
        log_path = folder.path / "logs" / "postgres.log"
        url = (await stack.enter_async_context(EmbeddedPostgres(folder.path / "postgres", log_path))).url
    await migrate(url)
    return url


async def _open_recorder(stack: AsyncExitStack, plan: RunPlan, url: str) -> "DatabaseRecorder":
    from cua_rl.database.recorder import DatabaseRecorder

    return await stack.enter_async_context(DatabaseRecorder(url, image_token_id=plan.renderer.image_token_id))


def _training_started(plan: RunPlan, folder: LogDirectory, first_step: int, resumed: Resumed) -> TrainingStarted:
    return TrainingStarted(
        run_name=plan.run_name,
        log_path=str(folder.path),
        config=plain_config(plan.config) | plan.effective(),
        first_step=first_step,
        total_steps=plan.config.max_steps,
        kept_group_ids=resumed.kept_group_ids,
    )


def _training_ended(error: BaseException) -> TrainingEnded:
    is_cancelled = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
    return TrainingEnded(status="cancelled" if is_cancelled else "failed", error=f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """Trainer, sampler and the gateway in front of it, running, and the judge, if there is one."""

    trainer: TrainingClient
    sampler: SamplingClient
    gateway: Gateway
    judge: Judge | None


async def _start_engine(
    stack: AsyncExitStack, plan: RunPlan, folder: LogDirectory, checkpoint: Checkpoint | None
) -> Engine:
    """Start model server and trainer; load the checkpoint that the run goes on from.

    They start side by side, but one after the other where they share a GPU: vLLM measures how much of it is free.
    """
    server = _make_server(plan, folder)
    trainer = TrainingClient(_trainer_config(plan), folder.path / "logs" / "trainer.log")
    if plan.gpus.is_shared:
        await stack.enter_async_context(server)
        await stack.enter_async_context(trainer)
    else:
        async with asyncio.TaskGroup() as starting:
            starting.create_task(stack.enter_async_context(server), name="start-server")
            starting.create_task(stack.enter_async_context(trainer), name="start-trainer")
    await _load_weights(trainer, plan, folder, checkpoint)
    sampler = await stack.enter_async_context(SamplingClient(server))
    gateway = await stack.enter_async_context(
        open_gateway(plan.config, sampler, plan.renderer, _sampling_params(plan.config))
    )
    judge = None if plan.judge is None else await stack.enter_async_context(open_judge(plan.judge))
    return Engine(trainer=trainer, sampler=sampler, gateway=gateway, judge=judge)


async def _load_weights(
    trainer: TrainingClient, plan: RunPlan, folder: LogDirectory, checkpoint: Checkpoint | None
) -> None:
    """Load the weights that the run continues from, and the reference model of KL terms.

    The reference is what the first attempt started from. A copy stays in the run's folder, so that a resumed run has
    the same one even if the original folder has changed.
    """
    reference = folder.path / "reference"
    if checkpoint is not None:
        await trainer.load_state(checkpoint.state_path)
    elif plan.checkpoint_path is not None:
        await trainer.load_state(plan.checkpoint_path, with_optimizer=False)
        await trainer.save_weights_for_sampler(reference)
    if plan.checkpoint_path is not None and train_step_settings(plan.config).has_kl_term:
        await trainer.load_reference(reference if reference.is_dir() else plan.checkpoint_path)


def _make_server(plan: RunPlan, folder: LogDirectory) -> VllmServer | ExternalServer:
    config = plan.config
    if config.base_url is not None:
        return ExternalServer(config.base_url)
    return VllmServer(
        ServerConfig(
            model_path=plan.model_path,
            max_lora_rank=plan.max_lora_rank,
            max_model_len=config.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_images=plan.max_images,
            gpu_memory_utilization=plan.gpus.gpu_memory_utilization,
            gpus=plan.gpus.server_gpus,
            tensor_parallel=plan.gpus.tensor_parallel,
            data_parallel=plan.gpus.data_parallel,
            kv_cache_gib=config.kv_cache_gib,
            start_timeout_s=config.server_start_timeout_s,
            port=config.server_port,
        ),
        folder.path / "logs" / "vllm.log",
    )


def _trainer_config(plan: RunPlan) -> TrainerConfig:
    config = plan.config
    return TrainerConfig(
        model_path=plan.model_path,
        lora=LoraConfig(rank=config.lora_rank, alpha=config.lora_alpha, seed=config.seed),
        dtype=config.trainer_dtype,
        micro_batch_tokens=config.micro_batch_tokens,
        gradient_checkpointing=config.gradient_checkpointing,
        num_processes=plan.gpus.num_trainer_processes,
        gpus=plan.gpus.trainer_gpus,
        sharding=config.trainer_sharding,
        vision_cache_gib=config.vision_cache_gib,
        seed=config.seed,
    )


def _loop_settings(plan: RunPlan, first_step: int) -> LoopSettings:
    config = plan.config
    return LoopSettings(
        first_step=first_step,
        max_steps=config.max_steps,
        groups_per_batch=config.groups_per_batch,
        group_size=config.group_size,
        params=_sampling_params(config),
        advantages=config.advantages,
        train=train_step_settings(config),
        eval_every=config.eval_every,
        save_every=config.save_every,
        image_token_id=plan.renderer.image_token_id,
        num_groups_to_log=config.num_groups_to_log,
        has_baseline=not config.skip_baseline,
        min_group_size=config.min_group_size,
        max_refill_factor=config.max_refill_factor if config.refill_groups else 1,
    )


def _sampling_params(config: CLIConfig) -> SamplingParams:
    return SamplingParams(max_tokens=config.max_tokens, temperature=config.temperature, seed=config.sampling_seed)


def _eval_params(config: CLIConfig) -> SamplingParams:
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return SamplingParams(max_tokens=config.max_tokens, temperature=temperature, seed=config.sampling_seed)


def _max_rollouts(config: CLIConfig) -> tuple[int, int]:
    """Most rollouts at a time of training, and of an evaluation."""
    return config.max_concurrent_rollouts, config.max_concurrent_eval_rollouts or config.max_concurrent_rollouts


def _parts(
    plan: RunPlan,
    folder: LogDirectory,
    engine: Engine,
    devices: OpenDevices,
    recorder: Recorder,
    report: RunReport,
    memory: Memory,
) -> Parts:
    """Put the run together: who makes devices, who acts, who judges, who remembers."""
    config = plan.config
    train_share, eval_share = (devices.pool.share(max_devices) for max_devices in _max_rollouts(config))
    evaluator = Evaluator(
        plan.eval_tasks,
        runner=_make_runner(plan, engine, recorder, devices, eval_share),
        params=_eval_params(config),
        recorder=recorder,
        num_attempts=config.eval_attempts,
    )
    return Parts(
        tasks=make_task_stream(config, plan.train_tasks, memory),
        runner=_make_runner(plan, engine, recorder, devices, train_share),
        trainer=engine.trainer,
        policy=_served_policy(plan, engine, folder),
        evaluator=evaluator if plan.eval_tasks else None,
        recorder=recorder,
        log=report,
        memory=memory,
        device_metrics=devices.pool.take_metrics,
    )


def _make_runner(
    plan: RunPlan, engine: Engine, recorder: Recorder, devices: OpenDevices, share: DeviceSource
) -> RolloutRunner:
    config = plan.config
    insider = GBoxAgent(history=plan.history, grounder=devices.grounder)
    return RolloutRunner(
        devices=share,
        gateway=engine.gateway,
        agent=make_agent(config, insider, plan.log_path / "logs" / "agents"),
        reward=plan.reward,
        watch_goal=config.watch_goal,
        judge=engine.judge,
        judge_all=config.judge == "compare",
        recorder=recorder,
        max_turns=config.max_turns,
        time_limits=devices.time_limits,
    )


def _served_policy(plan: RunPlan, engine: Engine, folder: LogDirectory) -> ServedPolicy:
    tokens = canary_tokens(plan.renderer)

    def record_checkpoint(step: int, state_path: Path, sampler_path: Path) -> list[int]:
        folder.record_checkpoint(Checkpoint(step=step, state_path=state_path, sampler_path=sampler_path))
        return folder.prune_checkpoints(plan.config.keep_checkpoints, plan.config.keep_every)

    return ServedPolicy(
        trainer=engine.trainer,
        make_canary=partial(make_canary, engine.trainer, tokens),
        load_and_prove=engine.sampler.publish,
        state_path=folder.state_path,
        sampler_path=folder.sampler_path,
        record_checkpoint=record_checkpoint,
    )


SHOWN_PRESETS = {
    "Without model_name, the embedded demo presets": EMBEDDED_DEMO,
    "With GBox boxes or a gym": PAID_DEVICES,
    "With box_type=linux": {"device": "gbox"},
}
"""What replaces defaults, for --help and docs/settings.md."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line; the embedded demo if no model is named."""
    return run_recipe(CLIConfig, cli_main, argv, SHOWN_PRESETS)


if __name__ == "__main__":
    sys.exit(main())
