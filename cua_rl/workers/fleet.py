"""`Fleet`, the controller's side of rollout workers: runs each rollout in the one with the largest share of free slots.

A worker belongs to the fleet until its process ends, or it is silent for `lease_s` seconds. Then its rollouts end as
faults of their devices, which are run again like all others, in another worker if there is one. What it still writes
is left out, because these rollouts have ended.

A worker whose own devices are broken fails fast, and would take most rollouts. It gets no more of them, and is replaced
once those that it has are over, when of its last 16 rollouts at least four, and at least half, were faults of devices,
and this share is more than twice that of the other workers, taken as (faults + 1) / (rollouts + 2): without evidence
about others that is one half, and nobody is singled out when all devices fail.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Collection
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from cua_rl.cluster import ActorLost
from cua_rl.environments.pool_meter import MeterReading, merge_readings
from cua_rl.events import Recorder, RolloutSource, TurnTaken
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.errors import ConfigError, CuaError
from cua_rl.types.rollout import AdapterRef, Rollout, StopReason
from cua_rl.workers.worker import Report

logger = logging.getLogger(__name__)

_RECORD, _MIN_FAULTS = 16, 4
_REST_S = 60.0  # of a worker with broken devices
_REMIND_S = 30.0


class Adapters(Protocol):
    """The adapters on the model servers."""

    current: AdapterRef | None

    def pin(self, adapter: AdapterRef) -> None: ...

    def unpin(self, adapter: AdapterRef) -> None: ...


class Worker(Protocol):
    """Calls methods of a `RolloutWorker`, in this order; raises `ActorLost`, or what they raise."""

    async def call(self, method: str, *arguments: object) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Why a worker serves no longer."""

    why: str
    is_lost: bool = True
    """It cannot be asked to end."""
    has_worked: bool = False
    rest_s: float = 0.0
    """How long no other should take its place."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Lease:
    """A rollout that waits for a worker or has one."""

    job: RolloutJob
    ended: asyncio.Future[Rollout]
    member: "_Member | None" = None
    asking: asyncio.Task[None] | None = None
    started_at: float = field(default_factory=time.time)

    def end(self, rollout: Rollout) -> bool:
        """End it, unless it has ended already; whether it had not."""
        if is_running := not self.ended.done():
            self.ended.set_result(rollout)
        return is_running


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    name: str
    num_slots: int
    worker: Worker
    leases: set[_Lease] = field(default_factory=set[_Lease])
    adapters: set[AdapterRef] = field(default_factory=set[AdapterRef])
    """What it may use; pinned for it."""
    is_open: bool = False
    """Gets rollouts: it has answered, and its devices work."""
    is_broken: bool = False
    has_worked: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """A `Runner` over workers that come and go; rollouts wait while all of them are busy or there is none.

    The policy of a worker's rollouts is that of `adapters`. `recorder` is flushed before the first rollout of a step or
    evaluation starts: workers write rows that belong to its row. `names` are the workers that there should be.
    """

    def __init__(
        self,
        adapters: Adapters,
        recorder: Recorder,
        names: Collection[str],
        *,
        lease_s: float = 15.0,
        poll_s: float = 2.0,
    ) -> None:
        self._adapters = adapters
        self._recorder = recorder
        self._lease_s = lease_s
        self._poll_s = poll_s
        self._members: dict[str, _Member] = {}
        self._absent = dict.fromkeys(names, "no node has room for it yet, or it opens its devices")
        self._refused: set[str] = set()
        self._records = {name: deque[bool](maxlen=_RECORD) for name in names}
        """Whether the last rollouts of each worker were faults of their devices."""
        self._waiting: deque[_Lease] = deque()
        self._durable: set[RolloutSource] = set()
        self._failure: CuaError | None = None
        self._num_lost = 0
        self._readings: list[MeterReading] = []
        self._cancelling: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> dict[str, int]:
        """The number of rollouts of each worker, by its name."""
        return {name: len(member.leases) for name, member in self._members.items()}

    def take_metrics(self) -> dict[str, float]:
        """Metrics of workers and their devices since the last call; their names are in `cua_rl/metrics.py`."""
        metrics = merge_readings(self._readings)
        metrics |= {
            "device/num_workers": float(len(self._members)),
            "device/num_workers_missing": float(len(self._absent)),
            "device/num_workers_lost": float(self._num_lost),
        }
        self._readings, self._num_lost = [], 0
        self._name_absent()
        return metrics

    async def run(self, job: RolloutJob) -> Rollout:
        """Run one rollout in a worker; raises what stops the run."""
        if job.source not in self._durable:
            await self._recorder.flush()
            self._durable.add(job.source)
        if self._failure is not None:
            raise self._failure
        lease = _Lease(job=job, ended=asyncio.get_running_loop().create_future())
        (self._waiting.appendleft if job.failed_in else self._waiting.append)(lease)
        self._assign()
        with ExitStack() as pinned:
            if job.adapter is not None:
                self._adapters.pin(job.adapter)
                pinned.callback(self._adapters.unpin, job.adapter)
            try:
                return await lease.ended
            finally:
                self._withdraw(lease)

    async def serve(self, name: str, num_slots: int, worker: Worker) -> End:
        """Give rollouts to a worker until it is lost, or its devices turn out to be broken."""
        member = _Member(name=name, num_slots=num_slots, worker=worker)
        self._members[name] = member
        self._absent.pop(name, None)
        logger.info("worker=%s joined num_slots=%d", name, num_slots)
        end: End | None = None
        try:
            end = await self._watch(member)
            return end
        finally:
            del self._members[name]
            self._release(member, set(member.adapters))
            if end is not None:
                self._give_up(member, end)

    def refuse(self, name: str, error: CuaError) -> None:
        """Go on without a worker that cannot work; the run ends with the error if there is no other."""
        self._absent[name] = f"it is left out: {error}"
        self._refused.add(name)
        if self._refused >= self._records.keys():
            self._fail(CuaError(f"no rollout worker is left; the last one, {name!r}: {error}"))
        logger.warning("worker=%s left out: %s", name, error)

    def announce(self) -> None:
        """Tell the workers that there is another policy."""
        for member in self._members.values():
            member.changed.set()

    async def remind(self) -> None:
        """Say why rollouts wait while there is no worker at all, until cancelled."""
        while True:
            await asyncio.sleep(_REMIND_S)
            if self._waiting and not self._members:
                self._name_absent()

    def _name_absent(self) -> None:
        if self._absent:
            reasons = "; ".join(f"{name}: {why}" for name, why in sorted(self._absent.items()))
            logger.warning("%d of %d rollout workers do not run. %s", len(self._absent), len(self._records), reasons)

    async def _watch(self, member: _Member) -> End:
        """Exchange policies and reports with a worker until it is lost or broken."""
        while not member.is_broken or member.leases:
            member.changed.clear()
            known, policy = set(member.adapters), self._share_policy(member)
            asking = asyncio.ensure_future(member.worker.call("report", policy))
            try:
                # in parts: of the time for which this process was stopped, only one counts
                for _ in range(15):
                    if (await asyncio.wait([asking], timeout=self._lease_s / 15))[0]:
                        break
                else:
                    return End(why=f"it was silent for {self._lease_s:g} s", has_worked=member.has_worked)
                report: Report = asking.result()
            except ActorLost as lost:
                return End(why=str(lost), has_worked=member.has_worked)
            finally:
                asking.cancel()
            if report.devices.metrics:
                self._readings.append(report.devices)
            # what was pinned meanwhile is not in the report
            self._release(member, known - report.adapters - {self._adapters.current})
            if not member.is_open and not member.is_broken:
                member.is_open = True
                self._assign()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._poll_s):
                    await member.changed.wait()
        record = self._records[member.name]
        why = f"{sum(record)} of its last {len(record)} rollouts were faults of devices, unlike those of other workers"
        record.clear()
        return End(why=why, is_lost=False, rest_s=_REST_S)

    def _share_policy(self, member: _Member) -> AdapterRef | None:
        adapter = self._adapters.current
        if adapter is not None and adapter not in member.adapters:
            self._adapters.pin(adapter)
            member.adapters.add(adapter)
        return adapter

    def _release(self, member: _Member, adapters: Collection[AdapterRef | None]) -> None:
        for adapter in member.adapters.intersection(adapters):
            self._adapters.unpin(adapter)
            member.adapters.remove(adapter)

    def _give_up(self, member: _Member, end: End) -> None:
        """End the rollouts of a worker that serves no longer."""
        self._absent[member.name] = end.why
        self._num_lost += 1
        logger.warning("worker=%s given up num_rollouts=%d: %s", member.name, len(member.leases), end.why)
        for lease in list(member.leases):
            lease.end(_lost(lease, member.name, end.why))

    def _fail(self, error: CuaError) -> None:
        """Let all rollouts raise `error`, which stops the run."""
        self._failure = error
        for lease in [*self._waiting, *(lease for member in self._members.values() for lease in member.leases)]:
            if not lease.ended.done():
                lease.ended.set_exception(error)

    def _assign(self) -> None:
        """Give waiting rollouts to free slots, in their order; one that failed in a worker waits for another."""
        for lease in list(self._waiting):
            members = [member for member in self._members.values() if member.is_open]
            if all(len(member.leases) >= member.num_slots for member in members):
                return
            others = [member for member in members if member.name not in lease.job.failed_in] or members
            member = min(others, key=lambda one: len(one.leases) / one.num_slots)
            if len(member.leases) < member.num_slots:
                self._waiting.remove(lease)
                lease.member = member
                member.leases.add(lease)
                lease.asking = asyncio.create_task(self._ask(member, lease), name=f"rollout-{lease.job.rollout_id}")

    async def _ask(self, member: _Member, lease: _Lease) -> None:
        """Have a worker run a rollout."""
        try:
            rollout: Rollout = await member.worker.call("run", _bare(lease.job), self._share_policy(member))
        except ActorLost as lost:  # its next report says whether it is
            member.is_open = False
            member.changed.set()
            self._abandon(lease, member)
            lease.end(_lost(lease, member.name, str(lost)))
        except CuaError as error:
            kind = ConfigError if isinstance(error, ConfigError) else CuaError
            if not lease.ended.done():
                lease.ended.set_exception(kind(f"{error} (in rollout worker {member.name!r})"))
        else:
            if lease.end(rollout):
                self._review(member, rollout)

    def _review(self, member: _Member, rollout: Rollout) -> None:
        """Learn from a rollout whether a worker's devices are broken; faults of lost ones and branches say nothing."""
        is_fault = not rollout.parent_id and rollout.stop_reason in (StopReason.DEVICE_ERROR, StopReason.TIME_LIMIT)
        self._records[member.name].append(is_fault)
        member.has_worked = member.has_worked or not rollout.stop_reason.is_fault
        for one in self._members.values():
            if is_singled_out(one.name, self._records):
                one.is_open, one.is_broken = False, True
                one.changed.set()

    def _withdraw(self, lease: _Lease) -> None:
        """Forget a rollout that has ended or was cancelled."""
        member = lease.member
        if member is None:
            self._waiting.remove(lease)
            return
        member.leases.remove(lease)
        if member.is_broken:
            member.changed.set()
        if lease.asking is not None and not lease.asking.done():
            lease.asking.cancel()
            if self._members.get(member.name) is member:
                self._abandon(lease, member)
        self._assign()

    def _abandon(self, lease: _Lease, member: _Member) -> None:
        """Tell a worker to end a rollout."""

        async def cancel() -> None:
            with suppress(CuaError):
                await member.worker.call("cancel", lease.job.rollout_id)

        cancelling = asyncio.create_task(cancel())
        self._cancelling.add(cancelling)
        cancelling.add_done_callback(self._cancelling.discard)


