"""Experts for MiniWoB++ tasks: they read what a page shows and act by pixel."""

from random import Random

from cua_rl.environments.browser.miniwob.pages import read_result
from cua_rl.environments.browser.miniwob.routes import ROUTES, SCANNED_KINDS, PageElement, read_elements
from cua_rl.environments.browser.page import BrowserPage, as_page
from cua_rl.environments.device import Device
from cua_rl.tasks.expert import Decision, Expert
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Click, Finish, TypeText
from cua_rl.types.errors import TaskError


class MiniWobExperts:
    """The `Experts` of MiniWoB++."""

    def knows(self, task_id: str) -> bool:
        return _page_name(task_id) in ROUTES

    def make(self, task: Task, device: Device, *, error_rate: float, random: Random) -> Expert:
        """An expert for one page; raises `TaskError` for a task without one."""
        if not self.knows(task.task_id):
            raise TaskError(f"expected a task with an expert, got {task.task_id!r}; experts know {', '.join(ROUTES)}")
        return _PageExpert(_page_name(task.task_id), as_page(device), error_rate, random).decide


class _PageExpert:
    """Clicks a random element with probability `error_rate` per turn, and gives up after such a mistake."""

    def __init__(self, name: str, page: BrowserPage, error_rate: float, random: Random) -> None:
        self._name = name
        self._page = page
        self._error_rate = error_rate
        self._random = random
        self._has_strayed = False

    async def decide(self) -> Decision:
        result = await read_result(self._page)
        if result.is_over or self._has_strayed:
            return Decision(scanned=(), action=Finish(success_claimed=result.reward >= 1))
        elements = await read_scanned(self._page, self._name)
        match ROUTES[self._name](result.instruction, elements):
            case PageElement() as right:
                chosen = right
                if self._random.random() < self._error_rate:
                    chosen = self._random.choice(elements)
                    self._has_strayed = chosen != right
                x, y = (round(side * self._page.settings.scale) for side in chosen.centre)
                return Decision(scanned=labels_up_to(self._name, elements, chosen), action=Click(x=x, y=y))
            case TypeText() as typed:
                return Decision(scanned=(), action=typed)
            case None:
                return Decision(scanned=(), action=Finish(success_claimed=False))


async def read_scanned(page: BrowserPage, name: str) -> tuple[PageElement, ...]:
    """The elements that an expert scans, in reading order; on some pages only those of one kind."""
    kind = SCANNED_KINDS.get(name)
    return tuple(element for element in await read_elements(page) if kind in (None, element.kind))


def labels_up_to(name: str, elements: tuple[PageElement, ...], target: PageElement) -> tuple[str, ...]:
    """The labels of the elements in reading order, the last being the target's."""
    return tuple(label_of(name, element) for element in elements[: elements.index(target) + 1])


def label_of(name: str, element: PageElement) -> str:
    """The expert's name for an element: its kind if the task asks for that, else its text."""
    return element.kind if name == "click-widget" or not element.text else element.text


def _page_name(task_id: str) -> str:
    return task_id.removeprefix("miniwob/")
