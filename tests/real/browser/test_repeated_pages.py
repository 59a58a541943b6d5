"""Branches on pages without copies: siblings do their parents' turns again, by seed and actions, screen by screen."""

from pathlib import Path

import pytest

pytest.importorskip("miniwob", reason="`make setup` installs the pages")
pytest.importorskip("django", reason="`make setup` installs the site")

from cua_rl.environments.browser.django_admin.device import AdminPages
from cua_rl.environments.browser.django_admin.templates import ADMIN_BROWSER
from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.templates import MINIWOB_BROWSER
from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.browser.page_tasks import PAGE_BROWSER, UserPages
from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.pool import DeviceBackend, open_pool
from cua_rl.environments.table import parse_sources
from cua_rl.rollout.branches import BranchingSettings
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.readiness import prepare
from cua_rl.tasks.task import Task
from cua_rl.types.errors import UnusableError
from tests.real.browser.test_copied_sites import shop as shop
from tests.real.browser.test_copied_sites import source
from tests.rollout.test_branches import ON_COMPUTERS, RandomModel, count_siblings, run

KINDS: list[tuple[str, DeviceAbilities, type[DeviceBackend]]] = [
    ("miniwob", MINIWOB_BROWSER, MiniWobPages),
    ("django_admin", ADMIN_BROWSER, AdminPages),
]


async def check_siblings(task: Task, backend: DeviceBackend, num_faulty: int | None = 0) -> int:
    """Run a group; returns its number of siblings, which have come to the fork as their parents did."""
    model = RandomModel(tool="computer_use", acts=ON_COMPUTERS)
    settings = BranchingSettings(num_siblings=2)
    return count_siblings((await run(task, settings, backend=backend, model=model, num_faulty=num_faulty)).group)


@pytest.mark.parametrize(("source_type", "abilities", "pages"), KINDS, ids=[kind[0] for kind in KINDS])
async def test_siblings_on_a_page_come_to_the_fork_by_the_turns_of_their_parent(
    source_type: str, abilities: DeviceAbilities, pages: type[DeviceBackend]
) -> None:
    assert abilities.is_repeatable
    tasks = load_tasks({"source_type": source_type}, seed=0, split="train", device=abilities)

    assert sum([await check_siblings(task, pages()) for task in tasks.batch(0, 2)]) > 0


async def test_so_do_siblings_on_a_site_that_saves_no_state(shop: Path) -> None:
    sources = source(shop)
    assert PAGE_BROWSER.is_repeatable
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)

    assert await check_siblings(task, UserPages(parse_sources(sources))) > 0


async def test_a_page_that_closed_there_has_no_copy_and_is_no_error_of_the_run(shop: Path) -> None:
    sources = source(shop)
    task = load_tasks(sources, seed=0, split="train", device=PAGE_BROWSER).templates[0].make_task(0)
    async with open_pool(UserPages(parse_sources(sources)), max_devices=1) as pool:
        async with pool.lease(task.device_request()) as page:
            assert isinstance(page, BrowserPage)
            await prepare(task, page)
            await page._page.close()

            assert await page.snapshot() is None
            with pytest.raises(UnusableError):
                await page.observe()
