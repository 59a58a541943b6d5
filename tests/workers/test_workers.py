"""Workers in this process, called as Ray would; what they run is faked."""

import asyncio
import pickle
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.cluster import ActorLost
from cua_rl.database.writer import TimedEvent
from cua_rl.environments.pool_meter import MeterReading
from cua_rl.events import RolloutSource, RolloutStarted, TurnTaken
from cua_rl.rollout.group import GroupJob, run_group
from cua_rl.rollout.run import RolloutJob
from cua_rl.types.errors import ConfigError, CuaError
from cua_rl.types.rollout import AdapterRef, Rollout, SamplingParams, StopReason
from cua_rl.workers.fleet import End, Fleet, ReportingRunner, is_singled_out
from cua_rl.workers.worker import NamingRecorder, Report, RolloutWorker, Workplace, event_in_run_time
from tests.builders import encoded_image, image, model_turn, prompt, rollout, text, turn
from tests.fakes import FakeRecorder, make_task
from tests.patience import patience

PARAMS = SamplingParams(max_tokens=8, temperature=1.0)
SOURCE = RolloutSource(phase="step", step=1)
FIRST, SECOND = (AdapterRef(path=Path(f"/adapters/{version}"), policy_version=version) for version in (1, 2))
NAMES = ("a", "b", "c")


class FakeAdapters:
    """Both sides' view of the model servers."""

    def __init__(self) -> None:
        self.current: AdapterRef | None = FIRST
        self.uses = Counter[AdapterRef]()

    @property
    def used(self) -> frozenset[AdapterRef]:
        return frozenset(+self.uses)

    def pin(self, adapter: AdapterRef) -> None:
        self.uses[adapter] += 1

    def unpin(self, adapter: AdapterRef) -> None:
        self.uses[adapter] -= 1

    def follow(self, adapter: AdapterRef) -> None:
        self.current = adapter


@dataclass
class FakePlace:
    """Ends each rollout when it may; `begun` and `cancelled` are ids. With `is_broken`, each is a fault at once."""

    name: str
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list[str])
    cancelled: list[str] = field(default_factory=list[str])
    error: CuaError | None = None
    is_broken: bool = False
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    policies: FakeAdapters = field(default_factory=FakeAdapters)
    recorder: FakeRecorder = field(default_factory=FakeRecorder)
    clock_ahead_s: float = 0.0
    is_closed: bool = False

    async def run(self, plan: RolloutJob) -> Rollout:
        self.begun.append(plan.rollout_id)
        if self.is_broken:
            return faulty(plan)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(plan.rollout_id)
            raise
        if self.error is not None:
            raise self.error
        ended = rollout(turn(0, model_turn(prompt(text(1, 2)))).model, rollout_id=plan.rollout_id)
        return replace(ended, device_id="phone", member_index=plan.member_index)

    @asynccontextmanager
    async def open(self) -> AsyncGenerator[Workplace]:
        def take_metrics() -> dict[str, float]:
            return self.metrics.pop() if self.metrics else {}

        yield Workplace(
            runner=self,
            recorder=self.recorder,
            policies=self.policies,
            device_metrics=take_metrics,
            clock_ahead_s=self.clock_ahead_s,
        )
        self.is_closed = True


def faulty(job: RolloutJob) -> Rollout:
    ended = rollout(rollout_id=job.rollout_id)
    fault = {"reward": None, "validation": None, "stop_reason": StopReason.DEVICE_ERROR, "error": "no browser"}
    return replace(ended, **fault, member_index=job.member_index)


def plan(**changes: Any) -> RolloutJob:
    job = RolloutJob(source=SOURCE, group_id="g", group_index=0, member_index=0, task=make_task(), params=PARAMS)
    return replace(job, **changes)


