"""Lessons for the tiny model: naming what it sees, stopping at a name, and demo tasks done by an expert."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from cua_rl.agent.tools import MOBILE_USE, load_system_prompt
from cua_rl.environments.device import DeviceKind
from cua_rl.environments.phone.demo.expert import DemoExperts, scannable_elements
from cua_rl.environments.phone.demo.phone import make_simulated_phone
from cua_rl.environments.phone.demo.template import TaskTemplate
from cua_rl.environments.phone.demo.templates import EMBEDDED_TRAINING
from cua_rl.environments.phone.simulator.catalog import APPS, NUM_ICONS_PER_PAGE, NUM_ROWS_VISIBLE, SETTINGS
from cua_rl.environments.phone.simulator.device import SimulatedPhone
from cua_rl.environments.phone.simulator.screens import build_screen
from cua_rl.environments.phone.simulator.start import Start, make_phone_state
from cua_rl.supervised.demonstrations import Demonstration, demonstrate
from cua_rl.tasks.expert import Decision
from cua_rl.types.actions import Finish
from cua_rl.types.conversation import Message, Reasoning, TextPart, Tool

NUM_SEEDS = 2**31
_LISTINGS = (("List the apps you see.", Start()), ("List the settings you see.", Start(app="settings")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Distribution of lessons; shares and rates are probabilities."""

    listing_share: float
    """Lessons that only name everything on the screen; the others are demo tasks, half apps and half settings."""
    whole_share: float
    """Tasks demonstrated to the end; the others end with the last click."""
    error_rate: float
    """Probability per turn that the expert stops its scan at a random element."""


async def draw_lesson(random: Random, mix: Mix) -> Demonstration:
    """One lesson on a new phone."""
    seed = random.randrange(NUM_SEEDS)
    if random.random() < mix.listing_share:
        instruction, start = random.choice(_LISTINGS)
        phone = SimulatedPhone(make_phone_state(seed, start))

        async def name_all() -> Decision:
            labels = tuple(element.label for element in scannable_elements(build_screen(phone.state)))
            return Decision(scanned=labels, action=Finish(success_claimed=True))

        return await demonstrate(instruction, phone, name_all, max_turns=1)
    family = random.choice(("open_app", "toggle_setting"))
    template = random.choice([template for template in EMBEDDED_TRAINING if family in template.tags])
    is_whole = random.random() < mix.whole_share
    max_turns = len(template.instance(seed).route) + is_whole
    return await demonstrate_task(template, seed, random, error_rate=mix.error_rate, max_turns=max_turns)


def draw_text_lesson(random: Random) -> Demonstration:
    """A task with the screen as text: scan the names up to the target.

    It teaches when to stop, without an image and at a tenth of the cost. The answer is open, with nothing to tap.
    """
    if random.random() < 0.5:
        shown = random.sample([spec.label for spec in APPS.values()], NUM_ICONS_PER_PAGE)
        target = random.choice(shown)
        instruction = f"Open {target}."
    else:
        specs = random.sample(list(SETTINGS.values()), NUM_ROWS_VISIBLE)
        wanted = random.choice(specs)
        shown, target = [spec.label for spec in specs], wanted.label
        instruction = f"Turn {random.choice(('on', 'off'))} {wanted.title}."
    scanned = shown[: shown.index(target) + 1]
    return text_lesson("android", MOBILE_USE, f"{instruction} {' '.join(shown)}", scanned)


def text_lesson(kind: DeviceKind, tool: Tool, task: str, scanned: Sequence[str]) -> Demonstration:
    """A conversation without images: the task, and an open answer that only names what it scans."""
    items = (
        Message(role="system", content=(TextPart(text=load_system_prompt(kind)),)),
        Message(role="user", content=(TextPart(text=task),)),
        Reasoning(text=" ".join(scanned)),
    )
    return Demonstration(items=items, tools=(tool,), is_open=True)


async def demonstrate_task(
    template: TaskTemplate, seed: int, random: Random, *, error_rate: float, max_turns: int
) -> Demonstration:
    """A demo task done by an expert with the given error rate."""
    task = template.make_task(seed)
    phone = make_simulated_phone(task)
    expert = DemoExperts().make(task, phone, error_rate=error_rate, random=random)
    return await demonstrate(task.instruction, phone, expert, max_turns=max_turns)
