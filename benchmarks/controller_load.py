"""The controller with 512 rollouts at a time: does its event loop stay free, does the recorder keep up, is memory flat?

    python -m benchmarks.controller_load [--rollouts 512] [--steps 6] [--workers 0] [--turns 5] [--screen-kb 300]

Everything of the controller is real: asynchronous loop, rollouts, agent, gateway, renderer, HTTP client, recorder and
Postgres. The model is a process that answers every request with the same click after 4 s on average (lognormal); phones
are far away: an action and a screenshot take 2 s each (lognormal); the trainer computes nothing. Screenshots have
`--screen-kb`, and no two are alike. Every rollout takes `--turns`, and its prompts hold all its screenshots. No figure
is printed unless every turn has clicked, has a screenshot before and after, and the longest prompt held that many.
With `--workers`, rollouts run in that many processes; the turns of each per second of processor time are more figures.
`--slow 4` makes model and phones four times as slow, where the machine cannot do as many turns at a time. `--seconds
600` goes on for so long, however many steps that takes. Memory and the recorder's backlog (events that are not durable
yet) are noted every 10 s in each process.
One JSON line per figure. `lag` is how much later than asked a sleep of 50 ms ends, over the whole run; the limit beside
it is what the same sleep costs in a loop that does nothing else, on the same machine at the same time.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from zlib import crc32

import psutil
import uvicorn

from benchmarks.async_against_sync import SlowPolicy
from cua_rl.agent.gbox_agent import GBoxAgent
from cua_rl.cluster import Actor, open_cluster
from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.database.rows import Scope
from cua_rl.database.writer import write_worker_events
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.pool import DevicePool, DeviceRequest
from cua_rl.events import Event, Recorder, TrainingStarted, TurnTaken
from cua_rl.models import TINY_QWEN3_VL
from cua_rl.planning.fleet import Spread
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.renderers.renderer import make_renderer
from cua_rl.rl.async_loop import train
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import LoopParts
from cua_rl.rollout.group import Runner
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.rollout.run import RolloutJob, RolloutRunner
from cua_rl.run.rollouts import freeze_loaded_objects
from cua_rl.sampling.client import SamplingClient, ServerReply
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.gateway import Gateway
from cua_rl.sampling.server import ExternalServer, ServedModel, VllmServer
from cua_rl.task_loader import TaskSet, load_tasks
from cua_rl.training.config import LossConfig
from cua_rl.training.wire import ForwardBackwardOutput
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.rollout import AdapterRef, Datum, Reward, SamplingParams
from cua_rl.workers.fleet import End, Fleet
from cua_rl.workers.worker import FLUSH_LINGER_S, LINGER_S, RolloutWorker, Workplace
from tests.fakes import FakeDevice, FakeTrainer
from tests.rl.test_sync_loop import Log, settings
from tests.sampling.fake_vllm import FakeVllm

PARAMS = SamplingParams(max_tokens=64, temperature=1.0)
MODEL_S, DEVICE_S, GROUP_SIZE = 4.0, 2.0, 8
NUM_SCREENS = 32
WATCH_S = 10.0
MAX_LAG = 6
SLEEP_S = 0.05  # one of 10 ms costs as much processor time as what it measures: 1 % of a core
CLICK = '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [500, 125]}}\n</tool_call>'


class SlowSampler(SamplingClient):
    """Waits before every request, so that the controller and not the model is what is measured."""

    random = Random(0)
    slow = 1.0

    async def respond(
        self, path: str, payload: Mapping[str, object], *, adapter: AdapterRef | None = None, sticky_key: str = ""
    ) -> ServerReply:
        await asyncio.sleep(Spread(mean=MODEL_S * self.slow, sigma=0.5).draw(self.random))
        return await super().respond(path, payload, adapter=adapter, sticky_key=sticky_key)


class AnnouncedPolicy(SlowPolicy):
    """Also names the policy to the model, so that turns have its version."""

    def __init__(self, trainer: FakeTrainer, sampler: SamplingClient) -> None:
        super().__init__(trainer)
        self.sampler = sampler

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        self.sampler.current = await super().serve(saved)
        return self.sampler.current


class RemotePhone(FakeDevice):
    """Hands out screenshots that somebody else has drawn, each unlike all others."""

    random = Random(2)

    def __init__(self, screens: Sequence[EncodedImage], num_bytes: int, slow: float) -> None:
        super().__init__()
        self._screens = screens
        self._num_bytes = num_bytes
        self._slow = slow

    async def observe(self) -> EncodedImage:
        await asyncio.sleep(Spread(mean=DEVICE_S * self._slow, sigma=0.5).draw(self.random))
        return padded(self.random.choice(self._screens), self._num_bytes, self.random)

    async def execute(self, action: Action) -> None:
        await asyncio.sleep(Spread(mean=DEVICE_S * self._slow, sigma=0.5).draw(self.random))

    async def query(self, name: str) -> str:
        return ""


class IdleTrainer(FakeTrainer):
    """Computes in a thread what a real one computes in its own process."""

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **weights: object
    ) -> ForwardBackwardOutput:
        rows = await asyncio.to_thread(self._rows, datums)
        return ForwardBackwardOutput(training_logprobs=rows, metrics={"loss/policy": 0.0})


def padded(screen: EncodedImage, num_bytes: int, random: Random) -> EncodedImage:
    """The screenshot with a private chunk of noise before its end: large as a detailed one, unlike all others."""
    body, end = screen.data[:-12], screen.data[-12:]  # IEND is always 12 bytes
    noise = b"noIs" + random.randbytes(max(16, num_bytes - len(screen.data) - 12))
    chunk = (len(noise) - 4).to_bytes(4) + noise + crc32(noise).to_bytes(4)
    return replace(screen, data=body + chunk + end)


class CountingRecorder:
    """Counts turns on their way to the database, and those that did what is to be timed."""

    def __init__(self, inner: DatabaseRecorder) -> None:
        self.inner = inner
        self.waits_s: list[float] = []
        self.num_turns = self.num_clicks = self.most_screens = 0

    async def record(self, event: Event) -> None:
        if isinstance(event, TurnTaken):
            agent, model = event.turn.agent, event.turn.model
            self.num_turns += 1
            self.num_clicks += None not in (agent.action, agent.before, agent.after)
            self.most_screens = max(self.most_screens, len(model.prompt.images))
        clock = time.perf_counter()
        await self.inner.record(event)
        self.waits_s.append(time.perf_counter() - clock)

    async def flush(self) -> None:
        await self.inner.flush()


@dataclass
class Watched:
    """What a process holds, every `WATCH_S` seconds."""

    rss_mib: list[int] = field(default_factory=list[int])
    backlog: list[int] = field(default_factory=list[int])

    async def watch(self, recorder: DatabaseRecorder) -> None:
        """Note it until cancelled."""
        while True:
            self.rss_mib.append(round(psutil.Process().memory_info().rss / 2**20))
            self.backlog.append(recorder.backlog)
            await asyncio.sleep(WATCH_S)


async def watch_lag(lags_s: list[float]) -> None:
    """Sleep again and again and note how late each sleep ends."""
    while True:
        clock = time.perf_counter()
        await asyncio.sleep(SLEEP_S)
        lags_s.append(time.perf_counter() - clock - SLEEP_S)


async def idle_lag(seconds: float) -> list[float]:
    """The same in a loop of its own, in a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.controller_load", "--only-lag", str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return json.loads(output)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run and print."""
    num_steps = options.steps if options.seconds is None else 1_000_000
    renderer = make_renderer(TINY_QWEN3_VL)
    trainer, log, watched = IdleTrainer(), Log(), Watched()
    async with (
        AsyncExitStack() as stack,
        EmbeddedPostgres(folder / "postgres", folder / "postgres.log") as postgres,
        VllmServer(ServerConfig(model_path=TINY_QWEN3_VL), folder / "server.log", make_command=serve_command) as server,
        SlowSampler(server) as sampler,
    ):
        await migrate(postgres.url)
        linger_s = LINGER_S if options.workers else 0.0
        async with DatabaseRecorder(
            postgres.url, image_token_id=renderer.image_token_id, linger_s=linger_s
        ) as database:
            recorder = CountingRecorder(database)
            started = TrainingStarted(
                run_name="load", log_path=str(folder), config={}, first_step=1, total_steps=num_steps
            )
            await recorder.record(started)

            parts = LoopParts(
                tasks=load_demo(options),
                runner=await start_runner(stack, options, sampler, recorder, postgres.url, folder),
                trainer=trainer,
                policy=AnnouncedPolicy(trainer, sampler),
                evaluator=None,
                recorder=recorder,
                log=log,
            )
            chosen = settings(
                max_steps=num_steps,
                groups_per_batch=options.rollouts // (2 * GROUP_SIZE),
                group_size=GROUP_SIZE,
                save_every=0,
                image_token_id=renderer.image_token_id,
            )
            lags_s: list[float] = []
            watchers = [asyncio.create_task(watch_lag(lags_s)), asyncio.create_task(watched.watch(database))]
            idle = asyncio.create_task(idle_lag(20.0))
            clock, cpu = time.perf_counter(), time.process_time()
            freeze_loaded_objects()
            limit = RolloutLimit(largest=options.rollouts)
            with suppress(TimeoutError):
                async with asyncio.timeout(options.seconds):
                    await train(chosen, parts, max_lag=min(num_steps, MAX_LAG), limit=limit)
            seconds, cpu_s = time.perf_counter() - clock, time.process_time() - cpu
            for watcher in watchers:
                watcher.cancel()
            clock = time.perf_counter()
            await recorder.flush()
            flush_s = time.perf_counter() - clock
        await stack.aclose()
    files = [folder / f"worker-{number}.json" for number in range(options.workers)]
    workers = [json.loads(await asyncio.to_thread(file.read_text)) for file in files]
    counts = workers or [vars(recorder)]
    num_turns = sum(count["num_turns"] for count in counts)
    require_clicks(counts, options.turns)
    report(options, num_turns, seconds, cpu_s, flush_s, lags_s, await idle, recorder, log, watched)
    for worker in workers:
        print(json.dumps(worker), flush=True)


