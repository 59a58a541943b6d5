import { Fragment, useMemo } from "react";
import { useQuery } from "../api/cache";
import { metricsPath, setPage, sourceName, sourcePage, timelinePath } from "../api/paths";
import type { MetricSeries, Run, TimelineItem } from "../api/types";
import { formatDuration, formatNumber, formatPercent } from "../format";
import { clockOf, laneOf, restartsOf, worked, type Restart } from "../timeline";
import { Link } from "../router";
import { Empty, IntervalBar, Loaded, LostNote, Progress, StatusBadge } from "../ui/parts";
import { useMore, useSorted, type Column } from "../ui/table";

/** Baseline, steps and evaluations in the order of training, on one clock, and where the run was started again. */
export function RunTimeline({ run }: { run: Run }) {
  const query = useQuery<TimelineItem[]>(timelinePath(run.run_id));
  return (
    <Loaded query={query}>
      {(items) =>
        items.length === 0 ? (
          <Empty title="Nothing has started"><p>{run.is_alive ? "The baseline or the first step appears here automatically." : "The run ended before its baseline or first step began."}</p></Empty>
        ) : (
          <Timeline run={run} items={items} />
        )
      }
    </Loaded>
  );
}

function Timeline({ run, items }: { run: Run; items: readonly TimelineItem[] }) {
  const newest = useMemo(() => [...items].reverse(), [items]);
  const restarts = useMemo(() => restartsOf(run.history, items, Date.parse(run.heartbeat_at)), [run.history, items, run.heartbeat_at]);
  const columns = useMemo<readonly Column<TimelineItem>[]>(
    () => [
      { label: "What", value: (item) => items.indexOf(item) },
      { label: "Status", value: (item) => item.status },
      { label: "Groups", value: (item) => item.num_ended_groups },
      { label: "Success" },
      { label: "Rate", right: true, value: (item) => item.success.rate },
      { label: "Reward", right: true, value: (item) => item.reward_mean },
      { label: "Adapter", right: true, value: (item) => item.policy_version },
      { label: "Rollouts", right: true, title: "How long its rollouts took", value: (item) => worked(item.started_at, item.rollouts_ended_at ?? item.ended_at, restarts) },
      { label: "Took", right: true, value: (item) => worked(item.started_at, item.ended_at, restarts) },
    ],
    [items, restarts],
  );
  const { sorted, head, isSorted } = useSorted(newest, columns);
  const { shown, more } = useMore(sorted, 100);
  const resumed = isSorted ? [] : restarts; // between the rows that it lies between, which only their own order has
  return (
    <section className="panel">
      <Clock run={run} items={items} restarts={restarts} />
      <div className="table-scroll">
        <table className="data">
          <thead>
            {head}
          </thead>
          <tbody>
            {shown.map((item, index) => (
              <Fragment key={`${item.phase}-${item.step}`}>
                {resumed.filter((one) => one.after === items.length - 1 - index).reverse().map((one) => <RestartRow key={one.started} restart={one} items={items} />)}
                <tr>
                  <td><Link className="text-link" data-row to={sourcePage(run.run_id, item.phase, item.step)}>{sourceName(item.phase, item.step)}</Link></td>
                  <td><StatusBadge status={item.status} alive={run.is_alive} /></td>
                  <td>
                    <div className="row num"><Progress value={item.progress} label="Groups that have ended" /><Link className="faint text-link" to={setPage({ run_id: run.run_id, phase: item.phase, step: item.step })}>{item.num_ended_groups}/{item.num_groups}</Link></div>
                  </td>
                  <td className="interval-cell">{item.success.rate === null ? null : <IntervalBar value={item.success.rate} low={item.success.low} high={item.success.high} />}</td>
                  <td className="right">{item.ended_at === null && item.success.rate !== null ? <span className="faint" title="of the groups that have ended: short rollouts end first">{formatPercent(item.success.rate, 1)} so far</span> : formatPercent(item.success.rate, 1)}{item.success.num_lost_tasks > 0 && <div><LostNote rate={item.success} /></div>}</td>
                  <td className="right">{formatNumber(item.reward_mean, 3)}</td>
                  <td className="right mono">{item.policy_version}</td>
                  <td className="right"><Link className="text-link" title="The stragglers: slower than 95 %, or the last to end" to={setPage({ run_id: run.run_id, phase: item.phase, step: item.step, stragglers: true })}>{formatDuration(worked(item.started_at, item.rollouts_ended_at ?? item.ended_at, restarts))}</Link></td>
                  <td className="right">{formatDuration(worked(item.started_at, item.ended_at, restarts))}</td>
                </tr>
              </Fragment>
            ))}
            {shown.length === newest.length && resumed.filter((one) => one.after < 0).reverse().map((one) => <RestartRow key={one.started} restart={one} items={items} />)}
          </tbody>
        </table>
      </div>
      {more}
    </section>
  );
}

