import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

pytest.importorskip("django", reason="`make setup` installs Django")

from cua_rl.environments.browser.django_admin.device import AdminPages
from cua_rl.environments.browser.django_admin.expert import AdminExperts
from cua_rl.environments.browser.django_admin.server import AdminSite
from cua_rl.environments.browser.django_admin.templates import ADMIN_TEMPLATES
from cua_rl.environments.browser.page import BrowserPage
from cua_rl.host.sandbox import can_sandbox
from cua_rl.supervised.demonstrations import demonstrate
from cua_rl.tasks.readiness import prepare
from cua_rl.tasks.task import Task
from cua_rl.types.actions import PressKey
from tests.live_processes import stranger_connects

EXPERT_TEMPLATES = [
    template for template in ADMIN_TEMPLATES if template.name in ("delete_group", "rename_user", "make_staff")
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend() -> AsyncIterator[AdminPages]:
    async with AdminPages() as pages:
        yield pages


pytestmark = pytest.mark.asyncio(loop_scope="module")


def task_called(name: str, seed: int = 0) -> Task:
    return next(template for template in ADMIN_TEMPLATES if template.name == name).make_task(seed)


@pytest.mark.parametrize("template", EXPERT_TEMPLATES, ids=lambda template: template.name)
async def test_experts_do_their_tasks_by_pixel(backend: AdminPages, template) -> None:
    task = template.make_task(1_000_000)
    page = await backend.make(task.device_request())
    await prepare(task, page)
    assert not (await task.validate(page, None)).success
    expert = AdminExperts().make(task, page, error_rate=0.0, random=random.Random(0))
    await demonstrate(task.instruction, page, expert, max_turns=task.max_turns)
    assert (await task.validate(page, None)).success
    await page.close()


async def test_the_next_rollout_finds_the_site_as_its_seed_has_it(backend: AdminPages) -> None:
    task = task_called("add_group")
    for _ in range(2):
        page = await backend.make(task.device_request())
        await prepare(task, page)
        assert not (await task.validate(page, None)).success
        before = await page.query("site_state")
        expert = AdminExperts().make(task, page, error_rate=0.0, random=random.Random(0))
        await demonstrate(task.instruction, page, expert, max_turns=task.max_turns)
        assert await page.query("site_state") != before
        await page.close()


async def test_a_page_reaches_its_own_site_alone(backend: AdminPages) -> None:
    task, other_task = task_called("add_group"), task_called("delete_user")
    page, other = await backend.make(task.device_request()), await backend.make(other_task.device_request())
    assert isinstance(page, BrowserPage)
    assert isinstance(other, BrowserPage)
    await prepare(task, page)
    await prepare(other_task, other)
    assert other.site is not None
    script = "url => fetch(url, { mode: 'no-cors' }).then(() => 'through', () => 'blocked')"
    assert await page.evaluate(script, f"{other.site.url}admin/") == "blocked"
    await page.close()
    await other.close()


@pytest.mark.skipif(not can_sandbox(), reason="the kernel permits no namespaces")
async def test_nobody_outside_reaches_a_site_which_knows_no_secret(
    backend: AdminPages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CANARY", "secret of ours")
    pages = [await backend.make(task_called("add_group").device_request()) for _ in range(3)]  # two sites are idle
    for page in pages:
        assert isinstance(page, BrowserPage)
        assert isinstance(page.site, AdminSite)
        assert not stranger_connects(page.site.served.port)
        environment = Path(f"/proc/{page.site.served.process.command_pid()}/environ").read_bytes()
        assert b"secret of ours" not in environment
        await page.close()


async def test_questions_are_answered_by_what_the_agent_says_and_nothing_may_change(backend: AdminPages) -> None:
    task = task_called("count_groups", 5)
    page = await backend.make(task.device_request())
    await prepare(task, page)
    await page.execute(PressKey(keys=("tab",)))
    count = next(template for template in ADMIN_TEMPLATES if template.name == "count_groups").instance(5).answer
    assert (await task.validate(page, f"There are {count} groups.")).success
    for guess in ("Many.", "0 1 2 3 4 5 6 7 8 9 10", f"{count}0", "3 or 4"):
        assert not (await task.validate(page, guess)).success
    assert not (await task.validate(page, None)).success
    await page.close()
