import uPlot from "uplot";
import { formatNumber } from "../format";
import { align, bandOf, inParts, smooth, type Series } from "./series";

export type PlotOptions = {
  series: readonly Series[];
  smoothing: number;
  log: boolean;
  range: [number, number] | null;
  yRange?: [number, number] | undefined;
  format?: ((value: number) => string) | undefined;
  xFormat?: ((value: number) => string) | undefined;
  xIncrs?: number[] | undefined;
  width: number;
  height: number;
  onRange: (range: [number, number] | null) => void;
  /** The x at which the cursor is from the beginning. */
  pointed: number | null;
  onCursor: (x: number | null, index: number | null, left: number) => void;
};

export type Drawn = {
  data: uPlot.AlignedData;
  /** Index in `data` of every series' line. */
  lines: number[];
  /** Whether the columns after a series' line are the ends of its interval, the upper one first. */
  bounded: boolean[];
};

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 1_000_000, 10_000_000, 100_000_000];

function css(name: string): string {
  return name.startsWith("--") ? getComputedStyle(document.documentElement).getPropertyValue(name).trim() : name;
}

function translucent(color: string, share: number): string {
  return `color-mix(in srgb, ${color} ${share * 100}%, transparent)`;
}

/** Columns in drawing order: for each series its raw line (faint, if smoothed), its line, then its interval. */
export function drawnData(series: readonly Series[], smoothing: number, log: boolean): Drawn {
  const { x, columns } = align(series.map((one) => one.points));
  const bounds = series.map((one) => one.points.some((point) => point.low != null && point.high != null));
  const sides = series.map((one) => {
    const banded = one.dots ? one.points : inParts(one.points, (point) => point.x, one.breaks, (part) => bandOf(part, smoothing));
    const side = (name: "low" | "high") => banded.map((point) => ({ x: point.x, y: point[name] ?? null }));
    // the same x for all: an aligned table of the bounds has the same rows, because every point is in it
    return align([side("low"), side("high")]);
  });
  const place = new Map(x.map((value, index) => [value, index]));
  const positive = (column: (number | null)[]) =>
    log ? column.map((value) => (value !== null && value > 0 ? value : null)) : column;
  const data: (number | null)[][] = [x];
  const lines: number[] = [];
  for (const [index, column] of columns.entries()) {
    const one = series[index];
    const weight = one?.dots ? 0 : smoothing;
    data.push(positive(column));
    data.push(positive(inParts(column, (_, row) => x[row] ?? 0, one?.breaks, (part) => smooth(part, weight))));
    lines.push(data.length - 1);
    if (!bounds[index]) continue;
    const side = sides[index];
    for (const bound of [1, 0]) {
      const full: (number | null)[] = Array.from({ length: x.length }, () => null);
      for (const [row, value] of (side?.x ?? []).entries()) {
        full[place.get(value) ?? 0] = side?.columns[bound]?.[row] ?? null;
      }
      data.push(positive(full));
    }
  }
  return { data: data as unknown as uPlot.AlignedData, lines, bounded: bounds };
}

/** Where the parts of a series end and begin, as rows: a break lies between two of its values. */
function cutRows(xs: ArrayLike<number>, values: ArrayLike<number | null | undefined>, breaks: readonly number[] | undefined): [number, number][] {
  const rows = Array.from(xs, (_, row) => row).filter((row) => values[row] != null);
  return (breaks ?? []).flatMap((end): [number, number][] => {
    const [before, after] = [rows.findLast((row) => (xs[row] ?? 0) <= end), rows.find((row) => (xs[row] ?? 0) > end)];
    return before === undefined || after === undefined ? [] : [[before, after]];
  });
}

/** How a line treats rows without a value, and that it is not drawn across a break. */
function cuts(one: Series, holes: boolean): Pick<uPlot.Series, "spanGaps" | "gaps"> {
  if (!one.breaks?.length) return { spanGaps: holes };
  return {
    spanGaps: false,
    gaps: (plot, index, _from, _to, empty) => {
      const at = (row: number) => plot.valToPos(plot.data[0][row] ?? 0, "x", true);
      const cut = cutRows(plot.data[0], plot.data[index] ?? [], one.breaks).map(([before, after]): [number, number] => [at(before), at(after)]);
      const other = holes ? [] : empty.filter(([from, to]) => !cut.some(([left, right]) => from < right && to > left));
      return [...cut, ...other].sort((a, b) => a[0] - b[0]);
    },
  };
}

