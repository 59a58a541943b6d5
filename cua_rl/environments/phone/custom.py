"""Tasks that a user describes in a dictionary: an instruction, and a check that the device's state must pass.

    {"instruction": "Turn on Wi-Fi.", "max_turns": 6, "check": {"query": "wifi_enabled", "expected": "true"}}

Where a judge is configured the check may be left out, and an instruction alone is a task.

On a simulated phone each description is a task for every seed, and `start` says how the phone begins. Phones are tried
at load: a check that one of them can never pass, or passes before the agent has done anything, is refused.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from random import Random

from cua_rl.environments.android.preparation import make_goal_false
from cua_rl.environments.android.shell import DeviceShell
from cua_rl.environments.device import Device, DeviceAbilities, ShellDevice
from cua_rl.environments.phone.check_values import require_possible, suggest_values
from cua_rl.environments.phone.simulator.catalog import SCREEN_TIMEOUTS_MS, Toggle
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.query_values import NEEDED_ROWS
from cua_rl.environments.phone.simulator.start import Start, SystemStart, make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.phone.start_fields import parse_start
from cua_rl.tasks.fields import Fields, read_mapping
from cua_rl.tasks.goal import Goal, check_goal, parse_goal
from cua_rl.tasks.task import DEFAULT_MAX_TURNS, HEADER_KEYS, Task, Template, read_category, read_difficulty
from cua_rl.types.errors import ConfigError, TaskError, boundary

logger = logging.getLogger(__name__)

_EXAMPLE = '{"instruction": "Turn on Wi-Fi.", "max_turns": 6, "check": {"query": "wifi_enabled", "expected": "true"}}'
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
        goal, prepare = self.goal, None
        if goal is not None and self.start is None:
            prepare = partial(make_undone, goal)
        validate = None if goal is None else partial(check_goal, goal)
        return self.build_task(seed, self.instruction, validate=validate, prepare=prepare, world=self.start)

    @property
    def is_judged(self) -> bool:
        return self.goal is None

    def fixed_names(self, *, is_seeded: bool) -> frozenset[str]:
        """Its id and, where nothing else tells tasks apart, its instruction."""
        names = Template.fixed_names(self, is_seeded=is_seeded)
        has_more = is_seeded or self.goal is None
        return names if has_more else names | {self.instruction.lower()}


async def make_undone(goal: Goal, device: Device) -> None:
    """Undo a goal that holds on a device whose state lasts; raises `TaskError` if it cannot be undone."""
    if device.kind == "android" and isinstance(device, ShellDevice):
        await make_goal_false(DeviceShell(device), goal.query, goal.expected, goal.how)
    elif goal.how != "told" and goal.is_met(await device.query(goal.query), None):
        raise TaskError(
            f"expected {goal.query!r} to be anything but {goal.expected!r} when the task begins, got that on "
            f"{device.device_id!r}; undo it, or use a device with a shell"
        )


def parse_custom_task(value: object, what: str, device: DeviceAbilities, *, has_judge: bool = False) -> DescribedTask:
    """Read one description; `what` names it in messages, such as "custom task 2"."""
    given = read_mapping({"instruction": value.strip()} if isinstance(value, str) else value, what, _EXAMPLE)
    given.require_keys((*HEADER_KEYS, "start"))
    instruction = given.text("instruction")
    if not instruction:
        raise ConfigError(f"expected an instruction in {what}, got {dict(given.raw)!r}; write {_EXAMPLE}")
    if given.raw.get("check") is None:
        if not has_judge:
            raise ConfigError(
                f"expected a check in {what}, got only the description {instruction!r}: a description alone cannot be "
                "validated, so every attempt would get the same reward and there is nothing to learn from; let a judge "
                "decide (judge.base_url=... judge.model=..., docs/judge.md), add a check, such as "
                f'{{"query": "wifi_enabled", "expected": "true"}}, as in {_EXAMPLE}, or use task ids'
            )
        goal, start = None, _parse_judged_start(given, device)
    else:
        suggest = suggest_values if device.is_seeded else None
        goal = parse_goal(given.raw["check"], f"the check of {what}", device, suggest)
        start = _find_start(given, goal) if device.is_seeded else _refuse_start(given, device)
    task_id = given.text("task_id") or f"custom_{_slug(instruction)}"
    return DescribedTask(
        task_id=task_id,
        instruction=instruction,
        goal=goal,
        start=start,
        category=read_category(given),
        difficulty=read_difficulty(given),
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
    _make_phones(start, given.what)
    return start


def _slug(instruction: str) -> str:
    """The instruction as part of a task id, with a hash if it was shortened or is not ASCII."""
    slug = re.sub(r"[^a-z0-9]+", "_", instruction.lower()).strip("_")
    if len(slug) <= 60 and instruction.isascii():
        return slug
    return f"{slug[:51]}_{sha256(instruction.encode()).hexdigest()[:8]}".lstrip("_")


def _refuse_start(given: Fields, device: DeviceAbilities) -> None:
    if given.raw.get("start") is not None:
        raise ConfigError(
            f"expected start only on devices made from a seed, got it in {given.what} for {device.name}; leave it out"
        )


def _find_start(given: Fields, goal: Goal) -> Start:
    """The requested start, or else the simplest one on which the goal does not hold yet."""
    wanted, row = given.raw.get("start"), NEEDED_ROWS.get(goal.query.partition(":")[0])
    if wanted is None:
        starts, do = list(_possible_starts(goal, row)), 'add start, such as {"off": ["wifi"]}'
    else:
        starts, do = [parse_start(wanted, f"the start of {given.what}")], "change start"
        system = starts[0].system
        if row is not None and (system is None or row not in system.extra_rows):
            raise ConfigError(
                f"expected a start with the page of Settings that {goal.query} needs in {given.what}, got {wanted!r}; "
                f'add "system": {{"extra_rows": ["{row}"]}} to it'
            )
    phones = _make_phones(starts[0], given.what)
    require_possible(goal, phones, given.what)
    if goal.how == "told" and (num_silent := sum(read_query(phone, goal.query) == "" for phone in phones)):
        logger.warning(
            "%s: on %d of %d phones %s has no value when the task begins, and no answer can be right until it has one",
            given.what, num_silent, len(phones), goal.query,
        )  # fmt: skip
    for start in starts:
        if not _num_done(goal, start, given.what):
            return start
    raise ConfigError(
        f"expected {given.what} to be undone when it begins, got {goal.query} == {goal.expected} on "
        f"{_num_done(goal, starts[0], given.what)} of {_NUM_PHONES_TRIED} phones before anything was done; {do}, or "
        "check something else"
    )


def _possible_starts(goal: Goal, row: str | None) -> Iterator[Start]:
    """Initial states to try, the simplest first, each with the needed row of Settings."""
    simplest = Start(system=None if row is None else SystemStart(extra_rows=(row,)))
    yield simplest
    for toggle in Toggle:
        yield replace(simplest, off=(toggle,))
        yield replace(simplest, on=(toggle,))
    if goal.expected.isdigit() and int(goal.expected) in SCREEN_TIMEOUTS_MS:
        yield replace(simplest, not_screen_timeout_ms=int(goal.expected))
    yield replace(simplest, brightness_level=128 if goal.expected != "128" else 64)
    yield replace(simplest, media_volume=7 if goal.expected != "7" else 4)
    yield replace(simplest, app="clock")


def _make_phones(start: Start, what: str) -> list[PhoneState]:
    seeds = Random("custom-task").sample(range(2_000_000), _NUM_PHONES_TRIED)
    with boundary(ConfigError, f"expected a start that a phone can have in {what}, change it"):
        return [make_phone_state(seed, start) for seed in seeds]


def _num_done(goal: Goal, start: Start, what: str) -> int:
    """The number of phones on which the goal holds at the start."""
    return sum(goal.is_met(read_query(phone, goal.query), None) for phone in _make_phones(start, what))
