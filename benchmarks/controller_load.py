"""The controller with many rollouts at a time: what a turn costs, does its event loop stay free, is memory flat?

    python -m benchmarks.controller_load [--rollouts 64] [--steps 2] [--turns 10] [--screen-kb 10 300 800] [--workers 0]

Everything of the controller is real: asynchronous loop, rollouts, agent, gateway, renderer, HTTP client, recorder and
Postgres. The model is a process that answers every request with the same click after 4 s on average (lognormal); phones
are far away: an action and a screenshot take 2 s each (lognormal); the trainer computes nothing. Screenshots have
`--screen-kb`, each of which is measured in processes of its own, and no two are alike. `--scale 6`
makes them 36 times as large, of 2,160 tokens instead of 60. Every rollout takes `--turns`, and its prompts hold all its
screenshots. No figure is printed unless the database has all of that.
With `--workers`, rollouts run in that many processes, as with `rollout_workers` of a run; the turns of each per second
of processor time are more figures. `--slow 4` makes model and phones four times as slow, where the machine cannot do as
many turns at a time. `--seconds 600` goes on for so long, however many steps that takes. Memory is noted every 10 s.
One JSON line per figure. `lag` is how much later than asked a sleep of 50 ms ends, over the whole run; the limit beside
it is what the same sleep costs in a loop that does nothing else, on the same machine at the same time.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import psycopg
import uvicorn
from starlette.requests import Request
from starlette.responses import Response

from benchmarks.async_against_sync import SlowPolicy
from benchmarks.claims import require
from benchmarks.far_phones import FarPhones, Screenshots, Watched, install, percentile, watch_lag
from benchmarks.screens_per_turn import CONTEXT, with_long_context
from cua_rl.database.migrations import migrate
from cua_rl.database.postgres import EmbeddedPostgres
from cua_rl.database.recorder import DatabaseRecorder
from cua_rl.events import Event, TrainingStarted
from cua_rl.host.processes import freeze_loaded_objects
from cua_rl.planning.fleet import Spread, controller_turn_s
from cua_rl.renderers.qwen3_vl import load_qwen3_vl
from cua_rl.rl.async_loop import train
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import LoopParts, LoopSettings
from cua_rl.rollout.limit import RolloutLimit
from cua_rl.run.prepared_training import PreparedTraining, prepare_training
from cua_rl.run.rollouts import sampling_params
from cua_rl.run.training import LINGER_S
from cua_rl.run.training_config import CLIConfig
from cua_rl.sampling.client import SamplingClient
from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.server import ExternalServer, VllmServer
from cua_rl.training.config import LossConfig
from cua_rl.training.wire import ForwardBackwardOutput
from cua_rl.types.rollout import AdapterRef, Datum
from cua_rl.workers.launch import Rollouts, open_local_devices, open_rollouts
from tests.fakes import FakeTrainer
from tests.rl.test_sync_loop import Log
from tests.sampling.fake_vllm import FakeVllm

MODEL_S, GROUP_SIZE, MAX_LAG = 4.0, 8, 6
CLICK = '<tool_call>\n{"name": "mobile_use", "arguments": {"action": "click", "coordinate": [500, 125]}}\n</tool_call>'


class FarVllm(FakeVllm):
    """Takes its time, and keeps of screenshots nothing but their names: this machine is the controller's."""

    random = Random(0)
    slow = 1
    stand_in = ""

    async def _responses(self, request: Request) -> Response:
        await asyncio.sleep(Spread(mean=MODEL_S * self.slow, sigma=0.5).draw(self.random))
        response = await super()._responses(request)
        self.requests.clear()
        return response

    def _with_images(self, content: Any) -> Any:
        if isinstance(content, dict) and content.get("type") == "input_image":
            content = content | {"image_url": content["image_url"] and self.stand_in}
        return super()._with_images(content)


