import { useEffect, useLayoutEffect, useMemo, useRef, useState, type KeyboardEvent, type MouseEvent } from "react";
import type uPlot from "uplot";
import { formatNumber } from "../format";
import { Icon } from "../ui/icons";
import { useTheme } from "../ui/theme";
import { dotShift, makePlot, type Drawn } from "./plot";
import { download, toCsv, type Series } from "./series";

export type ChartProps = {
  title: string;
  /** What the metric says, from the metric's own list of meanings. */
  hint?: string | undefined;
  series: readonly Series[];
  smoothing?: number;
  log?: boolean;
  range?: [number, number] | null;
  onRange?: (range: [number, number] | null) => void;
  yRange?: [number, number] | undefined;
  format?: ((value: number) => string) | undefined;
  height?: number;
  /** Where a point leads: the step that it came from. */
  onPick?: ((step: number, series: Series) => void) | undefined;
  xLabel?: string;
  /** How values of x are written, if they are not whole numbers, and how far apart those on the axis may be. */
  xFormat?: ((value: number) => string) | undefined;
  xIncrs?: number[] | undefined;
};

const MAX_VALUES = 8; // in the legend

type Hover = { index: number; left: number };

const NO_RANGE = () => undefined;

export function MetricChart(props: ChartProps) {
  const { series, smoothing = 0, log = false, range = null, onRange = NO_RANGE, height = 190, xLabel = "step" } = props;
  const theme = useTheme();
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const drawn = useRef<Drawn | null>(null);
  const dragged = useRef(0);
  const pointed = useRef<number | null>(null); // x, which stays where it is when the chart is drawn anew
  const [hover, setHover] = useState<Hover | null>(null);
  const [width, setWidth] = useState(0);
  const [visible, setVisible] = useState(false);

  useLayoutEffect(() => {
    const target = holder.current;
    if (!target) return;
    setWidth(target.clientWidth);
    const observer = new ResizeObserver(() => setWidth(target.clientWidth));
    observer.observe(target);
    const seen = new IntersectionObserver(([entry]) => entry?.isIntersecting && setVisible(true), { rootMargin: "300px" });
    seen.observe(target);
    return () => {
      observer.disconnect();
      seen.disconnect();
    };
  }, []);

  const format = props.format;
  const { yRange, xFormat, xIncrs } = props;
  useEffect(() => {
    const target = holder.current;
    if (!target || !width || !visible) return;
    const made = makePlot(target, {
      series,
      smoothing,
      log,
      range,
      yRange,
      format,
      xFormat,
      xIncrs,
      width,
      height,
      onRange,
      pointed: pointed.current,
      onCursor: (x, index, left) => {
        const at = index === null || left < 0 ? null : { index, left };
        pointed.current = at && x;
        setHover(at);
      },
    });
    plot.current = made.plot;
    drawn.current = made.drawn;
    return () => {
      made.plot.destroy();
      plot.current = null;
      setHover(null);
    };
  }, [series, smoothing, log, range, yRange, format, xFormat, xIncrs, width, height, onRange, theme, visible]);

  const pick = (index: number, at?: { left: number; top: number }) => {
    const [self, data] = [plot.current, drawn.current];
    if (!self || !data || !props.onPick) return;
    const x = data.data[0][index];
    const value = (place: number) => data.data[data.lines[place] ?? 0]?.[index];
    const away = (place: number) => {
      if (!at) return place;
      const down = self.valToPos(value(place) ?? 0, "y") - at.top;
      return Math.hypot(series[place]?.dots ? self.valToPos(x ?? 0, "x") + dotShift(series, place) - at.left : 0, down);
    };
    const there = series.map((_, place) => place).filter((place) => value(place) != null);
    there.sort((a, b) => away(a) - away(b));
    const chosen = series[there[0] ?? -1];
    if (x !== undefined && chosen) props.onPick(chosen.points.find((point) => point.x === x)?.step ?? x, chosen);
  };
  const click = (event: MouseEvent) => {
    const over = holder.current?.querySelector(".u-over");
    if (!plot.current || !over || Math.abs(event.clientX - dragged.current) >= 5) return;
    const corner = over.getBoundingClientRect();
    const at = { left: event.clientX - corner.left, top: event.clientY - corner.top };
    pick(plot.current.posToIdx(at.left), at);
  };
  const keys = (event: KeyboardEvent) => {
    const self = plot.current;
    if (!self) return;
    if (event.key === "Enter" && hover) pick(hover.index);
    const step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const count = self.data[0].length;
    const index = Math.min(count - 1, Math.max(0, (hover?.index ?? (step > 0 ? -1 : count)) + step));
    self.setCursor({ left: self.valToPos(self.data[0][index] ?? 0, "x"), top: 10 });
  };

  const name = props.title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-");
  const savePng = () => {
    const canvas = holder.current?.querySelector("canvas");
    if (canvas) composePng(canvas, props.title, series).toBlob((blob) => blob && download(`${name}.png`, blob));
  };
  const count = useMemo(() => series.reduce((sum, one) => sum + one.points.length, 0), [series]);
  return (
    <figure className="chart" aria-label={props.title}>
      <figcaption className={series.length > 2 ? "many" : ""}>
        <span className="chart-title" title={props.hint}>
          {props.title}
        </span>
        <Readout hover={hover} drawn={drawn.current} series={series} format={format} xLabel={xLabel} xFormat={xFormat} />
        <span className="chart-tools">
          <button className="button quiet icon small" type="button" aria-label={`Save ${props.title} as PNG`} title="Save as PNG" onClick={savePng}>
            <Icon name="image" />
          </button>
          <button
            className="button quiet icon small"
            type="button"
            aria-label={`Save ${props.title} as CSV`}
            title="Save as CSV"
            onClick={() => download(`${name}.csv`, new Blob([toCsv(xLabel, series)], { type: "text/csv" }))}
          >
            <Icon name="download" />
          </button>
        </span>
      </figcaption>
      <div
        ref={holder}
        className={props.onPick ? "chart-plot pickable" : "chart-plot"}
        style={{ height }}
        tabIndex={0}
        role="group"
        aria-roledescription="chart"
        aria-label={`${props.title}: ${count} points. Arrow keys move along the ${xLabel}s${props.onPick ? ", Enter opens one" : ""}.`}
        onKeyDown={keys}
        onMouseDown={(event) => (dragged.current = event.clientX)}
        onClick={click}
        onDoubleClick={() => onRange(null)}
      />
    </figure>
  );
}

