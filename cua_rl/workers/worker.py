"""A rollout worker: asks the controller what to run, runs it, and delivers how it ended."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import aiohttp

from cua_rl.events import Recorder
from cua_rl.rollout.group import Runner
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.codec import decode, encode
from cua_rl.types.errors import ConfigError, CuaError
from cua_rl.types.rollout import AdapterRef
from cua_rl.workers.worker_wire import (
    Ended,
    Failure,
    Hello,
    Orders,
    PlannedRollout,
    Report,
    Welcome,
    code_version,
)

logger = logging.getLogger(__name__)

_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.1, 2.0
_REPLY_S = 12.0  # orders come within five seconds
_MAX_DELIVERIES = 16  # at a time; all rollouts of a step may end together, and reports must get through
_BYTES_PER_S = 100_000  # the slowest link that the controller accepts


class GivenUp(CuaError):
    """The controller has given this worker up, or has restarted: it registers again."""


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
    make_job: Callable[[PlannedRollout], RolloutJob]
    device_metrics: Callable[[], Mapping[str, float]] = dict[str, float]
    """Metrics of the devices since the last call."""


class ControllerLink:
    """Requests to the controller, repeated through failures of the network for at most `patience_s` seconds."""

    def __init__(self, session: aiohttp.ClientSession, url: str, patience_s: float) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._patience_s = patience_s
        self._worker_id = ""
        self._delivering = asyncio.Semaphore(_MAX_DELIVERIES)

    async def register(self, name: str, num_slots: int) -> Welcome:
        """Become a worker of the run."""
        hello = Hello(name=name, num_slots=num_slots, code_version=code_version())
        try:
            welcome = decode(await self._post("/workers", hello), Welcome)
        except GivenUp as refused:
            raise ConfigError(str(refused)) from refused
        self._worker_id = welcome.worker_id
        return welcome

    async def report(self, report: Report) -> Orders:
        """Report rollouts, receive orders; raises `GivenUp`."""
        return decode(await self._post(f"/workers/{self._worker_id}/orders", report), Orders)

    async def deliver(self, rollout_id: str, ended: Ended) -> None:
        """Hand over the end of a rollout, or drop it if nothing waits for it."""
        path = f"/workers/{self._worker_id}/rollouts/{rollout_id}"
        try:
            async with self._delivering:
                await self._post(path, ended)
        except GivenUp as refused:  # if it concerns the worker and not only the rollout, the next report says so
            logger.info("rollout_id=%s dropped: %s", rollout_id, refused)

    async def _post(self, path: str, message: object) -> bytes:
        body = await asyncio.to_thread(encode, message)
        deadline, delay_s = time.monotonic() + self._patience_s, _FIRST_RETRY_S
        while True:
            try:
                timeout = aiohttp.ClientTimeout(total=_REPLY_S + len(body) / _BYTES_PER_S, sock_connect=_REPLY_S)
                async with self._session.post(f"{self._url}{path}", data=body, timeout=timeout) as response:
                    reply = await response.read()
                    if response.ok:
                        return reply
                    failure = f"{response.status}: {reply[:500].decode(errors='replace')}"
                    status = response.status
            except (aiohttp.ClientError, TimeoutError) as error:
                failure, status = f"{type(error).__name__} {error}", 0
            if status == HTTPStatus.GONE:
                raise GivenUp(failure)
            if HTTPStatus.BAD_REQUEST <= status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in (408, 429):
                raise ConfigError(f"expected the controller at {self._url} to take this worker, got {failure}")
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"expected a controller at {self._url}, got none within {self._patience_s:g} s ({failure}); "
                    "check the address"
                )
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_RETRY_S)


@asynccontextmanager
async def open_link(url: str, token: str, patience_s: float) -> AsyncGenerator[ControllerLink]:
    """A link to the controller at `url`."""
    headers = {"Authorization": f"Bearer {token}"}
    connector = aiohttp.TCPConnector(keepalive_timeout=4.0)  # less than the 5 s after which the controller closes them
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        yield ControllerLink(session, url, patience_s)


async def work(link: ControllerLink, place: Workplace) -> None:
    """Run what the controller orders until the run is over; raises `GivenUp`, or the error of a bug in a rollout.

    However it ends, all rollouts have stopped and their devices are returned.
    """
    running: dict[str, asyncio.Task[None]] = {}
    cancelled: set[asyncio.Task[None]] = set()
    reported_at = time.monotonic()

    try:
        while True:
            for rollout_id in [one for one, task in running.items() if task.done()]:
                running.pop(rollout_id).result()
            now = time.monotonic()
            report = Report(
                running=tuple(running),
                adapters=_adapters(place.policies),
                period_s=now - reported_at,
                device_metrics=place.device_metrics(),
            )
            orders, reported_at = await link.report(report), now
            if orders.is_over:
                return
            if orders.adapter is not None and orders.adapter != place.policies.current:
                place.policies.follow(orders.adapter)
            for task in [running.pop(rollout_id) for rollout_id in orders.cancel if rollout_id in running]:
                task.cancel()
                cancelled.add(task)
                task.add_done_callback(cancelled.discard)
            for planned in orders.start:
                if planned.rollout_id in running:  # the order crossed the report that says so
                    continue
                name = f"rollout-{planned.rollout_id}"
                running[planned.rollout_id] = asyncio.create_task(_run(link, place, planned), name=name)
    finally:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), *cancelled, return_exceptions=True)


def _adapters(policies: Policies) -> tuple[AdapterRef, ...]:
    current = policies.current
    return tuple(policies.used) if current is None else (current, *(policies.used - {current}))


async def _run(link: ControllerLink, place: Workplace, planned: PlannedRollout) -> None:
    try:
        rollout = await place.runner.run(place.make_job(planned))
        await place.recorder.flush()  # the controller finds the turns in the database
        ended = Ended(outcome=rollout)
    except CuaError as error:  # not an infrastructure fault: it would have stopped a run in one process
        ended = Ended(outcome=Failure(is_config_error=isinstance(error, ConfigError), message=str(error)))
    await link.deliver(planned.rollout_id, ended)
