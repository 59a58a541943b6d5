"""What the client asks of a trainer that is started again, and what travels to one that does not see our files."""

import asyncio
import os
import pickle
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from cua_rl.training import wire
from cua_rl.training.client import ModelClient, TrainingClient
from cua_rl.training.config import LoraSpec, LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.folders import link_folder
from cua_rl.training.link import WorkerLink, exchange_frames
from cua_rl.training.recovery import TimeLimits
from cua_rl.types.codec import MessageError, decode, encode
from cua_rl.types.errors import ConfigError, DiskFullError, TrainerDeathError, TrainingError
from tests.builders import datum
from tests.patience import patience


class FakeRank:
    """Its weights are the optimizer steps that it has taken, and its checkpoint a file with them."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._has_gradient = False

    def reply(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.Start():
                return wire.Started(device="cpu", num_trainable_parameters=1)
            case wire.Forward():
                return wire.ForwardOutput(training_logprobs=())
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
                if isinstance(inner, wire.LoadState) and "steps" not in files:
                    return wire.Failed(kind="training", message="damaged")
                if isinstance(inner, wire.LoadState):
                    self._steps = list(files["steps"])
                assert files or not self._has_gradient
                written = {} if files else {"steps": bytes(self._steps)}
                return wire.FilesOutput(reply=wire.Done(policy_version=len(self._steps)), files=written)
            case _:
                raise AssertionError(f"expected no {request}")


class FakeRanks:
    """Ranks with a model, and those that were created."""

    def __init__(self) -> None:
        self._models = {"": FakeRank()}

    def reply(self, request: wire.Request) -> wire.Reply:
        match request:
            case wire.CreateModel(model=name):
                if name == "large":
                    return wire.Failed(kind="config", message="no memory")
                self._models[name] = FakeRank()
                return wire.Done(policy_version=0)
            case wire.DropModel(model=name):
                del self._models[name]
                return wire.Done(policy_version=0)
            case wire.ForModel(model=name, request=inner):
                return self._models[name].reply(inner)
            case _:
                return self._models[""].reply(request)


class FakeNodes:
    """Ranks elsewhere, which keep nothing when they are closed."""

    reads_our_files = False

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
        self._rank: FakeRanks | None = None

    async def open(self) -> None:
        assert self._rank is None
        self._rank = FakeRanks()

    async def ask(self, payload: bytes) -> bytes:
        assert self._rank is not None
        request: wire.Request = decode(payload, wire.Request)
        self._number += 1
        self.asked.append(_name(request))
        if self._hangs_at(self._number, request):
            await asyncio.Event().wait()
        reply = self.failure if self.failure and isinstance(request, wire.Forward) else self._rank.reply(request)
        if self._dies_at(self._number, request):  # when it has carried the request out, and nobody hears of it
            self.asked.append("death")
            raise TrainerDeathError("a node of the trainer is lost")
        return encode(reply, wire.Reply)

    async def close(self) -> None:
        self._rank = None


def _name(request: wire.Request) -> str:
    model = f" {request.model}" if isinstance(request, wire.ForModel | wire.CreateModel | wire.DropModel) else ""
    while isinstance(request, wire.ForModel | wire.WithFiles):
        request = request.request
    return type(request).__name__ + model


def _client(
    nodes: FakeNodes, tmp_path: Path, max_restarts: int = 2, limits: TimeLimits | None = None
) -> TrainingClient:
    config = TrainerConfig(model_path=tmp_path, num_nodes=1, max_restarts=max_restarts)
    return TrainingClient(config, tmp_path / "logs" / "trainer.log", endpoint=nodes, limits=limits)


async def _train(client: ModelClient, number: int) -> None:
    """An optimizer step that the fake's weights show as `number`."""
    await client.forward_backward([], LossConfig())
    await client.optim_step(OptimConfig(learning_rate=float(number)))


@pytest.mark.parametrize("dying", range(2, 13))
async def test_every_step_is_taken_once_wherever_the_trainer_dies(dying: int, tmp_path: Path) -> None:
    """Requests: Start, and three times ForwardBackward, OptimStep, SaveState (a cut), SaveWeightsForSampler."""
    nodes = FakeNodes(lambda number, _: number == dying)
    async with _client(nodes, tmp_path) as client:
        for number in (1, 2, 3):
            await _train(client, number)
            await client.save_weights_for_sampler(tmp_path / str(number))
        restarts = client.num_restarts

    assert restarts == 1
    # what each version published never depends on the death, and the last one has each step once
    assert [list((tmp_path / str(number) / "steps").read_bytes()) for number in (1, 2, 3)] == [[1], [1, 2], [1, 2, 3]]
    assert nodes.asked.count("death") == 1
    assert not (tmp_path / "logs" / "trainer.cuts").exists()


