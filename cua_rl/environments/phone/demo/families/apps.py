"""Families of tasks inside apps: one function per kind of task, with what differs between seeds drawn from a `Pool`."""

import json
from dataclasses import dataclass
from random import Random

from cua_rl.environments.phone.demo.template import Instance, Move, TapKey, Tell, family, tap, type_in
from cua_rl.environments.phone.simulator.catalog import APPS
from cua_rl.environments.phone.simulator.start import AppStart, Start
from cua_rl.environments.phone.simulator.state import Contact
from cua_rl.tasks.goal import Goal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Values that task parameters are drawn from; those of training and evaluation are disjoint."""

    people: tuple[str, ...]
    """Names of the phone's address books."""
    strangers: tuple[str, ...]
    """Names that no address book has."""
    texts: tuple[str, ...]
    notes: tuple[str, ...]
    folders: tuple[str, ...]
    searches: tuple[str, ...]
    addresses: tuple[str, ...]
    tracks: tuple[str, ...]
    minutes: tuple[int, ...]
    """Minutes of an hour at which no alarm of a phone's seed is set."""


def open_from_home(app: str) -> Move:
    """The first move into an app whose icon is on a home page."""
    return tap("home", APPS[app].label)


def start_with(app: str, apps: AppStart | None = None, *, contact: str | None = None) -> Start:
    """A phone with the app on its first home page."""
    return Start(first_page=("settings", app), contact=contact, apps=apps or AppStart())


def _fill(screen: str, text: str, *, label: str | None = None) -> tuple[Move, ...]:
    """Type into a field of a screen that has one, tapping it first where it has a label."""
    focus = () if label is None else (tap(screen, label, query="focused_field"),)
    return (*focus, type_in(screen, text, query="draft_text"))


def _person(random: Random, pool: Pool) -> Contact:
    return Contact(name=random.choice(pool.people), number=_number(random))


def _number(random: Random) -> str:
    return f"556 {random.randrange(1000, 10_000)}"


def _digits(number: str) -> str:
    return number.replace(" ", "")


def tap_keys(screen: str, keys: str, query: str) -> tuple[Move, ...]:
    """Tap the keys of a dialler or calculator one by one; `query` reads what has been typed."""
    return tuple(
        Move(screen=screen, operation=TapKey(label=key), query=query, value=keys[:i]) for i, key in enumerate(keys)
    )


@family(max_turns=10, difficulty="hard", tags=("app_task", "phone"))
def call_number(random: Random, num_digits: int = 5) -> Instance:
    number = str(random.randrange(10 ** (num_digits - 1), 10**num_digits))
    return Instance(
        instruction=f"Call the number {number}.",
        start=start_with("phone"),
        goal=Goal(query="called_numbers", expected=json.dumps(number), how="includes"),
        route=(open_from_home("phone"), *tap_keys("phone", number, "dialled_number"), tap("phone", "Call")),
    )


@family(max_turns=7, tags=("app_task", "contacts"))
def call_contact(random: Random, pool: Pool) -> Instance:
    person = _person(random, pool)
    return Instance(
        instruction=f"Call {person.name}, who is in Contacts.",
        start=start_with("contacts", AppStart(contacts=(person,))),
        goal=Goal(query="called_numbers", expected=json.dumps(_digits(person.number)), how="includes"),
        route=(*_to_person(person.name), tap(f"contacts/person:{person.name}", "Call")),
    )


def _to_person(name: str) -> tuple[Move, ...]:
    return open_from_home("contacts"), tap("contacts", name)


@family(max_turns=11, category="input", difficulty="hard", tags=("app_task", "phone"))
def add_contact_from_phone(random: Random, pool: Pool) -> Instance:
    """Dial a number and save it under a name."""
    name, number = random.choice(pool.strangers), str(random.randrange(1000, 10_000))
    return Instance(
        instruction=f"In Phone, type the number {number} and add it to the contacts as {name}.",
        start=start_with("phone", AppStart(without_contacts=(name,))),
        goal=Goal(query=f"contact_digits:{name}", expected=number),
        route=(
            open_from_home("phone"),
            *tap_keys("phone", number, "dialled_number"),
            tap("phone", "Add", query="dialled_number", value=number),
            *_fill("phone/new", name),
            tap("phone/new", "Save"),
        ),
    )


