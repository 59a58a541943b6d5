"""What the site knows about people and groups: drawn from a seed, written to its database, and read back."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

ADMINISTRATOR = "admin"
DATABASE = "db.sqlite3"
_FIRST_EVAL_SEED = 1_000_000
_PEOPLE = {
    "train": (
        "alice", "boris", "clara", "derek", "elena", "felix", "greta", "henry", "irene", "jonas", "karla", "linus",
        "maria", "nadia", "oscar", "paula", "quinn", "robin", "sarah", "tomas",
    ),
    "eval": (
        "astrid", "bruno", "celine", "dario", "edith", "fabio", "gwen", "hector", "ingrid", "julian", "kirsten",
        "leonard", "mila", "nestor", "olga", "pedro", "rosa", "stefan", "thea", "viktor",
    ),
}  # fmt: skip
_GROUPS = {
    "train": ("Editors", "Writers", "Support", "Finance", "Testers", "Drivers", "Readers", "Sellers"),
    "eval": ("Auditors", "Planners", "Curators", "Trainers", "Couriers", "Painters", "Analysts", "Guides"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Person:
    """A user of the site, but for the administrator."""

    username: str
    email: str
    is_active: bool = True
    is_staff: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteState:
    """Everything that tasks are about."""

    people: tuple[Person, ...]
    groups: tuple[str, ...]

    def as_json(self) -> str:
        """The same text for the same state, in whatever order it was made."""
        people = sorted((asdict(person) for person in self.people), key=lambda person: str(person["username"]))
        return json.dumps({"people": people, "groups": sorted(self.groups)})

    def with_person(self, name: str, /, **changes: str | bool) -> "SiteState":
        """The state after one person has changed."""
        people = tuple(
            replace(person, **changes) if person.username == name else person  # pyrefly: ignore[bad-argument-type]
            for person in self.people
        )
        return replace(self, people=people)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Names for an instance: those on the site, and others that are new to it."""

    state: SiteState
    new_people: tuple[str, ...]
    new_groups: tuple[str, ...]


def draw_names(seed: int) -> Names:
    """The site of a seed; names for evaluation are never seen in training."""
    split = "train" if seed < _FIRST_EVAL_SEED else "eval"
    random = Random(f"site-{seed}")
    people = random.sample(_PEOPLE[split], 12)
    groups = random.sample(_GROUPS[split], 6)
    num_groups = random.randrange(2, 5)
    state = SiteState(
        people=tuple(Person(username=name, email=f"{name}@example.com") for name in people[: random.randrange(4, 9)]),
        groups=tuple(groups[:num_groups]),
    )
    return Names(state=state, new_people=tuple(people[8:]), new_groups=tuple(groups[num_groups:]))


def write_state(database: Path, state: SiteState) -> None:
    """Add people and groups to a fresh database."""
    people = [(person.username, person.email, person.is_active, person.is_staff) for person in state.people]
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.executemany(
            "INSERT INTO auth_user (username, email, is_active, is_staff, password, is_superuser, first_name, "
            "last_name, date_joined) VALUES (?, ?, ?, ?, '!', 0, '', '', '2026-01-01 00:00:00')",
            people,
        )
        connection.executemany("INSERT INTO auth_group (name) VALUES (?)", [(name,) for name in state.groups])


def read_state(database: Path) -> SiteState:
    """People and groups as they are now."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        people: Sequence[tuple[str, str, int, int]] = connection.execute(
            "SELECT username, email, is_active, is_staff FROM auth_user WHERE username != ?", (ADMINISTRATOR,)
        ).fetchall()
        groups: Sequence[tuple[str]] = connection.execute("SELECT name FROM auth_group").fetchall()
    return SiteState(
        people=tuple(
            Person(username=name, email=email, is_active=bool(is_active), is_staff=bool(is_staff))
            for name, email, is_active, is_staff in people
        ),
        groups=tuple(name for (name,) in groups),
    )
