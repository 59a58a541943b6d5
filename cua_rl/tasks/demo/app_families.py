"""Families of tasks inside apps: one function per kind of task, with what differs between seeds drawn from a `Pool`."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from cua_rl.devices.simulator.catalog import APPS
from cua_rl.devices.simulator.start import AppStart, Start
from cua_rl.devices.simulator.state import Contact
from cua_rl.tasks.demo.template import Instance, Move, TapKey, TapOn, TaskTemplate, Tell, TypeIn
from cua_rl.tasks.goal import Goal
from cua_rl.tasks.task import Category, Difficulty

_SLACK_TURNS = 2
"""Turns that a task leaves beside those of the longest way of its expert, which ends by saying so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """What parameters are drawn from; training and evaluation have no word in common."""

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


def app_template(
    task_id: str,
    draw: Callable[[Random], Instance],
    *,
    num_turns: int,
    category: Category = "app",
    difficulty: Difficulty = "medium",
    tag: str,
) -> TaskTemplate:
    """A template whose expert needs at most `num_turns` turns, the one in which it stops included."""
    return TaskTemplate(
        task_id=task_id,
        category=category,
        difficulty=difficulty,
        max_turns=num_turns + _SLACK_TURNS,
        draw=draw,
        tags=("app_task", tag),
    )


def open_from_home(app: str) -> Move:
    """The first move into an app whose icon is on a home page."""
    return Move(screen="home", deed=TapOn(label=APPS[app].label))


def start_with(app: str, apps: AppStart, *, contact: str | None = None) -> Start:
    """A phone with the app on its first home page."""
    return Start(first_page=("settings", app) if app != "settings" else ("settings",), contact=contact, apps=apps)


def _fill(screen: str, text: str, *, label: str | None = None) -> tuple[Move, ...]:
    """Type into a field of a screen that has one, tapping it first where it has a label."""
    tap = () if label is None else (Move(screen=screen, deed=TapOn(label=label), query="focused_field"),)
    return (*tap, Move(screen=screen, deed=TypeIn(text=text), query="draft_text"))


def _person(random: Random, pool: Pool) -> Contact:
    return Contact(name=random.choice(pool.people), number=_number(random))


def _number(random: Random) -> str:
    return f"556 {random.randrange(1000, 10_000)}"


def _digits(number: str) -> str:
    return number.replace(" ", "")


def _dial(number: str) -> tuple[Move, ...]:
    """Tap the keys of the dialler one by one."""
    return tuple(
        Move(screen="phone", deed=TapKey(label=digit), query="dialled_number", value=number[:i])
        for i, digit in enumerate(number)
    )


def call_number(task_id: str) -> TaskTemplate:
    """Dial a number and call it."""

    def draw(random: Random) -> Instance:
        number = str(random.randrange(10_000, 100_000))
        return Instance(
            instruction=f"Call the number {number}.",
            start=start_with("phone", AppStart()),
            goal=Goal(query="called_numbers", expected=json.dumps(number), how="includes"),
            route=(open_from_home("phone"), *_dial(number), Move(screen="phone", deed=TapOn(label="Call"))),
        )

    return app_template(task_id, draw, num_turns=8, difficulty="hard", tag="phone")


def call_contact(task_id: str, pool: Pool) -> TaskTemplate:
    """Call somebody in the address book."""

    def draw(random: Random) -> Instance:
        person = _person(random, pool)
        return Instance(
            instruction=f"Call {person.name}, who is in Contacts.",
            start=start_with("contacts", AppStart(contacts=(person,))),
            goal=Goal(query="called_numbers", expected=json.dumps(_digits(person.number)), how="includes"),
            route=(*_to_person(person.name), Move(screen=f"contacts/person:{person.name}", deed=TapOn(label="Call"))),
        )

    return app_template(task_id, draw, num_turns=5, tag="contacts")


def _to_person(name: str) -> tuple[Move, ...]:
    return open_from_home("contacts"), Move(screen="contacts", deed=TapOn(label=name))


def add_contact_from_phone(task_id: str, pool: Pool) -> TaskTemplate:
    """Dial a number and save it under a name."""

    def draw(random: Random) -> Instance:
        name, number = random.choice(pool.strangers), str(random.randrange(1000, 10_000))
        return Instance(
            instruction=f"In Phone, type the number {number} and add it to the contacts as {name}.",
            start=start_with("phone", AppStart(without_contacts=(name,))),
            goal=Goal(query=f"contact_digits:{name}", expected=number),
            route=(
                open_from_home("phone"),
                *_dial(number),
                Move(screen="phone", deed=TapOn(label="Add"), query="dialled_number", value=number),
                *_fill("phone/new", name),
                Move(screen="phone/new", deed=TapOn(label="Save")),
            ),
        )

    return app_template(task_id, draw, num_turns=9, category="input", difficulty="hard", tag="phone")