const BEFORE: Record<string, string> = {
  interrupted: "it was interrupted",
  failed: "it failed",
  cancelled: "it was stopped",
  completed: "it was complete",
};

function restartText(restart: Restart, items: readonly TimelineItem[]): string {
  const next = items.slice(restart.after + 1).find((item) => item.phase === "step");
  const where = next ? ` at ${sourceName(next.phase, next.step).toLowerCase()}` : "";
  return `Resumed${where}, ${formatDuration((restart.started - restart.stopped) / 1000)} after ${BEFORE[restart.how] ?? "it stopped"}`;
}

function RestartRow({ restart, items }: { restart: Restart; items: readonly TimelineItem[] }) {
  return (
    <tr className="restart">
      <td colSpan={9} title={new Date(restart.started).toLocaleString()}>{restartText(restart, items)}</td>
    </tr>
  );
}

const LANE_PX = 28;
const LANES_PX = 120; // of all together, if there are many

/** The run to scale: how long each step took, its rollouts apart from its training; what overlaps lies in lanes. */
function Clock({ run, items, restarts }: { run: Run; items: readonly TimelineItem[]; restarts: readonly Restart[] }) {
  const spans = items.map((item) => ({ from: Date.parse(item.started_at), to: Date.parse(item.ended_at ?? run.heartbeat_at) }));
  const start = Math.min(...spans.map((span) => span.from));
  const end = Math.max(...spans.map((span) => span.to), start + 1);
  const at = clockOf(start, end, restarts);
  const lanes = laneOf(spans.map((span) => ({ from: at(span.from), to: at(span.to) })));
  const numLanes = Math.max(...lanes) + 1;
  const height = Math.min(LANE_PX, LANES_PX / numLanes);
  const percent = (share: number) => `${Math.max(0, share) * 100}%`;
  return (
    <div className="run-clock">
      <div className="run-clock-track" aria-hidden="true" style={{ height: height * numLanes }}>
        {items.map((item, index) => {
          const { from, to } = spans[index] ?? { from: start, to: end };
          const middle = item.rollouts_ended_at ? Date.parse(item.rollouts_ended_at) : to;
          const [left, right] = [at(from), at(to)];
          return (
            <Link
              key={`${item.phase}-${item.step}`}
              to={sourcePage(run.run_id, item.phase, item.step)}
              className={`run-clock-item ${item.phase} ${item.status}`}
              style={{ left: percent(left), width: percent(right - left), top: (lanes[index] ?? 0) * height + 2, height: height - 4 }}
              title={`${sourceName(item.phase, item.step)}: ${formatDuration(worked(item.started_at, item.ended_at, restarts))}, success ${formatPercent(item.success.rate)}`}
              tabIndex={-1}
            >
              <i style={{ width: percent((at(middle) - left) / Math.max(1e-9, right - left)), ["--strength" as never]: `${30 + 70 * (item.success.rate ?? 0)}%` }} />
            </Link>
          );
        })}
        {restarts.map((one) => <i key={one.started} className="run-clock-restart" style={{ left: percent(at(one.at)) }} title={restartText(one, items)} />)}
      </div>
      <Use run={run} items={items} at={at} />
      <div className="row between faint num">
        <span>{clockText(start, end, start)}</span>
        <span className="legend">
          <i className="swatch-step" /> rollouts <i className="swatch-train" /> training <i className="swatch-eval" /> evaluation
          {restarts.length > 0 && <><i className="swatch-restart" /> resumed; the downtime is left out</>}
          <span className="legend-note">stronger colours: more success</span>
        </span>
        <span>{clockText(start, end, end)}</span>
      </div>
    </div>
  );
}

