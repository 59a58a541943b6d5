import type { Run, TimelineItem } from "./api/types";

/** When a run was started again: `stopped` ms before, in which way, and after which of its items (-1: before all). */
export type Restart = { at: number; stopped: number; how: string; after: number };

/** Where a run went on after it had stopped or was killed, in order. */
export function restartsOf(history: Run["history"], items: readonly TimelineItem[]): Restart[] {
  return history.flatMap((change, index) => {
    const before = history[index - 1];
    if (change.new_status !== "running" || !before) return [];
    const at = Date.parse(change.changed_at);
    const after = items.findLastIndex((item) => item.ended_at !== null && Date.parse(item.ended_at) <= at);
    return [{ at, stopped: Math.min(at, Date.parse(before.changed_at)), how: before.new_status, after }];
  });
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
