# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""Several trainer processes against one."""

import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import chz
import psutil
import pytest
import torch
from safetensors.torch import load_file

from cua_rl.training import wire
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.model import find_device
from cua_rl.training.ranks import Agreement, Place, Ranks, combine_accounts, share_out
from cua_rl.training.trainer import Trainer
from cua_rl.types.errors import ConfigError, TrainingError
from cua_rl.types.rollout import Datum
from tests.live_processes import command_line
from tests.patience import patience
from tests.real.training.tiny_families import build_random_qwen3_vl_moe
from tests.real.training.tiny_qwen3_vl import TINY_ROUNDINGS, build_random_qwen3_vl, draw_screenshot, make_datum
from tests.real.training.trainer_calls import run_out_of_memory, train
from tests.rounding import assert_equal_but_for_rounding

T = TypeVar("T")

# With eps and the rate 1, AdamW's first step is about g / (|g| + 1): weights differ as much as gradients do.
PLAIN_STEP = OptimConfig(learning_rate=1.0, eps=1.0, grad_clip_norm=0.0)
# Two steps after each other.
NUM_ROUNDINGS = 2 * TINY_ROUNDINGS


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    """Weights have moved by gradients, whose largest one all of them are measured by."""
    largest = max(tensor.abs().max().item() for tensor in other.values())
    for name, tensor in one.items():
        assert_equal_but_for_rounding(tensor, other[name], NUM_ROUNDINGS, magnitude=largest)


def go_on_alone(
    config: TrainerConfig, state: Path, datums: tuple[Datum, ...], folder: Path
) -> wire.ForwardBackwardOutput:
    """Another step of one process from a checkpoint."""
    resumed = Trainer(config)
    resumed.load_state(state, with_optimizer=True)
    output = resumed.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
    resumed.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    resumed.save_weights_for_sampler(folder)
    return output


async def test_two_processes_take_the_step_of_one_and_exchange_checkpoints(
    config: TrainerConfig, tmp_path: Path
) -> None:
    rng = random.Random(0)
    screens = [draw_screenshot(rng) for _ in range(2)]
    datums = tuple(make_datum(rng, screens[: index % 3]) for index in range(5))  # three and two of different lengths
    alone = Trainer(config)
    expected = alone.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
    expected_step = alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    alone.save_weights_for_sampler(tmp_path / "alone")
    alone.save_state(tmp_path / "state-of-one")

    async with TrainingClient(chz.replace(config, num_processes=2), tmp_path / "trainer.log") as two:
        output = await two.forward_backward(datums, LossConfig())
        step = await two.optim_step(PLAIN_STEP)
        account = await two.trainer_metrics()
        await two.save_weights_for_sampler(tmp_path / "two")
        await two.save_state(tmp_path / "state-of-two")
        broken = list(datums)
        there = share_out([datum.model_input.length for datum in datums], 2)[1][0]  # the second rank's
        sampled = datums[there].sampling_logprobs
        broken[there] = replace(datums[there], sampling_logprobs=tuple(-1e4 if x else 0.0 for x in sampled))
        with pytest.raises(TrainingError, match="rank 1: expected a finite loss"):
            await two.forward_backward(broken, LossConfig())
        first_alone = await two.forward_backward(datums[:1], LossConfig())  # one rank has nothing to do
        await two.optim_step(PLAIN_STEP)
        await two.load_state(tmp_path / "state-of-one")
        await two.forward_backward(datums, LossConfig())
        await two.optim_step(PLAIN_STEP)
        await two.save_weights_for_sampler(tmp_path / "two-from-one")

    for row, other in zip(output.training_logprobs, expected.training_logprobs, strict=True):
        assert_equal_but_for_rounding(row, other, NUM_ROUNDINGS)
    # a screenshot that both need is encoded twice
    assert output.metrics["optim/encoded_images"] == account["trainer/encoded_images"] == 3.0
    of_two = dict(output.metrics) | {"optim/num_micro_batches": 1.0, "optim/encoded_images": 2.0}
    assert of_two.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():  # means over tokens whose terms are about 1, of both signs
        assert_equal_but_for_rounding([of_two[name]], [value], NUM_ROUNDINGS, magnitude=max(1.0, abs(value)))
    assert_equal_but_for_rounding([step.grad_norm], [expected_step.grad_norm], NUM_ROUNDINGS)
    assert step.num_trained_tokens == expected_step.num_trained_tokens
    assert_close(adapter(tmp_path / "two"), adapter(tmp_path / "alone"))
    assert account["trainer/tokens"] == sum(datum.model_input.length for datum in datums)
    assert len(first_alone.training_logprobs) == 1

    go_on_alone(config, tmp_path / "state-of-two", datums, tmp_path / "one-from-two")
    assert_close(adapter(tmp_path / "one-from-two"), adapter(tmp_path / "two-from-one"))


