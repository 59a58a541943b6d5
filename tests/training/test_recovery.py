"""What the client asks of a trainer that is started again, and what travels to one on another host."""

import asyncio
import pickle
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.folders import link_folder
from cua_rl.training.link import TOKEN_VARIABLE, Address, ControllerLink, WorkerLink
from cua_rl.types.codec import MessageError, decode
from cua_rl.types.errors import ConfigError, TrainerDeathError, TrainingError
from tests.patience import patience

TOKEN = "0123456789abcdef" * 2


class FakeRank:
    """Its weights are the optimizer steps that it has taken, and its checkpoint a file with them."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._has_gradient = False

    def reply(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.Start():
                return wire.Started(device="cpu", num_trainable_parameters=1)
            case wire.ForwardBackward(loss=loss):
                self._has_gradient = loss.name != "gspo"
                if self._has_gradient:
                    return wire.ForwardBackwardOutput(training_logprobs=(), metrics={})
                return wire.Failed(kind="training", message="not finite")
            case wire.OptimStep(optim=optim):
                assert self._has_gradient
                self._steps.append(int(optim.learning_rate))
                self._has_gradient = False
                return wire.OptimStepOutput(
                    policy_version=len(self._steps), grad_norm=1.0, learning_rate=1.0, num_trained_tokens=1
                )
            case wire.WithFiles(request=inner, files=files):
                if isinstance(inner, wire.LoadState):
                    self._steps = list(files["steps"])
                assert files or not self._has_gradient
                written = {} if files else {"steps": bytes(self._steps)}
                return wire.FilesOutput(reply=wire.Done(policy_version=len(self._steps)), files=written)
            case _:
                raise AssertionError(f"expected no {request}")


class FakeNode:
    """Rank 0 on another host, started again after each death."""

    def __init__(self, dies_at: Callable[[int, wire.Request], bool] = lambda number, request: False) -> None:
        self.asked: list[str] = []
        self._dies_at = dies_at
        self._number = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        with suppress(OSError):  # the end of the listener
            while self._serve_controller():
                self.asked.append("death")

    def _serve_controller(self) -> bool:
        """One life; whether another one follows."""
        link, rank = WorkerLink.accept(self._listener, TOKEN), FakeRank()
        while True:
            try:
                payload = link.receive()
                request: wire.Request = decode(payload, wire.Request)
            except EOFError:
                return False
            self._number += 1
            self.asked.append(_name(request))
            if self._dies_at(self._number, request):
                link.close()
                return True
            link.send(rank.reply(request))

    @contextmanager
    def running(self) -> Generator[None]:
        self._thread.start()
        yield
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=patience(10))
        self._listener.close()


def _name(request: wire.Request) -> str:
    inner = request.request if isinstance(request, wire.WithFiles) else request
    return type(inner).__name__


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)


def _client(node: FakeNode, tmp_path: Path, max_restarts: int = 2) -> TrainingClient:
    config = TrainerConfig(model_path=tmp_path, address=node.address, max_restarts=max_restarts)
    return TrainingClient(config, tmp_path / "logs" / "trainer.log")


async def _train(client: TrainingClient, number: int) -> None:
    """An optimizer step that the fake's weights show as `number`."""
    await client.forward_backward([], LossConfig())
    await client.optim_step(OptimConfig(learning_rate=float(number)))


