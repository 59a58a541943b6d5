"""Goals: what a query must return when the agent has finished, and checks in dictionaries that say so.

A check that no device could pass is refused: a task that cannot be done has no learning signal.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.environments.query_values import Values
from cua_rl.tasks.answers import is_answer
from cua_rl.tasks.fields import read_mapping, require_known
from cua_rl.types.errors import ConfigError
from cua_rl.types.judgement import Validation

How = Literal["equals", "includes", "told"]
Suggest = Callable[[str, str], Sequence[str]]
"""From a query without its argument and a value that it never has to those that may be meant."""

_ALL_TRUE, _ALL_FALSE = ("yes", "on", "1", "enabled", "true"), ("no", "off", "0", "disabled", "false")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The result that a query must have for success.

    `how`: "equals"; "includes" (the answer is a JSON list with an item equal to `expected`, itself JSON); or "told"
    (the agent's final message must answer with what the query reads, and that must be `expected`, where it is given).
    """

    query: str
    expected: str = ""
    how: How = "equals"

    def is_met(self, actual: str, answer: str | None) -> bool:
        """Whether the query's answer meets the goal and, for questions, the agent's message is that answer."""
        match self.how:
            case "equals":
                return actual == self.expected
            case "includes":
                return json.loads(self.expected) in json.loads(actual)
            case "told":
                return self.expected in ("", actual) and is_answer(answer, actual)


async def check_goal(goal: Goal, device: Device, answer: str | None) -> Validation:
    started = time.monotonic()
    actual = await device.query(goal.query)
    success = goal.is_met(actual, answer)
    return Validation(
        query=goal.query,
        expected=actual if goal.how == "told" else goal.expected,
        actual=(answer or "") if goal.how == "told" else actual,
        success=success,
        duration_s=time.monotonic() - started,
    )


def parse_goal(value: object, what: str, device: DeviceAbilities, suggest: Suggest | None = None) -> Goal:
    """Read a check that a device with these abilities can make; `what` names it in messages."""
    given = read_mapping(value, what, '{"query": "wifi_enabled", "expected": "true"}')
    given.require_keys(("query", "expected", "how"))
    query, how = given.text("query"), cast(How, given.choice("how", get_args(How)) or "equals")
    if not query:
        raise ConfigError(
            f"expected a query in {what}, got {dict(given.raw)!r}; add what to read, such as wifi_enabled"
        )
    if (how == "told") != ("expected" not in given.raw):
        raise ConfigError(
            f"expected {what} to say what is expected, except for 'told' (the answer must be what the query "
            f"reads), got {dict(given.raw)!r}; {'leave out' if how == 'told' else 'add'} expected"
        )
    expected = parse_expected(query, given.raw.get("expected", ""), how, what, device, suggest)
    return Goal(query=query, expected=expected, how=how)


def parse_expected(
    query: str, expected: object, how: How, what: str, device: DeviceAbilities, suggest: Suggest | None = None
) -> str:
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
            if suggest is not None and (near := suggest(base, text)):
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
