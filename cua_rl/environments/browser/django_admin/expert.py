"""Experts for admin tasks: they take the first step that this page still needs, by pixel."""

import re
from dataclasses import dataclass
from random import Random
from typing import Any, cast
from urllib.parse import urlsplit

from cua_rl.environments.browser.django_admin.templates import ADMIN_TEMPLATES, AdminInstance, Fill, Step, Tick
from cua_rl.environments.browser.page import BrowserPage
from cua_rl.environments.device import Device
from cua_rl.tasks.expert import Decision, Expert
from cua_rl.tasks.task import Task
from cua_rl.types.actions import Action, Click, Finish, PressKey, Scroll, TypeText
from cua_rl.types.errors import TaskError

_READ = """
({ selector, text }) => {
  const found = Array.from(document.querySelectorAll(selector));
  const element = found.find(item => text === null || item.textContent.trim() === text);
  if (!element) return null;
  const box = element.getBoundingClientRect();
  return {
    x: box.left + box.width / 2, y: box.top + box.height / 2, value: element.value || '', is_on: !!element.checked,
    is_focused: element === document.activeElement,
    is_selected: element.type === 'text' || element.type === 'email'
      ? window.getSelection().toString() === element.value : false,
  };
}
"""
_MARGIN_PX = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class _Element:
    x: float
    y: float
    value: str
    is_on: bool
    is_focused: bool
    is_selected: bool


class AdminExperts:
    """The `Experts` of the admin site."""

    def knows(self, task_id: str) -> bool:
        """Whether the task has an expert."""
        return any(template.task_id == task_id and template.has_expert for template in ADMIN_TEMPLATES)

    def make(self, task: Task, device: Device, *, error_rate: float, random: Random) -> Expert:
        """An expert for one page; raises `TaskError` for a task without one."""
        if not self.knows(task.task_id) or not isinstance(device, BrowserPage):
            raise TaskError(f"expected an admin task with an expert and its page, got {task.task_id!r}")
        template = next(template for template in ADMIN_TEMPLATES if template.task_id == task.task_id)
        return _AdminExpert(template.instance(task.seed), device, error_rate, random).decide


class _AdminExpert:
    """Clicks at random with probability `error_rate` per turn, and gives up after such a mistake."""

    def __init__(self, instance: AdminInstance, page: BrowserPage, error_rate: float, random: Random) -> None:
        self._instance = instance
        self._page = page
        self._error_rate = error_rate
        self._random = random
        self._has_strayed = False

    async def decide(self) -> Decision:
        is_done = await self._page.query("site_state") == self._instance.wanted.as_json()
        if is_done or self._has_strayed:
            return Decision(scanned=(), action=Finish(success_claimed=is_done))
        if self._random.random() < self._error_rate:
            self._has_strayed = True
            seen, scale = self._page.settings.seen, self._page.settings.scale
            x, y = (int(self._random.random() * side * scale) for side in (seen.width, seen.height))
            return Decision(scanned=(), action=Click(x=x, y=y))
        path = urlsplit(self._page.url).path
        for step in self._instance.route:
            if re.fullmatch(step.path, path):
                action = await self._take(step)
                if action is not None:
                    return Decision(scanned=(), action=action)
        return Decision(scanned=(), action=Finish(success_claimed=False))

    async def _take(self, step: Step) -> Action | None:
        """What the step needs next; None if it is done."""
        element = await self._find(step.selector)
        if element is None:
            return None
        match step:
            case Fill(text=text) if element.value == text:
                return None
            case Fill() if element.is_focused and element.value and not element.is_selected:
                return PressKey(keys=("ctrl", "a"))
            case Fill(text=text) if element.is_focused:
                return TypeText(text=text)
            case Tick(is_on=is_on) if element.is_on == is_on:
                return None
            case _:
                settings = self._page.settings
                width, height, scale = settings.seen.width, settings.seen.height, settings.scale
        if 0 <= element.y <= height - _MARGIN_PX:  # the top margin is no reason to scroll: the page may end there
            return Click(x=round(element.x * scale), y=round(element.y * scale))
        x, y, down_px = width * scale / 2, height * scale / 2, (element.y - height / 2) * scale
        return Scroll(x=round(x), y=round(y), down_px=round(down_px))

    async def _find(self, selector: str) -> _Element | None:
        plain, _, said = selector.partition(":text(")
        text = said.removesuffix(")").strip('"') if said else None
        found = await self._page.evaluate(_READ, {"selector": plain, "text": text})
        return None if found is None else _Element(**cast("dict[str, Any]", found))
