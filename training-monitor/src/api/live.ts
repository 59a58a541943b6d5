import { useEffect, useState } from "react";
import { invalidate, peek } from "./cache";
import { eventsPath, rolloutPath, runPath, sourcePath } from "./paths";
import type { LiveEvent, RunSummary } from "./types";

/** `off` is a short outage; `away`, a long one; `ended`, that of a monitor whose run has ended, as the one of a run does. */
export type LiveState = "connecting" | "on" | "off" | "away" | "ended";

const AT_ONCE_MS = 120; // what somebody looks at: a turn is on screen well within a second
const LISTS_MS = 400;
const SOON_MS = 1000; // what sums up many rollouts need not follow each of them
const LATER_MS = 3000;
const AWAY_MS = 120_000;
const RETRY_MS = 2000;
const SLOW_RETRY_MS = 20_000;

/** The latest status of each run that was announced. */
const statuses = new Map<string, string>();

/** Keeps what is on screen up to date while the server announces changes. */
export function useLive(runId: string | null): LiveState {
  const [state, setState] = useState<LiveState>("connecting");
  useEffect(() => {
    let source: EventSource | null = null;
    let timer = 0;
    let offSince: number | null = null;
    const connect = (again: boolean) => {
      const made = (source = new EventSource(eventsPath(runId)));
      made.onopen = () => {
        offSince = null;
        setState("on");
        if (again) invalidate(() => true, AT_ONCE_MS); // a new stream does not tell what was missed
      };
      made.onerror = () => {
        offSince ??= performance.now();
        const now = hasEnded(runId) ? "ended" : performance.now() - offSince > AWAY_MS ? "away" : "off";
        setState(now);
        if (now === "off" && made.readyState !== EventSource.CLOSED) return; // the browser tries again by itself
        made.close();
        timer = window.setTimeout(() => connect(true), now === "off" ? RETRY_MS : SLOW_RETRY_MS);
      };
      made.onmessage = (message: MessageEvent<string>) => apply(JSON.parse(message.data) as LiveEvent);
    };
    connect(false);
    return () => {
      window.clearTimeout(timer);
      source?.close();
    };
  }, [runId]);
  return state;
}

/** Whether the run of the page is known to have ended; on pages of no run, all that were announced. */
function hasEnded(runId: string | null): boolean {
  if (runId === null) return statuses.size > 0 && ![...statuses.values()].includes("running");
  const status = statuses.get(runId) ?? peek<RunSummary>(runPath(runId))?.status;
  return status !== undefined && status !== "running";
}

function starts(...prefixes: string[]): (path: string) => boolean {
  return (path) => prefixes.some((prefix) => path === prefix || path.startsWith(`${prefix}?`) || path.startsWith(`${prefix}/`));
}

function apply(event: LiveEvent): void {
  if (event.kind === "reset") return invalidate(() => true, AT_ONCE_MS);
  if (!event.run_id) return;
  if (event.kind === "run" && event.status) statuses.set(event.run_id, event.status);
  const run = runPath(event.run_id);
  const source = event.phase && event.step != null ? sourcePath(event.run_id, event.phase, event.step) : null;
  if (event.rollout_id) invalidate(starts(rolloutPath(event.run_id, event.rollout_id)), AT_ONCE_MS);
  if (event.group_id && source) {
    const group = `${source}/groups/${encodeURIComponent(event.group_id)}`;
    invalidate((path) => path === group, AT_ONCE_MS);
  }
  const isSet = (path: string) => path.startsWith("/api/rollouts") && new URLSearchParams(path.split("?")[1]).getAll("run_id").includes(event.run_id ?? "");
  invalidate((path) => path.startsWith(`${run}/rollouts?`) || (isSet(path) && path.startsWith("/api/rollouts?")), LISTS_MS);
  if (event.kind === "turn") return;
  invalidate((path) => path === run || path === source || path === `${source}/change`, SOON_MS);
  invalidate(isSet, SOON_MS);
  if (event.kind === "rollout") return;
  invalidate(starts(`${run}/timeline`), SOON_MS);
  invalidate((path) => path === "/api/runs" || path.startsWith("/api/runs?"), LATER_MS);
  if (event.kind === "group") return;
  invalidate(starts(`${run}/metrics`, `${run}/tasks`, `${run}/evaluations`), SOON_MS);
}