@dataclass
class FakeActor:
    """Calls a worker as an actor's handle does: what crosses is pickled, and a process that died answers nobody."""

    worker: RolloutWorker
    died: asyncio.Event = field(default_factory=asyncio.Event)
    is_stopped: bool = False
    is_cut_off: bool = False

    async def call(self, method: str, *arguments: object) -> Any:
        call: Callable[..., Any] = getattr(self.worker, method)
        if self.is_cut_off:
            raise ActorLost("the link is cut")
        if self.is_stopped:
            await asyncio.Event().wait()
        answering = asyncio.ensure_future(call(*pickle.loads(pickle.dumps(arguments))))
        dying = asyncio.ensure_future(self.died.wait())
        await asyncio.wait([answering, dying], return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if self.died.is_set():
            answering.cancel()
            raise ActorLost("its process ended")
        return pickle.loads(pickle.dumps(answering.result()))

    async def kill(self) -> None:
        """As by SIGKILL: no more of it runs."""
        self.died.set()
        await asyncio.sleep(0)


@dataclass
class Member:
    """A worker that serves."""

    place: FakePlace
    actor: FakeActor
    serving: asyncio.Task[End]


@dataclass
class Bench:
    """A fleet, and workers that join and leave."""

    fleet: Fleet
    adapters: FakeAdapters

    @asynccontextmanager
    async def member(self, name: str, num_slots: int = 2) -> AsyncGenerator[Member]:
        place = FakePlace(name)
        opening: Callable[[], AbstractAsyncContextManager[Workplace]] = place.open
        worker = RolloutWorker(name, num_slots, opening)
        await worker.open()
        actor = FakeActor(worker)
        serving = asyncio.create_task(self.fleet.serve(name, num_slots, actor))
        try:
            await until(lambda: name in self.fleet.workers)
            yield Member(place, actor, serving)
        finally:
            serving.cancel()
            with suppress(asyncio.CancelledError):
                await serving
            await worker.close()

    @asynccontextmanager
    async def worker(self, name: str, num_slots: int = 2) -> AsyncGenerator[FakePlace]:
        async with self.member(name, num_slots) as member:
            yield member.place


@pytest_asyncio.fixture
async def bench() -> Bench:
    adapters = FakeAdapters()
    return Bench(Fleet(adapters, FakeRecorder(), NAMES, lease_s=1.0, poll_s=0.05), adapters)


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(patience(10.0)):
        while not condition():
            await asyncio.sleep(0.01)


async def test_rollouts_go_to_the_worker_with_the_most_free_slots_and_wait_while_there_is_none(bench: Bench) -> None:
    async with bench.worker("a", num_slots=1) as a, bench.worker("b", num_slots=3) as b:
        running = [asyncio.create_task(bench.fleet.run(plan())) for _ in range(6)]
        await until(lambda: len(a.begun) == 1 and len(b.begun) == 3)
        a.gate.set()
        await until(lambda: len(a.begun) == 3)  # the two that waited
        b.gate.set()
        ended = await asyncio.gather(*running)

    assert Counter(one.worker for one in ended) == {"a": 3, "b": 3}
    assert {one.rollout_id for one in ended} == {*a.begun, *b.begun}


async def test_a_rollout_whose_worker_dies_is_a_fault_and_runs_again_once_in_another(bench: Bench) -> None:
    group_plan = GroupJob(source=SOURCE, group_size=2, params=PARAMS)
    async with bench.worker("b") as b, bench.member("a") as a:
        group = asyncio.create_task(run_group(bench.fleet, make_task(), 0, group_plan))
        await until(lambda: len(a.place.begun) == 1 and len(b.begun) == 1)
        await a.actor.kill()
        end = await a.serving
        b.gate.set()
        ended = await group

    assert [one.worker for one in ended.rollouts] == ["b", "b"]
    (lost,) = ended.faulty
    assert (lost.rollout_id, lost.stop_reason, lost.reward) == (a.place.begun[0], StopReason.DEVICE_ERROR, None)
    assert (lost.worker, lost.error) == ("a", "rollout worker 'a' was given up: its process ended")
    assert len(b.begun) == 2
    assert (end.why, end.is_lost, end.has_worked) == ("its process ended", True, False)


async def test_a_rollout_that_runs_again_goes_before_those_of_later_groups(bench: Bench) -> None:
    group_plan = GroupJob(source=SOURCE, group_size=2, params=PARAMS)
    later = plan(group_index=1)
    async with bench.worker("b", num_slots=1) as b, bench.member("a", num_slots=1) as a:
        group = asyncio.create_task(run_group(bench.fleet, make_task(), 0, group_plan))
        await until(lambda: a.place.begun and b.begun)
        waiting = asyncio.create_task(bench.fleet.run(later))
        await a.actor.kill()
        await a.serving
        b.gate.set()
        ended = await group
        await waiting

    (again,) = {one.rollout_id for one in ended.rollouts} - {b.begun[0]}
    assert b.begun[1:] == [again, later.rollout_id]


async def test_a_rollout_that_failed_in_a_worker_waits_for_another_one(bench: Bench) -> None:
    async with bench.worker("a") as a, bench.worker("b", num_slots=1) as b:
        busy = asyncio.create_task(bench.fleet.run(plan(failed_in=frozenset({"a"}))))
        await until(lambda: b.begun)
        again = asyncio.create_task(bench.fleet.run(plan(failed_in=frozenset({"a"}))))
        first = asyncio.create_task(bench.fleet.run(plan()))
        await until(lambda: a.begun)
        b.gate.set()
        ended = await asyncio.gather(busy, again)
        a.gate.set()
        await first
        alone = [asyncio.create_task(bench.fleet.run(plan(failed_in=frozenset({"a", "b"}))))]
        await asyncio.gather(*alone)

    assert [one.worker for one in ended] == ["b", "b"]
    assert a.begun[:1] == [first.result().rollout_id]


async def test_a_silent_worker_is_given_up_and_its_late_answer_dropped(bench: Bench) -> None:
    async with bench.member("a") as a:
        running = asyncio.create_task(bench.fleet.run(plan()))
        await until(lambda: a.place.begun)
        a.actor.is_stopped = True
        async with asyncio.timeout(patience(5.0)):
            end = await a.serving
        lost = await running
        a.place.gate.set()  # it goes on, and what it says is heard by nobody

    assert (end.why, end.is_lost) == ("it was silent for 1 s", True)
    assert lost.stop_reason is StopReason.DEVICE_ERROR
    assert bench.adapters.used == frozenset()


async def test_a_controller_that_was_stopped_for_a_while_gives_no_worker_up(bench: Bench) -> None:
    async with bench.member("a") as a:
        running = asyncio.create_task(bench.fleet.run(plan()))
        await until(lambda: a.place.begun)
        a.actor.is_stopped = True  # while it is, an answer is on its way
        await asyncio.sleep(0.2)
        time.sleep(1.2)  # noqa: ASYNC251 - as by SIGSTOP: longer than the lease, and nobody listens
        for _ in range(10):
            await asyncio.sleep(0)
        assert not a.serving.done()
        a.place.gate.set()
        ended = await running

    assert (ended.worker, ended.rollout_id) == ("a", a.place.begun[0])


async def test_a_worker_that_cannot_be_reached_for_a_moment_ends_its_rollout_and_gets_others(bench: Bench) -> None:
    async with bench.member("a") as a:
        a.actor.is_cut_off = True
        lost = await bench.fleet.run(plan())
        end = await a.serving  # its report fails as well

    assert lost.error == "rollout worker 'a' was given up: the link is cut"
    assert end.why == "the link is cut"


async def test_a_worker_that_died_with_its_rollouts_is_not_taken_for_one_with_broken_devices(bench: Bench) -> None:
    async with bench.worker("b") as b:
        b.gate.set()
        await bench.fleet.run(plan())  # others work
        async with bench.member("a", num_slots=8) as a:
            lost = [asyncio.create_task(bench.fleet.run(plan(failed_in=frozenset({"b"})))) for _ in range(8)]
            await until(lambda: len(a.place.begun) == 8)
            await a.actor.kill()
            await asyncio.gather(a.serving, *lost)
        async with bench.member("a", num_slots=8) as a:
            a.place.gate.set()
            ended = [await bench.fleet.run(plan(failed_in=frozenset({"b"}))) for _ in range(2)]
            assert [one.worker for one in ended] == ["a", "a"]
            assert not a.serving.done()


async def test_a_rollout_that_is_cancelled_ends_in_its_worker_too(bench: Bench) -> None:
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.fleet.run(plan()))
        await until(lambda: a.begun)
        running.cancel()
        await until(lambda: a.cancelled)

    assert a.cancelled == a.begun


