"""Picture every view of a monitor for docs/monitor.md: `python -m scripts.picture_monitor http://127.0.0.1:8720`.

Shows the newest run that has ended, at the width of a desktop and of a phone, light and dark, the four beside each
other in one file of `docs/monitor/`. Ends with status 1 if a page complains in the console or is wider than its window.
"""

import argparse
import asyncio
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.async_api import Browser, async_playwright

from cua_rl.environments.browser.chromium import find_chromium

FOLDER = Path(__file__).parents[1] / "docs" / "monitor"
SIZES = {"desktop": (1280, 900), "phone": (390, 900)}
HEIGHT_PX, GAP_PX = 720, 12


async def find_views(client: httpx.AsyncClient) -> dict[str, str]:
    """The address of each view, by the name of its picture."""

    async def items(path: str) -> list[Any]:
        return (await client.get(path)).raise_for_status().json()["items"]

    run = next(run["run_id"] for run in await items("/api/runs") if run["status"] == "completed")
    failed = next(iter(await items(f"/api/rollouts?run_id={run}&phase=step&verdict=failure&limit=1")))
    task, step, of_run = failed["task_id"], failed["step"], f"/rollouts?run_id={run}"
    group = f"/runs/{run}/step/{step}/groups/{failed['group_id']}"
    halves = f"first=run_id%3D{run}%26max_step%3D{step}&second=run_id%3D{run}%26min_step%3D{step + 1}"
    tabs = ("timeline", "live", "tasks", "evals", "cost", "verdicts", "config")
    return {
        "runs": "/",
        "run": f"/runs/{run}",
        **{tab: f"/runs/{run}?tab={tab}" for tab in tabs},
        "step": f"/runs/{run}/step/{step}",
        "group": group,
        "rollout": f"/runs/{run}/rollouts/{failed['rollout_id']}",
        "task": f"/runs/{run}/tasks/{task}",
        "set-table": of_run,
        "set-gallery": f"{of_run}&view=gallery",
        "set-figures": f"{of_run}&view=summary",
        "set-task": f"{of_run}&view=summary&task_id={task}",
        "set-tokens": f"{of_run}&view=tokens",
        "set-cost": f"{of_run}&view=cost",
        "compare": f"/compare?{halves}",
        "benchmarks": "/benchmarks",
    }


async def picture(browser: Browser, base_url: str, views: Mapping[str, str], complaints: list[str]) -> None:
    """Write the file of each view."""
    taken: dict[str, list[Image.Image]] = {name: [] for name in views}
    for device, (width_px, height_px) in SIZES.items():
        for scheme in ("light", "dark"):
            context = await browser.new_context(viewport={"width": width_px, "height": height_px}, color_scheme=scheme)
            page = await context.new_page()
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            for name, path in views.items():
                await page.goto(base_url + path)
                await page.wait_for_load_state("networkidle")
                if await page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                    complaints.append(f"{path} is wider than a {device}")
                taken[name].append(Image.open(io.BytesIO(await page.screenshot())).convert("RGB"))
            await context.close()
    for name, shots in taken.items():
        side_by_side(shots).save(FOLDER / f"{name}.webp", quality=80, method=6)


def side_by_side(shots: list[Image.Image]) -> Image.Image:
    """All in one row, of the same height."""
    scaled = [
        shot.resize((shot.width * HEIGHT_PX // shot.height, HEIGHT_PX), Image.Resampling.LANCZOS) for shot in shots
    ]
    row = Image.new("RGB", (sum(one.width + GAP_PX for one in scaled) - GAP_PX, HEIGHT_PX), "gray")
    left = 0
    for one in scaled:
        row.paste(one, (left, 0))
        left += one.width + GAP_PX
    return row


async def main(base_url: str) -> int:
    """Picture the monitor there; the exit status."""
    complaints: list[str] = []
    async with httpx.AsyncClient(base_url=base_url, trust_env=False) as client, async_playwright() as started:
        browser = await started.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        await picture(browser, base_url, await find_views(client), complaints)
        await browser.close()
    print(*complaints, sep="\n")
    return bool(complaints)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("base_url", help="of a monitor that runs")
    sys.exit(asyncio.run(main(parser.parse_args().base_url.rstrip("/"))))