@pytest.mark.parametrize("dying", range(2, 18))
async def test_every_step_of_every_model_is_taken_once_wherever_the_trainer_dies(dying: int, tmp_path: Path) -> None:
    """The steps of two models alternate, and the gradient of the second waits while the first steps."""
    nodes = FakeNodes(lambda number, _: number == dying)
    async with _client(nodes, tmp_path) as client:
        one, two = [await client.create_model(name, LoraSpec(rank=1)) for name in ("one", "two")]
        for number in (1, 2):
            await one.forward_backward([], LossConfig())
            await two.forward_backward([], LossConfig())
            await one.optim_step(OptimConfig(learning_rate=number))
            await one.save_weights_for_sampler(tmp_path / f"one-{number}")
            await two.optim_step(OptimConfig(learning_rate=10 * number))
        await two.save_state(tmp_path / "two")
        restarts = client.num_restarts
        await client.drop_model("one")
        kept = len(list((tmp_path / "logs" / "trainer.cuts").iterdir()))

    assert restarts == 1
    assert [list((tmp_path / f"one-{number}" / "steps").read_bytes()) for number in (1, 2)] == [[1], [1, 2]]
    assert list((tmp_path / "two" / "steps").read_bytes()) == [10, 20]
    assert (one.policy_version, two.policy_version, client.policy_version) == (2, 2, 0)
    assert kept == 1


async def test_a_model_that_does_not_fit_leaves_the_others_and_a_dropped_one_does_not_come_back(
    tmp_path: Path,
) -> None:
    """Requests: Start, CreateModel three times, DropModel, and a Forward that the trainer does not survive."""
    nodes = FakeNodes(lambda number, _: number == 6)
    async with _client(nodes, tmp_path) as client:
        for name in ("one", "two"):
            await client.create_model(name, LoraSpec(rank=1))
        with pytest.raises(ConfigError, match="no memory"):
            await client.create_model("large", LoraSpec(rank=1))
        await client.drop_model("one")
        await client.model("two").forward([])
        with pytest.raises(TrainingError, match=r"expected a model among \['', 'two'\], got 'large'"):
            client.model("large")

    assert nodes.asked[5:] == ["Forward two", "death", "Start", "CreateModel two", "Forward two"]


async def test_a_model_whose_creation_nobody_waits_for_any_more_leaves_the_trainer(tmp_path: Path) -> None:
    began, may_go_on = asyncio.Event(), asyncio.Event()

    class SlowNodes(FakeNodes):
        async def ask(self, payload: bytes) -> bytes:
            if isinstance(decode(payload, wire.Request), wire.CreateModel):
                began.set()
                await may_go_on.wait()
            return await super().ask(payload)

    nodes = SlowNodes()
    async with _client(nodes, tmp_path) as client:
        creation = asyncio.create_task(client.create_model("one", LoraSpec(rank=1)))
        await began.wait()
        creation.cancel()
        await asyncio.wait([creation])
        may_go_on.set()
        await client.forward([])
        with pytest.raises(TrainingError, match="expected a model among"):
            client.model("one")

    assert nodes.asked == ["Start", "CreateModel one", "DropModel one", "Forward"]


async def test_a_trainer_that_hangs_is_given_up_and_its_work_done_again(tmp_path: Path) -> None:
    node = FakeNodes(hangs_at=lambda number, _: number == 6)
    limits = TimeLimits(weight_bytes=0, state_bytes=0, least_s=patience(0.2))
    async with _client(node, tmp_path, limits=limits) as client:
        for number in (1, 2, 3):
            await _train(client, number)
            await client.save_weights_for_sampler(tmp_path / str(number))
        restarts = client.num_restarts

    assert restarts == 1
    assert list((tmp_path / "3" / "steps").read_bytes()) == [1, 2, 3]


async def test_a_trainer_that_hangs_again_and_again_is_an_error_that_names_the_request(tmp_path: Path) -> None:
    node = FakeNodes(hangs_at=lambda number, request: isinstance(request, wire.ForwardBackward))
    limits = TimeLimits(weight_bytes=0, state_bytes=0, least_s=patience(0.2))
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
    node = FakeNodes()
    node.failure = wire.Failed(kind=kind, message="disk full: expected room in '/there'")
    async with _client(node, tmp_path) as client:
        with pytest.raises(error, match="expected room in '/there'"):
            await client.forward([])


async def test_a_checkpoint_of_what_is_on_disk_is_not_written_again_and_is_what_a_new_trainer_begins_from(
    tmp_path: Path,
) -> None:
    """Requests: Start, a step and its cut, SaveWeightsForSampler, and a ForwardBackward that the trainer does not
    survive."""
    node, weights = FakeNodes(lambda number, _: number == 6), tmp_path / "weights"
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


