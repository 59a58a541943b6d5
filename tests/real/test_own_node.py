"""The end of this machine's node of a Ray cluster: for whoever waits there, for a run, and for a run that goes on."""

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest

from cua_rl.cluster import ClusterLost, open_cluster
from cua_rl.sampling.server import VllmServer
from tests.patience import patience
from tests.real.echo import Echo
from tests.real.end_to_end.runs import Run, read_lines, survivors
from tests.real.test_cluster import family


@pytest.mark.parametrize("killed", ["raylet", "gcs_server"])
async def test_the_end_of_the_own_node_is_said_at_once_to_all_who_wait_or_ask(tmp_path: Path, killed: str) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    async with asyncio.timeout(patience(60.0)):
        async with open_cluster(tmp_path, num_cpus=2, environ=environ) as cluster:
            actor = cluster.start(Echo)
            await actor.call("pid")
            waiting = [
                asyncio.create_task(actor.call("wait")),
                asyncio.create_task(cluster.start(Echo, num_cpus=9).call("pid")),
                asyncio.create_task(cluster.placed(Echo, [{"CPU": 9}], 600.0).__aenter__()),
            ]
            await asyncio.sleep(1.0)
            next(one for one in family(psutil.Process()) if one.name() == killed).kill()
            for asked in waiting:
                with pytest.raises(
                    ClusterLost,
                    match=r"expected this machine's node of .* outlast the run, but it ended; read .*ray.log",
                ):
                    await asked
            with pytest.raises(ClusterLost):
                cluster.start(Echo)
            with pytest.raises(ClusterLost):
                await actor.call("pid")
            actor.kill()
    assert not any(one.name() in ("raylet", "gcs_server") for one in family(psutil.Process()))


@pytest.mark.timeout(600)
def test_a_run_whose_node_ends_says_so_soon_and_loses_one_step_at_most(server: VllmServer, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("rollout_workers=2", "skip_baseline=true", "num_eval_rollouts=4", "max_steps=4", "monitor=false")
    options = (*options, "save_every=0", f"base_url={server.base_url}")
    run = Run(folder, *options)
    run.wait_for(lambda: len(run.steps()) >= 2)
    owned = run.owned()
    next(process for process in owned if process.name() == "raylet").send_signal(signal.SIGKILL)

    assert run.process.wait(timeout=patience(60.0)) == 1, run.output()
    assert "expected this machine's node of the Ray cluster to outlast the run" in run.output()
    assert "behavior_if_log_dir_exists=resume" in run.output()
    assert survivors(owned) == []
    assert read_lines(folder / "checkpoints.jsonl")[-1]["step"] >= len(run.steps()) - 1
    again = Run(folder, *options, "behavior_if_log_dir_exists=resume")
    assert again.finish() == 0, again.output()
    assert [step["step"] for step in again.steps()] == [1, 2, 3, 4]