def add_contact(task_id: str, pool: Pool) -> TaskTemplate:
    """Fill in the form for a new contact."""

    def draw(random: Random) -> Instance:
        name, number = random.choice(pool.strangers), _digits(_number(random))
        return Instance(
            instruction=f"Add {name} with the number {number} to Contacts.",
            start=start_with("contacts", AppStart(without_contacts=(name,))),
            goal=Goal(query=f"contact_digits:{name}", expected=number),
            route=(
                open_from_home("contacts"),
                Move(screen="contacts", deed=TapOn(label="New")),
                *_two_fields("contacts/new", ("name", name), ("number", number), label="Number"),
            ),
        )

    return app_template(task_id, draw, num_turns=7, category="input", difficulty="hard", tag="contacts")


def _two_fields(screen: str, first: tuple[str, str], second: tuple[str, str], *, label: str) -> tuple[Move, ...]:
    """Type into the first field, which has the focus, then into the second, which has a label, and save."""
    (one, one_text), (_, two_text) = first, second
    return (
        Move(screen=screen, deed=TypeIn(text=one_text), query="typed"),
        Move(screen=screen, deed=TapOn(label=label), query="focused_field", value=one),
        Move(screen=screen, deed=TypeIn(text=two_text), query="typed", value=f"{one}={one_text}"),
        Move(screen=screen, deed=TapOn(label="Save")),
    )


def search_contact(task_id: str, pool: Pool) -> TaskTemplate:
    """Find somebody with the search of Contacts."""

    def draw(random: Random) -> Instance:
        person = _person(random, pool)
        return Instance(
            instruction=f"Search for {person.name} in Contacts and open the entry.",
            start=start_with("contacts", AppStart(contacts=(person,))),
            goal=Goal(query="current_screen", expected=f"contacts/person:{person.name}"),
            route=(
                open_from_home("contacts"),
                Move(screen="contacts", deed=TapOn(label="Search")),
                *_fill("contacts/search", person.name),
                Move(screen="contacts/search", deed=TapOn(label=person.name)),
            ),
        )

    return app_template(task_id, draw, num_turns=5, category="input", tag="contacts")


def delete_contact(task_id: str, pool: Pool) -> TaskTemplate:
    """Delete somebody from the address book."""

    def draw(random: Random) -> Instance:
        person = _person(random, pool)
        return Instance(
            instruction=f"Delete {person.name} from Contacts.",
            start=start_with("contacts", AppStart(contacts=(person,))),
            goal=Goal(query=f"contact_number:{person.name}", expected=""),
            route=(*_to_person(person.name), Move(screen=f"contacts/person:{person.name}", deed=TapOn(label="Delete"))),
        )

    return app_template(task_id, draw, num_turns=5, tag="contacts")


def tell_contact_number(task_id: str, pool: Pool) -> TaskTemplate:
    """Look up a phone number and say it."""

    def draw(random: Random) -> Instance:
        person = _person(random, pool)
        query = f"contact_number:{person.name}"
        return Instance(
            instruction=f"What is the phone number of {person.name}? Answer with the number.",
            start=start_with("contacts", AppStart(contacts=(person,))),
            goal=Goal(query=query, how="told"),
            route=(
                *_to_person(person.name),
                Move(screen=f"contacts/person:{person.name}", deed=Tell(query=query)),
            ),
        )

    return app_template(task_id, draw, num_turns=4, tag="question")


def reply_to(task_id: str, pool: Pool, *, send: bool) -> TaskTemplate:
    """Answer in a conversation, or only write the answer and leave it unsent."""

    def draw(random: Random) -> Instance:
        name, text = random.choice(pool.people), random.choice(pool.texts)
        sending = tuple(Move(screen=f"messages/{i}", deed=TapOn(label="Send")) for i in range(5)) if send else ()
        typing = tuple(move for i in range(5) for move in _fill(f"messages/{i}", text, label="Message"))
        ending = "" if send else " but do not send it"
        sent = Goal(query="sent_messages", expected=json.dumps({"to": name, "text": text}), how="includes")
        return Instance(
            instruction=f'In Messages, write "{text}" to {name}{ending}.',
            start=start_with("messages", AppStart(), contact=name),
            goal=sent if send else Goal(query=f"message_draft:{name}", expected=text),
            route=(
                open_from_home("messages"),
                Move(screen="messages", deed=TapOn(label=name)),
                *typing,
                *sending,
            ),
        )

    return app_template(task_id, draw, num_turns=6 if send else 5, category="input", difficulty="hard", tag="messages")


