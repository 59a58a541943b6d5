"""Reading user-written dictionaries: every mistake is a `ConfigError` that says where it is and how to fix it."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar, cast

from cua_rl.types.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """A dictionary with its name for messages, such as "a task source"; a missing key reads as None or ()."""

    raw: Mapping[str, object]
    what: str

    def require_keys(self, known: Iterable[str]) -> None:
        known = list(known)
        for key in self.raw:
            require_known(f"key of {self.what}", key, known)

    def text(self, key: str) -> str | None:
        """The value, which must be text."""
        value = self.raw.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.error(key, "text")

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, or one text with commas."""
        items = self.items(key)
        texts = tuple(item for item in items if isinstance(item, str))
        if len(texts) < len(items):
            raise self.error(key, "a list of texts")
        return texts

    def items(self, key: str) -> tuple[object, ...]:
        """A list of any values; text is split at commas, and any other single value becomes a list of one."""
        value = self.raw.get(key)
        if isinstance(value, str):
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if isinstance(value, list | tuple):
            return tuple(cast(Sequence[object], value))
        return () if value is None else (value,)

    def integer(self, key: str, *, at_least: int) -> int | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            raise self.error(key, f"a whole number of at least {at_least}")
        return value

    def share(self, key: str) -> float | None:
        """A number from 0 to 1."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise self.error(key, "a number from 0 to 1")
        return float(value)

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        """One of the given words; None if the key is missing."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.error(key, f"one of {join_names(choices)}")
        require_known(key, value, choices)
        return value

    def matching(self, key: str, pattern: str, expected: str) -> str | None:
        """Text that has this form throughout."""
        value = self.text(key)
        if value is not None and re.fullmatch(pattern, value) is None:
            raise self.error(key, expected)
        return value

    def error(self, key: str, expected: str) -> ConfigError:
        """The mistake at a key, to be raised."""
        return ConfigError(f"expected {key} as {expected}, got {self.raw.get(key)!r} in {self.what}; change {key}")


def given(read: Callable[[Fields, str], T]) -> T:
    """A field of a dataclass that a dictionary fills in by this reader, and an empty dictionary with the default."""
    return field(default=read(Fields(raw={}, what=""), ""), metadata={"read": read})


def read_mapping(value: object, what: str, example: str) -> Fields:
    """The value as fields, if it is a dictionary; `example` shows one."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"expected {what} as a dictionary such as {example}, got {value!r}")
    return Fields(raw=cast(Mapping[str, object], value), what=what)


def require_known(what: str, got: str, known: Iterable[str]) -> None:
    """Raise unless `got` is one of the known names; the message suggests the nearest."""
    known = list(known)
    if got in known:
        return
    near = get_close_matches(got, known, n=3)
    if near:
        do = f"did you mean {' or '.join(map(repr, near))}?"
    else:
        do = f"choose one of {join_names(known[:20])}{', ...' if len(known) > 20 else ''}"
    raise ConfigError(f"expected a known {what}, got {got!r}; {do}")


def join_names(names: Iterable[str]) -> str:
    """The names in quotes, for a message."""
    return ", ".join(map(repr, names))


def read_text(path: Path, kind: str = "a file") -> str:
    """The content of a file with tasks; raises `ConfigError`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"expected {kind} with tasks at {str(path)!r}, got {error}; check file_path") from error


def parse_json(text: str, where: str) -> object:
    """The value that a user wrote; raises `ConfigError`."""
    try:
        return cast("object", json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"expected JSON in {where}, got {text[:80]!r} ({error}); repair it") from None