async def test_an_earlier_checkpoint_may_be_deleted_once_a_later_one_is_saved(tmp_path: Path) -> None:
    """The second step is too soon after the first one's cut for a cut of its own."""
    deaths: list[str] = []
    node, weights = FakeNodes(lambda *_: bool(deaths and deaths.pop())), tmp_path / "weights"
    async with _client(node, tmp_path) as client:
        for number in (1, 2):
            await _train(client, number)
            await client.save_state(weights / str(number))
        shutil.rmtree(weights / "1")
        deaths.append("at the next request")
        await _train(client, 3)
        await client.save_state(weights / "3")

    assert list((weights / "3" / "steps").read_bytes()) == [1, 2, 3]


async def test_weights_without_their_optimizer_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "steps").write_bytes(b"\7")
    node = FakeNodes()
    async with _client(node, tmp_path) as client:
        await client.load_state(tmp_path / "begun", with_optimizer=False)
        await client.save_state(tmp_path / "state")

    assert node.asked == ["Start", "LoadState", "SaveState"]


async def test_a_model_goes_on_from_what_was_saved_after_weights_were_loaded_without_their_optimizer(
    tmp_path: Path,
) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps").write_bytes(b"\7")
    deaths: list[str] = []
    nodes = FakeNodes(lambda *_: bool(deaths and deaths.pop()))
    async with _client(nodes, tmp_path) as client:
        await client.load_state(tmp_path / "first")
        await client.load_state(tmp_path / "second", with_optimizer=False)
        await client.save_state(tmp_path / "saved")
        shutil.rmtree(tmp_path / "first")
        shutil.rmtree(tmp_path / "second")
        deaths.append("at the next request")
        await _train(client, 8)
        await client.save_state(tmp_path / "again")

    assert list((tmp_path / "again" / "steps").read_bytes()) == [7, 8]


async def test_a_checkpoint_that_could_not_be_loaded_is_not_saved_as_the_state_of_the_model(tmp_path: Path) -> None:
    deaths: list[str] = []
    nodes = FakeNodes(lambda *_: bool(deaths and deaths.pop()))
    async with _client(nodes, tmp_path) as client:
        await _train(client, 1)
        (tmp_path / "damaged").mkdir()
        (tmp_path / "damaged" / "other").write_bytes(b"damaged")
        with pytest.raises(TrainingError, match="damaged"):
            await client.load_state(tmp_path / "damaged")
        await client.save_state(tmp_path / "saved")
        shutil.rmtree(tmp_path / "damaged")
        deaths.append("at the next request")
        await _train(client, 2)
        await client.save_state(tmp_path / "again")

    assert [list((tmp_path / name / "steps").read_bytes()) for name in ("saved", "again")] == [[1], [1, 2]]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no second file system")
def test_a_folder_on_another_file_system_is_copied(tmp_path: Path) -> None:
    with TemporaryDirectory(dir="/dev/shm") as other:
        (tmp_path / "cut" / "inner").mkdir(parents=True)
        (tmp_path / "cut" / "inner" / "state").write_bytes(b"state")

        link_folder(tmp_path / "cut", Path(other) / "weights" / "1")

        assert (Path(other) / "weights" / "1" / "inner" / "state").read_bytes() == b"state"
        assert [path.name for path in (Path(other) / "weights").iterdir()] == ["1"]


