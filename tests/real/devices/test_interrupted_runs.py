"""Ctrl-C, SIGTERM and kill -9 in the middle of rollouts: no box is left, at the latest after the next start, and the
database says how everything ended.
"""

import asyncio
import json
import os
import signal
import sys
from collections import Counter, deque
from pathlib import Path

import pytest

from tests.doubles.gbox_server import KEY
from tests.doubles.gbox_service import GboxService, serve_gbox
from tests.evaluation.fake_endpoint import GIVE_UP, FakeEndpoint, serve_in_thread
from tests.evaluation.fake_endpoint import KEY as ENDPOINT_KEY
from tests.real.evaluation.shown import fetch_rollouts, fetch_runs, open_monitor

pytestmark = pytest.mark.timeout(600)

NUM_ROLLOUTS = 4
TASK = {"instruction": "Open Settings.", "check": {"query": "current_app", "expected": "com.android.settings"}}


async def start(gbox: GboxService, endpoint: str, folder: Path, *options: str) -> asyncio.subprocess.Process:
    """An evaluation of an endpoint on boxes, as a user starts it."""
    model = {"name": "m", "base_url": endpoint, "model": "m", "api": "responses", "api_key_env": "ENDPOINT_KEY"}
    given = {"GBOX_API_KEY": KEY, "GBOX_CLIENT_BASE_URL": gbox.base_url, "ENDPOINT_KEY": ENDPOINT_KEY}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "cua_rl.recipes.evaluate", "device=gbox", f"models={json.dumps([model])}", f"log_path={folder}"),
        *(f"tasks={json.dumps({'source_type': 'custom', 'custom_tasks': [TASK]})}", f"num_tasks={NUM_ROLLOUTS}"),
        *options,
        env=os.environ | given,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def wait_for_boxes(gbox: GboxService, process: asyncio.subprocess.Process) -> None:
    """Until every rollout has its box and the agent acts in it."""
    while len(gbox.double.alive) < NUM_ROLLOUTS or not gbox.double.bodies:
        assert process.returncode is None, (await process.communicate())[0].decode()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
async def test_a_run_that_is_stopped_leaves_no_box(number: signal.Signals, tmp_path: Path) -> None:
    endless = FakeEndpoint(arguments=deque(['{"action": "click", "coordinate": [500, 500]}']))
    with serve_in_thread(endless) as endpoint:
        async with serve_gbox() as gbox:
            gbox.double.faults.action_delay_s = 0.2
            process = await start(gbox, endpoint, tmp_path / "run")
            await wait_for_boxes(gbox, process)

            process.send_signal(number)
            output, _ = await process.communicate()

            if number != signal.SIGKILL:
                assert process.returncode == 128 + number, output.decode()
                assert gbox.double.alive == []
                await assert_recorded(tmp_path / "run", "cancelled", {"cancelled": NUM_ROLLOUTS})
                return
            assert len(gbox.double.alive) == NUM_ROLLOUTS  # nobody could clean up
            endless.arguments = deque([GIVE_UP])
            stranger = gbox.double.add_box("android", {"cua_rl_run": "somebody else's"})
            resumed = await start(gbox, endpoint, tmp_path / "run", "behavior_if_log_dir_exists=resume")
            output, _ = await resumed.communicate()

            assert resumed.returncode == 0, output.decode()
            assert b"terminated 4 boxes that an earlier attempt at this run had left" in output
            assert gbox.double.alive == [stranger.box_id]
            await assert_recorded(tmp_path / "run", "completed", {"completed": NUM_ROLLOUTS})


async def assert_recorded(folder: Path, status: str, rollouts: dict[str, int]) -> None:
    """How the database says that the evaluation and its rollouts ended."""
    async with open_monitor(folder) as client:
        (run,) = (await fetch_runs(client)).values()
        assert (run["run_name"], run["status"]) == ("run@m", status)
        assert Counter(item["status"] for item in await fetch_rollouts(client, run["run_id"])) == rollouts