def require_clicks(counts: Sequence[Mapping[str, int]], num_screens: int) -> None:
    """Refuse figures of turns that did not do what is timed."""
    for count in counts:
        if count["num_clicks"] < count["num_turns"] or count["most_screens"] != num_screens:
            raise SystemExit(
                f"expected a click and two screenshots in every turn, and {num_screens} in the longest prompt, got "
                f"{count['num_clicks']} clicks in {count['num_turns']} turns and {count['most_screens']} screenshots"
            )


async def start_runner(
    stack: AsyncExitStack,
    options: argparse.Namespace,
    sampler: SlowSampler,
    recorder: CountingRecorder,
    database_url: str,
    folder: Path,
) -> Runner:
    """Workers that end with the stack, or a runner in this process."""
    if not options.workers:
        sampler.slow = options.slow
        return await make_runner(sampler, recorder, options)
    await recorder.flush()
    return await stack.enter_async_context(open_workers(options, sampler, recorder, database_url, folder))


def load_demo(options: argparse.Namespace) -> TaskSet:
    """The tasks of the run."""
    tasks = load_tasks({"source_type": "demo_training", "tags": ["demo"]}, seed=0, split="train")
    return replace(tasks, templates=tuple(replace(one, max_turns=options.turns) for one in tasks.templates))


