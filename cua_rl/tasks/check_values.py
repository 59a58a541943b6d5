"""Refuses checks whose values no device can show: a task that cannot be done has no learning signal."""

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import cast

from cua_rl.environments.device import DeviceAbilities
from cua_rl.environments.phone.simulator.query_values import ARGUMENTS, CHOICES, Choices, listed_part
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.environments.query_values import Values
from cua_rl.errors import ConfigError
from cua_rl.tasks.fields import join_names, require_known
from cua_rl.tasks.goal import Goal, How

_ALL_TRUE, _ALL_FALSE = ("yes", "on", "1", "enabled", "true"), ("no", "off", "0", "disabled", "false")


def parse_expected(query: str, expected: object, how: How, what: str, device: DeviceAbilities) -> str:
    """The expectation as text, as a `Goal` holds it; raises `ConfigError` if no such device could ever answer it."""
    # queries answer in JSON, except that a single text has no quotes: true is "true", 255 is "255"
    text = expected if isinstance(expected, str) and how != "includes" else json.dumps(expected)
    if device.queries is None:
        return text
    base, colon, argument = query.partition(":")
    require_known(f"query of {device.name} in {what}", base, sorted(device.queries))
    spec = device.queries[base]
    if spec.argument is None and colon:
        raise ConfigError(f"expected nothing after {base} in {what}, got {query!r}; write {base!r}")
    if spec.argument is not None and (argument or spec.needs_argument) and not spec.argument.accepts(argument):
        raise _refused(f"{spec.argument.says} after {base}: in {what}", argument, spec.argument, "change the query")
    values = spec.values
    if how != "equals" and (how == "includes") != (values.items is not None):
        wanted = "a list for 'includes'" if how == "includes" else "a single value for 'told'"
        do = "use how='equals'" if how == "includes" else "ask for another query"
        raise ConfigError(
            f"expected a query that answers with {wanted} in {what}, got {query!r}, which answers with {values.says}, "
            f"such as {json.dumps(values.example)}; {do}"
        )
    if how == "includes" and values.items is not None:
        if not values.items.accepts(expected):
            raise _refused(f"{values.items.says} from {query} in {what}", expected, values.items, "change expected")
    elif how == "equals":
        form = values.parse(text)
        if form is None:
            do = "write how='includes' for one of them" if values.items is not None else "change expected"
            if device.is_seeded and base in CHOICES and (near := _near(text, CHOICES[base](make_phone_state(0)))):
                do = f"did you mean {' or '.join(map(repr, near))}?"
            raise _refused(f"{values.says} from {query} in {what}", expected, values, do)
        return form
    return text


def _refused(wanted: str, got: object, values: Values, do: str) -> ConfigError:
    low = str(got).strip().lower()
    near = "true" if low in _ALL_TRUE else "false" if low in _ALL_FALSE else None
    if values.accepts("true") and not values.accepts("x") and near is not None:
        return ConfigError(f"expected {wanted}, got {got!r}; did you mean {near!r}?")
    return ConfigError(f"expected {wanted}, such as {json.dumps(values.example)}, got {got!r}; {do}")


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
    """The choices that people may call so."""
    wanted = value.strip().lower()
    if wanted.isdecimal():  # numbers that look alike are not near
        return []
    called = [name for name, label in choices.items() if wanted and wanted in (label.lower(), *label.lower().split())]
    if called:
        return called[:3]
    words = {word: name for name, label in choices.items() for word in (name.lower(), *label.lower().split())}
    near = get_close_matches(wanted, words, n=3, cutoff=0.6)
    return list(dict.fromkeys(words[word] for word in near))
