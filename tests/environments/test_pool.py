"""Leases: places, reuse, retries, pace, and an end that no cancellation can prevent."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from cua_rl.environments.pool import DevicePool, PoolLimits
from cua_rl.metrics import check_names
from cua_rl.types.errors import (
    DeviceError,
    DeviceLostError,
    DeviceQuotaError,
    DeviceServiceError,
    DeviceTimeoutError,
    SamplingError,
)
from tests.fakes import FakeDevice, make_task

REQUEST = make_task().device_request()
QUICK = PoolLimits(retry_first_s=0.0)


class Farm:
    """Makes fake devices; `failures` are raised instead, one per creation, `gate` holds creations and closings up."""

    def __init__(self, *failures: DeviceError) -> None:
        self.failures = list(failures)
        self.devices: list[FakeDevice] = []
        self.num_asked = 0
        self.num_resets = 0
        self.is_healthy: Callable[[], bool] = lambda: True
        self.gate = asyncio.Event()
        self.gate.set()

    async def make(self, task: object) -> Any:
        self.num_asked += 1
        if self.failures:
            raise self.failures.pop(0)
        await self.gate.wait()
        device = FakeDevice(device_id=f"device-{len(self.devices)}")
        self.devices.append(device)
        return device

    async def reset(self, device: Any, task: object) -> Any:
        self.num_resets += 1
        if not self.is_healthy():
            raise DeviceLostError("it does not answer")
        return device

    @property
    def num_alive(self) -> int:
        return sum(not device.is_closed for device in self.devices)


async def use(pool: DevicePool, error: Exception | None = None) -> str:
    async with pool.lease(REQUEST) as device:
        if error is not None:
            raise error
        return device.device_id


async def test_a_device_that_can_be_reset_is_lent_again_and_closed_at_the_end() -> None:
    farm = Farm()
    pool = DevicePool(farm.make, max_devices=2, reset_device=farm.reset)

    lent = [await use(pool) for _ in range(3)]
    await pool.close()

    assert lent == ["device-0"] * 3
    assert (farm.num_asked, farm.num_resets, farm.num_alive, pool.num_alive) == (1, 2, 0, 0)


async def test_only_a_device_whose_lease_went_well_is_lent_again() -> None:
    farm = Farm()
    pool = DevicePool(farm.make, max_devices=1, reset_device=farm.reset)

    with pytest.raises(SamplingError):
        await use(pool, SamplingError("the model server is down"))  # not the device's fault
    assert await use(pool) == "device-0"
    with pytest.raises(DeviceLostError):
        await use(pool, DeviceLostError("gone"))
    assert await use(pool) == "device-1"

    metrics = pool.take_metrics()
    check_names(metrics)
    assert (metrics["device/faults/lost"], metrics["device/num_leases"], metrics["device/num_reused"]) == (1, 4, 2)


async def test_a_device_that_fails_its_reset_is_replaced() -> None:
    farm = Farm()
    pool = DevicePool(farm.make, max_devices=1, reset_device=farm.reset)
    await use(pool)
    farm.is_healthy = lambda: False
    assert await use(pool) == "device-1"

    farm.is_healthy = lambda: True
    assert await use(pool) == "device-1"

    assert farm.num_alive == 1


async def test_creation_is_tried_again_and_given_up_in_the_end() -> None:
    farm = Farm(DeviceQuotaError("full"), DeviceServiceError("503"))
    pool = DevicePool(farm.make, max_devices=1, limits=QUICK)
    assert await use(pool) == "device-0"
    assert farm.num_asked == 3

    farm.failures = [DeviceQuotaError("full")] * 4
    with pytest.raises(DeviceQuotaError):
        await use(pool)
    assert await use(pool) == "device-1"  # the place is free again


async def test_a_pool_without_any_device_says_once_why_it_waits(caplog: pytest.LogCaptureFixture) -> None:
    farm = Farm(*[DeviceServiceError("503")] * 4)
    pool = DevicePool(farm.make, max_devices=4, limits=QUICK)
    async with asyncio.TaskGroup() as leases:
        for _ in range(4):
            leases.create_task(use(pool))

    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said == ["waiting for a device: making one failed, try=1: 503"]


async def test_pauses_between_tries_double_vary_and_obey_the_service() -> None:
    pool = DevicePool(Farm().make, max_devices=1, limits=PoolLimits(retry_first_s=1.0, retry_longest_s=8.0))
    pause_s: Callable[[DeviceError, int], float] = pool._pause_s  # pyright: ignore[reportPrivateUsage]

    for attempt, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (9, 8.0)):
        drawn = [pause_s(DeviceServiceError("503"), attempt) for _ in range(50)]
        assert longest / 2 <= min(drawn) < max(drawn) <= longest
    assert pause_s(DeviceQuotaError("full", retry_after_s=20.0), 1) == 20.0


async def test_creations_keep_their_pace() -> None:
    farm = Farm()
    pool = DevicePool(farm.make, max_devices=4, limits=PoolLimits(makes_per_s=40.0))
    started = time.monotonic()

    await asyncio.gather(*(use(pool) for _ in range(4)))

    assert time.monotonic() - started >= 3 / 40  # the first at once, then one every 25 ms


async def test_a_lease_that_takes_too_long_is_a_fault_and_its_device_is_closed_when_it_comes() -> None:
    farm = Farm()
    farm.gate.clear()
    pool = DevicePool(farm.make, max_devices=1, limits=PoolLimits(lease_timeout_s=0.02))

    with pytest.raises(DeviceTimeoutError, match=r"within 0\.02 s"):
        await use(pool)

    farm.gate.set()
    await pool.close()
    assert (len(farm.devices), farm.num_alive) == (1, 0)
    assert pool.take_metrics()["device/faults/time_limit"] == 1


async def test_a_lease_cancelled_while_its_device_is_made_keeps_its_place_until_that_is_closed() -> None:
    farm = Farm()
    farm.gate.clear()
    pool = DevicePool(farm.make, max_devices=1)
    first = asyncio.create_task(use(pool))
    while not farm.num_asked:
        await asyncio.sleep(0)

    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(use(pool))
    await asyncio.sleep(0.01)
    assert farm.num_asked == 1  # the first device may still come: there is no place for another

    farm.gate.set()
    assert await second == "device-1"
    assert farm.num_alive == 0


async def test_release_goes_on_to_its_end_however_often_it_is_cancelled() -> None:
    farm, closing = Farm(), asyncio.Event()

    class Slow(FakeDevice):
        async def close(self) -> None:
            closing.set()
            await farm.gate.wait()
            self.is_closed = True

    device = Slow()

    async def make(task: object) -> Any:
        return device

    pool = DevicePool(make, max_devices=1)
    farm.gate.clear()
    running = asyncio.create_task(use(pool))
    await closing.wait()
    for _ in range(3):
        running.cancel()
        await asyncio.sleep(0)
    assert not running.done()

    farm.gate.set()

    with pytest.raises(asyncio.CancelledError):
        await running
    assert device.is_closed
    assert pool.num_alive == 0


async def test_a_pool_closes_everything_even_if_that_is_cancelled() -> None:
    farm = Farm()
    pool = DevicePool(farm.make, max_devices=3, reset_device=farm.reset)
    await asyncio.gather(*(use(pool) for _ in range(3)))
    farm.gate.clear()
    late = asyncio.create_task(use(DevicePool(farm.make, max_devices=1)))
    closing = asyncio.create_task(pool.close())
    await asyncio.sleep(0)

    closing.cancel()

    with pytest.raises(asyncio.CancelledError):
        await closing
    assert pool.num_alive == 0
    late.cancel()


async def test_a_share_takes_only_its_part() -> None:
    farm = Farm()
    pool = DevicePool(farm.make, max_devices=4)
    share, most = pool.share(2), 0

    async def hold() -> None:
        nonlocal most
        async with share.lease(REQUEST):
            most = max(most, pool.num_leased)
            await asyncio.sleep(0)

    await asyncio.gather(*(hold() for _ in range(6)))

    assert most == 2
