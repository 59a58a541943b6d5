"""Programs with their own world and score as an environment.

Tasks are rows of JSON lines, from a file, a folder or a command that prints them.

    {"task_id": "wordle/crane", "seed": 7, "instruction": "Guess it.", "max_turns": 6, "payload": {"word": "crane"}}

Only `task_id` is required. The program gets the payload unchanged; the score that it reports is the validation.
"""

import json
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, cast

from cua_rl.environments.contract import Environment, Loading, SplitSource
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.harness_world import HarnessWorld
from cua_rl.environments.pool import DeviceRequest
from cua_rl.tasks.fields import Fields, given, parse_json, read_mapping, read_text
from cua_rl.tasks.task import Task, Template, read_category, read_difficulty
from cua_rl.types.errors import ConfigError, TaskError
from cua_rl.types.json_values import Json
from cua_rl.types.judgement import Validation

DEFAULT_MAX_TURNS = 1000  # so that the run's own max_turns decides
LIST_TIMEOUT_S = 300.0
_MAX_BYTES = 100_000  # an environment variable of Linux holds at most 128 KiB
_KEYS = ("task_id", "seed", "instruction", "max_turns", "payload", "category", "difficulty", "tags")
_EXAMPLE = '{"task_id": "wordle/crane", "seed": 7, "payload": {"word": "crane"}}'


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessTask(Template):
    """One row."""

    instruction: str
    payload: str
    """JSON."""
    seed: int | None = None
    """None: the seed that the run draws."""

    def make_task(self, seed: int) -> Task:
        """The task of this row; a seed in the row takes precedence."""
        return self.build_task(
            seed if self.seed is None else self.seed,
            self.instruction,
            validate=_read_score,
            prepare=partial(_hand_over, self.payload),
        )


async def _hand_over(payload: str, device: Device) -> None:
    _as_world(device).payload = cast("Json", json.loads(payload))


async def _read_score(device: Device, answer: str | None) -> Validation:
    """The result that the program reported; if it leaves success open, a reward of at least 1 counts as success."""
    verdict = _as_world(device).verdict
    if verdict is None or verdict.reward is None:
        raise TaskError("expected a harness that reported a reward, got none")
    success = verdict.reward >= 1.0 if verdict.success is None else verdict.success
    told = {"reward": verdict.reward, "success": verdict.success, "metrics": verdict.metrics}
    return Validation(
        query="harness",
        expected="success" if verdict.success is not None else "a reward of at least 1",
        actual=json.dumps(told),
        success=success,
        score=verdict.reward,
        metrics=verdict.metrics,
    )


def _as_world(device: Device) -> HarnessWorld:
    if not isinstance(device, HarnessWorld):
        raise TaskError(f"expected the world of a harness, got {device.device_id!r}; set agent=harness")
    return device


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessSource(SplitSource):
    """Rows of a file or folder, or those that a command prints."""

    source_types = ("harness",)

    file_path: str | None = given(Fields.text)
    """A .jsonl file with rows, or a folder of such files."""
    list_command: str | None = given(Fields.text)
    """A command that prints the rows, instead of `file_path`."""

    def load(self, loading: Loading) -> list[HarnessTask]:
        return self.take_side([_parse_row(row, where) for where, row in _read_rows(self)], loading.seed)


def _parse_row(row: object, what: str) -> HarnessTask:
    given = read_mapping(row, what, _EXAMPLE)
    given.require_keys(_KEYS)
    task_id, payload = given.text("task_id"), given.raw.get("payload", {})
    if not task_id:
        raise ConfigError(f"expected a task_id in {what}, got {dict(given.raw)!r}; write {_EXAMPLE}")
    instruction = given.text("instruction") or task_id
    for name, told in (("task_id", task_id), ("instruction", instruction)):
        if not _fits_into_variable(told):
            raise ConfigError(
                f"expected {name} as text of at most {_MAX_BYTES} bytes without NUL and lone surrogates in {what}, got "
                f"{told[:80]!r}; an environment variable holds nothing else"
            )
    text = json.dumps(payload)
    if not isinstance(payload, dict) or len(text.encode()) > _MAX_BYTES:
        raise ConfigError(
            f"expected payload as an object of at most {_MAX_BYTES} bytes in {what}, got {text[:80]!r}; put "
            "what is larger into a file, and its path into the payload"
        )
    return HarnessTask(
        task_id=task_id,
        instruction=instruction,
        payload=text,
        seed=given.integer("seed", at_least=0),
        category=read_category(given),
        difficulty=read_difficulty(given),
        max_turns=given.integer("max_turns", at_least=1) or DEFAULT_MAX_TURNS,
        tags=given.texts("tags"),
    )


def _fits_into_variable(text: str) -> bool:
    try:
        return "\0" not in text and len(text.encode()) <= _MAX_BYTES
    except UnicodeEncodeError:
        return False


def _read_rows(config: HarnessSource) -> Iterator[tuple[str, object]]:
    """Rows, each with its place for messages; of a command's output, only lines that begin with a brace."""
    if (config.file_path is None) == (config.list_command is None):
        raise ConfigError("expected either file_path or list_command with source_type 'harness'; set one of them")
    if config.list_command is not None:
        # not `splitlines`, which also splits at line separators inside JSON strings
        printed = _run(config.list_command).split("\n")
        lines = [(f"line {i} of {config.list_command!r}", line) for i, line in enumerate(printed, start=1)]
        lines = [(where, line) for where, line in lines if line.startswith("{")]
    else:
        path = Path(config.file_path or "").expanduser()
        files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        lines = [
            (f"line {i} of {file}", line)
            for file in files
            for i, line in enumerate(read_text(file).split("\n"), start=1)
            if line.strip()
        ]
    if not lines:
        raise ConfigError(f"expected rows such as {_EXAMPLE}, got none from {config.file_path or config.list_command}")
    for where, line in lines:
        yield where, parse_json(line, where)


def _run(command: str) -> str:
    """The standard output of the command; its standard error is passed through."""
    try:
        argv = shlex.split(command)
        return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=LIST_TIMEOUT_S).stdout
    except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"list_command: expected a command that prints tasks, got {command!r} ({error}); correct it"
        ) from None


class HarnessWorlds:
    """A `DeviceBackend` without devices: the pool only limits how many programs run at a time."""

    abilities = DeviceAbilities(name="a harness", has_shell=False, is_seeded=False, environment="harness")

    async def make(self, request: DeviceRequest) -> HarnessWorld:
        return HarnessWorld(request.task_id, request.seed)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        return


HARNESS = Environment(
    name="harness",
    sources=(HarnessSource,),
    has_held_out=False,  # its rows are the same for every seed
    presets={"reward": "score"},
    make_backend=lambda order: HarnessWorlds(),
)
