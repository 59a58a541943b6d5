"""Copies a page: which parts can be read and put into another page, and what both must then have in common."""

from collections.abc import Mapping
from dataclasses import dataclass

from cua_rl.types.errors import DeviceError

READ = """
origin => {
  const fields = [...document.querySelectorAll('input, textarea, select')];
  const caret = field => { try { return [field.selectionStart, field.selectionEnd]; } catch { return null; } };
  return {
    html: document.documentElement.outerHTML.replaceAll(origin, ''),
    fields: fields.map(field => [field.value, field.checked ?? null, caret(field)]),
    focus: [...document.querySelectorAll('*')].indexOf(document.activeElement),
    ring: document.activeElement?.matches(':focus-visible') ?? false,
    scroll: [scrollX, scrollY],
    local: { ...localStorage },
    session: { ...sessionStorage },
  };
}
"""
"""The document and what its user and its scripts have put into it; files and other frames are not looked at."""

STORE = """
({ local, session }) => {
  for (const [storage, wanted] of [[localStorage, local], [sessionStorage, session]]) {
    storage.clear();
    for (const [name, value] of Object.entries(wanted)) storage.setItem(name, value);
  }
}
"""

FILL = """
({ fields, focus, ring, scroll }) => {
  const active = document.querySelectorAll('*')[focus];
  if (ring && active !== document.activeElement) active?.focus({ preventScroll: true });
  const found = [...document.querySelectorAll('input, textarea, select')];
  for (const [index, [value, checked, caret]] of fields.entries()) {
    const field = found[index];
    if (!field || field.type === 'file') continue;
    if (checked !== null) field.checked = checked;
    if (field.value !== value) field.value = value;
    if (caret && caret[0] !== null) try { field.setSelectionRange(...caret); } catch {}
  }
  scrollTo(...scroll);
}
"""


AIM = """
({ focus, scroll }) => {
  const active = document.querySelectorAll('*')[focus];
  if (!active || active === document.activeElement || active === document.body) return null;
  const hold = event => {
    event.stopImmediatePropagation();
    if (event.type === 'click') event.preventDefault();
  };
  scrollTo(...scroll);
  globalThis.cuaHeld = new AbortController();
  const kinds = ['down', 'up', 'move', 'over', 'enter'];
  for (const name of ['click', ...kinds.flatMap(kind => ['pointer' + kind, 'mouse' + kind])])
    addEventListener(name, hold, { capture: true, signal: cuaHeld.signal });
  const { x, y, width, height } = active.getBoundingClientRect();
  return [x + width / 2, y + height / 2];
}
"""
"""Where to press for the focus that a mouse gives, which only a mouse can give: without a ring until a key is pressed.
Nothing on the page hears of it until `RELEASE`."""

RELEASE = """
() => {
  cuaHeld.abort();
  delete globalThis.cuaHeld;
}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageState:
    """A page and its site. Addresses are those of its history; those of the site begin with the slash of their path."""

    site: bytes
    addresses: tuple[str, ...]
    place: int  # in the history
    cookies: tuple[Mapping[str, object], ...]
    document: Mapping[str, object]
    """As `READ` has it."""
    mouse: tuple[int, int] | None

    def require_same(self, document: Mapping[str, object], device_id: str) -> None:
        """Raise `DeviceError` if the document of a copy is another one."""
        if others := [name for name, value in self.document.items() if document.get(name) != value]:
            raise DeviceError(
                f"expected {device_id!r} to be a copy of a page, got one with other {' and '.join(others)}: the site "
                "shows something that is neither in its state nor in the page; set branching.num_siblings=0"
            )
