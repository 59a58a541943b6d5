"""Tasks of a gym server: listed once, completed one by one, split before anything is filtered."""

import json
import re
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, cast
from urllib.parse import quote

from cua_rl.environments.config import DeviceConfig
from cua_rl.environments.contract import Loading, SplitSource, training_ids
from cua_rl.environments.device import Device
from cua_rl.environments.gym.device import GymDevice
from cua_rl.environments.gym.fields import GymTaskRef, first_text, text_at
from cua_rl.tasks.fields import Fields, given
from cua_rl.tasks.task import Difficulty, Task, Template
from cua_rl.types.errors import ConfigError, TaskError
from cua_rl.types.json_values import Json, mapping, sequence
from cua_rl.types.judgement import Validation

if TYPE_CHECKING:
    import httpx

DEFAULT_BASE_URL = "http://localhost:5010"
DEFAULT_GYM_ID = "umetrip"
DEFAULT_MAX_TURNS = 20
LIST_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 2.0
MAX_LIST_ATTEMPTS = 3

_DIFFICULTIES: Mapping[str, Difficulty] = {"easy": "easy", "normal": "medium", "medium": "medium", "hard": "hard"}
_UUID = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GymTask(Template):
    """A task on a gym server, the same for every seed."""

    ref: GymTaskRef
    name: str
    number: int | None
    instruction: str
    aliases: frozenset[str]
    """All names that the server has for it."""

    def is_called(self, name: str) -> bool:
        """Whether a user-written name selects this task: one of its names, a prefix of one, or its number."""
        if name.isdigit():
            return self.number == int(name) or name in self.aliases
        return any(alias.startswith(name) for alias in self.aliases)

    def has_tags(self, tags: Sequence[str]) -> bool:
        """Whether it has one of the tags, ignoring case."""
        return not tags or any(tag.lower() in self.tags for tag in tags)

    def make_task(self, seed: int) -> Task:
        """The task; the seed has no effect on the server."""
        return self.build_task(seed, self.instruction, validate=_evaluate, world=self.ref)


@dataclass(frozen=True, slots=True, kw_only=True)
class GymSource(SplitSource):
    """Tasks of a gym server."""

    source_types = ("gym",)

    gym_base_url: str | None = given(
        lambda item, key: item.matching(key, r"https?://\S+", "an address such as 'http://localhost:5010'")
    )
    """Address of the server; None is http://localhost:5010."""
    gym_id: str | None = given(Fields.text)
    """Which of its gyms; None is "umetrip"."""
    eval_number_range: str | None = given(
        lambda item, key: item.matching(key, r"\d+-\d+", "two numbers such as '001-032'")
    )
    """The task numbers that are for evaluation, such as "001-032"; instead of `train_ratio`."""

    @property
    def shared_as(self) -> object:
        return (self.gym_base_url or DEFAULT_BASE_URL).rstrip("/"), self.gym_id or DEFAULT_GYM_ID

    def completed(self, settings: DeviceConfig) -> "GymSource":
        return replace(
            self, gym_base_url=self.gym_base_url or settings.gym_base_url, gym_id=self.gym_id or settings.gym_id
        )

    def load(self, loading: Loading) -> Sequence[Template]:
        tasks = fetch_gym_tasks(self.gym_base_url or DEFAULT_BASE_URL, self.gym_id or DEFAULT_GYM_ID)
        # split before filtering, so that a filter moves no task to the other side
        train, held_out = split_gym_tasks(
            tasks, seed=loading.seed, train_ratio=self.train_ratio, eval_number_range=self.eval_number_range
        )
        return tasks if self.split_type is None else train if self.split_type == "train" else held_out


async def _evaluate(device: Device, answer: str | None) -> Validation:
    """Ask the server; its whole answer is kept as what was read."""
    if not isinstance(device, GymDevice):
        raise TaskError(f"expected an execution of a gym server to evaluate, got {device.device_id!r}")
    evaluation, raw = await device.evaluate(answer)
    return Validation(
        query=f"evaluate {device.task.identifier}",
        expected="score 1",
        actual=json.dumps(raw, ensure_ascii=False),
        success=evaluation.success,
        score=evaluation.score,
    )


