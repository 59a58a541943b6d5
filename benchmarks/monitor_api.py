"""How long does every read route of the monitor take on a run of 10,000 rollouts with 10 turns each?

    python -m benchmarks.monitor_api [--rollouts 10000] [--turns 10] [--requests 40] [--beside 1000000]
        [--database-url URL]

Real HTTP to a monitor in a process of its own over a seeded Postgres; requests one after the other, after two that warm
up. One JSON line a route: wall times, and the processor time of a request in the monitor and in Postgres, which is the
figure to trust when other programs keep the machine busy. `monitor_page` is a page in Chromium, from the request to the
first content on the screen and to what it is about. With `--beside`, a second database holds another run of so many
turns too. Requests go to both in turn, so that both find the machine equally busy; `times_alone` compares the medians.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import psutil
from playwright.async_api import async_playwright

from benchmarks.claims import require
from scripts.monitor_process import monitor_process, scratch_postgres

MAY_BE_EMPTY = ("rollouts by a search without hits", "rollouts with unread answers", "overrides", "evaluations")
TARGET_P95_MS, TARGET_PAINT_MS = 100, 1000
_WARM_UP = 2
_PAGE_LOADS = 7
COUNTS = ("items", "actions", "num_pairs", "num_rollouts", "tasks", "versions")
"""Where answers that are objects have their content, the first that there is."""
PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--beside", type=int, default=0, metavar="TURNS", help="measure beside another run too")
    parser.add_argument("--database-url", help="a database that scripts/seed_monitor.py has filled")
    asyncio.run(measure(parser.parse_args()))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """A monitor over a database in which run 1 is the one that is measured."""

    base_url: str
    client: httpx.AsyncClient
    processes: list[psutil.Process]
    """The monitor's, and Postgres' if it is embedded."""
    paths: dict[str, str]
    turns_beside: int


async def measure(given: argparse.Namespace) -> None:
    """Seed if need be, serve, ask."""
    async with AsyncExitStack() as stack:
        served: list[ServedRun] = []
        for num_beside in (0, given.beside) if given.beside else (0,):
            url, folder = await stack.enter_async_context(scratch_postgres())
            if not given.database_url:
                await seed(url, given.rollouts, given.turns)
            if num_beside:
                await seed(url, num_beside // given.turns, given.turns)
            served.append(await stack.enter_async_context(serve_run(given.database_url or url, folder, num_beside)))
            shown = (await served[-1].client.get("/api/runs/1")).json()["num_rollouts"]
            is_whole = given.database_url or shown > given.rollouts - 32  # whole steps of 32 are seeded
            require("the monitor", shows_all_rollouts=(True, bool(is_whole)))
        for name in served[0].paths:
            await measure_route(served, name, given.requests)
        await measure_pages(served)


@asynccontextmanager
async def serve_run(url: str, folder: Path, num_beside: int = 0) -> AsyncGenerator[ServedRun]:
    """Serve a database."""
    async with (
        monitor_process(url, folder) as monitor,
        httpx.AsyncClient(base_url=monitor.base_url, trust_env=False, timeout=120) as client,
    ):
        yield ServedRun(
            base_url=monitor.base_url,
            client=client,
            processes=[monitor.find(), *postgres_processes(url)[:1]],
            paths=await routes(client),
            turns_beside=num_beside,
        )


async def seed(url: str, num_rollouts: int, num_turns: int) -> None:
    """Add a run to the database."""
    options = [f"--rollouts={num_rollouts}", f"--turns={num_turns}"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "scripts.seed_monitor", url, *options)
    if await process.wait():
        raise SystemExit("expected the database to be seeded, it was not")


def postgres_processes(url: str) -> list[psutil.Process]:
    """The server of an embedded database, by the folder of its socket; none of others."""
    folder = parse_qs(urlsplit(url).query).get("host", ["?"])[0]
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if folder in (one.info["cmdline"] or [])[1:-1] and is_postgres(one)
    ]


def is_postgres(process: psutil.Process) -> bool:
    """Whether it is the server itself, not what started it."""
    return os.path.basename(process.info["cmdline"][0]) == "postgres"


async def routes(client: httpx.AsyncClient) -> dict[str, str]:
    """An address of every read route, by the route."""
    run = "/api/runs/1"
    steps = [item["step"] for item in (await client.get(f"{run}/timeline")).json() if item["phase"] == "step"]
    middle = f"{run}/step/{steps[len(steps) // 2]}"
    group = (await client.get(middle)).json()["groups"][0]
    rollout = f"{run}/rollouts/{group['rollouts'][0]['rollout_id']}"
    shot = (await client.get(rollout)).json()["turns"][0]["before"]["sha256"]
    more = (await client.get(f"{run}/rollouts")).json()["next_cursor"]
    return {
        "runs": "/api/runs",
        "run": run,
        "metrics": f"{run}/metrics",
        "timeline": f"{run}/timeline",
        "evaluations": f"{run}/evaluations",
        "compare": "/api/runs/compare?run_id=1&run_id=1",
        "step": middle,
        "group": f"{middle}/groups/{group['group_id']}",
        "rollouts": f"{run}/rollouts",
        "rollouts, next page": f"{run}/rollouts?cursor={more}",
        "rollouts of a step that failed": f"{run}/rollouts?step={steps[0]}&verdict=failure",
        "rollouts with unread answers": f"{run}/rollouts?failure_kind=json",
        "rollouts by a search without hits": f"{run}/rollouts?search=nothing-has-this-name",
        "set": "/api/rollouts?run_id=1",
        "set, summary": "/api/rollouts/summary?run_id=1",
        "set of a task": f"/api/rollouts?run_id=1&task_id={group['task_id']}",
        "set of failures, summary": "/api/rollouts/summary?run_id=1&phase=step&verdict=failure",
        "set by words, largest gap first": "/api/rollouts?run_id=1&search=open+page&sort=-gap",
        "set by words, summary": "/api/rollouts/summary?run_id=1&search=open+page",
        "set with a large gap, longest first": "/api/rollouts?run_id=1&min_gap=0&sort=-took",
        "cost of a set": "/api/rollouts/cost?run_id=1",
        "cost of a set by words": "/api/rollouts/cost?run_id=1&search=open+page",
        "cost of a run": f"{run}/cost",
        "stragglers": "/api/rollouts?run_id=1&stragglers=true",
        "stragglers of a step": f"/api/rollouts?run_id=1&phase=step&step={steps[0]}&stragglers=true",
        "stragglers, summary": "/api/rollouts/summary?run_id=1&stragglers=true",
        "sets compared": f"/api/rollouts/compare?first=run_id%3D1%26step%3D{steps[0]}&second=run_id%3D1%26phase%3Dstep",
        "outlying tokens of a set": "/api/rollouts/tokens?run_id=1",
        "first actions of a set": f"/api/rollouts/first_actions?run_id=1&task_id={group['task_id']}",
        "change of a step": f"{middle}/change",
        "rollout": rollout,
        "overrides": f"{rollout}/overrides",
        "download of a rollout": f"{rollout}/download",
        "tokens": f"{rollout}/turns/0/tokens",
        "tasks": f"{run}/tasks",
        "task": f"{run}/tasks/{group['task_id']}",
        "screenshot": f"/api/screenshots/{shot}",
    }


def cpu_s(processes: list[psutil.Process]) -> list[float]:
    """Processor time so far of each and of its children."""
    totals: list[float] = []
    for process in processes:
        times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
        totals.append(sum(one.user + one.system for one in times))
    return totals


async def measure_route(served: Sequence[ServedRun], name: str, num_requests: int) -> None:
    """One JSON line for each monitor."""
    answers = [[await one.client.get(one.paths[name]) for _ in range(_WARM_UP)][-1] for one in served]
    times_ms: list[list[float]] = [[] for _ in served]
    before = [cpu_s(one.processes) for one in served]
    for _ in range(num_requests):
        for place, one in enumerate(served):
            clock = time.perf_counter()
            answers[place] = await one.client.get(one.paths[name])
            times_ms[place].append(1000 * (time.perf_counter() - clock))
            assert answers[place].status_code == 200, (one.paths[name], answers[place].text)
    for one, times, then, answer in zip(served, times_ms, before, answers, strict=True):
        require_content(name, answer)
        used = [1000 * (now - so_far) / num_requests for now, so_far in zip(cpu_s(one.processes), then, strict=True)]
        cuts = statistics.quantiles(times, n=20)
        figure = {
            "figure": "monitor_api",
            "route": name,
            "p50_ms": round(cuts[9], 1),
            "p95_ms": round(cuts[18], 1),
            "target_p95_ms": TARGET_P95_MS,
            "monitor_cpu_ms": round(used[0], 1),
            "postgres_cpu_ms": round(used[1], 1) if len(used) > 1 else None,
            "bytes": len(answer.content),
        }
        print(json.dumps(figure | compared(one, times, times_ms[0])), flush=True)


def compared(one: ServedRun, times: Sequence[float], alone: Sequence[float]) -> dict[str, object]:
    """What the run was beside, and how much longer that took."""
    if not one.turns_beside:
        return {"turns_beside": 0}
    ratio = statistics.median(times) / statistics.median(alone)
    return {"turns_beside": one.turns_beside, "times_alone": round(ratio, 2)}


def require_content(route: str, answer: httpx.Response) -> None:
    """Refuse figures of a route that answers with nothing."""
    is_json = answer.headers["content-type"].startswith("application/json")
    body = answer.json() if is_json else answer.content
    rows = next((body[key] for key in COUNTS if key in body), body) if isinstance(body, dict) else body
    require(f"the route {route}", has_content=(True, bool(rows) or route in MAY_BE_EMPTY))


def pages(paths: dict[str, str]) -> dict[str, tuple[str, str]]:
    """Pages by what they show, each with a selector of what is there once it is drawn."""
    task, step = (urlsplit(paths[name]) for name in ("set of a task", "step"))
    rows, bars = "table.data tbody tr:nth-child(50)", ".count-bars a"
    return {
        "run": ("/runs/1", ".chart-plot canvas"),
        "step": (step.path.removeprefix("/api"), "[data-testid=step-change]"),
        "set, table": ("/rollouts?run_id=1", rows),
        "set, table by words, largest gap first": ("/rollouts?run_id=1&search=open+page&sort=-gap", rows),
        "set, screens": ("/rollouts?run_id=1&view=gallery", ".wall article:nth-child(50) img"),
        "set, figures": ("/rollouts?run_id=1&view=summary", bars),
        "set of a task, figures with first actions": (f"/rollouts?{task.query}&view=summary", ".first-clicks circle"),
        "set, cost": ("/rollouts?run_id=1&view=cost", "table.data tbody tr:nth-child(20)"),
        "set, tokens": ("/rollouts?run_id=1&view=tokens", "table.data tbody tr:nth-child(100)"),
        "sets compared": (f"/compare?{urlsplit(paths['sets compared']).query}", "[data-testid=difference]"),
    }


async def measure_pages(served: Sequence[ServedRun]) -> None:
    """Each in a browser that has never seen it."""
    program = next((found for name in PROGRAMS if (found := shutil.which(name))), None)
    if program is None:
        print("no Chromium, so no pages; scripts/install_system_packages.sh installs it", file=sys.stderr)
        return
    async with async_playwright() as started:
        browser = await started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        addresses = [pages(one.paths) for one in served]
        for name in addresses[0]:
            paints: list[list[float]] = [[] for _ in served]
            drawn: list[list[float]] = [[] for _ in served]
            for _ in range(_PAGE_LOADS):
                for place, one in enumerate(served):
                    path, content = addresses[place][name]
                    context = await browser.new_context(viewport={"width": 1280, "height": 900})
                    page = await context.new_page()
                    clock = time.perf_counter()
                    await page.goto(f"{one.base_url}{path}")
                    await page.locator(content).first.wait_for(state="attached")
                    drawn[place].append(1000 * (time.perf_counter() - clock))
                    entry = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
                    await page.wait_for_function(f"({entry}) !== null")
                    paints[place].append(await page.evaluate(entry))
                    await context.close()
            for place, one in enumerate(served):
                figure = {
                    "figure": "monitor_page",
                    "page": name,
                    "first_paint_median_ms": round(statistics.median(paints[place])),
                    "drawn_median_ms": round(statistics.median(drawn[place])),
                    "drawn_largest_ms": round(max(drawn[place])),
                    "target_ms": TARGET_PAINT_MS,
                }
                print(json.dumps(figure | compared(one, drawn[place], drawn[0])), flush=True)
        await browser.close()


if __name__ == "__main__":
    main()
