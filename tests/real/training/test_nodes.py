# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A trainer on two nodes of a Ray cluster: two network namespaces of this machine with a cable between them."""

import asyncio
import itertools
import os
import random
import shutil
import socket
import subprocess
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import chz
import psutil
import pytest
import pytest_asyncio

from cua_rl.host.masking import make_key
from cua_rl.host.processes import OwnedProcess, free_port
from cua_rl.host.scratch import make_scratch_folder
from cua_rl.run.trainer_nodes import TrainerNode, open_trainer
from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, TrainerConfig
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import ConfigError
from tests.live_processes import command_line, wait_until_dead
from tests.patience import patience
from tests.real.ray_nodes import NODE_ENVIRONMENT, head_command, node_command
from tests.real.training.test_ranks import NUM_ROUNDINGS, PLAIN_STEP, adapter, assert_close
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum
from tests.rounding import assert_equal_but_for_rounding

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAME = f"cua{os.getpid() % 100_000}"
NETWORK = f"10.213.{os.getpid() % 256}"
"""Of the cable; other processes of pytest may have one too, and a killed one may have left its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a node runs."""

    address: str
    interface: str
    prefix: Sequence[str] = ()
    """What a command begins with to run there."""


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """This machine, and a second one that is reached through a cable."""
    here = Host(address=f"{NETWORK}.1", interface=f"{NAME}a")
    there = Host(address=f"{NETWORK}.2", interface=f"{NAME}b", prefix=("ip", "netns", "exec", NAME))
    if shutil.which("ip") is None or not _ip("netns", "add", NAME):
        pytest.skip("not permitted here: network namespaces")
    try:
        cable = ("link", "add", here.interface, "type", "veth", "peer", "name", there.interface, "netns", NAME)
        if not _ip(*cable):
            pytest.skip("not permitted here: cables between network namespaces")
        for namespace, host in (((), here), (("-n", NAME), there)):
            assert _ip(*namespace, "address", "add", f"{host.address}/30", "dev", host.interface)
            assert _ip(*namespace, "link", "set", host.interface, "up")
        assert _ip("-n", NAME, "link", "set", "lo", "up")
        yield here, there
    finally:
        _ip("netns", "delete", NAME)  # the cable goes with its end


class FakeCluster:
    """Two nodes of a Ray cluster with two processors each; the first, where the run is, is the head."""

    def __init__(self, hosts: Sequence[Host], port: int, folder: Path, environment: dict[str, str]) -> None:
        self._hosts = hosts
        self._port = port
        self._folder = folder
        self._environment = environment
        self._starts = itertools.count()
        self.nodes: list[OwnedProcess] = []

    async def start(self, index: int) -> None:
        """Start a node, or start it again."""
        host, head = self._hosts[index], f"{self._hosts[0].address}:{self._port}"
        command = node_command(host.address, head) if index else head_command(host.address, self._port)
        async with asyncio.timeout(patience(120)):
            while True:  # until it has joined: Ray gives a node 30 s, also on a busy machine
                node = OwnedProcess(
                    [*host.prefix, *command, f"--temp-dir={make_scratch_folder('ray')}"],
                    name=f"node {index}",
                    log_path=self._folder / f"node{index}-{next(self._starts)}.log",
                    environment=self._environment,
                )
                self.nodes[index:] = [node]
                await node.start()
                while node.is_running and "Ray runtime started" not in node.log_tail():
                    await asyncio.sleep(0.1)
                if node.is_running:
                    return


