"""Workers behind the controller's real address; what they run is faked."""

import asyncio
import pickle
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from cua_rl.events import RolloutSource, RolloutStarted, TurnTaken
from cua_rl.host.http_server import serve_app
from cua_rl.rollout.group import GroupJob, run_group
from cua_rl.rollout.run import RolloutJob
from cua_rl.sampling.server import ServedModel
from cua_rl.types.codec import MessageError, decode, encode
from cua_rl.types.errors import ConfigError, CuaError
from cua_rl.types.rollout import AdapterRef, Rollout, SamplingParams, StopReason
from cua_rl.workers.remote import RemoteRunner, ReportingRunner, WorkerRefused
from cua_rl.workers.worker import ControllerLink, GivenUp, Workplace, open_link, work
from cua_rl.workers.worker_app import make_worker_app
from cua_rl.workers.worker_wire import (
    Ended,
    Hello,
    PlannedRollout,
    Report,
    WorkerSetup,
    code_version,
)
from scripts.red_team.messages import SETS_ATTRIBUTE
from tests.builders import encoded_image, image, model_turn, prompt, rollout, text, turn
from tests.fakes import FakeRecorder, make_task
from tests.patience import patience

PARAMS = SamplingParams(max_tokens=8, temperature=1.0)
SOURCE = RolloutSource(phase="step", step=1)
FIRST, SECOND = (AdapterRef(path=Path(f"/adapters/{version}"), policy_version=version) for version in (1, 2))
SETUP = WorkerSetup(
    settings={},
    log_path="/run",
    database_url="postgresql://nowhere",
    training_id=1,
    attempt_id="0" * 32,
    servers=(("unix:/vllm.sock", None, ServedModel(name="base", max_model_len=2048)),),
    namespace="run",
)


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
    """Ends each rollout when it may; `begun` and `cancelled` are ids."""

    name: str
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    begun: list[str] = field(default_factory=list[str])
    cancelled: list[str] = field(default_factory=list[str])
    error: CuaError | None = None
    policies: FakeAdapters = field(default_factory=FakeAdapters)
    recorder: FakeRecorder = field(default_factory=FakeRecorder)

    async def run(self, plan: RolloutJob) -> Rollout:
        self.begun.append(plan.rollout_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(plan.rollout_id)
            raise
        if self.error is not None:
            raise self.error
        ended = rollout(turn(0, model_turn(prompt(text(1, 2)))).model, rollout_id=plan.rollout_id)
        return replace(ended, device_id=self.name, member_index=plan.member_index)

    def place(self) -> Workplace:
        return Workplace(runner=self, recorder=self.recorder, policies=self.policies, make_job=remade)


def remade(planned: PlannedRollout) -> RolloutJob:
    return replace(plan(), rollout_id=planned.rollout_id, member_index=planned.member_index)


def plan() -> RolloutJob:
    return RolloutJob(source=SOURCE, group_id="g", group_index=0, member_index=0, task=make_task(), params=PARAMS)


@dataclass
class Bench:
    """A controller with an address, and workers that join and leave."""

    runner: RemoteRunner
    adapters: FakeAdapters
    url: str

    @asynccontextmanager
    async def worker(self, name: str, num_slots: int = 2, token: str = "token") -> AsyncGenerator[FakePlace]:
        """A worker that registers again when it is given up; it leaves without a word."""
        place = FakePlace(name)
        async with open_link(self.url, token, patience_s=5.0) as link:
            await link.register(name, num_slots)
            working = asyncio.create_task(self._work(link, place, num_slots))
            try:
                await until(lambda: name in self.runner.workers)
                yield place
            finally:
                working.cancel()
                with suppress(asyncio.CancelledError):
                    await working

    async def _work(self, link: ControllerLink, place: FakePlace, num_slots: int) -> None:
        while True:
            try:
                await work(link, place.place())
            except GivenUp:
                await link.register(place.name, num_slots)
            else:
                return


@pytest_asyncio.fixture
async def bench() -> AsyncGenerator[Bench]:
    adapters = FakeAdapters()
    runner = RemoteRunner(adapters, FakeRecorder(), lambda: SETUP, lease_s=1.0, poll_s=0.3)
    async with serve_app(make_worker_app(runner, "token"), "127.0.0.1", 0, grace_s=0) as url:
        watching = asyncio.create_task(runner.watch())
        yield Bench(runner, adapters, url)
        watching.cancel()


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(patience(10.0)):
        while not condition():
            await asyncio.sleep(0.01)


async def test_rollouts_go_to_the_worker_with_the_most_free_slots_and_wait_while_there_is_none(bench: Bench) -> None:
    async with bench.worker("a", num_slots=1) as a, bench.worker("b", num_slots=3) as b:
        running = [asyncio.create_task(bench.runner.run(plan())) for _ in range(6)]
        await until(lambda: len(a.begun) == 1 and len(b.begun) == 3)
        a.gate.set()
        await until(lambda: len(a.begun) == 3)  # the two that waited
        b.gate.set()
        ended = await asyncio.gather(*running)

    assert Counter(one.device_id for one in ended) == {"a": 3, "b": 3}
    assert {one.rollout_id for one in ended} == {*a.begun, *b.begun}


async def test_a_rollout_whose_worker_dies_is_a_fault_and_runs_again_once_in_another(bench: Bench) -> None:
    group_plan = GroupJob(source=SOURCE, group_size=2, params=PARAMS)
    async with bench.worker("b") as b:
        async with bench.worker("a") as a:
            group = asyncio.create_task(run_group(bench.runner, make_task(), 0, group_plan))
            await until(lambda: len(a.begun) == 1 and len(b.begun) == 1)
        bench.runner.give_up("a", "its process ended with status 137")
        b.gate.set()
        ended = await group

    assert [one.device_id for one in ended.rollouts] == ["b", "b"]
    (lost,) = ended.faulty
    assert (lost.rollout_id, lost.stop_reason, lost.reward) == (a.begun[0], StopReason.DEVICE_ERROR, None)
    assert "its process ended with status 137" in (lost.error or "")
    assert len(b.begun) == 2


async def test_a_rollout_that_runs_again_goes_before_those_of_later_groups(bench: Bench) -> None:
    group_plan = GroupJob(source=SOURCE, group_size=2, params=PARAMS)
    later = replace(plan(), group_index=1)
    async with bench.worker("b", num_slots=1) as b:
        async with bench.worker("a", num_slots=1) as a:
            group = asyncio.create_task(run_group(bench.runner, make_task(), 0, group_plan))
            await until(lambda: a.begun and b.begun)
            waiting = asyncio.create_task(bench.runner.run(later))
        bench.runner.give_up("a", "its process ended with status 137")
        b.gate.set()
        ended = await group
        await waiting

    (again,) = {one.rollout_id for one in ended.rollouts} - {b.begun[0]}
    assert b.begun[1:] == [again, later.rollout_id]


async def test_a_silent_worker_is_given_up_and_its_late_answer_refused(bench: Bench) -> None:
    async with open_link(bench.url, "token", patience_s=1.0) as link:
        worker_id = (await link.register("silent", 1)).worker_id
        running = asyncio.create_task(bench.runner.run(plan()))
        orders = await link.report(Report(running=(), adapters=()))
        rollout_id = orders.start[0].rollout_id
        async with asyncio.timeout(patience(5.0)):
            lost = await running

        with pytest.raises(WorkerRefused):
            bench.runner.accept(worker_id, rollout_id, Ended(outcome=rollout(rollout_id=rollout_id)))
        with pytest.raises(GivenUp):
            await link.report(Report(running=(rollout_id,), adapters=()))
    assert lost.stop_reason is StopReason.DEVICE_ERROR


async def test_a_controller_that_was_stopped_for_a_while_gives_no_worker_up(bench: Bench) -> None:
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.runner.run(plan()))
        await until(lambda: a.begun)
        time.sleep(1.2)  # noqa: ASYNC251 - as by SIGSTOP: longer than the lease, and nobody listens
        a.gate.set()
        ended = await running

    assert (ended.device_id, ended.rollout_id) == ("a", a.begun[0])


