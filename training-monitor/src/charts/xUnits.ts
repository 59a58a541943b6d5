import type { MetricSeries } from "../api/types";
import { formatDuration } from "../format";
import type { Series } from "./series";

/** What a chart is drawn over: steps, or what the run had done until the end of each. */
export type XUnit = "step" | "rollout" | "token" | "time";

const many = (value: number) => value.toLocaleString("en-US", { notation: "compact", maximumFractionDigits: 1 });
const ROUND_S = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 21_600, 43_200, 86_400, 172_800, 604_800];

export const X_UNITS: Record<XUnit, { plural: string; format?: (value: number) => string; incrs?: number[] }> = {
  step: { plural: "steps" },
  rollout: { plural: "rollouts", format: many },
  token: { plural: "sampled tokens", format: many },
  time: { plural: "time", format: formatDuration, incrs: ROUND_S },
};

/** What the run had done until the end of each step, in order; the baseline had done nothing. */
function knotsOf(metrics: MetricSeries, startedAt: string, unit: XUnit): [step: number, x: number][] {
  let total = 0;
  if (unit === "rollout") return metrics.success.map((one) => [one.step, (total += one.num_rollouts)]);
  return metrics.steps.flatMap((step, row): [number, number][] => {
    const [ended, tokens] = [metrics.ended_at[row], metrics.tokens[row]];
    if (unit === "time") return ended ? [[step, (Date.parse(ended) - Date.parse(startedAt)) / 1000]] : [];
    return tokens == null ? [] : [[step, tokens]];
  });
}

/** Where a step is drawn, also one between those that are; null if the run did not record what it is drawn over. */
export function placesOf(metrics: MetricSeries, startedAt: string, unit: XUnit): ((step: number) => number) | null {
  if (unit === "step") return (step) => step;
  const known = knotsOf(metrics, startedAt, unit);
  if (known[0] === undefined) return null;
  const knots: [number, number][] = [[Math.min(0, known[0][0] - 1), 0], ...known];
  const exact = new Map(knots);
  return (step) => {
    const there = exact.get(step);
    if (there !== undefined) return there;
    const after = knots.find(([one]) => one >= step) ?? knots.at(-1);
    const before = knots.findLast(([one]) => one <= step) ?? knots[0];
    if (!after || !before || after[0] <= before[0]) return before?.[1] ?? 0;
    return before[1] + ((after[1] - before[1]) * (step - before[0])) / (after[0] - before[0]);
  };
}

/** Between the step and the next one. */
export const afterStep = (step: number) => step + 0.5;

/** The series over another unit; what it cannot be drawn over has no points. */
export function moved(series: Series, places: ((step: number) => number) | null): Series {
  if (places === null) return { ...series, points: [] };
  return { ...series, points: series.points.map((point) => ({ ...point, x: places(point.x), step: point.x })), breaks: series.breaks?.map((end) => places(end)) };
}
