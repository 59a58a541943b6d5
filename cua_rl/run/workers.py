"""Rollout workers of a run: the processes that the controller starts, the address for others, and what a worker opens.

What a run hands to its workers is its configuration, the addresses and keys of model servers and database, and a token.
The token, like keys of devices and judges, is in the environment of the worker; no secret is on a command line.
"""

import asyncio
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from uuid import UUID
from zlib import crc32

import chz

from cua_rl.agent.history import make_history
from cua_rl.command_line.parsing import GivenSettings, make_config
from cua_rl.command_line.recipe import EXIT_CONFIG
from cua_rl.command_line.values import as_argument
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.rows import Scope
from cua_rl.database.session import check_connection, database_url
from cua_rl.database.writer import write_worker_events
from cua_rl.errors import ConfigError, CuaError, DatabaseError, boundary
from cua_rl.events import Recorder
from cua_rl.http_server import serve_app
from cua_rl.masking import is_secret_name, remember_secrets
from cua_rl.processes import OwnedProcess
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rollout.group import Runner
from cua_rl.rollout.remote import RemoteRunner, ReportingRunner
from cua_rl.rollout.run import RolloutPlan
from cua_rl.rollout.worker import ControllerLink, GivenUp, Workplace, open_link, work
from cua_rl.rollout.worker_app import make_worker_app
from cua_rl.rollout.worker_wire import PlannedRollout, WorkerSetup
from cua_rl.run.judge import open_judge, plan_judge
from cua_rl.run.model_folder import find_model, make_image_renderer
from cua_rl.run.rollouts import freeze_loaded_objects, make_runner, open_gateway
from cua_rl.run.site import OpenDevices, make_site, open_devices
from cua_rl.run.training_config import CLIConfig
from cua_rl.run.training_plan import RunPlan, load_task_sets, sampling_params
from cua_rl.run.worker_config import TOKEN_VARIABLE, WorkerConfig
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ExternalServer
from cua_rl.settings import walk_settings, with_values
from cua_rl.task_loader import TaskSet

logger = logging.getLogger(__name__)

Attempt = Callable[[], Awaitable[str]]
"""Runs a worker to its end and says what ended it; raises `ConfigError` if it would always end like this."""

LINGER_S = 1.0
"""How long events wait for others, in workers and their controller, while nobody waits for them in the database."""
FLUSH_LINGER_S = 0.1
"""How long they do in a worker once a rollout has ended: others end at that time too."""

_MAX_RESTARTS = 5
# three minutes: as long as a model server that died takes to load its weights again
_MODEL_ATTEMPTS, _SERVERS_S = 40, 180.0
_SERVER_RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What runs rollouts: in this process, or in workers."""

    for_training: Runner
    for_evaluation: Runner
    device_metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    announce: Callable[[], None] = lambda: None
    """Called after each publication."""


async def open_local_devices(stack: AsyncExitStack, plan: RunPlan) -> OpenDevices | None:
    """The devices of the run, unless workers have them."""
    if plan.config.has_workers:
        return None
    devices = open_devices(plan.config, plan.site, max_devices=plan.config.max_concurrent_rollouts)
    return await stack.enter_async_context(devices)


async def open_rollouts(
    stack: AsyncExitStack,
    plan: RunPlan,
    sampler: SamplingClient,
    recorder: Recorder,
    own: DatabaseRecorder,
    url: str,
    devices: OpenDevices | None,
) -> Rollouts:
    """What runs the rollouts, on `devices` or in workers.

    Workers write to the database themselves; if `recorder` is not only `own`, others hear of rollouts at their end.
    """
    if devices is not None:
        return await _local_rollouts(stack, plan, sampler, devices, recorder)
    workers = await stack.enter_async_context(open_workers(plan, sampler, recorder, own, url))
    runner = workers if recorder is own else ReportingRunner(workers, recorder, plan.config.max_turns)
    return Rollouts(
        for_training=runner, for_evaluation=runner, device_metrics=workers.take_metrics, announce=workers.announce
    )


async def _local_rollouts(
    stack: AsyncExitStack, plan: RunPlan, sampler: SamplingClient, devices: OpenDevices, recorder: Recorder
) -> Rollouts:
    """Runners in this process; evaluations and training share the devices."""
    gateway = await stack.enter_async_context(
        open_gateway(plan.config, sampler, plan.renderer, sampling_params(plan.config, plan.config.temperature))
    )
    judge = None if plan.judge is None else await stack.enter_async_context(open_judge(plan.judge))
    make = partial(
        make_runner,
        plan.config,
        devices,
        gateway,
        history=plan.history,
        reward=plan.reward,
        judge=judge,
        log_folder=plan.log_path / "logs" / "agents",
        recorder=recorder,
        watch_goal=plan.config.sampling.watch_goal,
    )
    return Rollouts(for_training=make(), for_evaluation=make(), device_metrics=devices.pool.take_metrics)


@asynccontextmanager
async def open_workers(
    plan: RunPlan,
    sampler: SamplingClient,
    recorder: Recorder,
    own: DatabaseRecorder,
    url: str,
    environ: Mapping[str, str] = os.environ,
) -> AsyncGenerator[RemoteRunner]:
    """Serve workers and start the run's own; they end with the block."""
    config = plan.config
    token = environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(32)
    remember_secrets({TOKEN_VARIABLE: token})
    await recorder.flush()  # from now on the row of this attempt has a key
    setup = make_setup(plan, sampler, own, url)
    runner = RemoteRunner(sampler, recorder, lambda: setup, lease_s=config.workers.silence_s)
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