@asynccontextmanager
async def running_cluster(hosts: Sequence[Host], folder: Path) -> AsyncGenerator[FakeCluster]:
    """A cluster on these hosts, to which this process connects."""
    port, secret = free_port(), {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": make_key()}
    # a node that is cut off for half a minute is not given up
    patient = {"RAY_health_check_timeout_ms": "60000"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**secret, "RAY_ADDRESS": f"{hosts[0].address}:{port}"}.items():
            patch.setenv(name, value)
        cluster = FakeCluster(hosts, port, folder, {**os.environ, **secret, **patient, **NODE_ENVIRONMENT})
        try:
            for index in range(len(hosts)):
                await cluster.start(index)
            yield cluster
        finally:
            for node in reversed(cluster.nodes):
                await node.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def cluster(hosts: tuple[Host, Host], tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[FakeCluster]:
    """One for all tests here."""
    async with running_cluster(hosts, tmp_path_factory.mktemp("nodes")) as running:
        yield running


def listening(pid: int) -> set[str]:
    """Addresses at which a process listens, also one in another network namespace, where psutil sees nothing."""
    links = [os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()]
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                number = bytes.fromhex(words[1].partition(":")[0])
                found.add(socket.inet_ntoa(number[::-1]) if table == "tcp" else number.hex())
    return found


def rank_processes() -> dict[int, psutil.Process]:
    """The trainer processes of our nodes."""
    return {
        int(process.environ()["RANK"]): process
        for process in psutil.Process().children(recursive=True)
        if "cua_rl.training.worker" in command_line(process)
    }


def actor_of(node: OwnedProcess) -> psutil.Process:
    """The process of the trainer's actor of a node."""
    children = psutil.Process(node.command_pid()).children(recursive=True)
    return next(each for each in children if "TrainerNode" in " ".join(command_line(each)))


@asynccontextmanager
async def trainer_on(config: TrainerConfig, folder: Path) -> AsyncGenerator[TrainingClient]:
    """A trainer on the nodes of the cluster at RAY_ADDRESS."""
    async with AsyncExitStack() as stack:
        model = shutil.copytree(config.model_path, folder / "model", dirs_exist_ok=True)
        (model / "tokenizer.json").write_text("{}")  # expected of a model folder, not read by the trainer
        trainer = await open_trainer(stack, config, str(model), folder / "logs" / "trainer.log")
        yield await stack.enter_async_context(trainer)


@pytest.mark.usefixtures("cluster")
async def test_four_processes_on_two_nodes_take_the_steps_of_one_and_survive_a_death(
    hosts: tuple[Host, Host], config: TrainerConfig, tmp_path: Path
) -> None:
    rng = random.Random(0)
    screens = [draw_screenshot(rng) for _ in range(2)]
    datums = tuple(make_datum(rng, screens[: index % 3]) for index in range(5))
    alone = Trainer(config)
    alone.save_state(tmp_path / "beginning")
    expected = alone.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
    alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    # one sequence of text: three ranks have no datum, and nobody has an image
    expected_text = alone.forward_backward(wire.ForwardBackward(datums=datums[:1], loss=LossConfig()))
    alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    alone.save_weights_for_sampler(tmp_path / "alone")
    assert not datums[0].model_input.images

    several = chz.replace(config, num_nodes=2, num_processes=2, sharding="hybrid", max_restarts=2)
    async with asyncio.timeout(patience(400)), trainer_on(several, tmp_path) as four:
        await four.load_state(tmp_path / "beginning")
        output = await four.forward_backward(datums, LossConfig())
        await four.optim_step(PLAIN_STEP)
        ranks = rank_processes()
        addresses = [listening(ranks[rank].pid) for rank in range(4)]
        ranks[3].kill()
        text = await four.forward_backward(datums[:1], LossConfig())
        step = await four.optim_step(PLAIN_STEP)
        await four.save_weights_for_sampler(tmp_path / "four")
        await four.save_state(tmp_path / "state-of-four")
        pids = [process.pid for process in rank_processes().values()]

    assert wait_until_dead(*pids)
    assert step.policy_version == 2
    assert four.num_restarts == 1
    # two ranks on each host, which listen on its address in the cluster alone
    assert addresses[0] == addresses[1] != addresses[2] == addresses[3], addresses
    assert addresses[0] | addresses[2] == {host.address for host in hosts}
    assert not set(pids) & {process.pid for process in ranks.values()}
    for one, other in ((output, expected), (text, expected_text)):
        for row, expected_row in zip(one.training_logprobs, other.training_logprobs, strict=True):
            assert_equal_but_for_rounding(row, expected_row, NUM_ROUNDINGS)
        losses = [result.metrics["loss/total"] for result in (one, other)]
        assert_equal_but_for_rounding(losses[:1], losses[1:], NUM_ROUNDINGS, magnitude=1.0)
    assert_close(adapter(tmp_path / "four"), adapter(tmp_path / "alone"))
    resumed = Trainer(config)
    resumed.load_state(tmp_path / "state-of-four", with_optimizer=True)
    assert resumed.policy_version == 2


async def test_steps_are_taken_once_when_an_actor_or_a_node_dies_and_when_the_cable_is_cut(
    hosts: tuple[Host, Host], cluster: FakeCluster, config: TrainerConfig, tmp_path: Path
) -> None:
    datums = tuple(make_datum(random.Random(0), []) for _ in range(2))
    alone = Trainer(config)
    for _ in range(4):
        alone.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
        alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    alone.save_weights_for_sampler(tmp_path / "alone")
    pair = chz.replace(config, num_nodes=2, max_restarts=2)
    async with asyncio.timeout(patience(500)), trainer_on(pair, tmp_path) as two:

        async def kill_actor() -> None:
            actor_of(cluster.nodes[1]).kill()

        async def kill_node() -> None:
            processes = psutil.Process(cluster.nodes[1].command_pid()).children(recursive=True)
            next(each for each in processes if "raylet" in command_line(each)[0]).kill()
            await cluster.nodes[1].wait()
            await cluster.start(1)

        async def cut_cable() -> None:
            assert _ip("link", "set", hosts[0].interface, "down")
            await asyncio.sleep(30.0)
            assert _ip("link", "set", hosts[0].interface, "up")

        disturbances: list[Callable[[], Coroutine[None, None, None]]] = [kill_actor, kill_node, cut_cable]
        for disturb in disturbances:
            await two.forward_backward(datums, LossConfig())
            async with asyncio.TaskGroup() as together:  # a node that does not start again ends the test at once
                together.create_task(disturb())
                together.create_task(two.optim_step(PLAIN_STEP))
        await two.forward_backward(datums, LossConfig())
        step = await two.optim_step(PLAIN_STEP)
        await two.save_weights_for_sampler(tmp_path / "two")

    assert step.policy_version == 4
    assert_close(adapter(tmp_path / "two"), adapter(tmp_path / "alone"))
    assert two.num_restarts == 2  # of the actor and of the node: a cable that is soon whole again ends nothing


@pytest.mark.usefixtures("cluster")
async def test_a_node_without_the_model_or_with_other_code_is_named(config: TrainerConfig, tmp_path: Path) -> None:
    one, log_path = chz.replace(config, num_nodes=1, num_processes=2), tmp_path / "trainer.log"
    (tmp_path / "half").mkdir()
    async with AsyncExitStack() as stack:
        trainer = await open_trainer(stack, one, str(tmp_path / "half"), log_path)
        with pytest.raises(ConfigError, match=rf"on the trainer's node {NETWORK}\.[12]: .* without config.json"):
            await trainer.__aenter__()
    with pytest.raises(ConfigError, match="expected the run's code of cua_rl on "):
        await TrainerNode().start("0" * 64, None, b"", log_path, {})
