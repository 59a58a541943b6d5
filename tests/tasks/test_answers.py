"""Questions are answered by one answer: what a person accepts, and what a policy that does not know tries instead."""

import time

import pytest

from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import TEMPLATES
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.tasks.answers import is_answer

QUESTIONS = [template for template in TEMPLATES.values() if "question" in template.tags]
EVERY_NUMBER = " ".join(map(str, range(1_000)))  # no answer of the demo is larger
GUESSES = (
    EVERY_NUMBER,
    EVERY_NUMBER.replace(" ", ", "),
    EVERY_NUMBER.replace(" ", "\n- "),
    EVERY_NUMBER.replace(" ", "|"),
    EVERY_NUMBER.replace(" ", ": "),
    EVERY_NUMBER.replace(" ", "% "),
    "".join(map(str, range(1_000))),
    "0-999",
    "yes no true false",
)


RIGHT = (
    ("73", "73"), ("The battery level is 73 %.", "73"), ("**73%**", "73"), ("Answer:73", "73"),
    ("73 percent (73%)", "73"), ("7.0", "7"), ("1,234 photos", "1234"), ("seven notifications", "7"), ("٧٣", "73"),
    ("７３％", "73"), ("minus 5", "-5"), ("\N{MINUS SIGN}5", "-5"), ("about 0.5", "0.5"), ("$.50", "0.5"),
    ("-.5", "-0.5"), ("...5", "5"), ("120MB", "120"),
    ("Call (555) 0142", "555 0142"), ("555-0142.", "555 0142"), ("5550142", "555 0142"),
    ("It rings at 5:30.", "5:30"), ("on 2026-11-23", "2026-11-23"), ("Ann Smith.", "Ann Smith"),
    ('The title is "Ann Smith"', "Ann Smith"), ("Answer: ann smith", "Ann Smith"), ("Yes, Wi-Fi is on.", "true"),
    ("No.", "false"), ('["b", "a"]', '["b", "a"]'), ("Nothing: none", "none"),
)  # fmt: skip


@pytest.mark.parametrize(("said", "wanted"), RIGHT)
def test_an_answer_in_words_of_its_own_counts(said: str, wanted: str) -> None:
    assert is_answer(said, wanted)


WRONG = (
    (None, "73"), ("", "73"), ("73", ""), ("72 or 73", "73"), ("72, 73", "73"), ("72,73", "73"), ("72/73", "73"),
    ("73-74", "73"), ("72 73 percent", "73"), ("not 73", "73"), ("It isn't 73", "73"),
    ("it isn\N{RIGHT SINGLE QUOTATION MARK}t 73", "73"), ("-73", "73"), ("73.5", "73"), (".73", "73"), ("1,23", "123"),
    ("1.234", "1234"), ("5:30", "5"), ("5:30", "30"), ("2026-11-23", "23"), ("7k", "7"), ("7 thousand", "7"),
    ("7²", "7"), ("10²", "102"), ("x7", "7"), ("13", "3"), ("six or seven", "7"),
    ("zero one two three four five six seven", "7"), ("120 GB", "120 MB"), ("555 0142, 555 0143", "555 0142"),
    ("5550142 5550143", "555 0142"), ("5:30 or 6:30", "5:30"), ("Ann, Bob, Carl", "Bob"), ("Ann Bob", "Ann"),
    ("Ann is Bob is Carl", "Bob"), ("not Bob", "Bob"), ("It is not Bob", "Bob"), ("yes and no", "true"),
    ("yes or no", "false"), ("Yes. No.", "true"), ("not on", "true"), ("true false", "false"),
)  # fmt: skip


@pytest.mark.parametrize(("said", "wanted"), WRONG)
def test_anything_but_one_right_answer_does_not(said: str | None, wanted: str) -> None:
    assert not is_answer(said, wanted)


@pytest.mark.parametrize("template", QUESTIONS, ids=lambda template: template.task_id)
async def test_no_question_of_the_demo_is_solved_by_listing(template: TaskTemplate) -> None:
    for seed in (0, 1, 17, 4711, 1_000_000):
        task = template.make_task(seed)
        phone = make_simulated_phone(task)
        every_contact = " ".join(
            read_query(phone.state, f"contact_number:{one.name}") for one in phone.state.apps.contacts
        )
        for guess in (*GUESSES, every_contact):
            assert not (await task.validate(phone, guess)).success, guess[:40]


@pytest.mark.parametrize("piece", ["is ", "x: ", "a:b", "are is: ", "7 ", "word "])
def test_a_long_message_costs_no_more_than_its_length(piece: str) -> None:
    """A quadratic search would hold up every rollout: 120 kB took a minute."""
    message = piece * (120_000 // len(piece))
    started = time.process_time()

    assert not is_answer(message, "Ann Smith")
    assert is_answer(f"{message[:90_000]} is: Ann Smith.", "Ann Smith")

    assert time.process_time() - started < 2.0
