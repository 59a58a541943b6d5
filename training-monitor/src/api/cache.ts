import { useCallback, useEffect, useRef, useSyncExternalStore } from "react";

/** What a failed request tells the reader: what happened and what to do about it. */
export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

type Entry = {
  data: unknown;
  error: ApiError | null;
  loading: boolean;
  stale: boolean;
  snapshot: Snapshot;
  listeners: Set<() => void>;
  usedAt: number;
};
type Snapshot = { data: unknown; error: ApiError | null; loading: boolean };

export type Query<T> = { data: T | undefined; error: ApiError | null; loading: boolean; reload: () => void };

const entries = new Map<string, Entry>();
const MAX_IDLE_ENTRIES = 30; // a page left open for days must not grow
const NOTHING: Snapshot = { data: undefined, error: null, loading: false };

/** Hand the monitor's token in; it becomes a cookie, so that images and events carry it too. Throws `ApiError`. */
export async function signIn(token: string): Promise<void> {
  await request("/api/session", { method: "POST", body: { token } });
  for (const [path, entry] of entries) {
    entry.stale = true;
    if (entry.listeners.size > 0) void load(path);
  }
}

/** Fetch JSON from the monitor's API. Throws `ApiError`. */
export async function request<T>(path: string, options: { method?: string; body?: unknown; signal?: AbortSignal } = {}): Promise<T> {
  const headers: Record<string, string> = { accept: "application/json" };
  if (options.body !== undefined) headers["content-type"] = "application/json";
  let response: Response;
  try {
    response = await fetch(path, {
      method: options.method ?? "GET",
      headers,
      ...(options.signal ? { signal: options.signal } : {}),
      ...(options.body === undefined ? {} : { body: JSON.stringify(options.body) }),
    });
  } catch {
    throw new ApiError(0, "The monitor does not respond. Is it still running? This page resumes when it is back.");
  }
  if (!response.ok) throw new ApiError(response.status, await errorText(response));
  return (await response.json()) as T;
}

async function errorText(response: Response): Promise<string> {
  try {
    const body = (await response.json()) as { detail?: unknown };
    if (typeof body.detail === "string") return body.detail;
    if (Array.isArray(body.detail)) {
      return body.detail.map((item: { msg?: string }) => item.msg ?? JSON.stringify(item)).join("; ");
    }
  } catch {
    // not JSON: the status says what is known
  }
  return `The monitor answered ${response.status} ${response.statusText}.`;
}

function entryOf(path: string): Entry {
  let entry = entries.get(path);
  if (!entry) {
    entry = {
      data: undefined,
      error: null,
      loading: false,
      stale: true,
      snapshot: { data: undefined, error: null, loading: true },
      listeners: new Set(),
      usedAt: performance.now(), // the newest: what is about to be shown is not dropped
    };
    entries.set(path, entry);
    dropIdle();
  }
  entry.usedAt = performance.now();
  return entry;
}

function dropIdle(): void {
  const idle = [...entries].filter(([, entry]) => entry.listeners.size === 0);
  if (idle.length <= MAX_IDLE_ENTRIES) return;
  idle.sort(([, a], [, b]) => a.usedAt - b.usedAt);
  for (const [path] of idle.slice(0, idle.length - MAX_IDLE_ENTRIES)) entries.delete(path);
}

function publish(entry: Entry): void {
  entry.snapshot = { data: entry.data, error: entry.error, loading: entry.loading };
  for (const listener of entry.listeners) listener();
}

async function load(path: string): Promise<void> {
  const entry = entryOf(path);
  if (entry.loading) {
    entry.stale = true; // asked again while under way: once more afterwards
    return;
  }
  entry.loading = true;
  entry.stale = false;
  publish(entry);
  try {
    entry.data = await request(path);
    entry.error = null;
  } catch (error) {
    entry.error = error instanceof ApiError ? error : new ApiError(0, String(error));
    if (entry.error.status === 404) entry.data = undefined;
  }
  entry.loading = false;
  publish(entry);
  if (entry.stale && entry.listeners.size > 0) void load(path);
}

/** Load what a link leads to before it is followed. */
export function prefetch(path: string): void {
  const entry = entryOf(path);
  if (entry.data === undefined && !entry.loading) void load(path);
}

/** Data of one address of the API, kept while shown, shared by everyone who asks; null asks for nothing. */
export function useQuery<T>(path: string | null): Query<T> {
  const subscribe = useCallback(
    (listener: () => void) => {
      if (path === null) return () => undefined;
      const entry = entryOf(path);
      entry.listeners.add(listener);
      return () => {
        entry.listeners.delete(listener);
      };
    },
    [path],
  );
  const snapshot = useSyncExternalStore(subscribe, () => (path === null ? NOTHING : entryOf(path).snapshot));
  useEffect(() => {
    if (path === null) return;
    const entry = entryOf(path);
    if (entry.stale || entry.error) void load(path);
  }, [path]);
  const reload = useCallback(() => {
    if (path !== null) void load(path);
  }, [path]);
  return { ...(snapshot as { data: T | undefined; error: ApiError | null; loading: boolean }), reload };
}

/** Data of an address that asks for more of the same at every change: until they are there, what was there before. */
export function useKept<T>(query: Query<T>): Query<T> {
  const before = useRef<T>(undefined);
  if (query.data !== undefined) before.current = query.data;
  return query.error ? query : { ...query, data: query.data ?? before.current };
}

/** What is known of an address, without asking for it. */
export function peek<T>(path: string): T | undefined {
  return entries.get(path)?.data as T | undefined;
}

const REFRESH_MS = 30_000;

/** Load again now and then while `active`: a process that is killed announces nothing. */
export function useRefresh(reload: () => void, active: boolean): void {
  useEffect(() => {
    if (!active) return;
    const timer = window.setInterval(reload, REFRESH_MS);
    return () => window.clearInterval(timer);
  }, [reload, active]);
}

const MAX_DELAY_MS = 60_000;

type Pending = { timer: number; due: number };
const waiting = new Map<string, Pending>();

/** Mark what matches as out of date: what is on screen is loaded again within `delay_ms`, the rest when next seen. */
export function invalidate(matches: (path: string) => boolean, delay_ms = 200): void {
  for (const [path, entry] of entries) {
    if (!matches(path)) continue;
    entry.stale = true;
    if (entry.listeners.size > 0) loadSoon(path, Math.min(delay_ms, MAX_DELAY_MS));
  }
}

/** Load within a delay; what is asked for again meanwhile is loaded once, at the earliest of the times. */
function loadSoon(path: string, delay_ms: number): void {
  const due = performance.now() + delay_ms;
  const before = waiting.get(path);
  if (before && before.due <= due) return;
  if (before) window.clearTimeout(before.timer);
  const timer = window.setTimeout(() => {
    waiting.delete(path);
    if ((entries.get(path)?.listeners.size ?? 0) > 0) void load(path);
  }, delay_ms);
  waiting.set(path, { timer, due });
}
