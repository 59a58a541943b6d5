"""A monitor on a port, over a real Postgres with a recorded run, and Chromium in front of it."""

import random
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import pytest_asyncio

from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.environments.browser.chromium import find_chromium
from cua_rl.events import EvaluationEnded, RolloutSource, StepTrained, TrainingEnded, TrainingStarted
from cua_rl.monitor.prices import Prices
from cua_rl.renderers.renderer import make_renderer
from cua_rl.types.errors import ConfigError
from cua_rl.types.rollout import RolloutGroup
from scripts import seed_monitor
from scripts.random_taps import RandomTaps
from tests.patience import patience
from tests.real.monitor.conftest import serving

playwright = pytest.importorskip("playwright.async_api", reason="pip install playwright, as scripts/setup.sh does")

ROOT = Path(__file__).resolve().parents[3]
NUM_STEPS = 4
PRICES = Prices(device_hour=7.2, sampled_million_tokens=100.0)
WITH_FAULTS = {
    "eval/held_out/num_faults": 3.0,
    "eval/held_out/success_rate_worst": 0.25,
    "eval/held_out/success_rate_best": 0.5,
}


@dataclass(kw_only=True)
class RecordedRun:
    """A run whose recorder is still open: `add_step` goes on with it."""

    run_id: str
    recorder: DatabaseRecorder
    policy: RandomTaps
    num_steps: int = 0

    async def add_evaluation(self, phase: str, metrics: Mapping[str, float] = MappingProxyType({})) -> None:
        source = RolloutSource(phase=phase, step=self.num_steps)  # pyright: ignore[reportArgumentType]
        self.policy.done_share = 0.5  # where it has done nothing: a wrong final state
        await seed_monitor.run_source(self.recorder, self.policy, source, num_groups=8, turns=2)
        self.policy.done_share = 0.0
        await self.recorder.record(EvaluationEnded(source=source, metrics=metrics))
        await self.recorder.flush()

    async def add_step(self, *, turns: int = 3, pause_s: float = 0.0) -> None:
        """Rollouts on simulated phones, then the trainer's log-probabilities for every one of them."""
        await self.train(await self.run_rollouts(turns=turns, pause_s=pause_s))

    async def run_rollouts(self, *, turns: int = 3, pause_s: float = 0.0) -> list[RolloutGroup]:
        """The groups of the next step, which are not trained on yet."""
        source = RolloutSource(phase="step", step=self.num_steps + 1)
        groups = await seed_monitor.run_source(
            self.recorder, self.policy, source, num_groups=3, turns=turns, pause_s=pause_s
        )
        await self.recorder.flush()
        return groups

    async def train(self, groups: list[RolloutGroup]) -> None:
        """The step of these groups is trained."""
        step = self.num_steps + 1
        self.num_steps = self.policy.policy_version = step
        logprobs = {
            rollout.rollout_id: tuple(
                (turn.index, tuple(value - 0.01 for value in turn.model.sampling_logprobs)) for turn in rollout.turns
            )
            for group in groups
            for rollout in group.rollouts
        }
        await self.recorder.record(
            StepTrained(
                step=step,
                policy_version=step,
                datums_sha256=f"{step:064x}",
                num_datums=len(logprobs),
                training_logprobs=logprobs,
                metrics=seed_monitor.step_metrics(step, NUM_STEPS, random.Random(step)),
            )
        )
        await self.recorder.flush()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where the monitor is, and the runs that it shows: one has ended, the other goes on."""

    base_url: str
    database_url: str
    ended: RecordedRun
    running: RecordedRun


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Site]:
    folder = tmp_path_factory.mktemp("monitor_web")
    async with EmbeddedPostgres(folder / "data", folder / "postgres.log") as postgres:
        await migrate(postgres.url)
        renderer = make_renderer(seed_monitor.MODEL)
        async with (
            DatabaseRecorder(postgres.url, image_token_id=renderer.image_token_id) as first,
            DatabaseRecorder(postgres.url, image_token_id=renderer.image_token_id) as second,
        ):
            ended = await _begin(first, renderer, "first", learning_rate=2e-3)
            await ended.add_evaluation("baseline")
            for _ in range(NUM_STEPS):
                await ended.add_step()
            await ended.add_evaluation("eval", WITH_FAULTS)
            await first.record(TrainingEnded(status="completed"))
            await first.flush()
            running = await _begin(second, renderer, "second", learning_rate=1e-3)
            await running.add_evaluation("baseline")
            await running.add_step(turns=2)
            async with serving(postgres.url, prices=PRICES) as port:
                yield Site(base_url=f"http://127.0.0.1:{port}", database_url=postgres.url, ended=ended, running=running)


async def _begin(recorder: DatabaseRecorder, renderer: Any, name: str, **config: Any) -> RecordedRun:
    settings = {"model_name": None, "model_path": str(seed_monitor.MODEL), "group_size": 8} | config
    await recorder.record(
        TrainingStarted(run_name=name, log_path=f"/runs/{name}", config=settings, first_step=1, total_steps=NUM_STEPS)
    )
    await recorder.flush()
    policy = RandomTaps(renderer, seed=1)
    return RecordedRun(run_id=str(recorder.scope.training_id), recorder=recorder, policy=policy)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncGenerator[Any]:
    try:
        program = find_chromium()
    except ConfigError as error:
        pytest.skip(str(error))
    async with playwright.async_playwright() as started:
        browser = await started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        await browser.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A page of the browser, and everything that it complained about."""

    page: Any
    site: Site
    complaints: list[str]

    async def open(self, path: str) -> None:
        await self.page.goto(self.site.base_url + path)
        await self.page.wait_for_selector("h1")

    async def open_failure_by_keys(self, run_id: str) -> None:
        """From the page of a run to the first failure of its table, by keyboard alone."""
        await self.open(f"/runs/{run_id}")
        await self.page.get_by_role("tab", name="Charts").wait_for()
        await self.page.keyboard.press("f")
        await self.page.get_by_role("heading", name="Why they failed").wait_for()
        await self.page.keyboard.press("1")
        await self.page.locator("table.rollouts a[data-row]").first.wait_for()
        await self.page.keyboard.press("j")
        await self.page.keyboard.press("Enter")

    async def json(self, path: str) -> Any:
        """The answer of the API at this path."""
        answer = await self.page.request.get(self.site.base_url + path)
        assert answer.ok, await answer.text()
        return await answer.json()


@pytest_asyncio.fixture(loop_scope="session")
async def window(chromium: Any, site: Site) -> AsyncGenerator[Window]:
    """A fresh browser profile; whatever a test does, no page may complain or ask another server."""
    context = await chromium.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    page = await context.new_page()
    page.set_default_timeout(1000 * patience(60))
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(f"page error: {error}"))
    page.on("console", lambda message: message.type == "error" and complaints.append(f"console: {message.text}"))
    page.on("request", lambda request: _note_foreign(request.url, site.base_url, complaints))
    yield Window(page=page, site=site, complaints=complaints)
    await context.close()
    assert complaints == []


def _note_foreign(url: str, base_url: str, complaints: list[str]) -> None:
    if not url.startswith((base_url, "blob:", "data:")):
        complaints.append(f"asked elsewhere: {url}")
