# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A trainer on two hosts, which are two network namespaces of this machine with a cable between them."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import chz
import psutil
import pytest

from cua_rl.host.processes import free_port
from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, TrainerConfig
from cua_rl.training.link import TOKEN_VARIABLE, Address, ControllerLink
from cua_rl.training.ranks import Meeting, Place
from cua_rl.training.trainer import Trainer
from cua_rl.training.worker import find_meeting
from cua_rl.types.errors import ConfigError
from tests.live_processes import command_line
from tests.patience import patience
from tests.real.training.test_ranks import NUM_ROUNDINGS, PLAIN_STEP, adapter, assert_close
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum
from tests.rounding import assert_equal_but_for_rounding

TOKEN = "0123456789abcdef" * 2
NAME = f"cua{os.getpid() % 100_000}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a node runs."""

    address: str
    interface: str
    prefix: Sequence[str] = ()
    """What a command begins with to run there."""


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """This machine, and a second one that is reached through a cable."""
    here = Host(address="10.213.77.1", interface=f"{NAME}a")
    there = Host(address="10.213.77.2", interface=f"{NAME}b", prefix=("ip", "netns", "exec", NAME))
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


@contextmanager
def nodes(hosts: Sequence[Host], model_path: Path, folder: Path) -> Generator[str]:
    """A node of two ranks on each host, the first of which listens for the run; yields its address."""
    first = hosts[0].address
    command = [sys.executable, "-m", "cua_rl.recipes.trainer_node", f"listen={first}:29400", "num_processes=2"]
    command += [f"rendezvous={first}:29500", f"num_nodes={len(hosts)}", f"model_name={model_path}"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank, host in enumerate(hosts):
            own = [f"node_rank={rank}", f"interface={host.interface}", f"log_file={folder / f'node{rank}.log'}"]
            started.append(subprocess.Popen([*host.prefix, *command, *own], cwd=folder))
        yield f"{first}:29400"
        for node in started:
            assert node.wait() == 0
    finally:
        for node in started:
            node.terminate()
            node.wait()


def listening(pid: int) -> set[str]:
    """Addresses of a process, in its own namespace, at which it listens."""
    return {link.laddr.ip for link in psutil.Process(pid).net_connections("inet") if not link.raddr}


def rank_process(rank: int) -> psutil.Process:
    """A trainer process of ours."""
    return next(
        process
        for process in psutil.Process().children(recursive=True)
        if "cua_rl.training.worker" in command_line(process) and process.environ()["RANK"] == str(rank)
    )


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}, "GLOO_SOCKET_IFNAME: expected the interface"),
        ({"MASTER_ADDR": "0.0.0.0", "MASTER_PORT": "29500"}, "MASTER_ADDR, MASTER_PORT: expected the IP address"),
        ({}, "MASTER_ADDR, MASTER_PORT: expected the IP address"),
    ],
)
def test_a_worker_of_several_refuses_to_meet_the_others_just_anywhere(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        find_meeting(environ, TOKEN, Place(rank=1, size=2))


def test_under_torchrun_ranks_meet_in_its_store_and_never_in_that_of_an_earlier_attempt() -> None:
    environ = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth1"}
    by_torchrun = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}

    meeting = find_meeting(environ | by_torchrun, TOKEN, Place(rank=1, size=2))

    assert meeting == Meeting(host="10.0.0.1", port=29500, token=TOKEN, torchrun_attempt=1)
    assert find_meeting(environ, TOKEN, Place(rank=1, size=2)) == replace(meeting, torchrun_attempt=None)


async def test_four_processes_on_two_hosts_take_the_steps_of_one_and_survive_a_death(
    hosts: tuple[Host, Host], config: TrainerConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is on the second host, so its screenshots, checkpoints and adapters cross the cable too."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    here, there = hosts
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

    model_path = shutil.copytree(config.model_path, tmp_path / "model")
    (model_path / "tokenizer.json").write_text("{}")  # expected of a model folder, not read by the trainer

    with nodes((there, here), model_path, tmp_path) as address:
        # the folder of the model is one of the nodes'
        remote = chz.replace(
            config, address=address, sharding="hybrid", max_restarts=2, model_path=tmp_path / "elsewhere"
        )
        async with asyncio.timeout(patience(400)), TrainingClient(remote, tmp_path / "logs" / "trainer.log") as four:
            await four.load_state(tmp_path / "beginning")
            output = await four.forward_backward(datums, LossConfig())
            await four.optim_step(PLAIN_STEP)
            addresses = {rank: listening(rank_process(rank).pid) for rank in (2, 3)}
            rank_process(3).kill()
            text = await four.forward_backward(datums[:1], LossConfig())
            step = await four.optim_step(PLAIN_STEP)
            await four.save_weights_for_sampler(tmp_path / "four")
            await four.save_state(tmp_path / "state-of-four")

    assert step.policy_version == 2
    assert four.num_restarts == 1
    assert addresses == {2: {here.address}, 3: {here.address}}
    for one, other in ((output, expected), (text, expected_text)):
        for row, expected_row in zip(one.training_logprobs, other.training_logprobs, strict=True):
            assert_equal_but_for_rounding(row, expected_row, NUM_ROUNDINGS)
        losses = [result.metrics["loss/total"] for result in (one, other)]
        assert_equal_but_for_rounding(losses[:1], losses[1:], NUM_ROUNDINGS, magnitude=1.0)
    assert_close(adapter(tmp_path / "four"), adapter(tmp_path / "alone"))
    resumed = Trainer(config)
    resumed.load_state(tmp_path / "state-of-four", with_optimizer=True)
    assert resumed.policy_version == 2


@pytest.mark.parametrize(("ends", "status"), [(ControllerLink.close, 0), (ControllerLink.abort, 1)])
async def test_a_connection_that_breaks_is_not_the_end_of_the_run(
    ends: Callable[[ControllerLink], None], status: int
) -> None:
    """With status 0 the node would end too, and the run would look for it in vain."""
    address = Address(host="127.0.0.1", port=free_port())
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cua_rl.training.worker", str(address)), env={**os.environ, TOKEN_VARIABLE: TOKEN}
    )
    try:
        async with asyncio.timeout(patience(120)):
            while True:
                with suppress(OSError):
                    link = await ControllerLink.connect(address, TOKEN)
                    break
                await asyncio.sleep(0.2)
            ends(link)
            assert await worker.wait() == status
    finally:
        with suppress(ProcessLookupError):
            worker.kill()
