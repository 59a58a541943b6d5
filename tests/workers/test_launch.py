"""What a run plans for its rollout workers."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import pairwise
from threading import Event

import pytest

from cua_rl.environments.table import ENVIRONMENTS
from cua_rl.run.prepared_training import check_workers
from cua_rl.run.rollout_config import GatewaySettings
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.errors import ConfigError, CuaError
from cua_rl.workers.launch import keep_alive
from cua_rl.workers.ray_workers import connect, reachable
from cua_rl.workers.remote import RemoteRunner
from cua_rl.workers.worker_config import TOKEN_VARIABLE, WorkerSettings
from tests.fakes import FakeRecorder
from tests.jumping_time import run_jumping
from tests.workers.test_workers import SETUP, FakeAdapters, plan

PHONES = ENVIRONMENTS["simulator"]

PHONES = ENVIRONMENTS["simulator"]


@pytest.mark.parametrize(
    ("address", "node", "expected"),
    [
        ("http://0.0.0.0:8300", "10.0.0.4", "http://10.0.0.4:8300"),
        ("http://[::]:8300", "fd00::4", "http://[fd00::4]:8300"),
        ("http://10.0.0.9:8300", "10.0.0.4", "http://10.0.0.9:8300"),
    ],
)
def test_workers_on_other_nodes_are_told_an_address_that_means_this_one(address: str, node: str, expected: str) -> None:
    assert reachable(address, node) == expected


@pytest.mark.parametrize("token", ["", "short"])
def test_an_address_for_other_machines_needs_a_token_that_nobody_guesses(token: str) -> None:
    config = CLIConfig(workers=WorkerSettings(host="0.0.0.0", port=8300))
    with pytest.raises(ConfigError, match=r"workers\.host: expected a token of at least 16"):
        check_workers(config, PHONES, {TOKEN_VARIABLE: token})
    if token:  # where a proxy makes loopback an address for other machines
        with pytest.raises(ConfigError, match="at least 16 random characters"):
            check_workers(CLIConfig(workers=WorkerSettings(port=8300)), PHONES, {TOKEN_VARIABLE: token})
    check_workers(config, PHONES, {TOKEN_VARIABLE: "a-long-random-text"})
    check_workers(CLIConfig(workers=WorkerSettings(port=8300)), PHONES, {})


@pytest.mark.parametrize(
    "gateway",
    [
        GatewaySettings(host="10.0.0.1"),
        GatewaySettings(port=8100),
        GatewaySettings(public_url="http://trainer:8100"),
    ],
)
def test_where_agents_reach_a_gateway_is_refused_if_workers_would_not_heed_it(gateway: GatewaySettings) -> None:
    check_workers(CLIConfig(gateway=gateway), PHONES, {})
    for workers in ({"rollout_workers": 2}, {"workers": WorkerSettings(port=8300)}):
        with pytest.raises(ConfigError, match="gateway: expected no host, port or public_url with rollout workers"):
            check_workers(CLIConfig(gateway=gateway, **workers), PHONES, {})
    check_workers(
        CLIConfig(rollout_workers=2, gateway=GatewaySettings(allowed_media_domains=["a.org"])), ENVIRONMENTS["page"], {}
    )


async def test_a_worker_that_cannot_be_started_for_whatever_reason_stops_the_run() -> None:
    async def attempt() -> str:
        raise AssertionError("Perhaps you called ray.init twice by accident?")

    runner = RemoteRunner(FakeAdapters(), FakeRecorder(), lambda: SETUP)

    await keep_alive(runner, "ray-2", attempt)

    with pytest.raises(CuaError, match="cannot start rollout worker ray-2: AssertionError: Perhaps"):
        await runner.run(plan())


def test_a_worker_that_ends_again_and_again_gets_half_a_minute_for_what_it_needs() -> None:
    runner = RemoteRunner(FakeAdapters(), FakeRecorder(), lambda: SETUP)
    started: list[float] = []

    async def attempt() -> str:
        started.append(asyncio.get_running_loop().time())
        return "its process ended with status 1"

    run_jumping(keep_alive(runner, "local-1", attempt))

    assert [round(later - earlier) for earlier, later in pairwise(started)] == [0, 2, 4, 8, 16]


def test_two_workers_that_start_at_once_connect_to_the_cluster_once() -> None:
    class FakeRay:
        num_inits = 0
        together = Event()

        def is_initialized(self) -> bool:
            return self.together.is_set()

        def init(self, **_: object) -> None:
            self.num_inits += 1
            self.together.wait(0.2)  # the other thread has looked by then
            self.together.set()

    ray = FakeRay()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(connect, [ray, ray]))

    assert ray.num_inits == 1


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_the_plan_of_a_run_says_that_ray_is_missing() -> None:
    config = CLIConfig(rollout_workers=2, workers=WorkerSettings(launcher="ray"))
    with pytest.raises(ConfigError, match="expected the package ray"):
        check_workers(config, PHONES, {"RAY_AUTH_MODE": "token"})


@pytest.mark.parametrize("mode", [{}, {"RAY_AUTH_MODE": "disabled"}])
def test_workers_are_not_started_on_a_ray_cluster_that_anybody_can_use(mode: dict[str, str]) -> None:
    config = CLIConfig(rollout_workers=2, workers=WorkerSettings(launcher="ray"))
    with pytest.raises(ConfigError, match="expected a Ray cluster that asks for a token"):
        check_workers(config, PHONES, mode)
