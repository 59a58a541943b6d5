"""Refuses checks whose values no simulated phone can show: a task that cannot be done has no learning signal."""

import json
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import cast

from cua_rl.environments.phone.simulator.query_values import ARGUMENTS, CHOICES, Choices, listed_part
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.tasks.fields import join_names
from cua_rl.tasks.goal import Goal
from cua_rl.types.errors import ConfigError


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