@dataclass
class AnnouncedPolicy(SlowPolicy):
    """Also names the policy to the model and to workers, so that turns have its version."""

    def __init__(self, trainer: FakeTrainer, sampler: SamplingClient, rollouts: Rollouts) -> None:
        super().__init__(trainer)
        self.sampler, self.rollouts = sampler, rollouts

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        adapter = await super().serve(saved)
        await self.sampler.publish(adapter)  # on the server too: workers sample from no other
        self.rollouts.announce()
        return adapter


class IdleTrainer(FakeTrainer):
    """Computes in a thread what a real one computes in its own process."""

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **beside: Sequence[Any] | None
    ) -> ForwardBackwardOutput:
        rows = await asyncio.to_thread(self._rows, datums)
        return ForwardBackwardOutput(training_logprobs=rows, metrics={"loss/policy": 0.0})


class TimedRecorder(DatabaseRecorder):
    """Notes how long each event waits for its place in the queue."""

    waits_s: list[float]

    async def record(self, event: Event) -> None:
        clock = time.perf_counter()
        await super().record(event)
        self.waits_s.append(time.perf_counter() - clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The controller's own work, from the first rollout to the last row."""

    seconds: float
    cpu_s: float
    flush_s: float
    log: Log
    watched: Watched
    waits_s: list[float]
    turns: "Turns"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What the database says of all turns of a run."""

    num_turns: int
    clicks: int
    """Turns whose action is a click that the phone carried out."""
    screens_before: int
    screens_after: int
    """Different ones."""
    most_screens: int
    """Of one prompt."""
    screen_kb: float
    screen_tokens: int
    prompt_tokens: float
    """Of a prompt, mean."""


def load_turns(url: str) -> Turns:
    """Count what is in the database."""
    count = """SELECT count(*), count(*) FILTER (WHERE action->>'type' = 'Click' AND action_error IS NULL),
        count(before_sha256), count(DISTINCT after_sha256),
        max(jsonb_array_length(jsonb_path_query_array(prompt_chunks, '$[*] ? (exists (@.image))'))),
        (SELECT avg(octet_length(data)) FROM screenshots) / 1024,
        max((jsonb_path_query_first(prompt_chunks, '$[*] ? (exists (@.image)).tokens'))::int),
        avg(cardinality(prompt_token_ids)) FROM turns"""
    names = tuple(one.name for one in fields(Turns))
    with psycopg.connect(url) as connection:
        row = connection.execute(count).fetchone() or ()
    return Turns(**{name: value or 0 for name, value in zip(names, row, strict=True)})


def require_turns(turns: Turns, *, num_screens: int, screen_kb: int) -> None:
    """Refuse figures of turns that did not do what is timed."""
    require(
        "turns",
        has_turns=(True, turns.num_turns > 0),
        clicks=(turns.num_turns, turns.clicks),
        screenshots_before=(turns.num_turns, turns.screens_before),
        different_screenshots_after=(turns.num_turns, turns.screens_after),
        screenshots_of_the_longest_prompt=(num_screens, turns.most_screens),
        kb_of_a_screenshot=(screen_kb, round(turns.screen_kb)),
    )


async def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run in `folder`, where the package with the phones is installed, and print."""
    (screen_kb,) = options.screen_kb
    model = with_long_context(folder / "model")
    figures = folder / "figures"
    figures.mkdir()
    async with (
        EmbeddedPostgres(folder / "postgres", folder / "postgres.log") as postgres,
        VllmServer(
            ServerConfig(model_path=model, port=0), folder / "server.log", make_command=serve_command(options)
        ) as server,
    ):
        await migrate(postgres.url)
        phones = {name: getattr(options, name) for name in ("turns", "scale", "slow")}
        tasks = {"source_type": "far_phones", "screen_kb": screen_kb, **phones}
        config = CLIConfig(
            model_name=str(model),
            base_url=server.base_url,
            tasks=tasks | ({"figures": str(figures)} if options.workers else {}),
            eval_tasks=None,
            log_path=str(folder / "run"),
            max_steps=options.steps if options.seconds is None else 1_000_000,
            max_turns=options.turns,
            max_tokens=64,
            max_steps_off_policy=MAX_LAG,
            loss=LossConfig(name="ppo"),
            max_concurrent_rollouts=options.rollouts,
            groups_per_batch=options.rollouts // (2 * GROUP_SIZE),
            group_size=GROUP_SIZE,
            save_every=0,
            rollout_workers=options.workers,
            server=ServerConfig(max_model_len=CONTEXT, max_images=options.turns),
        )
        prepared = await prepare_training(config, {})
        idle = asyncio.create_task(idle_lag(20.0))
        measured = await run(options, prepared, postgres.url)
    require_turns(measured.turns, num_screens=options.turns, screen_kb=screen_kb)
    report(options, measured, await idle)
    workers = [json.loads(await asyncio.to_thread(file.read_text)) for file in sorted(figures.iterdir())]
    require("rollout workers", without_a_turn=(0, sum(not worker["num_actions"] for worker in workers)))
    for worker in workers:
        report_worker(worker)


async def run(options: argparse.Namespace, prepared: PreparedTraining, url: str) -> Measured:
    """Train for the steps, or until the time is over."""
    config, trainer, log = prepared.config, IdleTrainer(), Log()
    async with AsyncExitStack() as stack:
        recorder = TimedRecorder(url, image_token_id=prepared.renderer.image_token_id, linger_s=LINGER_S)
        recorder.waits_s = []
        await stack.enter_async_context(recorder)
        path, num_steps = str(prepared.log_path), config.max_steps
        started = TrainingStarted(run_name="load", log_path=path, config={}, first_step=1, total_steps=num_steps)
        await recorder.record(started)
        await recorder.flush()
        assert config.base_url is not None
        server = await stack.enter_async_context(ExternalServer(config.base_url))
        sampler = await stack.enter_async_context(SamplingClient(server))
        devices = await open_local_devices(stack, prepared)
        rollouts = await open_rollouts(stack, prepared, sampler, recorder, recorder, url, devices)
        watched = Watched()
        if isinstance(prepared.devices.backend, FarPhones) and devices is not None:
            watched = prepared.devices.backend.watched  # in this process
        else:
            await stack.enter_async_context(watched.watching(None))
        parts = LoopParts(
            tasks=prepared.train_tasks,
            runner=rollouts.for_training,
            trainer=trainer,
            policy=AnnouncedPolicy(trainer, sampler, rollouts),
            evaluator=None,
            recorder=recorder,
            log=log,
        )
        settings = LoopSettings(
            config=config,
            params=sampling_params(config, config.temperature),
            image_token_id=prepared.renderer.image_token_id,
        )
        freeze_loaded_objects()
        clock, cpu = time.perf_counter(), time.process_time()
        with suppress(TimeoutError):
            async with asyncio.timeout(options.seconds):
                limit = RolloutLimit(largest=options.rollouts)
                await train(settings, parts, max_lag=min(config.max_steps, MAX_LAG), limit=limit)
        flush = time.perf_counter()
        await recorder.flush()
        ended = time.perf_counter()
        cpu_s = time.process_time() - cpu
        watched.settle()
    return Measured(
        seconds=ended - clock,
        cpu_s=cpu_s,
        flush_s=ended - flush,
        log=log,
        watched=watched,
        waits_s=recorder.waits_s,
        turns=await asyncio.to_thread(load_turns, url),
    )


def report(options: argparse.Namespace, measured: Measured, idle_lags_s: list[float]) -> None:
    """Print one line per figure of the controller."""
    common = {
        "num_rollouts_at_once": options.rollouts,
        "workers": options.workers,
        "turns": options.turns,
        "screen_kb": options.screen_kb[0],
        "screen_tokens": measured.turns.screen_tokens,
        "prompt_tokens": round(measured.turns.prompt_tokens),
        "load": round(os.getloadavg()[0], 1),
    }
    num_turns, cpu_s, lags_s = measured.turns.num_turns, measured.cpu_s, measured.watched.lags_s
    predicted_s = controller_turn_s(options.screen_kb[0], float(measured.turns.prompt_tokens))
    lag = {
        "figure": "controller_event_loop_lag",
        **{f"p{share:g}_ms": round(1000 * percentile(lags_s, share / 100), 1) for share in (50, 90, 99, 99.9)},
        "max_ms": round(1000 * max(lags_s), 1),
        "idle_p99_ms": round(1000 * percentile(idle_lags_s, 0.99), 1),
    }
    throughput = {
        "figure": "controller_turns",
        "turns_per_s": round(num_turns / measured.seconds, 1),
        "cpu_ms_per_turn": round(1000 * cpu_s / num_turns, 1),
        "predicted_cpu_ms_per_turn": None if options.workers else round(1000 * predicted_s, 1),
        "limit_turns_per_s_one_core": round(num_turns / cpu_s, 1),
        "num_turns": num_turns,
        "num_steps": len(measured.log.steps),
        "num_faults": sum(metrics["rollout/num_faults"] for _, metrics in measured.log.steps),
    }
    recorded = {
        "figure": "controller_recorder",
        "p99_wait_ms": round(1000 * percentile(measured.waits_s, 0.99), 1),
        "flush_at_end_s": round(measured.flush_s, 2),
    }
    memory = {"figure": "controller_memory", "rss_mib": measured.watched.rss_mib}
    for figure in (lag, throughput, recorded, memory):
        print(json.dumps(figure | common), flush=True)


def report_worker(figures: Mapping[str, Any]) -> None:
    """Print what one process took from its first action to its last note."""
    figure = {
        "figure": "worker_turns",
        "num_turns": figures["num_actions"],
        "cpu_ms_per_turn": round(1000 * figures["cpu_s"] / figures["num_actions"], 1),
        "turns_per_s_one_core": round(figures["num_actions"] / figures["cpu_s"], 1),
        "lag_p99_ms": figures["lag_p99_ms"],
        "rss_mib": figures["rss_mib"],
    }
    print(json.dumps(figure), flush=True)


async def idle_lag(seconds: float) -> list[float]:
    """The lag in a loop of its own, in a process that does nothing else."""
    command = [sys.executable, "-m", "benchmarks.controller_load", "--only-lag", str(seconds)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return json.loads(output)


async def only_lag(seconds: float) -> list[float]:
    """Measure for a while."""
    lags_s: list[float] = []
    watcher = asyncio.create_task(watch_lag(lags_s))
    await asyncio.sleep(seconds)
    watcher.cancel()
    return lags_s


def serve_command(options: argparse.Namespace) -> Any:
    """For `VllmServer(make_command=...)`: this module as a process of its own."""
    this = [sys.executable, "-m", "benchmarks.controller_load", f"--slow={options.slow}", f"--scale={options.scale}"]
    return lambda config, address: [*this, "--serve", str(config.model_path), address.rpartition(":")[2]]


def serve(model: str, place: str, options: argparse.Namespace) -> None:
    """Be the model."""
    fake = FarVllm(load_qwen3_vl(Path(model)), default_answer=CLICK, max_model_len=CONTEXT)
    fake.slow, fake.stand_in = options.slow, Screenshots(0, options.scale).draw().data_url()
    listens: dict[str, Any] = {"uds": place} if "/" in place else {"port": int(place)}
    uvicorn.run(fake.app(), **listens, log_level="warning")


def main() -> None:
    """Measure each size of screenshots in a process of its own, or be such a process, the model, or an idle loop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--screen-kb", type=int, nargs="+", default=[10, 300, 800])
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--slow", type=int, default=1)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only-lag", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        model, place = options.serve
        serve(model, place, options)
    elif options.only_lag is not None:
        print(json.dumps(asyncio.run(only_lag(options.only_lag))))
    elif options.folder is not None:
        asyncio.run(measure(options, options.folder))
    else:
        for screen_kb in options.screen_kb:
            folder = Path(tempfile.mkdtemp(prefix="controller_load_"))
            command = [sys.executable, "-m", "benchmarks.controller_load", *sys.argv[1:], "--folder", str(folder)]
            environment = os.environ | {"PYTHONPATH": install(folder)}
            try:
                subprocess.run([*command, "--screen-kb", str(screen_kb)], env=environment, check=True)
            finally:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
