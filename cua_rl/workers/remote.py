"""`RemoteRunner`: the controller's side of rollout workers. Runs each rollout in the worker with the most free slots.

A worker belongs to the run from its registration until it is silent for `lease_s` seconds or its process ends. Then it
is given up: its rollouts end as infrastructure faults, which are run again like all others, and whatever it says later
is refused, because its id is no longer valid; a live worker then drops its rollouts and registers again.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Protocol
from uuid import uuid4

from cua_rl.environments.pool_meter import MeterReading, merge_readings
from cua_rl.events import Recorder, RolloutSource, TurnTaken
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.errors import ConfigError, CuaError
from cua_rl.types.rollout import AdapterRef, Rollout, StopReason
from cua_rl.workers.worker_wire import (
    Ended,
    Failure,
    Hello,
    Orders,
    PlannedRollout,
    Report,
    Welcome,
    WorkerSetup,
    code_version,
)

logger = logging.getLogger(__name__)

_LINGER_S = 0.02  # rollouts that start together travel together
_LINGER_S_PER_ROLLOUT = 2e-4  # a report names all rollouts of its worker: the more there are, the less often it is sent


class WorkerRefused(CuaError):
    """The run does not know this worker, or has given it up, or has no such rollout for it."""


class Adapters(Protocol):
    """The adapters on the model servers."""

    current: AdapterRef | None

    def pin(self, adapter: AdapterRef) -> None: ...

    def unpin(self, adapter: AdapterRef) -> None: ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Lease:
    """A rollout that waits for a worker or has one."""

    job: RolloutJob
    ended: asyncio.Future[Rollout]
    worker: "_Worker | None" = None
    started_at: float = field(default_factory=time.time)


@dataclass(slots=True, kw_only=True)
class _Worker:
    name: str
    num_slots: int
    seen_at: float | None = None
    """None until its first report: it opens its devices."""
    leases: dict[str, _Lease] = field(default_factory=dict[str, _Lease])
    known: set[str] = field(default_factory=set[str])
    """Rollouts that it runs, as far as we know."""
    adapters: set[AdapterRef] = field(default_factory=set[AdapterRef])
    """What it may use; pinned for it."""
    is_given_up: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class RemoteRunner:
    """A `Runner` over the workers that have registered; rollouts wait while all of them are busy or there is none.

    The policy of a worker's rollouts is that of `adapters`. `recorder` is flushed before the first rollout of a step or
    evaluation starts: workers write rows that belong to its row.
    """

    def __init__(
        self,
        adapters: Adapters,
        recorder: Recorder,
        make_setup: Callable[[], WorkerSetup],
        *,
        lease_s: float = 15.0,
        poll_s: float = 5.0,
    ) -> None:
        self._adapters = adapters
        self._recorder = recorder
        self._make_setup = make_setup
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._workers: dict[str, _Worker] = {}
        self._waiting: deque[_Lease] = deque()
        self._durable: set[RolloutSource] = set()
        self._failure: CuaError | None = None
        self._is_over = False
        self._num_given_up = 0
        self._readings: list[MeterReading] = []

    @property
    def workers(self) -> dict[str, int]:
        """The number of rollouts of each worker that is ready, by its name."""
        return {worker.name: len(worker.leases) for worker in self._workers.values() if worker.seen_at is not None}

    def take_metrics(self) -> dict[str, float]:
        """Metrics of workers and their devices since the last call; their names are in `cua_rl/metrics.py`."""
        metrics = merge_readings(self._readings)
        metrics |= {
            "device/num_workers": float(len(self.workers)),
            "device/num_workers_lost": float(self._num_given_up),
        }
        self._readings, self._num_given_up = [], 0
        return metrics

    async def run(self, job: RolloutJob) -> Rollout:
        """Run one rollout in a worker; raises what stops the run."""
        if job.source not in self._durable:
            await self._recorder.flush()
            self._durable.add(job.source)
        if self._failure is not None:
            raise self._failure
        lease = _Lease(job=job, ended=asyncio.get_running_loop().create_future())
        (self._waiting.appendleft if job.is_repeat else self._waiting.append)(lease)
        self._assign()
        with ExitStack() as pinned:
            if job.adapter is not None:
                self._adapters.pin(job.adapter)
                pinned.callback(self._adapters.unpin, job.adapter)
            try:
                return await lease.ended
            finally:
                self._withdraw(lease)

    def register(self, hello: Hello) -> Welcome:
        """Admit a worker to the run; raises `WorkerRefused` if its version is another one."""
        if hello.code_version != code_version():
            raise WorkerRefused(f"expected a worker with {code_version()}, got {hello.code_version}; install the same")
        worker_id = uuid4().hex
        self._workers[worker_id] = _Worker(name=hello.name, num_slots=hello.num_slots)
        logger.info("worker=%s registered num_slots=%d", hello.name, hello.num_slots)
        return Welcome(worker_id=worker_id, setup=self._make_setup())

    async def orders(self, worker_id: str, report: Report) -> Orders:
        """Orders for the worker, as soon as there are any; none after `poll_s` seconds."""
        worker = self._find(worker_id)
        worker.known = set(report.running)
        if report.device_metrics:
            device_s = report.period_s * worker.num_slots
            self._readings.append(MeterReading(pool=worker.name, device_s=device_s, metrics=report.device_metrics))
        self._release_adapters(worker, keep={*report.adapters})
        self._assign()  # it may be its first report
        with suppress(TimeoutError):
            async with asyncio.timeout(self._poll_s):
                while not self._has_news(worker, report):
                    worker.changed.clear()
                    await worker.changed.wait()
                await asyncio.sleep(_LINGER_S + _LINGER_S_PER_ROLLOUT * len(report.running))
        self._find(worker_id)  # it may have been given up meanwhile
        if self._is_over:
            return Orders(is_over=True)
        adapter = self._adapters.current
        if adapter is not None and adapter not in worker.adapters:
            self._adapters.pin(adapter)
            worker.adapters.add(adapter)
        start = tuple(_planned(lease.job) for key, lease in worker.leases.items() if key not in worker.known)
        cancel = tuple(worker.known - worker.leases.keys())
        return Orders(start=start, cancel=cancel, adapter=adapter)

    def accept(self, worker_id: str, rollout_id: str, ended: Ended) -> None:
        """Take the end of a rollout; raises `WorkerRefused` if it was given to another worker, or is known already."""
        worker = self._find(worker_id)
        lease = worker.leases.pop(rollout_id, None)
        if lease is None:
            raise WorkerRefused(f"expected a rollout that worker {worker.name!r} runs, got {rollout_id!r}; drop it")
        worker.known.discard(rollout_id)
        if not lease.ended.done():
            match ended.outcome:
                case Rollout() as rollout:
                    lease.ended.set_result(rollout)
                case Failure(is_config_error=is_config_error, message=message):
                    kind = ConfigError if is_config_error else CuaError
                    lease.ended.set_exception(kind(f"{message} (in rollout worker {worker.name!r})"))
        self._assign()

    def give_up(self, name: str, why: str) -> None:
        """Give up the worker of this name, if there is one; its rollouts end as faults of their devices."""
        for worker_id, worker in list(self._workers.items()):
            if worker.name == name:
                self._give_up(worker_id, why)

    def fail(self, error: CuaError) -> None:
        """Let all rollouts raise `error`, which stops the run."""
        self._failure = error
        for lease in [
            *self._waiting,
            *(lease for worker in self._workers.values() for lease in worker.leases.values()),
        ]:
            if not lease.ended.done():
                lease.ended.set_exception(error)

    def end(self) -> None:
        """Tell the workers that the run is over."""
        self._is_over = True
        self.announce()

    def announce(self) -> None:
        """Tell the workers what has changed for all of them: the policy, or that the run is over."""
        for worker in self._workers.values():
            worker.changed.set()

    async def watch(self) -> None:
        """Give up workers that are silent, until cancelled; while this process was stopped, it received nothing."""
        while True:
            due_at = time.monotonic() + self._lease_s / 15
            await asyncio.sleep(self._lease_s / 15)
            late_s = max(0.0, time.monotonic() - due_at)
            for worker in self._workers.values():
                worker.seen_at = worker.seen_at and worker.seen_at + late_s
            latest = time.monotonic() - self._lease_s
            for worker_id, worker in list(self._workers.items()):
                if worker.seen_at is not None and worker.seen_at < latest:
                    self._give_up(worker_id, f"it was silent for {self._lease_s:g} s")

    def _find(self, worker_id: str) -> _Worker:
        worker = self._workers.get(worker_id)
        if worker is None:
            raise WorkerRefused("expected a worker of this run, got one that is unknown or was given up; register")
        worker.seen_at = time.monotonic()
        return worker

    def _assign(self) -> None:
        """Give waiting rollouts to free slots, in their order."""
        while self._waiting:
            ready = (worker for worker in self._workers.values() if worker.seen_at is not None)
            free = [worker for worker in ready if len(worker.leases) < worker.num_slots]
            if not free:
                return
            worker = min(free, key=lambda one: len(one.leases) / one.num_slots)
            lease = self._waiting.popleft()
            lease.worker = worker
            worker.leases[lease.job.rollout_id] = lease
            worker.changed.set()

    def _withdraw(self, lease: _Lease) -> None:
        """Forget a rollout that has ended or was cancelled."""
        worker = lease.worker
        if worker is None:
            self._waiting.remove(lease)
        elif worker.leases.pop(lease.job.rollout_id, None) is not None:
            worker.changed.set()
            self._assign()

    def _give_up(self, worker_id: str, why: str) -> None:
        worker = self._workers.pop(worker_id)
        self._num_given_up += 1
        logger.warning("worker=%s given up num_rollouts=%d: %s", worker.name, len(worker.leases), why)
        self._release_adapters(worker, keep=set())
        for lease in worker.leases.values():
            if not lease.ended.done():
                lease.ended.set_result(_lost(lease, f"rollout worker {worker.name!r} was given up: {why}"))
        worker.leases.clear()
        worker.is_given_up = True
        worker.changed.set()

    def _release_adapters(self, worker: _Worker, keep: set[AdapterRef]) -> None:
        for adapter in worker.adapters - keep:
            self._adapters.unpin(adapter)
        worker.adapters &= keep

    def _has_news(self, worker: _Worker, report: Report) -> bool:
        current = self._adapters.current
        return (
            self._is_over
            or worker.is_given_up
            or worker.known != worker.leases.keys()
            or (current is not None and current not in report.adapters[:1])
        )


class ReportingRunner:
    """Reports the starts and turns of remote rollouts once they have ended, to a recorder that sees no worker's."""

    def __init__(self, runner: RemoteRunner, recorder: Recorder, max_turns: int) -> None:
        self._runner = runner
        self._recorder = recorder
        self._max_turns = max_turns

    async def run(self, job: RolloutJob) -> Rollout:
        """Run one rollout."""
        rollout = await self._runner.run(job)
        if rollout.device_id is not None:
            await self._recorder.record(job.started(rollout.device_id, self._max_turns))
            for turn in rollout.turns:
                await self._recorder.record(TurnTaken(rollout_id=job.rollout_id, turn=turn))
        return rollout


def _planned(job: RolloutJob) -> PlannedRollout:
    return PlannedRollout(
        rollout_id=job.rollout_id,
        source=job.source,
        group_id=job.group_id,
        group_index=job.group_index,
        member_index=job.member_index,
        task_id=job.task.task_id,
        seed=job.task.seed,
        params=job.params,
        adapter=job.adapter,
    )


def _lost(lease: _Lease, error: str) -> Rollout:
    """The record of a rollout whose worker is gone, and with it the device."""
    job = lease.job
    return Rollout(
        rollout_id=job.rollout_id,
        task_id=job.task.task_id,
        seed=job.task.seed,
        group_index=job.group_index,
        member_index=job.member_index,
        device_id=None,
        turns=(),
        stop_reason=StopReason.DEVICE_ERROR,
        answer=None,
        validation=None,
        reward=None,
        error=error,
        started_at=lease.started_at,
        duration_s=time.time() - lease.started_at,
    )
