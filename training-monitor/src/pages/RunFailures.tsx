import { useCallback, useMemo } from "react";
import { useQuery } from "../api/cache";
import { failuresPath, rolloutPage, sourcePage } from "../api/paths";
import type { Failures, Run } from "../api/types";
import { MetricChart } from "../charts/MetricChart";
import { paletteColor, type Series } from "../charts/series";
import { words } from "../format";
import { Link, navigate } from "../router";
import { Empty, Loaded, Panel } from "../ui/parts";
import { CountBars } from "./TaskPage";

/** How rollouts and turns fail, by kind and over time. */
export function RunFailures({ run }: { run: Run }) {
  const query = useQuery<Failures>(failuresPath(run.run_id));
  return <Loaded query={query}>{(failures) => <FailureView run={run} failures={failures} />}</Loaded>;
}

function seriesOf(steps: readonly number[], kinds: Record<string, number[]>): Series[] {
  return Object.entries(kinds).map(([name, counts], index) => ({
    label: words(name),
    color: paletteColor(index),
    points: steps.map((step, row) => ({ x: step, y: counts[row] ?? null })),
  }));
}

function totals(kinds: Record<string, number[]>): { name: string; count: number }[] {
  return Object.entries(kinds)
    .map(([name, counts]) => ({ name, count: counts.reduce((sum, count) => sum + count, 0) }))
    .sort((a, b) => b.count - a.count);
}

function FailureView({ run, failures }: { run: Run; failures: Failures }) {
  const open = useCallback((x: number) => navigate(sourcePage(run.run_id, "step", x)), [run.run_id]);
  const ends = useMemo(() => seriesOf(failures.steps, failures.stop_reasons), [failures]);
  const turns = useMemo(() => seriesOf(failures.steps, failures.turn_failures), [failures]);
  return (
    <>
      <div className="columns">
        <KindPanel title="How rollouts end" series={ends} counts={totals(failures.stop_reasons)} open={open} none="No rollout has ended yet." />
        <KindPanel title="Answers that could not be read" series={turns} counts={totals(failures.turn_failures)} open={open} none="Every answer so far was understood." />
      </div>
      <Panel title="Faults of the infrastructure" flush>
        {failures.errors.length === 0 ? (
          <Empty title="No fault"><p>No rollout was lost to a device, the model server or a task.</p></Empty>
        ) : (
          <div className="table-scroll">
            <table className="data">
              <thead><tr><th>Message</th><th className="right">Count</th><th>Latest</th></tr></thead>
              <tbody>
                {failures.errors.map((error) => (
                  <tr key={error.message}>
                    <td className="wrap mono">{error.message}</td>
                    <td className="right">{error.count}</td>
                    <td><Link className="text-link" data-row to={rolloutPage(run.run_id, error.last_rollout_id)}>open rollout</Link></td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        )}
      </Panel>
    </>
  );
}

function KindPanel(props: { title: string; series: Series[]; counts: { name: string; count: number }[]; open: (x: number) => void; none: string }) {
  return (
    <Panel title={props.title}>
      {props.series.length === 0 ? (
        <p className="dim">{props.none}</p>
      ) : (
        <div className="stack">
          <MetricChart title="Per step" series={props.series} onPick={props.open} height={170} />
          <CountBars counts={props.counts} />
        </div>
      )}
    </Panel>
  );
}