@pytest.mark.parametrize("dying", range(2, 13))
async def test_every_step_is_taken_once_wherever_the_trainer_dies(dying: int, tmp_path: Path) -> None:
    """Requests: Start, and three times ForwardBackward, OptimStep, SaveState (a cut), SaveWeightsForSampler."""
    node = FakeNode(lambda number, _: number == dying)
    with node.running():
        async with _client(node, tmp_path) as client:
            for number in (1, 2, 3):
                await _train(client, number)
                await client.save_weights_for_sampler(tmp_path / str(number))
            restarts = client.num_restarts

    assert restarts == 1
    # what each version published never depends on the death, and the last one has each step once
    assert [list((tmp_path / str(number) / "steps").read_bytes()) for number in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    assert node.asked.count("death") == 1
    assert not (tmp_path / "logs" / "trainer.cuts").exists()


async def test_a_new_trainer_starts_from_the_loaded_checkpoint_and_reference(tmp_path: Path) -> None:
    for name, steps in (("checkpoint", b"\7\7"), ("reference", b"\7")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps").write_bytes(steps)
    node = FakeNode(lambda number, _: number in (4, 11))
    with node.running():
        async with _client(node, tmp_path) as client:
            await client.load_state(tmp_path / "checkpoint")
            await client.load_reference(tmp_path / "reference")
            await _train(client, 8)
            await _train(client, 9)
            await client.save_weights_for_sampler(tmp_path / "weights")

    assert list((tmp_path / "weights" / "steps").read_bytes()) == [7, 7, 8, 9]
    # requests 1 to 4; again from the beginning, a step and its cut; again from the cut
    beginning = ["Start", "LoadState", "LoadReference", "ForwardBackward"]
    after_death = [*beginning, "OptimStep", "SaveState", "ForwardBackward"]
    assert node.asked[:12] == [*beginning, "death", *after_death]
    assert node.asked[12:17] == ["death", "Start", "LoadReference", "LoadState", "ForwardBackward"]


async def test_a_gradient_that_was_dropped_is_dropped_again_after_a_death(tmp_path: Path) -> None:
    """Requests: Start, ForwardBackward, one that fails, one more, and OptimStep, which the trainer does not survive."""
    node = FakeNode(lambda number, _: number == 5)
    with node.running():
        async with _client(node, tmp_path) as client:
            await client.forward_backward([], LossConfig())
            with pytest.raises(TrainingError, match="not finite"):
                await client.forward_backward([], LossConfig(name="gspo"))
            await _train(client, 1)

    assert node.asked[5:] == ["death", "Start", *["ForwardBackward"] * 3, "OptimStep", "SaveState"]


async def test_a_checkpoint_of_what_is_on_disk_is_not_written_again_and_is_what_a_new_trainer_begins_from(
    tmp_path: Path,
) -> None:
    """Requests: Start, a step and its cut, SaveWeightsForSampler, and a ForwardBackward that the trainer does not
    survive."""
    node, weights = FakeNode(lambda number, _: number == 6), tmp_path / "weights"
    with node.running():
        async with _client(node, tmp_path) as client:
            await _train(client, 1)
            await client.save_weights_for_sampler(tmp_path / "adapter")
            await client.save_state(weights / "1")
            await client.save_state(weights / "2")  # after a step that trained nothing
            (cut,) = (tmp_path / "logs" / "trainer.cuts").iterdir()
            is_linked = (cut / "steps").stat().st_ino == (weights / "2" / "steps").stat().st_ino
            for gone in (cut, weights / "1"):
                shutil.rmtree(gone)
            await _train(client, 3)
            await client.save_state(weights / "3")

    assert is_linked
    assert node.asked[:6] == [
        "Start",
        "ForwardBackward",
        "OptimStep",
        "SaveState",
        "SaveWeightsForSampler",
        "ForwardBackward",
    ]
    assert node.asked[6:9] == ["death", "Start", "LoadState"]
    assert [list((weights / name / "steps").read_bytes()) for name in ("2", "3")] == [[1], [1, 3]]


async def test_weights_without_their_optimizer_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "steps").write_bytes(b"\7")
    node = FakeNode()
    with node.running():
        async with _client(node, tmp_path) as client:
            await client.load_state(tmp_path / "begun", with_optimizer=False)
            await client.save_state(tmp_path / "state")

    assert node.asked == ["Start", "LoadState", "SaveState"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system")
def test_a_folder_on_another_file_system_is_copied(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as other:
        (tmp_path / "cut" / "inner").mkdir(parents=True)
        (tmp_path / "cut" / "inner" / "state").write_bytes(b"state")

        link_folder(tmp_path / "cut", Path(other) / "weights" / "1")

        assert (Path(other) / "weights" / "1" / "inner" / "state").read_bytes() == b"state"
        assert [path.name for path in (Path(other) / "weights").iterdir()] == ["1"]


async def test_a_trainer_that_dies_at_the_same_request_again_and_again_is_given_up(tmp_path: Path) -> None:
    node = FakeNode(lambda number, request: isinstance(request, wire.Forward))
    with node.running():
        async with _client(node, tmp_path, max_restarts=2) as client:
            await _train(client, 1)
            with pytest.raises(TrainerDeathError, match="closed the connection"):
                await client.forward([])
            assert client.num_restarts == 2

    assert node.asked.count("Forward") == 3


async def test_without_restarts_no_cut_is_written_and_the_first_death_is_raised(tmp_path: Path) -> None:
    node = FakeNode(lambda number, _: number == 4)
    with node.running():
        async with _client(node, tmp_path, max_restarts=0) as client:
            await _train(client, 1)
            with pytest.raises(TrainerDeathError, match="closed the connection"):
                await _train(client, 2)

    assert node.asked == ["Start", "ForwardBackward", "OptimStep", "ForwardBackward", "death"]


async def test_a_wrong_token_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = FakeNode()
    with node.running():
        monkeypatch.setenv(TOKEN_VARIABLE, "f" * 32)
        with pytest.raises(ConfigError, match="expected the token of the trainer at"):
            async with _client(node, tmp_path):
                pass
        assert node.asked == []
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        async with _client(node, tmp_path):
            assert node.asked == ["Start"]


@pytest.mark.parametrize("frame", [pickle.dumps(wire.Done(policy_version=1)), b"", b"\0" * 8], ids=str)
async def test_an_answer_that_is_no_message_is_refused(frame: bytes) -> None:
    """It would be loaded as a `Done`, by whoever loads pickles."""
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with theirs:
        theirs.sendall(struct.pack(">Q", len(frame)) + frame)
        with pytest.raises(MessageError, match="expected a "):
            await ControllerLink(reader, writer).ask(wire.TrainerMetrics())
    writer.close()


async def test_a_frame_that_is_longer_than_any_request_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">Q", 2**63))
        with pytest.raises(ConnectionError, match="expected a frame of at most"):
            WorkerLink(ours).receive()


async def test_a_stranger_who_dribbles_does_not_keep_the_controller_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as stranger:
        host, port = listener.getsockname()
        stranger.connect((host, port))
        accepting = asyncio.create_task(asyncio.to_thread(WorkerLink.accept, listener, TOKEN, 0.3))
        num_bytes = 0
        with suppress(OSError):  # once it was turned away
            while num_bytes < 64:
                num_bytes += stranger.send(b"x")
                await asyncio.sleep(0.1)
        link = await ControllerLink.connect(Address(host=host, port=port), TOKEN)
        accepted = await accepting

    assert num_bytes < 10  # of the 64 that a controller sends
    link.close()
    accepted.close()


async def test_many_strangers_who_say_nothing_neither_delay_the_controller_nor_keep_threads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as strangers:
        host, port = listener.getsockname()
        before = threading.active_count()
        accepting = asyncio.create_task(asyncio.to_thread(WorkerLink.accept, listener, TOKEN, 600.0))
        for _ in range(300):
            strangers.enter_context(await asyncio.to_thread(socket.create_connection, (host, port)))
        async with asyncio.timeout(patience(60)):
            link = await ControllerLink.connect(Address(host=host, port=port), TOKEN)
            accepted = await accepting
        num_threads = threading.active_count() - before

    assert num_threads < 100  # one for each peer that may still prove itself

    link.close()
    accepted.close()


@pytest.mark.parametrize(
    ("address", "token", "message"),
    [
        ("0.0.0.0:29400", TOKEN, "expected the IP address of one interface"),
        ("trainer:29400", TOKEN, "expected the IP address of one interface"),
        ("10.0.0.1", TOKEN, "expected the IP address of one interface"),
        ("10.0.0.1:29400", "short", "expected at least 32 random characters"),
    ],
)
def test_an_address_without_interface_or_secret_is_refused(
    address: str, token: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, token)

    with pytest.raises(ConfigError, match=message):
        TrainingClient(TrainerConfig(model_path=tmp_path, address=address), tmp_path / "trainer.log")
