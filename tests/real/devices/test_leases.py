"""A thousand leases of boxes, a fifth of everything failing and rollouts cancelled at any moment: nothing is left."""

import asyncio
from collections import Counter
from random import Random

import pytest

from cua_rl.environments.gbox import service
from cua_rl.environments.pool import DevicePool, PoolLimits, open_pool
from cua_rl.types.actions import Click
from cua_rl.types.errors import DeviceError
from tests.doubles.gbox_service import serve_gbox
from tests.fakes import make_task

pytestmark = pytest.mark.timeout(600)

NUM_LEASES = 1000
MAX_DEVICES = 24
LIMITS = PoolLimits(retry_first_s=0.001, max_make_attempts=3)

service.FIRST_PAUSE_S = 0.001  # the double is up again at once


async def use(pool: DevicePool, random: Random) -> str:
    """One lease with an action in it. In one case of five it is cancelled, early or with the device, some twice."""
    has_device = asyncio.Event()

    async def work() -> str:
        try:
            async with pool.lease(make_task().device_request()) as device:
                has_device.set()
                await device.execute(Click(x=5, y=5))
                return "done"
        except DeviceError:
            return "fault"
        finally:
            has_device.set()

    running = asyncio.create_task(work())
    if random.random() < 0.2:
        if random.random() < 0.5:
            await has_device.wait()
        for _ in range(random.choice((1, 2))):
            await asyncio.sleep(random.uniform(0.0, 0.01))
            running.cancel()
    try:
        return await running
    except asyncio.CancelledError:
        return "cancelled"


async def test_a_thousand_leases_leave_no_box() -> None:
    random = Random(0)
    async with serve_gbox() as gbox:
        gbox.double.faults.rate = 0.2
        async with open_pool(gbox.backend("linux"), max_devices=MAX_DEVICES, limits=LIMITS) as pool:
            users = asyncio.Semaphore(2 * MAX_DEVICES)  # so that early cancellations meet creations too

            async def use_in_turn() -> str:
                async with users:
                    return await use(pool, random)

            ends = Counter(await asyncio.gather(*(use_in_turn() for _ in range(NUM_LEASES))))
            metrics = pool.take_metrics()

        assert gbox.double.alive == []
        assert gbox.double.most_alive <= MAX_DEVICES
        num_lists = gbox.double.requests["GET boxes"]
    assert ends.total() == NUM_LEASES
    assert min(ends["done"], ends["fault"], ends["cancelled"]) > 50, ends
    assert metrics["device/faults/quota"] > 0
    assert metrics["device/faults/lost"] > 0
    assert num_lists == 3  # key check, start and end: every box was given back by its lease