async def make_runner(sampler: SamplingClient, recorder: Recorder, options: argparse.Namespace) -> RolloutRunner:
    """Everything real but the phones and the reward."""
    rng = Random(1)
    shown = load_tasks({"source_type": "demo_eval", "tags": ["demo"]}, seed=0, split="eval")
    screens = [await make_simulated_phone(task).observe() for task in shown.held_out(NUM_SCREENS)]

    async def make_phone(_: DeviceRequest) -> RemotePhone:
        return RemotePhone(screens, 1024 * options.screen_kb, options.slow)

    return RolloutRunner(
        devices=DevicePool(make_phone, max_devices=options.rollouts),
        gateway=Gateway(sampler, make_renderer(TINY_QWEN3_VL), PARAMS),
        agent=GBoxAgent(),
        reward=lambda evidence: Reward(total=float(rng.random() < 0.5), parts={}),
        recorder=recorder,
        max_turns=options.turns,
    )


@asynccontextmanager
async def open_workers(
    options: argparse.Namespace,
    sampler: SamplingClient,
    recorder: CountingRecorder,
    database_url: str,
    folder: Path,
) -> AsyncGenerator[Fleet]:
    """Workers on a Ray cluster of this machine, which write their figures to `folder` when the run is over."""
    names = [f"worker-{number}" for number in range(options.workers)]
    fleet = Fleet(sampler, recorder, names)
    given = argparse.Namespace(**{**vars(options), "rollouts": -(-options.rollouts // options.workers)})
    async with open_cluster(folder, num_cpus=options.workers) as cluster:
        actors: list[Actor] = []
        serving: list[asyncio.Task[End]] = []
        for name in names:
            opening = partial(
                open_place,
                given,
                sampler.addresses[0],
                sampler.namespace,
                database_url,
                recorder.inner.scope,
                folder / f"{name}.json",
            )
            actor = cluster.start(RolloutWorker, name, given.rollouts, opening, max_concurrency=2 * given.rollouts)
            await actor.call("open")
            actors.append(actor)
            serving.append(asyncio.create_task(fleet.serve(name, given.rollouts, actor)))
        try:
            yield fleet
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
            await asyncio.gather(*(actor.call("close") for actor in actors))


@asynccontextmanager
async def open_place(
    options: argparse.Namespace,
    served: tuple[str, str | None, ServedModel],
    namespace: str,
    database_url: str,
    scope: Scope,
    figures: Path,
) -> AsyncGenerator[Workplace]:
    """What a rollout worker needs, with phones that are far away."""
    templates = {template.task_id: template for template in load_demo(options).templates}

    def complete_job(job: RolloutJob) -> RolloutJob:
        return replace(job, task=templates[job.task.task_id].make_task(job.task.seed))

    address, key, _ = served
    async with (
        ExternalServer(address, api_key=key) as server,
        SlowSampler(server, namespace=namespace) as sampler,
        DatabaseRecorder(
            database_url,
            image_token_id=scope.image_token_id,
            scope=scope,
            write=write_worker_events,
            linger_s=LINGER_S,
            flush_linger_s=FLUSH_LINGER_S,
        ) as database,
    ):
        sampler.slow = options.slow
        recorder = CountingRecorder(database)
        runner = await make_runner(sampler, recorder, options)
        lags_s: list[float] = []
        watched = Watched()
        watchers = [asyncio.create_task(watch_lag(lags_s)), asyncio.create_task(watched.watch(database))]
        cpu = time.process_time()
        yield Workplace(runner=runner, recorder=recorder, policies=sampler, complete_job=complete_job)
        for watcher in watchers:
            watcher.cancel()
        figure = {
            "figure": "worker_turns",
            "num_turns": recorder.num_turns,
            "num_clicks": recorder.num_clicks,
            "most_screens": recorder.most_screens,
            "cpu_ms_per_turn": round(1000 * (time.process_time() - cpu) / max(1, recorder.num_turns), 1),
            "turns_per_s_one_core": round(recorder.num_turns / (time.process_time() - cpu), 1),
            "lag_p99_ms": round(1000 * percentile(lags_s, 0.99), 1),
            **asdict(watched),
        }
        await asyncio.to_thread(figures.write_text, json.dumps(figure))


def report(
    options: argparse.Namespace,
    num_turns: int,
    seconds: float,
    cpu_s: float,
    flush_s: float,
    lags_s: list[float],
    idle_lags_s: list[float],
    recorder: CountingRecorder,
    log: Log,
    watched: Watched,
) -> None:
    """Print one line per figure; `num_turns` are all that were recorded, also of rollouts that no step trained on."""
    common = {
        "num_rollouts_at_once": options.rollouts,
        "workers": options.workers,
        "turns": options.turns,
        "screen_kb": options.screen_kb,
        "load": round(os.getloadavg()[0], 1),
    }
    lag = {
        "figure": "controller_event_loop_lag",
        **{f"p{share:g}_ms": round(1000 * percentile(lags_s, share / 100), 1) for share in (50, 90, 99, 99.9)},
        "max_ms": round(1000 * max(lags_s), 1),
        "idle_p99_ms": round(1000 * percentile(idle_lags_s, 0.99), 1),
    }
    throughput = {
        "figure": "controller_turns",
        "turns_per_s": round(num_turns / seconds, 1),
        "cpu_ms_per_turn": round(1000 * cpu_s / num_turns, 1),
        "limit_turns_per_s_one_core": round(num_turns / cpu_s, 1),
        "num_turns": num_turns,
        "num_steps": len(log.steps),
        "num_faults": sum(metrics["rollout/num_faults"] for _, metrics in log.steps),
    }
    recorded = {
        "figure": "controller_recorder",
        "p99_wait_ms": round(1000 * percentile(recorder.waits_s, 0.99), 1),
        "flush_at_end_s": round(flush_s, 2),
    }
    memory = {"figure": "controller_memory", **asdict(watched)}
    for figure in (lag, throughput, recorded, memory):
        print(json.dumps(figure | common), flush=True)


def serve_command(config: ServerConfig, address: str) -> list[str]:
    """The model: this module as a process of its own."""
    return [sys.executable, "-m", "benchmarks.controller_load", "--serve", address.removeprefix("unix:")]


def main() -> None:
    """Measure, or be the model, or measure the idle lag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--screen-kb", type=int, default=10)
    parser.add_argument("--slow", type=float, default=1.0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--only-lag", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        fake = FakeVllm(load_qwen3_vl(TINY_QWEN3_VL), default_answer=CLICK, max_model_len=65536)
        uvicorn.run(fake.app(), uds=options.serve, log_level="warning")
        return
    if options.only_lag is not None:
        print(json.dumps(asyncio.run(only_lag(options.only_lag))))
        return
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(options, Path(folder)))


async def only_lag(seconds: float) -> list[float]:
    """Measure for a while."""
    lags_s: list[float] = []
    watcher = asyncio.create_task(watch_lag(lags_s))
    await asyncio.sleep(seconds)
    watcher.cancel()
    return lags_s


if __name__ == "__main__":
    main()
