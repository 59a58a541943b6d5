"""A rollout worker: an actor that opens what rollouts need, and runs the rollouts that the fleet assigns."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from hashlib import sha256
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Protocol
from zlib import crc32

from sqlalchemy import Connection

from cua_rl.cluster import PACKAGE, digest_of, node_address
from cua_rl.command_line.fields import with_values
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.rows import Scope
from cua_rl.database.session import check_connection, database_url
from cua_rl.database.writer import TimedEvent, require_attempt, write_worker_events
from cua_rl.environments.pool_meter import MeterReading
from cua_rl.events import Event, Recorder, RolloutStarted, TurnTaken
from cua_rl.host.masking import remember_secrets
from cua_rl.host.processes import freeze_loaded_objects, is_loopback
from cua_rl.host.system import raise_descriptor_limit, refuse_inspection
from cua_rl.judge.config import JudgeConfig
from cua_rl.rewards.load_reward import load_reward
from cua_rl.rollout.group import Runner
from cua_rl.rollout.run import RolloutJob
from cua_rl.run.devices import open_devices, prepare_devices
from cua_rl.run.prepared_training import load_task_sets
from cua_rl.run.reporting import LogFile
from cua_rl.run.rollouts import open_runners
from cua_rl.run.training_config import CLIConfig
from cua_rl.run_folder.model_folder import find_model, make_image_renderer
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ExternalServer, ServedModel
from cua_rl.task_loader import TaskSet
from cua_rl.types.errors import ConfigError
from cua_rl.types.json_values import is_array, is_object
from cua_rl.types.rollout import AdapterRef, Rollout, Turn

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""How long events wait to be written together, in a run and its workers, unless a query needs them."""
FLUSH_LINGER_S = 0.1
"""The same in a worker once a rollout has ended: others end at that time too."""

_SERVERS_S = 600.0  # as long as a run waits for a model server that is away
_SERVER_RETRY_S, _TRIES_PER_LOG_LINE = 2.0, 15
_CLOCK_TOLERANCE_S = 1.0  # of machines that keep time; measuring may err by as much on a busy one
_TASK_FILES = ("file_path", "tasks_dir")
_MODEL_FILES = ("*config.json", "tokenizer.json", "chat_template*")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker needs to run rollouts; it holds secrets, and is never stored or logged."""

    config: CLIConfig
    judge: JudgeConfig | None
    identity: Mapping[str, str]
    """See `identify`."""
    environ: Mapping[str, str]
    """The run's environment on its own machine; other nodes have theirs."""
    log_path: Path
    database_url: str
    scope: Scope
    """The attempt of the run, whose rows the worker may write."""
    servers: tuple[tuple[str, str | None, ServedModel], ...]
    """Address and key of each model server, and what it serves: one may be down when the worker starts."""
    namespace: str
    """Ends the names of the run's adapters on the servers."""
    clock_ahead_s: float
    """How far the clock of the run's machine is ahead of the database's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker does; that it comes at all is the worker's sign of life."""

    adapters: frozenset[AdapterRef]
    """The policy that it follows, and those that requests and pins still need."""
    devices: MeterReading
    """Since the last report."""


class Policies(Protocol):
    """The adapters on the model servers, as a worker sees them: it loads and unloads none."""

    current: AdapterRef | None

    @property
    def used(self) -> frozenset[AdapterRef]: ...

    def follow(self, adapter: AdapterRef) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """What runs a worker's rollouts."""

    runner: Runner
    recorder: Recorder
    policies: Policies
    complete_job: Callable[[RolloutJob], RolloutJob] = lambda job: job
    """Gives a job back what its task does, which it leaves behind on its way."""
    device_metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    """Metrics of the devices since the last call."""
    clock_ahead_s: float = 0.0
    """How far the worker's clock is ahead of the run's, in whose time everything is recorded."""


OpenPlace = Callable[[], AbstractAsyncContextManager[Workplace]]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamingRecorder:
    """Records with each rollout its worker, whose name stands before the device's: workers number theirs alike."""

    inner: Recorder
    worker: str

    async def record(self, event: Event) -> None:
        if isinstance(event, RolloutStarted):
            event = replace(event, worker=self.worker, device_id=f"{self.worker}/{event.device_id}")
        await self.inner.record(event)

    async def flush(self) -> None:
        await self.inner.flush()