/** Rows of a part that has a single value, which no line shows. */
function alone(plot: uPlot, index: number, breaks: readonly number[] | undefined): number[] | null {
  const [xs, values] = [plot.data[0], plot.data[index] ?? []];
  const rows = Array.from(xs, (_, row) => row).filter((row) => values[row] != null);
  const lone = inParts(rows, (row) => xs[row] ?? 0, breaks, (part) => (part.length === 1 ? part : []));
  return breaks?.length && lone.length ? lone : null;
}

function lineSeries(one: Series, color: string, smoothing: number, holes: boolean): uPlot.Series[] {
  const raw: uPlot.Series = {
    stroke: translucent(color, 30),
    width: 1,
    points: { show: false },
    show: smoothing > 0 && !one.dots,
    ...cuts(one, holes),
  };
  if (smoothing > 0 && !one.dots) raw.stroke = translucent(color, 0.32);
  const line: uPlot.Series = {
    label: one.label,
    stroke: color,
    width: one.dots ? 0 : 1.7,
    ...cuts(one, holes),
    points: { show: one.points.length === 1 && !one.dots, size: 7, fill: color, filter: (plot, index, show) => (show || one.dots ? null : alone(plot, index, one.breaks)) }, // a line needs two
    ...(one.dots ? { paths: () => null } : {}),
    ...(one.dashed ? { dash: [5, 4] } : {}),
  };
  return [raw, line];
}

const DOT_GAP = 12;

/** How far from its step a dot is drawn, in pixels: dots of several series stand side by side. */
export function dotShift(series: readonly Series[], index: number): number {
  const dotted = series.flatMap((one, at) => (one.dots && !one.hollow ? [at] : []));
  return dotted.includes(index) ? (dotted.indexOf(index) - (dotted.length - 1) / 2) * DOT_GAP : 0;
}

/** Dots with their intervals as whiskers; intervals of lines are bands. */
function dots(series: readonly Series[], lines: number[]): uPlot.Plugin {
  return {
    hooks: {
      draw: (plot: uPlot) => {
        const isShared = new Set(series.map((one) => one.breaks?.join())).size === 1;
        for (const one of series) if (one.points.length) for (const end of one.breaks ?? []) drawBreak(plot, end, isShared || one.color.startsWith("--") ? "--text-faint" : one.color);
        for (const [index, one] of series.entries()) if (one.dots) drawDots(plot, one, lines[index] ?? 0, dotShift(series, index));
      },
    },
  };
}

/** A dashed line between the last step of a curve and the first of the next. */
function drawBreak(plot: uPlot, end: number, color: string): void {
  const { ctx, bbox } = plot;
  const left = plot.valToPos(end, "x", true);
  if (left < bbox.left || left > bbox.left + bbox.width) return;
  ctx.save();
  ctx.strokeStyle = css(color);
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(left, bbox.top);
  ctx.lineTo(left, bbox.top + bbox.height);
  ctx.stroke();
  ctx.restore();
}

function drawDots(plot: uPlot, one: Series, line: number, shift: number): void {
  const { ctx } = plot;
  const { min, max } = plot.scales.x ?? {};
  const [values, high, low] = [plot.data[line], plot.data[line + 1], plot.data[line + 2]];
  const bounded = one.points.some((point) => point.low != null && point.high != null);
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css(one.color);
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const [row, x] of plot.data[0].entries()) {
    const value = values?.[row];
    if (value == null || x < (min ?? x) || x > (max ?? x)) continue;
    const left = plot.valToPos(x, "x", true) + shift * devicePixelRatio;
    const [top, bottom] = bounded ? [high?.[row], low?.[row]] : [null, null];
    ctx.beginPath();
    if (top != null && bottom != null) {
      ctx.moveTo(left, plot.valToPos(top, "y", true));
      ctx.lineTo(left, plot.valToPos(bottom, "y", true));
      ctx.stroke();
      ctx.beginPath();
    }
    ctx.arc(left, plot.valToPos(value, "y", true), 4 * devicePixelRatio, 0, 2 * Math.PI);
    if (one.hollow) ctx.stroke();
    else ctx.fill();
  }
  ctx.restore();
}

