"""A Ray cluster of this machine: who can reach it, what it leaves behind, and what its actors say."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio

from cua_rl.cluster import ActorLost, Cluster, open_cluster, shape_node
from cua_rl.database.rows import Scope
from cua_rl.host.masking import mask_known
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.run.devices import prepare_devices
from cua_rl.run.prepared_training import load_task_sets
from cua_rl.run.training_config import CLIConfig
from cua_rl.types.errors import ConfigError, CuaError, DatabaseError
from cua_rl.types.rollout import AdapterRef
from cua_rl.workers.worker import RolloutWorker, WorkerSetup, identify, open_workplace
from tests.patience import patience
from tests.real.echo import Echo

HERE = AdapterRef(path=Path("/adapters/1"), policy_version=1)
RUN = """
import asyncio, sys
from pathlib import Path
from cua_rl.cluster import open_cluster
from tests.real.echo import Echo

async def main():
    async with open_cluster(Path(sys.argv[1]), num_cpus=1) as cluster:
        actor = cluster.start(Echo)
        print(await actor.call("pid"), flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_node_is_waited_for_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    services: Any = import_module("ray._private.services")
    asked: list[tuple[str, ...]] = []

    def get_node(*arguments: str) -> str:
        asked.append(arguments)
        if len(asked) < 3:  # Ray would ask for 30 s
            raise RuntimeError("expected to be in the GCS")
        return "node"

    monkeypatch.setattr(services, "get_node", get_node)
    shape_node(SimpleNamespace(temp_dir="/tmp/ray"), True)
    assert services.get_node("address", "id") == "node"
    assert asked == [("address", "id")] * 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Cluster]:
    import_module("ray")  # a process may have imported it before it opens a cluster
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    async with open_cluster(tmp_path_factory.mktemp("logs"), num_cpus=2, environ=environ) as opened:
        yield opened


def family(root: psutil.Process) -> list[psutil.Process]:
    return [root, *root.children(recursive=True)]


def listeners(processes: list[psutil.Process]) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    for process in processes:
        try:
            name, connections = process.name(), process.net_connections("inet")
        except psutil.NoSuchProcess:
            continue
        found += [(one.laddr.ip, one.laddr.port, name) for one in connections if one.status == psutil.CONN_LISTEN]
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(patience(60.0)):
        while not condition():
            await asyncio.sleep(0.1)


@pytest.mark.asyncio(loop_scope="module")
async def test_everything_of_a_cluster_of_this_machine_listens_on_loopback(cluster: Cluster) -> None:
    actor = cluster.start(Echo)
    pid = await actor.call("pid")
    found = listeners(family(psutil.Process()))
    programs = {name for _, _, name in found}

    assert {ip.removeprefix("::ffff:") for ip, _, _ in found} == {"127.0.0.1"}
    assert {"gcs_server", "raylet"} <= programs
    assert psutil.Process(pid) in family(psutil.Process())
    assert psutil.Process(pid).nice() == psutil.Process().nice()
    assert not any("log_monitor" in line or "monitor.py" in line for line in command_lines())
    assert [node.address for node in cluster.nodes()] == ["127.0.0.1"]
    actor.kill()


def command_lines() -> list[str]:
    return [" ".join(process.cmdline()) for process in family(psutil.Process())]


@pytest.mark.asyncio(loop_scope="module")
async def test_nobody_without_the_token_gets_into_the_cluster(cluster: Cluster) -> None:
    join = f"import ray; ray.init({cluster.address!r}, log_to_driver=False); print('inside')"
    for mode in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "guess" * 8}):
        environment = {**os.environ, **mode}
        if mode["RAY_AUTH_MODE"] == "disabled":
            environment.pop("RAY_AUTH_TOKEN", None)
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", join], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode != 0
        assert "inside" not in done.stdout
    token = os.environ["RAY_AUTH_TOKEN"]
    assert len(token) >= 32
    assert not any(token in line for line in command_lines())
    assert token not in mask_known(f"RAY_AUTH_TOKEN={token}")


