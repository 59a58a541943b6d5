"""What the tiny model learns from: naming what it sees, stopping at a name, and demo tasks done by an expert."""

from dataclasses import dataclass
from random import Random

from cua_rl.agent.tools import MOBILE_USE, load_system_prompt
from cua_rl.conversation import Message, SampledAnswer, TextPart
from cua_rl.devices.simulator.catalog import APPS, NUM_ICONS_PER_PAGE, NUM_ROWS_VISIBLE, SETTINGS
from cua_rl.devices.simulator.device import SimulatedPhone
from cua_rl.devices.simulator.screens import build_screen
from cua_rl.devices.simulator.start import Start, make_phone_state
from cua_rl.renderers.answers import write_answer
from cua_rl.supervised.demonstrations import Demonstration, demonstrate
from cua_rl.tasks.demo.expert import DemoExperts, scannable_elements
from cua_rl.tasks.demo.phone import make_simulated_phone
from cua_rl.tasks.demo.template import TaskTemplate
from cua_rl.tasks.demo.templates import EMBEDDED_TRAINING
from cua_rl.tasks.expert import Decision, Finish

NUM_SEEDS = 2**31
_LISTINGS = (("List the apps you see.", Start()), ("List the settings you see.", Start(app="settings")))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How lessons are drawn. Shares and rates are probabilities."""

    listing_share: float
    """Lessons that only name everything on the screen; the others are demo tasks, as many openings as toggles."""
    whole_share: float
    """Tasks shown to the end; of the others, only as many turns as it takes to reach the last click."""
    error_rate: float
    """How often, per turn, the expert stops its scan at a random element."""


async def draw_lesson(random: Random, mix: Mix) -> Demonstration:
    """One lesson on a phone of its own."""
    seed = random.randrange(NUM_SEEDS)
    if random.random() < mix.listing_share:
        return await _listing(random, seed)
    family = random.choice(("open_app", "toggle_setting"))
    template = random.choice([template for template in EMBEDDED_TRAINING if family in template.tags])
    is_whole = random.random() < mix.whole_share
    max_turns = len(template.instance(seed).route) + is_whole
    return await demonstrate_task(template, seed, random, error_rate=mix.error_rate, max_turns=max_turns)


def draw_text_lesson(random: Random) -> Demonstration:
    """A task whose screen is given as text: scan the names up to the one asked for.

    It teaches when to stop, without a picture, at a tenth of the price. There is nothing to tap, so the answer is open.
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
    task = f"{instruction} {' '.join(shown)}"
    items = (
        Message(role="system", content=(TextPart(text=load_system_prompt("android")),)),
        Message(role="user", content=(TextPart(text=task),)),
        SampledAnswer(text=write_answer(reasoning=" ".join(scanned), text=None, tool_calls=[])),
    )
    return Demonstration(items=items, tools=(MOBILE_USE,), is_open=True)


async def demonstrate_task(
    template: TaskTemplate, seed: int, random: Random, *, error_rate: float, max_turns: int
) -> Demonstration:
    """A demo task, done by an expert that errs with `error_rate`."""
    task = template.make_task(seed)
    phone = make_simulated_phone(task)
    expert = DemoExperts().make(task, phone, error_rate=error_rate, random=random)
    return await demonstrate(task.instruction, phone, expert, max_turns=max_turns)


async def _listing(random: Random, seed: int) -> Demonstration:
    instruction, start = random.choice(_LISTINGS)
    phone = SimulatedPhone(make_phone_state(seed, start))

    async def name_all() -> Decision:
        labels = tuple(element.label for element in scannable_elements(build_screen(phone.state)))
        return Decision(scanned=labels, action=Finish(success_claimed=True))

    return await demonstrate(instruction, phone, name_all, max_turns=1)
