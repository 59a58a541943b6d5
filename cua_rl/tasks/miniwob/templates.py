"""MiniWoB++ tasks: a page and a seed make an instance, the page itself says what to do and what that was worth."""

from dataclasses import dataclass
from functools import lru_cache, partial

from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.tasks.miniwob.catalog import DEVELOPMENT, NEEDS_RELOAD, category, difficulty, tags
from cua_rl.tasks.miniwob.pages import begin, html_folder, read_result
from cua_rl.tasks.task import Task, Template
from cua_rl.types import Validation

MINIWOB_BROWSER = DeviceAbilities(
    name="a browser with MiniWoB++ pages", has_shell=False, is_seeded=True, site="miniwob"
)
MAX_TURNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniWobTemplate(Template):
    """One page; instances differ by seed."""

    @property
    def name(self) -> str:
        """Of the page, such as "click-button"."""
        return self.task_id.removeprefix("miniwob/")

    def make_task(self, seed: int) -> Task:
        """The instance of this seed. Its instruction stands on the page and is read off it."""
        return self.build_task(
            seed,
            f"Do what the page asks for ({self.name}).",
            prepare=partial(begin, name=self.name, seed=seed, reload=self.name in NEEDS_RELOAD),
            read_instruction=_read_instruction,
            validate=_validate,
        )


def miniwob_template(name: str) -> MiniWobTemplate:
    """The template of a page."""
    return MiniWobTemplate(
        task_id=f"miniwob/{name}",
        category=category(name),
        difficulty=difficulty(name),
        max_turns=MAX_TURNS,
        tags=tags(name),
    )


@lru_cache(maxsize=1)
def all_templates() -> tuple[MiniWobTemplate, ...]:
    """Every page of the package, in the order of names; raises `ConfigError` if it is not installed."""
    names = sorted(page.stem for page in (html_folder() / "miniwob").glob("*.html"))
    return tuple(miniwob_template(name) for name in names)


def development_templates() -> tuple[MiniWobTemplate, ...]:
    """The tasks for training and tuning."""
    return tuple(template for template in all_templates() if template.name in DEVELOPMENT)


async def _read_instruction(device: Device) -> str:
    return (await read_result(device)).instruction


async def _validate(device: Device, answer: str | None) -> Validation:
    """Only full reward counts: some pages pay a little for almost anything."""
    result = await read_result(device)
    state = f"reward {result.reward:g}" if result.is_over else "not over"
    return Validation(query="miniwob", expected="reward 1", actual=state, success=result.is_over and result.reward >= 1)
