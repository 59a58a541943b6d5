"""How fast are Linux desktops? Steps with a screenshot per second, 1, 4 and 8 desktops side by side: a JSON line each.

    python -m benchmarks.desktop [--desktops 1,4,8] [--steps 100]

A step types a letter into a real editor, so that each picture is new, waits until nothing more is drawn, and packs the
picture as a PNG. Waiting (30 ms at least) bounds one desktop, processor time bounds the machine.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

from benchmarks.claims import require
from cua_rl.environments.desktop.desktops import LinuxDesktops
from cua_rl.environments.desktop.device import LinuxDesktop
from cua_rl.environments.desktop.png_bands import BandedPng
from cua_rl.environments.desktop.templates import DESKTOP_TASKS
from cua_rl.environments.desktop.x_screen import XScreen
from cua_rl.types.actions import Click, TypeText
from cua_rl.types.conversation import EncodedImage

SIZE_PX = (1024, 768)
TARGET = {4: 50.0}  # steps/s on two cores


async def measure(num_desktops: int, num_steps: int) -> dict[str, object]:
    """Start desktops with an editor each, step all of them at once, stop them."""
    task = DESKTOP_TASKS[0].make_task(0)
    assert task.prepare is not None
    async with LinuxDesktops(width_px=SIZE_PX[0], height_px=SIZE_PX[1]) as backend:
        began = time.perf_counter()
        made = await asyncio.gather(*(backend.make(task.device_request()) for _ in range(num_desktops)))
        desktops = [desktop for desktop in made if isinstance(desktop, LinuxDesktop)]
        start_s = time.perf_counter() - began
        try:
            await asyncio.gather(*(task.prepare(desktop) for desktop in desktops))
            for desktop in desktops:
                await desktop.execute(Click(x=500, y=400))
            cpu_before, began = cpu_seconds(), time.perf_counter()
            taken = await asyncio.gather(*(steps(desktop, num_steps) for desktop in desktops))
            seconds = time.perf_counter() - began
            cpu_ms = 1000 * (cpu_seconds() - cpu_before) / (num_desktops * num_steps)
            memory_mib = sum(process_tree_mib(desktop.device_id) for desktop in desktops) / num_desktops
            png_ms = await asyncio.to_thread(encoding_ms, desktops[0])
        finally:
            began = time.perf_counter()
            await asyncio.gather(*(desktop.close() for desktop in desktops))
            stop_s = time.perf_counter() - began
    require_letters(num_steps, [screens for _, screens in taken])
    all_times = sorted(duration for durations, _ in taken for duration in durations)
    return {
        "figure": "desktop_steps_per_s",
        "num_desktops": num_desktops,
        "value": round(num_desktops * num_steps / seconds, 1),
        "target": TARGET.get(num_desktops),
        "cpu_ms_per_step": round(cpu_ms, 1),
        "whole_png_ms": round(png_ms, 1),
        "step_p50_ms": round(1000 * statistics.median(all_times), 1),
        "step_p95_ms": round(1000 * all_times[int(0.95 * len(all_times))], 1),
        "start_s": round(start_s, 2),
        "stop_s": round(stop_s, 2),
        "memory_mib_per_desktop": round(memory_mib, 1),
        "screen": "{}x{}".format(*SIZE_PX),
        "num_cores": os.cpu_count(),
    }


def require_letters(num_steps: int, screens: Sequence[Sequence[EncodedImage]]) -> None:
    """Refuse figures unless every desktop shows something new after every letter."""
    require(
        "letters that are typed and seen",
        sizes=({SIZE_PX}, {(seen.width_px, seen.height_px) for one in screens for seen in one}),
        different_screens=(
            [num_steps] * len(screens),
            [1 + sum(seen != before for before, seen in pairwise(one)) for one in screens],
        ),
    )


async def steps(desktop: LinuxDesktop, num_steps: int) -> tuple[list[float], list[EncodedImage]]:
    """Seconds of every step, and the screenshot after it."""
    durations: list[float] = []
    screens: list[EncodedImage] = []
    for number in range(num_steps):
        began = time.perf_counter()
        await desktop.execute(TypeText(text="\n" if number % 40 == 39 else chr(ord("a") + number % 26)))
        screens.append(await desktop.observe())
        durations.append(time.perf_counter() - began)
    return durations, screens


def cpu_seconds() -> float:
    """Processor time so far of this process and all desktops."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            used = process.cpu_times()
            total += used.user + used.system
    return total


def encoding_ms(desktop: LinuxDesktop) -> float:
    """What packing one picture of this desktop costs if nothing of it is known."""
    screen = XScreen(desktop.display, desktop.authority)
    bgra, width_px, _ = screen.grab()
    screen.close()
    began = time.perf_counter()
    for _ in range(20):
        BandedPng().encode(bgra, width_px)
    return 1000 * (time.perf_counter() - began) / 20


def process_tree_mib(device_id: str) -> float:
    """Proportional set size of all processes in whose environment this desktop's folder is."""
    total_kib = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"/{device_id}/".encode() in (process / "environ").read_bytes():
                rollup = (process / "smaps_rollup").read_text()
                total_kib += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total_kib / 1024


def main(argv: Sequence[str] | None = None) -> None:
    """Measure each number of desktops in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--desktops", default="1,4,8")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args(argv)
    for number in options.desktops.split(","):
        print(json.dumps(asyncio.run(measure(int(number), options.steps))), flush=True)


if __name__ == "__main__":
    main()
