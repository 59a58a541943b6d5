"""How fast browser devices are: `python -m benchmarks.browser [--contexts 1,8,16] [--seconds 10]`; prints JSON lines.

A step is a click, the reward read from the page, and a screenshot of 320 x 420 pixels, as an agent would have them.
Pages are MiniWoB++ tasks of the development set, a new instance every few steps: begun in place, or reloaded.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import psutil

from benchmarks.claims import require
from cua_rl.environments.browser.chromium import find_chromium
from cua_rl.environments.browser.environment import MiniWobPages
from cua_rl.environments.browser.miniwob.pages import begin, read_result
from cua_rl.environments.browser.page import BrowserPage
from cua_rl.types.actions import Click

NAMES = (
    "click-button", "click-color", "click-dialog-2", "click-link", "click-option", "click-widget", "enter-text",
    "click-tab-2-medium",
)  # fmt: skip
SCALE = 2.0


async def main() -> None:
    """Measure all layouts one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", default="1,8,16", help="numbers of pages at a time")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to step for each figure")
    parser.add_argument("--steps-per-reset", type=int, default=4, help="steps before a new instance")
    arguments = parser.parse_args()
    report("program", find_chromium().name, "")
    for num_contexts in map(int, arguments.contexts.split(",")):
        for reload in (False, True):
            await measure(num_contexts, arguments.seconds, arguments.steps_per_reset, reload=reload)


async def measure(num_contexts: int, seconds: float, steps_per_reset: int, *, reload: bool) -> None:
    """Let that many pages step side by side for a while."""
    how = "reload" if reload else "in_place"
    async with MiniWobPages(scale=SCALE) as backend:
        pages = [await backend.lend() for _ in range(num_contexts)]
        for index, page in enumerate(pages):
            await begin(page, NAMES[index % len(NAMES)], index)
        resets: list[float] = []
        steps: list[float] = []
        screens = Counter[tuple[str, int, int]]()
        over = Counter[bool]()
        cpu_before = cpu_seconds()
        started, deadline = time.monotonic(), time.monotonic() + seconds

        async def work(index: int, page: BrowserPage) -> None:
            random, seed = Random(index), index
            while time.monotonic() < deadline:
                seed += num_contexts
                clock = time.monotonic()
                await begin(page, NAMES[index % len(NAMES)], seed, reload=reload)
                resets.append(time.monotonic() - clock)
                for _ in range(steps_per_reset):
                    clock = time.monotonic()
                    await page.execute(Click(x=random.randrange(320), y=random.randrange(100, 420)))
                    over[(await read_result(page)).is_over] += 1
                    seen = await page.observe()
                    screens[seen.sha256, seen.width_px, seen.height_px] += 1
                    steps.append(time.monotonic() - clock)

        async with asyncio.TaskGroup() as workers:
            for index, page in enumerate(pages):
                workers.create_task(work(index, page))
        elapsed_s = time.monotonic() - started
        cpu_s = {kind: value - cpu_before.get(kind, 0.0) for kind, value in cpu_seconds().items()}
        require_clicks(len(resets), screens, over)
        layout = f"{num_contexts} contexts, {how}"
        report("steps_per_s", round(len(steps) / elapsed_s, 1), layout)
        report("resets_per_s", round(len(resets) / elapsed_s, 1), layout)
        report("reset_p50_ms", round(1000 * statistics.median(resets), 1), layout)
        report("step_p50_ms", round(1000 * statistics.median(steps), 1), layout)
        report("cpu_ms_per_step", round(1000 * sum(cpu_s.values()) / len(steps), 1), layout)
        shares = {kind: round(1000 * value / len(steps), 1) for kind, value in sorted(cpu_s.items())}
        report("cpu_ms_per_step_by_process", shares, layout)
        report("memory_mb_per_context", round(proportional_memory_mb() / num_contexts), layout)


def require_clicks(num_resets: int, screens: Counter[tuple[str, int, int]], over: Counter[bool]) -> None:
    """Refuse figures unless instances differ, some clicks hit what ends a task, and screenshots have the size."""
    require(
        "clicks on pages",
        screenshots_of_every_click=(over.total(), screens.total()),
        sizes=({(320, 420)}, {(width_px, height_px) for _, width_px, height_px in screens}),
        new_instances_look_different=(True, len(screens) > num_resets / 2),
        clicks_end_some_tasks=(True, over[True] > 0),
    )


def cpu_seconds() -> dict[str, float]:
    """Processor time so far of this process, Playwright's and the browsers', by kind of process."""
    own = psutil.Process()
    totals: dict[str, float] = {}
    for process in (own, *own.children(recursive=True)):
        try:
            kind = "python" if process.pid == own.pid else kind_of(process.cmdline())
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        totals[kind] = totals.get(kind, 0.0) + used.user + used.system
    return totals


def kind_of(command: Sequence[str]) -> str:
    """ "renderer" and the like for Chromium's helpers, "browser" for itself, else the program's name."""
    kinds = [argument.removeprefix("--type=") for argument in command if argument.startswith("--type=")]
    if kinds:
        return kinds[0]
    return "browser" if any(argument.startswith("--user-data-dir=") for argument in command) else Path(command[0]).name


def proportional_memory_mb() -> float:
    """Memory of this process, Playwright and all browsers; shared pages count in proportion."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:"))
    return total


def report(name: str, value: object, layout: str) -> None:
    """Print one figure."""
    print(json.dumps({"benchmark": "browser", "figure": name, "value": value, "layout": layout}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