async def test_a_worker_that_closes_ends_its_rollouts_before_its_place(bench: Bench) -> None:
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.fleet.run(plan()))
        await until(lambda: a.begun)
    running.cancel()

    assert (a.cancelled, a.is_closed) == (a.begun, True)


async def test_what_would_stop_the_run_in_one_process_stops_it_in_a_worker(bench: Bench) -> None:
    async with bench.worker("a") as a:
        a.error = ConfigError("expected a server that takes 9 images, it refused them")
        a.gate.set()
        with pytest.raises(ConfigError, match=r"takes 9 images.*rollout worker 'a'"):
            await bench.fleet.run(plan())


async def test_a_run_goes_on_without_workers_that_are_refused_and_says_why_none_is_left(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = asyncio.create_task(bench.fleet.run(plan()))
    await asyncio.sleep(0)
    for name in NAMES:
        assert not waiting.done()
        bench.fleet.refuse(name, ConfigError("expected the run's code on host-7, got others; copy them"))
    with pytest.raises(CuaError, match=r"no rollout worker is left.*'c'.*run's code on host-7"):
        await waiting
    with pytest.raises(CuaError, match="no rollout worker is left"):
        await bench.fleet.run(plan())

    assert bench.fleet.take_metrics()["device/num_workers_missing"] == 3.0
    assert "3 of 3 rollout workers do not run. a: it is left out: expected the run's code on host-7" in caplog.text


async def test_workers_that_have_no_room_yet_are_named_in_each_step(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async with bench.worker("a"), bench.worker("c"):
        for _ in range(2):
            assert bench.fleet.take_metrics()["device/num_workers_missing"] == 1.0
    warnings = [record.getMessage() for record in caplog.records if "do not run" in record.getMessage()]
    assert (
        warnings == ["1 of 3 rollout workers do not run. b: no node has room for it yet, or it opens its devices"] * 2
    )


async def test_workers_hear_of_a_policy_before_its_rollouts_and_keep_the_last_one_until_they_have(bench: Bench) -> None:
    async with bench.worker("a") as a:
        await until(lambda: bench.adapters.uses[FIRST] == 1)
        bench.adapters.current = SECOND
        bench.fleet.announce()
        await until(lambda: a.policies.current == SECOND)
        await until(lambda: bench.adapters.uses == {FIRST: 0, SECOND: 1})
        a.policies.pin(FIRST)  # a request of the worker that takes long
        bench.adapters.current = FIRST
        bench.fleet.announce()
        await until(lambda: bench.adapters.uses[FIRST] == 1)

    assert bench.adapters.used == frozenset()


async def test_a_rollout_brings_its_policy_to_a_worker_that_has_not_heard_of_it(bench: Bench) -> None:
    async with bench.worker("a") as a:
        await until(lambda: bench.adapters.uses[FIRST] == 1)
        bench.adapters.current = SECOND  # not announced yet
        running = asyncio.create_task(bench.fleet.run(plan()))
        await until(lambda: a.begun)
        assert (a.policies.current, bench.adapters.uses[SECOND]) == (SECOND, 1)
        a.gate.set()
        await running


async def test_the_adapter_of_an_evaluation_stays_while_its_rollouts_run(bench: Bench) -> None:
    bench.adapters.current = None
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.fleet.run(plan(adapter=SECOND)))
        await until(lambda: a.begun)
        assert bench.adapters.used == {SECOND}
        a.gate.set()
        await running

    assert bench.adapters.used == frozenset()


async def test_devices_of_all_workers_are_measured_as_those_of_one_pool(bench: Bench) -> None:
    class Reporting:
        reports = 0

        async def call(self, method: str, *_: object) -> Any:
            Reporting.reports += 1
            periods = [(1.0, 4.0, 1.0, 2.0), (3.0, 8.0, 0.0, 1.0)]
            if method != "report" or Reporting.reports > len(periods):
                await asyncio.Event().wait()
            num_leases, lease_s, busy_frac, most = periods[Reporting.reports - 1]
            metrics = {
                "device/num_leases": num_leases,
                "device/lease_s/mean": lease_s,
                "device/busy_frac": busy_frac,
                "device/leased/max": most,
            }
            reading = MeterReading(pool="a", device_s=2 * num_leases, metrics=metrics)
            return Report(adapters=frozenset(), devices=reading)

    serving = asyncio.create_task(bench.fleet.serve("a", 2, Reporting()))
    await until(lambda: Reporting.reports == 3)
    others = {"device/num_workers": 1.0, "device/num_workers_missing": 2.0, "device/num_workers_lost": 0.0}
    assert bench.fleet.take_metrics() == {
        "device/num_leases": 4.0,
        "device/lease_s/mean": 7.0,  # (1 * 4 + 3 * 8) / 4
        "device/busy_frac": 0.25,  # one of four seconds
        "device/leased/max": 2.0,
        **others,
    }
    assert bench.fleet.take_metrics() == others
    serving.cancel()


@pytest.mark.parametrize(
    ("own", "others", "is_out"),
    [
        ("FFFF", "", False),  # nobody to compare with: 4/4 is not more than 2 * 1/2
        ("FFFF", ".", True),  # 4/4 > 2 * 1/3
        ("FFF", "........", False),  # too few
        ("FFFF....", "..............", True),  # half of eight, others 1/16
        ("FFFF.....", "..............", False),  # less than half
        ("FFFFFFFF", "FFFFFFFF", False),  # the service behind all of them is down
        ("FFFFFFFF", "FFF.....", True),  # 8/8 > 2 * 4/10
    ],
)
def test_a_worker_is_singled_out_if_its_devices_fail_and_those_of_others_do_not(
    own: str, others: str, is_out: bool
) -> None:
    records = {name: deque(mark == "F" for mark in marks) for name, marks in (("a", own), ("b", others))}
    assert is_singled_out("a", records) is is_out


async def test_a_worker_with_broken_devices_loses_no_rollout_of_a_group_and_is_replaced(bench: Bench) -> None:
    group_plan = GroupJob(source=SOURCE, group_size=12, params=PARAMS)
    async with bench.member("a", num_slots=4) as a, bench.worker("b", num_slots=2) as b:
        a.place.is_broken = True
        b.gate.set()
        ended = await run_group(bench.fleet, make_task(), 0, group_plan)
        end = await a.serving
        metrics = bench.fleet.take_metrics()

    assert len(ended.rollouts) == 12  # every member has its place: each failed at most once
    assert {one.worker for one in ended.rollouts} == {"b"}
    assert Counter(one.worker for one in ended.faulty) == {"a": len(ended.faulty)}
    assert (end.is_lost, end.has_worked, end.rest_s) == (False, False, 60.0)
    assert "rollouts were faults of devices, unlike those of other workers" in end.why
    assert (metrics["device/num_workers"], metrics["device/num_workers_lost"]) == (1.0, 1.0)


async def test_the_record_of_a_worker_names_it_with_each_rollout_and_its_device() -> None:
    recorder = FakeRecorder()
    await NamingRecorder(inner=recorder, worker="worker-3").record(plan().started("phone-1", limit=2))

    (started,) = recorder.events
    assert isinstance(started, RolloutStarted)
    assert (started.worker, started.device_id) == ("worker-3", "worker-3/phone-1")


async def test_what_a_worker_with_a_wrong_clock_does_is_recorded_in_the_time_of_the_run() -> None:
    place = FakePlace("a", clock_ahead_s=-3600.0)
    place.gate.set()
    worker = RolloutWorker("a", 1, place.open)
    await worker.open()
    ended = await worker.run(plan(), FIRST)
    await worker.close()
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    taken = TurnTaken(rollout_id="r", turn=turn(0, model_turn(prompt(text(1)))))

    event = event_in_run_time(TimedEvent(event=taken, at=noon), ahead_s=90.0)

    assert ended.started_at == ended.turns[0].model.started_at == 3600.0  # both began at 0 by the worker's clock
    assert event.at == noon - timedelta(seconds=90)
    assert isinstance(event.event, TurnTaken)
    assert event.event.turn.model.started_at == -90.0
    assert event.event.turn.model.prompt is taken.turn.model.prompt  # a screenshot crosses once


async def test_other_recorders_hear_of_rollouts_at_their_end(bench: Bench) -> None:
    recorder = FakeRecorder()
    async with bench.worker("a") as a:
        a.gate.set()
        ended = await ReportingRunner(bench.fleet, recorder, max_turns=2).run(plan())

    started, taken = recorder.events
    assert isinstance(started, RolloutStarted)
    assert (started.device_id, started.worker, started.max_turns) == ("a/phone", "a", 2)
    assert taken == TurnTaken(rollout_id=ended.rollout_id, turn=ended.turns[0])


def test_a_rollout_crosses_with_each_screenshot_once() -> None:
    seen = encoded_image(bytes(300_000))
    one = rollout(model_turn(prompt(text(1), image(bytes(300_000)), text(2))), rollout_id="r")
    turns = tuple(replace(turn, agent=replace(turn.agent, before=seen, after=seen)) for turn in one.turns * 3)

    assert len(pickle.dumps(replace(one, turns=turns))) < 700_000
