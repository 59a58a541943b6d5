import { useCallback, useMemo } from "react";
import { useQuery } from "../api/cache";
import { failuresPath, rolloutPage, sourcePage } from "../api/paths";
import type { FailureCounts, Failures, Run } from "../api/types";
import { MetricChart } from "../charts/MetricChart";
import { paletteColor, type Series } from "../charts/series";
import { plural, words } from "../format";
import { Link, navigate, useSearchParam } from "../router";
import { Empty, Loaded, Panel, Segments } from "../ui/parts";
import { CountBars } from "./TaskPage";

/** How rollouts and turns fail, by kind and over time. */
export function RunFailures({ run }: { run: Run }) {
  const query = useQuery<Failures>(failuresPath(run.run_id));
  return <Loaded query={query}>{(failures) => <FailureView run={run} failures={failures} />}</Loaded>;
}

function seriesOf(steps: readonly number[], kinds: Record<string, number[]>, breaks: readonly number[]): Series[] {
  return Object.entries(kinds).map(([name, counts], index) => ({
    label: words(name),
    color: paletteColor(index),
    points: steps.map((step, row) => ({ x: step, y: counts[row] ?? null })),
    breaks,
  }));
}

const PARTS = [
  { value: "", label: "Training steps" },
  { value: "evaluations", label: "Evaluations" },
] as const;

function totals(kinds: Record<string, number[]>): { name: string; count: number }[] {
  return Object.entries(kinds)
    .map(([name, counts]) => ({ name, count: counts.reduce((sum, count) => sum + count, 0) }))
    .sort((a, b) => b.count - a.count);
}

function FailureView({ run, failures }: { run: Run; failures: Failures }) {
  const [part, setPart] = useSearchParam("of");
  const isTraining = part !== "evaluations";
  const counts = isTraining ? failures.training : failures.evaluations;
  const open = useCallback(
    (x: number) => {
      const phase = run.evaluations.find((one) => one.step === x)?.phase ?? "eval";
      navigate(sourcePage(run.run_id, isTraining ? "step" : phase, x));
    },
    [run.run_id, run.evaluations, isTraining],
  );
  const kinds = useMemo(() => seriesOf(counts.steps, counts.kinds, run.curve_ends), [counts, run.curve_ends.join()]);
  const turns = useMemo(() => seriesOf(counts.steps, counts.turn_failures, run.curve_ends), [counts, run.curve_ends.join()]);
  return (
    <>
      <div className="row wrap">
        <Segments label="Rollouts of" value={isTraining ? "" : "evaluations"} options={PARTS} onChange={setPart} />
        <span className="dim" data-testid="failure-share">{shareText(counts, isTraining)}</span>
      </div>
      <div className="columns">
        <KindPanel title="How rollouts fail" series={kinds} counts={totals(counts.kinds)} open={open} none="No rollout has failed yet." />
        <KindPanel title="Unparseable responses" series={turns} counts={totals(counts.turn_failures)} open={open} none="Every response so far could be parsed." />
      </div>
      <Panel title="Infrastructure faults, in training and in evaluations" flush>
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
            {failures.num_messages > failures.errors.length && <p className="dim panel-body">The {failures.errors.length} most frequent of {failures.num_messages} messages.</p>}
          </div>
        )}
      </Panel>
    </>
  );
}

/** "412 of 640 rollouts of training steps failed; evaluations are counted separately." */
function shareText(counts: FailureCounts, isTraining: boolean): string {
  const sum = (values: readonly number[]) => values.reduce((total, value) => total + value, 0);
  const [all, won] = [sum(counts.num_rollouts), sum(counts.num_successes)];
  const faults = sum(counts.num_faults);
  const [these, others] = isTraining ? ["training steps", "evaluations"] : ["evaluations", "training steps"];
  return `${(all - won).toLocaleString("en-US")} of ${plural(all, "rollout")} of ${these} failed${faults ? `, and ${plural(faults, "more rollout")} ended in an infrastructure fault` : ""}; ${others} are counted separately.`;
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
