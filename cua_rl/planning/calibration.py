"""Reads from recorded runs how long their parts took, and how that depended on concurrent work."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, pairwise
from statistics import fmean, median, pstdev
from typing import Any

from sqlalchemy import func, select

from cua_rl.database.models import Group, RolloutRow, Screenshot, Step, Training, TurnRow
from cua_rl.database.screenshots import SCREENSHOT_BYTES
from cua_rl.monitor.databases import Database
from cua_rl.planning.fleet import DeviceTime, Fleet, Placement, Speed, Spread, Workload, controller_turn_s
from cua_rl.sampling.config import DEFAULT_NUM_SEQS
from cua_rl.types.errors import ConfigError

_LARGEST_SIGMA = 2.0  # with a larger one, single outliers would dominate the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Start and end of an activity, Unix seconds."""

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRollout:
    """When a rollout ran, when the model was asked, and the step that trained it."""

    step: int
    run: Interval
    requests: tuple[Interval, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A training step: when it was complete, and its metrics."""

    step: int
    ended_at: datetime
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """What calibration needs of a run."""

    rollouts: tuple[RecordedRollout, ...]
    steps: tuple[RecordedStep, ...]
    group_size: int
    placement: Placement
    screen_kb: float  # mean

    @property
    def first_step(self) -> int:
        """The first recorded step, in which server, trainer and caches are cold."""
        return self.steps[0].step


async def load_recorded_run(database: Database, training_id: int, run: str) -> RecordedRun:
    """The completed steps of a run with their rollouts; raises `ConfigError` if there are too few."""
    steps = select(Step).where(Step.training_id == training_id, Step.ended_at.is_not(None)).order_by(Step.step)
    turns = (
        select(
            *(
                RolloutRow.id,
                RolloutRow.started_unix_s.label("rollout_s"),
                RolloutRow.duration_s.label("rollout_took_s"),
                Step.step,
            ),
            *(TurnRow.started_unix_s, TurnRow.duration_s),
        )
        .join(TurnRow, TurnRow.rollout_pk == RolloutRow.id)
        .join(Group, Group.id == RolloutRow.group_pk)
        .join(Step, Step.id == Group.step_id)
        .where(
            RolloutRow.training_id == training_id,
            RolloutRow.status == "completed",
            RolloutRow.duration_s.is_not(None),
            TurnRow.turn_index >= RolloutRow.fork_turn,  # those before are its parent's
        )
        .order_by(RolloutRow.id, TurnRow.turn_index)
    )
    screen_bytes = (
        select(func.avg(SCREENSHOT_BYTES))
        .join(TurnRow, TurnRow.after_sha256 == Screenshot.sha256)
        .join(RolloutRow, TurnRow.rollout_pk == RolloutRow.id)
        .where(RolloutRow.training_id == training_id)
    )
    async with database.sessions() as session:
        screen_kb = float(await session.scalar(screen_bytes) or 0) / 1024
        config = await session.scalar(select(Training.config).where(Training.id == training_id)) or {}
        ended = [
            RecordedStep(step=step.step, ended_at=step.ended_at, metrics={**step.metrics})
            for step in await session.scalars(steps)
            if step.ended_at is not None and step.metrics is not None
        ]
        by_rollout: dict[int, tuple[int, Interval, list[Interval]]] = {}
        for row in await session.execute(turns):
            lasted = Interval(start_s=row.rollout_s, end_s=row.rollout_s + row.rollout_took_s)
            request = Interval(start_s=row.started_unix_s, end_s=row.started_unix_s + row.duration_s)
            by_rollout.setdefault(row.id, (row.step, lasted, []))[2].append(request)
    if len(ended) < 2 or not by_rollout:
        raise ConfigError(
            f"from_run: expected a run with at least two completed steps, got {len(ended)} in {run!r}; name another one"
        )
    rollouts = tuple(
        RecordedRollout(step=step, run=lasted, requests=tuple(asked)) for step, lasted, asked in by_rollout.values()
    )
    return RecordedRun(
        rollouts=rollouts,
        steps=tuple(ended),
        group_size=config["group_size"],
        placement=_placement(config),
        screen_kb=screen_kb,
    )


def _placement(config: Mapping[str, Any]) -> Placement:
    """What the run's effective configuration says of it."""
    server, trainer = config["gpu_plan"]["server"], config["gpu_plan"]["trainer"]
    is_own = config["base_url"] is None
    return Placement(
        num_servers=server["copies"],
        gpus_per_server=server["tensor_parallel"] if server["gpus"] else 0,
        num_trainers=trainer["num_processes"],
        # without GPUs, both are on the processor of this machine
        is_shared=is_own and (not server["gpus"] or bool(set(server["gpus"]) & set(trainer["gpus"]))),
        max_requests=config["memory_plan"]["settings"].get("server.max_num_seqs", DEFAULT_NUM_SEQS),
    )


def calibrate(
    runs: Sequence[RecordedRun], *, group_size: int, num_devices: int, placement: Placement | None = None
) -> tuple[Workload, Fleet]:
    """How long the parts of these runs took from the second step on, and how many groups of this size are constant.

    Runs of different concurrency tell best how speed depends on it. Without a placement, it is the first run's.
    """
    requests, starts, betweens, tails = list[Load](), list[Load](), list[Load](), list[Load]()
    for run in runs:
        warm = _phases(rollout for rollout in run.rollouts if rollout.step > run.first_step)
        every = _phases(run.rollouts)
        requests += measure_loads(warm.requests, every.requests, num_places=run.placement.num_servers)
        starts += measure_loads(warm.starts, every.on_device)
        betweens += measure_loads(warm.betweens, every.on_device)
        tails += measure_loads(warm.tails, every.on_device)
    server, request_sigma = fit_speed(requests)
    device, _ = fit_speed([*starts, *betweens, *tails])
    computed_frac = device.each_s / device.request_s(1)
    warm_steps = [(run, step.metrics) for run in runs for step in run.steps[1:]]
    steps = [metrics for _, metrics in warm_steps]
    trained_s = sum(metrics.get("time/train_s", 0.0) * run.placement.num_trainers for run, metrics in warm_steps)
    trained_turns = sum(
        (step["rollout/num_rollouts"] * step["rollout/num_turns/mean"] - step.get("rollout/shared_turns", 0.0))
        * (1 - step["reward/constant_group_frac"])
        for step in steps
    )
    num_tokens = sum(step["rollout/datum_tokens"] for step in steps)
    turns = tuple(sorted(len(rollout.requests) for run in runs for rollout in run.rollouts))
    turn_tokens = num_tokens / max(1.0, trained_turns)
    # without GPUs, everything waits for one processor, and nothing tells the controller's time from the devices'
    measured_s = controller_turn_s(fmean(run.screen_kb for run in runs), fmean(turns) / 2 * turn_tokens)
    controller_s = measured_s if runs[0].placement.gpus_per_server else 0.0
    work = Workload(
        turns=turns,
        start=_device_time(starts, computed_frac, sigma=0.0, controller_s=controller_s),
        turn=_device_time(
            betweens, computed_frac, sigma=_sigma(_alone_s(betweens, computed_frac)), controller_s=controller_s
        ),
        end=_device_time(tails, computed_frac, sigma=0.0),
        request_work=Spread(mean=1.0, sigma=request_sigma),
        controller_s=controller_s,
        prompt_tokens=0.0,
        turn_tokens=turn_tokens,
        constant_group_frac=fmean(_constant_group_frac(run, group_size) for run in runs),
    )
    fleet = Fleet(
        num_devices=num_devices,
        placement=placement or runs[0].placement,
        server=server,
        trained_token_s=trained_s / max(1.0, num_tokens),
        save_s=_mean(steps, "time/save_s"),
        publish_s=_mean(steps, "time/publish_s"),
        overhead_s=_overhead_s(runs),
    )
    return work, fleet


def _overhead_s(runs: Sequence[RecordedRun]) -> float:
    """Per rollout, from the last of its step to its training, and from publication to the next step's beginning.

    The median, because evaluations and checkpoints fall between some of the steps.
    """
    overheads = [
        (later.metrics.get("time/datums_s", 0.0) + max(0.0, interval_s - later.metrics["time/step_s"])) / num_rollouts
        for run in runs
        for earlier, later in pairwise(run.steps)
        for interval_s in [(later.ended_at - earlier.ended_at).total_seconds()]
        if (num_rollouts := later.metrics["rollout/num_rollouts"])  # all rollouts may have ended in faults
    ]
    return median(overheads or [0.0])


def _constant_group_frac(run: RecordedRun, group_size: int) -> float:
    """Share of the groups that would have been constant, had they had this size."""
    steps = [step.metrics for step in run.steps[1:]]
    seen = _mean(steps, "reward/constant_group_frac")
    if group_size == run.group_size:
        return seen
    success_rate = _mean(steps, "reward/success_rate")
    low, high = 1e-3, 1e3  # tasks that always or never succeed, and tasks that are all alike
    for _ in range(40):
        concentration = math.sqrt(low * high)
        is_too_alike = constant_frac(success_rate, concentration, run.group_size) < seen
        low, high = (low, concentration) if is_too_alike else (concentration, high)
    return constant_frac(success_rate, low, group_size)


def constant_frac(success_rate: float, concentration: float, group_size: int) -> float:
    """Share of groups that all succeed or all fail, if the chances of tasks are beta distributed around the mean."""

    def frac_of_alike(rate: float) -> float:
        return math.prod((rate * concentration + index) / (concentration + index) for index in range(group_size))

    return frac_of_alike(success_rate) + frac_of_alike(1 - success_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Phases:
    """The activities of rollouts over time."""

    starts: Sequence[Interval]
    betweens: Sequence[Interval]
    """Intervals from an answer to the next request."""
    tails: Sequence[Interval]
    requests: Sequence[Interval]

    @property
    def on_device(self) -> Sequence[Interval]:
        """All but the requests."""
        return [*self.starts, *self.betweens, *self.tails]


def _phases(rollouts: Iterable[RecordedRollout]) -> _Phases:
    asked = [(rollout.run, rollout.requests) for rollout in rollouts]
    return _Phases(
        starts=[Interval(start_s=whole.start_s, end_s=each[0].start_s) for whole, each in asked],
        betweens=[
            Interval(start_s=one.end_s, end_s=following.start_s)
            for _, each in asked
            for one, following in pairwise(each)
            if one.end_s < following.start_s  # some agents ask for several answers at a time
        ],
        tails=[Interval(start_s=each[-1].end_s, end_s=whole.end_s) for whole, each in asked],
        requests=[request for _, each in asked for request in each],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How long something took, and how many of its kind were in progress meanwhile, itself included, on average."""

    duration_s: float
    number: float


def measure_loads(chosen: Sequence[Interval], kind: Sequence[Interval], *, num_places: int = 1) -> list[Load]:
    """The load of every chosen interval that has a length, as its mean concurrency per place."""
    changes = sorted([(one.start_s, 1) for one in kind] + [(one.end_s, -1) for one in kind])
    times = [at for at, _ in changes]
    counts = list(accumulate(change for _, change in changes))
    # the sum of in-progress seconds up to each change
    spent = list(
        accumulate(
            (count * (later - earlier) for count, (earlier, later) in zip(counts, pairwise(times), strict=False)),
            initial=0.0,
        )
    )

    def spent_until(at: float) -> float:
        place = bisect_right(times, at) - 1
        return spent[place] + counts[place] * (at - times[place])

    return [
        Load(
            duration_s=length,
            number=max(1.0, (spent_until(one.end_s) - spent_until(one.start_s)) / length / num_places),
        )
        for one in chosen
        if (length := one.end_s - one.start_s) > 0
    ]


def fit_speed(loads: Sequence[Load]) -> tuple[Speed, float]:
    """The speed at which these loads would have had these durations, and the sigma of what it does not explain.

    Durations spread in proportion to the load, so the fit is that of duration per request: a straight line over 1 /
    number of requests, whose slope is `alone_s` and whose intercept is `each_s`.
    """
    places = [1 / load.number for load in loads]
    values = [load.duration_s / load.number for load in loads]
    place, value = fmean(places), fmean(values)
    spread = sum((x - place) ** 2 for x in places)
    covaried = sum((x - place) * (y - value) for x, y in zip(places, values, strict=True))
    # without a spread of loads, all of the time is each request's own
    alone_s = covaried / spread if spread > 1e-9 else value / place
    alone_s = min(max(0.0, alone_s), value / place)
    speed = Speed(alone_s=alone_s, each_s=max(0.0, value - alone_s * place))
    return speed, _sigma(load.duration_s / speed.request_s(load.number) for load in loads)


def _alone_s(loads: Sequence[Load], computed_frac: float) -> list[float]:
    """Durations if nothing else had been in progress."""
    return [load.duration_s / (1 - computed_frac + computed_frac * load.number) for load in loads]


def _device_time(loads: Sequence[Load], computed_frac: float, *, sigma: float, controller_s: float = 0.0) -> DeviceTime:
    """The time behind these loads, less the controller's part of it; 0 if there are none."""
    slowness = sum(1 - computed_frac + computed_frac * load.number for load in loads)
    mean = sum(load.duration_s for load in loads) / max(1.0, slowness)
    computed_s = computed_frac * mean
    return DeviceTime(
        own=Spread(mean=max(0.0, mean - max(computed_s, controller_s)), sigma=sigma),
        computed=Spread(mean=max(0.0, computed_s - controller_s), sigma=sigma),
    )


def _sigma(ratios: Iterable[float]) -> float:
    logs = [math.log(ratio) for ratio in ratios if ratio > 0]
    return min(_LARGEST_SIGMA, pstdev(logs)) if len(logs) > 1 else 0.0


def _mean(steps: Sequence[Mapping[str, float]], name: str) -> float:
    values = [metrics[name] for metrics in steps if name in metrics]
    return fmean(values) if values else 0.0
