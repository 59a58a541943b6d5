"""Lessons for the model of the ladder: demo tasks in other words, on other apps and phones, and elements to find.

None shares its texts, names or apps with the tasks of evaluation; what only those ask for is drawn from letters.
"""

import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import accumulate, chain, product
from random import Random
from typing import Any
from unittest.mock import patch

from cua_rl.environments.phone.demo.expert import ImperfectExpert, act, decide, find_operation, scannable_elements, seek
from cua_rl.environments.phone.demo.families import apps, content, graded, launcher, settings, system
from cua_rl.environments.phone.demo.template import Hold, SlideTo, TapKey, TapOn, TaskTemplate, Tell
from cua_rl.environments.phone.demo.templates import DEMO_TRAINING, STORE_TRAINING
from cua_rl.environments.phone.simulator import catalog
from cua_rl.environments.phone.simulator.canvas import Canvas, text_width
from cua_rl.environments.phone.simulator.device import SimulatedPhone, perform, take_screenshot
from cua_rl.environments.phone.simulator.painter import draw_phone
from cua_rl.environments.phone.simulator.queries import read_query
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import make_phone_state
from cua_rl.environments.phone.simulator.state import PhoneState
from cua_rl.renderers.renderer import Renderer
from cua_rl.supervised.demonstrations import Demonstration, build_answer, demonstrate
from cua_rl.tasks.expert import Decision
from cua_rl.types.actions import Click, Finish, TypeText
from cua_rl.types.conversation import EncodedImage, Item, Message, TextPart, ToolResult
from cua_rl.types.rollout import Datum
from scripts.tiny_models.vocabulary import label_forms

NUM_SEEDS = 2**31
"""Of training phones; those of evaluation have seeds from here on."""
_MAX_TURNS = 15
_NUM_TO_FIND = 2
_NUM_TO_COPY = 8
_NUM_LOOKS = 8
"""Seeds of each task that show which words and labels recur."""
_APPS = ("mail", "notes", "calendar", "maps", "calculator", "phone", "messages", "camera", "chrome")
"""Those that evaluation asks for by name are missing, and Gallery, whose own screenshot leads in circles."""
_COMMON_WORDS = ("the", "a", "to", "you", "me", "at", "on", "is", "for", "and", "my", "of", "in", "about", "are")
_VERBS_TO_TAP = ("Tap", "Open", "Play", "Call", "Find", "Delete", "Turn on", "Connect to")
_VERBS_TO_TYPE = ("Type", "Search for", "Write")
_ENDINGS = (".", ".", " now.", ", please.")
_MINUTES = tuple(minute for minute in range(1, 60) if minute % 15 and minute not in (10, 25, 40, 55))
_LEVELS = tuple(percent for percent in range(10, 95, 5) if percent not in (25, 35, 65, 75))
_ANSWER = "Answer"
"""What the expert names where it tells something."""
_COUNTS = ("num_photos", "notification_count")
CELL_PX = 32
"""Side of the square that one image token covers."""
_DIGIT_NUMBERS = (1, 0), (100, 25), (100, 75)
"""Factor and offset of the numbers that stand for the first, second and third digit on an image token."""
_TURN = re.compile(r"<think>\n(?P<target>[^\n]*?):(?P<seen>[^\n]*)(?P<rest>\n</think>.*?\}\})", re.DOTALL)
_PLACE = re.compile(r"(?<=\[).*?\}\}", re.DOTALL)


async def demonstrate_on(
    seed: int, template: TaskTemplate, *, is_seen: bool = True, error_rate: float = 0.0
) -> Demonstration:
    """A task done on the phone of this seed by an expert that names its target; `is_seen` by screenshots, or not.

    With probability `error_rate` per turn, its target is a random element of the screen, after which it gives up.
    """
    instance = template.instance(seed)
    phone = (SimulatedPhone if is_seen else _BlindPhone)(make_phone_state(seed, instance.start))

    erring = ImperfectExpert(template, error_rate=error_rate, random=Random(seed))

    async def expert() -> Decision:
        decision = erring.decide(phone)
        if decision == decide(template, phone):
            return name_target(template, phone)
        return _look_for(decision.scanned[-1], decision) if decision.scanned else decision

    demonstration = await demonstrate(instance.instruction, phone, expert, max_turns=_MAX_TURNS)
    return demonstration if is_seen else _unseen(demonstration)


