"""Messages between the controller and its rollout workers, and their encoding.

A message is a pickle, because a rollout is mostly integers and screenshots, which JSON takes ten times as long for. Its
reader accepts the data classes that messages consist of and refuses any other name, so a message cannot call anything.
"""

import io
import pickle
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_type_hints

from cua_rl.errors import CuaError
from cua_rl.events import RolloutSource
from cua_rl.policy import AdapterRef, SamplingParams
from cua_rl.sampling.server import ServedModel
from cua_rl.training.wire import encode
from cua_rl.types import Rollout

__all__ = [
    "Ended", "Failure", "Hello", "Orders", "PlannedRollout", "Report", "Welcome", "WorkerSetup", "decode", "encode",
]  # fmt: skip

_Message = TypeVar("_Message")


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
    """Address and key of each model server, and what it serves: one may be away when the worker starts."""
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
    """A `RolloutPlan` whose task is named by its template and seed: tasks hold functions."""

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
    """What a worker does, which also says that it lives; answered by `Orders` as soon as there is something to change.

    Both sides say what is, not what has changed, so that a message may be lost.
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
    """What a worker shall do."""

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


class MessageError(CuaError):
    """Bytes that are no message of the expected type."""


def decode(payload: bytes, expected: type[_Message]) -> _Message:
    """The message that `encode` was given; raises `MessageError` for anything but an `expected`."""
    try:
        message = _Unpickler(io.BytesIO(payload)).load()
    except Exception as error:
        raise MessageError(f"expected a {expected.__name__}, got bytes that are none: {error}") from error
    if not isinstance(message, expected):
        raise MessageError(f"expected a {expected.__name__}, got a {type(message).__name__}")
    return message


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is part of no message") from None


def _parts(kind: Any, found: set[type]) -> set[type]:
    """All data classes and enumerations that values of an annotated type consist of."""
    for inner in get_args(kind):
        _parts(inner, found)
    if isinstance(kind, type) and kind not in found and (is_dataclass(kind) or issubclass(kind, Enum)):
        found.add(kind)
        hints = get_type_hints(kind) if is_dataclass(kind) else {}
        for part in fields(cast("Any", kind)) if hints else ():
            _parts(hints[part.name], found)
    return found


_ALLOWED: Mapping[tuple[str, str], type] = {
    (kind.__module__, kind.__qualname__): kind
    for message in (Hello, Welcome, Report, Orders, Ended)
    for kind in (*_parts(message, set()), type(Path()))
}
