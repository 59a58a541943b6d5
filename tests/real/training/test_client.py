"""The client with a real worker process."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cua_rl.command_line.fields import with_values
from cua_rl.training.client import TrainingClient
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.recovery import TimeLimits
from cua_rl.training.trainer import Trainer
from cua_rl.training.wire import Forward
from cua_rl.types.errors import ConfigError, TrainingError
from tests.real.training.tiny_qwen3_vl import TINY_ROUNDINGS, draw_screenshot, make_datum
from tests.rounding import assert_equal_but_for_rounding

RNG = random.Random(0)
DATUMS = [make_datum(RNG, [draw_screenshot(RNG)]) for _ in range(3)]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(config: TrainerConfig, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TrainingClient]:
    """One worker for all tests of this file: it takes ten seconds to start."""
    async with TrainingClient(config, tmp_path_factory.mktemp("logs") / "trainer.log") as client:
        yield client


def worker_pids() -> set[int]:
    """The workers among our descendants: the only processes that run the worker module."""
    found: set[int] = set()
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = stat.read_bytes().split(b"\0")
            parent = int((stat.parent / "stat").read_text().rpartition(")")[2].split()[1])
            grandparent = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        if b"cua_rl.training.worker" in arguments and grandparent == os.getpid():
            found.add(int(stat.parent.name))
    return found


async def test_a_step_through_a_real_worker(client: TrainingClient, config: TrainerConfig, tmp_path: Path) -> None:
    here = Trainer(config).forward(Forward(datums=tuple(DATUMS), temperature=1.0, weights="policy"))
    before = await client.forward(DATUMS)
    output = await client.forward_backward(DATUMS, LossConfig())
    step = await client.optim_step(OptimConfig(learning_rate=1e-2))
    adapter = await client.save_weights_for_sampler(tmp_path / "policy")
    await client.save_state(tmp_path / "state")
    after = await client.forward(DATUMS)

    for row, expected in zip(before, here.training_logprobs, strict=True):
        assert_equal_but_for_rounding(row, expected, TINY_ROUNDINGS)
    assert output.training_logprobs == tuple(before)
    assert (step.policy_version, adapter.policy_version, adapter.name) == (1, 1, "policy-000001")
    assert (adapter.path / "adapter_model.safetensors").is_file()
    assert after != before

    await client.forward_backward(DATUMS, LossConfig())
    await client.optim_step(OptimConfig(learning_rate=1e-2))
    assert client.policy_version == 2
    await client.load_state(tmp_path / "state")
    assert client.policy_version == 1
    assert await client.forward(DATUMS) == after
    for row, expected in zip(await client.base_logprobs(DATUMS), before, strict=True):
        assert_equal_but_for_rounding(row, expected, TINY_ROUNDINGS)


async def test_a_refused_request_raises_and_the_worker_goes_on(client: TrainingClient) -> None:
    with pytest.raises(TrainingError, match="no gradient to step along"):
        await client.optim_step(OptimConfig())
    with pytest.raises(ConfigError, match="temperature"):
        await client.forward_backward(DATUMS, LossConfig(temperature=-1.0))

    assert len(await client.forward(DATUMS)) == 3


async def test_a_cancelled_request_does_not_confuse_the_next_one(client: TrainingClient) -> None:
    expected = await client.forward(DATUMS)
    cancelled = asyncio.create_task(client.forward(DATUMS[:1]))
    await asyncio.sleep(0)  # it has begun
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled

    assert await client.forward(DATUMS) == expected


async def test_a_killed_worker_is_a_training_error_with_the_end_of_its_log(client: TrainingClient) -> None:
    """The last of the tests that share the worker."""
    (worker,) = worker_pids()
    os.kill(worker, signal.SIGKILL)

    with pytest.raises(TrainingError, match=r"status 137; its log ended with:\n.+"):
        await client.forward(DATUMS)


async def test_a_worker_that_hangs_is_ended_and_its_work_done_again(config: TrainerConfig, tmp_path: Path) -> None:
    limits = TimeLimits(weight_bytes=0, state_bytes=0)
    config, others = with_values(config, max_restarts=1), worker_pids()
    async with TrainingClient(config, tmp_path / "trainer.log", limits=limits) as client:
        before = await client.forward(DATUMS)
        (hung,) = worker_pids() - others
        limits.least_s = 30.0  # also of the new worker's start
        os.kill(hung, signal.SIGSTOP)
        again = await client.forward(DATUMS)
        assert len(worker_pids() - others - {hung}) == 1
        assert not Path(f"/proc/{hung}").exists()
    assert client.num_restarts == 1
    for row, expected in zip(again, before, strict=True):
        assert_equal_but_for_rounding(row, expected, TINY_ROUNDINGS)


async def test_a_model_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.model_path"):
        async with TrainingClient(TrainerConfig(model_path=tmp_path), tmp_path / "trainer.log"):
            pass