async def test_two_processes_that_hold_half_of_the_layers_take_the_step_of_one(
    config: TrainerConfig, tmp_path: Path
) -> None:
    config = chz.replace(config, micro_batch_tokens=64, gradient_checkpointing=True)
    rng = random.Random(0)
    screens = [draw_screenshot(rng) for _ in range(3)]
    datums = tuple(make_datum(rng, shown) for shown in (screens, screens[:1], []))  # 54, 18 and 11 tokens
    alone = Trainer(config)
    expected = alone.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
    expected_step = alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    expected_base = alone.forward(wire.Forward(datums=datums, temperature=1.0, weights="base"))
    alone.save_weights_for_sampler(tmp_path / "alone")
    alone.save_state(tmp_path / "state-of-one")
    sharded = chz.replace(config, num_processes=2, sharding="full", keeps_attention=True)

    async with TrainingClient(sharded, tmp_path / "trainer.log") as two:
        output = await two.forward_backward(datums, LossConfig())
        step = await two.optim_step(PLAIN_STEP)
        account = await two.trainer_metrics()
        base = await two.base_logprobs(datums[:1])  # one rank has nothing to do
        await two.save_weights_for_sampler(tmp_path / "two")
        await two.save_state(tmp_path / "state-of-two")
        broken = replace(datums[1], sampling_logprobs=tuple(-1e4 if x else 0.0 for x in datums[1].sampling_logprobs))
        with pytest.raises(TrainingError, match="rank 1: expected a finite loss"):
            await two.forward_backward((datums[0], broken), LossConfig())
        await two.load_state(tmp_path / "state-of-one")
        await two.forward_backward(datums, LossConfig())
        await two.optim_step(PLAIN_STEP)
        await two.save_weights_for_sampler(tmp_path / "two-from-one")
        cut_off = make_datum(rng, [draw_screenshot(rng)[:100] + b"IEND"])  # its size can be read, its pixels cannot
        with pytest.raises(TrainingError, match="all trainer processes end"):
            await two.forward_backward((datums[0], cut_off), LossConfig())

    losses = [result.metrics["loss/total"] for result in (output, expected)]
    assert_equal_but_for_rounding(losses[:1], losses[1:], NUM_ROUNDINGS, magnitude=1.0)
    expected_rows = (*expected.training_logprobs, expected_base.training_logprobs[0])
    for row, other in zip((*output.training_logprobs, *base), expected_rows, strict=True):
        assert_equal_but_for_rounding(row, other, NUM_ROUNDINGS)
    assert_equal_but_for_rounding([step.grad_norm], [expected_step.grad_norm], NUM_ROUNDINGS)
    assert_close(adapter(tmp_path / "two"), adapter(tmp_path / "alone"))
    assert account["trainer/tokens"] == sum(datum.model_input.length for datum in datums)
    # 74 % of the tiny model's weights are shared out (of an 8B model's 86 %), so half of these are held: 63 % in all
    assert account["trainer/parameters_gib"] < 0.7 * alone.account.take()["trainer/parameters_gib"]

    go_on_alone(config, tmp_path / "state-of-two", datums, tmp_path / "one-from-two")
    assert_close(adapter(tmp_path / "one-from-two"), adapter(tmp_path / "two-from-one"))


