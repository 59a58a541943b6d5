"""Several model servers behind one client: whose requests go where, and what happens when one is lost."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from cua_rl.host.http_server import serve_app
from cua_rl.host.processes import free_port
from cua_rl.renderers.qwen3_vl import Qwen3VLRenderer
from cua_rl.sampling.canary import Canary
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.server import ExternalServer
from cua_rl.sampling.vllm_responses import RESPONSES_PATH
from cua_rl.types.errors import AdapterError, ConfigError, SamplingError
from cua_rl.types.rollout import AdapterRef
from tests.patience import patience
from tests.sampling.fake_vllm import FakeVllm

REQUEST = {"input": "hi", "max_output_tokens": 8}
CANARY = Canary(tokens=(1, 2, 3), changes_model=True)
TRAINED = Canary(
    tokens=(1, 2, 3),
    changes_model=True,
    training_logprobs=(0.0, -1.75, -1.75),
    training_base_logprobs=(0.0, -2.0, -2.0),
)
"""What the fakes answer."""
OTHER_WEIGHTS = -2.74


def adapter(version: int, path: str = "adapter") -> AdapterRef:
    return AdapterRef(path=Path(path), policy_version=version)


class Fleet:
    """Fake servers that can leave and come back at their addresses, and a client of them all."""

    def __init__(self, renderer: Qwen3VLRenderer, size: int) -> None:
        self.fakes = [FakeVllm(renderer) for _ in range(size)]
        self.client: SamplingClient
        self._ports = [free_port() for _ in range(size)]
        self._running = [AsyncExitStack() for _ in range(size)]

    def url(self, index: int) -> str:
        return f"http://127.0.0.1:{self._ports[index]}"

    async def start(self, index: int) -> None:
        serving = serve_app(self.fakes[index].app(), "127.0.0.1", self._ports[index], grace_s=0)
        await self._running[index].enter_async_context(serving)

    async def stop(self, index: int) -> None:
        await self._running[index].aclose()

    async def start_again(self, index: int, base_logprob: float = -2.0) -> None:
        """A server of these weights at the address, without adapters."""
        self.fakes[index].adapters.clear()
        self.fakes[index].base_logprob = base_logprob
        await self.start(index)

    @asynccontextmanager
    async def follower(self) -> AsyncGenerator[SamplingClient]:
        """The client of a process that follows the published policy."""
        async with AsyncExitStack() as stack:
            urls = map(self.url, range(len(self.fakes)))
            servers = [await stack.enter_async_context(ExternalServer(url)) for url in urls]
            client = SamplingClient(*servers, namespace="run", check_interval_s=0.05)
            client.follow(adapter(1, "/not/on/this/host"))
            yield await stack.enter_async_context(client)

    async def ask(self, key: str, client: SamplingClient | None = None) -> int:
        """Which server answered."""
        before = [fake.num_answers for fake in self.fakes]
        await (client or self.client).respond(RESPONSES_PATH, REQUEST, sticky_key=key)
        return next(i for i, fake in enumerate(self.fakes) if fake.num_answers > before[i])

    def adapters(self) -> list[list[str]]:
        return [sorted(name.removesuffix("-run") for name in fake.adapters) for fake in self.fakes]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(patience(10)):
            while not condition():
                await asyncio.sleep(0.01)


@asynccontextmanager
async def fleet_of(
    renderer: Qwen3VLRenderer, size: int, outage_timeout_s: float = 10.0, max_attempts: int = 3
) -> AsyncGenerator[Fleet]:
    fleet = Fleet(renderer, size)
    async with AsyncExitStack() as stack:
        for index in range(size):
            await fleet.start(index)
            stack.push_async_callback(fleet.stop, index)
        servers = [await stack.enter_async_context(ExternalServer(fleet.url(index))) for index in range(size)]
        fleet.client = await stack.enter_async_context(
            SamplingClient(
                *servers,
                namespace="run",
                max_attempts=max_attempts,
                check_interval_s=0.05,
                outage_timeout_s=outage_timeout_s,
            )
        )
        yield fleet


async def test_a_rollout_stays_on_its_server_and_a_new_one_goes_to_the_server_with_the_fewest(
    renderer: Qwen3VLRenderer,
) -> None:
    async with fleet_of(renderer, 3) as fleet:
        first = {key: await fleet.ask(key) for key in "abcdef"}
        again = {key: await fleet.ask(key) for key in "fedcba"}
        assert first == again
        assert sorted(first.values()) == [0, 0, 1, 1, 2, 2]
        for key, index in first.items():
            if index == 1:
                fleet.client.forget(key)
        assert [await fleet.ask("g"), await fleet.ask("h")] == [1, 1]


async def test_every_server_has_an_adapter_before_it_is_announced(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.client.publish(adapter(1), CANARY)
        assert fleet.adapters() == [["policy-000001"]] * 2
        await fleet.client.publish(adapter(2), CANARY)
        assert fleet.adapters() == [["policy-000002"]] * 2


async def test_the_rollouts_of_a_lost_server_go_on_elsewhere(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.client.publish(adapter(1))
        homes = {key: await fleet.ask(key) for key in "abcd"}
        await fleet.stop(0)
        assert [await fleet.ask(key) for key in "abcd"] == [1] * 4
        assert {homes[key] for key in "abcd"} == {0, 1}


async def test_requests_under_way_on_a_server_that_no_longer_answers_are_sent_elsewhere(
    renderer: Qwen3VLRenderer,
) -> None:
    async with fleet_of(renderer, 2) as fleet:
        fleet.fakes[0].gate = asyncio.Event()  # the answer never comes, as when the link is cut
        asking = asyncio.create_task(fleet.ask("a"))
        await fleet.fakes[0].has_arrived.wait()
        fleet.fakes[0].is_healthy = False
        async with asyncio.timeout(patience(5)):
            await asking
        assert [len(fake.requests) for fake in fleet.fakes] == [1, 1]


async def test_a_lost_server_rejoins_with_the_adapters_in_use(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.client.publish(adapter(1), CANARY)
        await fleet.stop(0)
        assert await fleet.ask("a") == 1
        async with fleet.client.pinned(adapter(1)):
            await fleet.client.publish(adapter(2), CANARY)
            assert fleet.adapters() == [["policy-000001"], ["policy-000001", "policy-000002"]]
            fleet.fakes[0].adapters.clear()  # it was restarted
            await fleet.start(0)
            await fleet.until(lambda: len(fleet.client.replicas) == 2)
            assert fleet.adapters() == [["policy-000001", "policy-000002"]] * 2
        assert [await fleet.ask("b"), await fleet.ask("c")] == [0, 0]


async def test_a_server_that_fails_the_canary_does_not_rejoin(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.client.publish(adapter(1), CANARY)
        await fleet.stop(0)
        await fleet.ask("a")
        fleet.fakes[0].applies_adapters = False
        await fleet.start(0)
        await fleet.until(lambda: fleet.fakes[0].num_canaries >= 6)
        assert len(fleet.client.replicas) == 1
        fleet.fakes[0].applies_adapters = True
        await fleet.until(lambda: len(fleet.client.replicas) == 2)


@pytest.mark.parametrize("size", [1, 2])
async def test_nobody_samples_from_a_server_that_returns_with_other_weights_until_it_has_the_right_ones(
    renderer: Qwen3VLRenderer, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of(renderer, size) as fleet, fleet.follower() as follower:
        await fleet.client.publish(adapter(1), TRAINED)
        clients = {"owner": fleet.client, "follower": follower}
        for name, client in clients.items():  # so that each has a rollout whose home is the first server
            homes = [await fleet.ask(f"{name}-{index}", client) for index in range(size)]
            assert homes == [*range(size)]
        await fleet.stop(0)
        await fleet.start_again(0, OTHER_WEIGHTS)  # at once: nobody has noticed that it was away
        num_before = fleet.fakes[0].num_answers
        asks = [asyncio.create_task(fleet.ask(f"{name}-0", client)) for name, client in clients.items()]
        await fleet.until(lambda: fleet.fakes[0].num_canaries >= 3 * 2)  # three proofs
        assert fleet.fakes[0].num_answers == num_before
        assert not fleet.fakes[0].adapters.get("policy-000001-run")
        said = f"{fleet.url(0)}: expected the server's base model to give the trainer's log-probabilities within 0.05"
        assert f"{said}, got a mean difference of 0.740" in caplog.text
        fleet.fakes[0].base_logprob = -2.0
        await fleet.until(lambda: all(len(client.replicas) == size for client in clients.values()))
        assert await asyncio.gather(*asks) == [1 if size == 2 else 0] * 2
        assert [await fleet.ask(f"{name}-new", client) for name, client in clients.items()] == [0, 0]


async def test_a_server_that_was_started_again_between_two_publications_ends_none(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.client.publish(adapter(1), TRAINED)
        await fleet.stop(0)
        await fleet.start_again(0, OTHER_WEIGHTS)
        await fleet.client.publish(adapter(2), TRAINED)
        assert fleet.adapters()[1] == ["policy-000002"]
        assert [await fleet.ask(key) for key in "ab"] == [1, 1]


async def test_the_only_server_must_prove_itself_within_the_time_of_an_outage(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 1, outage_timeout_s=0.5) as fleet:
        await fleet.client.publish(adapter(1), TRAINED)
        await fleet.stop(0)
        await fleet.start_again(0, OTHER_WEIGHTS)
        with pytest.raises(SamplingError, match=rf"{fleet.url(0)}.* another base model, or another precision"):
            await fleet.ask("a")


async def test_without_numbers_of_a_trainer_a_server_must_return_with_the_same_model(
    renderer: Qwen3VLRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of(renderer, 1) as fleet:
        await fleet.stop(0)
        asking = asyncio.create_task(fleet.ask("a"))
        await fleet.until(lambda: not fleet.client.replicas)
        fleet.fakes[0].max_model_len = 1000
        await fleet.start(0)
        await fleet.until(lambda: "max_model_len=1000" in caplog.text and "max_model_len=2000" in caplog.text)
        fleet.fakes[0].max_model_len = 2000
        assert await asking == 0


async def test_requests_and_publications_wait_for_the_only_server_and_the_log_says_for_what(
    renderer: Qwen3VLRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with fleet_of(renderer, 1, max_attempts=2) as fleet:
        await fleet.client.publish(adapter(1), TRAINED)
        await fleet.stop(0)
        asks = [asyncio.create_task(fleet.ask(key)) for key in "ab"]
        await fleet.until(lambda: not fleet.client.replicas)
        publishing = asyncio.create_task(fleet.client.publish(adapter(2), TRAINED))
        await fleet.until(lambda: caplog.text.count("waiting for a model server") >= 3)  # also in between
        assert caplog.text.count("model server lost") == 1
        await fleet.start_again(0)
        async with asyncio.timeout(patience(5)):
            await asyncio.gather(*asks, publishing)
        assert fleet.adapters() == [["policy-000002"]]
    assert f"model server url={fleet.url(0)} model=base vllm=0.32.0" in caplog.text
    assert "published adapter=policy-000002 servers=1 of 1" in caplog.text


async def test_requests_wait_while_no_server_answers(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.stop(0)
        await fleet.stop(1)
        asking = asyncio.create_task(fleet.ask("a"))
        await fleet.until(lambda: not fleet.client.replicas)
        await fleet.start(1)
        async with asyncio.timeout(patience(5)):
            assert await asking == 1


async def test_a_publication_waits_while_no_server_answers(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.client.publish(adapter(1), CANARY)
        await fleet.stop(0)
        await fleet.stop(1)
        publishing = asyncio.create_task(fleet.client.publish(adapter(2), CANARY))  # what notices the outage
        await fleet.until(lambda: not fleet.client.replicas)
        probing = asyncio.create_task(fleet.client.probe(adapter(9), CANARY))
        await asyncio.sleep(0.1)
        await fleet.start(0)
        async with asyncio.timeout(patience(5)):
            await publishing
            await probing
        assert fleet.adapters()[0] == ["policy-000002"]
        assert fleet.client.current == adapter(2)


async def test_a_server_of_another_version_does_not_rejoin(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        await fleet.stop(0)
        await fleet.ask("a")
        await fleet.ask("b")
        assert len(fleet.client.replicas) == 1
        fleet.fakes[0].version = "0.99.0"
        await fleet.start(0)
        await asyncio.sleep(0.3)
        assert len(fleet.client.replicas) == 1
        fleet.fakes[0].version = "0.32.0"
        await fleet.until(lambda: len(fleet.client.replicas) == 2)


async def test_requests_leave_a_lost_server_that_answers_with_errors(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2, max_attempts=10) as fleet:
        fleet.fakes[0].refusal = (500, "EngineDeadError")
        fleet.fakes[0].is_healthy = False
        async with asyncio.timeout(patience(5)):
            assert await fleet.ask("a") == 1
        assert len(fleet.fakes[0].requests) > 0  # asked first
        assert len(fleet.fakes[1].requests) == 1


async def test_an_outage_that_lasts_ends_the_request(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2, outage_timeout_s=0.5) as fleet:
        await fleet.stop(0)
        await fleet.stop(1)
        with pytest.raises(SamplingError, match="one of 2 model servers"):
            await fleet.ask("a")


async def test_a_request_that_ends_every_server_is_given_up(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 4) as fleet:
        for fake in fleet.fakes:
            fake.drops_requests = True
        with pytest.raises(SamplingError, match="is lost"):
            await fleet.ask("a")
        assert sum(len(fake.requests) for fake in fleet.fakes) == 6  # twice on each of three


async def test_an_adapter_that_one_server_refuses_is_not_announced(renderer: Qwen3VLRenderer) -> None:
    async with fleet_of(renderer, 2) as fleet:
        fleet.fakes[1].applies_adapters = False
        with pytest.raises(AdapterError, match="match no module"):
            await fleet.client.publish(adapter(1), CANARY)
        assert fleet.client.current is None
        assert fleet.adapters() == [[], []]


async def test_servers_of_different_versions_are_refused(renderer: Qwen3VLRenderer) -> None:
    fakes = [FakeVllm(renderer), FakeVllm(renderer, version="0.20.1")]
    async with (
        serve_app(fakes[0].app(), "127.0.0.1", 0, grace_s=0) as one,
        serve_app(fakes[1].app(), "127.0.0.1", 0, grace_s=0) as other,
    ):
        async with ExternalServer(one) as first, ExternalServer(other) as second:
            with pytest.raises(ConfigError, match=r"of one version of vLLM.*0\.20\.1"):
                SamplingClient(first, second)


async def test_a_server_that_returns_serves_on_although_it_lacks_adapters_out_of_use(
    renderer: Qwen3VLRenderer,
) -> None:
    async with fleet_of(renderer, 1) as fleet:
        await fleet.client.publish(adapter(1))
        async with fleet.client.pinned(adapter(7)):
            pass
        await fleet.stop(0)
        asked = asyncio.create_task(fleet.ask("a"))
        await fleet.start_again(0)
        await asked
        await fleet.client.publish(adapter(2))
        assert fleet.adapters() == [["policy-000002"]]
