"""Tasks that a user describes in a dictionary: an instruction, and a check that the device's state must pass.

    {"instruction": "Turn on Wi-Fi.", "max_turns": 6, "check": {"query": "wifi_enabled", "expected": "true"}}

Where a judge is configured the check may be left out, and an instruction alone is a task.

On a simulated phone each description is a task for every seed, and `start` says how the phone begins. Phones are tried
at load: a check that one of them can never pass, or passes before the agent has done anything, is refused.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from hashlib import sha256
from random import Random
from types import NoneType, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from cua_rl.environments.android.preparation import make_goal_false
from cua_rl.environments.android.shell import DeviceShell
from cua_rl.environments.device import Device, DeviceAbilities, ShellDevice
from cua_rl.environments.phone.simulator import catalog
from cua_rl.environments.phone.simulator.catalog import SCREEN_TIMEOUTS_MS, Toggle
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.query_values import ARGUMENTS, CHOICES, NEEDED_ROWS, Choices, listed_part
from cua_rl.environments.phone.simulator.start import Start, SystemStart, make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.query_values import TIME
from cua_rl.tasks.fields import Fields, join_names, read_mapping, require_known
from cua_rl.tasks.goal import Goal, check_goal, parse_goal
from cua_rl.tasks.task import DEFAULT_MAX_TURNS, HEADER_KEYS, Task, Template, read_category, read_difficulty, read_item
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
    milestones: tuple[Goal, ...] = ()

    def make_task(self, seed: int) -> Task:
        goal, prepare = self.goal, None
        if goal is not None and self.start is None:
            prepare = partial(make_undone, goal)
        validate = None if goal is None else partial(check_goal, goal)
        return self.build_task(
            seed,
            self.instruction,
            validate=validate,
            prepare=prepare,
            milestones=tuple(partial(check_goal, one) for one in self.milestones),
            world=self.start,
        )

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
    given.require_keys((*HEADER_KEYS, "start", "milestones"))
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
        milestones=_parse_milestones(given, device),
        category=read_category(given),
        difficulty=read_difficulty(given),
        max_turns=given.integer("max_turns", at_least=1) or DEFAULT_MAX_TURNS,
        tags=given.texts("tags"),
        item=read_item(given),
    )


def _parse_milestones(given: Fields, device: DeviceAbilities) -> tuple[Goal, ...]:
    suggest = suggest_values if device.is_seeded else None
    goals = [
        parse_goal(one, f"milestone {number} of {given.what}", device, suggest)
        for number, one in enumerate(given.items("milestones"), start=1)
    ]
    if any(goal.how == "told" for goal in goals):
        raise ConfigError(
            f"expected milestones of {given.what} that a device's state shows, got one that the answer tells, which "
            "comes last; make it the check, or leave it out"
        )
    return tuple(goals)


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


def suggest_values(query: str, value: str) -> list[str]:
    """Values of this query that may be meant; the query is without its argument."""
    return _near(value, CHOICES[query](make_phone_state(0))) if query in CHOICES else []


def require_possible(goal: Goal, phones: Sequence[PhoneState], what: str) -> None:
    """Raise `ConfigError` unless each of the phones could answer what the goal expects."""
    base, _, argument = goal.query.partition(":")
    _require_choice(ARGUMENTS.get(base), argument, phones, f"{base}:... in the check of {what}")
    if goal.how == "told":
        return
    value: object = goal.expected
    if goal.how == "includes" or goal.expected.startswith("["):
        value = json.loads(goal.expected)
    for one in cast("list[object]", value) if isinstance(value, list) else [value]:
        part = listed_part(base, one if isinstance(one, str) else json.dumps(one))
        _require_choice(CHOICES.get(base), part, phones, f"{goal.query} in the check of {what}")


def _require_choice(
    choices: Callable[[PhoneState], Choices] | None, value: str, phones: Sequence[PhoneState], what: str
) -> None:
    if choices is None:
        return
    offered = [choices(phone) for phone in phones]
    num_able = sum(value in one for one in offered)
    if num_able == len(phones):
        return
    everywhere = {name: label for name, label in offered[0].items() if all(name in one for one in offered)}
    if num_able:
        do = "set start so that every phone can, or choose another value"
    elif near := _near(value, everywhere):
        do = f"did you mean {' or '.join(map(repr, near))}?"
    elif not everywhere:
        do = "which the agent cannot change; let it tell the value (how='told'), or check something else"
    else:
        names = list(everywhere)
        do = f"choose one of {join_names(names[:20])}{f', ... {names[-1]!r}' if len(names) > 20 else ''}"
    raise ConfigError(f"expected a value that {what} can have, got {value!r}, possible on {num_able} of {len(phones)} "
                      f"simulated phones; {do}")  # fmt: skip


def _near(value: str, choices: Mapping[str, str]) -> list[str]:
    """The choices that may go by this name."""
    wanted = value.strip().lower()
    if wanted.isdecimal():  # numbers that look alike are not similar
        return []
    called = [name for name, label in choices.items() if wanted and wanted in (label.lower(), *label.lower().split())]
    if called:
        return called[:3]
    words = {word: name for name, label in choices.items() for word in (name.lower(), *label.lower().split())}
    near = get_close_matches(wanted, words, n=3, cutoff=0.6)
    return list(dict.fromkeys(words[word] for word in near))


def parse_start(value: object, what: str) -> Start:
    """The `Start` with the fields in a dictionary; raises `ConfigError` for impossible values."""
    start = Start(**_parse_record(Start, read_mapping(value, what, '{"off": ["wifi"]}')))
    on_pages = [*start.first_page, *start.second_page]
    for kind, known, names in _names(start):
        for name in names:
            require_known(f"{kind} in {what}", name, known)
    for key, level, allowed in _levels(start):
        if level is not None and level not in allowed:
            raise ConfigError(f"expected {key} from {min(allowed)} to {max(allowed)} in {what}, got {level}; change it")
    if start.apps.alarm is not None and not TIME.accepts(start.apps.alarm):
        raise ConfigError(f"expected alarm as a time such as 06:45 in {what}, got {start.apps.alarm!r}; change it")
    if {*start.first_rows} & {*start.hidden_rows} or len({*start.first_rows}) > catalog.NUM_ROWS_VISIBLE:
        raise ConfigError(
            f"expected at most {catalog.NUM_ROWS_VISIBLE} first_rows and others as hidden_rows in {what}, got "
            f"{list(start.first_rows)!r} and {list(start.hidden_rows)!r}; change them"
        )
    if (
        len(set(on_pages)) < len(on_pages)
        or max(len(start.first_page), len(start.second_page)) > catalog.NUM_ICONS_PER_PAGE
    ):
        raise ConfigError(
            f"expected each app once and at most {catalog.NUM_ICONS_PER_PAGE} apps on a home page in {what}, got "
            f"first_page {list(start.first_page)!r} and second_page {list(start.second_page)!r}; change them"
        )
    system = start.system or SystemStart()
    both = sorted({*start.on} & {*start.off} | {*system.on} & {*system.off})
    if both:
        raise ConfigError(f"expected each toggle either on or off in {what}, got {both!r} in both; drop one")
    return start


def _names(start: Start) -> Iterator[tuple[str, Collection[str], tuple[str, ...]]]:
    """What names are of, which are known, and those given."""
    system, apps = start.system or SystemStart(), start.apps
    on_pages = (*start.first_page, *start.second_page)
    yield "app", catalog.APPS, (*on_pages, *start.recent_apps, *([start.app] if start.app else []), *apps.off_home)
    changed = (system.running_app, system.notifying_app, system.silent_app)
    yield (
        "app",
        {**catalog.APPS, **catalog.STORE_APPS},
        (*filter(None, changed), *apps.on_home, *(apps.home_folder or ())[1:]),
    )
    yield "app of the store", catalog.STORE_APPS, (system.store_app,) if system.store_app else ()
    yield "row of Settings", catalog.SETTINGS, (*start.first_rows, *start.hidden_rows)
    yield "page of Settings", catalog.EXTRA_ROWS, system.extra_rows
    yield "switch", catalog.SWITCHES, (*system.on, *system.off)


def _levels(start: Start) -> Iterator[tuple[str, int | None, Collection[int]]]:
    yield "brightness_level", start.brightness_level, range(catalog.MIN_BRIGHTNESS, catalog.MAX_BRIGHTNESS + 1)
    yield "media_volume", start.media_volume, range(catalog.MAX_VOLUME + 1)
    yield "home_page", start.home_page, range(2)
    yield "num_photos", start.apps.num_photos, range(1000)
    yield "not_screen_timeout_ms", start.not_screen_timeout_ms, catalog.SCREEN_TIMEOUTS_MS
    yield "not_wallpaper", (start.system or SystemStart()).not_wallpaper, range(len(catalog.WALLPAPERS))


def _parse_record(kind: type, given: Fields) -> dict[str, Any]:
    kinds: dict[str, Any] = get_type_hints(kind)
    given.require_keys(kinds)
    for field in fields(kind):
        if field.name not in given.raw and field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"expected {field.name} in {given.what}, got {dict(given.raw)!r}; add it")
    record: dict[str, Any] = {}
    for key, value in given.raw.items():
        members = get_args(kinds[key]) if get_origin(kinds[key]) in (Union, UnionType) else (kinds[key],)
        member = next(member for member in members if member is not NoneType)
        if value is None and NoneType in members:
            record[key] = None
        elif get_origin(member) is tuple:
            part = get_args(member)[0]
            record[key] = tuple(_parse_item(part, item, given, key) for item in given.items(key))
        else:
            record[key] = _parse_item(member, value, given, key)
    return record


def _parse_item(kind: Any, value: object, given: Fields, key: str) -> object:
    if is_dataclass(cast(object, kind)):
        return kind(**_parse_record(kind, read_mapping(value, f"{key} in {given.what}", "{...}")))
    if issubclass(kind, StrEnum):
        require_known(f"{key} in {given.what}", str(value), [str(member) for member in kind])
        return kind(str(value))
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise given.error(key, _NAMES.get(kind, kind.__name__))
    return value


_NAMES: Mapping[type, str] = {str: "text", int: "a whole number", bool: "true or false"}