def model(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


async def test_two_processes_that_hold_half_of_the_layers_train_all_weights_as_one_does(
    config: TrainerConfig, tmp_path: Path
) -> None:
    config = chz.replace(config, lora_rank=0, micro_batch_tokens=64, gradient_checkpointing=True)
    rng = random.Random(0)
    screens = [draw_screenshot(rng) for _ in range(3)]
    datums = tuple(make_datum(rng, shown) for shown in (screens, screens[:1], []))  # 54, 18 and 11 tokens
    alone = Trainer(config)
    expected = alone.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
    clipped_step = chz.replace(PLAIN_STEP, grad_clip_norm=0.5)
    expected_step = alone.optim_step(wire.OptimStep(optim=clipped_step))
    alone.save_weights_for_sampler(tmp_path / "alone")
    alone.save_state(tmp_path / "state-of-one")
    sharded = chz.replace(config, num_processes=2, sharding="full", keeps_attention=True)

    async with TrainingClient(sharded, tmp_path / "trainer.log") as two:
        output = await two.forward_backward(datums, LossConfig())
        step = await two.optim_step(clipped_step)
        account = await two.trainer_metrics()
        await two.save_weights_for_sampler(tmp_path / "two")
        await two.save_state(tmp_path / "state-of-two")
        broken = replace(datums[1], sampling_logprobs=tuple(-1e4 if x else 0.0 for x in datums[1].sampling_logprobs))
        with pytest.raises(TrainingError, match="rank 1: expected a finite loss"):
            await two.forward_backward((datums[0], broken), LossConfig())
        await two.forward_backward(datums[2:], LossConfig())  # one rank has nothing to do, and no rank a screenshot
        await two.optim_step(PLAIN_STEP)
        await two.load_state(tmp_path / "state-of-one")
        for part in (datums[:1], datums[1:]):  # gradients of both requests add up
            await two.forward_backward(part, LossConfig())
        await two.optim_step(PLAIN_STEP)
        await two.save_weights_for_sampler(tmp_path / "two-from-one")

    for row, other in zip(output.training_logprobs, expected.training_logprobs, strict=True):
        assert_equal_but_for_rounding(row, other, NUM_ROUNDINGS)
    assert_equal_but_for_rounding([step.grad_norm], [expected_step.grad_norm], NUM_ROUNDINGS)
    assert_close(model(tmp_path / "two"), model(tmp_path / "alone"))
    assert (tmp_path / "two" / "config.json").read_text() == (tmp_path / "alone" / "config.json").read_text()
    # 74 % of the tiny model's weights are shared out, so half of these are held: 63 % in all
    assert account["trainer/parameters_gib"] < 0.7 * alone.account.take()["trainer/parameters_gib"]

    one, other = (torch.load(tmp_path / f"state-of-{name}" / "trainer_state.pt") for name in ("one", "two"))
    assert one["optimizer"]["param_groups"] == other["optimizer"]["param_groups"]
    for index, moments in one["optimizer"]["state"].items():
        for name, moment in moments.items():
            assert other["optimizer"]["state"][index][name].shape == moment.shape
    go_on_alone(config, tmp_path / "state-of-two", datums, tmp_path / "one-from-two")
    assert_close(model(tmp_path / "one-from-two"), model(tmp_path / "two-from-one"))


async def test_a_rank_that_is_killed_costs_no_step_and_four_go_on_from_the_checkpoint(
    config: TrainerConfig, tmp_path: Path
) -> None:
    rng = random.Random(0)
    datums = tuple(make_datum(rng, [draw_screenshot(rng)]) for _ in range(3))
    alone = Trainer(config)
    for _ in range(2):
        alone.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
        alone.optim_step(wire.OptimStep(optim=PLAIN_STEP))
    alone.save_weights_for_sampler(tmp_path / "alone")
    config = chz.replace(config, num_processes=2, max_restarts=1)

    async with TrainingClient(config, tmp_path / "trainer.log") as two:
        await two.forward_backward(datums, LossConfig())
        await two.optim_step(PLAIN_STEP)
        await two.forward_backward(datums, LossConfig())
        _worker(1).kill()
        step = await two.optim_step(PLAIN_STEP)
        metrics = await two.trainer_metrics()
        await two.save_weights_for_sampler(tmp_path / "two")
        await two.save_state(tmp_path / "state-of-two")
    async with TrainingClient(chz.replace(config, num_processes=4), tmp_path / "trainer.log") as four:
        await four.load_state(tmp_path / "state-of-two")
        output = await four.forward_backward(datums, LossConfig())  # one rank has nothing to do
        await four.optim_step(PLAIN_STEP)
        await four.save_weights_for_sampler(tmp_path / "four")

    assert step.policy_version == 2
    assert metrics["trainer/restarts"] == 1.0
    assert "rank 1 ended with status -9, so all trainer processes end" in (tmp_path / "trainer.log").read_text()
    assert_close(adapter(tmp_path / "two"), adapter(tmp_path / "alone"))
    expected = go_on_alone(config, tmp_path / "state-of-two", datums, tmp_path / "three-steps")
    assert_close(adapter(tmp_path / "four"), adapter(tmp_path / "three-steps"))
    for row, other in zip(output.training_logprobs, expected.training_logprobs, strict=True):
        assert_equal_but_for_rounding(row, other, NUM_ROUNDINGS)
    losses = [result.metrics["loss/total"] for result in (output, expected)]
    assert_equal_but_for_rounding(losses[:1], losses[1:], NUM_ROUNDINGS, magnitude=1.0)


def _worker(rank: int) -> psutil.Process:
    return next(one for one in _workers() if one.environ()["RANK"] == str(rank))


def _workers() -> list[psutil.Process]:
    return [one for one in psutil.Process().children(recursive=True) if "cua_rl.training.worker" in command_line(one)]


RANK = """
import sys
from torch import distributed
from cua_rl.training.ranks import prove_ranks
folder, rank, secret = sys.argv[1:]
store = distributed.FileStore(f"{folder}/ranks", 2)
distributed.init_process_group("gloo", store=store, rank=int(rank), world_size=2)
prove_ranks(secret.encode(), int(rank), 2)
print("proved")
"""


def test_a_rank_that_does_not_know_the_secret_is_refused_before_it_is_told_anything(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    with (
        subprocess.Popen([*command, "0", "right"], stderr=subprocess.PIPE, text=True) as honest,
        subprocess.Popen([*command, "1", "guessed"], stderr=subprocess.DEVNULL),
    ):
        _, complaint = honest.communicate()
    assert "expected trainer process 1 on its connection, got another program" in complaint


IDLE_RANK = """
import sys, time
from datetime import timedelta
from pathlib import Path
from cua_rl.training.ranks import Place, Ranks
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
ranks = Ranks.meet(folder, Place(rank=rank, size=2), timeout=timedelta(seconds=2))
if rank == 0:
    time.sleep(5)  # an evaluation
print(ranks.next_request(bytearray(b"train" if rank == 0 else b"")).decode())
if rank == 0:
    time.sleep(5)  # within a request, ranks do not wait for ever
ranks.gather(rank, int)
"""


def test_ranks_wait_for_a_request_longer_than_for_each_other(tmp_path: Path) -> None:
    command = [sys.executable, "-c", IDLE_RANK, str(tmp_path)]
    with (
        subprocess.Popen([*command, "0"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
        subprocess.Popen([*command, "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as idle,
    ):
        said, complaint = idle.communicate()

    assert said == "train\n"
    assert "Timed out waiting" in complaint


SHARDED_RANK = """
import os, random, sys
from pathlib import Path
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.types.errors import TrainingError
from cua_rl.training import wire
from cua_rl.training.ranks import Place, Ranks
from cua_rl.training.trainer import Trainer
from tests.real.training.tiny_qwen3_vl import draw_screenshot, make_datum

def refuse(event, arguments):
    if event == "pickle.find_class":
        print("unpickled", *arguments, flush=True)
        os._exit(3)

sys.addaudithook(refuse)
folder, model, rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ranks = Ranks.meet(folder, Place(rank=rank, size=2, local_rank=rank, local_size=2))
trainer = Trainer(TrainerConfig(model_path=model, sharding="hybrid", context_parallel=1), ranks)
rng = random.Random(0)
datums = tuple(make_datum(rng, [draw_screenshot(rng)]) for _ in range(2))
output = trainer.forward_backward(wire.ForwardBackward(datums=datums, loss=LossConfig()))
trainer.optim_step(wire.OptimStep(optim=OptimConfig()))
try:
    with ranks.agreement(int) as agreement:
        if rank == 1:
            raise ValueError("broken")
        agreement.share(0)
except (TrainingError, ValueError) as error:
    print(error, end=" ")
print(sum(map(len, output.training_logprobs)) == sum(datum.model_input.length for datum in datums))
ranks.close()
"""


def test_ranks_unpickle_nothing_while_they_meet_shard_and_train(config: TrainerConfig, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SHARDED_RANK, str(tmp_path), str(config.model_path)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with (
        subprocess.Popen([*command, "0"], stdout=subprocess.PIPE, text=True, env=environment) as first,
        subprocess.Popen([*command, "1"], stdout=subprocess.PIPE, text=True, env=environment) as second,
    ):
        said = [rank.communicate()[0] for rank in (first, second)]

    assert said == ["rank 1: broken True\n", "broken True\n"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs can be used here")
def test_a_gpu_that_is_assigned_but_cannot_be_used_is_refused() -> None:
    assert find_device(()) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"trainer\.gpus: expected GPUs that PyTorch can use \(3 are assigned\)"):
        find_device(("3",))


async def test_trainer_processes_listen_on_the_loopback_interface_only(config: TrainerConfig, tmp_path: Path) -> None:
    async with TrainingClient(chz.replace(config, num_processes=2), tmp_path / "trainer.log"):
        workers = _workers()
        listening = {link.laddr.ip for worker in workers for link in worker.net_connections("inet") if not link.raddr}
        assert len(workers) == 2
        for worker in workers:  # nothing of ours but what they need
            assert not {"HF_TOKEN", "DATABASE_URL", "MASTER_ADDR"} & worker.environ().keys()
    assert listening == {"127.0.0.1"}


LOADING_RANK = """
import re, sys
from pathlib import Path
from threading import Event, Thread
from cua_rl.training.config import TrainerConfig
from cua_rl.training.model import PolicyModel
from cua_rl.training.ranks import Place, Ranks

def private_bytes():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

model, sharding, rank, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
place = Place(rank=rank, size=size, local_rank=rank, local_size=size)
ranks = Ranks.meet(model, place)
before, seen, is_loaded = private_bytes(), [], Event()

def watch():
    while not is_loaded.wait(0.005):
        seen.append(private_bytes())

watching = Thread(target=watch)
watching.start()
PolicyModel(TrainerConfig(model_path=model, sharding=sharding), place)
is_loaded.set()
watching.join()
print(max(*seen, private_bytes()) - before)
ranks.close()
"""


def private_share(model: Path, sharding: str, num_ranks: int) -> float:
    """What all ranks together hold of their own at most while they load a model, as a share of its file."""
    command = [sys.executable, "-c", LOADING_RANK, str(model), sharding]
    # glibc returns freed tensors at once, so that what was freed is not counted as held
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": str(64 * 2**10)}
    with ThreadPoolExecutor() as threads:
        runs = [
            threads.submit(
                subprocess.run,
                [*command, str(rank), str(num_ranks)],
                stdout=subprocess.PIPE,
                check=True,
                env=environment,
            )
            for rank in range(num_ranks)
        ]
        held = sum(int(run.result().stdout) for run in runs)
    size = (model / "model.safetensors").stat().st_size
    assert size > 60 * 2**20  # beside which the adapter and Python's own objects are small
    return held / size


def build_experts(folder: Path) -> Path:
    text = {"hidden_size": 256, "num_experts": 32, "moe_intermediate_size": 192, "num_hidden_layers": 6}
    return build_random_qwen3_vl_moe(folder, text=text, vision={"out_hidden_size": 256})


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: no /proc that tells private from shared memory")
def test_ranks_share_the_memory_of_a_checkpoint_in_their_precision(tmp_path: Path) -> None:
    dense = build_random_qwen3_vl(tmp_path / "dense", hidden=1024, vocabulary=320)

    assert private_share(dense, "none", 1) < 1 / 3
    assert private_share(build_experts(tmp_path / "experts"), "none", 1) < 1 / 3


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux: no /proc that tells private from shared memory")
def test_ranks_that_share_out_experts_hold_no_copy_of_them(tmp_path: Path) -> None:
    experts = build_experts(tmp_path / "experts")

    # shards, which add up to the model, and in each rank the layer that it is splitting
    assert private_share(experts, "full", 2) < 1 + 2 / 6 + 1 / 3


def test_datums_are_shared_out_by_length() -> None:
    # 9 to the first, 7 to the second, 5 to the second (7 < 9), 4 to the first (9 < 12), 1 to the second (12 < 13)
    assert share_out([5, 9, 1, 7, 4], 2) == [[1, 4], [0, 2, 3]]
    assert share_out([3], 3) == [[0], [], []]


def test_a_rank_alone_agrees_with_itself() -> None:
    with Agreement(Ranks(), str) as agreement:
        assert agreement.share("done") == ["done"]
    with pytest.raises(ValueError, match="broken"), Agreement(Ranks(), str):
        raise ValueError("broken")


def test_accounts_of_ranks_add_up() -> None:
    one = {"trainer/tokens": 3.0, "trainer/busy_s": 2.0, "trainer/tflop_per_s": 5.0, "trainer/matmul_frac": 0.2}
    retries = {"trainer/memory_retries": 1.0}  # ranks try again together
    other = {"trainer/tokens": 4.0, "trainer/busy_s": 3.0, "trainer/tflop_per_s": 6.0, "trainer/matmul_frac": 0.4}

    assert combine_accounts([one | retries, other | retries]) == pytest.approx(
        {"trainer/tokens": 7.0, "trainer/busy_s": 3.0, "trainer/tflop_per_s": 11.0, "trainer/matmul_frac": 0.3}
        | retries
    )


class RankInThread(Ranks):
    """A rank that shares values with the others of this process."""

    def __init__(self, rank: int, values: list[Any], barrier: Barrier) -> None:
        super().__init__(Place(rank=rank, size=len(values)))
        self._values, self._barrier = values, barrier

    def gather(self, value: T, kind: object) -> list[T]:
        self._values[self.rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # nobody writes the next value before all have read this one
        return values


def test_when_memory_runs_out_on_one_rank_all_try_again(config: TrainerConfig) -> None:
    rng = random.Random(0)
    datums = [make_datum(rng, [draw_screenshot(rng)]) for _ in range(4)]
    longest = max(datum.model_input.length for datum in datums)
    config = chz.replace(config, micro_batch_tokens=2 * longest)  # two datums a rank, in one row or in two
    expected = train(Trainer(config), datums)
    values, barrier = [None, None], Barrier(2, timeout=patience(60))
    ranks = [Trainer(config, RankInThread(rank, values, barrier)) for rank in range(2)]
    run_out_of_memory(ranks[1], above=longest)

    with ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(lambda trainer: train(trainer, datums), ranks))

    assert [trainer.account.take()["trainer/memory_retries"] for trainer in ranks] == [1, 1]
    for output in outputs:
        assert output.metrics["optim/num_micro_batches"] == 4.0
        for one, other in zip(output.training_logprobs, expected.training_logprobs, strict=True):
            assert_equal_but_for_rounding(one, other, TINY_ROUNDINGS)