async def test_a_worker_that_was_given_up_drops_its_rollouts_and_registers_anew(bench: Bench) -> None:
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.runner.run(plan()))
        await until(lambda: a.begun)
        bench.runner.give_up("a", "the link was cut")
        await running
        await until(lambda: bench.runner.workers == {"a": 0})
        a.gate.set()
        again = await bench.runner.run(plan())

    assert a.cancelled == a.begun[:1]
    assert again.device_id == "a"


async def test_an_order_whose_answer_was_lost_is_given_again_and_a_delivery_counts_once(bench: Bench) -> None:
    async with open_link(bench.url, "token", patience_s=1.0) as link:
        worker_id = (await link.register("a", 1)).worker_id
        running = asyncio.create_task(bench.runner.run(plan()))
        (lost,) = (await link.report(Report(running=(), adapters=()))).start
        (planned,) = (await link.report(Report(running=(), adapters=(FIRST,)))).start
        ended = Ended(outcome=rollout(rollout_id=planned.rollout_id))
        await link.deliver(planned.rollout_id, ended)
        await link.deliver(planned.rollout_id, ended)  # dropped without an error: the first answer may have been lost
        with pytest.raises(WorkerRefused):
            bench.runner.accept(worker_id, planned.rollout_id, ended)

    assert lost == planned
    assert (await running).rollout_id == planned.rollout_id


