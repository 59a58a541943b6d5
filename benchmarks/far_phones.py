"""Phones that are far away: an action and a screenshot take seconds, and no two screenshots are alike.

As the environment of a package of its own, they are wherever the devices of a run are: in the run, or in its rollout
workers. What a process with such phones takes, it notes in the folder `figures` of the task source.
"""

import asyncio
import io
import json
import os
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Self
from zlib import crc32

import psutil
from PIL import Image, ImageDraw

from cua_rl.environments.contract import DeviceOrder, Environment, Loading, Source
from cua_rl.environments.device import Device, DeviceAbilities, Screen
from cua_rl.environments.pool import DeviceRequest
from cua_rl.planning.fleet import Spread
from cua_rl.tasks.fields import Fields, given
from cua_rl.tasks.task import Task, Template
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.judgement import Validation
from tests.fakes import FakeDevice

DEVICE_S, SIGMA = 2.0, 0.5
SCREEN = Screen(kind="android", width_px=192, height_px=320)
"""The embedded phone's, of 60 tokens; `scale` makes larger ones."""
WATCH_S = 10.0
SLEEP_S = 0.05  # one of 10 ms costs as much processor time as what it measures: 1 % of a core


class Screenshots:
    """Makes screenshots that cost this process as little as those of a device elsewhere: they are joined, not drawn."""

    def __init__(self, num_bytes: int, scale: int = 1) -> None:
        self.random, self.screen = Random(2), SCREEN.scaled(scale)
        drawn = io.BytesIO()
        picture = Image.new("RGB", (self.screen.width_px, self.screen.height_px), "white")
        ImageDraw.Draw(picture).rectangle((20, 20, 160, 60), fill="blue")
        picture.save(drawn, "PNG")
        self._body, self._end = drawn.getvalue()[:-12], drawn.getvalue()[-12:]  # IEND is always 12 bytes
        self._end = chunk(self.random.randbytes(max(0, num_bytes - len(drawn.getvalue()) - 40))) + self._end

    def draw(self) -> EncodedImage:
        """One that is unlike all others."""
        data = self._body + chunk(os.urandom(16)) + self._end  # not of `random`, which is the same in each worker
        size = {"width_px": self.screen.width_px, "height_px": self.screen.height_px}
        return EncodedImage(data=data, format="png", **size)


def chunk(noise: bytes) -> bytes:
    """A private chunk of a PNG."""
    named = b"noIs" + noise
    return len(noise).to_bytes(4) + named + crc32(named).to_bytes(4)


@dataclass
class Watched:
    """What this process takes from the first action on, and what it holds every `WATCH_S` seconds."""

    num_actions: int = 0
    began_cpu_s: float = 0.0
    cpu_s: float = 0.0
    rss_mib: list[int] = field(default_factory=list[int])
    lag_p99_ms: float = 0.0
    lags_s: list[float] = field(default_factory=list[float])

    def count(self) -> None:
        """Note an action."""
        self.began_cpu_s = self.began_cpu_s or time.process_time()
        self.num_actions += 1

    def settle(self) -> None:
        """Bring all figures up to date."""
        self.cpu_s = time.process_time() - self.began_cpu_s
        self.rss_mib.append(round(psutil.Process().memory_info().rss / 2**20))
        self.lag_p99_ms = round(1000 * percentile(self.lags_s, 0.99), 1)

    @asynccontextmanager
    async def watching(self, file: Path | None) -> AsyncGenerator[None]:
        """Write the figures to a file every `WATCH_S` seconds, for processes that are ended from outside."""

        async def write() -> None:
            while True:
                await asyncio.sleep(WATCH_S)
                self.settle()
                if file is not None:
                    figures = {name: value for name, value in asdict(self).items() if name != "lags_s"}
                    await asyncio.to_thread(file.write_text, json.dumps(figures))

        watchers = [asyncio.create_task(watch_lag(self.lags_s)), asyncio.create_task(write())]
        try:
            yield
        finally:
            for watcher in watchers:
                watcher.cancel()


async def watch_lag(lags_s: list[float]) -> None:
    """Sleep again and again and note how late each sleep ends."""
    while True:
        clock = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        lags_s.append(time.perf_counter() - clock - SLEEP_S)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


class FarPhone(FakeDevice):
    """Takes its time for everything."""

    def __init__(self, screenshots: Screenshots, watched: Watched, mean_s: float) -> None:
        super().__init__()
        self._screenshots, self._watched, self._mean_s = screenshots, watched, mean_s

    async def observe(self) -> EncodedImage:
        await self._wait()
        return self._screenshots.draw()

    async def execute(self, action: Action) -> None:
        self._watched.count()
        await self._wait()

    async def query(self, name: str) -> str:
        return ""

    async def _wait(self) -> None:
        await asyncio.sleep(Spread(mean=self._mean_s, sigma=SIGMA).draw(self._screenshots.random))


@dataclass(frozen=True, slots=True, kw_only=True)
class FarPhonesSource(Source):
    """One task, which takes all its turns."""

    source_types = ("far_phones",)

    turns: int | None = given(lambda item, key: item.integer(key, at_least=1))
    screen_kb: int | None = given(lambda item, key: item.integer(key, at_least=1))
    scale: int | None = given(lambda item, key: item.integer(key, at_least=1))
    slow: int | None = given(lambda item, key: item.integer(key, at_least=1))
    """How many times as slow as `DEVICE_S` the phones are."""
    figures: str | None = given(Fields.text)
    """The folder for those of each process; None writes none."""

    def load(self, loading: Loading) -> list["Wander"]:
        return [Wander(task_id="far_phones/wander", category="app", difficulty="easy", max_turns=self.turns or 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wander(Template):
    """The task: half of the attempts succeed, so that groups teach."""

    def make_task(self, seed: int) -> Task:
        random = Random(seed)

        async def validate(device: Device, answer: str | None) -> Validation:
            success = random.random() < 0.5
            return Validation(query="chance", expected="heads", actual="heads" if success else "tails", success=success)

        return self.build_task(seed, "Look around.", validate=validate)


class FarPhones:
    """The backend."""

    abilities = DeviceAbilities(name="phones elsewhere", has_shell=False, is_seeded=True, environment="far_phones")

    def __init__(self, order: DeviceOrder) -> None:
        (source,) = order.sources
        assert isinstance(source, FarPhonesSource)
        self.watched = Watched()
        file = None if source.figures is None else Path(source.figures) / f"{os.getpid()}.json"
        self._watching = self.watched.watching(file)
        self._screenshots = Screenshots(1024 * (source.screen_kb or 1), source.scale or 1)
        self._mean_s = DEVICE_S * (source.slow or 1)

    async def make(self, request: DeviceRequest) -> FarPhone:
        return FarPhone(self._screenshots, self.watched, self._mean_s)

    async def __aenter__(self) -> Self:
        await self._watching.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._watching.__aexit__(None, None, None)


FAR_PHONES = Environment(
    name="far_phones",
    sources=(FarPhonesSource,),
    make_backend=FarPhones,
    has_tiny_model=True,
    has_held_out=False,
    smallest_screen=lambda order: SCREEN,
)


def install(folder: Path) -> str:
    """Make the files that pip leaves of a package with this environment; returns the PYTHONPATH that finds it."""
    info = folder / "far_phones-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: far-phones\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cua_rl.environments]\nfar_phones = benchmarks.far_phones:FAR_PHONES\n")
    return os.pathsep.join(map(str, (Path(__file__).parents[1], folder)))
