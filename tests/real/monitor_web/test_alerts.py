"""What a run should be looked at for stands above its figures, and in the list of runs."""

from dataclasses import replace

import pytest

from cua_rl.events import StepTrained
from tests.real.database.conftest import run_sql
from tests.real.monitor_web.conftest import Window
from tests.real.monitor_web.runs import add_run, begin, remove, step
from tests.real.monitor_web.test_share import violations_of

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_alerts_of_a_run_that_goes_on_are_a_banner_that_leads_to_the_faults(window: Window) -> None:
    page, url = window.page, window.site.database_url
    await page.emulate_media(reduced_motion="reduce")
    metrics = {"reward/constant_group_frac": 1.0, "rollout/num_faults": 3.0, "rollout/num_rollouts": 3.0}
    events = [event for number in (1, 2, 3) for event in step(number, metrics=metrics, prefix="alert")]
    assert isinstance(events[-1], StepTrained)
    events[-1] = replace(events[-1], metrics=metrics | {"policy/parity_mean_abs": 0.5})
    run = await add_run(url, begin("alerting"), *events)
    run_sql(url, f"UPDATE trainings SET heartbeat_at = now() + interval '1 hour' WHERE id = {int(run)}")

    await window.open("/?q=alerting")
    row = page.locator("table.runs tbody tr")
    for kind in ("parity", "constant groups", "faults"):
        await row.get_by_text(kind).wait_for()
    assert await violations_of(page) == []
    await page.get_by_role("link", name="alerting").click()
    banner = page.get_by_role("list", name="Alerts")
    told = await banner.inner_text()
    assert "sampler and trainer differ by 0.5 nats per token" in told
    assert "faults ended 9 of 18 rollouts of the last 3 steps" in told
    assert await violations_of(page) == []
    await banner.get_by_role("link", name="The faults").click()
    await page.wait_for_url("**/rollouts?*verdict=fault*")

    run_sql(url, f"UPDATE trainings SET status = 'completed', ended_at = now() WHERE id = {int(run)}")
    await window.open(f"/runs/{run}")
    await page.get_by_role("tab", name="Charts").wait_for()
    assert await banner.count() == 0
    await remove(window, [run])
