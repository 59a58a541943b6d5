"""Whatever is sent, the answer is never a server error; scripts/fuzz_monitor.py sends ten times as much."""

import asyncio

import httpx
import pytest

from tests.patience import patience
from tests.real.monitor.conftest import WRITE_TOKEN, Shown

fuzz_monitor = pytest.importorskip("scripts.fuzz_monitor", reason="pip install schemathesis, as scripts/setup.sh does")
pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_no_request_makes_the_server_fail(shown: Shown) -> None:
    bearer = {"Authorization": f"Bearer {shown.project_token}"}
    sent = await shown.client.post("/api/ingest/batch", json={"training": {"run_name": "fuzzed"}}, headers=bearer)

    def fuzz() -> None:
        with httpx.Client(base_url=shown.client.base_url, timeout=patience(60), trust_env=False) as client:
            known = fuzz_monitor.find_known(client, "1", sent.json()["training_id"])
            tokens = {"write_token": WRITE_TOKEN, "project_token": shown.project_token}
            report = fuzz_monitor.Fuzzer(client=client, known=known, **tokens).run(200)
        assert report.failures == []
        assert report.num_requests >= 200
        assert {200, 404, 422} <= set(report.statuses)

    await asyncio.to_thread(fuzz)