async def test_a_rollout_that_is_ordered_twice_runs_once(bench: Bench) -> None:
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.runner.run(plan()))
        await until(lambda: a.begun)
        (known,) = [worker.known for worker in bench.runner._workers.values()]  # pyright: ignore[reportPrivateUsage]
        known.clear()  # as by a report that was delayed on its way
        bench.runner.announce()
        await asyncio.sleep(0.1)
        a.gate.set()
        await running

    assert len(a.begun) == 1


async def test_a_rollout_that_is_cancelled_ends_in_its_worker_too(bench: Bench) -> None:
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.runner.run(plan()))
        await until(lambda: a.begun)
        running.cancel()
        await until(lambda: a.cancelled)

    assert a.cancelled == a.begun


async def test_what_would_stop_the_run_in_one_process_stops_it_in_a_worker(bench: Bench) -> None:
    async with bench.worker("a") as a:
        a.error = ConfigError("expected a server that takes 9 images, it refused them")
        a.gate.set()
        with pytest.raises(ConfigError, match=r"takes 9 images.*rollout worker 'a'"):
            await bench.runner.run(plan())
        bench.runner.fail(CuaError("worker a died six times"))
        with pytest.raises(CuaError, match="six times"):
            await bench.runner.run(plan())


async def test_workers_hear_of_a_policy_before_its_rollouts_and_keep_the_last_one_until_they_have(bench: Bench) -> None:
    async with bench.worker("a") as a:
        await until(lambda: bench.adapters.uses[FIRST] == 1)
        bench.adapters.current = SECOND
        bench.runner.announce()
        await until(lambda: a.policies.current == SECOND)
        await until(lambda: bench.adapters.uses == {FIRST: 0, SECOND: 1})
        a.policies.pin(FIRST)  # a request of the worker that takes long
        bench.adapters.current = FIRST
        bench.runner.announce()
        await until(lambda: bench.adapters.uses[FIRST] == 1)
        bench.runner.give_up("a", "test")

    assert bench.adapters.used == frozenset()


async def test_the_adapter_of_an_evaluation_stays_while_its_rollouts_run(bench: Bench) -> None:
    bench.adapters.current = None
    async with bench.worker("a") as a:
        running = asyncio.create_task(bench.runner.run(replace(plan(), adapter=SECOND)))
        await until(lambda: a.begun)
        assert bench.adapters.used == {SECOND}
        a.gate.set()
        await running

    assert bench.adapters.used == frozenset()


