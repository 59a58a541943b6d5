"""What the client asks of a trainer that is started again, and what travels to one on another host."""

import asyncio
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.link import TOKEN_VARIABLE, Address, ControllerLink, WorkerLink
from cua_rl.training.recovery import TimeLimits
from cua_rl.types.codec import MessageError, decode
from cua_rl.types.errors import ConfigError, DiskFullError, TrainerDeathError, TrainingError
from tests.builders import datum
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

    def __init__(
        self,
        dies_at: Callable[[int, wire.Request], bool] = lambda number, request: False,
        hangs_at: Callable[[int, wire.Request], bool] = lambda number, request: False,
    ) -> None:
        self.asked: list[str] = []
        self.failure: wire.Failed | None = None
        """The answer to every `Forward`."""
        self._dies_at = dies_at
        self._hangs_at = hangs_at
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
            if self._hangs_at(self._number, request):
                with suppress(ConnectionError):  # until the controller gives it up
                    link.receive()
                return True
            link.send(self.failure if self.failure and isinstance(request, wire.Forward) else rank.reply(request))

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


def _client(node: FakeNode, tmp_path: Path, max_restarts: int = 2, limits: TimeLimits | None = None) -> TrainingClient:
    config = TrainerConfig(model_path=tmp_path, address=node.address, max_restarts=max_restarts)
    return TrainingClient(config, tmp_path / "logs" / "trainer.log", limits)


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


async def test_a_trainer_that_hangs_is_given_up_and_its_work_done_again(tmp_path: Path) -> None:
    node = FakeNode(hangs_at=lambda number, _: number == 6)
    limits = TimeLimits(weight_bytes=0, state_bytes=0, least_s=patience(0.2))
    with node.running():
        async with _client(node, tmp_path, limits=limits) as client:
            for number in (1, 2, 3):
                await _train(client, number)
                await client.save_weights_for_sampler(tmp_path / str(number))
            restarts = client.num_restarts

    assert restarts == 1
    assert list((tmp_path / "3" / "steps").read_bytes()) == [1, 2, 3]


async def test_a_trainer_that_hangs_again_and_again_is_an_error_that_names_the_request(tmp_path: Path) -> None:
    node = FakeNode(hangs_at=lambda number, request: isinstance(request, wire.ForwardBackward))
    limits = TimeLimits(weight_bytes=0, state_bytes=0, least_s=patience(0.2))
    with node.running():
        async with _client(node, tmp_path, max_restarts=1, limits=limits) as client:
            with pytest.raises(TrainerDeathError, match=r"answer to ForwardBackward of 5 tokens within .* hangs"):
                await client.forward_backward([datum([False, *[True] * 4])], LossConfig())

    assert node.asked.count("ForwardBackward") == 2


def test_a_request_may_take_as_long_as_its_tokens_on_a_slow_processor_and_later_as_they_did(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 8 * 10**9)  # 4B parameters; takes no room on the disk
    limits = TimeLimits.of_model(TrainerConfig(model_path=tmp_path))
    small, large = (
        wire.Forward(datums=(datum([False, *[True] * (num - 1)]),), temperature=1.0, weights="policy")
        for num in (100, 10_000)
    )
    start = wire.Start(config=TrainerConfig())

    # 600 s, and 8 GB at 50 MB/s; a token has 4 x 8e9 operations, of 1e10 a second without a GPU and 1e12 with one
    assert limits.limit_s(start) == 600 + 160
    assert limits.limit_s(large) == pytest.approx(760 + 10_000 * 3.2)
    limits.has_gpu = True
    assert limits.limit_s(large) == pytest.approx(760 + 10_000 * 0.032)
    limits.note(start, 30.0)
    limits.note(small, 1.0)  # 100 tokens a second
    limits.note(large, 10.0)  # 1,000
    limits.note(small, 1.0)
    assert limits.limit_s(large) == pytest.approx(760 + 10_000 * 20 / 1000)
    assert TimeLimits.of_model(TrainerConfig(model_path=tmp_path, lora_rank=0)).limit_s(start) == 600 + 6 * 160


@pytest.mark.parametrize(
    ("kind", "error"), [("config", ConfigError), ("disk", DiskFullError), ("training", TrainingError)]
)
async def test_a_failure_in_the_trainer_keeps_its_kind(kind: Any, error: type[Exception], tmp_path: Path) -> None:
    node = FakeNode()
    node.failure = wire.Failed(kind=kind, message="disk full: expected room in '/there'")
    with node.running():
        async with _client(node, tmp_path) as client:
            with pytest.raises(error, match="expected room in '/there'"):
                await client.forward([])


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