@pytest.mark.asyncio(loop_scope="module")
async def test_calls_bring_values_and_our_errors_back_and_cancelling_one_harms_nobody(cluster: Cluster) -> None:
    actor = cluster.start(Echo, max_concurrency=100)
    assert await actor.call("same", HERE) == HERE
    large = bytes(5_000_000)
    assert await actor.call("same", large) == large
    with pytest.raises(ConfigError, match="expected the run's code"):
        await actor.call("fail", ConfigError("expected the run's code"))
    with pytest.raises(CuaError, match="fail failed: KeyError: 'x'"):
        await actor.call("fail", KeyError("x"))
    waiting = [asyncio.create_task(actor.call("wait")) for _ in range(3)]
    while await actor.call("count") < 3:
        pass
    waiting[0].cancel()
    assert await actor.call("count") == 3
    actor.kill()
    ends = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(end) for end in ends] == [asyncio.CancelledError, ActorLost, ActorLost]
    with pytest.raises(ActorLost):
        await actor.call("count")


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_actor_that_died_is_noticed_and_one_that_was_stopped_can_be_killed(
    cluster: Cluster, number: int
) -> None:
    actor = cluster.start(Echo)
    process = psutil.Process(await actor.call("pid"))
    process.send_signal(number)
    if number == signal.SIGSTOP:
        actor.kill()
    with pytest.raises(ActorLost):
        await actor.call("pid")
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.asyncio(loop_scope="module")
async def test_actors_in_reserved_rooms_end_with_the_block_and_take_their_folders_with_them(cluster: Cluster) -> None:
    async with cluster.placed(Echo, [{"CPU": 1}], patience(60.0)) as (actor,):
        process, folder = psutil.Process(await actor.call("pid")), await actor.call("make_folder")
        assert folder.exists()
    await until(lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE)
    assert not folder.parent.exists()
    with pytest.raises(ConfigError, match=r"room for \[\{'CPU': 3\}\] on different nodes .*, got 127\.0\.0\.1: 2 CPUs"):
        async with cluster.placed(Echo, [{"CPU": 3}], 0.1):
            pass


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_that_is_not_like_the_others_says_in_what(cluster: Cluster, tmp_path: Path) -> None:
    config = CLIConfig(rollout_workers=1)
    tasks, _ = load_task_sets(config, prepare_devices(config, tmp_path))
    own = identify(config, TINY_QWEN3_VL, tasks)

    def setup_with(**others: str) -> WorkerSetup:
        return WorkerSetup(
            config=config,
            judge=None,
            identity={**own, **others},
            environ={**os.environ, "DATABASE_URL": ""},
            log_path=tmp_path / "run",
            database_url="postgresql://postgres@127.0.0.1:9/nothing",
            scope=Scope(image_token_id=1, training_id=1),
            servers=(),
            namespace="run",
            clock_ahead_s=0.0,
        )

    async def open_with(setup: WorkerSetup) -> None:
        actor = cluster.start(RolloutWorker, "worker-1", 1, partial(open_workplace, setup, "worker-1", 1))
        await actor.call("open")

    with pytest.raises(ConfigError, match=r"expected the run's code and model on .*, got others; copy them"):
        await open_with(setup_with(code="other", model="other"))
    with pytest.raises(DatabaseError, match="expected a Postgres server"):  # for now: it is tried again
        await open_with(setup_with())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_cluster_ends_with_the_run_that_started_it(tmp_path: Path, number: int) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["TMPDIR"] = str(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "logs")], env=environment, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        pid = int(run.stdout.readline())
        owned = family(psutil.Process(run.pid))
        assert pid in [process.pid for process in owned]
        run.send_signal(number)
        run.wait(timeout=patience(60.0))
    gone, alive = psutil.wait_procs(owned, timeout=patience(60.0))
    assert alive == []
    assert len(gone) == len(owned)
    if number == signal.SIGINT:
        assert [path for path in tmp_path.iterdir() if path.name != "logs"] == []
