"""Does a page stay small that is kept open? Charts, latest rollouts and a followed rollout, while rows arrive.

    python -m benchmarks.monitor_memory [--minutes 10] [--rollouts 1000] [--turn-s 2.0]

A made-up run goes on with eight rollouts at a time, each turn of which takes `--turn-s`: four turns a second. Three
pages of one Chromium show it over a monitor in a process of its own: its charts, its latest rollouts, and a rollout
in follow mode, which changes to a rollout that runs whenever its own has ended, as links do, without loading the page
anew. Every 30 s memory is taken after a forced garbage collection. One JSON line a sample, then the figures: growth is
the mean of the last third less that of the middle third (the first third fills what is kept on purpose).
"""

import argparse
import asyncio
import json
import shutil
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
from playwright.async_api import async_playwright

from benchmarks.claims import require
from scripts.monitor_process import MonitorProcess, monitor_process, scratch_postgres

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")
SAMPLE_S = 30.0
MIB = 2**20
GO_TO = "path => { history.pushState(null, '', path); dispatchEvent(new Event('monitor:navigate')); }"


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--turn-s", type=float, default=2.0)
    asyncio.run(measure(parser.parse_args()))


async def measure(given: argparse.Namespace) -> None:
    """Seed, open the pages, watch."""
    async with scratch_postgres() as (url, folder), live_run(url, given), monitor_process(url, folder) as monitor:
        async with async_playwright() as started:
            program = next(path for name in PROGRAMS if (path := shutil.which(name)))
            browser = await started.chromium.launch(executable_path=program, args=["--no-sandbox"])
            context = await browser.new_context(viewport={"width": 1280, "height": 900})
            rollout_page, *others = [await context.new_page() for _ in range(3)]
            for page, path in zip(others, ("/runs/1", "/runs/1?tab=live"), strict=True):
                await page.goto(monitor.base_url + path)
            following = asyncio.create_task(follow_rollouts(monitor, rollout_page))
            pages = {"run": others[0], "live": others[1], "rollout": rollout_page}
            sessions = {name: await context.new_cdp_session(page) for name, page in pages.items()}
            samples = await watch(monitor, sessions, 60 * given.minutes)
            following.cancel()
            require_growth(samples)
            await browser.close()
        report(samples, given)


@asynccontextmanager
async def live_run(url: str, given: argparse.Namespace) -> AsyncGenerator[None]:
    """A run that goes on as long as the context is open."""
    options = [f"--rollouts={given.rollouts}", "--turns=10", "--live=100000", f"--turn-s={given.turn_s}"]
    command = ["nice", sys.executable, "-m", "scripts.seed_monitor", url, *options]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    if b"going on" not in await process.stdout.readline():
        raise SystemExit("expected the run to be seeded, it was not")
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def follow_rollouts(monitor: MonitorProcess, page: Any) -> None:
    """Keep a page at a rollout that runs."""
    await page.goto(f"{monitor.base_url}/runs/1")
    async with httpx.AsyncClient(base_url=monitor.base_url, trust_env=False) as client:
        shown = ""
        while True:
            answer = await client.get("/api/runs/1/rollouts", params={"status": "running"})
            running = [item["rollout_id"] for item in answer.json()["items"]]
            if running and shown not in running:
                shown = running[0]
                await page.evaluate(GO_TO, f"/runs/1/rollouts/{shown}?follow=1")
            await asyncio.sleep(2.0)


async def watch(monitor: MonitorProcess, sessions: dict[str, Any], seconds: float) -> list[dict[str, float]]:
    """Memory of every page and of the server, every half minute."""
    samples: list[dict[str, float]] = []
    server, started = monitor.find(), time.monotonic()
    async with httpx.AsyncClient(base_url=monitor.base_url, trust_env=False) as client:
        while (at := time.monotonic() - started) < seconds:
            sample: dict[str, float] = {"at_s": round(at), "server_mib": round(server.memory_info().rss / MIB, 1)}
            for name, session in sessions.items():
                await session.send("HeapProfiler.collectGarbage")
                used = (await session.send("Runtime.getHeapUsage"))["usedSize"]
                nodes = (await session.send("Memory.getDOMCounters"))["nodes"]
                sample |= {f"{name}_mib": round(used / MIB, 2), f"{name}_nodes": nodes}
            sample["num_steps"] = (await client.get("/api/runs/1")).json()["num_completed_steps"]
            print(json.dumps(sample), flush=True)
            samples.append(sample)
            await asyncio.sleep(SAMPLE_S)
    return samples


def require_growth(samples: Sequence[dict[str, float]]) -> None:
    """Refuse figures unless rows arrived between samples, and every page shows something."""
    pages = ("run", "live", "rollout")
    require(
        "pages to which rows arrive",
        more_steps=(True, samples[-1]["num_steps"] > samples[0]["num_steps"]),
        pages_with_content=(pages, tuple(page for page in pages if samples[-1][f"{page}_nodes"] > 100)),
    )


def report(samples: Sequence[dict[str, float]], given: argparse.Namespace) -> None:
    """One figure for each page and one for the server."""
    third = len(samples) // 3
    for key in ("run_mib", "live_mib", "rollout_mib", "server_mib"):
        values = [sample[key] for sample in samples]
        growth = statistics.mean(values[-third:]) - statistics.mean(values[third : 2 * third]) if third else None
        figure = {
            "figure": "monitor_memory",
            "what": key.removesuffix("_mib"),
            "minutes": given.minutes,
            "first_mib": values[0],
            "largest_mib": max(values),
            "last_mib": values[-1],
            "growth_mib": None if growth is None else round(growth, 2),
            "target_growth_mib": 2.0,
            "live_steps": samples[-1]["num_steps"] - samples[0]["num_steps"],
        }
        print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
