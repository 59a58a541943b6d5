"""Runs the training loops in virtual time, on devices, a model server and a trainer that only consume virtual time."""

import asyncio
import gc
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from cua_rl.events import Event, Phase, StepTrained
from cua_rl.planning.fleet import DeviceTime, Scenario
from cua_rl.planning.station import Station
from cua_rl.planning.virtual_time import run_in_virtual_time
from cua_rl.reporting.comparison import EvalResult
from cua_rl.rl import async_loop, sync_loop
from cua_rl.rl.config import LoopConfig, SamplingSettings
from cua_rl.rl.served_policy import SavedPolicy
from cua_rl.rl.stages import LoopParts, LoopSettings
from cua_rl.rollout.limit import LimitedRunner, RolloutLimit
from cua_rl.rollout.run import RolloutJob
from cua_rl.tasks.task import Task
from cua_rl.training.config import LossConfig, OptimConfig, TrainerConfig
from cua_rl.training.wire import ForwardBackwardOutput, OptimStepOutput
from cua_rl.types.rollout import (
    AdapterRef,
    AgentTurn,
    Datum,
    EncodedTextChunk,
    ModelInput,
    ModelTurn,
    Reward,
    Rollout,
    SamplingParams,
    StopReason,
    Turn,
)

_MAX_STEPS, _MAX_ROLLOUTS = 24, 6_000  # three seconds of a processor; of fewer steps, rates vary by some percent
_IMAGE_TOKEN = -1  # no prompt of a simulation has images


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The state of a simulation at the end of a step; sums since its beginning."""

    at_s: float
    server_busy_s: float
    """Sum over all copies of the model."""
    trainer_busy_s: float
    device_busy_s: float
    policy_lag_mean: float
    policy_lag_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run does between the ends of two of its steps."""

    steps_per_hour: float
    rollouts_per_hour: float
    """Rollouts that are trained on."""
    server_busy_frac: float
    trainer_busy_frac: float
    device_busy_frac: float
    """Share of the devices' time in leases."""
    policy_lag_mean: float
    policy_lag_max: float


def simulate(scenario: Scenario, num_steps: int, *, goes_on: bool = False) -> list[StepEnd]:
    """The ends of the first steps of a run, which ends with them or continues."""
    gc.disable()  # a simulation makes millions of objects and hardly a cycle
    try:
        return run_in_virtual_time(_run(scenario, num_steps, goes_on=goes_on))
    finally:
        gc.enable()