def make_setup(plan: RunPlan, sampler: SamplingClient, own: DatabaseRecorder, url: str) -> WorkerSetup:
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


def _make_attempt(plan: RunPlan, address: str, token: str, name: str, environ: Mapping[str, str]) -> Attempt:
    """How a worker of the run's own is run; it shares the run's devices evenly with the others."""
    config = plan.config
    num_slots = ceil(config.max_concurrent_rollouts / config.rollout_workers)
    settings = {"controller": address, "name": name, "device_slots": num_slots}
    secret = {TOKEN_VARIABLE: token} | ({"GBOX_API_KEY": config.gbox_api_key} if config.gbox_api_key else {})
    if config.workers.launcher == "ray":
        from cua_rl.run.ray_workers import make_ray_attempt

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
    for _ in range(_MAX_RESTARTS + 1):
        try:
            with boundary(CuaError, f"cannot start rollout worker {name}"):
                why = await attempt()
        except CuaError as error:
            runner.fail(error)
            return
        runner.give_up(name, why)
    runner.fail(
        CuaError(
            f"expected rollout worker {name} to run, it ended {_MAX_RESTARTS + 1} times, the last time because {why}; "
            "read its log"
        )
    )


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def run_worker(config: WorkerConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Work for the controller until its run is over; raises `ConfigError` if there is none for a while."""
    token = environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(f"expected {TOKEN_VARIABLE} in the environment, got none; set it as the run has it")
    async with open_link(config.controller, token, config.patience_s) as link:
        name = config.name or f"{socket.gethostname()}-{os.getpid()}"
        setup: WorkerSetup | None = (await link.register(name, config.device_slots)).setup
        while setup is not None:
            setup = await _work_for_run(config, name, link, setup, environ)
    logger.info("the run is over")


async def _work_for_run(
    config: WorkerConfig, name: str, link: ControllerLink, setup: WorkerSetup, environ: Mapping[str, str]
) -> WorkerSetup | None:
    """Work for one attempt of a run; returns the setup of the next one, None if the run is over."""
    following: WorkerSetup | None = setup
    try:
        async with open_workplace(config, name, setup, environ) as place:
            freeze_loaded_objects()
            while following == setup:
                try:
                    await work(link, place)
                    return None
                except GivenUp as refused:
                    logger.warning("registering again: %s", refused)
                    following = (await link.register(name, config.device_slots)).setup
    except DatabaseError as error:
        if following == setup:
            raise
        logger.warning("the run has begun anew, what was not written yet is not needed: %s", error)
    return following


@asynccontextmanager
async def open_workplace(
    config: WorkerConfig, name: str, setup: WorkerSetup, environ: Mapping[str, str]
) -> AsyncGenerator[Workplace]:
    """Everything a rollout needs in this process: devices, agent, gateway, judge and a recorder of turns."""
    run_config = _run_config(config, setup)
    # what devices and agents leave behind, and how services know them, is apart from that of other workers
    folder = Path(setup.log_path) / "workers" / f"{Path(setup.log_path).name}-{name}"
    site = make_site(run_config, folder, environ)
    model_path = find_model(run_config.model_name)
    renderer = make_image_renderer(model_path, run_config.renderer_name, run_config.server.max_pixels)
    train_tasks, eval_tasks = load_task_sets(run_config, site)
    judge_config = plan_judge(
        run_config.judge, run_config.reward, *(tasks for tasks in (train_tasks, eval_tasks) if tasks)
    )
    url = database_url(environ) or setup.database_url
    remember_secrets({"database_url": url, "servers": [{"api_key": key} for _, key, _ in setup.servers]})
    await check_connection(url)
    scope = Scope(
        image_token_id=renderer.image_token_id, attempt_id=UUID(setup.attempt_id), training_id=setup.training_id
    )
    async with AsyncExitStack() as stack:
        recorder = await stack.enter_async_context(
            DatabaseRecorder(
                url,
                image_token_id=renderer.image_token_id,
                scope=scope,
                write=write_worker_events,
                linger_s=LINGER_S,
                flush_linger_s=FLUSH_LINGER_S,
            )
        )
        servers = [await stack.enter_async_context(server) for server in await find_servers(setup, name)]
        client = SamplingClient(*servers, namespace=setup.namespace, max_attempts=_MODEL_ATTEMPTS)
        sampler = await stack.enter_async_context(client)
        devices = await stack.enter_async_context(open_devices(run_config, site, max_devices=config.device_slots))
        gateway = await stack.enter_async_context(
            open_gateway(run_config, sampler, renderer, sampling_params(run_config, run_config.temperature))
        )
        judge = None if judge_config is None else await stack.enter_async_context(open_judge(judge_config))
        runner = make_runner(
            run_config,
            devices,
            gateway,
            history=make_history(
                run_config.agent.history or "full",
                max_images=run_config.agent.history_images,
                block=run_config.agent.history_block,
            ),
            reward=load_reward(run_config.reward),
            judge=judge,
            log_folder=folder / "agents",
            recorder=recorder,
            watch_goal=run_config.sampling.watch_goal,
        )

        def make_plan(planned: PlannedRollout) -> RolloutPlan:
            tasks = train_tasks if planned.source.phase == "step" or eval_tasks is None else eval_tasks
            return _make_plan(planned, tasks)

        yield Workplace(
            runner=runner,
            recorder=recorder,
            policies=sampler,
            make_plan=make_plan,
            device_metrics=devices.pool.take_metrics,
        )


async def find_servers(setup: WorkerSetup, name: str, patience_s: float = _SERVERS_S) -> list[ExternalServer]:
    """The model servers of the run, as soon as one of them answers; the others may be away, like later in the run.

    Each worker has another one first, because it does not know how many rollouts of others a server has.

    Raises:
        ConfigError: none answers.
    """
    deadline = time.monotonic() + patience_s
    probes = [ExternalServer(address, api_key=key) for address, key, _ in setup.servers]
    while True:
        ends = await asyncio.gather(*(probe.look_again() for probe in probes), return_exceptions=True)
        failures = [end for end in ends if end is not None]
        if len(failures) < len(ends):
            break
        if time.monotonic() > deadline:
            raise failures[0]
        logger.warning("no model server answers, trying again: %s", failures[0])
        await asyncio.sleep(min(_SERVER_RETRY_S, patience_s))
    first = crc32(name.encode()) % len(setup.servers)
    servers = (*setup.servers[first:], *setup.servers[:first])
    return [ExternalServer(address, api_key=key, model=model) for address, key, model in servers]


def _run_config(config: WorkerConfig, setup: WorkerSetup) -> CLIConfig:
    """The run's configuration on this machine."""
    given = GivenSettings(CLIConfig)
    for name, text in setup.settings.items():
        given.set_text(name, text)
    run_config = make_config(CLIConfig, given.values)
    gateway = with_values(config.gateway, allowed_media_domains=run_config.gateway.allowed_media_domains)
    return with_values(run_config, gateway=gateway, max_concurrent_rollouts=config.device_slots)


def _make_plan(planned: PlannedRollout, tasks: TaskSet) -> RolloutPlan:
    template = next((one for one in tasks.templates if one.task_id == planned.task_id), None)
    if template is None:
        raise ConfigError(
            f"expected the task files of the run on this machine too, got none of task {planned.task_id!r}; copy them"
        )
    return RolloutPlan(
        source=planned.source,
        group_id=planned.group_id,
        group_index=planned.group_index,
        member_index=planned.member_index,
        task=template.make_task(planned.seed),
        params=planned.params,
        adapter=planned.adapter,
        rollout_id=planned.rollout_id,
    )
