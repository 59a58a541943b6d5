"""Rollout workers of a run, seen by the controller: the processes that it starts, and the address for others.

A run gives its workers its configuration, the addresses and keys of model servers and database, and a token. The token
and the keys of devices and judges are in the environment of the worker; no secret is on a command line.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil

import chz

from cua_rl.command_line.fields import walk_settings, with_values
from cua_rl.command_line.recipe import EXIT_CONFIG
from cua_rl.command_line.values import as_argument
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import Recorder
from cua_rl.host.http_server import serve_app
from cua_rl.host.masking import is_secret_name, make_key, remember_secrets
from cua_rl.host.processes import OwnedProcess
from cua_rl.reporting.step_line import num_of
from cua_rl.rollout.group import Runner
from cua_rl.run.devices import OpenDevices, open_devices
from cua_rl.run.rollouts import open_runners
from cua_rl.run.training_config import CLIConfig
from cua_rl.run.training_plan import PreparedTraining
from cua_rl.sampling.client import SamplingClient
from cua_rl.types.errors import ConfigError, CuaError, boundary
from cua_rl.workers.remote import RemoteRunner, ReportingRunner
from cua_rl.workers.worker_app import make_worker_app
from cua_rl.workers.worker_config import TOKEN_VARIABLE
from cua_rl.workers.worker_wire import WorkerSetup

logger = logging.getLogger(__name__)

Attempt = Callable[[], Awaitable[str]]
"""Runs a worker to its end and returns the cause; raises `ConfigError` if a restart would end the same way."""


_PAUSES_S = (0.0, 0.0, 2.0, 4.0, 8.0, 16.0)  # before each start: what a worker needs, such as the database, may be down


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What runs rollouts: in this process, or in workers."""

    for_training: Runner
    for_evaluation: Runner
    device_metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    announce: Callable[[], None] = lambda: None
    """Called after each publication."""


async def open_local_devices(stack: AsyncExitStack, plan: PreparedTraining) -> OpenDevices | None:
    """The devices of the run, unless workers have them."""
    if plan.config.has_workers:
        return None
    devices = open_devices(plan.devices, max_devices=plan.config.max_concurrent_rollouts)
    return await stack.enter_async_context(devices)


async def open_rollouts(
    stack: AsyncExitStack,
    plan: PreparedTraining,
    sampler: SamplingClient,
    recorder: Recorder,
    own: DatabaseRecorder,
    url: str,
    devices: OpenDevices | None,
) -> Rollouts:
    """What runs the rollouts, on `devices` or in workers.

    Workers write to the database themselves; if `recorder` is not only `own`, others learn of rollouts at their end.
    """
    if devices is not None:
        runners = open_runners(
            plan.config,
            devices,
            sampler,
            plan.renderer,
            plan.judge,
            reward=plan.reward,
            log_folder=plan.log_path / "logs" / "agents",
            recorder=recorder,
        )
        make = await stack.enter_async_context(runners)
        # of their own each: evaluations and training share the devices
        return Rollouts(for_training=make(), for_evaluation=make(), device_metrics=devices.pool.take_metrics)
    workers = await stack.enter_async_context(open_workers(plan, sampler, recorder, own, url))
    runner = workers if recorder is own else ReportingRunner(workers, recorder, plan.config.max_turns)
    return Rollouts(
        for_training=runner, for_evaluation=runner, device_metrics=workers.take_metrics, announce=workers.announce
    )


@asynccontextmanager
async def open_workers(
    plan: PreparedTraining,
    sampler: SamplingClient,
    recorder: Recorder,
    own: DatabaseRecorder,
    url: str,
    environ: Mapping[str, str] = os.environ,
) -> AsyncGenerator[RemoteRunner]:
    """Serve workers and start the run's own; they end with the block."""
    config = plan.config
    token = environ.get(TOKEN_VARIABLE) or make_key()
    remember_secrets({TOKEN_VARIABLE: token})
    await recorder.flush()  # from now on the row of this attempt has a key
    setup = make_setup(plan, sampler, own, url)
    runner = RemoteRunner(sampler, recorder, lambda: setup)
    async with AsyncExitStack() as stack:
        app = make_worker_app(runner, token)
        address = await stack.enter_async_context(serve_app(app, config.workers.host, config.workers.port or 0))
        logger.info("rollout workers register at %s", address)
        tasks = [asyncio.create_task(runner.watch(), name="watch-workers")]
        for number in range(1, config.rollout_workers + 1):
            name = f"{'ray' if config.workers.launcher == 'ray' else 'local'}-{number}"
            attempt = _make_attempt(plan, address, token, name, environ)
            tasks.append(asyncio.create_task(keep_alive(runner, name, attempt), name=f"worker-{name}"))
        stack.push_async_callback(_cancel, tasks)
        stack.callback(runner.end)
        yield runner


