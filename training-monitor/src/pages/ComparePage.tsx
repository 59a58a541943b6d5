import { useMemo } from "react";
import { useQuery } from "../api/cache";
import { comparePage, comparePath, metricsPath, runPage, sourcePage } from "../api/paths";
import type { MetricSeries, RunComparison, RunSummary } from "../api/types";
import { formatOf, type ChartUnit } from "../charts/catalog";
import { ChartControls, useChartView, type ChartView } from "../charts/controls";
import { MetricChart } from "../charts/MetricChart";
import { PALETTE, paletteColor, type Series } from "../charts/series";
import { formatPercent } from "../format";
import { Link, navigate, useSearchParam } from "../router";
import { runLabels } from "../runs";
import { Icon } from "../ui/icons";
import { Empty, Loaded, PageHead, Panel } from "../ui/parts";
import { AddRun } from "../ui/runChoices";
import { ConfigTable } from "./RunConfig";
import { CurveNote, points } from "./RunCharts";

const MAX_RUNS = PALETTE.length; // a colour for each
const MAX_ASKED = 12; // by the API, at once
const UNIT: [number, number] = [0, 1.02];
const CHARTS: readonly (ChartUnit & { name: string; title: string })[] = [
  { name: "reward/mean", title: "Reward" },
  { name: "policy/entropy", title: "Entropy" },
  { name: "policy/entropy_estimate", title: "Entropy estimate" },
  { name: "loss/total", title: "Loss" },
  { name: "policy/parity_mean_abs", title: "Parity" },
  { name: "policy/kl_sampling_training/mean", title: "KL sampler to trainer" },
  { name: "optim/grad_norm", title: "Gradient norm" },
  { name: "reward/constant_group_frac", title: "Constant groups", percent: true },
  { name: "rollout/num_turns/mean", title: "Turns per rollout" },
  { name: "time/step_s", title: "Step time", seconds: true },
  { name: "time/rollouts_per_hour", title: "Rollouts per hour" },
];

/** Several runs on shared axes, and what was set differently. */
export function ComparePage() {
  const [runsText] = useSearchParam("runs");
  const [find, setFind] = useSearchParam("find");
  const asked = useMemo(() => [...new Set(runsText.split(",").filter(Boolean))], [runsText]);
  const ids = asked.slice(0, MAX_RUNS);
  const comparison = useQuery<RunComparison>(asked.length > 0 ? comparePath(asked.slice(0, MAX_ASKED)) : null);
  const add = <AddRun taken={ids} most={MAX_RUNS} onAdd={(runId) => navigate(comparePage([...ids, runId]), { replace: true })} />;
  return (
    <>
      <PageHead crumbs={[{ label: "Runs", to: "/" }, { label: "Compare" }]} title="Compare runs" actions={add} />
      {ids.length === 0 ? (
        <Empty title="No run selected"><p>Add runs above, or tick them in the list of runs.</p></Empty>
      ) : (
        <Loaded query={comparison}>
          {(found) => <Comparison found={found} numAsked={asked.length} find={find} setFind={setFind} />}
        </Loaded>
      )}
    </>
  );
}

/** The first runs, as many as there are colours; those that do not fit are named. */
function Comparison(props: { found: RunComparison; numAsked: number; find: string; setFind: (text: string) => void }) {
  const { found, numAsked, find, setFind } = props;
  const runs = found.runs.slice(0, MAX_RUNS);
  const labels = useMemo(() => runLabels(found.runs), [found.runs]);
  const left = found.runs.slice(MAX_RUNS).map((run) => labels.get(run.run_id));
  const unnamed = numAsked - found.runs.length - found.unknown.length;
  const rows = found.config.map((row) => {
    const values = row.values.slice(0, MAX_RUNS);
    return { ...row, values, is_different: new Set(values.map((value) => JSON.stringify(value))).size > 1 };
  });
  return (
    <>
      {found.unknown.length > 0 && (
        <div className="notice warn" role="status"><b>There is no run {found.unknown.join(", ")}.</b> It may be in a folder that this monitor does not show.</div>
      )}
      {numAsked - found.unknown.length > runs.length && (
        <div className="notice warn" role="status">
          <b>{runs.length} of {numAsked - found.unknown.length} runs are shown.</b> Left out: {left.join(", ")}{unnamed > 0 ? ` and ${unnamed} more` : ""}. Remove one to make room.
        </div>
      )}
      <RunChips runs={runs} labels={labels} />
      {runs.map((run) => <CurveNote key={run.run_id} of={labels.get(run.run_id)} ends={run.curve_ends} />)}
      <ComparedCharts runs={runs} labels={labels} />
      <Panel
        title={runs.length > 1 ? "Settings that differ" : "Settings"}
        flush
        actions={<input className="field" type="search" aria-label="Find a setting" placeholder="Find a setting" value={find} onChange={(event) => setFind(event.target.value)} />}
      >
        <ConfigTable names={runs.map((run) => labels.get(run.run_id) ?? run.run_name)} rows={rows} find={find} only={runs.length > 1} />
      </Panel>
    </>
  );
}

