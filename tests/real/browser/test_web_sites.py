"""Sites that are not ours, in a real browser: recorded once, replayed without them; and polite while they are there."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import httpx
import pytest
from starlette.responses import HTMLResponse

from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.browser.web.tasks import WEB_BROWSER, WebPages
from cua_rl.environments.pool import DevicePool, PoolLimits, open_pool
from cua_rl.environments.table import parse_sources
from cua_rl.host.http_server import serve_app
from cua_rl.task_loader import load_tasks
from cua_rl.tasks.readiness import prepare
from cua_rl.tasks.task import Task, Template
from cua_rl.types.actions import Action, Button, Click, PressButton, Scroll, TypeText
from cua_rl.types.errors import BlockedError, ConfigError
from tests.doubles.changing_shop import ChangingShop

NUM_ROLLOUTS = 50
FIELD, ADD, TEA, OLD, VOTE, AWAY, MILK = 105, 105, 145, 175, 205, 235, 265
"""Where the shop's start page has its parts, pixels from the top; items have "Home" and "Private" at TEA and OLD."""


def at(y: int, x: int = 60) -> Click:
    return Click(x=x, y=y)


def actions_of(seed: int) -> list[Action]:
    """What one rollout does: things to buy, links, votes and ways back, in an order of its own."""
    random = Random(seed)
    buy: list[Action] = [at(FIELD), TypeText(text=random.choice(("tea", "jam", "rye"))), at(ADD, x=245)]
    moves: list[list[Action]] = [
        buy,
        *([at(y)] for y in (TEA, OLD, VOTE, AWAY, MILK)),
        [PressButton(button=Button.BACK)],
        [Scroll(x=300, y=300, down_px=100)],
    ]
    return [action for move in random.choices(moves, k=3) for action in move]


@asynccontextmanager
async def open_tasks(
    folder: Path, urls: list[str], *, max_devices: int = 4, **given: object
) -> AsyncGenerator[tuple[DevicePool, list[Template]]]:
    file = folder / "tasks.json"
    file.write_text(json.dumps([{"url": url, "instruction": f"Look at {url}."} for url in urls]))
    sources = {"source_type": "web", "file_path": str(file), "page_interval_ms": 0, "max_per_host": 8, **given}
    tasks = load_tasks(sources, seed=0, split="train", device=WEB_BROWSER, has_judge=True)
    limits = PoolLimits(max_make_attempts=1)
    async with open_pool(WebPages(parse_sources(sources)), max_devices=max_devices, limits=limits) as pool:
        yield pool, list(tasks.templates)


async def run(pool: DevicePool, task: Task, actions: list[Action]) -> list[str]:
    """A rollout: the digest of the screenshot after its beginning and after each action."""
    async with pool.lease(task.device_request(f"r{task.seed}")) as device:
        await prepare(task, device)
        seen = [(await device.observe()).sha256]
        for action in actions:
            await device.execute(action)
            seen.append((await device.observe()).sha256)
        return seen


async def run_all(pool: DevicePool, template: Template, seeds: list[int]) -> dict[int, list[str]]:
    found = await asyncio.gather(*(run(pool, template.make_task(seed), actions_of(seed)) for seed in seeds))
    return dict(zip(seeds, found, strict=True))


@pytest.mark.timeout(1800)
async def test_fifty_replayed_rollouts_equal_the_live_ones_in_every_screenshot(tmp_path: Path) -> None:
    shop, recording = ChangingShop(), tmp_path / "recording"
    seeds = list(range(NUM_ROLLOUTS))
    async with serve_app(shop.app(), "127.0.0.1", 0) as address:
        async with open_tasks(tmp_path, [f"{address}/"], record=str(recording)) as (pool, (template,)):
            live = await run_all(pool, template, seeds)
    num_asked = len(shop.asked)
    async with httpx.AsyncClient(trust_env=False) as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(address)

    async with open_tasks(tmp_path, [f"{address}/"], replay=str(recording)) as (pool, (template,)):
        replayed = await run_all(pool, template, seeds[::-1])
        again = await run_all(pool, template, seeds[:5])
    assert replayed == live
    assert again == {seed: live[seed] for seed in seeds[:5]}
    assert len(shop.asked) == num_asked
    # no rollout looks like another, so each was answered from its own recording
    assert len({seen[0] for seen in live.values()}) == NUM_ROLLOUTS
    assert sum(len(set(seen)) for seen in live.values()) > 2 * NUM_ROLLOUTS  # and most actions changed the screen


