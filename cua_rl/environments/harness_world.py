"""The world of a harness rollout, which belongs to the user's program: only a slot of the run is leased.

`HarnessWorld` stands where other rollouts have their device. It holds what the program is given and what it reported.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, cast, get_args

from cua_rl.environments.device import DeviceKind
from cua_rl.host.process_guard import MAX_RESULT_BYTES
from cua_rl.types.actions import Action
from cua_rl.types.conversation import EncodedImage
from cua_rl.types.errors import DeviceError, TaskError
from cua_rl.types.json_values import Json, as_number
from cua_rl.types.judgement import MAX_REWARD

HARNESS_ID = "harness"
"""The device id of every harness's world."""

FaultKind = Literal["environment", "model", "harness"]

_MAX_METRIC = 1e100  # sums over all rollouts of a run stay finite
_MAX_METRICS, _MAX_METRIC_NAME = 100, 100  # each is a metric of every step


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessFault:
    """What failed in a run although the policy did nothing wrong, as its program reports it."""

    kind: FaultKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessResult:
    """The result of a run as its program reports it."""

    reward: float | None
    """From -MAX_REWARD to MAX_REWARD; None if the program reports none, or something that cannot be taken."""
    problem: str = ""
    """Why there is no reward, for messages."""
    success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    answer: str | None = None
    fault: HarnessFault | None = None


def read_result(content: bytes, where: str = "an answer") -> HarnessResult:
    """The result in bytes that an untrusted program wrote; `where` they were found, for messages."""
    if len(content) > MAX_RESULT_BYTES:
        return HarnessResult(reward=None, problem=f"no result: {where} of more than {MAX_RESULT_BYTES:,} bytes")
    if not content.strip():
        return HarnessResult(reward=None, problem=f"no result: {where} that is empty")
    try:
        value: object = json.loads(content.decode(), object_pairs_hook=_require_unique)
    except UnicodeDecodeError as error:
        return HarnessResult(reward=None, problem=f"no result: {where} that is not UTF-8 at byte {error.start}")
    except RecursionError:
        return HarnessResult(reward=None, problem=f"no result: {where} with JSON that is nested too deeply")
    except ValueError as error:
        return HarnessResult(reward=None, problem=f"no result: {where} that is not JSON ({str(error)[:200]})")
    return parse_result(value)


def _require_unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a key twice: {next(name for name in names if names.count(name) > 1)[:50]!r}")
    return fields


def parse_result(value: object) -> HarnessResult:
    """The result that a JSON value holds.

    A reward or success of another type than promised is no result. Metrics and answers of another type count as
    missing: one odd metric must not cost the rollout its reward.
    """
    if not isinstance(value, Mapping):
        return HarnessResult(reward=None, problem=f"no result: JSON that is no object: {repr(value)[:50]}")
    given = cast("Json", value)
    success, answer, told, reward = (given.get(name) for name in ("success", "answer", "metrics", "reward"))
    metrics: Json = cast("Json", told) if isinstance(told, Mapping) else {}
    numbers = {
        # a part of a metric's name
        re.sub(r"[^\w.-]+", "_", str(name))[:_MAX_METRIC_NAME]: as_number(number, largest=_MAX_METRIC)
        for name, number in islice(metrics.items(), _MAX_METRICS)
    }
    number, problem = as_number(reward, largest=MAX_REWARD), ""
    if number is None:
        problem = f"the reward {repr(reward)[:50]}; report a number"
    elif success is not None and not isinstance(success, bool):
        number, problem = None, f"the success {repr(success)[:50]}; report true, false or null"
    return HarnessResult(
        reward=number,
        problem=problem,
        success=success if isinstance(success, bool) else None,
        metrics={name: number for name, number in numbers.items() if name and number is not None},
        answer=answer if isinstance(answer, str) or answer is None else json.dumps(answer),
        fault=None if given.get("fault") is None else _parse_fault(given["fault"]),
    )


def _parse_fault(value: object) -> HarnessFault:
    """A fault in whatever form: a malformed one is still a fault."""
    fields = cast("Json", value) if isinstance(value, Mapping) else {"message": value}
    kind = fields.get("kind")
    known = cast("FaultKind", kind) if kind in get_args(FaultKind) else "harness"
    message = str(fields.get("message", "")).encode(errors="backslashreplace").decode()  # no log takes half a character
    return HarnessFault(kind=known, message=message)


@dataclass(slots=True)
class HarnessWorld:
    """One rollout's world, which only the program can see and touch."""

    task_id: str
    seed: int
    payload: Json = field(default_factory=dict[str, object])
    """What the task tells the program beside its instruction; set when the task is prepared."""
    verdict: HarnessResult | None = None
    """What the program reported, once the run is judged as scored."""
    device_id: str = HARNESS_ID
    kind: DeviceKind = "browser"

    async def observe(self) -> EncodedImage:
        """There is no screen that we could see; raises `DeviceError`."""
        raise DeviceError(f"expected a device with a screen, got the world of a harness ({self.task_id!r})")

    async def execute(self, action: Action) -> None:
        """Only the program acts in its world; raises `DeviceError`."""
        raise DeviceError(f"expected a device that takes actions, got the world of a harness ({self.task_id!r})")

    async def query(self, name: str) -> str:
        """Only the program knows the state; raises `TaskError`."""
        raise TaskError(f"expected the harness to report its score, got the query {name!r}")

    async def close(self) -> None:
        """Nothing is held: the program has ended with its rollout."""
