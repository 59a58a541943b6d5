"""Picture every view of a monitor for docs/monitor.md: `python -m scripts.picture_monitor http://127.0.0.1:8720`.

Shows the newest run that has ended, and the one before it where two are compared, at the width of a desktop and of a
phone, light and dark: four files for each view in `docs/monitor/`. Suites, replays and answers of checkpoints are shown
of the newest run that has them, or not at all. Ends with status 1 if a page complains in the console or is wider than
its window.
"""

import argparse
import asyncio
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

from cua_rl.environments.browser.chromium import find_chromium

FOLDER = Path(__file__).parents[1] / "docs" / "monitor"
SIZES = {"": (1280, 860), "-phone": (390, 1300)}
SCHEMES: tuple[tuple[Literal["light", "dark"], str], ...] = (("light", ""), ("dark", "-dark"))
TIMEOUT_MS = 120_000.0
QUALITY = 60  # of WebP, at which small text is still clean
NUM_RUNS = 4  # whose databases are started
PANELS = {"replay": "replay", "asked": "asked"}  # what a picture is about, if it is further down the page


async def find_views(client: httpx.AsyncClient) -> dict[str, str]:
    """The address of each view, by the name of its picture."""

    async def items(path: str) -> list[Any]:
        return (await client.get(path)).raise_for_status().json()["items"]

    async def open_run(run_id: str) -> str:  # its database starts, and then it has its own id
        return (await client.get(f"/api/runs/{run_id}")).raise_for_status().json()["run_id"]

    completed = [one["run_id"] for one in await items("/api/runs") if one["status"] == "completed"]
    runs = [await open_run(one) for one in completed[:NUM_RUNS]]
    run, other = runs[:2]
    failed = next(iter(await items(f"/api/rollouts?run_id={run}&phase=step&verdict=failure&sort=-turns&limit=1")))
    task, step, of_run = failed["task_id"], failed["step"], f"/rollouts?run_id={run}"
    page = f"/runs/{run}"
    middle, mine = step // 2, f"run_id%3D{run}%26phase%3Dstep"
    halves = f"first={mine}%26max_step%3D{middle}&second={mine}%26min_step%3D{middle + 1}"
    best = await items(f"/api/rollouts?run_id={run}&group_id={failed['group_id']}&sort=-reward&limit=1")
    of = "&".join(f"of={run}/{one['rollout_id']}" for one in (*best, failed))
    tabs = ("timeline", "live", "tasks", "evals", "cost", "verdicts", "config", "sql")
    return {
        "runs": "/",
        "run": page,
        "charts": f"{page}?charts=success~reward~entropy~gradient-norm&x=token&smooth=0.5",
        **{tab: f"{page}?tab={tab}" for tab in tabs},
        "step": f"{page}/step/{step}",
        "group": f"{page}/step/{step}/groups/{failed['group_id']}",
        "rollout": f"{page}/rollouts/{failed['rollout_id']}",
        "task": f"{page}/tasks/{task}",
        "set-table": of_run,
        "set-gallery": f"{of_run}&view=gallery",
        "set-figures": f"{of_run}&view=summary",
        "set-task": f"{of_run}&view=summary&task_id={task}",
        "set-tokens": f"{of_run}&view=tokens",
        "set-cost": f"{of_run}&view=cost",
        "compare": f"/compare?runs={run},{other}",
        "compare-sets": f"/compare?{halves}",
        "settings": "/compare",
        "pair": f"/pair?{of}&screens=change",
        **await find_analyses(client, runs),
    }


async def find_analyses(client: httpx.AsyncClient, runs: Sequence[str]) -> dict[str, str]:
    """The address of the newest result of each kind that recipes recorded about one of these runs."""
    found: dict[str, str] = {}
    for run in runs:
        for one in (await client.get(f"/api/runs/{run}/analyses")).raise_for_status().json():
            match one["kind"]:
                case "suite":
                    found.setdefault("suite", f"/runs/{run}/suite")
                case "replay":
                    found.setdefault("replay", f"/runs/{run}/step/{one['step']}")
                case _:
                    found.setdefault("asked", f"/runs/{run}/rollouts/{one['rollout_id']}?turn={one['turn_index'] + 1}")
    return found


async def picture(browser: Browser, base_url: str, views: Mapping[str, str], complaints: list[str]) -> None:
    """Write the files of all views."""
    for device, (width_px, height_px) in SIZES.items():
        for scheme, suffix in SCHEMES:
            context = await browser.new_context(
                viewport={"width": width_px, "height": height_px}, color_scheme=scheme, reduced_motion="reduce"
            )
            page = await context.new_page()
            page.set_default_timeout(TIMEOUT_MS)
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            for name, path in views.items():
                await show(page, base_url + path)
                if name in PANELS:
                    panel = page.locator(".panel").filter(has=page.get_by_test_id(PANELS[name]))
                    await panel.evaluate("one => one.scrollIntoView()")
                if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    complaints.append(f"{path} is wider than {width_px} px")
                with Image.open(io.BytesIO(await page.screenshot())) as shot:
                    shot.convert("RGB").save(FOLDER / f"{name}{device}{suffix}.webp", quality=QUALITY, method=6)
            await context.close()


async def show(page: Page, address: str) -> None:
    """Go there and wait until everything is loaded; its event stream never is."""
    await page.goto(address)
    await page.wait_for_selector("h1")
    await page.wait_for_function(
        "() => !document.querySelector('.skeleton') && [...document.images].every(image =>"
        " image.complete || !image.offsetParent || image.getBoundingClientRect().top > innerHeight)"
    )
    await page.wait_for_timeout(700)  # charts are drawn when they are first seen


async def main(base_url: str) -> int:
    """Picture the monitor there; the exit status."""
    complaints: list[str] = []
    client = httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=TIMEOUT_MS / 1000)
    async with client, async_playwright() as started:
        browser = await started.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        await picture(browser, base_url, await find_views(client), complaints)
        await browser.close()
    print(*complaints, sep="\n")
    return bool(complaints)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("base_url", help="of a monitor that runs")
    sys.exit(asyncio.run(main(parser.parse_args().base_url.rstrip("/"))))
