"""Messages between the controller and its rollout workers; `cua_rl.types.codec` writes and reads them."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version

from cua_rl.events import RolloutSource
from cua_rl.sampling.server import ServedModel
from cua_rl.types.rollout import AdapterRef, Rollout, SamplingParams


def code_version() -> str:
    """What controller and workers must have in common to understand each other's messages."""
    return f"cua_rl {version('cua_rl')} on Python {sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What a worker needs to run rollouts; it holds secrets, and is never stored or logged."""

    settings: Mapping[str, str]
    """The run's effective configuration as arguments of a command line, without secrets."""
    log_path: str
    database_url: str
    training_id: int
    attempt_id: str
    """The attempt of the run, whose rows the worker may write."""
    servers: tuple[tuple[str, str | None, ServedModel], ...]
    """Address and key of each model server, and what it serves: one may be down when the worker starts."""
    namespace: str
    """Ends the names of the run's adapters on the servers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A worker registers; answered by `Welcome`."""

    name: str
    num_slots: int
    """How many rollouts it can run at a time."""
    code_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The worker belongs to the run. A worker that was given up gets another id, so its old one is refused."""

    worker_id: str
    setup: WorkerSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRollout:
    """A `RolloutJob` whose task is named by its template and seed: tasks hold functions."""

    rollout_id: str
    source: RolloutSource
    group_id: str
    group_index: int
    member_index: int
    task_id: str
    seed: int
    params: SamplingParams
    adapter: AdapterRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a worker does, which is also its heartbeat; answered by `Orders` as soon as there is something to change.

    Both sides send their whole state, not changes, so a message may be lost.
    """

    running: tuple[str, ...]
    """Rollouts that it has been given and that the controller has not taken back."""
    adapters: tuple[AdapterRef, ...]
    """The current policy first (if it knows one), then those that requests and pins still need."""
    period_s: float = 0.0
    """Time since the last report."""
    device_metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of its devices in this period."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """Orders of the controller to a worker."""

    start: tuple[PlannedRollout, ...] = ()
    cancel: tuple[str, ...] = ()
    adapter: AdapterRef | None = None
    """The announced policy; it serves the rollouts in `start`."""
    is_over: bool = False
    """The run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that stops the run, as it would in the controller."""

    is_config_error: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The end of a rollout; its turns are in the database."""

    outcome: Rollout | Failure
