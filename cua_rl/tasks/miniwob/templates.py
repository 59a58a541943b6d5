"""MiniWoB++ tasks: a page and a seed make an instance, the page itself says what to do and what that was worth."""

from dataclasses import dataclass
from functools import lru_cache, partial

from cua_rl.devices.device import Device, DeviceAbilities
from cua_rl.tasks.miniwob.catalog import DEVELOPMENT, NEEDS_RELOAD, category, difficulty, tags
from cua_rl.tasks.miniwob.pages import begin, html_folder, read_result
from cua_rl.tasks.task import Category, Difficulty, Task
from cua_rl.types import Validation

MINIWOB_BROWSER = DeviceAbilities(
    name="a browser with MiniWoB++ pages", has_shell=False, is_seeded=True, site="miniwob"
)
MAX_TURNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniWobTemplate:
    """One page; instances differ by seed."""

    name: str
    """Of the page, such as "click-button"."""

    @property
    def task_id(self) -> str:
        return f"miniwob/{self.name}"

    @property
    def category(self) -> Category:
        return category(self.name)

    @property
    def difficulty(self) -> Difficulty:
        return difficulty(self.name)

    @property
    def tags(self) -> tuple[str, ...]:
        return tags(self.name)

    def make_task(self, seed: int) -> Task:
        """The instance of this seed. Its instruction stands on the page and is read off it."""
        return Task(
            task_id=self.task_id,
            seed=seed,
            instruction=f"Do what the page asks for ({self.name}).",
            category=self.category,
            difficulty=self.difficulty,
            max_turns=MAX_TURNS,
            tags=self.tags,
            prepare=partial(_prepare, self.name, seed),
            read_instruction=_read_instruction,
            validate=_validate,
        )


@lru_cache(maxsize=1)
def all_templates() -> tuple[MiniWobTemplate, ...]:
    """Every page of the package, in the order of names; raises `ConfigError` if it is not installed."""
    names = sorted(page.stem for page in (html_folder() / "miniwob").glob("*.html"))
    return tuple(MiniWobTemplate(name=name) for name in names)


def development_templates() -> tuple[MiniWobTemplate, ...]:
    """The tasks for training and tuning."""
    return tuple(template for template in all_templates() if template.name in DEVELOPMENT)


async def _prepare(name: str, seed: int, device: Device) -> None:
    await begin(device, name, seed, reload=name in NEEDS_RELOAD)


async def _read_instruction(device: Device) -> str:
    return (await read_result(device)).instruction


async def _validate(device: Device, answer: str | None) -> Validation:
    """Only full reward counts: some pages pay a little for almost anything."""
    result = await read_result(device)
    state = f"reward {result.reward:g}" if result.is_over else "not over"
    return Validation(query="miniwob", expected="reward 1", actual=state, success=result.is_over and result.reward >= 1)
