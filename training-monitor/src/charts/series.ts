/** Values over steps; `low` and `high` bound an interval around each value. */
export type Series = {
  label: string;
  /** What a click on a point leads to, where labels alone do not say it. */
  id?: string;
  /** Name of a CSS custom property, such as "--accent", or a colour. */
  color: string;
  points: readonly Point[];
  /** Only dots, no line between them: evaluations. */
  dots?: boolean;
  /** Dots drawn as rings: not final yet. */
  hollow?: boolean;
  dashed?: boolean;
  /** At these x, between two of its points, the values become of something else: the line is cut, and smoothing begins anew. */
  breaks?: readonly number[] | undefined;
};

/** `count` is the number of trials behind a rate: what an interval of smoothed rates needs. */
/** `step` where x is something else. */
export type Point = { x: number; step?: number; y: number | null; low?: number | null; high?: number | null; count?: number };

export const PALETTE = ["#7c9cff", "#4cc38a", "#e6b450", "#e07ac0", "#57c4d6", "#f08a5d", "#a98bf5", "#9bbf4b"];

export function paletteColor(index: number): string {
  return PALETTE[index % PALETTE.length] ?? "#7c9cff";
}

/** What `each` makes of every part of the rows on its own; a break parts rows up to it from those after it. */
export function inParts<Row, Made>(rows: readonly Row[], xOf: (row: Row, index: number) => number, breaks: readonly number[] | undefined, each: (part: readonly Row[]) => readonly Made[]): Made[] {
  const parts = new Map<number, Row[]>();
  for (const [index, row] of rows.entries()) {
    const part = (breaks ?? []).filter((end) => xOf(row, index) > end).length;
    const found = parts.get(part);
    if (found) found.push(row);
    else parts.set(part, [row]);
  }
  return [...parts.values()].flatMap((part) => [...each(part)]);
}

/** Exponential moving average whose first values are not drawn towards zero; `weight` 0 changes nothing. */
export function smooth(values: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return [...values];
  let total = 0;
  let scale = 0;
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return null;
    total = weight * total + (1 - weight) * value;
    scale = weight * scale + (1 - weight);
    return total / scale;
  });
}

const Z = 1.96;

/**
 * The 95 % interval of each smoothed rate. A mean of rates with weights w has the variance of
 * (sum of w)^2 / (sum of w^2 / count) trials. Null where there is no rate.
 */
export function smoothedBounds(points: readonly Point[], weight: number): { low: number; high: number }[] | null {
  let [total, scale, noise] = [0, 0, 0];
  const bounds: { low: number; high: number }[] = [];
  for (const { y, count } of points) {
    if (y === null || !count) return null;
    total = weight * total + (1 - weight) * y;
    scale = weight * scale + (1 - weight);
    noise = weight ** 2 * noise + (1 - weight) ** 2 / count;
    const [rate, trials] = [total / scale, scale ** 2 / noise];
    bounds.push(rateInterval(rate, trials));
  }
  return bounds;
}

/** 95 % interval of a rate from independent trials, as `rate_interval` in cua_rl/evaluation/statistics.py. */
function rateInterval(rate: number, trials: number): { low: number; high: number } {
  const z2 = Z ** 2 / trials;
  const rare = trials * Math.min(rate, 1 - rate);
  const shift = (0.5 / trials) * Math.min(1, rare > 0 ? 2 / rare : 1);
  const [low, high] = [Math.max(0, rate - shift), Math.min(1, rate + shift)];
  return {
    low: Math.max(0, (low + z2 / 2 - Math.sqrt(z2 * low * (1 - low) + z2 ** 2 / 4)) / (1 + z2)),
    high: Math.min(1, (high + z2 / 2 + Math.sqrt(z2 * high * (1 - high) + z2 ** 2 / 4)) / (1 + z2)),
  };
}

/** A line's points as its band is drawn: under smoothing with the interval of the smoothed value, or with none. */
export function bandOf(points: readonly Point[], weight: number): readonly Point[] {
  if (weight <= 0) return points;
  const measured = points.filter((point) => point.y !== null);
  const bounds = smoothedBounds(measured, weight);
  return measured.map((point, index) => ({ ...point, low: bounds?.[index]?.low ?? null, high: bounds?.[index]?.high ?? null }));
}

export type Table = { x: number[]; columns: (number | null)[][] };

/** Series on one axis: the sorted union of their x, and a column per series with null where it has no value. */
export function align(all: readonly (readonly { x: number; y: number | null }[])[]): Table {
  const x = [...new Set(all.flatMap((points) => points.map((point) => point.x)))].sort((a, b) => a - b);
  const place = new Map(x.map((value, index) => [value, index]));
  const columns = all.map((points) => {
    const column: (number | null)[] = Array.from({ length: x.length }, () => null);
    for (const point of points) column[place.get(point.x) ?? 0] = point.y;
    return column;
  });
  return { x, columns };
}

type CsvCell = string | number | null;

/** A text that a spreadsheet would take for a formula begins with an apostrophe: models and other machines write some. */
function csvCell(value: CsvCell): string {
  const isFormula = typeof value === "string" && /^[=+\-@\t\r]/.test(value) && Number.isNaN(Number(value));
  const text = `${isFormula ? "'" : ""}${value ?? ""}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export const csvOf = (rows: readonly (readonly CsvCell[])[]) => `${rows.map((row) => row.map(csvCell).join(",")).join("\n")}\n`;

/** The values as they are stored, without smoothing. */
export function toCsv(xLabel: string, series: readonly Series[]): string {
  const names = series.flatMap((one) => {
    const bounded = one.points.some((point) => point.low != null);
    return bounded ? [one.label, `${one.label} low`, `${one.label} high`] : [one.label];
  });
  const { x, columns } = align(
    series.flatMap((one) => {
      const bounded = one.points.some((point) => point.low != null);
      if (!bounded) return [one.points];
      const side = (name: "low" | "high") => one.points.map((point) => ({ x: point.x, y: point[name] ?? null }));
      return [one.points, side("low"), side("high")];
    }),
  );
  const lines = x.map((value, row) => [value, ...columns.map((column) => column[row] ?? null)]);
  return csvOf([[xLabel, ...names], ...lines]);
}

/** Hand a file to the reader. */
export function download(name: string, content: Blob): void {
  const address = URL.createObjectURL(content);
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