function axis(format: ((value: number) => string) | undefined): uPlot.Axis {
  return {
    stroke: css("--text-faint"),
    font: `11px ${css("--font")}`,
    grid: { stroke: css("--chart-grid"), width: 1 },
    ticks: { show: false },
    gap: 6,
    values: (_plot: uPlot, ticks: number[]) => tickTexts(ticks, format),
  };
}

/** As many decimals as tell neighbours apart. */
function tickTexts(ticks: readonly (number | null)[], format: ((value: number) => string) | undefined): string[] {
  const known = ticks.filter((tick) => tick !== null);
  const step = Math.abs((known[1] ?? 1) - (known[0] ?? 0)) || 1;
  let decimals = 0;
  while (decimals < 9 && Math.abs(step * 10 ** decimals - Math.round(step * 10 ** decimals)) > 1e-4 * step * 10 ** decimals) decimals += 1;
  const plain = (value: number) => {
    const isSmall = Math.max(...known.map(Math.abs)) < 1e-3;
    if (isSmall || decimals > 8 || Math.abs(value) >= 1e6) return formatNumber(value, 3);
    return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  };
  return ticks.map((tick) => (tick === null ? "" : (format ?? plain)(tick)));
}

/** Room above and below the values; for values that are all 0, an axis that does not reach to 100. */
function valueRange(low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [null, null];
  return low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true);
}

export function makePlot(target: HTMLElement, options: PlotOptions): { plot: uPlot; drawn: Drawn } {
  const drawn = drawnData(options.series, options.smoothing, options.log);
  const series: uPlot.Series[] = [{}];
  const bands: uPlot.Band[] = [];
  const xs = drawn.data[0];
  for (const one of options.series) {
    const color = css(one.color);
    series.push(...lineSeries(one, color, options.smoothing, one.points.length < xs.length));
    if (!one.points.some((point) => point.low != null && point.high != null)) continue;
    const top = series.length;
    const hidden: uPlot.Series = { width: 0, points: { show: false }, ...cuts(one, true), ...(one.dots ? { paths: () => null } : {}) };
    series.push({ ...hidden }, { ...hidden });
    if (!one.dots) bands.push({ series: [top, top + 1], fill: translucent(color, 0.16) });
  }
  const [first, last] = [xs[0] ?? 0, xs.at(-1) ?? 1];
  const room = options.series.every((one) => one.dots) ? (last - first) / 20 : 0; // for dots beside the first and last step
  const whole: [number, number] = first === last ? [first - 1, first + 1] : [first - room, last + room];
  const ringed = new Set(drawn.lines.filter((_, index) => !options.series[index]?.dots)); // not raw lines, nor bounds
  const isCounted = !options.format && !options.smoothing && options.series.every((one) => one.points.every((point) => point.y === null || Number.isInteger(point.y)));
  const plot = new uPlot(
    {
      width: options.width,
      height: options.height,
      padding: [10, 14, 0, 0],
      series,
      bands,
      legend: { show: false },
      cursor: {
        points: { size: (_plot, index) => (ringed.has(index) ? 7 : 0), width: (_plot, index) => (ringed.has(index) ? 2 : 0) },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        y: false,
      },
      scales: {
        x: { time: false, range: () => options.range ?? whole },
        y: {
          distr: options.log ? 3 : 1,
          ...(options.log ? {} : { range: (_plot: uPlot, low: number | null, high: number | null) => options.yRange ?? valueRange(low, high) }),
        },
      },
      axes: [
        { ...axis(options.xFormat), size: 26, ...(options.xIncrs || !options.xFormat ? { incrs: options.xIncrs ?? WHOLE } : {}) },
        { ...axis(options.format), ...(isCounted ? { incrs: WHOLE } : {}), size: (_plot, texts) => 16 + 6.6 * Math.max(4, ...(texts ?? []).map((text) => text.length)) },
      ],
      plugins: [dots(options.series, drawn.lines)],
      hooks: {
        setSelect: [
          (self) => {
            if (self.select.width < 6) return;
            const from = self.posToVal(self.select.left, "x");
            const to = self.posToVal(self.select.left + self.select.width, "x");
            self.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            options.onRange([from, to]);
          },
        ],
        setCursor: [(self) => options.onCursor(self.data[0][self.cursor.idx ?? -1] ?? null, self.cursor.idx ?? null, self.cursor.left ?? -1)],
        ready: [(self) => options.pointed !== null && self.setCursor({ left: self.valToPos(options.pointed, "x"), top: 10 })],
      },
    },
    drawn.data,
    target,
  );
  return { plot, drawn };
}
