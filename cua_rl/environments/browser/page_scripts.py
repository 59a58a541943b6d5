"""Scripts that run in every page before its own."""

NO_ANIMATIONS = """
(() => {
  const still = '*, *::before, *::after { animation-duration: 0s !important; animation-delay: 0s !important;'
    + ' transition: none !important; caret-color: transparent !important; scroll-behavior: auto !important; }';
  const apply = () => {
    const style = document.createElement('style');
    style.textContent = still;
    (document.head || document.documentElement).appendChild(style);
    if (window.jQuery) window.jQuery.fx.off = true;
  };
  document.addEventListener('DOMContentLoaded', apply);
})();
"""
"""Screens settle at once: a screenshot never shows an intermediate state or a blinking caret."""

ONE_WINDOW = """
(() => {
  document.addEventListener('click', event => {
    const link = event.target instanceof Element && event.target.closest('a[target], area[target], form[target]');
    if (link) link.removeAttribute('target');
  }, true);
  window.open = address => { if (address) window.location.href = address; return window; };
  window.close = () => {};
})();
"""
"""The agent sees one window: what would open another opens here."""

ONLINE = "Object.defineProperty(Navigator.prototype, 'onLine', { get: () => true, configurable: true });"
"""Chromium takes a network without a way out for none, and pages would then not contact their server."""

DRAWN_SELECTS = """
(() => {
  let host = null;
  const close = () => { if (host) { host.remove(); host = null; } };
  window.__cuaCloseList = close;
  const choose = (select, index) => {
    close();
    if (select.selectedIndex === index) return;
    select.selectedIndex = index;
    for (const kind of ['input', 'change']) select.dispatchEvent(new Event(kind, { bubbles: true }));
  };
  const open = select => {
    const box = select.getBoundingClientRect();
    const limit = window.__cuaSeen || { width: innerWidth, height: innerHeight };
    const below = limit.height - box.bottom, above = box.top;
    const room = Math.max(below, above);
    host = document.createElement('div');
    host.style.cssText = 'position: fixed; z-index: 2147483647; left: 0; top: 0; width: 0; height: 0;';
    const list = document.createElement('div');
    list.style.cssText = `position: fixed; left: ${Math.max(0, Math.min(box.left, limit.width - box.width))}px;`
      + (below >= above ? `top: ${box.bottom}px;` : `bottom: ${innerHeight - box.top}px;`)
      + `min-width: ${box.width}px; max-height: ${room}px; overflow-y: auto; box-sizing: border-box; background: #fff;`
      + `border: 1px solid #767676; color: #000; cursor: default; font: ${getComputedStyle(select).font};`;
    Array.from(select.options).forEach((option, index) => {
      const row = document.createElement('div');
      row.textContent = option.label || ' ';
      row.style.cssText = 'padding: 1px 4px; white-space: nowrap; min-height: 1em;'
        + (index === select.selectedIndex ? 'background: #cfe0ff;' : '') + (option.disabled ? 'color: #999;' : '');
      row.addEventListener('mouseup', event => {
        event.stopPropagation();
        if (!option.disabled) choose(select, index);
      });
      list.appendChild(row);
    });
    host.attachShadow({ mode: 'open' }).appendChild(list);
    document.documentElement.appendChild(host);
  };
  document.addEventListener('mousedown', event => {
    if (host && event.composedPath().includes(host)) { event.preventDefault(); event.stopPropagation(); return; }
    const isOpen = host !== null;
    close();
    const select = event.target instanceof Element ? event.target.closest('select') : null;
    if (!select || select.multiple || select.size > 1 || select.disabled) return;
    event.preventDefault();
    select.focus();
    if (!isOpen) open(select);
  }, true);
  document.addEventListener('keydown', close, true);
  window.addEventListener('scroll', event => { if (host && event.target === document) close(); }, true);
})();
"""
"""Lists of options drawn in the page: Chromium's own pop-up is in no screenshot and takes no clicks."""

SETTLED = """
({ quietMs, timeoutMs }) => new Promise(resolve => {
  const root = document.documentElement;
  if (!root) { resolve(true); return; }
  let quiet = null;
  const end = isSettled => { observer.disconnect(); clearTimeout(quiet); clearTimeout(last); resolve(isSettled); };
  const isBusy = () => window.__cuaIsBusy && window.__cuaIsBusy();
  const wait = () => { clearTimeout(quiet); quiet = setTimeout(() => isBusy() ? wait() : end(true), quietMs); };
  const observer = new MutationObserver(wait);
  const last = setTimeout(() => end(false), timeoutMs);
  observer.observe(root, { subtree: true, childList: true, attributes: true, characterData: true });
  wait();
})
"""
"""Resolves once nothing in the document has changed for a while, and it is not busy, if it knows that."""


def init_script(width: int, height: int) -> str:
    """All that a page gets, for an agent that sees the top left `width` x `height` CSS pixels of it."""
    seen = f"window.__cuaSeen = {{ width: {width}, height: {height} }};"
    return "\n".join((seen, ONLINE, NO_ANIMATIONS, ONE_WINDOW, DRAWN_SELECTS))
