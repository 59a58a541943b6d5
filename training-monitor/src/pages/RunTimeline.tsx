import { useQuery } from "../api/cache";
import { sourceName, sourcePage, timelinePath } from "../api/paths";
import type { Run, TimelineItem } from "../api/types";
import { formatDuration, formatNumber, formatPercent } from "../format";
import { Link } from "../router";
import { Empty, IntervalBar, Loaded, Progress, StatusBadge } from "../ui/parts";

/** Baseline, steps and evaluations in the order in which they ran, on one clock. */
export function RunTimeline({ run }: { run: Run }) {
  const query = useQuery<TimelineItem[]>(timelinePath(run.run_id));
  return (
    <Loaded query={query}>
      {(items) =>
        items.length === 0 ? (
          <Empty title="Nothing has begun"><p>The baseline or the first step appears here by itself.</p></Empty>
        ) : (
          <Timeline run={run} items={items} />
        )
      }
    </Loaded>
  );
}

function Timeline({ run, items }: { run: Run; items: readonly TimelineItem[] }) {
  const newest = [...items].reverse();
  return (
    <section className="panel">
      <Clock run={run} items={items} />
      <div className="table-scroll">
        <table className="data">
          <thead>
            <tr>
              <th>What</th>
              <th>Status</th>
              <th>Groups</th>
              <th>Success</th>
              <th className="right">Rate</th>
              <th className="right">Reward</th>
              <th className="right">Adapter</th>
              <th className="right">Rollouts</th>
              <th className="right">Took</th>
            </tr>
          </thead>
          <tbody>
            {newest.map((item) => (
              <tr key={`${item.phase}-${item.step}`}>
                <td><Link className="text-link" data-row to={sourcePage(run.run_id, item.phase, item.step)}>{sourceName(item.phase, item.step)}</Link></td>
                <td><StatusBadge status={item.status} /></td>
                <td>
                  <div className="row num"><Progress value={item.progress} label="Groups that have ended" /><span className="faint">{item.num_ended_groups}/{item.num_groups}</span></div>
                </td>
                <td className="interval-cell">{item.success.rate === null ? null : <IntervalBar value={item.success.rate} low={item.success.low} high={item.success.high} />}</td>
                <td className="right">{item.ended_at === null && item.success.rate !== null ? <span className="faint" title="of the groups that have ended: short rollouts end first">{formatPercent(item.success.rate, 1)} so far</span> : formatPercent(item.success.rate, 1)}</td>
                <td className="right">{formatNumber(item.reward_mean, 3)}</td>
                <td className="right mono">{item.policy_version}</td>
                <td className="right">{formatDuration(between(item.started_at, item.rollouts_ended_at ?? item.ended_at))}</td>
                <td className="right">{formatDuration(item.duration_s)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function between(start: string, end: string | null): number | null {
  return end === null ? null : (Date.parse(end) - Date.parse(start)) / 1000;
}

/** The run to scale: how long each step took, its rollouts apart from its training. */
function Clock({ run, items }: { run: Run; items: readonly TimelineItem[] }) {
  const start = Math.min(...items.map((item) => Date.parse(item.started_at)));
  const end = Math.max(...items.map((item) => Date.parse(item.ended_at ?? run.heartbeat_at)), start + 1);
  const percent = (from: number, to: number) => `${(Math.max(0, to - from) / (end - start)) * 100}%`;
  return (
    <div className="run-clock">
      <div className="run-clock-track" aria-hidden="true">
        {items.map((item) => {
          const from = Date.parse(item.started_at);
          const to = Date.parse(item.ended_at ?? run.heartbeat_at);
          const middle = item.rollouts_ended_at ? Date.parse(item.rollouts_ended_at) : to;
          return (
            <Link
              key={`${item.phase}-${item.step}`}
              to={sourcePage(run.run_id, item.phase, item.step)}
              className={`run-clock-item ${item.phase} ${item.status}`}
              style={{ left: percent(start, from), width: percent(from, to) }}
              title={`${sourceName(item.phase, item.step)}: ${formatDuration(item.duration_s)}, success ${formatPercent(item.success.rate)}`}
              tabIndex={-1}
            >
              <i style={{ width: `${((middle - from) / Math.max(1, to - from)) * 100}%`, ["--strength" as never]: `${30 + 70 * (item.success.rate ?? 0)}%` }} />
            </Link>
          );
        })}
      </div>
      <div className="row between faint num">
        <span>{new Date(start).toLocaleTimeString()}</span>
        <span className="legend"><i className="swatch-step" /> rollouts <i className="swatch-train" /> training <i className="swatch-eval" /> evaluation <span>· the stronger, the more success</span></span>
        <span>{new Date(end).toLocaleTimeString()}</span>
      </div>
    </div>
  );
}