async def test_a_new_trainer_starts_from_the_loaded_checkpoint_and_reference(tmp_path: Path) -> None:
    for name, steps in (("checkpoint", b"\7\7"), ("reference", b"\7")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps").write_bytes(steps)
    nodes = FakeNodes(lambda number, _: number in (4, 11))
    async with _client(nodes, tmp_path) as client:
        await client.load_state(tmp_path / "checkpoint")
        await client.load_reference(tmp_path / "reference")
        await _train(client, 8)
        await _train(client, 9)
        await client.save_weights_for_sampler(tmp_path / "weights")

    assert list((tmp_path / "weights" / "steps").read_bytes()) == [7, 7, 8, 9]
    # requests 1 to 4; again from the beginning, a step and its cut; again from the cut
    beginning = ["Start", "LoadState", "LoadReference", "ForwardBackward"]
    after_death = [*beginning, "OptimStep", "SaveState", "ForwardBackward"]
    assert nodes.asked[:12] == [*beginning, "death", *after_death]
    assert nodes.asked[12:17] == ["death", "Start", "LoadReference", "LoadState", "ForwardBackward"]


async def test_a_gradient_that_was_dropped_is_dropped_again_after_a_death(tmp_path: Path) -> None:
    """Requests: Start, ForwardBackward, one that fails, one more, and OptimStep, which the trainer does not survive."""
    nodes = FakeNodes(lambda number, _: number == 5)
    async with _client(nodes, tmp_path) as client:
        await client.forward_backward([], LossConfig())
        with pytest.raises(TrainingError, match="not finite"):
            await client.forward_backward([], LossConfig(name="gspo"))
        await _train(client, 1)

    assert nodes.asked[5:] == ["death", "Start", *["ForwardBackward"] * 3, "OptimStep", "SaveState"]


async def test_a_trainer_that_dies_at_the_same_request_again_and_again_is_given_up(tmp_path: Path) -> None:
    nodes = FakeNodes(lambda number, request: isinstance(request, wire.Forward))
    async with _client(nodes, tmp_path, max_restarts=2) as client:
        await _train(client, 1)
        with pytest.raises(TrainerDeathError, match="is lost"):
            await client.forward([])
        assert client.num_restarts == 2

    assert nodes.asked.count("Forward") == 3


async def test_deaths_are_counted_at_each_request_whether_or_not_there_is_ever_an_optimizer_step(
    tmp_path: Path,
) -> None:
    """Requests: Start, then each Forward twice, with a Start between: the trainer does not survive the first."""
    nodes = FakeNodes(lambda number, request: isinstance(request, wire.Forward) and number % 3 == 2)
    async with _client(nodes, tmp_path, max_restarts=1) as client:
        for _ in range(4):
            await client.forward([])
        assert client.num_restarts == 4

    assert nodes.asked == ["Start", *["Forward", "death", "Start", "Forward"] * 4]


async def test_a_request_of_which_the_trainer_dies_leaves_no_trace_in_the_next_ones(tmp_path: Path) -> None:
    """A trainer that has died is not asked again before it is started again: one that hangs may answer yet."""
    nodes = FakeNodes(lambda number, request: isinstance(request, wire.ForwardBackward) and bool(request.datums))
    async with _client(nodes, tmp_path, max_restarts=1) as client:
        await client.forward_backward([], LossConfig())
        with pytest.raises(TrainerDeathError, match="is lost"):
            await client.forward_backward([datum([False, *[True] * 4])], LossConfig())
        await client.optim_step(OptimConfig(learning_rate=1.0))
        await client.save_weights_for_sampler(tmp_path / "weights")

    poisoned = ["ForwardBackward", "death", "Start", "ForwardBackward"]
    assert nodes.asked[1:-2] == ["ForwardBackward", *poisoned, *poisoned, "OptimStep"]
    assert list((tmp_path / "weights" / "steps").read_bytes()) == [1]


async def test_without_restarts_no_cut_is_written_and_the_first_death_is_raised(tmp_path: Path) -> None:
    nodes = FakeNodes(lambda number, _: number == 4)
    async with _client(nodes, tmp_path, max_restarts=0) as client:
        await _train(client, 1)
        with pytest.raises(TrainerDeathError, match="is lost"):
            await _train(client, 2)

    assert nodes.asked == ["Start", "ForwardBackward", "OptimStep", "ForwardBackward", "death"]


class FakeAnswers(FakeNodes):
    """Ranks that answer the first request as they should, and any other with these bytes."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._answer = answer

    async def ask(self, payload: bytes) -> bytes:
        return self._answer if self.asked else await super().ask(payload)


@pytest.mark.parametrize("answer", [pickle.dumps(wire.Done(policy_version=1)), b"", b"\0" * 8], ids=str)
async def test_an_answer_that_is_no_message_is_refused(answer: bytes, tmp_path: Path) -> None:
    """It would be loaded as a `Done`, by whoever loads pickles."""
    async with _client(FakeAnswers(answer), tmp_path) as client:
        with pytest.raises(MessageError, match="expected a "):
            await client.trainer_metrics()


async def test_a_frame_arrives_as_it_was_sent_and_a_connection_that_ends_within_one_is_no_answer() -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    with theirs:
        for answer, sent in ((b"answer", 6), (b"answ", 6)):
            theirs.sendall(struct.pack(">Q", sent) + answer)
            exchange = asyncio.create_task(exchange_frames(reader, writer, b"request"))
            assert await asyncio.to_thread(WorkerLink(theirs).receive) == b"request"
            if sent == len(answer):
                assert await exchange == answer
        theirs.close()
        with pytest.raises(EOFError):
            await exchange
    writer.close()


async def test_a_frame_that_is_longer_than_any_request_is_refused_before_it_is_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(struct.pack(">Q", 2**63))
        with pytest.raises(ConnectionError, match="expected a frame of at most"):
            WorkerLink(ours).receive()