class RolloutWorker:
    """The actor; the fleet calls its methods, in order, and not before `open` has returned."""

    def __init__(self, name: str, num_slots: int, open_place: OpenPlace) -> None:
        self._name, self._num_slots, self._open_place = name, num_slots, open_place
        self._running: dict[str, asyncio.Task[Rollout]] = {}
        self._over = asyncio.Event()

    async def open(self) -> None:
        """Open everything; raises `ConfigError` if this is not what the run's other members have."""
        opened: asyncio.Future[Workplace] = asyncio.get_running_loop().create_future()
        self._working = asyncio.create_task(self._work(opened), name=self._name)
        await asyncio.wait([opened, self._working], return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            await self._working
        self._place, self._reported_at = opened.result(), time.monotonic()

    async def run(self, job: RolloutJob, policy: AdapterRef | None) -> Rollout:
        """Run one rollout under this policy; its turns are in the database when it has ended."""
        self._follow(policy)
        running = asyncio.create_task(self._run(job), name=f"rollout-{job.rollout_id}")
        self._running[job.rollout_id] = running
        running.add_done_callback(lambda _: self._running.pop(job.rollout_id))
        return await running

    async def cancel(self, rollout_id: str) -> None:
        """End a rollout, if it still runs."""
        if rollout_id in self._running:
            self._running[rollout_id].cancel()

    async def report(self, policy: AdapterRef | None) -> Report:
        """Follow the policy, and say what has been done since the last report."""
        self._follow(policy)
        since, self._reported_at = self._reported_at, time.monotonic()
        device_s = (self._reported_at - since) * self._num_slots
        reading = MeterReading(pool=self._name, device_s=device_s, metrics=self._place.device_metrics())
        current = self._place.policies.current
        return Report(adapters=self._place.policies.used.union([current] if current else []), devices=reading)

    async def close(self) -> None:
        """End all rollouts and give everything back."""
        self._over.set()
        await self._working

    async def _work(self, opened: "asyncio.Future[Workplace]") -> None:
        async with self._open_place() as place:
            opened.set_result(place)
            await self._over.wait()
            for running in self._running.values():
                running.cancel()
            await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _run(self, job: RolloutJob) -> Rollout:
        rollout = await self._place.runner.run(self._place.complete_job(job))
        await self._place.recorder.flush()
        device_id = None if rollout.device_id is None else f"{self._name}/{rollout.device_id}"
        ahead_s = self._place.clock_ahead_s
        turns = (*job.fork.turns[: len(rollout.turns)], *(_in_run_time(turn, ahead_s) for turn in rollout.own_turns))
        started_at = rollout.started_at - ahead_s
        return replace(rollout, worker=self._name, device_id=device_id, turns=turns, started_at=started_at)

    def _follow(self, policy: AdapterRef | None) -> None:
        if policy is not None and policy != self._place.policies.current:
            self._place.policies.follow(policy)


@asynccontextmanager
async def open_workplace(
    setup: WorkerSetup, name: str, num_slots: int, environ: Mapping[str, str] = os.environ
) -> AsyncGenerator[Workplace]:
    """Everything a rollout needs in this process: devices, agent, gateway, judge and a recorder of turns."""
    refuse_inspection()
    raise_descriptor_limit()
    os.environ.update(setup.environ)
    url = database_url(environ) or setup.database_url
    keys = [{"api_key": key} for _, key, _ in setup.servers]
    remember_secrets({"database_url": url, "servers": keys, "gbox_api_key": setup.config.gbox_api_key})
    await asyncio.to_thread(_log_to, setup.log_path / "logs" / f"{name}.log")
    config = _of_one_worker(setup.config, num_slots)
    # a folder and name of its own keep its files, and its devices at services, apart from those of other workers
    folder = setup.log_path / "workers" / f"{setup.log_path.name}-{name}"
    prepared = prepare_devices(config, folder, environ)
    model_path = find_model(config.model_name)
    renderer = make_image_renderer(model_path, config.renderer_name, config.server.max_pixels)
    train_tasks, eval_tasks = load_task_sets(config, prepared)
    reward = load_reward(config.reward, config.reward_clip, config.credit.milestone_reward)
    own = await asyncio.to_thread(identify, config, model_path, train_tasks)
    if others := [part for part, digest in own.items() if digest != setup.identity[part]]:
        raise ConfigError(f"expected the run's {' and '.join(others)} on {socket.gethostname()}, got others; copy them")
    await check_connection(url)
    ahead_s = await _measure_clock(setup, url, name)
    async with AsyncExitStack() as stack:
        recorder = DatabaseRecorder(
            url,
            image_token_id=renderer.image_token_id,
            scope=setup.scope,
            write=partial(_write, ahead_s),
            linger_s=LINGER_S,
            flush_linger_s=FLUSH_LINGER_S,
        )
        recorder = await stack.enter_async_context(recorder)
        servers = [await stack.enter_async_context(server) for server in await find_servers(setup, name)]
        sampler = SamplingClient(*servers, namespace=setup.namespace, stall_timeout_s=config.devices.turn_timeout_s)
        await stack.enter_async_context(sampler)
        devices = await stack.enter_async_context(open_devices(prepared, max_devices=num_slots))
        runners = open_runners(
            config,
            devices,
            sampler,
            renderer,
            setup.judge,
            reward=reward,
            log_folder=folder / "agents",
            recorder=NamingRecorder(inner=recorder, worker=name),
        )
        make_runner = await stack.enter_async_context(runners)
        freeze_loaded_objects()
        logger.info("worker=%s is open on %s", name, socket.gethostname())
        yield Workplace(
            runner=make_runner(),
            recorder=recorder,
            policies=sampler,
            complete_job=partial(_complete_job, train_tasks, eval_tasks),
            device_metrics=devices.pool.take_metrics,
            clock_ahead_s=ahead_s,
        )


async def _measure_clock(setup: WorkerSetup, url: str, name: str) -> float:
    """How far this clock is ahead of the run's, 0 if by little; raises `ConfigError` as `require_attempt` does."""
    ahead_s = await asyncio.to_thread(require_attempt, url, setup.scope) - setup.clock_ahead_s
    if abs(ahead_s) < _CLOCK_TOLERANCE_S:
        return 0.0
    logger.warning("worker=%s the clock of %s is wrong by %.0f s", name, socket.gethostname(), ahead_s)
    return ahead_s


def _write(ahead_s: float, connection: Connection, scope: Scope, events: Sequence[TimedEvent]) -> Scope:
    return write_worker_events(connection, scope, [event_in_run_time(timed, ahead_s) for timed in events])


def event_in_run_time(timed: TimedEvent, ahead_s: float) -> TimedEvent:
    """What a worker records, whose clock is ahead of the run's."""
    event = timed.event
    if isinstance(event, TurnTaken) and not event.is_told:
        event = replace(event, turn=_in_run_time(event.turn, ahead_s))
    return TimedEvent(event=event, at=timed.at - timedelta(seconds=ahead_s))


def _in_run_time(turn: Turn, ahead_s: float) -> Turn:
    return replace(turn, model=replace(turn.model, started_at=turn.model.started_at - ahead_s))


def _of_one_worker(config: CLIConfig, num_slots: int) -> CLIConfig:
    """The run's configuration with this worker's part of the rollouts, and an address of its gateway for others."""
    gateway = config.gateway
    if gateway.host in ("0.0.0.0", "::") and not is_loopback(address := node_address()):
        gateway = with_values(gateway, host=address)  # agents elsewhere cannot call a wildcard
    return with_values(config, gateway=gateway, max_concurrent_rollouts=num_slots)


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    ours = logging.getLogger("cua_rl")
    ours.setLevel(logging.INFO)
    ours.addHandler(LogFile(path))


def identify(config: CLIConfig, model_path: Path, tasks: TaskSet) -> dict[str, str]:
    """Digests of what all members of a run must have alike, by name; blocks for a tenth of a second."""
    sources = [one for given in (config.tasks, config.eval_tasks) for one in (given if is_array(given) else [given])]
    named = [source.get(key) for source in sources if is_object(source) for key in _TASK_FILES]
    files = [Path(str(name)).expanduser() for name in named if name is not None]
    reward = find_spec(config.reward.partition(":")[0]) if ":" in config.reward else None
    return {
        "code": digest_of(PACKAGE),
        "task files": digest_of(*files) + sha256(repr(tasks.task_ids).encode()).hexdigest(),
        "model": digest_of(*(file for pattern in _MODEL_FILES for file in sorted(model_path.glob(pattern)))),
        "reward function": "" if reward is None or reward.origin is None else digest_of(Path(reward.origin)),
    }


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
        if num_tries % _TRIES_PER_LOG_LINE == 0:
            logger.warning("waiting for a model server: %s", failures[0])
        await asyncio.sleep(min(_SERVER_RETRY_S, patience_s))
    first = crc32(name.encode()) % len(setup.servers)
    servers = (*setup.servers[first:], *setup.servers[:first])
    return [ExternalServer(address, api_key=key, model=model) for address, key, model in servers]


def _complete_job(train_tasks: TaskSet, eval_tasks: TaskSet | None, job: RolloutJob) -> RolloutJob:
    tasks = train_tasks if job.source.phase == "step" or eval_tasks is None else eval_tasks
    template = next((one for one in tasks.templates if one.task_id == job.task.task_id), None)
    if template is None:
        raise ConfigError(
            f"expected the task files of the run on {socket.gethostname()}, got none with {job.task.task_id!r}; copy "
            "them there"
        )
    return replace(job, task=template.make_task(job.task.seed))
