const FOCUSED = "input, textarea, select, button, a[href], summary";
const BOX = "ul, ol, table, section, [role='dialog']";

/** The focus is not lost with what had it: where that is taken away, its neighbour in the same list or panel has it next. */
export function keepFocus(): void {
  let last: HTMLElement | null = null;
  const click = (event: Event) => {
    if (!last?.contains(event.target as Node)) last = null; // beside everything, where nothing has it
  };
  document.addEventListener("pointerdown", click, true);
  document.addEventListener("focusin", (event) => (last = event.target as HTMLElement));
  const see = (changes: readonly MutationRecord[]) => {
    if (!last || document.activeElement !== document.body) return;
    const from = last;
    if (from.isConnected) {
      if (changes.some((one) => one.target === from)) from.focus(); // it was disabled while something was sent
      return;
    }
    const change = changes.find((one) => [...one.removedNodes].some((node) => node.contains(from)));
    const { target, nextSibling } = change ?? {};
    const isAfter = (one: Node) => nextSibling?.contains(one) || !!((nextSibling?.compareDocumentPosition(one) ?? 0) & Node.DOCUMENT_POSITION_FOLLOWING);
    for (let box = target instanceof Element ? target.closest(BOX) : null; box; box = box.parentElement?.closest(BOX) ?? null) {
      const all = [...box.querySelectorAll<HTMLElement>(FOCUSED)].filter((one) => !one.matches(":disabled, [tabindex='-1']"));
      const near = all.find(isAfter) ?? all.findLast((one) => !isAfter(one));
      if (near) return near.focus();
    }
  };
  new MutationObserver(see).observe(document.body, { subtree: true, childList: true, attributes: true, attributeFilter: ["disabled"] });
}
