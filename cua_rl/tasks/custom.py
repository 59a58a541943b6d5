"""Tasks that a user describes in a dictionary: an instruction, and a check that the device's state must pass.

    {"instruction": "Turn on Wi-Fi.", "max_turns": 6, "check": {"query": "wifi_enabled", "expected": "true"}}

Where a judge is configured the check may be left out, and an instruction alone is a task.

On a simulated phone each description is a task for every seed, and `start` says how the phone begins. Phones are tried
at load: a check that no phone can answer, or that one passes before the agent has done anything, is refused.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from random import Random
from typing import cast, get_args

from cua_rl.devices.device import DeviceAbilities
from cua_rl.devices.simulator.catalog import SCREEN_TIMEOUTS_MS, Toggle
from cua_rl.devices.simulator.queries import read_query
from cua_rl.devices.simulator.start import Start, make_phone_state
from cua_rl.errors import ConfigError, TaskError, boundary
from cua_rl.tasks.fields import Fields, read_mapping, require_known
from cua_rl.tasks.goal import Goal, How, check_goal
from cua_rl.tasks.lasting_devices import make_undone
from cua_rl.tasks.start_fields import parse_start
from cua_rl.tasks.task import Category, Difficulty, Task, Template

DEFAULT_MAX_TURNS = 10
_EXAMPLE = '{"instruction": "Turn on Wi-Fi.", "max_turns": 6, "check": {"query": "wifi_enabled", "expected": "true"}}'
HEADER_KEYS = ("task_id", "instruction", "max_turns", "check", "category", "difficulty", "tags")
"""Keys that every description may have."""
_NUM_PHONES_TRIED = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedTask(Template):
    """A described task: the same instruction and check on every device."""

    instruction: str
    goal: Goal | None
    """None: a judge decides from screenshots."""
    start: Start | None = None
    """None on devices whose initial state cannot be set."""

    def make_task(self, seed: int) -> Task:
        """The task on the device of this seed."""
        goal, prepare = self.goal, None
        if goal is not None and self.start is None:
            prepare = partial(make_undone, goal)
        validate = None if goal is None else partial(check_goal, goal)
        return self.build_task(seed, self.instruction, validate=validate, prepare=prepare, start=self.start)

    def fixed_names(self, *, is_seeded: bool) -> frozenset[str]:
        """Its id and, where nothing else tells tasks apart, its instruction."""
        names = Template.fixed_names(self, is_seeded=is_seeded)
        has_more = is_seeded or self.goal is None
        return names if has_more else names | {self.instruction.lower()}


def parse_custom_task(value: object, what: str, device: DeviceAbilities, *, has_judge: bool = False) -> DescribedTask:
    """Read one description; `what` names it in messages, such as "custom task 2"."""
    given = read_mapping({"instruction": value.strip()} if isinstance(value, str) else value, what, _EXAMPLE)
    given.require_keys((*HEADER_KEYS, "start"))
    instruction = given.text("instruction")
    if not instruction:
        raise ConfigError(f"expected an instruction in {what}, got {dict(given.raw)!r}; write {_EXAMPLE}")
    task_id = f"custom_{_slug(instruction)}"
    if given.raw.get("check") is None:
        if not has_judge:
            raise ConfigError(
                f"expected a check in {what}, got only the description {instruction!r}: a description alone cannot be "
                "validated, so every attempt would get the same reward and there is nothing to learn from; let a judge "
                "decide (judge.base_url=... judge.model=..., docs/judge.md), add a check, such as "
                f'{{"query": "wifi_enabled", "expected": "true"}}, as in {_EXAMPLE}, or use task ids'
            )
        return describe(given, task_id, instruction, goal=None, start=_parse_judged_start(given, device))
    goal = parse_goal(given.raw["check"], f"the check of {what}", device)
    start = _find_start(given, goal) if device.is_seeded else _refuse_start(given, device)
    return describe(given, task_id, instruction, goal=goal, start=start)


def describe(
    given: Fields,
    task_id: str,
    instruction: str,
    *,
    goal: Goal | None,
    start: Start | None = None,
) -> DescribedTask:
    """Build the task from `HEADER_KEYS`; a `task_id` in the description takes precedence over the argument."""
    return DescribedTask(
        task_id=given.text("task_id") or task_id,
        instruction=instruction,
        goal=goal,
        start=start,
        category=cast(Category, given.choice("category", get_args(Category)) or "app"),
        difficulty=cast(Difficulty, given.choice("difficulty", get_args(Difficulty)) or "medium"),
        max_turns=given.integer("max_turns", at_least=1) or DEFAULT_MAX_TURNS,
        tags=given.texts("tags"),
    )


def _parse_judged_start(given: Fields, device: DeviceAbilities) -> Start | None:
    if not device.is_seeded:
        return _refuse_start(given, device)
    wanted = given.raw.get("start")
    if wanted is None:
        return Start()
    start = parse_start(wanted, f"the start of {given.what}")
    with boundary(ConfigError, f"expected a start that a phone can have in {given.what}, change it"):
        for seed in _seeds():
            make_phone_state(seed, start)
    return start


def _slug(instruction: str) -> str:
    """The instruction as part of a task id, with a hash if it was shortened or is not ASCII."""
    slug = re.sub(r"[^a-z0-9]+", "_", instruction.lower()).strip("_")
    if len(slug) <= 60 and instruction.isascii():
        return slug
    return f"{slug[:51]}_{sha256(instruction.encode()).hexdigest()[:8]}".lstrip("_")


def parse_goal(value: object, what: str, device: DeviceAbilities) -> Goal:
    """Read a check that a device with these abilities can make; `what` names it in messages."""
    given = read_mapping(value, what, '{"query": "wifi_enabled", "expected": "true"}')
    given.require_keys(("query", "expected", "how"))
    query, how = given.text("query"), cast(How, given.choice("how", get_args(How)) or "equals")
    if not query:
        raise ConfigError(
            f"expected a query in {what}, got {dict(given.raw)!r}; add what to read, such as wifi_enabled"
        )
    if device.queries is not None:
        require_known(f"query of {device.name} in {what}", query.partition(":")[0], sorted(device.queries))
    if (how == "told") != ("expected" not in given.raw):
        raise ConfigError(
            f"expected {what} to say what is expected, except for 'told' (the answer must contain what the query "
            f"reads), got {dict(given.raw)!r}; {'leave out' if how == 'told' else 'add'} expected"
        )
    expected = given.raw.get("expected", "")
    # queries answer in JSON, except that a single text has no quotes: true is "true", 255 is "255"
    text = expected if isinstance(expected, str) and how != "includes" else json.dumps(expected)
    return Goal(query=query, expected=text, how=how)


def _refuse_start(given: Fields, device: DeviceAbilities) -> None:
    if given.raw.get("start") is not None:
        raise ConfigError(
            f"expected start only on devices made from a seed, got it in {given.what} for {device.name}; leave it out"
        )


def _find_start(given: Fields, goal: Goal) -> Start:
    """The requested start, or else the simplest one on which the goal does not hold yet."""
    _require_readable(goal, given.what)
    wanted = given.raw.get("start")
    if wanted is None:
        starts, do = list(_possible_starts(goal)), 'add start, such as {"off": ["wifi"]}'
    else:
        starts, do = [parse_start(wanted, f"the start of {given.what}")], "change start"
    for start in starts:
        if not any(_is_done(goal, start, seed, given.what) for seed in _seeds()):
            return start
    num_done = sum(_is_done(goal, starts[0], seed, given.what) for seed in _seeds())
    raise ConfigError(
        f"expected {given.what} to be undone when it begins, got {goal.query} == {goal.expected} on {num_done} of "
        f"{_NUM_PHONES_TRIED} phones before anything was done; {do}, or check something else"
    )


def _possible_starts(goal: Goal) -> Iterator[Start]:
    """Initial states to try, the simplest first."""
    yield Start()
    for toggle in Toggle:
        yield Start(off=(toggle,))
        yield Start(on=(toggle,))
    if goal.expected.isdigit() and int(goal.expected) in SCREEN_TIMEOUTS_MS:
        yield Start(not_screen_timeout_ms=int(goal.expected))
    yield Start(brightness_level=128 if goal.expected != "128" else 64)
    yield Start(media_volume=7 if goal.expected != "7" else 4)
    yield Start(app="clock")


def _seeds() -> list[int]:
    return Random("custom-task").sample(range(2_000_000), _NUM_PHONES_TRIED)


def _require_readable(goal: Goal, what: str) -> None:
    """Reject unknown queries, and expectations of a kind that the query never returns."""
    try:
        answers = [read_query(make_phone_state(seed), goal.query) for seed in _seeds()]
    except TaskError as error:
        raise ConfigError(f"{error} (in the check of {what})") from None
    is_truth = all(answer in ("true", "false") for answer in answers)
    if goal.how == "equals" and is_truth and goal.expected not in ("true", "false"):
        raise ConfigError(
            f"expected 'true' or 'false' from {goal.query} in the check of {what}, got {goal.expected!r}; "
            "change expected"
        )
    if goal.how == "includes" and not all(answer.startswith("[") for answer in answers):
        raise ConfigError(
            f"expected a query that answers with a list for 'includes' in the check of {what}, got {goal.query!r}, "
            f"which answers {answers[0]!r}; use how='equals'"
        )


def _is_done(goal: Goal, start: Start, seed: int, what: str) -> bool:
    with boundary(ConfigError, f"expected a start that a phone can have in {what}, change it"):
        return goal.is_met(read_query(make_phone_state(seed, start), goal.query), None)