@family(max_turns=9, category="input", difficulty="hard", tags=("app_task", "contacts"))
def add_contact(random: Random, pool: Pool) -> Instance:
    name, number = random.choice(pool.strangers), _digits(_number(random))
    return Instance(
        instruction=f"Add {name} with the number {number} to Contacts.",
        start=start_with("contacts", AppStart(without_contacts=(name,))),
        goal=Goal(query=f"contact_digits:{name}", expected=number),
        route=(
            open_from_home("contacts"),
            tap("contacts", "New"),
            *_two_fields("contacts/new", ("name", name), ("number", number), label="Number"),
        ),
    )


def _two_fields(screen: str, first: tuple[str, str], second: tuple[str, str], *, label: str) -> tuple[Move, ...]:
    """Type into the first field, which has the focus, then into the second, which has a label, and save."""
    (one, one_text), (_, two_text) = first, second
    return (
        type_in(screen, one_text, query="typed"),
        tap(screen, label, query="focused_field", value=one),
        type_in(screen, two_text, query="typed", value=f"{one}={one_text}"),
        tap(screen, "Save"),
    )


@family(max_turns=7, category="input", tags=("app_task", "contacts"))
def search_contact(random: Random, pool: Pool) -> Instance:
    person = _person(random, pool)
    return Instance(
        instruction=f"Search for {person.name} in Contacts and open the entry.",
        start=start_with("contacts", AppStart(contacts=(person,))),
        goal=Goal(query="current_screen", expected=f"contacts/person:{person.name}"),
        route=(
            open_from_home("contacts"),
            tap("contacts", "Search"),
            *_fill("contacts/search", person.name),
            tap("contacts/search", person.name),
        ),
    )


@family(max_turns=7, tags=("app_task", "contacts"))
def delete_contact(random: Random, pool: Pool) -> Instance:
    person = _person(random, pool)
    return Instance(
        instruction=f"Delete {person.name} from Contacts.",
        start=start_with("contacts", AppStart(contacts=(person,))),
        goal=Goal(query=f"contact_number:{person.name}", expected=""),
        route=(*_to_person(person.name), tap(f"contacts/person:{person.name}", "Delete")),
    )


@family(max_turns=6, tags=("app_task", "question"))
def tell_contact_number(random: Random, pool: Pool) -> Instance:
    """Look up a phone number and say it."""
    person = _person(random, pool)
    query = f"contact_number:{person.name}"
    return Instance(
        instruction=f"What is the phone number of {person.name}? Answer with the number.",
        start=start_with("contacts", AppStart(contacts=(person,))),
        goal=Goal(query=query, how="told"),
        route=(*_to_person(person.name), Move(screen=f"contacts/person:{person.name}", operation=Tell(query=query))),
    )


@family(max_turns=8, category="input", difficulty="hard", tags=("app_task", "messages"))
def reply_to(random: Random, pool: Pool) -> Instance:
    name, text = random.choice(pool.people), random.choice(pool.texts)
    goal = Goal(query="sent_messages", expected=json.dumps({"to": name, "text": text}), how="includes")
    sending = tuple(tap(f"messages/{i}", "Send") for i in range(5))
    return _writing(name, text, f'In Messages, write "{text}" to {name}.', goal, *sending)


@family(max_turns=7, category="input", difficulty="hard", tags=("app_task", "messages"))
def draft_reply(random: Random, pool: Pool) -> Instance:
    """Write an answer in a conversation and leave it unsent."""
    name, text = random.choice(pool.people), random.choice(pool.texts)
    instruction = f'In Messages, write "{text}" to {name} but do not send it.'
    return _writing(name, text, instruction, Goal(query=f"message_draft:{name}", expected=text))