def fetch_gym_tasks(base_url: str, gym_id: str, *, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> list[GymTask]:
    """All tasks of a gym, by id; raises `ConfigError` if the server does not list them.

    Rows of the list that say too little are completed by asking for their task.
    """
    import httpx

    timeout = httpx.Timeout(LIST_TIMEOUT_S, connect=connect_timeout_s)
    with httpx.Client(base_url=base_url.rstrip("/"), timeout=timeout, trust_env=False) as client:
        path = f"/api/v1/{quote(gym_id, safe='')}/tasks"
        listed = _get(client, path)
        rows = sequence(listed) or sequence(mapping(listed).get("tasks"))
        if not rows:
            raise ConfigError(f"expected tasks at {base_url}{path}, got {str(listed)[:200]}; check gym_id")

        def complete(row: object) -> GymTask:
            fields = mapping(row)
            identifier = _identifier(fields)
            is_complete = bool(text_at(fields, "instruction")) and any(
                fields.get(name) is not None for name in ("description", "env_config", "env", "evaluation")
            )
            if identifier is not None and not is_complete:
                answer = mapping(_get(client, f"{path}/{quote(identifier, safe='')}"))
                fields = {**fields, **(mapping(answer.get("task")) or answer)}
            return parse_gym_task(fields, base_url=base_url, gym_id=gym_id)

        with ThreadPoolExecutor(max_workers=8) as threads:
            tasks = sorted(threads.map(complete, rows), key=lambda task: task.ref.identifier)
    for first, second in pairwise(tasks):
        if first.ref == second.ref:
            raise ConfigError(
                f"expected one gym task per id, got {first.ref.identifier!r} twice; repair the list on the server"
            )
    return tasks


def parse_gym_task(fields: Json, *, base_url: str, gym_id: str) -> GymTask:
    """One task from what the server says; raises `ConfigError` for one without id or text."""
    identifier = _identifier(fields)
    description = first_text(fields, ("description",), ("meta", "description"), ("name",))
    instruction = text_at(fields, "instruction") or description
    if identifier is None or instruction is None or description is None:
        raise ConfigError(
            f"expected a gym task with an id and an instruction, got {str(dict(fields))[:200]}; repair it on the server"
        )
    names = (("name",), ("display_name",), ("task_name",), ("meta", "displayName"), ("meta", "name"))
    more = (("seed_id",), ("task_id",), ("id",), ("task_number",), ("meta", "id"), ("meta", "number"))
    name = first_text(fields, *names) or identifier
    steps = fields.get("max_steps", fields.get("maxSteps"))
    given = fields.get("tags")
    items = given.split(",") if isinstance(given, str) else sequence(given)
    tags = tuple(dict.fromkeys(item.strip().lower() for item in items if isinstance(item, str) and item.strip()))
    difficulties: list[Difficulty] = [_DIFFICULTIES[tag] for tag in tags if tag in _DIFFICULTIES]
    return GymTask(
        task_id=f"gym/{gym_id}/{identifier}",
        category="app",
        difficulty=difficulties[0] if difficulties else "medium",
        ref=GymTaskRef(base_url=base_url.rstrip("/"), gym_id=gym_id, identifier=identifier),
        name=name,
        number=_number(fields, identifier, name),
        instruction=instruction,
        tags=("gym", *tags),
        aliases=frozenset({identifier, name, *filter(None, (text_at(fields, *path) for path in (*names, *more)))}),
        max_turns=steps if isinstance(steps, int) and steps > 0 else DEFAULT_MAX_TURNS,
    )


def split_gym_tasks(
    tasks: Sequence[GymTask], *, seed: int, train_ratio: float, eval_number_range: str | None
) -> tuple[list[GymTask], list[GymTask]]:
    """Training and evaluation tasks, by id: a range of numbers is for evaluation, else a seeded share for training."""
    ordered = sorted(tasks, key=lambda task: task.ref.identifier)
    if eval_number_range is not None:
        first, last = sorted(int(number) for number in eval_number_range.split("-"))
        held_out = {task.ref for task in ordered if task.number is not None and first <= task.number <= last}
    else:
        training = training_ids((task.task_id for task in ordered), seed, train_ratio)
        held_out = {task.ref for task in ordered if task.task_id not in training}
    return [task for task in ordered if task.ref not in held_out], [task for task in ordered if task.ref in held_out]


def _get(client: "httpx.Client", path: str) -> object:
    import httpx

    failure = ""
    for attempt in range(MAX_LIST_ATTEMPTS):
        time.sleep(0.5 * attempt)
        try:
            response = client.get(path)
            if response.is_success:
                return cast("object", response.json())
            failure = f"status {response.status_code}: {response.text[:200]}"
            if response.is_client_error:
                break
        except (httpx.HTTPError, ValueError) as error:
            failure = f"{type(error).__name__} {error}"
            if isinstance(error, httpx.ConnectTimeout):  # not a refusal: that may be a server that is starting
                break
    raise ConfigError(
        f"expected the tasks of a gym server at {client.base_url}{path}, got {failure}; check gym_base_url and gym_id"
    )


def _identifier(fields: Json) -> str | None:
    return first_text(fields, ("task_id",), ("id",), ("meta", "id"))


def _number(fields: Json, identifier: str, name: str) -> int | None:
    """The given number, else the first one in the id or the name, except in a UUID."""
    given = first_text(fields, ("task_number",), ("meta", "number"))
    for text in filter(None, (given, identifier, name)):
        found = re.search(r"\d+", _UUID.sub("", text))
        if found:
            return int(found[0])
    return None
