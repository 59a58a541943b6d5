"""The demand of a run, its hardware, and the rollouts per hour that each part allows, by arithmetic."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Lognormal numbers with this mean; `sigma` is the standard deviation of their logarithm."""

    mean: float
    sigma: float = 0.0

    def draw(self, random: Random) -> float:
        """Draw one number."""
        if not self.sigma or not self.mean:
            return self.mean
        return random.lognormvariate(math.log(self.mean) - self.sigma * self.sigma / 2, self.sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """A request takes `alone_s`, and `each_s` more for every request in progress, itself included."""

    alone_s: float
    each_s: float

    def request_s(self, num_requests: float) -> float:
        """Duration of a request while so many are in progress."""
        return self.alone_s + self.each_s * num_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTime:
    """Duration of a device operation, seconds."""

    own: Spread
    """The time that does not depend on the number of devices."""
    computed: Spread = Spread(mean=0.0)
    """Processor time of devices that share one processor, as simulated phones do: two at a time run at half speed."""

    @property
    def alone_s(self) -> float:
        """Mean if no other device computes."""
        return self.own.mean + self.computed.mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one rollout asks of devices, controller, model server and trainer."""

    turns: tuple[int, ...]
    """Numbers of turns, each as likely as the others."""
    start: DeviceTime
    """From the lease of a device to the first request."""
    turn: DeviceTime
    """Between two requests."""
    end: DeviceTime
    """From the last answer, which ends the rollout, to the reward."""
    request_work: Spread
    """Work of a model request, relative to the mean request."""
    controller_s: float
    """Processor time of the controller per turn, 0 if it is in the other times."""
    prompt_tokens: float
    """Tokens of a training sequence that do not grow with the number of turns."""
    turn_tokens: float
    """Tokens that a turn adds to it: screenshot, texts and answer."""
    constant_group_frac: float
    """Groups that give the trainer nothing to do."""

    @property
    def mean_turns(self) -> float:
        return fmean(self.turns)

    @property
    def trained_tokens(self) -> float:
        """Per rollout, over all groups."""
        return (1 - self.constant_group_frac) * (self.prompt_tokens + self.mean_turns * self.turn_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What server and trainer run on."""

    num_servers: int
    """Copies of the server's model."""
    gpus_per_server: int
    """0 on a CPU."""
    num_trainers: int
    """Ranks of the trainer, with a GPU each if there are any."""
    is_shared: bool
    """Server and trainer use the same hardware."""
    max_requests: int
    """Requests that a copy decodes at a time."""

    @property
    def num_gpus(self) -> int:
        """GPUs of server and trainer together."""
        server = self.num_servers * self.gpus_per_server
        trainer = self.num_trainers if self.gpus_per_server else 0
        return max(server, trainer) if self.is_shared else server + trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Devices, GPUs and processes, and how fast they are."""

    num_devices: int
    placement: Placement
    server: Speed
    """Speed of one copy of the model."""
    trained_token_s: float
    """Seconds of one rank per token of a training sequence."""
    save_s: float
    """Time in which the trainer writes the adapter."""
    publish_s: float
    """Time in which the servers load and verify it."""
    overhead_s: float = 0.0
    """Time of the controller per rollout of a step, for datums, their fingerprint and records; the trainer waits."""
    num_controllers: int = 1
    """Processes that run rollouts."""

    def train_s(self, num_tokens: float) -> float:
        """Duration of a training step on so many tokens."""
        return num_tokens * self.trained_token_s / self.placement.num_trainers


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How the loop runs."""

    groups_per_batch: int
    group_size: int
    max_lag: int
    """`max_steps_off_policy`; 0 is the synchronous loop."""

    @property
    def rollouts_per_step(self) -> int:
        return self.groups_per_batch * self.group_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """US dollars per hour."""

    gpu: float
    device: float

    def per_hour(self, fleet: Fleet) -> float:
        """Price of all GPUs and devices."""
        return fleet.placement.num_gpus * self.gpu + fleet.num_devices * self.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a prediction depends on."""

    workload: Workload
    fleet: Fleet
    schedule: Schedule


_TURN_S, _SCREEN_KB_S, _TOKEN_S = 5.85e-3, 6.1e-6, 0.35e-6


def controller_turn_s(screen_kb: float, prompt_tokens: float) -> float:
    """Processor time of the process that runs a rollout, for a turn that executes an action and takes a screenshot.

    Measured by `benchmarks.controller_load`. It hashes, encodes, sends and stores the screenshot once, but in every
    turn reads from the server, compares and stores all tokens of the prompt.
    """
    return _TURN_S + _SCREEN_KB_S * screen_kb + _TOKEN_S * prompt_tokens


def bounds(scenario: Scenario) -> dict[str, float]:
    """Rollouts per hour that each part alone would allow, if everything else were free.

    Devices: none ever idles or waits for the processor, and its requests meet an empty model server; or their processor
    never idles. Sampling: every device has a request in the servers all the time, up to `max_requests` each. Training:
    the trainer never waits. GPUs that server and trainer share do one after the other.
    """
    work, fleet, placed = scenario.workload, scenario.fleet, scenario.fleet.placement
    turns = work.mean_turns
    device_s = work.start.alone_s + (turns - 1) * work.turn.alone_s + work.end.alone_s
    computed_s = work.start.computed.mean + (turns - 1) * work.turn.computed.mean + work.end.computed.mean
    rollout_s = device_s + turns * (work.controller_s + fleet.server.request_s(1))
    in_server = min(placed.max_requests, fleet.num_devices / placed.num_servers)
    limits = {
        "devices": min(_rate(fleet.num_devices, rollout_s), _rate(1, computed_s)),
        "sampling": placed.num_servers * _rate(in_server, turns * fleet.server.request_s(in_server)),
        "training": _rate(1, fleet.train_s(work.trained_tokens)),
        "controller": _rate(fleet.num_controllers, turns * work.controller_s),
    }
    if placed.is_shared:
        sampling, training = limits.pop("sampling"), limits.pop("training")
        limits["sampling and training"] = 1 / (1 / sampling + 1 / training)
    return limits


NOISE = 0.03  # by as much, rollouts per hour vary with the window of steps that is simulated
SATURATED = 0.75  # of a bound: stragglers, and phases that follow one another, cost the rest


def find_bottleneck(limits: Mapping[str, float], gains: Mapping[str, float]) -> str:
    """The part that is most worth having more of; if none is worth it, the one with the lowest bound.

    `gains` are those of `one_more`, as shares of the rollouts per hour.
    """
    best = max(gains, key=lambda part: gains[part])
    return best if gains[best] >= NOISE else min(limits, key=lambda part: limits[part])


def one_more(scenario: Scenario) -> dict[str, tuple[str, Scenario]]:
    """The same with more of one part each, by the part, and what that is: a GPU, a tenth of the devices, a process, a
    step of policy lag.
    """
    fleet, placed, schedule = scenario.fleet, scenario.fleet.placement, scenario.schedule
    more_devices = max(1, fleet.num_devices // 10)
    fleets: dict[str, tuple[str, Fleet]] = {}
    if placed.gpus_per_server and placed.is_shared:
        apart = replace(fleet, placement=replace(placed, is_shared=False))
        fleets["sampling and training"] = f"{_counted(placed.num_trainers, 'GPU')}, training apart", apart
    elif placed.gpus_per_server:
        sampling = replace(placed, num_servers=placed.num_servers + 1)
        training = replace(placed, num_trainers=placed.num_trainers + 1)
        gpus = _counted(placed.gpus_per_server, "GPU")
        fleets["sampling"] = f"{gpus} for sampling", replace(fleet, placement=sampling)
        fleets["training"] = "1 GPU for training", replace(fleet, placement=training)
    devices = replace(fleet, num_devices=fleet.num_devices + more_devices)
    fleets["devices"] = _counted(more_devices, "device"), devices
    if scenario.workload.controller_s:
        fleets["controller"] = "1 rollout worker", replace(fleet, num_controllers=fleet.num_controllers + 1)
    lagging = replace(scenario, schedule=replace(schedule, max_lag=schedule.max_lag + 1))
    more = {part: (f"+ {name}", replace(scenario, fleet=larger)) for part, (name, larger) in fleets.items()}
    return more | {"schedule": ("+ 1 step of policy lag", lagging)}


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rate(number: float, seconds: float) -> float:
    """Per hour, if so many take so many seconds."""
    return 3600 * number / seconds if seconds else math.inf
