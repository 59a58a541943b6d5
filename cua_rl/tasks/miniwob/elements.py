"""What can be clicked on a MiniWoB++ page, as scripted experts see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from cua_rl.devices.browser.page import BrowserPage
from cua_rl.tasks.miniwob.pages import HEIGHT, WIDTH

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


@dataclass(frozen=True, slots=True, kw_only=True)
class PageElement:
    """Something to click, its rectangle in CSS pixels of the part that the agent sees."""

    kind: str
    """button, link, color, tab, text, password, textarea, checkbox or radio."""
    id: str
    text: str
    """What it says or, for boxes, what stands beside it."""
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
    return tuple(_element(fields) for fields in found)


def _element(fields: dict[str, object]) -> PageElement:
    x, y, width, height = (float(cast(float, fields[name])) for name in ("x", "y", "width", "height"))
    kind, name, text, value = (str(fields[key]) for key in ("kind", "id", "text", "value"))
    is_focused = fields["isFocused"] is True
    return PageElement(
        kind=kind, id=name, text=text, value=value, is_focused=is_focused, x=x, y=y, width=width, height=height
    )