async def test_a_run_that_ends_lets_its_workers_go(bench: Bench) -> None:
    async with open_link(bench.url, "token", patience_s=1.0) as link:
        await link.register("a", 1)
        working = asyncio.create_task(work(link, FakePlace("a").place()))
        await until(lambda: bench.adapters.uses[FIRST])
        bench.runner.end()
        async with asyncio.timeout(patience(5.0)):
            await working


async def test_devices_of_all_workers_are_measured_as_those_of_one_pool(bench: Bench) -> None:
    async with open_link(bench.url, "token", patience_s=1.0) as link:
        await link.register("a", 2)
        for num_leases, lease_s, busy_frac, most in ((1.0, 4.0, 1.0, 2.0), (3.0, 8.0, 0.0, 1.0)):
            metrics = {
                "device/num_leases": num_leases,
                "device/lease_s/mean": lease_s,
                "device/busy_frac": busy_frac,
                "device/leased/max": most,
            }
            await link.report(Report(running=(), adapters=(), period_s=num_leases, device_metrics=metrics))

    assert bench.runner.take_metrics() == {
        "device/num_leases": 4.0,
        "device/lease_s/mean": 7.0,  # (1 * 4 + 3 * 8) / 4
        "device/busy_frac": 0.25,  # one of four seconds
        "device/leased/max": 2.0,
        "device/num_workers": 1.0,
        "device/num_workers_lost": 0.0,
    }
    assert bench.runner.take_metrics() == {"device/num_workers": 1.0, "device/num_workers_lost": 0.0}


async def test_nobody_without_the_token_is_a_worker(bench: Bench) -> None:
    with pytest.raises(ConfigError, match="401"):
        async with bench.worker("a", token="guess"):
            pass
    async with aiohttp.ClientSession() as session, session.post(f"{bench.url}/workers", data=b"x") as answer:
        assert answer.status == 401
    assert bench.runner.workers == {}


async def test_a_worker_of_another_version_is_refused(bench: Bench) -> None:
    with pytest.raises(WorkerRefused, match="install the same"):
        bench.runner.register(Hello(name="old", num_slots=1, code_version=f"{code_version()}.1"))


async def test_other_recorders_hear_of_rollouts_at_their_end(bench: Bench) -> None:
    recorder = FakeRecorder()
    async with bench.worker("a") as a:
        a.gate.set()
        ended = await ReportingRunner(bench.runner, recorder, max_turns=2).run(plan())

    started, taken = recorder.events
    assert isinstance(started, RolloutStarted)
    assert (started.device_id, started.max_turns) == ("a", 2)
    assert taken == TurnTaken(rollout_id=ended.rollout_id, turn=ended.turns[0])


async def test_messages_come_out_as_they_went_in_and_nothing_else_does() -> None:
    seen = encoded_image(b"pixels")
    one = rollout(model_turn(prompt(text(1), image(b"pixels"), text(2))), rollout_id="r")
    ended = Ended(outcome=replace(one, turns=tuple(replace(t, agent=replace(t.agent, after=seen)) for t in one.turns)))

    assert decode(encode(ended), Ended) == ended

    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], Awaitable[Any]], tuple[str]]:
            return __import__("os").system, ("touch /tmp/never",)

    with pytest.raises(MessageError, match="expected a Ended: "):
        decode(pickle.dumps(Evil()), Ended)
    with pytest.raises(MessageError, match=r"expected a Hello: .*expected the fields"):
        decode(encode(ended), Hello)


async def test_a_pickle_sets_no_attribute_in_the_controller(bench: Bench) -> None:
    headers = {"Authorization": "Bearer token"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for path in ("workers", "workers/a/orders", "workers/a/rollouts/r"):
            async with session.post(f"{bench.url}/{path}", data=SETS_ATTRIBUTE) as answer:
                assert (answer.status, "expected a " in await answer.text()) == (400, True)

    assert "owned" not in vars(type(Path()))