type Strip = { label: string; hint: string; names: readonly string[]; of: (values: readonly (number | null)[]) => number | null; format: (value: number) => string; full?: number };

const share = ([part, whole]: readonly (number | null)[]) => (part == null || !whole ? null : part / whole);
const only = ([value]: readonly (number | null)[]) => value ?? null;
const inPercent = (value: number) => formatPercent(value);
const inGib = (value: number) => `${formatNumber(value, 3)} GiB`;

/** What a step's metrics say of how well machines were used, as far as it was recorded. */
const STRIPS: readonly Strip[] = [
  { label: "Trainer busy", hint: "share of the step in which the trainer worked", names: ["trainer/busy_s", "time/step_s"], of: share, format: inPercent, full: 1 },
  { label: "MFU", hint: "model FLOPs utilisation of the trainer while it worked", names: ["trainer/mfu_frac"], of: only, format: inPercent, full: 1 },
  { label: "Of a matrix product", hint: "throughput of the trainer as a share of that of one large matrix product", names: ["trainer/matmul_frac"], of: only, format: inPercent, full: 1 },
  { label: "Devices busy", hint: "share of the devices' time spent in leases", names: ["device/busy_frac"], of: only, format: inPercent, full: 1 },
  { label: "GPU memory", hint: "peak that the trainer's allocator held", names: ["trainer/peak_reserved_gib"], of: only, format: inGib },
  { label: "Memory", hint: "peak main memory of the trainer process", names: ["trainer/peak_rss_gib"], of: only, format: inGib },
];
const STRIP_METRICS = [...new Set(STRIPS.flatMap((strip) => strip.names))];

/** Use of trainer and devices and memory of each step, below it on the same clock. */
function Use({ run, items, at }: { run: Run; items: readonly TimelineItem[]; at: (time: number) => number }) {
  const { data } = useQuery<MetricSeries>(metricsPath(run.run_id, { name: STRIP_METRICS, max_points: 10_000 }));
  const steps = useMemo(() => new Map(items.filter((item) => item.phase === "step" && item.ended_at !== null).map((item) => [item.step, item])), [items]);
  if (!data) return null;
  return STRIPS.map((strip) => {
    const bars = data.steps.flatMap((step, row) => {
      const [item, value] = [steps.get(step), strip.of(strip.names.map((name) => data.series[name]?.[row] ?? null))];
      return item && value !== null ? [{ from: at(Date.parse(item.started_at)), to: at(Date.parse(item.ended_at ?? "")), value }] : [];
    });
    const last = bars.at(-1);
    if (!last) return null;
    const most = Math.max(...bars.map((bar) => bar.value));
    const full = Math.max(strip.full ?? most, 1e-9);
    // a path, as a run has thousands of steps
    const path = bars.map(({ from, to, value }) => `M${1000 * from},20V${20 - 20 * Math.min(1, value / full)}H${1000 * to}V20Z`).join("");
    const mean = bars.reduce((sum, bar) => sum + bar.value, 0) / bars.length;
    const figures = `mean ${strip.format(mean)}, highest ${strip.format(most)}, last ${strip.format(last.value)}`;
    return (
      <figure key={strip.label} className="run-use" title={strip.hint}>
        <figcaption className="num"><b>{strip.label}</b> <span className="dim">{figures}</span></figcaption>
        <svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img" aria-label={`${strip.label}: ${figures}`}><path d={path} /></svg>
      </figure>
    );
  });
}

/** A time of day, with its date if the run went on over midnight. */
function clockText(start: number, end: number, time: number): string {
  const isOneDay = new Date(start).toDateString() === new Date(end).toDateString();
  return isOneDay ? new Date(time).toLocaleTimeString() : new Date(time).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" });
}