def message_contact(task_id: str, pool: Pool) -> TaskTemplate:
    """Begin a conversation with somebody in the address book."""

    def draw(random: Random) -> Instance:
        name, text = random.choice(pool.strangers), random.choice(pool.texts)
        screen = f"messages/to:{name}"
        return Instance(
            instruction=f'Send "{text}" to {name} in a new message.',
            start=start_with("messages", AppStart(contacts=(Contact(name=name, number=_number(random)),))),
            goal=Goal(query="sent_messages", expected=json.dumps({"to": name, "text": text}), how="includes"),
            route=(
                open_from_home("messages"),
                Move(screen="messages", deed=TapOn(label="New")),
                Move(screen="messages/new", deed=TapOn(label=name)),
                *_fill(screen, text, label="Message"),
                Move(screen=screen, deed=TapOn(label="Send")),
            ),
        )

    return app_template(task_id, draw, num_turns=9, category="input", difficulty="hard", tag="messages")


def write_drawn_note(task_id: str, pool: Pool) -> TaskTemplate:
    """Write and save a note."""

    def draw(random: Random) -> Instance:
        text = random.choice(pool.notes)
        return Instance(
            instruction=f'Write a note that says "{text}" and save it.',
            start=start_with("notes", AppStart()),
            goal=Goal(query=f"has_note:{text}", expected="true"),
            route=(
                open_from_home("notes"),
                Move(screen="notes", deed=TapOn(label="New")),
                *_fill("notes/new", text),
                Move(screen="notes/new", deed=TapOn(label="Save")),
            ),
        )

    return app_template(task_id, draw, num_turns=5, category="input", difficulty="hard", tag="notes")


def delete_note(task_id: str, pool: Pool) -> TaskTemplate:
    """Delete one note among several."""

    def draw(random: Random) -> Instance:
        text = random.choice(pool.notes)
        shown = tuple(
            Move(screen=f"notes/note:{i}", deed=TapOn(label="Delete"), query="shown_note", value=text) for i in range(4)
        )
        return Instance(
            instruction=f'Delete the note that says "{text}".',
            start=start_with("notes", AppStart(note=text)),
            goal=Goal(query=f"has_note:{text}", expected="false"),
            route=(open_from_home("notes"), Move(screen="notes", deed=TapOn(label=text)), *shown),
        )

    return app_template(task_id, draw, num_turns=4, tag="notes")


def set_alarm(task_id: str, pool: Pool) -> TaskTemplate:
    """Set a new alarm."""

    def draw(random: Random) -> Instance:
        hour, minute = random.randrange(24), random.choice(pool.minutes)
        time = f"{hour:02d}:{minute:02d}"
        fields = ("hour", f"{hour:02d}"), ("minute", f"{minute:02d}")
        return Instance(
            instruction=f"Set an alarm for {time}.",
            start=start_with("clock", AppStart()),
            goal=Goal(query=f"is_alarm_on:{time}", expected="true"),
            route=(
                open_from_home("clock"),
                Move(screen="clock", deed=TapOn(label="New")),
                *_two_fields("clock/new", *fields, label="Minute"),
            ),
        )

    return app_template(task_id, draw, num_turns=7, category="input", difficulty="hard", tag="clock")


def switch_alarm(task_id: str, pool: Pool, *, turn_on: bool) -> TaskTemplate:
    """Switch an alarm that is set on or off."""

    def draw(random: Random) -> Instance:
        time = f"{random.randrange(24):02d}:{random.choice(pool.minutes):02d}"
        return Instance(
            instruction=f"Turn {'on' if turn_on else 'off'} the alarm at {time}.",
            start=start_with("clock", AppStart(alarm=time, is_alarm_on=not turn_on)),
            goal=Goal(query=f"is_alarm_on:{time}", expected="true" if turn_on else "false"),
            route=(open_from_home("clock"), Move(screen="clock", deed=TapOn(label=time))),
        )

    return app_template(task_id, draw, num_turns=3, difficulty="easy", tag="clock")


def start_timer(task_id: str, pool: Pool) -> TaskTemplate:
    """Start the timer."""

    def draw(random: Random) -> Instance:
        minutes = random.choice(pool.minutes)
        return Instance(
            instruction=f"Start a timer of {minutes} minutes.",
            start=start_with("clock", AppStart()),
            goal=Goal(query="timer_s", expected=str(60 * minutes)),
            route=(
                open_from_home("clock"),
                Move(screen="clock", deed=TapOn(label="Timer")),
                *_fill("clock/timer", str(minutes)),
                Move(screen="clock/timer", deed=TapOn(label="Start")),
            ),
        )

    return app_template(task_id, draw, num_turns=5, category="input", tag="clock")
