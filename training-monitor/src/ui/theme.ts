import { useSyncExternalStore } from "react";

export type Theme = "dark" | "light";

const listeners = new Set<() => void>();

function current(): Theme {
  return document.documentElement.dataset["theme"] === "light" ? "light" : "dark";
}

/** The colours in use; the page's own choice wins over the system's. */
export function useTheme(): Theme {
  return useSyncExternalStore((listener) => {
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, current);
}

export function toggleTheme(): void {
  const next = current() === "dark" ? "light" : "dark";
  document.documentElement.dataset["theme"] = next;
  try {
    localStorage.setItem("monitor.theme", next);
  } catch {
    // storage may be forbidden; the choice lasts as long as the page
  }
  for (const listener of listeners) listener();
}
