"""MiniWoB++ tasks: a page and a seed make an instance, the page itself gives the instruction and the reward."""

from dataclasses import dataclass
from functools import lru_cache, partial

from cua_rl.environments.browser.miniwob.pages import begin, html_folder, read_result
from cua_rl.environments.device import Device, DeviceAbilities
from cua_rl.tasks.task import Category, Difficulty, Task, Template
from cua_rl.types.judgement import Validation

DEVELOPMENT = (
    "click-button", "click-checkboxes", "click-checkboxes-soft", "click-collapsible-2-nodelay", "click-color",
    "click-dialog-2", "click-link", "click-menu", "click-option", "click-shape", "click-tab-2-medium", "click-widget",
    "enter-text", "enter-password", "enter-date", "login-user", "text-transform", "find-word", "read-table",
    "simple-arithmetic", "use-autocomplete-nodelay", "email-inbox-delete", "email-inbox-forward-nl",
    "email-inbox-star-reply", "social-media", "choose-date-easy", "navigate-tree", "count-shape", "drag-box",
    "use-spinner",
)  # fmt: skip
"""Train, prompt and tune on these only; all other tasks are for measuring."""

UNSUITED: dict[str, tuple[str, ...]] = {
    "real_time": ("chase-circle", "moving-items", "simon-says", "stock-market", "hover-shape"),
    "partial_reward": (
        "bisect-angle", "circle-center", "find-midpoint", "right-angle", "draw-line", "draw-circle", "use-colorwheel",
        "use-colorwheel-2", "hot-cold", "find-greatest",
    ),
    "few_instances": ("guess-number", "generate-number", "number-checkboxes", "drag-cube", "tic-tac-toe"),
    "easy_for_chance": ("click-test", "click-test-2", "click-test-transfer", "focus-text", "focus-text-2"),
    "special_fonts": ("unicode-test",),
    "hidden_targets": ("click-pie", "click-pie-nodelay"),
}  # fmt: skip
"""Tags of tasks that say little about an agent."""

NEEDS_RELOAD = frozenset({
    "book-flight", "book-flight-nodelay",  # fields that were wrong stay red
    "choose-date", "choose-date-easy", "choose-date-medium", "choose-date-nodelay",  # the calendar stays where it was
    "form-sequence-3",  # its list, opened once by the Tab key, does not open so again
    "drag-cube", "use-colorwheel", "use-colorwheel-2",  # the cube stays turned, the colour chosen
    "scroll-text", "scroll-text-2",  # a text that was edited takes no new one
    *UNSUITED["real_time"],  # timers of the previous instance keep running, and draw from the seed of the next
})  # fmt: skip
"""Pages that do not begin again the same way: they keep something of the task before."""

_HARD = frozenset({
    "book-flight", "book-flight-nodelay", "buy-ticket", "choose-date", "choose-date-nodelay", "click-tab-2-hard",
    "daily-calendar", "email-inbox", "email-inbox-forward", "email-inbox-forward-nl", "email-inbox-forward-nl-turk",
    "email-inbox-nl-turk", "email-inbox-noscroll", "email-inbox-star-reply", "form-sequence-2", "form-sequence-3",
    "order-food", "search-engine", "sign-agreement", "social-media-all", "social-media-some", "stock-market",
    "terminal", "text-editor", "tic-tac-toe", "use-colorwheel-2", "multi-layouts", "multi-orderings", "read-table-2",
    "click-checkboxes-large", "click-menu-2", "choose-date-medium",
})  # fmt: skip
_EASY = frozenset({
    "click-button", "click-color", "click-dialog", "click-dialog-2", "click-link", "click-shape", "click-tab",
    "click-test", "click-test-2", "click-test-transfer", "click-widget", "focus-text", "focus-text-2", "enter-text",
    "click-option", "count-shape", "identify-shape", "choose-date-easy", "click-collapsible-nodelay",
    "click-collapsible", "click-checkboxes", "simple-arithmetic", "email-inbox-delete", "scroll-text-2",
})  # fmt: skip
_INPUT_PREFIXES = ("enter-", "login-", "text-", "copy-paste", "simple-a", "find-word", "read-table", "terminal")
_NAVIGATION_PREFIXES = ("click-tab", "click-menu", "click-collapsible", "navigate-", "click-link", "search-engine")


MINIWOB_BROWSER = DeviceAbilities(
    name="a browser with MiniWoB++ pages", has_shell=False, is_seeded=True, environment="miniwob"
)
MAX_TURNS = 10


def category(name: str) -> Category:
    """ "input" for typing, "navigation" for finding, "app" for everything else."""
    if name.startswith(_INPUT_PREFIXES):
        return "input"
    return "navigation" if name.startswith(_NAVIGATION_PREFIXES) else "app"


def difficulty(name: str) -> Difficulty:
    """One glance and one or two clicks, or several pages and conditions, or between."""
    if name in _EASY:
        return "easy"
    return "hard" if name in _HARD else "medium"


def tags(name: str) -> tuple[str, ...]:
    """Whether it is for "development" or "measuring", and what speaks against the task."""
    side = "development" if name in DEVELOPMENT else "measuring"
    return ("miniwob", side, *(reason for reason, names in UNSUITED.items() if name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniWobTemplate(Template):
    """One page; instances differ by seed."""

    @property
    def name(self) -> str:
        """Name of the page, such as "click-button"."""
        return self.task_id.removeprefix("miniwob/")

    def make_task(self, seed: int) -> Task:
        """The instance of this seed. Its instruction is read from the page."""

        async def read_instruction(device: Device) -> str:
            return (await read_result(device)).instruction

        async def validate(device: Device, answer: str | None) -> Validation:
            # only full reward counts: some pages pay a little for almost anything
            result = await read_result(device)
            state = f"reward {result.reward:g}" if result.is_over else "not over"
            success = result.is_over and result.reward >= 1
            return Validation(query="miniwob", expected="reward 1", actual=state, success=success)

        return self.build_task(
            seed,
            f"Do what the page asks for ({self.name}).",
            prepare=partial(begin, name=self.name, seed=seed, reload=self.name in NEEDS_RELOAD),
            read_instruction=read_instruction,
            validate=validate,
        )


def miniwob_template(name: str) -> MiniWobTemplate:
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
