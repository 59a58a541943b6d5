import { useMemo, useState } from "react";
import { runPage } from "../api/paths";
import type { ConfigRow, RunSummary } from "../api/types";
import { formatNumber, formatPercent } from "../format";
import { settingText } from "../pages/RunConfig";
import { Link, useSearchParam } from "../router";
import { nameOf, runLabels } from "../runs";
import { Empty, Panel } from "../ui/parts";
import { PickList } from "../ui/PickList";

const [WIDE_PX, HEIGHT_PX, TOP_PX, BELOW_PX] = [150, 250, 40, 44]; // an axis with its name, and room for what is not set
const MOST_AXES = 7; // unless more are asked for
const MOST_TICKS = 9;
const LOG_FROM = 50; // times the smallest value
/** Where and as what a run was kept, which says nothing about what was tried. */
const PLACES = /(^|\.)(run_name|log_path|behavior_if_log_dir_exists|port|wandb_name|wandb_project)$/;

/** A setting as an axis: 0 is its lower end, 1 its upper one, null for a run that does not have it. */
type Axis = { key: string; places: (number | null)[]; ticks: { place: number; text: string }[] };

function axisOf({ key, values }: ConfigRow): Axis {
  const known = values.filter((value) => value !== null && value !== undefined);
  const numbers = known.filter((value) => typeof value === "number");
  const isNumeric = numbers.length === known.length;
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const scaled = (value: number) => (low > 0 && high / low >= LOG_FROM ? Math.log(value) : value);
  const distinct = [...new Map(known.map((value) => [JSON.stringify(value), value])).values()].sort((a, b) => (isNumeric ? Number(a) - Number(b) : settingText(a).localeCompare(settingText(b))));
  const order = distinct.map((value) => JSON.stringify(value));
  const placeOf = (value: unknown) => {
    if (value === null || value === undefined) return null;
    if (order.length < 2) return 0.5;
    return isNumeric ? (scaled(Number(value)) - scaled(low)) / (scaled(high) - scaled(low)) : order.indexOf(JSON.stringify(value)) / (order.length - 1);
  };
  const every = Math.ceil(distinct.length / MOST_TICKS);
  const told = isNumeric && every > 1 ? [low, high] : distinct.filter((_, index) => index % every === 0);
  const ticks = told.map((value) => ({ place: placeOf(value) ?? 0, text: typeof value === "number" ? formatNumber(value) : settingText(value) }));
  return { key, places: values.map(placeOf), ticks };
}

const SUCCESS = "held-out success";
const SHARES = [0, 0.25, 0.5, 0.75, 1].map((place) => ({ place, text: formatPercent(place) }));

/** Runs as lines across the settings in which they differ, up to what each reached on held-out tasks. */
export function ParallelSettings({ runs, rows, colorOf }: { runs: readonly RunSummary[]; rows: readonly ConfigRow[]; colorOf?: (index: number) => string }) {
  const [text, setText] = useSearchParam("axes");
  const [at, setAt] = useState<number | null>(null);
  const labels = useMemo(() => runLabels(runs), [runs]);
  const told = useMemo(() => {
    const missing = (row: ConfigRow) => row.values.filter((value) => value === null || value === undefined).length;
    return rows.filter((row) => row.is_different && !PLACES.test(row.key)).sort((a, b) => missing(a) - missing(b));
  }, [rows]);
  const chosen = text === "" ? told.slice(0, MOST_AXES) : told.filter((row) => text.split(",").includes(row.key));
  const success = runs.map((run) => run.last_eval?.rate ?? null);
  const axes: Axis[] = [...chosen.map(axisOf), { key: SUCCESS, places: success, ticks: SHARES }];
  if (runs.length < 2) return <Empty title="No runs to compare"><p>There are fewer than two.</p></Empty>;
  const x = (axis: number) => WIDE_PX * (axis + 0.5);
  const y = (place: number | null) => TOP_PX + (place === null ? HEIGHT_PX + BELOW_PX / 2 : HEIGHT_PX * (1 - place));
  const pointed = at === null ? undefined : runs[at];
  const color = (index: number) => {
    const rate = success[index];
    return colorOf?.(index) ?? (rate == null ? "var(--text-faint)" : `color-mix(in oklab, var(--good) ${100 * rate}%, var(--bad))`);
  };
  const line = (index: number) => axes.map((axis, place) => `${place ? "L" : "M"}${x(place)} ${y(axis.places[index] ?? null)}`).join("");
  return (
    <Panel title="Settings and held-out success" actions={<PickList label="Axes" all={told.map((row) => row.key)} chosen={chosen.map((row) => row.key)} onChange={(keys) => setText(keys.join() || "none")} />}>
      <p className="parallel-told num" aria-live="polite">
        {pointed && at !== null ? <><b>{labels.get(pointed.run_id)}</b> {chosen.map((row) => `${row.key} ${settingText(row.values[at])}`).join(" · ")} · {SUCCESS} <b>{formatPercent(success[at], 1)}</b></> : <span className="faint">A line is a run, from red to green by its latest evaluation. Point at one to see its settings, click to open it.</span>}
      </p>
      <div className="table-scroll">
        <svg className="parallel" width={axes.length * WIDE_PX} height={TOP_PX + HEIGHT_PX + BELOW_PX} role="group" aria-label={`${runs.length} runs across ${chosen.length} settings`} onMouseLeave={() => setAt(null)}>
          {axes.map((axis, place) => <line key={axis.key} x1={x(place)} x2={x(place)} y1={TOP_PX} y2={TOP_PX + HEIGHT_PX} />)}
          {runs.map((run, index) => (
            <Link key={run.run_id} to={runPage(run.run_id)} aria-label={`${labels.get(run.run_id) ?? nameOf(run)}, ${SUCCESS} ${formatPercent(success[index])}`} className={at === null ? "" : at === index ? "on" : "off"} onMouseEnter={() => setAt(index)} onFocus={() => setAt(index)} onBlur={() => setAt(null)}>
              <path className="reach" d={line(index)} />
              <path d={line(index)} stroke={color(index)} />
            </Link>
          ))}
          {axes.map((axis, place) => (
            <g key={axis.key} className="axis">
              <text x={x(place)} y={16} textAnchor="middle" className="name"><title>{axis.key}</title>{short(axis.key, 22)}</text>
              {axis.ticks.map((tick) => <text key={tick.text} x={x(place) + 7} y={y(tick.place) + 4}>{short(tick.text, 16)}</text>)}
              {axis.places.includes(null) && <text x={x(place) + 7} y={y(null) + 4}>{axis.key === SUCCESS ? "none yet" : "not set"}</text>}
            </g>
          ))}
        </svg>
      </div>
    </Panel>
  );
}

const short = (text: string, most: number) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