def is_singled_out(name: str, records: dict[str, deque[bool]]) -> bool:
    """Whether a worker's devices fail, and those of others do not: see the rule above."""
    own = records[name]
    if sum(own) < max(_MIN_FAULTS, len(own) / 2):
        return False
    others = [is_fault for other, record in records.items() if other != name for is_fault in record]
    return sum(own) / len(own) > 2 * (sum(others) + 1) / (len(others) + 2)


class ReportingRunner:
    """Reports the starts and turns of remote rollouts once they have ended, to a recorder that sees no worker's."""

    def __init__(self, runner: Fleet, recorder: Recorder, max_turns: int) -> None:
        self._runner = runner
        self._recorder = recorder
        self._max_turns = max_turns

    async def run(self, job: RolloutJob) -> Rollout:
        """Run one rollout."""
        rollout = await self._runner.run(job)
        if rollout.device_id is not None:
            started = job.started(rollout.device_id, self._max_turns)
            await self._recorder.record(replace(started, worker=rollout.worker))
            for turn in rollout.turns:
                await self._recorder.record(TurnTaken(rollout_id=job.rollout_id, turn=turn))
        return rollout


def _bare(job: RolloutJob) -> RolloutJob:
    """A job that can travel: what a task does are functions, which the worker has by the task's name."""
    return replace(job, task=replace(job.task, validate=None, prepare=None, read_instruction=None, world=None))


def _lost(lease: _Lease, worker: str, why: str) -> Rollout:
    """The record of a rollout whose worker is gone, and with it the device."""
    job = lease.job
    return Rollout(
        rollout_id=job.rollout_id,
        task_id=job.task.task_id,
        seed=job.task.seed,
        group_index=job.group_index,
        member_index=job.member_index,
        device_id=None,
        worker=worker,
        turns=(),
        stop_reason=StopReason.DEVICE_ERROR,
        answer=None,
        validation=None,
        reward=None,
        error=f"rollout worker {worker!r} was given up: {why}",
        started_at=lease.started_at,
        duration_s=time.time() - lease.started_at,
        parent_id=job.fork.parent_id,
        fork_turn=len(job.fork.turns),
    )
