"""Branches on desktops: siblings do their parents' turns again in a home folder that has the same path on each."""

from cua_rl.environments.desktop.desktops import LinuxDesktops
from cua_rl.environments.desktop.device import DESKTOP_ABILITIES, LinuxDesktop
from cua_rl.environments.pool import DeviceRequest, open_pool
from cua_rl.host.sandbox import can_sandbox
from cua_rl.task_loader import load_tasks
from tests.real.browser.test_repeated_pages import check_siblings


async def test_siblings_on_a_desktop_come_to_the_fork_by_the_turns_of_their_parent() -> None:
    assert DESKTOP_ABILITIES.is_repeatable
    tasks = load_tasks({"source_type": "desktop"}, seed=0, split="train", device=DESKTOP_ABILITIES)

    # a screenshot may be taken while a program draws: a sibling that does not see the same is a fault
    assert sum([await check_siblings(task, LinuxDesktops(), num_faulty=None) for task in tasks.batch(0, 2)]) > 0


async def test_programs_show_the_same_paths_on_every_desktop() -> None:
    request = DeviceRequest(task_id="look", seed=0)
    async with open_pool(LinuxDesktops(), max_devices=2) as pool:
        async with pool.lease(request) as first, pool.lease(request) as second:
            for desktop in (first, second):
                assert isinstance(desktop, LinuxDesktop)
                path = "/tmp/home" if can_sandbox() else str(desktop.home)
                assert await desktop.shell("pwd; echo $HOME ~ $TMPDIR") == f"{path}\n{path} {path} {path}/.tmp\n"
                assert desktop.home.name == "home"  # what programs show without a sandbox