async def test_a_replayed_page_of_another_time_looks_different(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    async with serve_app(ChangingShop().app(), "127.0.0.1", 0) as address:
        async with open_tasks(tmp_path, [f"{address}/item/1"], record=str(recording)) as (pool, (template,)):
            await run(pool, template.make_task(0), [at(TEA)])
    seen: list[list[str]] = []
    for time_ms in (None, 1_000_000_000_000):
        if time_ms is not None:
            (recording / "recording.json").write_text(json.dumps({"time_ms": time_ms}))
        async with open_tasks(tmp_path, [f"{address}/item/1"], replay=str(recording)) as (pool, (template,)):
            seen.append(await run(pool, template.make_task(0), [at(TEA)]))
    assert seen[0][0] == seen[1][0]  # this page does not look at the clock
    assert seen[0][1] != seen[1][1]


async def test_what_was_never_recorded_leaves_the_page_as_it_is(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    async with serve_app(ChangingShop().app(), "127.0.0.1", 0) as address:
        async with open_tasks(tmp_path, [f"{address}/"], record=str(recording)) as (pool, (template,)):
            await run(pool, template.make_task(0), [at(TEA)])
    with pytest.raises(ConfigError, match="expected a recording of one of the 1 start addresses"):
        async with open_tasks(tmp_path, [f"{address}/other"], replay=str(recording)):
            pass
    async with open_tasks(tmp_path, [f"{address}/other", f"{address}/"], replay=str(recording)) as (pool, templates):
        (template,) = templates
        seen = await run(pool, template.make_task(77), [at(MILK), at(TEA)])
    assert seen[0] == seen[1]
    assert seen[1] != seen[2]


async def test_a_site_that_turns_the_browser_away_is_a_fault_of_its_own_kind_and_not_recorded(tmp_path: Path) -> None:
    challenge = HTMLResponse("<title>Just a moment...</title><h1>Checking</h1>", status_code=403)
    captcha = HTMLResponse("<title>Shop</title><div id=px-captcha>Press and hold</div>")
    shop, recording = ChangingShop(refusals={"/item/1": challenge, "/item/2": captcha}), tmp_path / "recording"
    async with serve_app(shop.app(), "127.0.0.1", 0) as address:
        async with open_tasks(tmp_path, [f"{address}/", f"{address}/item/2"], record=str(recording)) as (
            pool,
            (one, two),
        ):
            with pytest.raises(BlockedError, match=r"a challenge .*Just a moment"):
                await run(pool, one.make_task(0), [at(TEA)])
            with pytest.raises(BlockedError, match=r"a captcha .#px-captcha"):
                await run(pool, one.make_task(1), [at(OLD)])
            with pytest.raises(BlockedError, match="a captcha"):
                await run(pool, two.make_task(2), [])
            await run(pool, one.make_task(3), [at(MILK)])
            assert pool.take_metrics()["device/faults/blocked"] == 3
    assert [file.name.split(".")[1] for file in recording.glob("*.har*")] == ["3"]


async def test_what_robots_txt_forbids_is_not_loaded(tmp_path: Path) -> None:
    shop = ChangingShop(robots="User-agent: *\nDisallow: /private\n")
    async with serve_app(shop.app(), "127.0.0.1", 0) as address:
        urls = [f"{address}/private/b", f"{address}/item/1"]
        async with open_tasks(tmp_path, urls) as (pool, (forbidden, allowed)):
            with pytest.raises(BlockedError, match=r"which its robots\.txt forbids"):
                await run(pool, forbidden.make_task(0), [])
            seen = await run(pool, allowed.make_task(0), [at(OLD)])  # where this page has the private link
            assert seen[0] == seen[1]
        assert [path for path in shop.asked if path.startswith("/private")] == []
        async with open_tasks(tmp_path, urls, robots="ignore") as (pool, (forbidden, _)):
            await run(pool, forbidden.make_task(0), [])
        assert "/private/b" in shop.asked


async def test_no_more_pages_than_allowed_are_at_a_site_and_others_need_not_wait(tmp_path: Path) -> None:
    async with (
        serve_app(ChangingShop().app(), "127.0.0.1", 0) as one,
        serve_app(ChangingShop().app(), "127.0.0.1", 0) as other,
        open_tasks(tmp_path, [f"{one}/item/1", f"{other}/item/1"], max_per_host=2) as (pool, (first, second)),
    ):
        held = [pool.lease(first.make_task(seed).device_request()) for seed in range(3)]
        for lease in held[:2]:
            await lease.__aenter__()
        third = asyncio.create_task(held[2].__aenter__())
        await run(pool, second.make_task(0), [])  # the other site has places
        assert not third.done()
        await held[0].__aexit__(None, None, None)
        assert isinstance(await third, BrowserPage)
        for lease in held[1:]:
            await lease.__aexit__(None, None, None)
