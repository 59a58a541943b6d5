import { useMemo } from "react";
import { useQuery } from "../api/cache";
import { comparePage, comparePath, metricsPath, runPage, runsPath, sourcePage } from "../api/paths";
import type { MetricSeries, Page, RunComparison, RunSummary } from "../api/types";
import { ChartControls, useChartView, type ChartView } from "../charts/controls";
import { MetricChart } from "../charts/MetricChart";
import { paletteColor, type Series } from "../charts/series";
import { formatPercent } from "../format";
import { Link, navigate, useSearchParam } from "../router";
import { Icon } from "../ui/icons";
import { Empty, Loaded, PageHead, Panel } from "../ui/parts";
import { ConfigTable } from "./RunConfig";
import { points } from "./RunCharts";

const MAX_RUNS = 6;
const UNIT: [number, number] = [0, 1.02];
const percent = (value: number) => formatPercent(value);
const CHARTS = [
  { name: "reward/mean", title: "Reward" },
  { name: "policy/entropy_estimate", title: "Entropy" },
  { name: "loss/total", title: "Loss" },
  { name: "policy/parity_mean_abs", title: "Parity" },
  { name: "policy/kl_sampling_training/mean", title: "KL sampler to trainer" },
  { name: "optim/grad_norm", title: "Gradient norm" },
  { name: "reward/constant_group_frac", title: "Constant groups" },
  { name: "rollout/num_turns/mean", title: "Turns per rollout" },
  { name: "time/step_s", title: "Step time" },
  { name: "time/rollouts_per_hour", title: "Rollouts per hour" },
];

/** Several runs on shared axes, and what was set differently. */
export function ComparePage() {
  const [runsText] = useSearchParam("runs");
  const [find, setFind] = useSearchParam("find");
  const ids = useMemo(() => runsText.split(",").filter(Boolean).slice(0, MAX_RUNS), [runsText]);
  const comparison = useQuery<RunComparison>(ids.length > 0 ? comparePath(ids) : null);
  const choices = useQuery<Page<RunSummary>>(runsPath({}));
  const others = (choices.data?.items ?? []).filter((run) => !ids.includes(run.run_id));
  const add = (
    <select className="field" aria-label="Add a run" value="" disabled={ids.length >= MAX_RUNS} onChange={(event) => navigate(comparePage([...ids, event.target.value]), { replace: true })}>
      <option value="">Add a run…</option>
      {others.map((run) => <option key={run.run_id} value={run.run_id}>{run.run_name}</option>)}
    </select>
  );
  return (
    <>
      <PageHead crumbs={[{ label: "Runs", to: "/" }, { label: "Compare" }]} title="Compare runs" actions={add} />
      {ids.length === 0 ? (
        <Empty title="No run is chosen"><p>Add runs above, or tick them in the list of runs.</p></Empty>
      ) : (
        <Loaded query={comparison}>
          {(both) => (
            <>
              <RunChips runs={both.runs} />
              <ComparedCharts runs={both.runs} />
              <Panel
                title="Settings that differ"
                flush
                actions={<input className="field" type="search" aria-label="Find a setting" placeholder="Find a setting" value={find} onChange={(event) => setFind(event.target.value)} />}
              >
                <ConfigTable names={both.runs.map((run) => run.run_name)} rows={both.config} find={find} only={both.runs.length > 1} />
              </Panel>
            </>
          )}
        </Loaded>
      )}
    </>
  );
}

function RunChips({ runs }: { runs: readonly RunSummary[] }) {
  const ids = runs.map((run) => run.run_id);
  return (
    <ul className="row wrap">
      {runs.map((run, index) => (
        <li key={run.run_id} className="run-chip">
          <i style={{ background: paletteColor(index) }} />
          <Link to={runPage(run.run_id)}>{run.run_name}</Link>
          <span className="faint num">{formatPercent(run.last_eval?.rate ?? run.success_rate)}</span>
          <button type="button" className="button quiet icon small" aria-label={`Leave out ${run.run_name}`} onClick={() => navigate(comparePage(ids.filter((id) => id !== run.run_id)), { replace: true })}>
            <Icon name="close" size={12} />
          </button>
        </li>
      ))}
    </ul>
  );
}

function ComparedCharts({ runs }: { runs: readonly RunSummary[] }) {
  const view = useChartView();
  const slots = Array.from({ length: MAX_RUNS }, (_, index) => runs[index]);
  // one hook per place, in the same order at every render
  const all = slots.map((run) => useQuery<MetricSeries>(run ? metricsPath(run.run_id) : null).data);
  const loaded = runs.flatMap((run, index) => {
    const metrics = all[index];
    return metrics ? [{ run, metrics, color: paletteColor(index) }] : [];
  });
  const key = all.map((metrics, index) => `${runs[index]?.run_id}:${metrics?.steps.length}:${metrics?.evaluations.length}`).join();
  const success = useMemo(
    () => loaded.map(({ run, metrics, color }): Series => ({ label: run.run_name, color, points: points(metrics.success) })),
    [key],
  );
  const evals = useMemo(
    () => loaded.map(({ run, metrics, color }): Series => ({ label: run.run_name, color, points: points(metrics.evaluations), dots: true })),
    [key],
  );
  const open = (x: number, series: Series, phase: string) => {
    const run = runs.find((one) => one.run_name === series.label);
    if (run) navigate(sourcePage(run.run_id, phase, x));
  };
  return (
    <>
      <ChartControls view={view} />
      <div className="chart-grid two">
        <Chart title="Success in training" series={success} view={view} unit pick={(x, series) => open(x, series, "step")} />
        <Chart title="Success on held-out tasks" series={evals} view={view} unit pick={(x, series) => open(x, series, x === 0 ? "baseline" : "eval")} />
      </div>
      <div className="chart-grid">
        {CHARTS.filter((chart) => loaded.some(({ metrics }) => metrics.series[chart.name])).map((chart) => (
          <MetricOfRuns key={chart.name} chart={chart} loaded={loaded} stamp={key} view={view} pick={(x, series) => open(x, series, "step")} />
        ))}
      </div>
    </>
  );
}

type LoadedRun = { run: RunSummary; metrics: MetricSeries; color: string };

function MetricOfRuns(props: { chart: { name: string; title: string }; loaded: LoadedRun[]; stamp: string; view: ChartView; pick: (x: number, series: Series) => void }) {
  const { chart, loaded, stamp } = props;
  const series = useMemo(
    () =>
      loaded.map(({ run, metrics, color }): Series => ({
        label: run.run_name,
        color,
        points: metrics.steps.map((step, row) => ({ x: step, y: metrics.series[chart.name]?.[row] ?? null })),
      })),
    [chart.name, stamp],
  );
  return <Chart title={chart.title} hint={chart.name} series={series} view={props.view} pick={props.pick} />;
}

function Chart(props: { title: string; hint?: string; series: Series[]; view: ChartView; unit?: boolean; pick: (x: number, series: Series) => void }) {
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
        format={props.unit ? percent : undefined}
        yRange={props.unit ? UNIT : undefined}
      />
    </div>
  );
}
