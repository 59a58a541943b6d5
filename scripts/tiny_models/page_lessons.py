"""Lessons for the tiny model for web pages, from labelled screenshots.

Every page is captured once; the lessons of all stages are drawn from these captures, without a browser.
"""

from collections.abc import Sequence
from random import Random

from cua_rl.agent.history import system_item, user_item
from cua_rl.agent.tools import COMPUTER_USE, MAX_COORDINATE, function_tool, load_system_prompt
from cua_rl.renderers.image_urls import ImageUrls
from cua_rl.renderers.openai_items import conversation_from_responses
from cua_rl.supervised.demonstrations import Demonstration, build_answer
from cua_rl.tasks.expert import Decision
from cua_rl.types.actions import Click, Finish
from scripts.tiny_models.lessons import text_lesson
from scripts.tiny_models.page_screens import PageScreen
from scripts.tiny_models.page_tasks import LABELS

LISTING = "List what you see."


def draw_page_lesson(
    screen: PageScreen, random: Random, *, listing_share: float, error_rate: float = 0.0, point_step: int = 5
) -> Demonstration:
    """One answer on this page: naming everything, or scanning up to the target and clicking it.

    With probability `error_rate` it stops at a random element instead. Clicks are at multiples of `point_step` on the
    scale of 1000: a coarser step leaves fewer numbers to learn.
    """
    if random.random() < listing_share:
        labels = tuple(box.label for box in screen.boxes)
        return _demonstration(LISTING, screen, Decision(scanned=labels, action=Finish(success_claimed=True)))
    target = random.randrange(len(screen.boxes)) if random.random() < error_rate else screen.target
    box = screen.boxes[target]
    click = Click(
        x=_snap(box.x + box.width / 2, screen.observation.width_px, point_step),
        y=_snap(box.y + box.height / 2, screen.observation.height_px, point_step),
    )
    scanned = tuple(box.label for box in screen.boxes[: target + 1])
    return _demonstration(screen.instruction, screen, Decision(scanned=scanned, action=click))


def draw_page_text_lesson(instructions: Sequence[tuple[str, str]], random: Random) -> Demonstration:
    """A task with the page as text: scan the labels up to the target.

    `instructions` are pairs of an instruction and its target label. There is nothing to click, so the answer is open.
    """
    instruction, target = random.choice(instructions)
    others = [label for label in random.sample(LABELS, random.randrange(1, 7)) if label != target]
    place = random.randrange(len(others) + 1)
    shown = [*others[:place], target, *others[place:]]
    return text_lesson("browser", COMPUTER_USE, f"{instruction} {' '.join(shown)}", shown[: place + 1])


def _snap(position_px: float, length_px: int, step: int) -> int:
    return round(round(position_px * MAX_COORDINATE / length_px / step) * step * length_px / MAX_COORDINATE)


def _demonstration(instruction: str, screen: PageScreen, decision: Decision) -> Demonstration:
    """The agent's conversation."""
    images = ImageUrls()
    request = {
        "input": [system_item(load_system_prompt("browser")), user_item(instruction, images.url(screen.observation))],
        "tools": [function_tool(COMPUTER_USE)],
    }
    conversation = conversation_from_responses(request, images)
    answer = build_answer(decision, screen.observation, "browser")
    return Demonstration(items=(*conversation.items, *answer), tools=conversation.tools)
