"""Copies of devices go on exactly as the original would."""

import pickle
from random import Random

import pytest

from cua_rl.environments.device import ActionRejected, CopiedDevice, Device
from cua_rl.environments.phone.demo.phone import SimulatedPhones
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.catalog import HEIGHT, WIDTH
from cua_rl.environments.pool import DevicePool, DeviceRequest, open_pool
from cua_rl.tasks.readiness import validate
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Button, Click, Drag, LongPress, OpenApp, PressButton, Scroll, TypeText
from cua_rl.types.errors import DeviceError

NUM_COPIES = 1000
APPS = ("Settings", "Mail", "Calculator", "Notes", "Clock", "Messages")


def random_action(random: Random) -> Action:
    x, y = random.randrange(WIDTH), random.randrange(HEIGHT)
    return random.choice(
        (
            Click(x=x, y=y),
            Click(x=x, y=y),
            LongPress(x=x, y=y),
            Drag(x=x, y=y, to_x=random.randrange(WIDTH), to_y=random.randrange(HEIGHT)),
            Scroll(x=x, y=y, down_px=random.randrange(-90, 90)),
            OpenApp(name=random.choice(APPS)),
            PressButton(button=random.choice((Button.BACK, Button.HOME))),
            TypeText(text=random.choice(("tea", "7", "hello"))),
        )
    )


async def act(device: Device, action: Action) -> str:
    """Why the device refused the action; empty if it did not."""
    try:
        await device.execute(action)
    except ActionRejected as error:
        return str(error)
    return ""


async def act_and_look(device: Device, action: Action) -> tuple[str, str, str]:
    """What the device shows after an action, its name for the state, and why it refused the action, if it did."""
    refused, seen = await act(device, action), await device.observe()
    return seen.sha256, seen.state, refused


async def compare_a_copy(pool: DevicePool, task: Task, random: Random) -> int:
    """Act, copy at a random turn, and act alike on both; returns how many screens differed on the way."""
    async with pool.lease(task.device_request()) as original:
        for _ in range(random.randrange(1, 6)):
            await act(original, random_action(random))
        assert isinstance(original, CopiedDevice)
        snapshot = pickle.loads(pickle.dumps(await original.snapshot()))  # as it comes to another worker
        actions = [random_action(random) for _ in range(random.randrange(1, 4))]
        expected = [await act_and_look(original, action) for action in actions]
        verdict = (await validate(task, original, None)).success
        async with pool.lease(task.device_request(snapshot=snapshot)) as copy:
            assert copy.device_id != original.device_id
            assert [await act_and_look(copy, action) for action in actions] == expected
            assert (await validate(task, copy, None)).success == verdict
        # what was done to original and copy has not reached the snapshot
        async with pool.lease(task.device_request(snapshot=snapshot)) as later:
            assert (await later.observe()).state == snapshot.screen.state
    return len({state for _, state, _ in expected} - {snapshot.screen.state})


async def test_a_thousand_copies_at_random_turns_go_on_as_the_originals() -> None:
    random, templates = Random(0), sorted(TEMPLATES)
    num_changes = 0
    async with open_pool(SimulatedPhones(), max_devices=2) as pool:
        for _ in range(NUM_COPIES):
            task = TEMPLATES[random.choice(templates)].make_task(random.randrange(10_000))
            num_changes += await compare_a_copy(pool, task, random)
        assert (pool.num_leased, pool.num_alive) == (0, 0)
    assert num_changes > NUM_COPIES / 2  # of 2000 actions, many did something


async def test_a_copy_that_shows_something_else_is_a_fault_and_is_closed() -> None:
    task = TEMPLATES[min(TEMPLATES)].make_task(1)
    made: list[Device] = []

    async def make_without_snapshot(request: DeviceRequest) -> Device:
        made.append(await SimulatedPhones().make(DeviceRequest(task_id=request.task_id, seed=request.seed)))
        return made[-1]

    pool = DevicePool(make_without_snapshot, max_devices=2)
    async with pool.lease(task.device_request()) as original:
        await original.execute(OpenApp(name="Settings"))
        assert isinstance(original, CopiedDevice)
        request = task.device_request(snapshot=await original.snapshot())

        with pytest.raises(DeviceError, match=r"expected 'simulator-[0-9]+' to be a copy that shows"):
            async with pool.lease(request):
                pytest.fail("nothing may begin on a wrong copy")

        with pytest.raises(DeviceError, match="closed"):
            await made[-1].observe()
        await original.observe()
    assert pool.take_metrics()["device/num_faults"] == 1
