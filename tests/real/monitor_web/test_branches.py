"""The page of a rollout that went on from a turn of another one."""

from urllib.parse import urlsplit

import pytest

from tests.real.database.recorded import source_events, step_end
from tests.real.database.test_branches import grown_group
from tests.real.monitor.events import with_images
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, finished, remove

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_rollout_leads_to_its_branches_and_says_which_turns_are_its_parents(window: Window) -> None:
    group, page = with_images(grown_group()), window.page
    sibling = group.rollouts[-1]
    parent = next(one for one in group.rollouts if one.rollout_id == sibling.parent_id)
    fork = sibling.fork_turn
    events = [begin("branches"), *source_events(group), step_end(group), finished()]
    run = await add_run(window.site.database_url, *events)

    await window.open(f"/runs/{run}/rollouts/{sibling.rollout_id}")
    branches = page.get_by_test_id("branches")
    await branches.wait_for()
    assert await branches.locator("dt").all_inner_texts() == [
        f"Rollout {one.member_index + 1}{'' if one.parent_id else ', the parent'}"
        for one in sorted((parent, *group.faulty, sibling), key=lambda one: one.member_index)
    ]
    assert await page.locator(".frame").count() == len(sibling.turns)
    assert await page.locator(".frame.told").count() == fork
    await page.get_by_role("link", name="of its parent").click()
    await page.get_by_text(parent.rollout_id, exact=True).wait_for()
    assert await page.locator(".frame.told").count() == 0

    await branches.get_by_role("link", name=f"Rollout {sibling.member_index + 1}").click()
    await page.get_by_text(sibling.rollout_id, exact=True).wait_for()
    address = urlsplit(page.url)
    assert (address.path, address.query) == (f"/runs/{run}/rollouts/{sibling.rollout_id}", f"turn={fork + 1}")
    assert await page.get_by_role("link", name="of its parent").count() == 0
    await remove(window, [run])