type Labelled = { runs: readonly RunSummary[]; labels: ReadonlyMap<string, string> };

function RunChips({ runs, labels }: Labelled) {
  const [asked] = useSearchParam("runs");
  const ids = [...new Set(asked.split(",").filter(Boolean))];
  return (
    <ul className="row wrap">
      {runs.map((run, index) => (
        <li key={run.run_id} className="run-chip">
          <i style={{ background: paletteColor(index) }} />
          <Link to={runPage(run.run_id)}>{labels.get(run.run_id)}</Link>
          <span className="faint num">{formatPercent(run.last_eval?.rate ?? run.success_rate)}</span>
          <button type="button" className="button quiet icon small" aria-label={`Remove ${labels.get(run.run_id)}`} onClick={() => navigate(comparePage(ids.filter((id) => id !== run.run_id)), { replace: true })}>
            <Icon name="close" size={12} />
          </button>
        </li>
      ))}
    </ul>
  );
}

function ComparedCharts({ runs, labels }: Labelled) {
  const view = useChartView();
  const slots = Array.from({ length: MAX_RUNS }, (_, index) => runs[index]);
  // one hook per place, in the same order at every render
  const queries = slots.map((run) => useQuery<MetricSeries>(run ? metricsPath(run.run_id) : null));
  const all = queries.map((query) => query.data);
  const waiting = queries.some((query, index) => runs[index] && !query.data && !query.error);
  const loaded = runs.flatMap((run, index) => {
    const metrics = all[index];
    return metrics ? [{ metrics, color: paletteColor(index), id: run.run_id, breaks: run.curve_ends, label: labels.get(run.run_id) ?? run.run_name }] : [];
  });
  const key = all.map((metrics, index) => `${runs[index]?.run_id}:${metrics?.steps.length}:${metrics?.evaluations.length}`).join();
  const success = useMemo(
    () => loaded.map(({ metrics, ...one }): Series => ({ ...one, points: points(metrics.success) })),
    [key, labels],
  );
  const evals = useMemo(
    () => loaded.map(({ metrics, ...one }): Series => ({ ...one, points: points(metrics.evaluations), dots: true })),
    [key, labels],
  );
  const open = (x: number, series: Series, phase: string) => series.id && navigate(sourcePage(series.id, phase, x));
  if (waiting) return <div className="skeleton" role="status" aria-label="Loading" style={{ height: 420 }} />;
  return (
    <>
      <ChartControls view={view} />
      <div className="chart-grid two">
        <Chart title="Success in training" series={success} view={view} unit={{ percent: true }} isShare pick={(x, series) => open(x, series, "step")} />
        <Chart title="Success on held-out tasks" series={evals} view={view} unit={{ percent: true }} isShare pick={(x, series) => open(x, series, x === 0 ? "baseline" : "eval")} />
      </div>
      <div className="chart-grid">
        {CHARTS.filter((chart) => loaded.some(({ metrics }) => metrics.series[chart.name])).map((chart) => (
          <MetricOfRuns key={chart.name} chart={chart} loaded={loaded} stamp={key} view={view} pick={(x, series) => open(x, series, "step")} />
        ))}
      </div>
    </>
  );
}

type LoadedRun = { id: string; label: string; metrics: MetricSeries; color: string; breaks: readonly number[] };

function MetricOfRuns(props: { chart: (typeof CHARTS)[number]; loaded: LoadedRun[]; stamp: string; view: ChartView; pick: (x: number, series: Series) => void }) {
  const { chart, loaded, stamp } = props;
  const series = useMemo(
    () =>
      loaded.map(({ metrics, ...one }): Series => ({
        ...one,
        points: metrics.series[chart.name] ? metrics.steps.map((step, row) => ({ x: step, y: metrics.series[chart.name]?.[row] ?? null })) : [],
      })),
    [chart.name, stamp],
  );
  return <Chart title={chart.title} hint={chart.name} series={series} view={props.view} unit={chart} pick={props.pick} />;
}

function Chart(props: { title: string; hint?: string; series: Series[]; view: ChartView; unit: ChartUnit; isShare?: boolean; pick: (x: number, series: Series) => void }) {
  const { view } = props;
  return (
    <div className="panel chart-panel">
      <MetricChart
        title={props.title}
        hint={props.hint}
        series={props.series}
        smoothing={view.smoothing}
        log={view.log}
        range={view.range}
        onRange={view.setRange}
        onPick={props.pick}
        format={formatOf(props.unit)}
        yRange={props.isShare ? UNIT : undefined}
      />
    </div>
  );
}
