"""What strangers and agents send to gateway and monitor costs nobody else memory or time."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from scripts.monitor_process import monitor_process
from scripts.red_team.doors import connection_costs, costs_of_requests, send_text
from scripts.red_team.floods import Server, cost_of, upload
from tests.real.database.conftest import server_url, url

__all__ = ["server_url", "url"]


@pytest.fixture
def gateway() -> Iterator[Server]:
    command = [sys.executable, "-m", "tests.real.gateway_process"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        base_url, key = process.stdout.readline().split()
        yield Server(base_url=base_url, pid=process.pid, others_ask="/rollouts/r/v1/models", key=key)
        process.kill()


@pytest.mark.timeout(240)
def test_strangers_cost_the_agents_of_a_gateway_nothing(gateway: Server) -> None:
    for rollout_id in ("unknown", "r"):
        cost, status = cost_of(gateway, partial(upload, gateway, f"/rollouts/{rollout_id}/v1/responses", 120))
        assert (cost.is_small(), status in (0, 401)) == (True, True), (cost, status)
    for attack, cost in connection_costs(gateway, "/rollouts/r/v1/responses"):
        assert cost.is_small(), (attack, cost)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("num_mb", [4, 120])
def test_a_text_that_no_context_holds_costs_other_agents_nothing(gateway: Server, num_mb: int) -> None:
    cost, status = cost_of(gateway, partial(send_text, gateway, "/rollouts/r/v1/responses", num_mb))

    assert (cost.is_small(num_mb), status) == (True, 400), cost


@pytest.mark.timeout(600)
def test_requests_of_very_many_or_dear_parts_cost_other_agents_nothing(gateway: Server) -> None:
    for attack, cost, status in costs_of_requests(gateway, "/rollouts/r/v1/responses"):
        assert (cost.is_small(100), status) == (True, 400), (attack, cost)


@pytest.mark.timeout(240)
async def test_strangers_cost_the_readers_of_a_monitor_nothing(url: str, tmp_path: Path) -> None:
    async with monitor_process(url, tmp_path) as served:
        server = Server(base_url=served.base_url, pid=served.find().pid, others_ask="/api/runs")
        cost, _ = await asyncio.to_thread(cost_of, server, partial(upload, server, "/api/ingest/batch", 60))
        assert cost.is_small(), cost
        for path in ("/api/session", "/api/ingest/batch"):
            for attack, cost in await asyncio.to_thread(list, connection_costs(server, path)):
                assert cost.is_small(), (attack, cost)
