"""The process of a rollout worker: it opens what rollouts need, and runs them for the controller of a run."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from uuid import UUID
from zlib import crc32

from cua_rl.command_line.fields import with_values
from cua_rl.command_line.parsing import GivenValues, make_config
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.rows import Scope
from cua_rl.database.session import check_connection, database_url
from cua_rl.database.writer import write_worker_events
from cua_rl.host.masking import remember_secrets
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rollout.run import RolloutJob
from cua_rl.run.devices import open_devices, prepare_devices
from cua_rl.run.judge import plan_judge
from cua_rl.run.prepared_training import load_task_sets
from cua_rl.run.rollouts import freeze_loaded_objects, open_runners
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import find_model, make_image_renderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ExternalServer
from cua_rl.task_loader import TaskSet
from cua_rl.types.errors import ConfigError, DatabaseError
from cua_rl.workers.worker import ControllerLink, GivenUp, Workplace, open_link, work
from cua_rl.workers.worker_config import FLUSH_LINGER_S, LINGER_S, TOKEN_VARIABLE, WorkerConfig
from cua_rl.workers.worker_wire import PlannedRollout, WorkerSetup

logger = logging.getLogger(__name__)

_SERVERS_S = 600.0  # as long as a run waits for a model server that is away
_SERVER_RETRY_S, _RETRIES_PER_WORD = 2.0, 15


async def run_worker(config: WorkerConfig, environ: Mapping[str, str] = os.environ) -> None:
    """Work for the controller until its run is over; raises `ConfigError` if it cannot be reached for `patience_s`."""
    token = environ.get(TOKEN_VARIABLE)
    if not token:
        raise ConfigError(f"expected {TOKEN_VARIABLE} in the environment, got none; set it to the run's")
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
        logger.warning("the run was started again, unwritten turns of the earlier attempt are dropped: %s", error)
    return following


@asynccontextmanager
async def open_workplace(
    config: WorkerConfig, name: str, setup: WorkerSetup, environ: Mapping[str, str]
) -> AsyncGenerator[Workplace]:
    """Everything a rollout needs in this process: devices, agent, gateway, judge and a recorder of turns."""
    run_config = _run_config(config, setup)
    # a folder and name of its own keep its files, and its devices at services, apart from those of other workers
    folder = Path(setup.log_path) / "workers" / f"{Path(setup.log_path).name}-{name}"
    prepared = prepare_devices(run_config, folder, environ)
    model_path = find_model(run_config.model_name)
    renderer = make_image_renderer(model_path, run_config.renderer_name, run_config.server.max_pixels)
    image_token_id = renderer.image_token_id
    train_tasks, eval_tasks = load_task_sets(run_config, prepared)
    judge = plan_judge(run_config.judge, run_config.reward, *(tasks for tasks in (train_tasks, eval_tasks) if tasks))
    url = database_url(environ) or setup.database_url
    remember_secrets({"database_url": url, "servers": [{"api_key": key} for _, key, _ in setup.servers]})
    await check_connection(url)
    async with AsyncExitStack() as stack:
        recorder = await stack.enter_async_context(
            DatabaseRecorder(
                url,
                image_token_id=image_token_id,
                scope=Scope(
                    image_token_id=image_token_id, attempt_id=UUID(setup.attempt_id), training_id=setup.training_id
                ),
                write=write_worker_events,
                linger_s=LINGER_S,
                flush_linger_s=FLUSH_LINGER_S,
            )
        )
        servers = [await stack.enter_async_context(server) for server in await find_servers(setup, name)]
        client = SamplingClient(
            *servers,
            namespace=setup.namespace,
            stall_timeout_s=run_config.devices.turn_timeout_s,
        )
        sampler = await stack.enter_async_context(client)
        devices = await stack.enter_async_context(open_devices(prepared, max_devices=config.device_slots))
        runners = open_runners(
            run_config,
            devices,
            sampler,
            renderer,
            judge,
            reward=load_reward(run_config.reward, run_config.reward_clip),
            log_folder=folder / "agents",
            recorder=recorder,
        )
        make_runner = await stack.enter_async_context(runners)
        yield Workplace(
            runner=make_runner(),
            recorder=recorder,
            policies=sampler,
            make_job=partial(_make_job, train_tasks, eval_tasks),
            device_metrics=devices.pool.take_metrics,
        )


async def find_servers(setup: WorkerSetup, name: str, patience_s: float = _SERVERS_S) -> list[ExternalServer]:
    """The model servers of the run, as soon as one of them answers; the others may be down.

    The order differs between workers, to spread their rollouts: a worker does not know the load from others. Raises
    `ConfigError` if none answers within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    probes = [ExternalServer(address, api_key=key) for address, key, _ in setup.servers]
    for num_tries in count():
        ends = await asyncio.gather(*(probe.refresh() for probe in probes), return_exceptions=True)
        failures = [end for end in ends if end is not None]
        if len(failures) < len(ends):
            break
        if time.monotonic() > deadline:
            raise failures[0]
        if num_tries % _RETRIES_PER_WORD == 0:
            logger.warning("waiting for a model server: %s", failures[0])
        await asyncio.sleep(min(_SERVER_RETRY_S, patience_s))
    first = crc32(name.encode()) % len(setup.servers)
    servers = (*setup.servers[first:], *setup.servers[:first])
    return [ExternalServer(address, api_key=key, model=model) for address, key, model in servers]


def _run_config(config: WorkerConfig, setup: WorkerSetup) -> CLIConfig:
    given = GivenValues(CLIConfig)
    for name, text in setup.settings.items():
        given.set_text(name, text)
    run_config = make_config(CLIConfig, given.values)
    gateway = with_values(config.gateway, allowed_media_domains=run_config.gateway.allowed_media_domains)
    return with_values(run_config, gateway=gateway, max_concurrent_rollouts=config.device_slots)


def _make_job(train_tasks: TaskSet, eval_tasks: TaskSet | None, planned: PlannedRollout) -> RolloutJob:
    tasks = train_tasks if planned.source.phase == "step" or eval_tasks is None else eval_tasks
    template = next((one for one in tasks.templates if one.task_id == planned.task_id), None)
    if template is None:
        raise ConfigError(
            f"expected the task files of the run on this machine, got none with {planned.task_id!r}; copy them here"
        )
    return RolloutJob(
        source=planned.source,
        group_id=planned.group_id,
        group_index=planned.group_index,
        member_index=planned.member_index,
        task=template.make_task(planned.seed),
        params=planned.params,
        adapter=planned.adapter,
        rollout_id=planned.rollout_id,
    )
