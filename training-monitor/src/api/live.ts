import { useEffect, useState } from "react";
import { invalidate } from "./cache";
import { eventsPath, rolloutPath, runPath, sourcePath } from "./paths";
import type { LiveEvent } from "./types";

export type LiveState = "connecting" | "on" | "off";

const AT_ONCE_MS = 120; // what somebody looks at: a turn is on screen well within a second
const LISTS_MS = 400;
const SOON_MS = 1000; // what sums up many rollouts need not follow each of them
const LATER_MS = 3000;

/** Keeps what is on screen up to date while the server announces changes. */
export function useLive(runId: string | null): LiveState {
  const [state, setState] = useState<LiveState>("connecting");
  useEffect(() => {
    const source = new EventSource(eventsPath(runId));
    source.onopen = () => setState("on");
    source.onerror = () => setState("off");
    source.onmessage = (message: MessageEvent<string>) => apply(JSON.parse(message.data) as LiveEvent);
    return () => source.close();
  }, [runId]);
  return state;
}

function starts(...prefixes: string[]): (path: string) => boolean {
  return (path) => prefixes.some((prefix) => path === prefix || path.startsWith(`${prefix}?`) || path.startsWith(`${prefix}/`));
}

function apply(event: LiveEvent): void {
  if (event.kind === "reset") return invalidate(() => true, AT_ONCE_MS);
  if (!event.run_id) return;
  const run = runPath(event.run_id);
  const source = event.phase && event.step != null ? sourcePath(event.run_id, event.phase, event.step) : null;
  if (event.rollout_id) invalidate(starts(rolloutPath(event.run_id, event.rollout_id)), AT_ONCE_MS);
  if (event.group_id && source) {
    const group = `${source}/groups/${encodeURIComponent(event.group_id)}`;
    invalidate((path) => path === group, AT_ONCE_MS);
  }
  invalidate((path) => path.startsWith(`${run}/rollouts?`), LISTS_MS);
  if (event.kind === "turn") return;
  invalidate((path) => path === run || path === source, SOON_MS);
  if (event.kind === "rollout") return;
  invalidate(starts(`${run}/timeline`), SOON_MS);
  invalidate((path) => path === "/api/runs" || path.startsWith("/api/runs?"), LATER_MS);
  if (event.kind === "group") return;
  invalidate(starts(`${run}/metrics`, `${run}/failures`, `${run}/tasks`, `${run}/evaluations`), SOON_MS);
}
