import type { Run, TimelineItem } from "./api/types";

/** A run stopped at `stopped` ms, was `started` again and at work `at`; in which way, and after which item (-1: all). */
export type Restart = { at: number; started: number; stopped: number; how: string; after: number };

/** Where a run went on after it had stopped or was killed, in order. Loading the model is not work of a step. */
export function restartsOf(history: Run["history"], items: readonly TimelineItem[], now: number): Restart[] {
  return history.flatMap((change, index) => {
    const before = history[index - 1];
    if (change.new_status !== "running" || !before) return [];
    const started = Date.parse(change.changed_at);
    const next = history.slice(index + 1).find((one) => one.new_status !== "running");
    const times = items.flatMap((item) => [item.started_at, item.rollouts_ended_at, item.ended_at]).map((time) => Date.parse(time ?? ""));
    const at = Math.min(next ? Date.parse(next.changed_at) : Math.max(now, started), ...times.filter((time) => time >= started));
    const after = items.findLastIndex((item) => item.ended_at !== null && Date.parse(item.ended_at) <= started);
    return [{ at, started, stopped: Math.min(started, Date.parse(before.changed_at)), how: before.new_status, after }];
  });
}

/** Seconds from one time to another in which the run was at work. */
export function worked(from: string, to: string | null, restarts: readonly Restart[]): number | null {
  if (to === null) return null;
  const [start, end] = [Date.parse(from), Date.parse(to)];
  const idle = restarts.reduce((sum, one) => sum + Math.max(0, Math.min(end, one.at) - Math.max(start, one.stopped)), 0);
  return Math.max(0, end - start - idle) / 1000;
}

/** Places of times on a clock from 0 to 1, on which the time in which nothing ran takes no room. */
export function clockOf(start: number, end: number, restarts: readonly Restart[]): (time: number) => number {
  const within = (time: number) => Math.min(end, Math.max(start, time));
  const idleBefore = (time: number) =>
    restarts.reduce((sum, one) => sum + Math.max(0, Math.min(time, within(one.at)) - within(one.stopped)), 0);
  const total = Math.max(1, end - start - idleBefore(end));
  return (time) => (within(time) - start - idleBefore(within(time))) / total;
}

const TOUCH = 0.002; // of the clock: what ends as the next begins does not overlap

/** A lane for each span, so that no two of a lane overlap, and as few lanes as that takes. */
export function laneOf(spans: readonly { from: number; to: number }[]): number[] {
  const ends: number[] = [];
  const lanes: number[] = spans.map(() => 0);
  const order = spans.map((span, index) => ({ ...span, index })).sort((a, b) => a.from - b.from || a.index - b.index);
  for (const { from, to, index } of order) {
    const free = ends.findIndex((end) => end <= from + TOUCH);
    const lane = free < 0 ? ends.length : free;
    ends[lane] = to;
    lanes[index] = lane;
  }
  return lanes;
}