def name_target(template: TaskTemplate, phone: SimulatedPhone) -> Decision:
    """The expert's next turn; it names its target first, then what it sees, up to the target if that shows."""
    decision, operation = decide(template, phone), find_operation(template, phone)
    if isinstance(operation, Tell):
        answer = read_query(phone.state, operation.query)
        return _count(answer) if operation.query in _COUNTS else _read(answer, phone.state)
    seeks = isinstance(operation, TapOn | TapKey | Hold | SlideTo) and operation.label
    return _look_for(seeks, decision) if seeks else decision


def _look_for(label: str, decision: Decision) -> Decision:
    """The decision with the name of its target first, and only the first letter of seen names that are no token."""
    seen = (name if name in ladder_labels() else name[0] for name in decision.scanned)
    return replace(decision, scanned=(f"{label}:", *seen))


def _count(answer: str) -> Decision:
    """Number the things to count, and answer with the last number."""
    return _tell(answer, map(str, range(1, int(answer) + 1)))


def _read(answer: str, state: PhoneState) -> Decision:
    """Name the answer's digits as they lie on image tokens, then answer with them."""
    digits, found = "".join(filter(str.isdigit, answer)), find_digits(state)
    for x, y in found:
        run = list(accumulate(found.get((right, y), "") for right in range(x, catalog.WIDTH // CELL_PX)))
        if digits in run:
            cells = (found.get((right, y), "") for right in range(x, x + run.index(digits) + 1))
            return _tell(answer, chain.from_iterable(map(name_digits, cells)))
    raise AssertionError(f"expected {answer!r} on the screen {state.screen}, got {found}")


def _tell(answer: str, parts: Iterable[str]) -> Decision:
    # without spaces, each number is a token: " 1" is one, too, and " 125" would be two
    return Decision(scanned=(f"{_ANSWER}:{','.join(parts)}",), action=Finish(success_claimed=True, answer=answer))


def name_digits(digits: str) -> list[str]:
    """The names of digits on one image token, at most three: the token's features are copied, not worked out."""
    return [str(factor * int(digit) + offset) for digit, (factor, offset) in zip(digits, _DIGIT_NUMBERS, strict=False)]


def answer_tokens() -> list[str]:
    """What thoughts before an answer consist of, but for digits."""
    names = (name_digits(str(digit) * len(_DIGIT_NUMBERS))[1:] for digit in range(10))
    return [_ANSWER, ",", *sorted(set(chain.from_iterable(names)))]


@lru_cache(maxsize=8)
def find_digits(state: PhoneState) -> dict[tuple[int, int], str]:
    """By image token (x, y), the digits drawn there, from left to right; a fourth one goes to the next token."""
    draw_text, digits = Canvas.text, dict[tuple[int, int], str]()

    def record(canvas: Canvas, x: float, y: float, text: str, colour: str, **how: Any) -> None:
        draw_text(canvas, x, y, text, colour, **how)
        shift = {"l": 0.0, "m": -0.5, "r": -1.0}[how.get("anchor", "lm")[0]]
        left = x + shift * text_width(text, how["size"])
        for i, letter in enumerate(text):
            middle = left + text_width(text[:i], how["size"]) + text_width(letter, how["size"]) / 2
            if letter.isdigit() and 0 <= middle < catalog.WIDTH and 0 <= y < catalog.HEIGHT:
                cell = int(middle) // CELL_PX, int(y) // CELL_PX
                digits[cell] = digits.get(cell, "") + letter

    with patch.object(Canvas, "text", record):
        draw_phone(state, 1)
    for (x, y), drawn in list(digits.items()):
        if len(drawn) > len(_DIGIT_NUMBERS) and (x + 1, y) not in digits:
            digits[x, y], digits[x + 1, y] = drawn[: len(_DIGIT_NUMBERS)], drawn[len(_DIGIT_NUMBERS) :]
    return digits


def without_sight(datum: Datum, renderer: Renderer) -> Datum:
    """What only a screen tells is not trained: what shows, whether that ends the scan, and where to tap.

    If the last that shows is the target, the scan ends and the target is tapped; that follows from the text, as the
    answer follows from its digits.
    """
    texts = [renderer.decode([token]) for token in datum.model_input.token_ids(-1)]
    ends = list(accumulate(map(len, texts)))
    whole = "".join(texts)
    hidden = {place for match in _PLACE.finditer(whole) for place in range(*match.span())}
    for match in _TURN.finditer(whole):
        is_found = match["seen"].endswith((f" {match['target']}", f" {match['target'][:1]}"))
        end = match.start("rest") if is_found else match.end()
        if match["target"] == _ANSWER:
            end = match.start("rest") + len("\n</think>\n\n")
        hidden |= set(range(match.start("seen"), end))
    mask = tuple(is_trained and end - 1 not in hidden for is_trained, end in zip(datum.loss_mask, ends, strict=True))
    return replace(datum, loss_mask=mask, advantages=tuple(map(float, mask)))


async def draw_search(random: Random) -> Demonstration:
    """A screen, and several elements to tap on it or to swipe to, one after the other."""
    phone = draw_phone_at_work(random)
    screen = build_screen(phone.state)
    labels = [element.label for element in scannable_elements(screen)]
    hidden = [item.label for item in screen.content if item.is_tappable and item.label not in labels]
    wanted = [random.choice(hidden if hidden and random.random() < 0.3 else labels) for _ in range(_NUM_TO_FIND)]
    return await _one_by_one(phone, [(f"Tap {label}.", _look_for(label, seek(label, phone))) for label in wanted])


async def draw_reading(random: Random) -> Demonstration:
    """A screen on which a task asks for something, and a few more questions to it."""
    phone, questions = draw_questions(random)
    return await _one_by_one(phone, random.sample(questions, len(questions)))


def draw_questions(random: Random) -> tuple[SimulatedPhone, list[tuple[str, Decision]]]:
    """A phone that shows what a task asks for; this and other questions to the same screen."""
    template, seed = random.choice(_question_templates(random)), random.randrange(NUM_SEEDS)
    instance = template.instance(seed)
    phone = SimulatedPhone(make_phone_state(seed, instance.start))
    while not isinstance(find_operation(template, phone), Tell):
        action = decide(template, phone).action
        if isinstance(action, Finish):
            return draw_questions(random)
        phone.state = perform(phone.state, action, phone.scale)
    asked = {instance.instruction: name_target(template, phone)}
    if phone.state.screen == "calculator":
        phone.state = replace(phone.state, calculation=_draw_numbers(random, 1))
        shown = _read(phone.state.calculation, phone.state)
        asked = {"What does the calculator show? Answer with the number.": shown}
        for key in random.sample("0123456789+*=", 2):
            asked[f"Tap {key}."] = _look_for(key, Decision(scanned=(), action=act(TapKey(label=key), phone)))
    if random.random() < 0.25:
        battery = _read(str(phone.state.battery_pct), phone.state)
        asked["What is the battery level in percent? Answer with the number."] = battery
    return phone, list(asked.items())


async def draw_copies(random: Random) -> Demonstration:
    """No screen, and names to tap and texts to type as they were asked for; names come up in scans of others."""
    wanted: list[tuple[str, Decision]] = []
    for _ in range(_NUM_TO_COPY):
        if random.random() < 0.3:
            cells = [_draw_numbers(random, 1)[:3] for _ in range(random.randint(1, 3))]
            wanted.append(("What is the number?", _tell("".join(cells), chain.from_iterable(map(name_digits, cells)))))
            continue
        verbs = random.choice((_VERBS_TO_TAP, _VERBS_TO_TAP, _VERBS_TO_TYPE))
        if verbs is _VERBS_TO_TAP and random.random() < 0.6:
            copied = random.choice(ladder_labels())
        else:
            copied = random.choice((_draw_words, _draw_numbers))(random, random.randint(1, 3))
        decision = Decision(scanned=(), action=TypeText(text=copied))
        if verbs is _VERBS_TO_TAP:
            others = random.sample(ladder_labels(), random.randint(0, 8))
            decision = _look_for(copied, Decision(scanned=(*others, copied), action=Click(x=0, y=0)))
        mark = random.choice(("", '"'))
        wanted.append((f"{random.choice(verbs)} {mark}{copied}{mark}{random.choice(_ENDINGS)}", decision))
    return _unseen(await _one_by_one(_BlindPhone(make_phone_state(0)), wanted))


async def _one_by_one(phone: SimulatedPhone, wanted: Sequence[tuple[str, Decision]]) -> Demonstration:
    """The decisions for all instructions, on a screen that stays as it is."""
    (asked, first), *others = wanted

    async def expert() -> Decision:
        return first

    state = phone.state
    shown = await demonstrate(asked, phone, expert, max_turns=1)
    items, screenshot = list[Item](shown.items), take_screenshot(state, phone.scale)
    for asked, decision in others:
        items.append(ToolResult(call_id="expert", content=(TextPart(text=asked),)))
        items += build_answer(decision, screenshot)
    return Demonstration(items=tuple(items), tools=shown.tools)


def draw_phone_at_work(random: Random) -> SimulatedPhone:
    """A phone on its way through a task, with something to tap."""
    seed, template = random.randrange(NUM_SEEDS), draw_template(random)
    phone = SimulatedPhone(make_phone_state(seed, template.instance(seed).start))
    for _ in range(random.randrange(7)):
        action = decide(template, phone).action
        if isinstance(action, Finish):
            break
        phone.state = perform(phone.state, action, phone.scale)
    return phone if scannable_elements(build_screen(phone.state)) else draw_phone_at_work(random)


def draw_template(random: Random) -> TaskTemplate:
    """A training task, or one of its family with other words."""
    return random.choice(DEMO_TRAINING if random.random() < 0.5 else list(other_templates(random)))


def _question_templates(random: Random) -> list[TaskTemplate]:
    """Training tasks, and tasks in other words, that end with telling something."""
    every = (*DEMO_TRAINING, *other_templates(random))
    return [template for template in every if any(isinstance(m.operation, Tell) for m in template.instance(0).route)]


def other_templates(random: Random) -> Iterator[TaskTemplate]:
    """One template of each family, with names and texts of random letters."""
    pool = _draw_pool(random)
    by_pool: tuple[Callable[[str, apps.Pool], TaskTemplate], ...] = (
        *(apps.add_contact_from_phone, apps.search_contact, apps.call_contact, apps.delete_contact, apps.add_contact),
        *(apps.tell_contact_number, apps.reply_to, apps.draft_reply, apps.message_contact, apps.write_drawn_note),
        *(apps.delete_note, apps.set_alarm, apps.start_timer),
        *(content.open_website, content.search_web, content.play_track),
    )
    by_apps: tuple[Callable[[str, tuple[str, ...]], TaskTemplate], ...] = (
        *(launcher.search_app, launcher.take_screenshot, launcher.take_and_open_screenshot, launcher.pin_app),
        *(launcher.move_icon, launcher.unpin_app, launcher.open_last_screenshot, graded.screenshot_from_drawer),
        *(graded.open_notifications_over_app, graded.open_quick_settings_over_app, graded.take_two_screenshots),
        graded.move_icon_back,
    )
    yield from (family("", pool) for family in by_pool)
    yield from (family("", _APPS) for family in by_apps)
    for turn_on in (True, False):
        yield apps.switch_alarm("", pool, turn_on=turn_on)
        yield system.switch_app_notifications("", _APPS, turn_on=turn_on)
    yield launcher.uninstall_app("", STORE_TRAINING, _APPS)
    yield launcher.create_app_folder("", _APPS, pool.folders)
    yield launcher.rename_folder("", _APPS, pool.folders)
    yield content.create_folder("", pool.folders)
    yield content.delete_folder("", pool.folders)
    yield settings.set_brightness("", _LEVELS)
    yield settings.set_media_volume("", _LEVELS)
    yield system.check_app_storage("", _APPS)
    yield graded.through_drawer("", "music", content.play_track("", pool))
    yield graded.through_drawer("", "clock", apps.switch_alarm("", pool, turn_on=random.random() < 0.5))
    yield graded.through_drawer("", "notes", apps.delete_note("", pool))
    yield graded.through_drawer("", "contacts", apps.call_contact("", pool))
    yield graded.through_drawer("", "settings", system.check_app_storage("", _APPS))


@cache
def ladder_labels() -> tuple[str, ...]:
    """Names of the elements that training tasks lead past, but for times, addresses and names of files."""
    seen: dict[str, None] = {}
    for template, seed in product(DEMO_TRAINING, range(_NUM_LOOKS)):
        phone = SimulatedPhone(make_phone_state(seed, template.instance(seed).start))
        for _ in range(_MAX_TURNS):
            seen |= {element.label: None for element in scannable_elements(build_screen(phone.state))}
            action = decide(template, phone).action
            if isinstance(action, Finish):
                break
            phone.state = perform(phone.state, action, phone.scale)
    return tuple(label for label in seen if not label[0].islower() and not {":", "."} & set(label))


def ladder_pieces() -> list[str]:
    """Single tokens that the model of the ladder has in addition: labels, and the words of all instructions."""
    forms = (form for label in ladder_labels() for form in label_forms(label))
    words: dict[str, None] = {}
    for template in DEMO_TRAINING:
        first, *others = (template.instance(seed).instruction.split() for seed in range(_NUM_LOOKS))
        words |= {word.strip('".,:?()'): None for word in first if all(word in other for other in others)}
    return list(dict.fromkeys([*forms, *(f" {word}" for word in words), *(w for w in words if w[:1].isupper())]))


def _draw_pool(random: Random) -> apps.Pool:
    words = partial(_draw_words, random)

    def several(draw: Callable[[], str]) -> tuple[str, ...]:
        return tuple(draw() for _ in range(3))

    def sentence() -> str:
        return words(random.randint(2, 4)).capitalize() + random.choice(("", "", "?"))

    def name() -> str:
        return _draw_word(random).capitalize()

    return apps.Pool(
        people=several(name),
        strangers=several(name),
        texts=several(sentence),
        notes=several(sentence),
        folders=several(lambda: random.choice((str, str.capitalize))(_draw_word(random))),
        searches=several(lambda: words(2)),
        addresses=several(lambda: f"{_draw_word(random)}.example"),
        tracks=several(lambda: words(2).title()),
        minutes=_MINUTES,
    )


def _draw_words(random: Random, num: int) -> str:
    return " ".join(random.choice(_COMMON_WORDS) if random.random() < 0.3 else _draw_word(random) for _ in range(num))


def _draw_numbers(random: Random, num: int) -> str:
    return " ".join(str(random.randrange(10 ** random.randint(1, 4))) for _ in range(num))


def _draw_word(random: Random) -> str:
    """Letters, consonants and vowels in turn more often than not."""
    return "".join(
        random.choice("aeiou" if i % 2 and random.random() < 0.7 else string.ascii_lowercase)
        for i in range(random.randint(3, 8))
    )


class _BlindPhone(SimulatedPhone):
    """Shows nothing, and is quick."""

    async def observe(self) -> EncodedImage:
        return _blank()


@cache
def _blank() -> EncodedImage:
    return EncodedImage(data=b"", format="png", width_px=catalog.WIDTH, height_px=catalog.HEIGHT)


def _unseen(demonstration: Demonstration) -> Demonstration:
    return replace(demonstration, items=tuple(map(_without_image, demonstration.items)))


def _without_image(item: Item) -> Item:
    if not isinstance(item, Message | ToolResult):
        return item
    texts = tuple(part for part in item.content if isinstance(part, TextPart))
    return replace(item, content=texts or (TextPart(text=""),))