def predict(scenario: Scenario) -> Prediction:
    """A run in its steady state; of large batches, fewer steps are simulated.

    The steps of an asynchronous run are short and long in turn: the batches that may be in progress begin together, and
    follow each other in that order. So the window is a multiple of their number, after the first two rounds.
    """
    num_batches = scenario.schedule.max_lag + 1
    first = 2 * num_batches - 1 if scenario.schedule.max_lag else 0
    num_steps = max(2, min(_MAX_STEPS, _MAX_ROLLOUTS // scenario.schedule.rollouts_per_step))
    num_steps = num_batches * max(1, round(num_steps / num_batches))
    ends = simulate(scenario, first + 1 + num_steps, goes_on=True)
    return summarise(scenario, ends, first=first, last=first + num_steps)


def summarise(scenario: Scenario, ends: Sequence[StepEnd], *, first: int, last: int) -> Prediction:
    """What happens from the end of one step to that of another one, by their places in `ends`."""
    fleet, before, after = scenario.fleet, ends[first], ends[last]
    hours, seconds = (after.at_s - before.at_s) / 3600, after.at_s - before.at_s
    window = ends[first + 1 : last + 1]
    return Prediction(
        steps_per_hour=(last - first) / hours,
        rollouts_per_hour=(last - first) * scenario.schedule.rollouts_per_step / hours,
        server_busy_frac=(after.server_busy_s - before.server_busy_s) / seconds / fleet.placement.num_servers,
        trainer_busy_frac=(after.trainer_busy_s - before.trainer_busy_s) / seconds,
        device_busy_frac=(after.device_busy_s - before.device_busy_s) / seconds / fleet.num_devices,
        policy_lag_mean=sum(end.policy_lag_mean for end in window) / len(window),
        policy_lag_max=max(end.policy_lag_max for end in window),
    )


async def _run(scenario: Scenario, num_steps: int, *, goes_on: bool) -> list[StepEnd]:
    world, schedule = _World(scenario, num_steps), scenario.schedule
    limit = RolloutLimit(largest=scenario.fleet.num_devices)
    settings = LoopSettings(
        config=LoopConfig(
            max_steps=num_steps + (schedule.max_lag + 1 if goes_on else 0),
            groups_per_batch=schedule.groups_per_batch,
            group_size=schedule.group_size,
            loss=LossConfig(name="ppo"),
            trainer=TrainerConfig(parity_limit=1.0),
            sampling=SamplingSettings(min_group_size=1),
            eval_every=0,
            save_every=0,
            num_groups_to_log=0,
        ),
        params=SamplingParams(max_tokens=1, temperature=1.0),
        image_token_id=_IMAGE_TOKEN,
    )
    runner = _Runner(world)
    parts = LoopParts(
        tasks=_Tasks(),
        runner=runner if schedule.max_lag else LimitedRunner(runner, limit),
        trainer=_Trainer(world),
        policy=_Policy(world),
        evaluator=None,
        recorder=world,
        log=world,
    )
    if schedule.max_lag:
        loop = asyncio.create_task(async_loop.train(settings, parts, max_lag=schedule.max_lag, limit=limit))
    else:
        loop = asyncio.create_task(sync_loop.train(settings, parts))
    seen = asyncio.create_task(world.seen.wait())
    await asyncio.wait((loop, seen), return_when=asyncio.FIRST_COMPLETED)
    for task in (loop, seen):
        task.cancel()
    with suppress(asyncio.CancelledError):
        await loop
    return world.step_ends


class _World:
    """The hardware of a simulation, and the log of its steps; as recorder, it only consumes the time after a step."""

    def __init__(self, scenario: Scenario, num_steps: int) -> None:
        fleet, placed = scenario.fleet, scenario.fleet.placement
        self.num_steps = num_steps
        self.seen = asyncio.Event()
        """Set when so many steps have ended."""
        self.scenario = scenario
        self.servers = [
            Station(alone_s=fleet.server.alone_s, each_s=fleet.server.each_s, capacity=placed.max_requests)
            for _ in range(placed.num_servers)
        ]
        self.trainer = Station(alone_s=1.0, each_s=0.0)
        self.devices = Station(alone_s=0.0, each_s=1.0)
        """The processor that they share."""
        self.controller = Station(alone_s=0.0, each_s=1.0 / fleet.num_controllers)
        if placed.is_shared:
            # without GPUs, devices that compute do so on the processor of server and trainer
            self.trainer.neighbours = self.servers if placed.gpus_per_server else [*self.servers, self.devices]
            for neighbour in self.trainer.neighbours:
                neighbour.neighbours = [self.trainer]
        self.served_version = 0
        self.tokens: dict[str, float] = {}
        """Per rollout that has not been trained on, the length of its training sequence."""
        self.num_rollouts = [0] * placed.num_servers
        """Rollouts in progress, per copy of the model."""
        self.device_busy_s = 0.0
        """Ends of leases less beginnings: negative while there are leases."""
        self.step_ends: list[StepEnd] = []

    async def use_device(self, time: DeviceTime, random: Random) -> None:
        """Consume the time of a device operation."""
        await asyncio.sleep(time.own.draw(random))
        if time.computed.mean:
            await self.devices.work(time.computed.draw(random))

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        for station in (*self.servers, self.trainer):
            station.settle()
        self.step_ends.append(
            StepEnd(
                at_s=asyncio.get_running_loop().time(),
                server_busy_s=sum(server.busy_s for server in self.servers),
                trainer_busy_s=self.trainer.busy_s,
                device_busy_s=self.device_busy_s + sum(self.num_rollouts) * asyncio.get_running_loop().time(),
                policy_lag_mean=metrics.get("rollout/policy_lag/mean", 0.0),
                policy_lag_max=metrics.get("rollout/policy_lag/max", 0.0),
            )
        )
        if len(self.step_ends) == self.num_steps:
            self.seen.set()

    def log_group(self, index: int, rewards: Sequence[float]) -> None: ...

    def log_evaluation(self, phase: Phase, step: int, result: EvalResult) -> None: ...

    async def record(self, event: Event) -> None:
        if isinstance(event, StepTrained):
            await asyncio.sleep(self.scenario.schedule.rollouts_per_step * self.scenario.fleet.overhead_s)

    async def flush(self) -> None: ...


@dataclass
class _Runner:
    """Runs rollouts that only consume virtual time, a function of task instance and member alone."""

    world: _World

    async def run(self, job: RolloutJob) -> Rollout:
        world, work = self.world, self.world.scenario.workload
        loop, random = asyncio.get_running_loop(), Random(f"{job.task.seed}-{job.member_index}")
        began, versions = loop.time(), list[int]()
        num_turns = random.choice(work.turns)
        copy = min(range(len(world.servers)), key=lambda index: world.num_rollouts[index])
        world.num_rollouts[copy] += 1
        world.device_busy_s -= began
        for turn in range(num_turns):
            await world.use_device(work.turn if turn else work.start, random)
            if work.controller_s:
                await world.controller.work(work.controller_s)
            versions.append(world.served_version)
            await world.servers[copy].work(work.request_work.draw(random))
        await world.use_device(work.end, random)
        world.num_rollouts[copy] -= 1
        ended = loop.time()
        world.device_busy_s += ended
        rollout_id = f"{job.group_id}-{job.member_index}"
        world.tokens[rollout_id] = work.prompt_tokens + num_turns * work.turn_tokens
        is_constant = Random(job.task.seed).random() < work.constant_group_frac
        return _rollout(job, rollout_id, versions, 0.0 if is_constant else float(job.member_index % 2), ended - began)


@dataclass
class _Trainer:
    """Consumes the time of a step's tokens; its log-probabilities are the server's."""

    world: _World
    policy_version: int = 0

    async def begin_step(self) -> None:
        return

    async def forward(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        return [datum.sampling_logprobs for datum in datums]

    async def reference_logprobs(self, datums: Sequence[Datum], *, temperature: float = 1.0) -> list[tuple[float, ...]]:
        return await self.forward(datums)

    async def forward_backward(
        self, datums: Sequence[Datum], loss: LossConfig, **beside: Sequence[Any] | None
    ) -> ForwardBackwardOutput:
        num_tokens = sum(self.world.tokens.pop(datum.rollout_id) for datum in datums)
        await self.world.trainer.work(self.world.scenario.fleet.train_s(num_tokens))
        rows = tuple(datum.sampling_logprobs for datum in datums)
        return ForwardBackwardOutput(training_logprobs=rows, metrics={})

    async def optim_step(self, optim: OptimConfig) -> OptimStepOutput:
        self.policy_version += 1
        return OptimStepOutput(
            policy_version=self.policy_version, grad_norm=1.0, learning_rate=optim.learning_rate, num_trained_tokens=1
        )

    async def trainer_metrics(self) -> dict[str, float]:
        return {}


@dataclass
class _Policy:
    """Consumes the time of saving and publishing; meanwhile, the previous policy is sampled."""

    world: _World
    num_saved: int = 0

    async def publish(self, step: int) -> AdapterRef:
        return await self.serve(await self.save(step))

    async def save(self, step: int) -> SavedPolicy:
        await asyncio.sleep(self.world.scenario.fleet.save_s)
        adapter = AdapterRef(path=Path(str(step)), policy_version=self.num_saved)
        self.num_saved += 1
        return SavedPolicy(step=step, adapter=adapter, canary=None)

    async def serve(self, saved: SavedPolicy) -> AdapterRef:
        await asyncio.sleep(self.world.scenario.fleet.publish_s)
        self.world.served_version = saved.adapter.policy_version
        return saved.adapter

    @contextmanager
    def hold(self, adapter: AdapterRef) -> Generator[None]:
        yield

    async def save_checkpoint(self, step: int, *, is_interim: bool) -> tuple[Path, Path]:
        return Path(), Path()


class _Tasks:
    """Every place of the run has its own seed."""

    def batch(self, number: int, num_tasks: int) -> list[Task]:
        return [
            Task(
                task_id="simulated",
                seed=number * num_tasks + index,
                instruction="",
                category="app",
                difficulty="easy",
                max_turns=1,
                validate=None,
            )
            for index in range(num_tasks)
        ]


def _rollout(job: RolloutJob, rollout_id: str, versions: Sequence[int], reward: float, duration_s: float) -> Rollout:
    turns = tuple(_turn(index, version) for index, version in enumerate(versions))
    return Rollout(
        rollout_id=rollout_id,
        task_id=job.task.task_id,
        seed=job.task.seed,
        group_index=job.group_index,
        member_index=job.member_index,
        device_id=None,
        turns=turns,
        stop_reason=StopReason.FINISHED,
        answer=None,
        validation=None,
        reward=Reward(total=reward, parts={}),
        error=None,
        started_at=0.0,
        duration_s=duration_s,
    )


@cache
def _turn(index: int, policy_version: int) -> Turn:
    """A turn of one sampled token whose prompt extends the turn before."""
    model = ModelTurn(
        response_id="",
        prompt=ModelInput(chunks=(EncodedTextChunk(tokens=(0,) * (2 * index + 1)),)),
        sampled_tokens=(0,),
        sampling_logprobs=(-1.0,),
        policy_version=policy_version,
        stop="stop",
        text="",
        failure=None,
        prompt_matches_renderer=True,
        request={},
        started_at=0.0,
        duration_s=0.0,
    )
    return Turn(index=index, model=model, agent=AgentTurn(response_id="", before=None))
