"""Starts the rollout workers of a run: Ray actors, each with the run's configuration, addresses and keys."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import ceil

from cua_rl.cluster import ActorLost, Cluster, ClusterLost, open_cluster
from cua_rl.command_line.fields import with_values
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.writer import require_attempt
from cua_rl.events import Recorder
from cua_rl.reporting.step_line import num_of
from cua_rl.rollout.group import Runner
from cua_rl.run.devices import OpenDevices, open_devices
from cua_rl.run.prepared_training import PreparedTraining
from cua_rl.run.rollouts import open_runners
from cua_rl.run_folder.model_folder import find_model
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.sampler import Sampler
from cua_rl.types.errors import ConfigError, CuaError, boundary
from cua_rl.workers.fleet import End, Fleet, ReportingRunner
from cua_rl.workers.worker import OpenPlace, RolloutWorker, WorkerSetup, identify, open_workplace

logger = logging.getLogger(__name__)

Attempt = Callable[[], Awaitable[End]]
"""Runs a worker to its end; raises `ConfigError` or `ClusterLost` if a restart would end the same way."""

# before each start that follows one without a rollout: what a worker needs, such as the database, may be down
_PAUSES_S = (0.0, 0.0, 2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What runs rollouts: in this process, or in workers."""

    for_training: Runner
    for_evaluation: Runner
    device_metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    announce: Callable[[], None] = lambda: None
    """Called after each publication."""


async def open_local_devices(stack: AsyncExitStack, prepared: PreparedTraining) -> OpenDevices | None:
    """The devices of the run, unless workers have them."""
    if prepared.config.rollout_workers:
        return None
    devices = open_devices(prepared.devices, max_devices=prepared.config.max_concurrent_rollouts)
    return await stack.enter_async_context(devices)


async def open_rollouts(
    stack: AsyncExitStack,
    prepared: PreparedTraining,
    sampler: Sampler,
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
            prepared.config,
            devices,
            sampler,
            prepared.renderer,
            prepared.judge,
            reward=prepared.reward,
            log_folder=prepared.log_path / "logs" / "agents",
            recorder=recorder,
        )
        make = await stack.enter_async_context(runners)
        # of their own each: evaluations and training share the devices
        return Rollouts(for_training=make(), for_evaluation=make(), device_metrics=devices.pool.take_metrics)
    num_cpus = prepared.config.rollout_workers
    assert isinstance(sampler, SamplingClient), "check_tinker has refused workers"
    cluster = await stack.enter_async_context(open_cluster(prepared.log_path / "logs", num_cpus=num_cpus))
    workers = await stack.enter_async_context(open_workers(cluster, prepared, sampler, recorder, own, url))
    runner = workers if recorder is own else ReportingRunner(workers, recorder, prepared.config.max_turns)
    return Rollouts(
        for_training=runner, for_evaluation=runner, device_metrics=workers.take_metrics, announce=workers.announce
    )


@asynccontextmanager
async def open_workers(
    cluster: Cluster,
    prepared: PreparedTraining,
    sampler: SamplingClient,
    recorder: Recorder,
    own: DatabaseRecorder,
    url: str,
) -> AsyncGenerator[Fleet]:
    """Keep the run's workers alive in the cluster; they end with the block."""
    config = prepared.config
    await recorder.flush()  # from now on the row of this attempt has a key
    environ = dict(os.environ) if cluster.is_local else dict[str, str]()
    setup = await asyncio.to_thread(make_setup, prepared, sampler, own, url, environ)
    names = [f"worker-{number}" for number in range(1, config.rollout_workers + 1)]
    num_slots = ceil(config.max_concurrent_rollouts / len(names))
    fleet = Fleet(sampler, recorder, names)
    tasks = [asyncio.create_task(fleet.remind(), name="remind-of-workers")]
    for name in names:
        place = partial(open_workplace, setup, name, num_slots)
        attempt = partial(run_worker, cluster, fleet, place, name, num_slots)
        tasks.append(asyncio.create_task(keep_alive(fleet, name, attempt), name=name))
    try:
        yield fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def make_setup(
    prepared: PreparedTraining, sampler: SamplingClient, own: DatabaseRecorder, url: str, environ: Mapping[str, str]
) -> WorkerSetup:
    """What the workers of a run need to know; limits of services are shared evenly."""
    config, judge, num = prepared.config, prepared.judge, prepared.config.rollout_workers
    own.scope.require_training()
    rate = config.devices.device_creations_per_s
    devices = with_values(
        config.devices,
        device_creations_per_s=None if rate is None else rate / num,
        gym_parallel_creates=max(1, config.devices.gym_parallel_creates // num),
    )
    return WorkerSetup(
        config=with_values(config, devices=devices),
        judge=judge and with_values(judge, max_concurrent=ceil(judge.max_concurrent / num)),
        identity=identify(config, find_model(config.model_name), prepared.train_tasks),
        environ=environ,
        log_path=prepared.log_path,
        database_url=url,
        scope=own.scope,
        servers=sampler.addresses,
        namespace=sampler.namespace,
        clock_ahead_s=require_attempt(url, own.scope),
    )


async def run_worker(cluster: Cluster, fleet: Fleet, place: OpenPlace, name: str, num_slots: int) -> End:
    """Start a worker, let it serve the fleet, and end it."""
    actor = cluster.start(RolloutWorker, name, num_slots, place, max_concurrency=2 * num_slots + 100)
    end = End(why="its process ended while it started")
    try:
        await actor.call("open")
        end = End(why="the run is over", is_lost=False)
        end = await fleet.serve(name, num_slots, actor)
    except ActorLost as lost:
        end = End(why=str(lost))
    finally:
        if end.is_lost:
            actor.kill()
        else:  # its devices are given back
            await actor.end()
    return end


async def keep_alive(fleet: Fleet, name: str, attempt: Attempt) -> None:
    """Run a worker until cancelled; one that ends is started again, unless it ends again and again without a rollout.

    The run goes on without one that cannot be started.
    """
    num_in_vain, why = 0, ""
    while num_in_vain < len(_PAUSES_S):
        await asyncio.sleep(_PAUSES_S[num_in_vain])
        try:
            with boundary(CuaError, f"cannot start rollout worker {name}"):
                end = await attempt()
        except (ConfigError, ClusterLost) as error:
            fleet.refuse(name, error)
            return
        except CuaError as error:
            end = End(why=str(error))
        why, num_in_vain = end.why, 0 if end.has_worked else num_in_vain + 1
        await asyncio.sleep(end.rest_s)
    fleet.refuse(name, CuaError(f"it ended {num_of(num_in_vain, 'time')}, at last because {why}; read its log"))
