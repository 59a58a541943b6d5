"""Visible elements of MiniWoB++ pages, and the next step on each page for scripted experts."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from cua_rl.environments.browser.miniwob.pages import HEIGHT, WIDTH
from cua_rl.environments.browser.page import BrowserPage
from cua_rl.types.actions import TypeText

_READ = """
({ width, height }) => {
  const selector = '#area button, .ui-dialog button, #area input, #area textarea, #area .alink, #area .color,'
    + ' #area .ui-tabs-anchor';
  const seen = Array.from(document.querySelectorAll(selector)).map(element => {
    const box = element.getBoundingClientRect();
    const left = Math.max(0, box.left), right = Math.min(width, box.right);
    const top = Math.max(0, box.top), bottom = Math.min(height, box.bottom);
    const named = element.closest('label');
    const isBox = ['checkbox', 'radio'].includes(element.type);
    const text = isBox ? (named ? named.textContent : '') : element.tagName === 'TEXTAREA' ? '' : element.textContent;
    return {
      kind: element.classList.contains('alink') ? 'link' : element.classList.contains('color') ? 'color'
        : element.classList.contains('ui-tabs-anchor') ? 'tab' : element.tagName === 'BUTTON' ? 'button'
        : element.tagName === 'TEXTAREA' ? 'textarea' : isBox || element.type === 'password' ? element.type : 'text',
      id: element.id,
      text: element.classList.contains('color') ? element.dataset.color
        : element.classList.contains('ui-dialog-titlebar-close') ? 'x' : text.trim(),
      value: isBox ? String(element.checked) : element.value || '',
      isFocused: element === document.activeElement,
      x: left, y: top, width: right - left, height: bottom - top,
    };
  });
  return seen.filter(element => element.width >= 4 && element.height >= 4);
}
"""


SCANNED_KINDS = {"click-button": "button", "click-color": "color", "click-dialog-2": "button", "click-link": "link"}
"""What experts look through; everything on pages that are not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageElement:
    """Something to click, its rectangle in CSS pixels of the part that the agent sees."""

    kind: str
    """button, link, color, tab, text, password, textarea, checkbox or radio."""
    id: str
    text: str
    """Its text or, for boxes, the text beside it."""
    value: str
    is_focused: bool
    x: float
    y: float
    width: float
    height: float

    @property
    def centre(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


async def read_elements(page: BrowserPage) -> tuple[PageElement, ...]:
    """Everything visible, in reading order."""
    found = cast("Sequence[dict[str, object]]", await page.evaluate(_READ, {"width": WIDTH, "height": HEIGHT}))
    elements: list[PageElement] = []
    for fields in found:
        x, y, width, height = (float(cast(float, fields[name])) for name in ("x", "y", "width", "height"))
        kind, name, text, value = (str(fields[key]) for key in ("kind", "id", "text", "value"))
        is_focused = fields["isFocused"] is True
        elements.append(
            PageElement(
                kind=kind, id=name, text=text, value=value, is_focused=is_focused, x=x, y=y, width=width, height=height
            )
        )
    return tuple(elements)


Step = PageElement | TypeText
"""The element whose middle is clicked, or the text for what has the focus."""

Elements = Sequence[PageElement]


class Route(Protocol):
    """The next step; None if there is none from here."""

    def __call__(self, instruction: str, elements: Elements) -> Step | None: ...


def _click_named(pattern: str, kind: str, name: Callable[[PageElement], str] = lambda element: element.text) -> Route:
    """Click the first element of a kind whose name the instruction gives."""

    def route(instruction: str, elements: Elements) -> Step | None:
        wanted = _read(pattern, instruction)
        found = (element for element in elements if (not kind or element.kind == kind) and name(element) == wanted)
        return next(found, None)

    return route


def _click_tab_2_medium(instruction: str, elements: Elements) -> Step | None:
    wanted = _read(r'the link "(.+)"', instruction)
    links = (element for element in elements if element.kind == "link" and element.text == wanted)
    tabs = [element for element in elements if element.kind == "tab"]
    return next(links, None) or (tabs[1] if len(tabs) > 1 else None)


def _choose(instruction: str, elements: Elements) -> Step | None:
    """Tick what is named and nothing else, then submit."""
    wanted = _read(r"Select (.+) and click Submit", instruction).split(", ")
    boxes = [element for element in elements if element.kind in ("radio", "checkbox")]
    wrong = (box for box in boxes if (box.text in wanted) != (box.value == "true"))
    return next(wrong, None) or _button(elements)


def _fill(*patterns: str) -> Route:
    """Write into each text field what the instruction names, in order, then press the button."""

    def route(instruction: str, elements: Elements) -> Step | None:
        texts = [_read(pattern, instruction) for pattern in patterns]
        fields = [element for element in elements if element.kind in ("text", "password")]
        for field, text in zip(fields, texts, strict=False):
            if field.value != text:
                is_focused = any(other.is_focused and other.id == field.id for other in elements)
                return TypeText(text=text) if is_focused else field
        return _button(elements)

    return route


def _button(elements: Elements) -> PageElement | None:
    return next((element for element in elements if element.kind == "button"), None)


def _read(pattern: str, instruction: str) -> str:
    found = re.search(pattern, instruction)
    return found[1] if found else ""


ROUTES: dict[str, Route] = {
    "click-button": _click_named(r'Click on the "(.+)" button', "button"),
    "click-checkboxes": _choose,
    "click-color": _click_named(r"Click on the (.+) colored box", "color"),
    "click-dialog-2": _click_named(r'labeled "(.+)"', "button"),
    "click-link": _click_named(r'Click on the link "(.+)"', "link"),
    "click-option": _choose,
    "click-tab-2-medium": _click_tab_2_medium,
    "click-widget": _click_named(r'Click on a "(.+)" widget', "", lambda element: element.kind),
    "enter-password": _fill(r'password "(.+?)"', r'password "(.+?)"'),
    "enter-text": _fill(r'Enter "(.+?)"'),
    "login-user": _fill(r'username "(.+?)"', r'password "(.+?)"'),
}
"""Tasks that have an expert: a choice of the development set."""