def make_setup(plan: PreparedTraining, sampler: SamplingClient, own: DatabaseRecorder, url: str) -> WorkerSetup:
    """What the workers of a run need to know."""
    if own.training_id is None:
        raise RuntimeError("expected the recorder to know its training; record TrainingStarted first")
    return WorkerSetup(
        settings=settings_of(_share(plan.config)),
        log_path=str(plan.log_path),
        database_url=url,
        training_id=own.training_id,
        attempt_id=own.attempt_id.hex,
        servers=sampler.addresses,
        namespace=sampler.namespace,
    )


def _share(config: CLIConfig) -> CLIConfig:
    """The configuration of one of the run's own workers: limits of services are shared evenly."""
    num, rate = max(1, config.rollout_workers), config.devices.device_creations_per_s
    devices = with_values(
        config.devices,
        device_creations_per_s=None if rate is None else rate / num,
        gym_parallel_creates=max(1, config.devices.gym_parallel_creates // num),
    )
    judge = with_values(config.judge, max_concurrent=ceil(config.judge.max_concurrent / num))
    return with_values(config, devices=devices, judge=judge)


def settings_of(config: CLIConfig) -> dict[str, str]:
    """All settings but the secret ones, each as an argument of a command line."""
    return {
        path: as_argument(value)
        for path, _, value in walk_settings(config)
        if not chz.is_chz(value) and not is_secret_name(path)
    }


def _make_attempt(plan: PreparedTraining, address: str, token: str, name: str, environ: Mapping[str, str]) -> Attempt:
    """How one of the run's own workers runs; they share the run's devices evenly."""
    config = plan.config
    num_slots = ceil(config.max_concurrent_rollouts / config.rollout_workers)
    settings = {"controller": address, "name": name, "device_slots": num_slots}
    secret = {TOKEN_VARIABLE: token} | ({"GBOX_API_KEY": config.gbox_api_key} if config.gbox_api_key else {})
    if config.workers.launcher == "ray":
        from cua_rl.workers.ray_workers import make_ray_attempt

        return make_ray_attempt(settings, secret)
    process = OwnedProcess(
        [
            *(sys.executable, "-m", "cua_rl.recipes.rollout_worker"),
            *(f"{key}={value}" for key, value in settings.items()),
        ],
        name=f"rollout worker {name}",
        log_path=plan.log_path / "logs" / f"worker-{name}.log",
        environment={**environ, **secret},
    )
    return partial(_attempt_process, process)


async def _attempt_process(process: OwnedProcess) -> str:
    async with process:
        status = await process.wait()
    tail = await asyncio.to_thread(process.log_tail, 10)
    if status == EXIT_CONFIG:
        raise ConfigError(f"{process.name} cannot work here; {process.log_path} ends:\n{tail}")
    logger.warning("%s ended status=%d; its log ends:\n%s", process.name, status, tail)
    return f"its process ended with status {status}"


async def keep_alive(runner: RemoteRunner, name: str, attempt: Attempt) -> None:
    """Run a worker until cancelled; one that ends is given up and started again, a few times in a run.

    An error of `attempt` stops the run.
    """
    why = ""
    for pause_s in _PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            with boundary(CuaError, f"cannot start rollout worker {name}"):
                why = await attempt()
        except CuaError as error:
            runner.fail(error)
            return
        runner.give_up(name, why)
    runner.fail(
        CuaError(
            f"expected rollout worker {name} to run, it ended {num_of(len(_PAUSES_S), 'time')}, the last time because "
            f"{why}; read its log"
        )
    )


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
