"""Do devices that repeat a rollout's turns show what it saw, and go on as it did? A JSON line for each kind of device.

    python -m benchmarks.copies [--kinds desktop,miniwob,django_admin] [--copies 1000] [--at-once 4]

An original does some actions at random for its task, and some more after a fork. Each of its ten copies is a new
device for the same task that does the same. As for branches of a run, a screenshot that differs is taken again for 5 s:
a program may still be drawing. `same_to_fork` counts copies that showed every screen up to the fork; the others are
faults of a run, never wrong starts. `same_after` counts those that showed every later screen as well.
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

from benchmarks.claims import require
from cua_rl.environments.browser.django_admin.device import AdminPages
from cua_rl.environments.browser.django_admin.templates import ADMIN_BROWSER
from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.templates import MINIWOB_BROWSER
from cua_rl.environments.desktop.desktops import LinuxDesktops
from cua_rl.environments.desktop.device import DESKTOP_ABILITIES
from cua_rl.environments.device import ActionRejected, Device, DeviceAbilities
from cua_rl.environments.pool import DeviceBackend, DevicePool, open_pool
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.readiness import prepare
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Click, DoubleClick, Drag, PressKey, RightClick, Scroll, TypeText

KINDS: dict[str, tuple[DeviceAbilities, Callable[[], DeviceBackend]]] = {
    "desktop": (DESKTOP_ABILITIES, LinuxDesktops),
    "miniwob": (MINIWOB_BROWSER, MiniWobPages),
    "django_admin": (ADMIN_BROWSER, AdminPages),
}
COPIES_OF_ONE = 10
KEYS = (("Enter",), ("Tab",), ("Escape",), ("Backspace",), ("Down",), ("ctrl", "a"), ("ctrl", "s"))
LOOK_AGAIN_S = 5.0


def random_action(random: Random, width_px: int, height_px: int) -> Action:
    """An action of a computer's user."""
    x, y = random.randrange(width_px), random.randrange(height_px)
    return random.choice(
        (
            Click(x=x, y=y),
            Click(x=x, y=y),
            Click(x=x, y=y),
            DoubleClick(x=x, y=y),
            RightClick(x=x, y=y),
            Drag(x=x, y=y, to_x=random.randrange(width_px), to_y=random.randrange(height_px)),
            Scroll(x=x, y=y, down_px=random.randrange(-300, 300)),
            TypeText(text=random.choice(("tea", "7", "Hello there"))),
            PressKey(keys=random.choice(KEYS)),
        )
    )


async def do(device: Device, action: Action) -> None:
    with suppress(ActionRejected):
        await device.execute(action)


async def act(pool: DevicePool, task: Task, random: Random, num_actions: int) -> tuple[list[Action], list[str]]:
    """So many actions, and the hashes of the first screenshot and of the one after each action."""
    async with pool.lease(task.device_request()) as device:
        await prepare(task, device)
        seen = await device.observe()
        actions = [random_action(random, seen.width_px, seen.height_px) for _ in range(num_actions)]
        screens = [seen.sha256]
        for action in actions:
            await do(device, action)
            screens.append((await device.observe()).sha256)
    return actions, screens


async def num_same(pool: DevicePool, task: Task, actions: Sequence[Action], screens: Sequence[str]) -> int:
    """How many screens, from the first on, a new device for the task shows as well."""
    async with pool.lease(task.device_request()) as device:
        await prepare(task, device)
        for number, wanted in enumerate(screens):
            ends = time.monotonic() + LOOK_AGAIN_S
            while (await device.observe()).sha256 != wanted:
                if time.monotonic() > ends:
                    return number
                await asyncio.sleep(0.1)
            if number < len(actions):
                await do(device, actions[number])
    return len(screens)


async def measure(kind: str, num_copies: int, at_once: int, to_fork: int, after: int) -> dict[str, object]:
    """Copy as many originals as are needed, at most `at_once` devices at a time."""
    abilities, make_backend = KINDS[kind]
    tasks = load_tasks({"source_type": kind}, seed=0, split="train", device=abilities)
    tally: Counter[str] = Counter()
    places = asyncio.Semaphore(at_once)

    async with open_pool(make_backend(), max_devices=at_once) as pool:

        async def copy(number: int, task: Task) -> None:
            async with places:
                actions, screens = await act(pool, task, Random(number), to_fork + after)
                tally["screens"] += len(set(screens))
                for _ in range(COPIES_OF_ONE):
                    same = await num_same(pool, task, actions, screens)
                    tally["copies"] += 1
                    tally["same_to_fork"] += same > to_fork
                    tally["same_after"] += same == len(screens)

        began = time.perf_counter()
        async with asyncio.TaskGroup() as copying:
            for number in range(num_copies // COPIES_OF_ONE):
                copying.create_task(copy(number, tasks.batch(number, 1)[0]))
        left = (pool.num_leased, pool.num_alive)
    require("copies", copies=(num_copies, tally["copies"]), devices_left=((0, 0), left))
    require("screens that actions change", are_changed=(True, tally["screens"] > num_copies // COPIES_OF_ONE))
    return {
        "figure": "copies",
        "kind": kind,
        "copies": num_copies,
        "same_to_fork": tally["same_to_fork"],
        "same_after": tally["same_after"],
        "screens": tally["screens"],
        "actions": [to_fork, after],
        "seconds": round(time.perf_counter() - began),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--copies", type=int, default=1000, help=f"of each kind; a multiple of {COPIES_OF_ONE}")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--to-fork", type=int, default=3, help="actions up to the fork")
    parser.add_argument("--after", type=int, default=2, help="actions after it")
    args = parser.parse_args()
    for kind in args.kinds.split(","):
        print(json.dumps(asyncio.run(measure(kind, args.copies, args.at_once, args.to_fork, args.after))), flush=True)


if __name__ == "__main__":
    main()