def _writing(name: str, text: str, instruction: str, goal: Goal, *moves: Move) -> Instance:
    typing = tuple(move for i in range(5) for move in _fill(f"messages/{i}", text, label="Message"))
    return Instance(
        instruction=instruction,
        start=start_with("messages", contact=name),
        goal=goal,
        route=(open_from_home("messages"), tap("messages", name), *typing, *moves),
    )


@family(max_turns=11, category="input", difficulty="hard", tags=("app_task", "messages"))
def message_contact(random: Random, pool: Pool) -> Instance:
    """Begin a conversation with somebody in the address book."""
    name, text = random.choice(pool.strangers), random.choice(pool.texts)
    screen = f"messages/to:{name}"
    return Instance(
        instruction=f'Send "{text}" to {name} in a new message.',
        start=start_with("messages", AppStart(contacts=(Contact(name=name, number=_number(random)),))),
        goal=Goal(query="sent_messages", expected=json.dumps({"to": name, "text": text}), how="includes"),
        route=(
            open_from_home("messages"),
            tap("messages", "New"),
            tap("messages/new", name),
            *_fill(screen, text, label="Message"),
            tap(screen, "Send"),
        ),
    )


@family(max_turns=7, category="input", difficulty="hard", tags=("app_task", "notes"))
def write_drawn_note(random: Random, pool: Pool) -> Instance:
    text = random.choice(pool.notes)
    return Instance(
        instruction=f'Write a note that says "{text}" and save it.',
        start=start_with("notes"),
        goal=Goal(query=f"has_note:{text}", expected="true"),
        route=(open_from_home("notes"), tap("notes", "New"), *_fill("notes/new", text), tap("notes/new", "Save")),
    )


@family(max_turns=6, tags=("app_task", "notes"))
def delete_note(random: Random, pool: Pool) -> Instance:
    text = random.choice(pool.notes)
    shown = tuple(tap(f"notes/note:{i}", "Delete", query="shown_note", value=text) for i in range(4))
    return Instance(
        instruction=f'Delete the note that says "{text}".',
        start=start_with("notes", AppStart(note=text)),
        goal=Goal(query=f"has_note:{text}", expected="false"),
        route=(open_from_home("notes"), tap("notes", text), *shown),
    )


@family(max_turns=9, category="input", difficulty="hard", tags=("app_task", "clock"))
def set_alarm(random: Random, pool: Pool) -> Instance:
    hour, minute = random.randrange(24), random.choice(pool.minutes)
    time = f"{hour:02d}:{minute:02d}"
    fields = ("hour", f"{hour:02d}"), ("minute", f"{minute:02d}")
    return Instance(
        instruction=f"Set an alarm for {time}.",
        start=start_with("clock"),
        goal=Goal(query=f"is_alarm_on:{time}", expected="true"),
        route=(open_from_home("clock"), tap("clock", "New"), *_two_fields("clock/new", *fields, label="Minute")),
    )


@family(max_turns=5, difficulty="easy", tags=("app_task", "clock"))
def switch_alarm(random: Random, pool: Pool, *, turn_on: bool) -> Instance:
    time = f"{random.randrange(24):02d}:{random.choice(pool.minutes):02d}"
    return Instance(
        instruction=f"Turn {'on' if turn_on else 'off'} the alarm at {time}.",
        start=start_with("clock", AppStart(alarm=time, is_alarm_on=not turn_on)),
        goal=Goal(query=f"is_alarm_on:{time}", expected="true" if turn_on else "false"),
        route=(open_from_home("clock"), tap("clock", time)),
    )


@family(max_turns=7, category="input", tags=("app_task", "clock"))
def start_timer(random: Random, pool: Pool) -> Instance:
    minutes = random.choice(pool.minutes)
    return Instance(
        instruction=f"Start a timer of {minutes} minutes.",
        start=start_with("clock"),
        goal=Goal(query="timer_s", expected=str(60 * minutes)),
        route=(
            open_from_home("clock"),
            tap("clock", "Timer"),
            *_fill("clock/timer", str(minutes)),
            tap("clock/timer", "Start"),
        ),
    )