function Readout(props: {
  hover: Hover | null;
  drawn: Drawn | null;
  series: readonly Series[];
  format: ((value: number) => string) | undefined;
  xLabel: string;
  xFormat: ((value: number) => string) | undefined;
}) {
  const { hover, drawn, series, xLabel } = props;
  const format = props.format ?? ((value: number) => formatNumber(value));
  const last = (points: Series["points"]) => points.findLast((point) => point.y !== null)?.y ?? null;
  const values = series
    .map((one, index) => {
      const line = drawn?.lines[index] ?? 0;
      const at = (column: number) => (hover && drawn ? (drawn.data[column]?.[hover.index] ?? null) : null);
      const [high, low] = drawn?.bounded[index] ? [at(line + 1), at(line + 2)] : [null, null];
      return { one, value: hover && drawn ? at(line) : last(one.points), low, high };
    })
    .filter(({ one, value }) => value !== null || (series.length <= MAX_VALUES && last(one.points) !== null)); // a legend, also where there is no value
  const isNamed = series.length > 1 || series.some((one) => one.dots);
  const x = hover && drawn ? drawn.data[0][hover.index] : null;
  return (
    <span className="chart-readout num" aria-live="polite">
      {x !== null && x !== undefined && (
        <span className="faint">
          {xLabel} {props.xFormat ? props.xFormat(x) : x}
        </span>
      )}
      {values
        .slice(0, MAX_VALUES)
        .map(({ one, value, low, high }) => (
          <span key={one.id ?? one.label} className="chart-key">
            {isNamed && <i className={one.hollow ? "ring" : one.dots ? "dot" : "line"} style={{ color: one.color.startsWith("--") ? `var(${one.color})` : one.color }} />}
            {isNamed && <span className="dim truncate">{one.label}</span>}
            <b>{value === null ? "–" : format(value)}</b>
            {low !== null && high !== null && <span className="faint">{format(low)} to {format(high)}</span>}
          </span>
        ))}
      {values.length > MAX_VALUES && <span className="faint">and {values.length - MAX_VALUES} more</span>}
    </span>
  );
}

/** The chart with its title and legend on the page's background, as a picture that can stand alone. */
function composePng(source: HTMLCanvasElement, title: string, series: readonly Series[]): HTMLCanvasElement {
  const style = getComputedStyle(document.documentElement);
  const ratio = devicePixelRatio;
  const canvas = document.createElement("canvas");
  canvas.width = source.width + 24 * ratio;
  canvas.height = source.height + 54 * ratio;
  const context = canvas.getContext("2d");
  if (!context) return canvas;
  context.fillStyle = style.getPropertyValue("--bg-raised");
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = style.getPropertyValue("--text");
  context.font = `600 ${13 * ratio}px Inter, sans-serif`;
  context.fillText(title, 14 * ratio, 22 * ratio);
  context.font = `${11 * ratio}px Inter, sans-serif`;
  let left = 14 * ratio;
  for (const one of series) {
    context.fillStyle = one.color.startsWith("--") ? style.getPropertyValue(one.color) : one.color;
    context.fillText(`● ${one.label}`, left, 40 * ratio);
    left += context.measureText(`● ${one.label}   `).width;
  }
  context.drawImage(source, 12 * ratio, 48 * ratio);
  return canvas;
}
